"""Records in memory: conversations and pairs of random ids, as a RecordSplit gives them."""

from pathlib import Path
from typing import Any

import numpy as np

from pellucid.data.record_files import Part, Record
from pellucid.data.records import PackedRecords, Pairs


class MemoryRecords:
    """A split of records held in memory."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.name, self.folder = "train", Path("memory")
        self.lengths = np.array([record.num_tokens for record in records], np.int64)
        self.num_tokens, self.num_documents = int(self.lengths.sum()), len(records)

    def __len__(self) -> int:
        return self.num_documents

    def record(self, number: int) -> Record:
        return self.records[number]


def part(ids: Any, learnt: Any) -> Part:
    ids = np.asarray(ids, np.int64)
    return Part(ids, np.broadcast_to(np.asarray(learnt, bool), ids.shape).copy())


def conversations(
    num: int = 23, *, seed: int = 0, context: int = 16, vocab_size: int = 61, high: int = 14, unlearnt: tuple[int, ...] = ()
) -> PackedRecords:  # fmt: skip
    """Records of 4 to ``high`` tokens of which the last ones are learnt; of ``unlearnt`` only the very first one is."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(num):
        length = int(rng.integers(4, high))
        learnt = np.arange(length) >= int(rng.integers(1, length - 1))
        if i in unlearnt:
            learnt = np.zeros(length, bool)
        records.append(Record((part(rng.integers(0, vocab_size, length), learnt),)))
    return PackedRecords(MemoryRecords(records), context, "right")  # type: ignore[arg-type]


def pairs(num: int = 21, *, seed: int = 0, context: int = 16, vocab_size: int = 61) -> Pairs:
    """Prompts of 1 to 5 tokens with two different answers of 1 to 8."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> Any:
        return rng.integers(0, vocab_size, int(rng.integers(low, high)))

    records = []
    while len(records) < num:
        prompt, chosen, rejected = ids(1, 6), ids(1, 9), ids(1, 9)
        if not np.array_equal(chosen, rejected):
            records.append(Record((part(prompt, False), part(chosen, True), part(rejected, True))))
    return Pairs(MemoryRecords(records), context, "right")  # type: ignore[arg-type]
