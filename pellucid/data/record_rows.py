"""Records into rows of tokens: cut to a window, padded, and laid out as tensors."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pellucid.data.record_files import BoolArray, Part, Record, RecordSplit
from pellucid.data.shards import IntArray
from pellucid.errors import DataError

Truncate: TypeAlias = Literal["left", "right", "refuse"]
PAD_TO = 16
"""Padded rows have a multiple of this many tokens, so that few shapes come up."""


# -- cutting ------------------------------------------------------------------------------------------------


def usable(
    split: RecordSplit, limit: int, truncate: Truncate, cut: Callable[[Record], Record | None]
) -> tuple[IntArray, list[str]]:
    """Looks for the records with a row of more than ``limit`` tokens.

    Returns:
        The numbers of the records that fit or that ``cut`` can make fit, and notes on those that do not.

    Raises:
        DataError: one is too long and ``truncate`` is "refuse", or none can be used.
    """
    kept = np.ones(len(split), bool)
    num_cut = 0
    for number in np.flatnonzero(split.lengths > limit).tolist():
        record = split.record(number)
        longest = longest_row(record)
        if longest <= limit:
            continue
        if truncate == "refuse":
            raise DataError(
                f"{split.folder}: record {number} of split {split.name!r} has {longest:,} tokens and {limit:,} have room; "
                'raise data.context, or set data.truncate to "left" or "right"'
            )
        kept[number] = cut(record) is not None
        num_cut += bool(kept[number])
    left_out = int((~kept).sum())
    notes = []
    if num_cut:
        notes.append(
            f"{split.name}: {num_cut:,} of {len(split):,} records are longer than {limit:,} tokens and cut on the {truncate}"
        )
    if left_out:
        notes.append(
            f"{split.name}: {left_out:,} of {len(split):,} records are left out: cut on the {truncate} to {limit:,} tokens they "
            "teach nothing"
        )
    if left_out == len(split):
        raise DataError(
            f"{split.folder}: no record of split {split.name!r} can be used; {'; '.join(notes)}; raise data.context"
        )
    return np.flatnonzero(kept), notes


def longest_row(record: Record) -> int:
    """Tokens of the prompt and its longest answer."""
    prompt, *answers = (len(part.ids) for part in record.parts)
    return prompt + max(answers, default=0)


def cut_to(record: Record, limit: int, truncate: Truncate) -> Record | None:
    """The record within ``limit`` tokens of prompt and answer; None where an answer would have nothing to learn."""
    prompt, *answers = record.parts
    if longest_row(record) <= limit:
        return record
    if not answers:
        kept = sliced(prompt, slice(-limit, None) if truncate == "left" else slice(limit))
        return Record((kept,), record.table) if kept.learnt[1:].any() else None
    if truncate == "left":
        room = limit - max(len(answer.ids) for answer in answers)
        prompt = sliced(prompt, slice(len(prompt.ids) - room, None))
    else:
        room = limit - len(prompt.ids)
        answers = [sliced(answer, slice(max(room, 0))) for answer in answers]
    if room < 1 or not all(joined(prompt, answer)[1][1:].any() for answer in answers):
        return None
    return Record((prompt, *answers), record.table)


def sliced(part: Part, where: slice) -> Part:
    """Some of a part."""
    return Part(part.ids[where], part.learnt[where])


def joined(prompt: Part, answer: Part) -> tuple[IntArray, BoolArray]:
    """Ids and learnt marks of a prompt and an answer as one row."""
    return np.concatenate([prompt.ids, answer.ids]), np.concatenate([prompt.learnt, answer.learnt])


# -- rows ---------------------------------------------------------------------------------------------------


class RowTable:
    """Rows of ``length`` tokens to be filled, as arrays [rows, length]."""

    def __init__(self, rows: int, length: int) -> None:
        shape = rows, length
        self.tokens, self.targets, self.positions = (np.zeros(shape, np.int64) for _ in range(3))
        self.document_ids = np.full(shape, -1, np.int64)
        self.loss_mask = np.zeros(shape, bool)

    def put(self, row: int, records: Sequence[tuple[int, IntArray, BoolArray]]) -> None:
        """Records (number, ids [n], learnt [n]) one behind another; each takes n - 1 places."""
        start = 0
        for number, ids, learnt in records:
            at = slice(start, start + len(ids) - 1)
            self.tokens[row, at], self.targets[row, at] = ids[:-1], ids[1:]
            self.loss_mask[row, at] = learnt[1:]
            self.positions[row, at] = np.arange(len(ids) - 1)
            self.document_ids[row, at] = number
            start = at.stop

    def tensors(self) -> dict[str, Any]:
        """By the names that batches have for them."""
        names = ("tokens", "targets", "loss_mask", "positions", "document_ids")
        return {name: torch.from_numpy(getattr(self, name)) for name in names}


def padded_length(answers: Sequence[tuple[IntArray, BoolArray]], context: int) -> int:
    """The length of rows that hold the longest: a multiple of `PAD_TO`, and ``context`` at most."""
    longest = max((len(ids) - 1 for ids, _ in answers), default=1)
    return min(-(-longest // PAD_TO) * PAD_TO, context)


def stored_logprobs(groups: list[Record], table: RowTable) -> Tensor:
    """The log-probabilities that rollouts were stored with, float32, at the places of their targets in ``table``."""
    out = np.zeros(table.tokens.shape, np.float32)
    row = 0
    for group in groups:
        prompt = len(group.parts[0].ids)
        assert group.table is not None
        for answer, logprobs in zip(group.parts[1:], group.table["old_logprobs"], strict=True):
            out[row, prompt - 1 : prompt - 1 + len(answer.ids)] = logprobs[: len(answer.ids)]
            row += 1
    return torch.from_numpy(out)
