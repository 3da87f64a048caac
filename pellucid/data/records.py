"""Records as batches: conversations packed into rows, pairs, prompts and stored rollouts, each record once an epoch.

B rows, T tokens of a row, P pairs or prompts, R answers. A record of n tokens takes n - 1 places of a row: its last token
is a target only. `open_records` chooses by the kind of the data; `pellucid.data.batches.Loader` then makes the micro-batches
of a step, where train.global_batch and train.micro_batch count rows (sft), pairs (dpo), prompts or groups (grpo).
"""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pellucid.data.batches import Batch, Samples, mix64
from pellucid.data.packing import best_fit
from pellucid.data.record_files import BoolArray, Record, RecordData, RecordSplit
from pellucid.data.record_rows import RowTable, Truncate, cut_to, joined, padded_length, sliced, stored_logprobs, usable
from pellucid.data.shards import IntArray


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """P pairs as 2P rows, the chosen answers first, so that one forward scores both. Row i and row P + i are a pair.

    Rows are padded to the longest; what is padded has document id -1. Pairs that fill up a batch have id -1 and no
    supervised token.
    """

    tokens: Tensor
    """int64 ``[2P, T]``."""
    targets: Tensor
    """int64 ``[2P, T]``, the next token."""
    loss_mask: Tensor
    """bool ``[2P, T]``, where the target is of the answer."""
    positions: Tensor
    """int64 ``[2P, T]``, from 0."""
    document_ids: Tensor
    """int64 ``[2P, T]``, the pair; -1 in padding."""
    pair_ids: Tensor
    """int64 ``[P]``, the record of each pair."""
    packed: bool = False
    """A row holds one answer only, and padding stands behind it, where a causal model does not look."""

    @property
    def sample_ids(self) -> Tensor:
        """The pairs."""
        return self.pair_ids

    def to(self, device: torch.device) -> "PreferenceBatch":
        """The same batch on another device."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """P prompts to be answered. Those that fill up a batch are empty and have group id -1."""

    prompts: list[list[int]]
    """Token ids, up to where an answer begins."""
    records: list[dict[str, Any]]
    """What each prompt came with, as rewards are given it."""
    group_ids: Tensor
    """int64 ``[P]``, the record of each prompt: its answers are one group."""

    @property
    def sample_ids(self) -> Tensor:
        """The prompts."""
        return self.group_ids

    def to(self, device: torch.device) -> "PromptBatch":
        """The same batch on another device; prompts stay lists."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """R stored answers with their prompts and rewards, groups whole and side by side. Padded as in `PreferenceBatch`."""

    tokens: Tensor
    """int64 ``[R, T]``."""
    targets: Tensor
    """int64 ``[R, T]``."""
    response_mask: Tensor
    """bool ``[R, T]``, where the target is of the answer and its own mask says so."""
    positions: Tensor
    """int64 ``[R, T]``."""
    document_ids: Tensor
    """int64 ``[R, T]``, the group; -1 in padding."""
    rewards: Tensor
    """float64 ``[R]``."""
    group_ids: Tensor
    """int64 ``[R]``; -1 fills up."""
    old_logprobs: Tensor | None
    """float32 ``[R, T]``, nats, of each target under the policy that said it, 0 elsewhere; None where it was not stored."""
    packed: bool = False

    @property
    def loss_mask(self) -> Tensor:
        """The response mask."""
        return self.response_mask

    @property
    def sample_ids(self) -> Tensor:
        """The groups, each as often as it has answers."""
        return self.group_ids

    def to(self, device: torch.device) -> "RolloutBatch":
        """The same batch on another device."""
        return _moved(self, device)


def open_records(
    data: RecordData, split: str, *, context: int, truncate: Truncate = "right", answer_tokens: int = 1
) -> "PackedRecords | Pairs | Prompts | Rollouts":
    """The samples of a split, by the kind of the data. Their ``notes`` say what was cut and what left out.

    Args:
        context: tokens a row at most.
        truncate: what happens to a record that is longer. "right" cuts its end, and leaves it out where nothing to learn
            would be left; "left" cuts its beginning (of pairs and groups, that of the prompt they share); "refuse" raises.
        answer_tokens: places of the context that a grpo prompt must leave free. A prompt is never cut on the right.

    Raises:
        DataError: a record is too long with "refuse", or no record can be used.
    """
    opened = data.split(split)
    if data.kind == "sft":
        return PackedRecords(opened, context, truncate)
    if data.kind == "dpo":
        return Pairs(opened, context, truncate)
    if data.index.rollouts:
        return Rollouts(opened, context, truncate)
    return Prompts(opened, context, truncate, answer_tokens)


class PackedRecords(Samples[Batch]):
    """Conversations in rows of ``context`` tokens, packed best-fit; each conversation attends to itself alone.

    How long the places of a row are is the same in every epoch, and so is the number of rows; which of the records of one
    length stands in which place is drawn anew in each. ``sample_ids`` are rows, ``document_ids`` records.
    """

    def __init__(self, split: RecordSplit, context: int, truncate: Truncate) -> None:
        self.split: RecordSplit = split
        self.context, self._truncate = context, truncate
        self._kept, self.notes = usable(split, context + 1, truncate, self._cut)
        self._sizes = np.minimum(split.lengths[self._kept] - 1, context)
        self._rows = best_fit(self._sizes, context)
        self._places = np.argsort(-self._sizes, kind="stable")  # equal lengths stand together: they are exchanged
        self._records = self._kept
        share = 100 * float(self._sizes.sum()) / (len(self) * context)
        self.notes.append(
            f"{split.name}: {len(self._kept):,} records in {len(self):,} rows of {context:,} tokens, {share:.1f} % filled"
        )

    def __len__(self) -> int:
        return len(self._rows.ends)

    def for_epoch(self, key: int) -> "PackedRecords":
        """Which record stands in which place of its length: a function of ``key``."""
        seed = mix64(np.array([key % (1 << 64)], np.uint64))
        drawn = np.lexsort((mix64(self._kept.astype(np.uint64) ^ seed), -self._sizes))
        other: PackedRecords = object.__new__(PackedRecords)
        other.__dict__ |= self.__dict__
        other._records = np.empty_like(self._kept)
        other._records[self._places] = self._kept[drawn]
        return other

    def batch(self, sample_ids: list[int], rows: int = 0) -> Batch:
        """The rows of these numbers, filled up with empty ones to ``rows``."""
        num = max(rows, len(sample_ids))
        packed = [
            [(int(record), *self._read(int(record))) for record in self._records[self._rows.row(number)]]
            for number in sample_ids
        ]
        table = RowTable(num, self.context)
        for row, conversations in enumerate(packed):
            table.put(row, conversations)
        ids = torch.tensor(list(sample_ids) + [-1] * (num - len(sample_ids)), dtype=torch.int64)
        documents = table.document_ids
        return Batch(**table.tensors(), sample_ids=ids, packed=bool((documents != documents[:, :1]).any()))

    def _read(self, number: int) -> tuple[IntArray, BoolArray]:
        record = self.split.record(number)
        cut = self._cut(record) if record.num_tokens > self.context + 1 else record
        assert cut is not None
        return cut.parts[0].ids, cut.parts[0].learnt

    def _cut(self, record: Record) -> Record | None:
        return cut_to(record, self.context + 1, self._truncate)


class Pairs(Samples[PreferenceBatch]):
    """Chosen and rejected answers to one prompt."""

    def __init__(self, split: RecordSplit, context: int, truncate: Truncate) -> None:
        self.split: RecordSplit = split
        self.context, self._truncate = context, truncate
        self._kept, self.notes = usable(split, context + 1, truncate, self._cut)

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, sample_ids: list[int], rows: int = 0) -> PreferenceBatch:
        """The pairs of these numbers, filled up with empty ones to ``rows``."""
        num = max(rows, len(sample_ids))
        numbers = [int(self._kept[i]) for i in sample_ids]
        pairs = [_whole(self._cut(self.split.record(number))) for number in numbers]
        answers = [joined(pair.parts[0], pair.parts[side]) for side in (1, 2) for pair in pairs]
        table = RowTable(2 * num, padded_length(answers, self.context))
        for i, (ids, learnt) in enumerate(answers):
            side, pair = divmod(i, len(pairs))
            table.put(side * num + pair, [(numbers[pair], ids, learnt)])
        pair_ids = torch.tensor(numbers + [-1] * (num - len(numbers)), dtype=torch.int64)
        return PreferenceBatch(**table.tensors(), pair_ids=pair_ids)

    def _cut(self, record: Record) -> Record | None:
        cut = cut_to(record, self.context + 1, self._truncate)
        if cut is not None and np.array_equal(cut.parts[1].ids, cut.parts[2].ids):
            return None  # they differ behind the cut only
        return cut


class Prompts(Samples[PromptBatch]):
    """Prompts with what their answers are judged by."""

    def __init__(self, split: RecordSplit, context: int, truncate: Truncate, answer_tokens: int) -> None:
        self.split: RecordSplit = split
        self.context, self._limit, self._truncate = context, max(context - answer_tokens, 1), truncate
        self._kept, self.notes = usable(split, self._limit, truncate, self._cut)

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, sample_ids: list[int], rows: int = 0) -> PromptBatch:
        """The prompts of these numbers, filled up with empty ones to ``rows``."""
        numbers = [int(self._kept[i]) for i in sample_ids]
        records = [_whole(self._cut(self.split.record(number))) for number in numbers]
        fill = max(rows - len(numbers), 0)
        return PromptBatch(
            prompts=[record.parts[0].ids.tolist() for record in records] + [[] for _ in range(fill)],
            records=[record.table or {} for record in records] + [{} for _ in range(fill)],
            group_ids=torch.tensor(numbers + [-1] * fill, dtype=torch.int64),
        )

    def _cut(self, record: Record) -> Record | None:
        ids = record.parts[0].ids
        if len(ids) <= self._limit:
            return record
        if self._truncate == "right":
            return None
        return Record((sliced(record.parts[0], slice(-self._limit, None)),), record.table)


class Rollouts(Samples[RolloutBatch]):
    """Groups of answers with their rewards. A group that fills up a batch is one empty row."""

    def __init__(self, split: RecordSplit, context: int, truncate: Truncate) -> None:
        self.split: RecordSplit = split
        self.context, self._truncate = context, truncate
        self._kept, self.notes = usable(split, context + 1, truncate, self._cut)
        self._with_logprobs = "old_logprobs" in (split.record(0).table or {})  # all have them, or none

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, sample_ids: list[int], rows: int = 0) -> RolloutBatch:
        """The groups of these numbers, filled up with empty ones to ``rows``."""
        numbers = [int(self._kept[i]) for i in sample_ids]
        groups = [_whole(self._cut(self.split.record(number))) for number in numbers]
        answers = [joined(group.parts[0], answer) for group in groups for answer in group.parts[1:]]
        owners = [number for number, group in zip(numbers, groups, strict=True) for _ in group.parts[1:]]
        fill = max(rows - len(numbers), 0)
        table = RowTable(len(answers) + fill, padded_length(answers, self.context))
        rewards = np.zeros(len(answers) + fill, np.float64)
        rewards[: len(answers)] = [reward for group in groups for reward in (group.table or {})["rewards"]]
        for row, (owner, (ids, learnt)) in enumerate(zip(owners, answers, strict=True)):
            table.put(row, [(owner, ids, learnt)])
        tensors = table.tensors()
        return RolloutBatch(
            response_mask=tensors.pop("loss_mask"),
            **tensors,
            rewards=torch.from_numpy(rewards),
            group_ids=torch.tensor(owners + [-1] * fill, dtype=torch.int64),
            old_logprobs=stored_logprobs(groups, table) if self._with_logprobs else None,
        )

    def _cut(self, record: Record) -> Record | None:
        return cut_to(record, self.context + 1, self._truncate)


def _whole(record: Record | None) -> Record:
    assert record is not None, "a record that cannot be used was left out at the start"
    return record


_Moved = TypeVar("_Moved", PreferenceBatch, PromptBatch, RolloutBatch)


def _moved(batch: _Moved, device: torch.device) -> _Moved:
    tensors = {f.name: value for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)}
    moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return replace(batch, **moved)
