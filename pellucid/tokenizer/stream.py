"""Text out of a stream of ids, never half a character and never taken back."""

import codecs
import re
from collections.abc import Sequence
from typing import Any, Protocol

from pellucid.tokenizer.bpe import Tokenizer
from pellucid.tokenizer.fast import byte_symbols

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONGEST_START = 32
"""Tokens of white space after which a stream has begun in any case: decoders strip one space at most."""


class IncrementalDecoder:
    """Ids in, text out as soon as it is certain.

    Everything returned by `push` and then `finish`, put together, equals ``tokenizer.decode(ids)``, for any ids. Text is
    held back while it may still change: half a UTF-8 character; in tokenizers with byte fallback a whole run of byte
    tokens, of which one bad byte spoils all; everything, where the decoder is one that we do not know. A push takes
    constant time.

    Args:
        skip_special: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.special_tokens.values()) if skip_special else frozenset()
        self._pieces = _pieces(tokenizer)

    def push(self, id_: int) -> str:
        """The text that ``id_`` makes certain, often ``""``. RequestError: the id is outside the vocabulary."""
        token = self._tokenizer.token_of(id_)
        return "" if token is None or id_ in self._skipped else self._pieces.push(id_, token)

    @property
    def num_held(self) -> int:
        """Of the ids pushed last, special ones not counted, so many have text that is still held back."""
        return self._pieces.num_held

    def follow(self, ids: Sequence[int]) -> None:
        """Go on after the text of ``ids``, which is not told: what comes is not the first of a text."""
        if isinstance(self._pieces, _Words):
            for id_ in ids[-_LONGEST_START:]:
                self.push(id_)
            self._pieces.finish()

    def token_bytes(self, id_: int) -> bytes:
        """What an id stands for, special ones included, where it is not the first of a text; no bytes for an unused id."""
        token = self._tokenizer.token_of(id_)
        return b"" if token is None else self._pieces.data(id_, token)

    def finish(self) -> str:
        """What was held back. The decoder is as new afterwards."""
        rest = self._pieces.finish()
        self._pieces = _pieces(self._tokenizer)
        return rest


class _Pieces(Protocol):
    @property
    def num_held(self) -> int: ...

    def push(self, id_: int, token: str) -> str: ...

    def data(self, id_: int, token: str) -> bytes: ...

    def finish(self) -> str: ...


class _Bytes:
    """Byte-level BPE: each token is bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._sizes: list[int] = []  # of the tokens whose bytes are held back

    @property
    def num_held(self) -> int:
        return len(self._sizes)

    def push(self, id_: int, token: str) -> str:
        data = self.data(id_, token)
        text = self._decoder.decode(data)
        held = len(self._decoder.getstate()[0])
        if held:
            self._sizes.append(len(data))
            while sum(self._sizes[1:]) >= held:
                del self._sizes[0]
        else:
            self._sizes.clear()
        return text

    def data(self, id_: int, token: str) -> bytes:
        symbols = byte_symbols()
        try:
            return bytes(symbols[character] for character in token)
        except KeyError:  # an added token with other characters stands for its own text
            return token.encode()

    def finish(self) -> str:
        self._sizes.clear()
        return self._decoder.decode(b"", final=True)


class _Words:
    """Decoders that treat the first token differently and otherwise each token, or run of byte tokens, alone."""

    def __init__(self, tokenizer: Tokenizer, anchor: int) -> None:
        self._tokenizer = tokenizer
        self._anchor = anchor
        self._anchor_size = len(self._decode([anchor]))
        self._start: list[int] | None = []  # until the text has begun; then None
        self._written = ""  # of the start
        self._run: list[int] = []
        self._unread = 0  # of the start

    @property
    def num_held(self) -> int:
        return len(self._run) if self._start is None else self._unread

    def push(self, id_: int, token: str) -> str:
        if self._start is not None:
            self._start.append(id_)
            self._unread += 1
            return "" if _BYTE_TOKEN.fullmatch(token) else self._begin()
        if _BYTE_TOKEN.fullmatch(token):
            self._run.append(id_)
            return ""
        return self.finish() + self._later([id_])

    def data(self, id_: int, token: str) -> bytes:
        found = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(token[3:5]) if found else self._later([id_]).encode()

    def finish(self) -> str:
        if self._start is not None:
            return self._begin()
        run, self._run = self._run, []
        return self._later(run) if run else ""

    def _begin(self) -> str:
        assert self._start is not None
        text = self._decode(self._start)
        new = text[len(self._written) :]
        self._written, self._unread = text, 0
        if text.strip() or len(self._start) >= _LONGEST_START:
            self._start = None
        return new

    def _later(self, ids: list[int]) -> str:
        return self._decode([self._anchor, *ids])[self._anchor_size :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)


class _AtTheEnd:
    """Any other decoder: nothing is certain before all is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    @property
    def num_held(self) -> int:
        return len(self._ids)

    def push(self, id_: int, token: str) -> str:
        self._ids.append(id_)
        return ""

    def data(self, id_: int, token: str) -> bytes:
        return self._tokenizer.decode([id_], skip_special=False).encode()

    def finish(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special=False)


def _pieces(tokenizer: Tokenizer) -> _Pieces:
    description = tokenizer.decoder_description
    steps = [] if description is None else description.get("decoders", [description])
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _Bytes()
    if all(map(_is_local, steps)) and (anchor := _anchor(tokenizer)) is not None:
        return _Words(tokenizer, anchor)
    return _AtTheEnd(tokenizer)


def _is_local(step: dict[str, Any]) -> bool:
    """Whether a decoding step looks at one token (or run of bytes) at a time, apart from the very first."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern) == 1  # a longer one could span two tokens
    if step["type"] == "Strip":
        return bool(step["stop"] == 0 and step["start"] < _LONGEST_START)
    return step["type"] in ("Metaspace", "WordPiece", "ByteFallback", "Fuse")


def _anchor(tokenizer: Tokenizer) -> int | None:
    """A plain word to stand before other tokens, so that they are not the first."""
    special = frozenset(tokenizer.special_tokens.values())
    for id_ in range(tokenizer.vocab_size):
        token = tokenizer.token_of(id_)
        if id_ not in special and token is not None and token.isascii() and token.isalnum():
            return id_
    return None
