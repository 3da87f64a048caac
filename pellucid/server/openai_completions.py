"""Completions out, in OpenAI's older form: text, the prompt before it on request, log-probabilities as parallel arrays."""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.server.generation import Piece, TokenText, Usage
from pellucid.server.openai_encode import Answer, OpenAIStream, ended, finish, finite, usage_body


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is given back before its choices, as text and as tokens.

    ``tokens`` are needed only where log-probabilities are told; of the first none is, since nothing predicts it.
    """

    text: str
    tokens: Sequence[TokenText] = ()


def completion_body(
    answer: Answer, pieces: Iterable[Piece], usage: Usage, echoes: Sequence[Echo] = ()
) -> dict[str, Any]:
    """The whole answer. ``Piece.choice`` is the choice's index in it: the prompt's, times ``n``, plus the sample's.

    Args:
        echoes: of each prompt, in order; empty: none are told.

    Raises:
        ApiError: a choice ended with an error.
    """
    texts = _texts(answer, echoes)
    choices: list[dict[str, Any]] = [text.begin() for text in texts]
    ends: list[dict[str, Any] | None] = [None] * answer.num_choices
    for piece in pieces:
        _append(choices[piece.choice], texts[piece.choice].tell(piece))
        if piece.kind == "end":
            ends[piece.choice] = finish(ended(piece.ending))
    for i, end in enumerate(ends):
        choices[i] = {"index": i, **choices[i], **(end or finish(ended(None)))}
    return {**answer.head("text_completion"), "choices": choices, "usage": usage_body(usage)}


def _append(choice: dict[str, Any], more: dict[str, Any]) -> None:
    choice["text"] += more["text"]
    for name, values in (more["logprobs"] or {}).items():
        choice["logprobs"][name] += values


def _texts(answer: Answer, echoes: Sequence[Echo]) -> list["_Text"]:
    """One for each choice."""
    assert not echoes or answer.num_choices % len(echoes) == 0, "every prompt has the same number of choices"
    each = answer.num_choices // max(1, len(echoes))
    return [_Text(answer, echoes[i // each] if echoes else None) for i in range(answer.num_choices)]


class CompletionStream(OpenAIStream):
    """Of a completion."""

    def __init__(self, answer: Answer, echoes: Sequence[Echo] = ()) -> None:
        super().__init__(answer, "text_completion")
        self._texts = _texts(answer, echoes)

    def open(self, usage: Usage) -> bytes:
        """With the prompt, where it is given back."""
        return b"".join(self._chunk(i, text.begin()) for i, text in enumerate(self._texts))

    def _told(self, piece: Piece) -> dict[str, Any] | None:
        told = self._texts[piece.choice].tell(piece)
        return told if told["text"] or _has_tokens(told) else None

    def _told_last(self, piece: Piece) -> dict[str, Any]:
        return self._texts[piece.choice].tell(piece)


def _has_tokens(told: dict[str, Any]) -> bool:
    return bool(told["logprobs"] and told["logprobs"]["tokens"])


class _Text:
    """The text of one choice so far, the prompt's included, and where in it the next token begins."""

    def __init__(self, answer: Answer, echo: Echo | None) -> None:
        self._answer, self._echo = answer, echo
        self._rest = ""
        """What has been told and is not yet covered by tokens."""
        self._offset = 0
        """Characters before that."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self) -> dict[str, Any]:
        """The prompt, or nothing."""
        if self._echo is None:
            return self._told("", ())
        told = self._told(self._echo.text, self._echo.tokens)
        if (logprobs := told["logprobs"]) and logprobs["tokens"]:
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        self._skip(len(self._rest))  # a prompt is whole
        self._decoder.reset()
        return told

    def tell(self, piece: Piece) -> dict[str, Any]:
        assert piece.kind in ("content", "end"), "completions have neither reasoning nor tools"
        return self._told(piece.text, piece.tokens)

    def _told(self, text: str, tokens: Sequence[TokenText]) -> dict[str, Any]:
        logprobs = self._logprobs(text, tokens) if self._answer.logprobs else None
        return {"text": text, "logprobs": logprobs}

    def _logprobs(self, text: str, tokens: Sequence[TokenText]) -> dict[str, list[Any]]:
        self._rest += text
        return {
            "tokens": [_label(token.text, token.data) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [self._place(token) for token in tokens],
        }

    def _top(self, token: TokenText) -> dict[str, float] | None:
        """The most probable tokens and the drawn one; of two that look the same, the more probable."""
        if not self._answer.top_logprobs:
            return None
        top: dict[str, float] = {}
        for _, text, data, logprob in token.top:
            top.setdefault(_label(text, data), finite(logprob))
        top.setdefault(_label(token.text, token.data), finite(token.logprob))
        return top

    def _place(self, token: TokenText) -> int:
        """Where a token begins, in characters; one that begins inside a character, where that does."""
        begun = bytes(self._decoder.getstate()[0])
        characters = self._decoder.decode(token.data)
        broken = 0 if _continues(begun, token.data) else len(codecs.decode(begun, "utf-8", "replace"))
        offset = self._offset + broken
        if offset == 0 and not self._rest.startswith(characters):
            characters = characters.removeprefix(" ")  # which some tokenizers drop at the start of a text
        self._skip(min(len(characters), len(self._rest)))
        return offset

    def _skip(self, num_characters: int) -> None:
        self._offset += num_characters
        self._rest = self._rest[num_characters:]


def _continues(begun: bytes, data: bytes) -> bool:
    """Whether ``data`` goes on with a character that has begun, or none has; else what has begun is a broken one, shown alone."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begun + data[:1])
    except UnicodeDecodeError:
        return not begun
    return True


def _label(text: str, data: bytes) -> str:
    """A token's text; the bytes of one that is no whole text, so that two of them differ."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text
