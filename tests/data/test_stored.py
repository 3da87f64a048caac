"""Records that others tokenised, from HDF5 and from JSONL, one at a time or in columns."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pellucid.data.documents import ReadLog
from pellucid.data.readers import read_objects
from pellucid.data.stored import unstacked
from pellucid.errors import DataError


def write(path: Path, groups: dict[str, list[Any]]) -> Path:
    with h5py.File(path, "w") as file:
        for key, segments in groups.items():
            group = file.create_group(key)
            for i, segment in enumerate(segments):
                group.create_dataset(f"data_{i}", data=np.asarray(segment))
    return path


def tables(path: Path) -> list[dict[str, Any]]:
    return [raw.table for raw in read_objects(path, ReadLog())]


def test_segments_of_hdf5_come_back_in_numeric_order_and_floats_stay_floats(tmp_path: Path) -> None:
    groups: dict[str, list[Any]] = {
        "prompts": [[i, 1] for i in range(12)],
        "responses": [[[i, 2], [i, 3]] for i in range(12)],
        "masks": [[[1, 1], [1, 0]]] * 12,
        "rewards": [[0.25, i / 8] for i in range(12)],
    }
    found = tables(write(tmp_path / "rollouts.h5", groups))
    assert [table["prompts"][0] for table in found] == list(range(12)), "data_10 stands behind data_9"
    assert found[11] == {key: values[11] for key, values in groups.items()}
    assert isinstance(found[3]["rewards"][1], float)


def test_columns_are_taken_apart() -> None:
    pair = {"chosen": [[1, 2], [3]], "rejected": [[4], [5]], "chosen_mask": [[0, 1], [1]], "rejected_mask": [[1], [1]]}
    assert unstacked({**pair, "from": "x"}) == [
        {"from": "x", "chosen": [1, 2], "rejected": [4], "chosen_mask": [0, 1], "rejected_mask": [1]},
        {"from": "x", "chosen": [3], "rejected": [5], "chosen_mask": [1], "rejected_mask": [1]},
    ]
    groups = {"prompts": [[1], [2]], "responses": [[[3]], [[4]]], "masks": [[[1]], [[1]]], "rewards": [[0.5], [1.5]]}
    assert [table["rewards"] for table in unstacked(groups)] == [[0.5], [1.5]]
    one = {"prompts": [1], "responses": [[3]], "masks": [[1]], "rewards": [0.5]}
    assert unstacked(one) == [one]
    messages = {"messages": [{"role": "user", "content": "x"}]}
    assert unstacked(messages) == [messages]
    assert unstacked({"sequence": [[1, 2]], "loss_mask": [[0, 1]]}) == [{"sequence": [1, 2], "loss_mask": [0, 1]}]


def test_columns_of_hdf5_have_one_dimension_more(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (2, 3, 7))
    path = write(tmp_path / "batched.h5", {"sequence": list(ids), "loss_mask": list(np.ones_like(ids))})
    assert [table["sequence"] for table in tables(path)] == ids.reshape(6, 7).tolist()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"sequence": [[1, 2]] * 3, "loss_mask": [[0, 1]] * 2}, r"group 'sequence' has 3 segments and 'loss_mask' 2"),
        ({"ids": [[1, 2]]}, r"no group of stored records; it has: 'ids'; known: chosen, "),
        (
            {"sequence": [[[1, 2], [3, 4]]], "loss_mask": [[[0, 1]]]},
            "columns of different lengths: loss_mask 1, sequence 2",
        ),
        (
            {"sequence": [[[1, 2], [3, 4]]], "loss_mask": [[0, 1]]},
            "columns of different lengths: loss_mask one row, sequence 2",
        ),
    ],
)
def test_groups_that_do_not_fit_together_are_refused_with_the_file(tmp_path: Path, groups: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        tables(write(tmp_path / "bad.h5", groups))
    assert "bad.h5" in str(error.value)


def test_a_file_that_is_no_hdf5_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(b"no")
    with pytest.raises(DataError, match=r"x\.h5: cannot be read as HDF5"):
        tables(tmp_path / "x.h5")
