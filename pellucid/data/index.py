"""index.json of a DATA folder, and files that are hashed as they are written."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.errors import DataError, StorageError

FORMAT = "pellucid-data"
FORMAT_VERSION = 1
INDEX = "index.json"
KINDS = ("tokens", "sft", "dpo", "grpo")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """One split as index.json has it. ``bytes`` and ``sha256`` go by file name, document offsets included."""

    tokens: int
    documents: int
    files: tuple[str, ...]
    bytes: dict[str, int]
    sha256: dict[str, str]
    supervised: int
    """Of records: tokens that are learnt. Of text: 0."""
    longest: int
    """Of records: tokens of the longest. Of text: 0."""


@dataclass(frozen=True, slots=True)
class DataIndex:
    """index.json, checked. ``sources`` are {"name", "licence", "bytes"}, with "attribution" where one is due."""

    kind: str
    dtype: str
    vocab_size: int
    tokenizer_sha256: str
    splits: dict[str, SplitIndex]
    sources: list[dict[str, Any]]
    rollouts: bool
    """Of kind "grpo": answers and rewards are stored beside the prompts."""

    def identity(self, split: str) -> dict[str, str]:
        """What equal data has too, whatever its folder is called: "tokenizer", and "data" where the index has hashes."""
        known = {"tokenizer": self.tokenizer_sha256}
        if hashes := self.splits[split].sha256:
            known["data"] = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
        return known


def write_index(
    folder: Path,
    *,
    dtype: str,
    vocab_size: int,
    tokenizer_sha256: str,
    splits: dict[str, dict[str, Any]],
    sources: list[dict[str, Any]],
    kind: str = "tokens",
    rollouts: bool = False,
) -> None:
    """Write index.json durably; the last file of a DATA folder to appear."""
    index = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": kind,
        **({"rollouts": True} if rollouts else {}),
        "dtype": dtype,
        "vocab_size": vocab_size,
        "tokenizer_sha256": tokenizer_sha256,
        "splits": splits,
        "sources": sources,
    }
    file = HashedFile(folder / INDEX)
    try:
        file.write((json.dumps(index, indent=1, ensure_ascii=False) + "\n").encode())
        file.finish()
    finally:
        file.abandon()


def read_index(folder: Path) -> DataIndex:
    """Read and check index.json; `DataError` names what is wrong with it."""
    path = folder / INDEX
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        missing = "no such folder" if not folder.exists() else f"no {INDEX} in it, so it is not prepared data"
        raise DataError(f"{folder}: {missing}; make it with `pellucid prepare INPUT --out {folder}`") from None
    except NotADirectoryError:
        raise DataError(f"{folder} is a file; give the folder made by `pellucid prepare`") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: not JSON ({error}); prepare the data again") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise DataError(f'{path} is not an index of Pellucid\'s data: "format" must be "{FORMAT}"')
    version = raw.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DataError(
            f"{path} has format_version {version}, made by a newer version of Pellucid; this one reads up to "
            f"{FORMAT_VERSION}: upgrade Pellucid or prepare the data again"
        )
    try:
        return _index_from(raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} is damaged: {what}; prepare the data again") from error


def _index_from(raw: dict[str, Any]) -> DataIndex:
    if raw["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format_version is {raw['format_version']!r}")
    if raw["kind"] not in KINDS:
        raise ValueError(f"kind is {raw['kind']!r}, known: {', '.join(KINDS)}")
    if raw["dtype"] not in DTYPES:
        raise ValueError(f"dtype is {raw['dtype']!r}, known: {', '.join(DTYPES)}")
    vocab_size = int(raw["vocab_size"])
    if not 0 < vocab_size <= np.iinfo(DTYPES[raw["dtype"]]).max + 1:
        raise ValueError(f"vocab_size {vocab_size} does not fit dtype {raw['dtype']}")
    splits = {}
    for name, entry in raw["splits"].items():
        files = tuple(entry["files"])
        for file in files:
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".bin"):
                raise ValueError(f"splits.{name}.files holds {file!r}, not the name of a .bin file beside it")
        splits[name] = SplitIndex(
            int(entry["tokens"]),
            int(entry["documents"]),
            files,
            dict(entry.get("bytes", {})),
            dict(entry.get("sha256", {})),
            int(entry.get("supervised", 0)),
            int(entry.get("longest", 0)),
        )
    digest, sources = str(raw["tokenizer_sha256"]), list(raw.get("sources", []))
    rollouts = raw["kind"] == "grpo" and bool(raw.get("rollouts", False))
    return DataIndex(raw["kind"], raw["dtype"], vocab_size, digest, splits, sources, rollouts)


class HashedFile:
    """A new file, hashed as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = bytearray()
        self._hash = hashlib.sha256()
        self._size = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            raise storage_error(path, error) from error

    def write(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= BUFFER_BYTES:
            self._flush()

    def finish(self) -> tuple[str, int]:
        """Flush, fsync and close; the sha256 and the size in bytes."""
        try:
            self._flush()
            os.fsync(self._fd)
        except OSError as error:
            raise storage_error(self.path, error) from error
        self.abandon()
        return self._hash.hexdigest(), self._size

    def abandon(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        self._hash.update(self._buffer)
        self._size += len(self._buffer)
        rest = memoryview(bytes(self._buffer))
        self._buffer.clear()
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise storage_error(self.path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """What to raise where writing ``path`` failed."""
    return StorageError(f"{path}: cannot be written ({error.strerror}); free space or choose another place")
