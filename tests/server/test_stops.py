"""Stop strings against a search over the whole text."""

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pellucid.server.stops import StopStrings


def brute(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By looking at every beginning of the text for one that ends with a stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[list[str], str | None]:
    """What each stretch of the text brings, and the end."""
    matcher, told = StopStrings(stops), []
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, end in pairwise(edges):
        released, stop = matcher.push(text[start:end])
        told.append(released)
        if stop is not None:
            return told, stop
    return [*told, matcher.finish()], None


letters = st.text("ab<", max_size=24)


@settings(max_examples=200)
@given(letters, st.lists(st.text("ab<", min_size=1, max_size=6), max_size=4), st.lists(st.integers(0, 30), max_size=6))
@example("aab", ["aab"], [1, 2])
@example("abab<abab", ["abab<ababa", "b<abab"], [])
@example("abcabd"[:3] + "ab<", ["ab<"], list(range(6)))
def test_the_outcome_is_that_of_a_search_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    told, stop = run(text, stops, cuts)
    assert ("".join(told), stop) == brute(text, stops)


@settings(max_examples=150)
@given(letters, st.lists(st.text("ab<", min_size=1, max_size=6), min_size=1, max_size=4))
def test_no_more_is_held_back_than_what_begins_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    released = ""
    for i, character in enumerate(text):
        more, stop = matcher.push(character)
        released += more
        if stop is not None:
            return
        seen = text[: i + 1]
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert released == seen[: len(seen) - longest]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], ("one ", "END")),
        ("one", ["END"], ("one", None)),
        ("one E", ["END"], ("one E", None)),
        ("a b c", ["c", "b"], ("a ", "b")),
        ("xabc", ["bc", "abc"], ("x", "abc")),  # both are complete with the same character
        ("xabcd", ["abcd", "bc"], ("xa", "bc")),  # the first that is complete
        ("東京END", ["京"], ("東", "京")),
    ],
)
def test_the_first_complete_one_counts_and_of_several_the_longest(
    text: str, stops: list[str], expected: tuple[str, str | None]
) -> None:
    told, stop = run(text, stops, list(range(len(text))))
    assert ("".join(told), stop) == expected


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopStrings([])
    assert matcher.push("text") == ("text", None) and matcher.finish() == ""


def test_a_long_answer_that_nearly_stops_everywhere_costs_little() -> None:
    matcher, start = StopStrings(["a" * 1000 + "b"]), time.perf_counter()
    for _ in range(1000):
        matcher.push("a" * 100)
    assert matcher.finish() == "a" * 1000
    assert time.perf_counter() - start < 5  # a search of the whole each time takes minutes
