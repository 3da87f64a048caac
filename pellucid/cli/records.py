"""JSONL files of requests, read with line numbers, and of results, appended so that an interrupted run resumes."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.errors import RequestError, StorageError

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
        RequestError: no such file, no request in it, a line that is no JSON object, or an id used twice; names the line.
    """
    records: dict[str | int, Record] = {}
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        try:
            table = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{location}: not JSON ({error})") from None
        if not isinstance(table, dict):
            raise RequestError(f"{location}: a line must be a JSON object, got {type(table).__name__}")
        id_ = table.get("id", number)
        if not isinstance(id_, (str, int)) or isinstance(id_, bool):
            raise RequestError(f'{location}: "id" must be text or a whole number, got {id_!r}')
        if id_ in records:
            raise RequestError(f"{location}: id {id_!r} is that of {records[id_].location} already; ids must differ")
        records[id_] = Record(id_, table, location)
    if not records:
        raise RequestError(f"{path} holds no request")
    return list(records.values())


class OutFile:
    """Results, one line each, appended and flushed as they come.

    Lines that are there already are kept, but for a torn last one, which is cut away.

    Args:
        known: what may stand in the file, in the order in which it has to.

    Raises:
        RequestError: the file holds a broken line, or a result of a request that is not ``known``; names the line.
        StorageError: it cannot be written.
    """

    def __init__(self, path: Path, known: Iterable[Key]) -> None:
        self.path = path
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
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
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
            os.fsync(self._file.fileno())
            self._file.close()
            if ordered != list(self._lines):
                temporary = self.path.with_name(f".{self.path.name}.tmp-{os.getpid()}")
                temporary.write_bytes(b"".join(self._lines[key] for key in ordered))
                os.replace(temporary, self.path)
        except OSError as error:
            raise self._error(error) from error

    def _keep(self, data: bytes) -> int:
        """Take over the complete lines of ``data``; the number of its bytes that stay."""
        size = 0
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break  # torn: the process ended while it was written
            try:
                record = json.loads(line)
                key = record["id"], record.get("sample", 0)
            except (ValueError, KeyError, AttributeError, TypeError):
                raise RequestError(f"{self.path}:{number}: not a result of this command; give another --out") from None
            if key not in self._rank:
                raise RequestError(
                    f"{self.path}:{number}: id {key[0]!r} (sample {key[1]}) is not asked for; give another --out or remove it"
                )
            self._lines[key] = line
            size += len(line)
        return size

    def _error(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path}: cannot be written ({error.strerror}); free space or choose another place")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: invalid UTF-8 at byte offset {error.start}") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror})") from error
