"""Batches with one resumable global cursor.

B sequences, T tokens of context, N training windows.

The order is a function: sample ``index`` of ``epoch`` is window ``permute(index, N, key)``, computed and never stored,
so that a run resumes at any sample, and any number of ranks sees the same samples in the same step.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pellucid.data.shards import Split
from pellucid.errors import CheckpointError, ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of packed documents. All tensors ``[B, T]`` but the last.

    Rows that fill up a batch have sample id -1 and no supervised token.
    """

    tokens: Tensor
    """int64."""
    targets: Tensor
    """int64, the next token; arbitrary where not supervised."""
    loss_mask: Tensor
    """bool, the supervised positions: never across the border of a document."""
    positions: Tensor
    """int64, from 0 at the start of each document or window."""
    document_ids: Tensor
    """int64, global within the split; -1 beyond its end. A token attends within its document."""
    sample_ids: Tensor
    """int64 ``[B]``, the windows."""
    packed: bool
    """Some row holds more than one document."""

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self) if f.name != "packed"
        }
        return replace(self, **moved)


AnyBatch = TypeVar("AnyBatch")


class Counted(Protocol):
    """A split of any kind."""

    num_tokens: int
    num_documents: int


class Samples(ABC, Generic[AnyBatch]):
    """What an epoch visits once each, by number. There are as many in every epoch."""

    split: Counted

    @property
    def identity(self) -> dict[str, str]:
        """What samples of equal data have too: hashes of prepared files and of their tokenizer; of anything else nothing."""
        known: dict[str, str] = getattr(getattr(self, "split", None), "identity", {})
        return known

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, sample_ids: list[int], rows: int = 0) -> AnyBatch:
        """The samples of these ids, filled up to ``rows`` with empty ones."""

    def for_epoch(self, key: int) -> "Samples[AnyBatch]":
        """The samples as they are in the epoch of this key: a function of ``key``. Here the same in each."""
        return self

    def batches(self, micro_batch: int) -> Iterator[AnyBatch]:
        """Each sample once, in order, in batches of equally many."""
        for i in range(-(-len(self) // micro_batch)):
            yield self.batch_number(i, micro_batch)

    def batch_number(self, i: int, micro_batch: int) -> AnyBatch:
        """The i-th of `batches`."""
        first = i * micro_batch
        return self.batch(list(range(first, min(first + micro_batch, len(self)))), micro_batch)


class Windows(Samples[Batch]):
    """The windows of a split: ``context`` tokens and their targets, every ``stride`` tokens.

    The last window may reach beyond the end; what is there is not supervised, so that no token is lost and every
    window has the same shape.

    Args:
        score_once: of windows that overlap, supervise each target in the first window that holds it.
            Validation does; training sees overlapping targets as often as they come.

    Raises:
        ConfigError: a stride longer than the context would skip tokens.
        DataError: the split has no target at all.
    """

    def __init__(self, split: Split, context: int, stride: int = 0, *, score_once: bool = False) -> None:
        self.split: Split = split
        self.context, self.stride = context, stride or context
        if self.stride > context:
            raise ConfigError(f"data.stride {self.stride} is longer than the context {context} and would skip tokens")
        if split.num_tokens < 2:
            raise DataError(f"the split has {split.num_tokens} tokens; at least 2 are needed to predict one")
        self.score_once = score_once
        self._length = max(0, -(-(split.num_tokens - 1 - context) // self.stride)) + 1

    def __len__(self) -> int:
        return self._length

    def batch(self, sample_ids: list[int], rows: int = 0) -> Batch:
        """The windows of these ids, filled up with empty rows to ``rows``."""
        num = max(rows, len(sample_ids))
        length = self.context + 1
        tokens = np.zeros((num, length), np.int64)
        documents = np.full((num, length), -1, np.int64)
        positions = np.zeros((num, length), np.int64)
        mask = np.zeros((num, self.context), bool)
        steps = np.arange(length)
        for row, window in enumerate(sample_ids):
            start = window * self.stride
            ids = self.split.read(start, min(start + length, self.split.num_tokens))
            n = len(ids)
            first, ends = self.split.document_spans(start, start + n)
            index = np.searchsorted(ends, start + steps[:n], side="right")
            starts = np.maximum(np.concatenate([[start], ends[:-1]]), start)
            tokens[row, :n] = ids
            documents[row, :n] = first + index
            positions[row, :n] = start + steps[:n] - starts[index]
            mask[row] = (documents[row, 1:] == documents[row, :-1]) & (documents[row, 1:] >= 0)
            if self.score_once and window > 0:
                mask[row, : self.context - self.stride] = False
        ids_and_fill = list(sample_ids) + [-1] * (num - len(sample_ids))
        inputs = documents[:, :-1]
        return Batch(
            tokens=torch.from_numpy(tokens[:, :-1].copy()),
            targets=torch.from_numpy(tokens[:, 1:].copy()),
            loss_mask=torch.from_numpy(mask),
            positions=torch.from_numpy(positions[:, :-1].copy()),
            document_ids=torch.from_numpy(inputs.copy()),
            sample_ids=torch.tensor(ids_and_fill, dtype=torch.int64),
            packed=bool((inputs != inputs[:, :1]).any()),
        )


_OF_DATA = {
    "windows": "data of {} windows", "seed": "data in the order of seed {}",
    "data": "training data of hash {:.12}", "tokenizer": "data of a tokenizer of hash {:.12}",
}  # fmt: skip


class Loader(Generic[AnyBatch]):
    """The micro-batches of one optimizer step at a time, without end.

    The samples of a step are ``[cursor, cursor + global_batch)`` of the epoch's order; rank r takes the r-th of
    ``world_size`` equal slices. The last step of an epoch takes what is left. All ranks get equally many
    micro-batches of equal shape, filled up with empty rows.

    ``epoch`` and ``samples`` (consumed in this epoch, by all ranks) are the whole state, and with ``repeats`` also ``repeat``;
    the rest of a cursor says of what data it is.

    Args:
        repeats: steps in a row that get the same samples.
    """

    def __init__(
        self,
        windows: Samples[AnyBatch],
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
    ) -> None:
        if global_batch % (micro_batch * world_size):
            raise ConfigError(
                f"train.global_batch {global_batch} is not a multiple of train.micro_batch {micro_batch} x {world_size} ranks"
            )
        self.windows, self.global_batch, self.micro_batch, self.seed = windows, global_batch, micro_batch, seed
        self.rank, self.world_size, self.repeats = rank, world_size, repeats
        self.epoch = 0
        self.samples = 0
        self.repeat = 0
        """Steps that have had the samples which come next."""
        self._current: tuple[int, Samples[AnyBatch]] | None = None  # an epoch and its samples

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that visit every window once, or ``repeats`` times."""
        return -(-len(self.windows) // self.global_batch) * self.repeats

    def next_window(self) -> list[AnyBatch]:
        """The micro-batches of this rank for the next step; moves the cursor."""
        if self.samples >= len(self.windows):
            self.epoch, self.samples = self.epoch + 1, 0
        stop = min(self.samples + self.global_batch, len(self.windows))
        order = np.arange(self.samples, stop)
        key = (self.seed << 32) + self.epoch
        ids = permute(order, len(self.windows), key).tolist()
        if self._current is None or self._current[0] != self.epoch:
            self._current = self.epoch, self.windows.for_epoch(key)
        samples = self._current[1]
        self.repeat = (self.repeat + 1) % self.repeats
        if not self.repeat:
            self.samples = stop
        share = self.global_batch // self.world_size
        mine = ids[self.rank * share : (self.rank + 1) * share]
        num_micro = -(-min(len(ids), share) // self.micro_batch)  # rank 0's, so that all ranks agree
        return [
            samples.batch(mine[i * self.micro_batch : (i + 1) * self.micro_batch], self.micro_batch)
            for i in range(num_micro)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The global cursor: the same on every rank and for every world size."""
        repeat = {"repeat": self.repeat} if self.repeats > 1 else {}
        return {"epoch": self.epoch, "samples": self.samples, **self._order(), **repeat}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a cursor; `CheckpointError` if it is one of other data or another seed, as far as both sides know theirs."""
        for key, mine in self._order().items():
            theirs = state.get(key, mine)
            if theirs != mine:
                was, now = (_OF_DATA[key].format(value) for value in (theirs, mine))
                raise CheckpointError(
                    f"the checkpoint's cursor is in {was}, and this run has {now}; resume with the data (data.path) and the seed "
                    "that the run began with, or start a new run with --init"
                )
        self.epoch, self.samples, self.repeat = state["epoch"], state["samples"], state.get("repeat", 0) % self.repeats

    def _order(self) -> dict[str, Any]:
        """What the order of samples, and the samples themselves, depend on."""
        return {"windows": len(self.windows), "seed": self.seed, **self.windows.identity}


def permute(index: npt.NDArray[np.int64], length: int, key: int) -> npt.NDArray[np.int64]:
    """Where a keyed pseudo-random permutation of ``range(length)`` sends each of ``index``.

    A Feistel network over the next even power of two; values that fall outside walk on until they are inside.
    Nothing of size ``length`` is made. Luby & Rackoff 1988.
    """
    half = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = mix64(np.arange(8, dtype=np.uint64) ^ np.uint64(key * 0x9E3779B97F4A7C15 % (1 << 64)))
    out = index.astype(np.uint64)
    todo = np.ones(len(out), bool)
    while todo.any():
        value = out[todo]
        left, right = value >> shift, value & low
        for round_key in keys:
            left, right = right, left ^ (mix64(right ^ round_key) & low)
        out[todo] = (left << shift) | right
        todo = out >= np.uint64(length)
    return out.astype(np.int64)


def mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Well mixed bits of each number: splitmix64's finaliser; Steele, Lea & Flood 2014."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
