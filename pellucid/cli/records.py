"""JSONL files of requests, read with line numbers, and of results, appended so that an interrupted run resumes."""

import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.errors import ConfigError, RequestError, StorageError

Key = tuple[str | int, int]
"""The id of a request and the number of its sample."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request of a file."""

    id: str | int
    """Its "id", else the number of its line."""
    table: dict[str, Any]
    location: str
    """"FILE:LINE"."""


def read_records(path: Path) -> list[Record]:
    """All requests of a file; blank lines are skipped.

    Raises:
        RequestError: no such file, no request in it, a line that is no JSON object, or an id that is used twice or that no
            result could be written with; names the line.
    """
    records: dict[str | int, Record] = {}
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        try:
            table = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{location}: not JSON ({error})") from None
        if not isinstance(table, dict):
            raise RequestError(f"{location}: a line must be a JSON object, got {type(table).__name__}")
        id_ = table.get("id", number)
        if not isinstance(id_, (str, int)) or isinstance(id_, bool):
            raise RequestError(f'{location}: "id" must be text or a whole number, got {id_!r}')
        if isinstance(id_, str) and not _is_text(id_):
            raise RequestError(
                f'{location}: "id" {id_!r} has a lone surrogate, which no file can hold; give another id'
            )
        if id_ in records:
            raise RequestError(f"{location}: id {id_!r} is that of {records[id_].location} already; ids must differ")
        records[id_] = Record(id_, table, location)
    if not records:
        raise RequestError(f"{path} holds no request")
    return list(records.values())


def refuse_input(out: Path, source: Path, flag: str) -> None:
    """`ConfigError` where results would go into the very file, named by ``flag``, that holds the requests."""
    try:
        same = out.is_file() and os.path.samefile(out, source)
    except OSError:
        return  # whichever of them cannot be seen is named when it is opened
    if same:
        raise ConfigError(f"--out {out} is the file that {flag} reads; give another --out")


class OutFile:
    """Results, one line each, appended and flushed as they come.

    Lines that are there already are kept, but for a torn last one of ours, which is cut away.

    Args:
        known: what may stand in the file, in the order in which it has to.
        keys: what each result has behind its "id" and "sample", in order.
        stale: says why a result that is there is not one of what is asked now; None where it can be.

    Raises:
        RequestError: the file holds something else, or a result of a request that is not ``known`` or that is ``stale``;
            names the line. The file is as it was.
        StorageError: it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        known: Iterable[Key],
        keys: Sequence[str],
        stale: Callable[[Key, dict[str, Any]], str | None],
    ) -> None:
        self.path, self._keys, self._stale = path, keys, stale
        self._rank = {key: rank for rank, key in enumerate(known)}
        self._lines: dict[Key, bytes] = {}
        try:
            data = path.read_bytes() if path.is_file() else b""
            size = self._keep(data)
            self._file = open(path, "ab")  # noqa: SIM115 - held until finish
            if size < len(data):
                self._file.truncate(size)
        except OSError as error:
            raise self._error(error) from error

    def __contains__(self, key: Key) -> bool:
        return key in self._lines

    def add(self, key: Key, record: dict[str, Any]) -> None:
        """Append one result."""
        line = _encode(record) + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._error(error) from error
        self._lines[key] = line

    def finish(self) -> None:
        """Make the file durable. Where requests were added between old ones, bring it into their order."""
        ordered = sorted(self._lines, key=self._rank.__getitem__)
        try:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                os.fsync(self._file.fileno())  # devices and pipes have none
            self._file.close()
            if ordered != list(self._lines):
                temporary = self.path.with_name(f".{self.path.name}.tmp-{os.getpid()}")
                temporary.write_bytes(b"".join(self._lines[key] for key in ordered))
                os.replace(temporary, self.path)
        except OSError as error:
            raise self._error(error) from error

    def _keep(self, data: bytes) -> int:
        """Take over the complete lines of ``data``; the number of its bytes that stay."""
        *lines, torn = data.split(b"\n")
        for number, line in enumerate(lines, start=1):
            self._keep_line(line, f"{self.path}:{number}")
        # torn: the process ended while it was written; where nothing of ours stands before it, it may be anybody's
        if torn and not lines and not self._begins_result(torn):
            raise RequestError(f"{self.path}:1: {_ALIEN}")
        return len(data) - len(torn)

    def _keep_line(self, line: bytes, location: str) -> None:
        try:
            record = json.loads(line)
            key = record["id"], record.get("sample", 0)
            known = key in self._rank
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
            raise RequestError(f"{location}: {_ALIEN}") from None
        if any(name not in record for name in self._keys):
            raise RequestError(f"{location}: {_ALIEN}")
        if not known:
            raise RequestError(
                f"{location}: id {key[0]!r} (sample {key[1]}) is not asked for; give another --out or remove it"
            )
        if (why := self._stale(key, record)) is not None:
            raise RequestError(
                f"{location}: id {key[0]!r} is there already and {why}; give another --out or delete the file"
            )
        self._lines[key] = line + b"\n"

    def _begins_result(self, line: bytes) -> bool:
        """Whether it is the beginning of a line that would be written for something ``known``."""
        for id_, sample in self._rank:
            for head in ({"id": id_}, {"id": id_, "sample": sample}):
                start = _encode(head | {self._keys[0]: None}).removesuffix(b"null}")
                if line[: len(start)] == start[: len(line)]:
                    return True
        return False

    def _error(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path}: cannot be written ({error.strerror}); free space or choose another place")


_ALIEN = "not a result of this command; give another --out"


def _encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: invalid UTF-8 at byte offset {error.start}") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror})") from error
