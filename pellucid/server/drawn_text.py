"""Drawn tokens beside the text that they make: which of its characters are whose."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.inference.request import TokenLogprob
from pellucid.server.generation import TokenText
from pellucid.tokenizer import Tokenizer
from pellucid.tokenizer.stream import IncrementalDecoder


@dataclass(slots=True)
class _Drawn:
    """A token and the characters of the answer's text that it has made, or helped to make."""

    token: TokenText
    start: int
    end: int | None = None
    """None: half a character is still open."""
    shown: bool = False
    """Some of its characters have been told."""


class DrawnText:
    """The text that drawn ids make, and the tokens of it that have not been told or given up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decoder = IncrementalDecoder(tokenizer, skip_special=False)
        self._size = tokenizer.vocab_size
        self.length = 0
        self._tokens: deque[_Drawn] = deque()
        self._open: deque[_Drawn] = deque()  # the last of them, whose end is not known

    def push(self, id_: int, told: TokenLogprob | None) -> str:
        """The text that ``id_`` makes certain; what is to be told of the token, where tokens are."""
        held = self.decoder.num_held
        text = self.decoder.push(id_)
        start, self.length = self.length, self.length + len(text)
        if told is not None:
            whole = not held and not self.decoder.num_held
            drawn = _Drawn(self.token(id_, text.encode() if whole else self.decoder.token_bytes(id_), told), start)
            self._tokens.append(drawn)
            self._open.append(drawn)
            self._close(text, self.decoder.num_held)
        return text

    @property
    def last(self) -> TokenText:
        """The token pushed last."""
        return self._tokens[-1].token

    def finish(self) -> str:
        """What the decoder held back."""
        text = self.decoder.finish()
        self.length += len(text)
        self._close(text, 0)
        return text

    def settle(self) -> None:
        """Nothing follows: every token ends here."""
        self._close("", 0)

    def show(self, end: int) -> tuple[TokenText, ...]:
        """Characters up to ``end`` are told, and `shown_until` was called for where they begin: the tokens that end there."""
        for drawn in self._tokens:
            if drawn.start >= end:
                break
            drawn.shown = True
        return self.shown_until(end)

    def shown_until(self, position: int) -> tuple[TokenText, ...]:
        """The tokens that end up to there and of which something was shown; the others that do are given up."""
        told = []
        while self._tokens and self._tokens[0].end is not None and self._tokens[0].end <= position:
            drawn = self._tokens.popleft()
            if drawn.shown and drawn.end != drawn.start:
                told.append(drawn.token)
        return tuple(told)

    def _close(self, text: str, num_held: int) -> None:
        """The tokens that had no end yet, but for the last ``num_held``, end with ``text``, which has just become certain."""
        closing = [self._open.popleft() for _ in range(len(self._open) - num_held)]
        for drawn in closing:
            drawn.end = self.length
        if len(closing) > 1 and b"".join(drawn.token.data for drawn in closing) == text.encode():
            _spread(closing, self.length - len(text))

    def token(self, id_: int, data: bytes, told: TokenLogprob) -> TokenText:
        """A token that stands for ``data``, with its alternatives."""
        others = [(other, self._data(other), logprob) for other, logprob in told.top]
        top = tuple((other, _as_text(spelt), spelt, logprob) for other, spelt, logprob in others)
        return TokenText(id_, _as_text(data), data, told.logprob, top)

    def _data(self, id_: int) -> bytes:
        """No bytes for an id that the model has and the tokenizer lacks."""
        return self.decoder.token_bytes(id_) if id_ < self._size else b""


def _spread(tokens: Sequence[_Drawn], start: int) -> None:
    """Give each of some tokens that became text together its own characters of it, which begin at ``start``."""
    begun = start  # characters whose first byte has come
    for drawn in tokens:
        data = drawn.token.data
        inside = bool(data) and data[0] & 0xC0 == 0x80  # it begins within a character
        drawn.start = begun - inside
        begun += sum(byte & 0xC0 != 0x80 for byte in data)
        drawn.end = begun


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def prompt_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], told: Sequence[TokenLogprob | None]
) -> tuple[str, tuple[TokenText, ...]]:
    """A prompt's text, and its tokens with what the model thought of them; control tokens have no text."""
    drawn, hidden = DrawnText(tokenizer), set(tokenizer.special_tokens.values())
    texts, tokens = [], []
    for id_, one in zip(ids, told, strict=True):
        one = one or TokenLogprob(math.nan)
        if id_ in hidden or id_ >= tokenizer.vocab_size:
            tokens.append(drawn.token(id_, b"", one))
        else:
            texts.append(drawn.push(id_, one))
            tokens.append(drawn.last)
    return "".join([*texts, drawn.finish()]), tuple(tokens)
