"""Records on disk: examples for post-training, each a row of token ids cut into parts.

A DATA folder of kind "sft", "dpo" or "grpo" is one of text (see `pellucid.data.shards`) whose documents are records, with
one more file a shard, ``train-00000.marks.bin``: a byte for each token, of which bit 0 says that the token is learnt and the
others say in which part of the record it stands. The parts are

- sft: the conversation (0);
- dpo: the prompt (0), the chosen answer (1) and the rejected one (2);
- grpo: the prompt (0) and, in stored rollouts, the answers of its group (1, 2, ...).

For grpo ``train-00000.records.jsonl`` holds a JSON object for each record and ``train-00000.records.bin`` where each line
ends in it (uint64, little-endian).
"""

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pellucid.data.index import BUFFER_BYTES, DTYPES, INDEX, DataIndex, HashedFile, read_index
from pellucid.data.shards import IntArray, Split, docs_name, pread_all, sha256_of, tokenizer_of
from pellucid.errors import DataError

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

BoolArray = npt.NDArray[np.bool_]
MAX_PARTS = 128
_ENDS = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a record. ``learnt`` says which of ``ids`` [n] the model is to produce."""

    ids: IntArray
    learnt: BoolArray


@dataclass(frozen=True, slots=True)
class Record:
    """One example: its parts in order, none empty but a dpo record's prompt, and for grpo what rewards are given."""

    parts: tuple[Part, ...]
    table: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Of all parts."""
        return sum(len(part.ids) for part in self.parts)


def marks_name(file: str) -> str:
    """The name of the marks that belong to a ``.bin`` file."""
    return file.removesuffix(".bin") + ".marks.bin"


def tables_names(file: str) -> tuple[str, str]:
    """The names of the JSON lines, and of where they end, that belong to a ``.bin`` file."""
    stem = file.removesuffix(".bin")
    return stem + ".records.jsonl", stem + ".records.bin"


class RecordWriter:
    """Appends records to one split, in order. `StorageError` names the file that could not be written."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int, *, tables: bool) -> None:
        """``shard_tokens``: tokens a file at most, but a record is never split; ``tables``: records have JSON objects."""
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, DTYPES[dtype], shard_tokens
        self._tables = tables
        self._open: list[HashedFile] = []
        self._in_shard = self._json_bytes = 0
        self._entry: dict[str, Any] = {"tokens": 0, "documents": 0, "files": [], "bytes": {}, "sha256": {}}
        self._entry |= {"supervised": 0, "longest": 0}

    @property
    def num_records(self) -> int:
        """So far."""
        return int(self._entry["documents"])

    def add(self, record: Record) -> None:
        """Append one record."""
        assert len(record.parts) <= MAX_PARTS and record.num_tokens and (record.table is not None) == self._tables
        if self._open and self._in_shard + record.num_tokens > self._shard_tokens:
            self._close_shard()
        if not self._open:
            self._open_shard()
        learnt = np.concatenate([part.learnt for part in record.parts])
        marks = [part.learnt.astype(np.uint8) | np.uint8(2 * i) for i, part in enumerate(record.parts)]
        self._in_shard += record.num_tokens
        tokens, docs, marked, *tables = self._open
        tokens.write(np.concatenate([part.ids for part in record.parts]).astype(self._dtype).tobytes())
        docs.write(np.array([self._in_shard], _ENDS).tobytes())
        marked.write(np.concatenate(marks).tobytes())
        if tables:
            line = (json.dumps(record.table, ensure_ascii=False) + "\n").encode()
            self._json_bytes += len(line)
            tables[0].write(line)
            tables[1].write(np.array([self._json_bytes], _ENDS).tobytes())
        entry = self._entry
        entry["tokens"] += record.num_tokens
        entry["documents"] += 1
        entry["supervised"] += int(learnt.sum())
        entry["longest"] = max(entry["longest"], record.num_tokens)

    def finish(self) -> dict[str, Any]:
        """Write everything out durably and return the entry of ``index["splits"]``."""
        if self._open:
            self._close_shard()
        return self._entry

    def close(self) -> None:
        """Release the files; needed where ``finish`` was not reached."""
        for file in self._open:
            file.abandon()
        self._open = []

    def _open_shard(self) -> None:
        name = f"{self._split}-{len(self._entry['files']):05d}.bin"
        names = [name, docs_name(name), marks_name(name), *(tables_names(name) if self._tables else ())]
        for file in names:
            self._open.append(HashedFile(self._folder / file))
        self._entry["files"].append(name)

    def _close_shard(self) -> None:
        for file in self._open:
            self._entry["sha256"][file.path.name], self._entry["bytes"][file.path.name] = file.finish()
        self._open, self._in_shard, self._json_bytes = [], 0, 0


class RecordData:
    """A DATA folder of records, open for reading; see `RecordData.open`."""

    def __init__(self, folder: Path, index: DataIndex) -> None:
        self.folder, self.index = folder, index
        self._splits = {name: RecordSplit(folder, name, index) for name in index.splits}

    @classmethod
    def open(cls, folder: str | Path) -> "RecordData":
        """Open a DATA folder: checks the index and every file's size, reads no tokens.

        Raises:
            DataError: it holds text, or names the first file that is missing, truncated or does not fit the others.
        """
        folder = Path(folder)
        index = read_index(folder)
        if index.kind == "tokens":
            raise DataError(
                f"{folder} holds text, not records; make records with `pellucid prepare --for sft`, dpo or grpo, or train on the "
                "text with strategy.name pretrain"
            )
        return cls(folder, index)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordData.open, (self.folder,)  # file handles do not travel to another process

    @property
    def kind(self) -> str:
        """ "sft", "dpo" or "grpo"."""
        return self.index.kind

    @property
    def vocab_size(self) -> int:
        """Highest id + 1 that the tokenizer of this data has."""
        return self.index.vocab_size

    @property
    def tokenizer_sha256(self) -> str:
        """Of the bytes of tokenizer.json."""
        return self.index.tokenizer_sha256

    def split(self, name: str) -> "RecordSplit":
        """The split ``name``; `DataError` where the data has none of that name."""
        if name not in self._splits:
            raise DataError(f"{self.folder} has no split {name!r}; it has: {', '.join(self._splits) or 'none'}")
        return self._splits[name]

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer that made the ids; `DataError` where tokenizer.json is another one."""
        return tokenizer_of(self.folder, self.index)

    def verify(self) -> None:
        """Read everything: hashes, ids, ends, marks, JSON; `DataError` names the first bad file."""
        for split in self._splits.values():
            split.verify()
        self.tokenizer()


class RecordSplit:
    """The records of one split, by number. Safe to read from many threads."""

    def __init__(self, folder: Path, name: str, index: DataIndex) -> None:
        self.name, self.folder, self.kind, self.rollouts = name, folder, index.kind, index.rollouts
        self._entry = index.splits[name]
        self.identity = index.identity(name)
        self._fds: list[int] = []
        self._tokens = Split(folder, name, index)
        self.num_tokens, self.num_documents = self._tokens.num_tokens, self._tokens.num_documents
        ends = self._tokens.document_spans(0, self.num_tokens)[1] if self.num_tokens else np.empty(0, np.int64)
        self._ends = np.concatenate([[0], ends])
        self._line_ends: list[npt.NDArray[np.uint64]] = []
        first, self._first_tokens, self._first_records = 0, [], []
        for file in self._entry.files:
            self._first_tokens.append(first)
            self._first_records.append(int(np.searchsorted(self._ends, first)))
            first += self._open_file(marks_name(file))
            if self.kind == "grpo":
                self._open_tables(file)
        if first != self.num_tokens:
            raise DataError(
                f"{folder}: the marks of split {name!r} are of {first:,} tokens and it has {self.num_tokens:,}; "
                "prepare the data again"
            )

    def __len__(self) -> int:
        return self.num_documents

    @property
    def lengths(self) -> IntArray:
        """[N], the tokens of each record."""
        return np.diff(self._ends)

    def record(self, number: int) -> Record:
        """One record whole."""
        start, stop = int(self._ends[number]), int(self._ends[number + 1])
        shard = max(int(np.searchsorted(self._first_tokens, start, side="right")) - 1, 0)
        width = 1 if self.kind != "grpo" else 2
        marks = np.frombuffer(
            self._read(shard * width, stop - start, start - self._first_tokens[shard]), dtype=np.uint8
        )
        ids = self._tokens.read(start, stop)
        borders = [0, *np.searchsorted(marks >> 1, range(1, self._num_parts(marks))).tolist(), len(ids)]
        learnt = (marks & 1).astype(bool)
        parts = tuple(Part(ids[a:b], learnt[a:b]) for a, b in itertools.pairwise(borders))
        return Record(parts, self._table(shard, number) if self.kind == "grpo" else None)

    def verify(self) -> None:
        """As `RecordData.verify`, of this split."""
        self._tokens.verify()
        for file in self._entry.files:
            for name in (marks_name(file), *(tables_names(file) if self.kind == "grpo" else ())):
                if sha256_of(self.folder / name) != self._entry.sha256.get(name):
                    raise DataError(
                        f"{self.folder / name} is damaged: its sha256 is not the one in {INDEX}; prepare the data again"
                    )
        supervised = 0
        for shard, file in enumerate(self._entry.files):
            size = self._entry.bytes[marks_name(file)]
            fd = shard * (1 if self.kind != "grpo" else 2)
            for offset in range(0, size, BUFFER_BYTES):
                marks = np.frombuffer(self._read(fd, min(BUFFER_BYTES, size - offset), offset), dtype=np.uint8)
                supervised += int((marks & 1).sum())
        if supervised != self._entry.supervised:
            raise DataError(
                f"{self.folder / INDEX} says {self._entry.supervised:,} learnt tokens; there are {supervised:,}"
            )
        if self.kind == "grpo":
            for number in range(len(self)):
                self.record(number)

    def _num_parts(self, marks: npt.NDArray[np.uint8]) -> int:
        return {"sft": 1, "dpo": 3}.get(self.kind, int(marks[-1] >> 1) + 1)

    def _table(self, shard: int, number: int) -> dict[str, Any]:
        at, ends = number - self._first_records[shard], self._line_ends[shard]
        start = int(ends[at - 1]) if at else 0
        line = self._read(2 * shard + 1, int(ends[at]) - start, start)
        try:
            table = json.loads(line)
        except (ValueError, RecursionError) as error:
            path = self.folder / tables_names(self._entry.files[shard])[0]
            raise DataError(f"{path} is damaged: line {at + 1} is not JSON; prepare the data again") from error
        assert isinstance(table, dict)
        return table

    def _read(self, file: int, size: int, offset: int) -> bytes:
        data = pread_all(self._fds[file], size, offset)
        if len(data) != size:
            raise DataError(f"{self.folder}: a file was truncated while it was open; prepare the data again")
        return data

    def _open_file(self, name: str) -> int:
        path = self.folder / name
        try:
            size = path.stat().st_size
            self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); prepare the data again") from error
        expected = self._entry.bytes.get(name, -1)
        if size != expected:
            what = "truncated" if size < expected else "damaged"
            raise DataError(f"{path} is {what}: {size:,} bytes where {INDEX} says {expected:,}; prepare the data again")
        return size

    def _open_tables(self, file: str) -> None:
        lines, line_ends = tables_names(file)
        size = self._open_file(lines)
        path = self.folder / line_ends
        expected = self._entry.bytes.get(line_ends, -1)
        if not path.is_file() or path.stat().st_size != expected or expected % _ENDS.itemsize:
            raise DataError(f"{path} is missing, truncated or damaged; prepare the data again")
        ends = np.memmap(path, dtype=_ENDS, mode="r")
        if int(ends[-1]) != size:
            raise DataError(f"{path} is damaged: its lines end at {int(ends[-1]):,} of {size:,} bytes")
        self._line_ends.append(ends)

    def __del__(self) -> None:
        for fd in getattr(self, "_fds", ()):
            os.close(fd)


def part(ids: Sequence[int] | IntArray, learnt: Sequence[bool] | BoolArray | bool = False) -> Part:
    """A part from lists; one bool stands for all of its ids."""
    array = np.asarray(ids, np.int64).reshape(-1)
    mask = np.full(len(array), learnt) if isinstance(learnt, bool) else np.asarray(learnt, bool)
    assert mask.shape == array.shape
    return Part(array, mask)
