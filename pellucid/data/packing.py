"""Records of different lengths into rows of one length, with little left empty.

N records, R rows.
"""

from typing import NamedTuple

import numpy as np

from pellucid.data.shards import IntArray


class Rows(NamedTuple):
    """Which records share a row."""

    items: IntArray
    """[N], the records of row 0, then of row 1, ..."""
    ends: IntArray
    """[R], exclusive ends of the rows in ``items``."""

    def row(self, number: int) -> IntArray:
        """The records of one row, in the order in which they stand there."""
        start = int(self.ends[number - 1]) if number else 0
        return self.items[start : int(self.ends[number])]


def best_fit(sizes: IntArray, capacity: int) -> Rows:
    """Best-fit decreasing: the longest first, each into the fullest row that still has room for it.

    A function of ``sizes`` alone; never more than 11/9 of the fewest rows possible, plus 4. Takes O(N log N) steps: rows
    are kept by the room that is left in them, and the amounts of room that some row has are the bits of one number.

    Args:
        sizes: [N], each in [1, capacity].

    Source:
        Johnson 1973, Near-optimal bin packing algorithms.
    """
    assert len(sizes) == 0 or (int(sizes.min()) >= 1 and int(sizes.max()) <= capacity)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    row_of = np.empty(len(sizes), np.int64)
    num_rows = 0
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row, num_rows = capacity, num_rows, num_rows + 1
        row_of[item] = row
        left = room - size
        if left:
            with_room[left].append(row)
            rooms |= 1 << left
    items = order[np.argsort(row_of[order], kind="stable")]
    return Rows(items, np.cumsum(np.bincount(row_of, minlength=num_rows), dtype=np.int64))
