"""Tool calls, judged by Python's own json; whatever tokens cut, at every token."""

import json
import random
from typing import Any

import pytest
from answers import NAMES, THINK, TOOLS, put_together, rules, seen, spelt, stream, whole, with_markers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pellucid.server.generation import Tool
from pellucid.server.parts import Part
from pellucid.server.tool_json import CallReader, JsonReader, NotJson
from pellucid.server.tool_prompt import definitions, explain, spell_out
from pellucid.server.tools import HERMES, LLAMA, OURS, ToolReader, find_format, new_call_id

# -- JSON -------------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def refuse(name: str) -> None:
    raise ValueError(name)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def reads(text: str) -> bool:
    """Whether the reader takes it all and is done with its last character; a number is done with what follows it."""
    reader = JsonReader()
    try:
        for i, character in enumerate(text + " "):
            if reader.done:
                return not text[i:].strip(" \t\n\r")
            reader.push(character)
    except NotJson:
        return False
    return reader.done


@settings(max_examples=60)
@given(values, st.sampled_from([None, 1]), st.booleans())
def test_what_json_writes_is_read(value: Any, indent: int | None, escape: bool) -> None:
    assert reads(json.dumps(value, indent=indent, ensure_ascii=escape))


@settings(max_examples=100)
@given(st.text('{}[]",:\\ u0019.-+eEtrufalsn/\n\x01é', max_size=8))
@example("01")
@example("-")
@example("1.e5")
@example('"\\u12g4"')
@example("[1,]")
@example('{"a":1,}')
@example('{"a" 1}')
@example("nul")
@example("[]]")
@example("truefalse")
@example('"\x01"')
@example('"\n"')
def test_the_reader_takes_what_json_takes_and_nothing_else(text: str) -> None:
    assert reads(text) == is_json(text)


@settings(max_examples=100)
@given(values, st.data())
def test_a_changed_character_is_judged_as_json_judges_it(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from(list('{}[]",:\\ 0-.e\n') + [""])) + text[at + 1 :]
    assert reads(changed) == is_json(changed)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=4), values, max_size=3), st.permutations(["name", "arguments", "extra"]))
def test_the_arguments_of_a_call_are_its_text_whatever_the_order_of_keys(
    arguments: dict[str, Any], order: list[str]
) -> None:
    written = json.dumps(arguments, ensure_ascii=False, indent=1)
    members = {"name": '"sum"', "arguments": written, "extra": '{"name": 1, "arguments": [{}]}'}
    text = "{" + ", ".join(f'"{key}": {members[key]}' for key in order) + "}"
    reader = CallReader(NAMES, strict=False)
    for character in text:
        assert not reader.done
        reader.push(character)
    assert reader.done and reader.name == "sum" and text[reader.start : reader.end] == written


# -- golden answers, cut at every token -------------------------------------------------------------------------------

ARGUMENTS = [
    {},
    {"city": "東京"},
    {"q": 'a "quote" and {braces} and [brackets]'},
    {"s": "back\\slash \n line \t </tool_call> <tool_call> ; é 😀"},
    {"deep": {"a": [{"b": {"c": [[], {}, None, True, -1.5e10]}}]}, "": 0},
]


def call(form: str, name: str, arguments: str) -> str:
    if form == "llama":
        return f'{{"name": "{name}", "parameters": {arguments}}}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("form", ["hermes", "llama"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("escape", [False, True])
def test_a_call_is_told_as_it_was_written(form: str, arguments: dict[str, Any], escape: bool) -> None:
    tokenizer, written = with_markers(), json.dumps(arguments, ensure_ascii=escape)
    text = call(form, "weather", written)
    for seed in range(3):
        ids = [*spelt(tokenizer, text, random.Random(seed)), tokenizer.eos_id]
        answer = whole(rules(tokenizer, tools=TOOLS[form]), ids, "stop")
        assert seen(answer) == ("", "", [("weather", written)])
        assert answer.ending.reason == "tool_calls" and answer.ending.num_tokens == len(ids)
        assert json.loads(answer.calls[0].arguments) == arguments


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_cut_at_every_token_a_call_is_told_as_far_as_it_is_known(form: str) -> None:
    tokenizer, arguments = with_markers(), '{"q": "a } { \\" </tool_call>", "n": [1, {}]}'
    text = call(form, "sum", arguments)
    ids = spelt(tokenizer, text, random.Random(4))
    named = 0
    for cut in range(len(ids)):
        answer = whole(rules(tokenizer, tools=TOOLS[form]), ids[:cut])
        content, _, calls = seen(answer)
        assert answer.ending.reason == "length"
        told = tokenizer.decode(ids[:cut])
        if '"sum"' not in told:  # not even the name: it may be anything
            assert calls == [] and content == told
            continue
        named += 1
        assert content == "" and len(calls) == 1 and calls[0][0] == "sum" and arguments.startswith(calls[0][1])
        known = told.partition('"arguments": ' if form == "hermes" else '"parameters": ')[2]
        assert calls[0][1] == known[: len(arguments)]
    assert named > 5


def test_the_name_is_told_before_the_arguments_come_and_each_fragment_at_once() -> None:
    tokenizer = with_markers()
    reader, seen_ = ToolReader(HERMES, NAMES, parallel=True), []
    text = '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>'
    for i, character in enumerate(text):
        seen_ += [
            (part.kind, part.text or part.tool_name, i) for part in reader.push(Part("content", character, i, i + 1))
        ]
    assert seen_[0] == ("tool_start", "sum", text.index('"sum"') + 4)
    assert [(text_, i) for _, text_, i in seen_[1:]] == [(c, text.index('{"a"') + k) for k, c in enumerate('{"a": 1}')]
    assert reader.num_held == 0 and reader.num_complete == 1 and tokenizer is with_markers()


HERMES_CALL = call("hermes", "sum", '{"a": 1}')
LLAMA_CALL = call("llama", "sum", '{"a": 1}')
GOLDEN = {
    "several": ("hermes", f"{HERMES_CALL}\n{call('hermes', 'noop', '{}')}\n", ("", [("sum", '{"a": 1}'), ("noop", "{}")])),
    "content before": ("hermes", f"Let me see.\n\n{HERMES_CALL}", ("Let me see.", [("sum", '{"a": 1}')])),
    "content behind": ("hermes", f"{HERMES_CALL}\n\nDone.", ("Done.", [("sum", '{"a": 1}')])),
    "no arguments": ("hermes", '<tool_call>{"name": "noop"}</tool_call>', ("", [("noop", "{}")])),
    "null arguments": ("hermes", '<tool_call>{"name": "noop", "arguments": null}</tool_call>', ("", [("noop", "{}")])),
    "parameters": ("hermes", '<tool_call>{"parameters": {"a": 2}, "name": "sum"}</tool_call>', ("", [("sum", '{"a": 2}')])),
    "no closing marker": ("hermes", '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}', ("", [("sum", '{"a": 1}')])),
    "a brace is missing": (
        "hermes", '<tool_call>\n{"name": "sum", "arguments": {"a": 1}\n</tool_call>', ("", [("sum", '{"a": 1}')])
    ),
    "not JSON": ("hermes", "<tool_call>\nsum(1)\n</tool_call>", ("<tool_call>\nsum(1)\n</tool_call>", [])),
    "an unknown function": (
        "hermes", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
        ('<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>', []),
    ),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', [])),
    "a list": ("hermes", '<tool_call>["sum"]</tool_call>', ('<tool_call>["sum"]</tool_call>', [])),
    "broken, then whole": ("hermes", f"<tool_call>oops {HERMES_CALL}", ("<tool_call>oops", [("sum", '{"a": 1}')])),
    "arguments that are no object": (
        "hermes", '<tool_call>{"name": "sum", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "sum", "arguments": [1]}</tool_call>', [("sum", "")]),
    ),
    "broken in the arguments": (
        "hermes", '<tool_call>{"name": "sum", "arguments": {"a": oops}}</tool_call>',
        ("oops}}</tool_call>", [("sum", '{"a": ')]),
    ),
    "a marker that is none": ("hermes", "a <tool_ b <tool_call", ("a <tool_ b <tool_call", [])),
    "two with a semicolon": (
        "llama", f"{LLAMA_CALL}; {call('llama', 'noop', '{}')}", ("", [("sum", '{"a": 1}'), ("noop", "{}")])
    ),
    "behind the tag": ("llama", f"<|python_tag|>{LLAMA_CALL}", ("", [("sum", '{"a": 1}')])),
    "content, then the tag": ("llama", f"Well. <|python_tag|>{LLAMA_CALL}", ("Well.", [("sum", '{"a": 1}')])),
    "with a type": (
        "llama", '{"type": "function", "name": "sum", "parameters": {"a": 1}}', ("", [("sum", '{"a": 1}')])
    ),
    "an answer in JSON": ("llama", '{"city": "Paris", "n": 1}', ('{"city": "Paris", "n": 1}', [])),
    "JSON with a name later": (
        "llama", '{"n": 1, "name": "sum", "parameters": {}}', ('{"n": 1, "name": "sum", "parameters": {}}', [])
    ),
    "the last brace is missing": (
        "hermes", '<tool_call>\n{"name": "sum", "arguments": {"a": 1}', ("", [("sum", '{"a": 1}')])
    ),
    "a name in JSON": ("llama", '{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', [])),
    "JSON later in the text": ("llama", f"See: {LLAMA_CALL}", (f"See: {LLAMA_CALL}", [])),
    "text behind": ("llama", f"{LLAMA_CALL} done; ok", ("done; ok", [("sum", '{"a": 1}')])),
    "white space only": ("hermes", " \n ", (" \n ", [])),
}  # fmt: skip


@pytest.mark.parametrize("case", list(GOLDEN))
def test_each_way_to_write_calls_is_read(case: str) -> None:
    form, text, (content, calls) = GOLDEN[case]
    tokenizer = with_markers()
    for seed in range(4):
        ids = spelt(tokenizer, text, random.Random(seed))
        answer = whole(rules(tokenizer, tools=TOOLS[form]), [*ids, tokenizer.eos_id], "stop")
        assert seen(answer) == (content, "", calls)
        complete = any(arguments and is_json(arguments) for _, arguments in calls)
        assert answer.ending.reason == ("tool_calls" if complete else "stop")


def test_calls_beyond_the_only_one_that_is_wanted_do_not_come() -> None:
    tokenizer = with_markers()
    ids = spelt(tokenizer, f"{HERMES_CALL}\n{HERMES_CALL}", random.Random(0))
    told = [
        piece for pieces in stream(rules(tokenizer, tools=TOOLS["hermes"], parallel=False), ids) for piece in pieces
    ]
    answer = put_together(told)
    assert seen(answer) == ("", "", [("sum", '{"a": 1}')])
    assert answer.ending.reason == "tool_calls" and answer.ending.num_tokens < len(ids) / 2 + 3


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "\n", " ", '{"name": "sum", ', '"arguments": {"a": ', "1}}", "}", '{"name": "noop"}', "x",
    "<think>", "</think>", "<tool_", '"', "\\", "é", "東京", ";", "{", "<|python_tag|>", '{"name": "sum", "parameters": {}}', "STOP",
]  # fmt: skip


@settings(max_examples=120)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    st.sampled_from(["hermes", "llama"]),
    st.sampled_from(["before", "inside", "after"]),
    st.integers(0, 10**6),
)
@example('<think>x</think><tool_call>{"name": "sum", "arguments": {"a": STOP', "hermes", "before", 1)
def test_the_same_text_is_taken_apart_alike_however_it_is_cut(text: str, form: str, where: Any, seed: int) -> None:
    tokenizer, cut = with_markers(), random.Random(seed)
    if form == "hermes":
        text = text.replace("<|python_tag|>", "")  # a control token there, which does not show
    ways = rules(tokenizer, tools=TOOLS[form], reasoning=(THINK, where), stop=("STOP",))
    one, other = spelt(tokenizer, text, cut), spelt(tokenizer, text, cut)
    first, second = whole(ways, one), whole(ways, other)
    assert seen(first) == seen(second) and first.ending.reason == second.ending.reason
    told = [piece for pieces in stream(ways, one) for piece in pieces]
    for size in range(len(told)):  # nothing that was told is taken back: an earlier end only leaves things out
        part, full = seen(put_together(told[:size])), seen(first)
        assert full[0].startswith(part[0]) and full[1].startswith(part[1]) and len(part[2]) <= len(full[2])
    if not all(is_json(arguments) for _, arguments in seen(first)[2]):
        return  # the rest of a call that was cut, or broke, after it was told
    shown = "".join(seen(first)[:2]) + "".join(name + arguments for name, arguments in seen(first)[2])
    for word in ("x", "é", "東京"):
        assert shown.count(word) == text.partition("STOP")[0].count(word), (text, seen(first))


# -- telling tools to a model -----------------------------------------------------------------------------------------


def test_the_format_is_that_of_the_template() -> None:
    hermes = (
        '{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}'
    )
    llama = 'Environment: ipython {"name": function name, "parameters": dictionary}'
    assert find_format(hermes) is HERMES and find_format(llama) is LLAMA
    assert find_format(hermes.replace("{\\", "<function=x>")) is OURS  # Qwen3-Coder's form looks alike
    assert find_format("{{ messages }}") is OURS and find_format(None) is OURS


WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})


def test_a_model_without_a_form_of_its_own_is_told_the_tools_and_reads_back_what_it_wrote() -> None:
    text = explain([WEATHER, Tool("noop")], parallel=True)
    lines = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == [entry["function"] for entry in definitions([WEATHER, Tool("noop")])]
    example = ToolReader(OURS, ["the function to call"], parallel=True)
    assert [part.kind for part in example.push(Part("content", text, 0, len(text)))].count("tool_start") == 1
    assert "one call at most" in explain([WEATHER], parallel=False) and "one call at most" not in text


def test_calls_and_results_of_the_past_are_spelt_in_the_form_that_is_read() -> None:
    arguments = {"city": 'a "b" 東京'}
    past = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}},
            {"id": "call_2", "type": "function", "function": {"name": "noop", "arguments": {}}},
        ]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        {"role": "tool", "content": "", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "Rain."},
    ]  # fmt: skip
    told = spell_out(past, "TOOLS")
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "assistant"]
    assert told[0]["content"] == "Be brief.\n\nTOOLS" and past[0]["content"] == "Be brief."
    assert told[3]["content"] == "<tool_response>\nrain\n</tool_response>\n<tool_response>\n\n</tool_response>"
    assert "tool_calls" not in told[2]
    reader = ToolReader(OURS, NAMES, parallel=True)
    parts = reader.push(Part("content", told[2]["content"], 0, len(told[2]["content"])))
    assert parts[0].text == "I look." and reader.num_complete == 2
    assert json.loads(next(part.text for part in parts if part.kind == "tool_arguments")) == arguments
    assert spell_out(past[1:2], "TOOLS")[0] == {"role": "system", "content": "TOOLS"}
    assert spell_out(past[:2], None) == past[:2]


def test_ids_of_calls_are_their_own() -> None:
    ids = {new_call_id() for _ in range(200)}
    assert len(ids) == 200 and all(len(id_) == 29 and id_[:5] == "call_" and id_[5:].isalnum() for id_ in ids)
