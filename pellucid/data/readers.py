"""Files as documents: .txt .md .py .jsonl, plain or compressed, read in pieces so that memory stays flat.

A text file is one document; a larger one than `PIECE_BYTES` is cut at blank lines (else at line ends, else between
characters) into documents of at most that size, which joined are the file again. A line of .jsonl is one document.
Files are kept as they are, carriage returns too; only a UTF-8 byte-order mark at the beginning is dropped.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pellucid.data.documents import Document, RawRecord, ReadLog, document_from, raw_record, text_document
from pellucid.errors import ConfigError, DataError

PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28
TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPRESSED = (".gz", ".zst")
TABLES = (".parquet", ".h5", ".hdf5")
RECORD_SUFFIXES = (".jsonl", *TABLES)
"""Kinds of files that can hold examples for post-training."""
_BOM = b"\xef\xbb\xbf"


def kind_of(path: Path) -> str | None:
    """The suffix that decides how ``path`` is read, without that of its compression; None: not a kind we read."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
        known: tuple[str, ...] = (*TEXT_SUFFIXES, ".jsonl")
    else:
        known = (*TEXT_SUFFIXES, ".jsonl", *TABLES)
    return suffixes[-1] if suffixes and suffixes[-1] in known else None


def known_kinds() -> str:
    """For messages: every suffix that `kind_of` knows."""
    return ", ".join((*TEXT_SUFFIXES, ".jsonl")) + " (each also .gz, .zst), " + ", ".join(TABLES)


def read_file(path: Path, text_key: str, log: ReadLog) -> Iterator[Document]:
    """The documents of one file, lazily. Bad input goes to ``log``; what else is wrong with the file too."""
    kind = kind_of(path)
    assert kind is not None
    try:
        if kind in TABLES:
            from pellucid.data import tables  # needs the [formats] extra

            read = tables.read_parquet if kind == ".parquet" else tables.read_hdf5
            yield from read(path, text_key, log)
            return
        with _open(path, log) as stream:
            if kind == ".jsonl":
                yield from _read_jsonl(stream, path, text_key, log)
            else:
                yield from _read_text(stream, path, log)
    except DataError as error:
        log.report(error)


def read_objects(path: Path, log: ReadLog) -> Iterator[RawRecord]:
    """The examples of one .jsonl, .parquet or HDF5 file, lazily. Bad input goes to ``log``.

    Columns (lists of rows under the keys that `pellucid.data.stored` knows) are taken apart into their rows.
    """
    from pellucid.data.stored import read_columns, unstacked

    try:
        if kind_of(path) == ".parquet":
            from pellucid.data.tables import parquet_objects

            tables = parquet_objects(path, log)
        elif kind_of(path) == ".jsonl":
            tables = _jsonl_objects(path, log)
        else:
            tables = read_columns(path, log)
        for table, location in tables:
            try:
                for i, row in enumerate(rows := unstacked(table)):
                    yield raw_record(row, location if len(rows) == 1 else f"{location}[{i}]")
            except DataError as error:
                log.report(DataError(f"{location}: {error}"))
    except DataError as error:
        log.report(error)


def _jsonl_objects(path: Path, log: ReadLog) -> Iterator[tuple[dict[str, Any], str]]:
    with _open(path, log) as stream:
        for line, start, location in _lines(stream, path, log):
            try:
                table = _object(line, start, location)
            except DataError as error:
                log.report(error)
            else:
                if table is None:
                    log.num_empty += 1
                else:
                    yield table, location


@contextmanager
def _open(path: Path, log: ReadLog) -> Iterator[IO[bytes]]:
    """``path`` opened for reading and decompressed; counts what is read of the file itself."""
    broken: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    try:
        with path.open("rb", buffering=0) as raw:
            counted = io.BufferedReader(_Counted(raw, log), 1 << 18)
            suffix = path.suffix.lower()
            if suffix == ".gz":
                yield io.BufferedReader(gzip.GzipFile(fileobj=counted), 1 << 18)
            elif suffix == ".zst":
                yield io.BufferedReader(_Zstd(counted), 1 << 18)
            else:
                yield counted
    except broken as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{path}: cannot be read ({reason})") from error


class _Counted(io.RawIOBase):
    """A raw file that adds what is read of it to the log."""

    def __init__(self, raw: Any, log: ReadLog) -> None:
        self._raw, self._log = raw, log

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._raw.readinto(buffer)
        self._log.done_bytes += count
        return count


class _Zstd(io.RawIOBase):
    """Decompressed zstd frames. Unlike zstandard's own reader it notices a file that ends inside a frame."""

    def __init__(self, source: IO[bytes]) -> None:
        zstandard = optional("zstandard", "a .zst file")
        self._source = source
        self._new: Callable[[], Any] = zstandard.ZstdDecompressor().decompressobj
        self._error: type[Exception] = zstandard.ZstdError
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            left_over = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = left_over or self._source.read(1 << 16)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("truncated: the file ends inside a zstd frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new()
            try:
                self._ready = self._frame.decompress(data)
            except self._error as error:
                raise OSError(0, f"not valid zstd: {error}") from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _read_text(stream: IO[bytes], path: Path, log: ReadLog) -> Iterator[Document]:
    start = 0  # of ``data`` within the decompressed file
    data = stream.read(PIECE_BYTES + 1)
    if data.startswith(_BOM):
        data, start = data[3:], 3
    many = len(data) > PIECE_BYTES
    if not data:
        log.num_empty += 1
    while data:
        cut = _cut(data) if len(data) > PIECE_BYTES else len(data)
        location = f"{path}: byte {start}" if many else str(path)
        document = text_document(_decode(data[:cut], start, str(path)), location)
        if document:
            yield document
        else:
            log.num_empty += 1
        data, start = data[cut:] + stream.read(PIECE_BYTES + 1 - (len(data) - cut)), start + cut


def _cut(data: bytes) -> int:
    """Where to end a piece of at most `PIECE_BYTES`: behind the last blank line, line end or character in reach."""
    for border in (b"\n\n", b"\r\n\r\n", b"\n"):
        at = data.rfind(border, PIECE_BYTES // 2, PIECE_BYTES)
        if at >= 0:
            return at + len(border)
    cut = PIECE_BYTES
    while cut > PIECE_BYTES - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _decode(data: bytes, start: int, where: str) -> str:
    nul = data.find(0)
    if nul >= 0:
        raise DataError(f"{where}: NUL byte at byte offset {start + nul}; this is a binary file, not text")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: invalid UTF-8 at byte offset {start + error.start} (0x{data[error.start]:02x}); "
            f"convert the file to UTF-8, or leave it out"
        ) from None


def _read_jsonl(stream: IO[bytes], path: Path, text_key: str, log: ReadLog) -> Iterator[Document]:
    for line, start, location in _lines(stream, path, log):
        try:
            table = _object(line, start, location)
            document = None if table is None else from_record(table, location, text_key)
        except DataError as error:
            log.report(error)
        else:
            if document:
                yield document
            else:
                log.num_empty += 1


def _lines(stream: IO[bytes], path: Path, log: ReadLog) -> Iterator[tuple[bytes, int, str]]:
    """Each line, where it starts in the decompressed file, and its location for messages; ends at one without an end."""
    number, start = 0, 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES:
            too_long = f"{path}: line {number} is longer than {MAX_LINE_BYTES >> 20} MiB; not a JSONL file?"
            log.report(DataError(too_long))
            return
        yield line.removeprefix(_BOM) if number == 1 else line, start, f"{path}:{number}"
        start += len(line)


def _object(line: bytes, start: int, location: str) -> dict[str, Any] | None:
    """The JSON object in a line; None where the line is blank."""
    text = _decode(line, start, location)
    if text.isspace() or not text:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{location}: a line must be a JSON object, got {type(record).__name__}")
    return record


def from_record(record: dict[str, Any], location: str, text_key: str) -> Document | None:
    """The document in a record: under ``text_key``, else under "messages", else under "ids"."""
    for key in (text_key, "messages", "ids"):
        if key in record:
            return document_from(record[key], location)
    raise DataError(
        f"{location}: no key {text_key!r}; the record has: {', '.join(map(repr, record)) or 'none'}; "
        "name the right one with --text-key"
    )


def optional(module: str, what: str) -> Any:
    """Import a library of the [formats] extra; `ConfigError` says how to install it for ``what``."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f'{what} needs {module}: install it with pip install "pellucid[formats]"') from error
