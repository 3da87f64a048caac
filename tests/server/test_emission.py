"""Answers as pieces: what is told equals what the tokens decode to, at every cut, with each token beside its text."""

import contextlib
import json
import math
import random
import re
from typing import Any

import pytest
from answers import (
    KINDS,
    THINK,
    TOOLS,
    byte_fallback,
    events,
    own,
    put_together,
    rules,
    seen,
    spelt,
    stream,
    whole,
    with_markers,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.inference.request import TokenEvent, TokenLogprob
from pellucid.server.drawn_text import prompt_tokens
from pellucid.server.emission import Emitter
from pellucid.tokenizer import Tokenizer
from pellucid.tokenizer.fast import byte_symbols

ids_of = st.lists(st.integers(0, 10**6), max_size=30)


def drawn(tokenizer: Tokenizer, numbers: list[int]) -> list[int]:
    """Random ids, half of them single bytes, but for those that end an answer."""
    size = tokenizer.vocab_size
    found = [number % size if number % 2 else 3 + number // 2 % 256 for number in numbers]
    return [id_ for id_ in found if id_ != tokenizer.eos_id]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - len(max(found, key=len))], max(found, key=len)
    return text, None


# -- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=40)
@given(numbers=ids_of, stops=st.lists(st.sampled_from(["e", "th", "\ufffd", "é", "fox", " s"]), max_size=2))
def test_at_every_cut_the_answer_is_what_its_tokens_decode_to(kind: str, numbers: list[int], stops: list[str]) -> None:
    tokenizer = KINDS[kind]()
    ids, ways = drawn(tokenizer, numbers), rules(tokenizer, stop=tuple(stops))
    told = stream(ways, ids)
    for cut in range(len(ids) + 1):
        text, stop = first_stop(tokenizer.decode(ids[:cut]), tuple(stops))
        answer = whole(ways, ids[:cut])
        assert answer.content == text
        assert (answer.ending.reason, answer.ending.stop) == (("stop_string", stop) if stop else ("length", None))
        before = put_together([piece for pieces in told[:cut] for piece in pieces])
        assert text.startswith(before.content)  # what a client has by then is never taken back
    assert put_together([piece for pieces in told for piece in pieces]) == answer


def test_text_comes_with_the_token_that_makes_it_certain_and_no_character_in_halves() -> None:
    tokenizer = own()
    wave = [id_ for byte in "x👋y".encode() for id_ in [tokenizer.id_of(SYMBOLS[byte])]]
    told = ["".join(piece.text for piece in pieces) for pieces in stream(rules(tokenizer), wave)]
    assert told == ["x", "", "", "", "👋", "y"]
    assert whole(rules(tokenizer), wave[:3]).content == tokenizer.decode(wave[:3]) == "x\ufffd"


SYMBOLS = {byte: symbol for symbol, byte in byte_symbols().items()}


@pytest.mark.parametrize("cut", range(12))
def test_a_stop_string_never_shows_whichever_way_tokens_split_it(cut: int) -> None:
    for kind in KINDS.values():
        tokenizer = kind()
        ids = spelt(tokenizer, "and then STOP it slept", random.Random(cut))
        emitter, told = Emitter(rules(tokenizer, stop=("STOP",), logprobs=True)), []
        left = events(ids, "length")
        while not emitter.finished:
            told += emitter.push(left.pop(0))
        answer, drawn = put_together(told), ids[: len(ids) - len(left)]
        assert answer.content == "and then " and answer.ending.stop == "STOP"
        assert answer.ending.num_tokens == len(drawn)
        if kind is not byte_fallback:  # there a later byte may change what a run of bytes says
            assert "STOP" not in tokenizer.decode(drawn[:-1])
        assert emitter.abandoned and emitter.push(left[0]) == []
        texts = [token.text for token in answer.tokens]  # the last one may go on into the stop string
        assert answer.content.startswith("".join(texts[:-1])) and "".join(texts).startswith(answer.content)


def test_text_before_the_least_number_of_tokens_cannot_stop_an_answer() -> None:
    tokenizer = own()
    once = spelt(tokenizer, "STOP ", random.Random(1))
    ids = [*once, *spelt(tokenizer, "STOP", random.Random(1))]
    assert whole(rules(tokenizer, stop=("STOP",)), ids).content == ""
    assert whole(rules(tokenizer, stop=("STOP",), min_tokens=len(once) + 1), ids).content == "STOP "


# -- how it ends ------------------------------------------------------------------------------------------------------


def test_reasons_tell_the_truth() -> None:
    tokenizer = own()
    ids, eos = tokenizer.encode("the fox"), tokenizer.eos_id
    last = ids[-1]
    plain = rules(tokenizer)

    def end(ways: Any, ids: list[int], finish: str) -> tuple[Any, ...]:
        answer = whole(ways, ids, finish)
        return answer.content, answer.ending.reason, answer.ending.stop, answer.ending.num_tokens

    assert end(plain, [*ids, eos], "stop") == ("the fox", "stop", None, len(ids) + 1)
    assert end(plain, ids, "length") == ("the fox", "length", None, len(ids))
    assert end(rules(tokenizer, length_reason="context"), ids, "length") == ("the fox", "context", None, len(ids))
    assert end(plain, ids, "stop") == ("the fox", "stop", None, len(ids))  # a grammar has nothing more to allow
    mine = rules(tokenizer, stop_ids=frozenset({last, eos}))
    assert end(mine, ids, "stop") == (tokenizer.decode(ids[:-1]), "stop_string", last, len(ids))
    assert end(mine, [*ids[:-1], eos], "stop")[1:3] == ("stop", None)  # the model's own as well
    assert end(plain, [], "length") == ("", "length", None, 0)
    ignoring = rules(tokenizer)
    assert end(ignoring, [*ids, eos, *ids], "length")[1:] == ("length", None, 2 * len(ids) + 1)


def test_an_error_keeps_what_was_told_and_says_why() -> None:
    tokenizer = own()
    ids = tokenizer.encode("the fo")
    emitter = Emitter(rules(tokenizer, stop=("fox",)))
    told = [piece for event in events([*ids, 0])[:-1] for piece in emitter.push(event)]
    assert put_together(told).content == "the "
    told += emitter.push(TokenEvent("r", None, math.nan, "error", error="the logits are not finite"))
    answer = put_together(told)
    assert (answer.content, answer.ending.reason, answer.ending.error) == (
        "the fo",
        "error",
        "the logits are not finite",
    )
    assert not emitter.abandoned


def test_closing_an_answer_tells_what_was_held_back_once() -> None:
    tokenizer = own()
    emitter = Emitter(rules(tokenizer, stop=("fox",)))
    told = [piece for event in events([*tokenizer.encode("the fo"), 0])[:-1] for piece in emitter.push(event)]
    told += emitter.close("cancelled", "the server is closing")
    answer = put_together(told)
    assert (answer.content, answer.ending.reason, answer.ending.error) == (
        "the fo",
        "cancelled",
        "the server is closing",
    )
    assert emitter.abandoned and emitter.close("cancelled") == [] and emitter.push(events([5])[0]) == []


def test_choices_keep_apart() -> None:
    tokenizer = own()
    emitters = [Emitter(rules(tokenizer, stop=("fox",)), choice) for choice in (4, 5)]
    pieces = [
        piece for emitter in emitters for event in events(tokenizer.encode("a fox")) for piece in emitter.push(event)
    ]
    assert {piece.choice for piece in pieces} == {4, 5}
    assert [piece.text for piece in pieces if piece.choice == 4] == [
        piece.text for piece in pieces if piece.choice == 5
    ]


def test_control_tokens_and_ids_without_text_count_and_do_not_show() -> None:
    tokenizer = own()
    start = tokenizer.special_tokens["<|im_start|>"]
    ids = [start, *tokenizer.encode("the fox"), tokenizer.vocab_size + 3, start, *tokenizer.encode(" ran")]
    answer = whole(rules(tokenizer, logprobs=True), ids)
    assert (answer.content, answer.ending.num_tokens) == ("the fox ran", len(ids))
    assert "".join(token.text for token in answer.tokens) == "the fox ran"


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=40)
@given(numbers=ids_of)
def test_tokens_are_those_that_were_drawn_and_their_texts_make_the_content(kind: str, numbers: list[int]) -> None:
    tokenizer = KINDS[kind]()
    hidden = set(tokenizer.special_tokens.values())
    ids = [id_ for id_ in drawn(tokenizer, numbers) if id_ not in hidden]
    answer = whole(rules(tokenizer, logprobs=True), ids)
    listed = [token.id for token in answer.tokens]
    nothing = [id_ for id_ in ids if id_ not in listed]  # a space that the decoder strips
    assert [id_ for id_ in ids if id_ not in nothing] == listed and all(
        tokenizer.decode([id_]) == "" for id_ in nothing
    )
    halves = [token for token in answer.tokens if "\ufffd" in token.text]
    if not halves and "\ufffd" not in answer.content:
        assert "".join(token.text for token in answer.tokens) == answer.content
    if kind != "byte_fallback":
        assert b"".join(token.data for token in answer.tokens).decode("utf-8", "replace") == answer.content
    assert all(token.text == token.data.decode("utf-8", "replace") for token in answer.tokens)


def test_a_token_comes_with_the_piece_that_holds_the_last_of_its_text() -> None:
    tokenizer = own()
    text = "x👋 the fox STOx"
    ids = spelt(tokenizer, text, random.Random(5))
    ways = rules(tokenizer, logprobs=True, stop=("STOP",))
    content, data = "", b""
    for pieces in stream(ways, ids):
        for piece in pieces:
            content += piece.text
            data += b"".join(token.data for token in piece.tokens)
            assert content.encode().startswith(data)  # never ahead of the text
    assert content == text and data == text.encode()


def test_a_token_that_is_shown_in_part_is_told_when_the_rest_is_known_not_to_be() -> None:
    tokenizer = own()
    ids = [*tokenizer.encode("a"), *tokenizer.encode(" the"), *tokenizer.encode("f")]
    assert len(ids) == 3
    told = stream(rules(tokenizer, logprobs=True, stop=("hef",)), ids)
    assert [(piece.text, [token.text for token in piece.tokens]) for piece in told[1]] == [(" t", [])]
    late, end = told[2]
    assert (late.kind, late.text, [token.text for token in late.tokens]) == ("content", "", [" the"])
    assert end.ending.stop == "hef" and put_together([*told[0], *told[1], late, end]).content == "a t"


def test_log_probabilities_and_alternatives_are_the_engines() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("the fox")
    special = tokenizer.eos_id
    top = ((ids[0], -0.25), (special, -1.5), (tokenizer.vocab_size + 1, -math.inf), (tokenizer.encode("é")[-1], -3.0))
    emitter = Emitter(rules(tokenizer, logprobs=True))
    [piece, _] = emitter.push(TokenEvent("r", ids[0], -0.25, "length", 0, top))
    [token] = piece.tokens
    assert (token.id, token.logprob, token.text, token.data) == (ids[0], -0.25, piece.text, piece.text.encode())
    assert [(id_, logprob) for id_, _, _, logprob in token.top] == list(top)
    assert [text for _, text, _, _ in token.top][1:] == ["</s>", "", "é"]
    assert [data for _, _, data, _ in token.top][3] == "é".encode()


def test_tokens_are_told_only_where_they_are_asked_for() -> None:
    tokenizer = own()
    pieces = [piece for some in stream(rules(tokenizer), tokenizer.encode("the fox ran")) for piece in some]
    assert all(piece.tokens == () for piece in pieces)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_prompt_is_told_as_text_and_tokens_control_tokens_without_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = [tokenizer.bos_id, *tokenizer.encode("the fox é東")]
    told: list[TokenLogprob | None] = [None, *(TokenLogprob(-float(i), ((5, -1.0),)) for i in range(len(ids) - 1))]
    text, tokens = prompt_tokens(tokenizer, ids, told)
    assert text == tokenizer.decode(ids) and [token.id for token in tokens] == ids
    assert math.isnan(tokens[0].logprob) and [token.logprob for token in tokens[1:]] == [
        -float(i) for i in range(len(ids) - 1)
    ]
    assert b"".join(token.data for token in tokens).decode().strip() == text.strip() and tokens[0].data == b""


def test_an_answer_that_goes_on_with_a_text_keeps_its_first_space() -> None:
    tokenizer = byte_fallback()
    prompt, more = tokenizer.encode("the"), [tokenizer.id_of("▁fox")]
    assert tokenizer.decode(more) == "fox"
    assert whole(rules(tokenizer), more).content == "fox"
    assert whole(rules(tokenizer, follows=tuple(prompt)), more).content == " fox"
    bytes_ = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "東".encode()]
    assert whole(rules(tokenizer, follows=(*prompt, *bytes_)), more).content == " fox"
    assert whole(rules(own(), follows=tuple(own().encode("the"))), own().encode(" fox")).content == " fox"


# -- reasoning --------------------------------------------------------------------------------------------------------

REASONED = {
    "<think>\nhm\n</think>\n\nhello": ("hello", "hm"),
    "<think>hm</think>hello": ("hello", "hm"),
    "\n <think> a\n\nb </think> c ": ("c ", "a\n\nb"),
    "<think>\n\n</think>\n\nhello": ("hello", ""),
    "hello <think>no</think>": ("hello <think>no</think>", ""),
    "  hello": ("  hello", ""),
    "<thin": ("<thin", ""),
    "<think>never closed </think": ("", "never closed </think"),
    "<think>a </thin b</think>c": ("c", "a </thin b"),
    "<think>x</think>": ("", "x"),
    "<think>\n<think>\nx</think>": ("", "x"),
    "<think><thin</think>y": ("y", "<thin"),
}


BEGUN_BY_THE_TEMPLATE = {
    text.partition("<think>")[2]: told for text, told in REASONED.items() if text.lstrip()[:7] == "<think>"
}


@pytest.mark.parametrize(
    ("text", "where", "told"),
    [
        *((text, "before", told) for text, told in REASONED.items()),
        *((text, "inside", told) for text, told in BEGUN_BY_THE_TEMPLATE.items()),
    ],
)
def test_reasoning_is_split_off_with_the_white_space_around_its_markers(
    text: str, where: Any, told: tuple[str, str]
) -> None:
    content, reasoning = told
    for kind in (with_markers, own):
        tokenizer = kind()
        for seed in range(4):
            ids = spelt(tokenizer, text, random.Random(seed))
            ways = rules(tokenizer, reasoning=(THINK, where), logprobs=True)
            for cut in range(len(ids) + 1):
                part = whole(ways, ids[:cut])
                assert content.startswith(part.content) or part.content == tokenizer.decode(ids[:cut])
            answer = whole(ways, [*ids, tokenizer.eos_id], "stop")
            assert (answer.content, answer.reasoning, answer.ending.reason) == (content, reasoning, "stop")
            thoughts = text.rpartition("</think>")[0] if "</think>" in text and not text.startswith("hello") else ""
            assert (answer.ending.reasoning_tokens > 0) == bool(
                thoughts or reasoning or text == "\n\n</think>\n\nhello"
            )
            assert "".join(token.text for token in answer.tokens) in (content, " " + content)


def test_reasoning_is_counted_up_to_and_with_its_closing_marker() -> None:
    tokenizer = with_markers()
    thoughts = [tokenizer.id_of("<think>"), *tokenizer.encode("hm, what"), tokenizer.id_of("</think>")]
    ids = [*thoughts, *tokenizer.encode("\n\nhello there")]
    ways = rules(tokenizer, reasoning=(THINK, "before"))
    for cut in range(len(ids) + 1):
        assert whole(ways, ids[:cut]).ending.reasoning_tokens == min(cut, len(thoughts))


# -- everything at once -----------------------------------------------------------------------------------------------

MIXED = (
    "<think>\nthe weather; maybe <tool_call>\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "東京 STO"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sum", "arguments": {"a": [1, "STOP"]}}\n</tool_call>'
)


def reference(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """A beginning of `MIXED`, taken apart by looking at all of it."""
    if not text.startswith("<think>"):
        return text, "", []
    thoughts, closed, rest = text.removeprefix("<think>").partition("</think>")
    if not closed:
        return "", thoughts.lstrip(), []
    content, rest, calls = "", rest.lstrip(), []
    while True:
        before, _, more = rest.partition("<tool_call>")
        body, closed, behind = more.partition("</tool_call>")
        name = re.search(r'"name": "(\w+)"', body)
        if name is None:
            return content + ("" if calls and not rest.strip() else rest), thoughts.strip(), calls
        arguments = body.partition('"arguments": ')[2]
        with contextlib.suppress(ValueError):
            arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
        content, rest = content + before.rstrip(), behind
        calls.append((name[1], arguments))
        if not closed:
            return content, thoughts.strip(), calls


@pytest.mark.parametrize("seed", range(3))
def test_reasoning_tools_and_a_stop_string_at_every_cut(seed: int) -> None:
    tokenizer = with_markers()
    ids = spelt(tokenizer, MIXED, random.Random(seed))
    everything = {"reasoning": (THINK, "before"), "tools": TOOLS["hermes"], "logprobs": True}
    complete = whole(rules(tokenizer, **everything), [*ids, tokenizer.eos_id], "stop")
    calls = [("weather", '{"city": "東京 STO"}'), ("sum", '{"a": [1, "STOP"]}')]
    assert seen(complete) == ("I look.", "the weather; maybe <tool_call>", calls)
    assert complete.ending.reason == "tool_calls" and complete.ending.num_tokens == len(ids) + 1
    for stop in ((), ("STOP",)):
        ways = rules(tokenizer, **everything, stop=stop)
        for cut in range(len(ids) + 1):
            text, found = first_stop(tokenizer.decode(ids[:cut]), stop)
            answer = whole(ways, ids[:cut])
            assert seen(answer) == reference(text)
            assert (answer.ending.reason, answer.ending.stop) == (("stop_string", found) if found else ("length", None))


@pytest.mark.parametrize("seed", range(3))
def test_tokens_stand_in_pieces_of_their_own_kind(seed: int) -> None:
    tokenizer = with_markers()
    ids = spelt(tokenizer, MIXED, random.Random(seed))
    ways = rules(tokenizer, reasoning=(THINK, "before"), tools=TOOLS["hermes"], logprobs=True)
    by_kind: dict[str, bytes] = {}
    order: list[float] = []
    for pieces in stream(ways, ids):
        for piece in pieces:
            assert piece.kind not in ("tool_start", "end") or not piece.tokens
            by_kind[piece.kind] = by_kind.get(piece.kind, b"") + b"".join(token.data for token in piece.tokens)
            order += [token.logprob for token in piece.tokens]
    assert order == sorted(order, reverse=True) and len(order) == len(set(order))  # each once, as they were drawn
    assert by_kind["reasoning"].decode().strip() == "the weather; maybe <tool_call>"
    assert by_kind["content"].decode().strip() == "I look."
    arguments = by_kind["tool_arguments"].decode().replace(" ", "").replace("}}", "}")  # a token may go beyond them
    assert arguments == '{"city":"東京STO"}{"a":[1,"STOP"]}'
