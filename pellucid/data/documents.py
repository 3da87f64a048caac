"""What a source yields, and the log of what had to be left out."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from pellucid.data.shards import IntArray
from pellucid.errors import ConfigError, DataError

Message: TypeAlias = dict[str, str]
Content: TypeAlias = str | list[Message] | IntArray
ID_BYTES = 4
"""What one id of a document that comes as ids counts as, where text is counted in bytes."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document: text, chat messages ({"role", "content"}), or token ids (int64)."""

    content: Content
    location: str
    """Where it came from, for messages: "file", "file:line", "sample:stories:17"."""
    num_bytes: int
    """Its text in UTF-8; for ids `ID_BYTES` each."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One example for post-training as it was written: a JSON object, not yet looked at."""

    table: dict[str, Any]
    location: str
    num_bytes: int
    """As JSON, about."""
    split: Literal["train", "val"] | None = None
    """Where its source wants it; None: wherever the draw puts it."""


def raw_record(table: dict[str, Any], location: str, split: Literal["train", "val"] | None = None) -> RawRecord:
    """``table`` with its size."""
    return RawRecord(table, location, len(json.dumps(table, ensure_ascii=False)), split)


@dataclass(slots=True)
class ReadLog:
    """Shared by all readers of one pass over the input: bytes read so far, and every document left out."""

    skip: bool = False
    """Go on after bad input (`--on-error skip`) and count it; else `report` raises."""
    done_bytes: int = 0
    """Bytes of input files consumed, compressed as they are; text bytes for generated sources."""
    num_empty: int = 0
    num_skipped: int = 0
    first_skipped: list[str] = field(default_factory=list)
    """Messages of the first `KEPT` that were skipped."""

    KEPT = 20

    def report(self, error: DataError) -> None:
        """Raise ``error``, or count and list it."""
        if not self.skip:
            raise error
        self.num_skipped += 1
        if len(self.first_skipped) < self.KEPT:
            self.first_skipped.append(str(error))


def document_from(value: Any, location: str) -> Document | None:
    """A decoded value (of a JSON record or a table's cell) as a document; None where it is empty.

    A string is text, a list of whole numbers token ids, a list of objects chat messages.

    Raises:
        DataError: anything else, naming ``location``.
    """
    if isinstance(value, str):
        return text_document(value, location)
    if isinstance(value, np.ndarray):
        return _ids_document(value, location)
    if isinstance(value, list):
        if not value:
            return None
        if isinstance(value[0], dict):
            return _chat_document(value, location)
        try:
            return _ids_document(np.asarray(value), location)
        except ValueError:  # ragged
            raise DataError(f"{location}: a list of ids must hold whole numbers only") from None
    if value is None:
        return None
    raise DataError(f"{location}: expected text, a list of ids or a list of messages, got {type(value).__name__}")


def text_document(text: str, location: str) -> Document | None:
    """``text`` as a document; None where it holds nothing but white space."""
    if not text or text.isspace():
        return None
    return Document(text, location, _utf8_length(text, location))


def _ids_document(ids: Any, location: str) -> Document | None:
    if not ids.size:
        return None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 1 << 32:
        raise DataError(f"{location}: token ids must be one list of whole numbers from 0 to 4,294,967,295")
    return Document(ids.astype(np.int64), location, ID_BYTES * ids.size)


def _chat_document(messages: list[Any], location: str) -> Document:
    clean: list[Message] = []
    num_bytes = 0
    for i, message in enumerate(messages):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f'{location}: messages[{i}] must be an object with the strings "role" and "content"')
        num_bytes += _utf8_length(content, location)
        clean.append({"role": role, "content": content})
    return Document(clean, location, num_bytes)


def _utf8_length(text: str, location: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(
            f"{location}: character {error.start} is half of a surrogate pair ({text[error.start]!a}), not text"
        ) from None


def parse_size(text: str) -> int:
    """``"20MB"`` in bytes: B, KB, MB, GB are powers of 1000, KiB, MiB, GiB of 1024; `ConfigError` otherwise."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in units or not (size := int(float(match[1]) * units[match[2]])):
        raise ConfigError(f"size must be a number of bytes such as 20MB or 512KiB, got {text!r}")
    return size
