"""Token shards on disk: how a DATA folder is written, opened, read and checked.

A folder holds ``index.json`` and, for each split, pairs of files: ``train-00000.bin`` with token ids (uint16 where
the vocabulary has at most 65,536 ids, else uint32; little-endian) and ``train-00000.docs.bin`` with the exclusive end
offset of each document within its ``.bin``, in tokens (uint64, little-endian). A document is never split over files.

Reading uses ``pread`` into a small buffer rather than a mapping of the tokens: memory stays flat however much is read,
a file that shrinks under a reader is an error and not a SIGBUS, and any number of threads may read at once.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pellucid.data.index import BUFFER_BYTES, DTYPES, INDEX, DataIndex, HashedFile, read_index
from pellucid.errors import DataError

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

_ENDS = np.dtype("<u8")

IntArray: TypeAlias = npt.NDArray[np.int64]


def dtype_for(vocab_size: int) -> str:
    """``"uint16"`` where every id below ``vocab_size`` fits it, else ``"uint32"``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def docs_name(file: str) -> str:
    """The name of the document offsets that belong to a ``.bin`` file."""
    return file.removesuffix(".bin") + ".docs.bin"


# -- writing ------------------------------------------------------------------------------------------------


class ShardWriter:
    """Appends documents to one split, in order. `StorageError` names the file that could not be written.

    ``finish`` makes the files durable; until then, and after ``close`` alone, they are not to be used.
    """

    def __init__(self, folder: str | Path, split: str, dtype: str, shard_tokens: int) -> None:
        """``shard_tokens``: tokens a file at most; a single longer document gets a file of its own."""
        assert dtype in DTYPES and shard_tokens >= 1
        self._folder, self._split = Path(folder), split
        self._dtype, self._shard_tokens = DTYPES[dtype], shard_tokens
        self._open: tuple[HashedFile, HashedFile] | None = None
        self._in_shard = 0
        self.num_tokens = 0
        self.num_documents = 0
        self._files: list[str] = []
        self._sha256: dict[str, str] = {}
        self._bytes: dict[str, int] = {}

    def add(self, ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append one document of at least one token."""
        self.add_many(np.asarray(ids, dtype=np.int64), np.array([len(ids)], dtype=np.int64))

    def add_many(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Append documents that lie one after another in ``ids`` [sum(lengths)]; each length is at least 1."""
        if not len(lengths):
            return
        assert len(ids) == int(lengths.sum()) and int(lengths.min()) >= 1
        if ids.dtype != self._dtype:
            assert int(ids.min()) >= 0 and int(ids.max()) <= np.iinfo(self._dtype).max
            ids = ids.astype(self._dtype)
        ends = np.cumsum(lengths, dtype=np.int64)
        first, start = 0, 0
        while first < len(ends):
            stop = int(np.searchsorted(ends, start + self._shard_tokens - self._in_shard, side="right"))
            if stop <= first:  # below it where the open shard has more than shard_tokens already
                if self._open:
                    self._close_shard()
                    continue
                stop = first + 1
            self._append(ids[start : ends[stop - 1]], ends[first:stop] - start)
            first, start = stop, int(ends[stop - 1])

    def finish(self) -> dict[str, Any]:
        """Write everything out and return the entry of ``index["splits"]``."""
        if self._open:
            self._close_shard()
        return {
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "files": self._files,
            "bytes": self._bytes,
            "sha256": self._sha256,
        }

    def close(self) -> None:
        """Give up: release the file handles without writing what is still in memory."""
        for file in self._open or ():
            file.abandon()
        self._open = None

    def _append(self, ids: npt.NDArray[Any], ends: IntArray) -> None:
        if not self._open:
            name = f"{self._split}-{len(self._files):05d}.bin"
            self._open = HashedFile(self._folder / name), HashedFile(self._folder / docs_name(name))
            self._files.append(name)
        tokens, docs = self._open
        tokens.write(ids.tobytes())
        docs.write((ends + self._in_shard).astype(_ENDS).tobytes())
        self._in_shard += len(ids)
        self.num_tokens += len(ids)
        self.num_documents += len(ends)

    def _close_shard(self) -> None:
        assert self._open
        for file in self._open:
            self._sha256[file.path.name], self._bytes[file.path.name] = file.finish()
        self._open, self._in_shard = None, 0


# -- reading ------------------------------------------------------------------------------------------------


class TokenData:
    """A DATA folder, open for reading; see `TokenData.open`."""

    def __init__(self, folder: Path, index: DataIndex, splits: dict[str, "Split"]) -> None:
        self.folder = folder
        self.index = index
        self._splits = splits

    @classmethod
    def open(cls, folder: str | Path) -> "TokenData":
        """Open a DATA folder: checks the index and every file's size, reads no tokens.

        Raises:
            DataError: names the first file that is missing, truncated or does not fit the others.
        """
        folder = Path(folder)
        index = read_index(folder)
        if index.kind != "tokens":
            raise DataError(
                f"{folder} holds records for {index.kind}, not text; use them with strategy.name {index.kind}, or make text data "
                "with `pellucid prepare` without --for"
            )
        return cls(folder, index, {name: Split(folder, name, index) for name in index.splits})

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenData.open, (self.folder,)  # file handles do not travel to another process

    @property
    def vocab_size(self) -> int:
        """Highest id + 1 that the tokenizer of this data has."""
        return self.index.vocab_size

    @property
    def tokenizer_sha256(self) -> str:
        """Of the bytes of tokenizer.json."""
        return self.index.tokenizer_sha256

    @property
    def split_names(self) -> list[str]:
        """Of "train" and "val", those that are there."""
        return list(self._splits)

    def split(self, name: str) -> "Split":
        """The split ``name``; `DataError` where the data has none of that name."""
        if name not in self._splits:
            raise DataError(f"{self.folder} has no split {name!r}; it has: {', '.join(self._splits) or 'none'}")
        return self._splits[name]

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer that made the ids; `DataError` where tokenizer.json is another one."""
        return tokenizer_of(self.folder, self.index)

    def verify(self) -> None:
        """Read everything: hashes, ids below ``vocab_size``, document ends; `DataError` names the first bad file."""
        for split in self._splits.values():
            split.verify()
        self.tokenizer()


def tokenizer_of(folder: Path, index: DataIndex) -> "Tokenizer":
    """The tokenizer in a DATA folder; `DataError` where it is not the one that made the ids."""
    from pellucid.tokenizer import Tokenizer

    path = folder / "tokenizer.json"
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); prepare the data again") from error
    if digest != index.tokenizer_sha256:
        raise DataError(
            f"tokenizer {path} does not belong to this data: its sha256 is {digest} and {INDEX} says "
            f"{index.tokenizer_sha256}; prepare the data again"
        )
    return Tokenizer.load(folder)


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    fd: int
    first_token: int
    num_tokens: int
    first_document: int
    ends: npt.NDArray[np.uint64]  # mapped: exclusive ends within this shard


class Split:
    """The documents of one split as one long row of tokens. Safe to read from many threads."""

    def __init__(self, folder: Path, name: str, index: DataIndex) -> None:
        self.name = name
        self._entry = index.splits[name]
        self.identity = index.identity(name)
        self._dtype, self._vocab_size = DTYPES[index.dtype], index.vocab_size
        self._shards: list[_Shard] = []
        self.num_tokens = 0
        self.num_documents = 0
        for file in self._entry.files:
            shard = self._open_shard(folder / file)
            self._shards.append(shard)
            self.num_tokens += shard.num_tokens
            self.num_documents += len(shard.ends)
        self._first_tokens = np.array([s.first_token for s in self._shards], dtype=np.int64)
        if (self.num_tokens, self.num_documents) != (self._entry.tokens, self._entry.documents):
            raise DataError(
                f"{folder / INDEX}: split {name!r} should have {self._entry.tokens:,} tokens in "
                f"{self._entry.documents:,} documents and its files hold {self.num_tokens:,} in "
                f"{self.num_documents:,}; prepare the data again"
            )

    def read(self, start: int, stop: int) -> IntArray:
        """Tokens ``[start, stop)`` of the split, across shard borders, as a new int64 array."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of split {self.name!r}, which has {self.num_tokens}")
        out = np.empty(stop - start, dtype=np.int64)
        at = self._shard_at(start)
        done = 0
        while done < len(out):
            shard = self._shards[at]
            offset = start + done - shard.first_token
            count = min(len(out) - done, shard.num_tokens - offset)
            out[done : done + count] = self._pread(shard, offset, count)
            done += count
            at += 1
        return out

    def document_spans(self, start: int, stop: int) -> tuple[int, IntArray]:
        """The documents that overlap ``[start, stop)``, which must not be empty.

        Returns:
            The id of the first of them (its rank in the split) and the exclusive end of each, in tokens from the
            split's beginning; the last end is at least ``stop``.
        """
        if not 0 <= start < stop <= self.num_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of split {self.name!r}, which has {self.num_tokens}")
        at = self._shard_at(start)
        first_id: int | None = None
        parts: list[IntArray] = []
        while at < len(self._shards) and self._shards[at].first_token < stop:
            shard = self._shards[at]
            # needles of the array's own dtype: another one makes searchsorted copy the whole mapping
            low = int(np.searchsorted(shard.ends, np.uint64(max(start - shard.first_token, 0)), side="right"))
            high = int(np.searchsorted(shard.ends, np.uint64(stop - shard.first_token), side="left"))
            first_id = shard.first_document + low if first_id is None else first_id
            parts.append(shard.ends[low : high + 1].astype(np.int64) + shard.first_token)
            at += 1
        assert first_id is not None
        return first_id, np.concatenate(parts)

    def verify(self) -> None:
        """Hashes of all files, ids below the vocabulary, increasing document ends; `DataError` names the file."""
        for shard in self._shards:
            for path in (shard.path, shard.path.with_name(docs_name(shard.path.name))):
                expected = self._entry.sha256.get(path.name)
                if expected is not None and sha256_of(path) != expected:
                    raise DataError(f"{path} is damaged: its sha256 is not the one in {INDEX}; prepare the data again")
            for offset in range(0, shard.num_tokens, BUFFER_BYTES):
                ids = self._pread(shard, offset, min(BUFFER_BYTES, shard.num_tokens - offset))
                if int(ids.max()) >= self._vocab_size:
                    raise DataError(f"{shard.path} holds id {ids.max()}, outside the vocabulary of {self._vocab_size}")
            ends = np.asarray(shard.ends)
            if len(ends) and (ends[0] == 0 or bool((ends[1:] <= ends[:-1]).any())):
                raise DataError(f"{shard.path.with_name(docs_name(shard.path.name))}: document ends do not increase")

    def _shard_at(self, token: int) -> int:
        return max(int(np.searchsorted(self._first_tokens, token, side="right")) - 1, 0)

    def _pread(self, shard: _Shard, offset: int, count: int) -> npt.NDArray[Any]:
        size = self._dtype.itemsize
        data = os.pread(shard.fd, count * size, offset * size)
        if len(data) != count * size:  # a regular file gives less only at its end, or beyond 2 GiB a call
            data = pread_all(shard.fd, count * size, offset * size)
        if len(data) != count * size:
            raise DataError(f"{shard.path} was truncated while it was open; prepare the data again")
        return np.frombuffer(data, dtype=self._dtype)

    def _open_shard(self, path: Path) -> _Shard:
        docs_path = path.with_name(docs_name(path.name))
        size, docs_size = self._size_of(path), self._size_of(docs_path)
        if size % self._dtype.itemsize or not size:
            raise DataError(f"{path} is damaged: {size} bytes are no whole number of tokens; prepare the data again")
        if docs_size % _ENDS.itemsize or not docs_size:
            raise DataError(f"{docs_path} is damaged: {docs_size} bytes are no whole number of documents")
        ends = np.memmap(docs_path, dtype=_ENDS, mode="r")
        num_tokens = size // self._dtype.itemsize
        if int(ends[-1]) != num_tokens:
            bad = path if num_tokens < int(ends[-1]) else docs_path
            raise DataError(
                f"{bad} is truncated or damaged: documents end at token {int(ends[-1]):,} and {path.name} has "
                f"{num_tokens:,} tokens; prepare the data again"
            )
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _Shard(path, fd, self.num_tokens, num_tokens, self.num_documents, ends)

    def _size_of(self, path: Path) -> int:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); prepare the data again") from error
        expected = self._entry.bytes.get(path.name, size)
        if size != expected:
            what = "truncated" if size < expected else "damaged"
            raise DataError(f"{path} is {what}: {size:,} bytes where {INDEX} says {expected:,}; prepare the data again")
        return size

    def __del__(self) -> None:
        for shard in getattr(self, "_shards", ()):
            os.close(shard.fd)


def pread_all(fd: int, size: int, offset: int) -> bytes:
    """As os.pread, in as many calls as it takes; less than ``size`` only at the end of the file."""
    parts = []
    while size and (part := os.pread(fd, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
