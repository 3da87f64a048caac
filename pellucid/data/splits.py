"""Which documents are held out, and the writing of both splits."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pellucid.data.shards import IntArray, ShardWriter


def held_out(first: int, count: int, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Whether documents ``first .. first + count - 1`` go to "val": a hash of seed and index, nothing else.

    The mixing is splitmix64's (Steele, Lea, Flood 2014), whose outputs are uniform over 64 bits.
    """
    with np.errstate(over="ignore"):
        z = np.arange(first, first + count, dtype=np.uint64) + np.uint64((seed * 0xD1342543DE82EF95) % (1 << 64))
        z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z < np.uint64(min(int(fraction * 2.0**64), (1 << 64) - 1))


class SplitWriter:
    """Sends each document to "train" or "val".

    With two documents or more and a fraction above 0 both splits get at least one: until both have, the latest
    document is held back, so that the last can still be moved to the split that would stay empty.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, val_fraction: float, seed: int) -> None:
        self._fraction, self._seed = val_fraction, seed
        self._writers = {name: ShardWriter(folder, name, dtype, shard_tokens) for name in ("train", "val")}
        self._held: tuple[npt.NDArray[Any], str] | None = None
        self.num_seen = 0
        """Documents so far, refused ones included."""

    def add(self, ids: npt.NDArray[Any], lengths: IntArray) -> None:
        """Documents that lie one after another in ``ids``; a length of 0 is a document that was refused."""
        val = held_out(self.num_seen, len(lengths), self._fraction, self._seed)
        self.num_seen += len(lengths)
        there = lengths > 0
        val, lengths = val[there], lengths[there]
        if not self._fraction:
            self._writers["train"].add_many(ids, lengths)
            return
        done = 0
        while done < len(lengths) and not self._both_have_one():
            count = int(lengths[done])
            self._hold(ids[:count], "val" if val[done] else "train")
            ids, done = ids[count:], done + 1
        val, lengths = val[done:], lengths[done:]
        if len(lengths):
            self._release()
            mask = np.repeat(val, lengths)
            self._writers["train"].add_many(ids[~mask], lengths[~val])
            self._writers["val"].add_many(ids[mask], lengths[val])

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write everything out; the entries of ``index["splits"]``, without a split that has no document."""
        empty = [name for name, writer in self._writers.items() if not writer.num_documents]
        if self._held and empty:  # both: a single document
            self._held = self._held[0], empty[0]
        self._release()
        return {name: writer.finish() for name, writer in self._writers.items() if writer.num_documents}

    def close(self) -> None:
        """Release the files; needed where ``finish`` was not reached."""
        for writer in self._writers.values():
            writer.close()

    def _both_have_one(self) -> bool:
        return all(writer.num_documents for writer in self._writers.values())

    def _hold(self, ids: npt.NDArray[Any], name: str) -> None:
        self._release()
        self._held = ids, name

    def _release(self) -> None:
        if self._held:
            ids, name = self._held
            self._writers[name].add_many(ids, np.array([len(ids)], dtype=np.int64))
            self._held = None
