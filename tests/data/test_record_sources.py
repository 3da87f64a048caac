"""The built-in examples: right answers are right, wrong ones wrong, and what is held out stays out."""

import re
from typing import Any

import pytest

from pellucid.data.documents import RawRecord, ReadLog
from pellucid.data.samples import check_story
from pellucid.data.samples.arithmetic import is_held_out
from pellucid.data.sources import HasRecords, open_source
from pellucid.errors import ConfigError


def records(name: str, **options: Any) -> list[RawRecord]:
    source = open_source(name, **options)
    assert isinstance(source, HasRecords)
    return list(source.records(ReadLog()))


def sums(text: str) -> list[tuple[str, int, int]]:
    """Expressions in "a + b = c" with what they are and what is said that they are."""
    found = re.findall(r"((\d+) ([+*-]) (\d+)) = (\d+)", text)
    value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    return [(whole, value[sign](int(a), int(b)), int(said)) for whole, a, sign, b, said in found]


def test_arithmetic_has_every_problem_of_two_digits_once_and_holds_pairs_out() -> None:
    found = records("sample:arithmetic")
    asked = {}
    for record in found:
        match = re.fullmatch(r"What is ((\d\d) ([+-]) (\d\d))\?", record.table["prompt"])
        assert match is not None
        a, b = int(match[2]), int(match[4])
        assert int(record.table["answer"]) == (a + b if match[3] == "+" else a - b) >= 0
        asked[match[1]] = record.split
    assert len(asked) == len(found) == 90 * 90 + 90 * 91 // 2
    held_out = {problem for problem, split in asked.items() if split == "val"}
    assert 0.08 < len(held_out) / len(asked) < 0.12
    for problem in held_out:
        a, sign, b = problem.split()
        if sign == "+":
            assert asked[f"{b} + {a}"] == "val", "the other order would give it away"
    assert open_source("sample:arithmetic").total_bytes == pytest.approx(sum(r.num_bytes for r in found), rel=0.02)
    again = records("sample:arithmetic")
    assert [r.table for r in again] == [r.table for r in found]
    assert [r.table for r in records("sample:arithmetic", seed=1)] != [r.table for r in found]


def test_no_problem_that_is_held_out_is_in_the_chats_or_preferences() -> None:
    expressions = [
        expression
        for name in ("sample:chats", "sample:preferences")
        for record in records(name, size="300KB")
        for expression, _, _ in sums(str(record.table))
    ]
    assert len(expressions) > 200
    assert not any(map(is_held_out, expressions))


def test_chats_take_turns_and_their_sums_are_right() -> None:
    found = records("sample:chats", size="200KB", seed=3)
    turns = [len(record.table["messages"]) for record in found]
    assert max(turns) >= 6 and min(turns) == 2
    for record in found:
        roles = [message["role"] for message in record.table["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(real == said for _, real, said in sums(str(record.table)))
    assert sum(record.num_bytes for record in found) == pytest.approx(200_000, abs=3000)
    assert [r.table for r in records("sample:chats", size="200KB", seed=3)] == [r.table for r in found]


def test_of_two_answers_the_chosen_one_is_right_and_the_rejected_one_wrong() -> None:
    kinds = {"story": 0, "fact": 0, "sum": 0}
    for record in records("sample:preferences", size="300KB"):
        prompt, chosen, rejected = (record.table[key][-1]["content"] for key in ("prompt", "chosen", "rejected"))
        assert chosen != rejected
        if sums(chosen):
            kinds["sum"] += 1
            assert all(real == said for _, real, said in sums(chosen))
            assert all(real != said >= 0 for _, real, said in sums(rejected))
            assert sums(chosen)[0][0] == sums(rejected)[0][0] and sums(chosen)[0][0] in prompt
        elif len(chosen) > 200:
            kinds["story"] += 1
            verdicts = [check_story(answer) for answer in (chosen, rejected)]
            named = [verdict.facts is not None and all(
                verdict.facts[fact].split()[-1] in prompt for fact in ("hero", "object")) for verdict in verdicts]  # fmt: skip
            assert named == [True, False]
        else:
            kinds["fact"] += 1
            right, wrong = (set(re.findall(r"\w+", answer.lower())) for answer in (chosen, rejected))
            story = set(re.findall(r"\w+", prompt.rpartition("\n\n")[0].lower()))
            assert (right - wrong) & story, "the chosen answer says what the story says"
            assert wrong - right - story, "the rejected answer says something else"
    assert min(kinds.values()) > 30


def test_what_is_no_text_says_so_and_sizes_are_checked() -> None:
    with pytest.raises(
        ConfigError, match="sample:preferences holds pairs of answers and no text; prepare it with --for dpo"
    ):
        list(open_source("sample:preferences").documents(ReadLog()))
    with pytest.raises(ConfigError, match="size must be a number of bytes"):
        open_source("sample:chats", size="many")
    texts = list(open_source("sample:arithmetic").documents(ReadLog()))
    assert len(texts) == sum(record.split == "train" for record in records("sample:arithmetic"))
