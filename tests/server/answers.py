"""What the tests of answers share: tokenizers, events made of text, and whole answers put together."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from pellucid.inference.request import TokenEvent
from pellucid.server.emission import Emitter, Rules
from pellucid.server.generation import Choice, Piece, gather
from pellucid.server.reasoning import Markers
from pellucid.server.tools import HERMES, LLAMA
from pellucid.tokenizer import Tokenizer, train_bpe

THINK = Markers("<think>", "</think>")
NAMES = frozenset({"weather", "sum", "noop"})
TOOLS = {"hermes": (HERMES, NAMES), "llama": (LLAMA, NAMES)}
CORPUS = (
    'the fox asked: <think> what is it? </think> <tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>\n'
    '{"name": "sum", "parameters": {"a": [1, 2], "b": "x"}} Größe, café, naïve 👋🏽 and then it slept; </s> END STOP\n'
)


@cache
def own() -> Tokenizer:
    """Our own kind: byte-level BPE, with an end token."""
    return train_bpe([CORPUS] * 4, 480)


@cache
def with_markers() -> Tokenizer:
    """The same with the markers as tokens of their own, ``<|python_tag|>`` a control token."""
    raw = RawTokenizer.from_str(own()._text)
    raw.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    raw.add_special_tokens(["<|python_tag|>"])
    return Tokenizer(raw.to_str(), own()._config)


@cache
def byte_fallback() -> Tokenizer:
    """Llama-2's kind: spaces as U+2581, bytes spelt out, the first space stripped when decoded."""
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    words += [
        *'thefoxaskd:{}"<>/_=,.[]0123456789én東',
        "▁the",
        "▁fox",
        "the",
        "think",
        "▁ST",
        "OP",
        "é",
        "▁é",
        "tool_call",
    ]
    raw = RawTokenizer(models.Unigram([(word, -1.0) for word in dict.fromkeys(words)], unk_id=0, byte_fallback=True))
    raw.add_special_tokens(["<s>", "</s>"])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw.to_str(), {"bos_token": "<s>", "eos_token": "</s>"})


KINDS = {"own": own, "with_markers": with_markers, "byte_fallback": byte_fallback}


def spelt(tokenizer: Tokenizer, text: str, cut: random.Random) -> list[int]:
    """Ids that decode to ``text``, cut anywhere, even inside characters: each stretch is encoded alone."""
    data, ids = text.encode(), []
    names = {tokenizer.token_of(id_): id_ for id_ in range(tokenizer.vocab_size)}
    markers = [
        name for name in names if name and name.startswith("<") and len(name) > 3 and name not in ("<s>", "</s>")
    ]
    while data:
        whole = next((m for m in markers if data.startswith(m.encode()) and not m.startswith("<0x")), None)
        if whole is not None and cut.random() < 0.7:
            ids.append(names[whole])
            data = data[len(whole.encode()) :]
            continue
        size = cut.randint(1, 6)
        part, data = data[:size], data[size:]
        try:
            found = tokenizer.encode(part.decode())
        except UnicodeDecodeError:
            found = [id_ for byte in part for id_ in [_byte(tokenizer, byte)]]
        ids += found
    return ids


def _byte(tokenizer: Tokenizer, byte: int) -> int:
    from pellucid.tokenizer.fast import byte_symbols

    symbol = next(symbol for symbol, value in byte_symbols().items() if value == byte)
    found = tokenizer.id_of(symbol)
    assert found is not None
    return found


def events(ids: Sequence[int], finish: str = "length", *, logprobs: bool = True) -> list[TokenEvent]:
    """An event for each id; the last one ends the sample."""
    last = len(ids) - 1
    return [
        TokenEvent(
            "r", id_, -0.5 * i, finish if i == last else None, 0, ((id_, -0.5 * i), (3, -9.0)) if logprobs else ()
        )
        for i, id_ in enumerate(ids)
    ]


def stream(rules: Rules, ids: Sequence[int], finish: str = "length") -> list[list[Piece]]:
    """The pieces of each event; an answer without tokens is one event."""
    emitter = Emitter(rules)
    if not ids:
        return [emitter.push(TokenEvent("r", None, 0.0, finish))]
    return [emitter.push(event) for event in events(ids, finish)]


def whole(rules: Rules, ids: Sequence[int], finish: str = "length") -> Choice:
    """The answer put together."""
    return put_together([piece for pieces in stream(rules, ids, finish) for piece in pieces])


def put_together(pieces: Sequence[Piece]) -> Choice:
    """`gather` of one choice, after a look at the order of its pieces."""
    kinds = [piece.kind for piece in pieces]
    assert kinds.count("end") <= 1 and (not kinds or "end" not in kinds[:-1]), kinds
    assert kinds == sorted(kinds, key=lambda kind: kind != "reasoning"), kinds
    return gather([replace(piece, choice=0) for piece in pieces])[0]


def rules(tokenizer: Tokenizer, **more: Any) -> Rules:
    return Rules(tokenizer=tokenizer, end_ids=frozenset({tokenizer.eos_id}), **more)


def seen(choice: Choice) -> tuple[Any, ...]:
    """What a client sees of the text."""
    return choice.content, choice.reasoning, [(call.name, call.arguments) for call in choice.calls]
