"""Best-fit packing against a plain search over all rows, and against the least that any packing needs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data.packing import best_fit


def plain(sizes: list[int], capacity: int) -> list[int]:
    """The room left in each row after best-fit decreasing, with every row looked at for every item."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@given(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None)
def test_each_item_stands_in_one_row_and_rows_are_those_of_a_plain_search(capacity: int, sizes: list[int]) -> None:
    sizes = [min(size, capacity) for size in sizes]
    rows = best_fit(np.array(sizes), capacity)
    found = [rows.row(i).tolist() for i in range(len(rows.ends))]
    assert sorted(item for row in found for item in row) == list(range(len(sizes)))
    assert all(row for row in found)
    assert sorted(capacity - sum(sizes[item] for item in row) for row in found) == plain(sizes, capacity)


def test_sizes_that_fit_perfectly_leave_no_room() -> None:
    sizes = np.array([60, 30, 10, 50, 50, 70, 20, 10] * 25)
    assert len(best_fit(sizes, 100).ends) == sizes.sum() // 100


@pytest.mark.parametrize("capacity", [512, 2048])
def test_many_short_records_fill_rows_to_more_than_99_in_100(capacity: int) -> None:
    sizes = np.minimum(np.random.default_rng(0).lognormal(4, 0.8, 20_000).astype(np.int64) + 5, capacity)
    rows = best_fit(sizes, capacity)
    assert sizes.sum() / (len(rows.ends) * capacity) > 0.99


def test_no_records_need_no_rows() -> None:
    assert len(best_fit(np.empty(0, np.int64), 8).ends) == 0
