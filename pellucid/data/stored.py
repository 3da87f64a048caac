"""Records that were tokenised before, under the keys in which others store them.

============  =========================================================================================
sft           sequence, loss_mask: a row of ids and a row of 0 and 1
dpo           chosen, rejected, chosen_mask, rejected_mask: two such pairs
grpo          prompts [P], responses [G, L], masks [G, L], rewards [G], and old_logprobs [G, L] where known
============  =========================================================================================

In JSONL an object holds one record, or columns: under each key a list of rows. In HDF5 each key is a group of segments
``data_0``, ``data_1``, ..., the n-th of each group together a record (or columns, with one dimension more).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pellucid.data.documents import ReadLog
from pellucid.data.readers import optional
from pellucid.data.tables import segments
from pellucid.errors import DataError

FORMS: dict[str, dict[str, int]] = {
    "sequence": {"sequence": 1, "loss_mask": 1},
    "chosen_mask": {"chosen": 1, "rejected": 1, "chosen_mask": 1, "rejected_mask": 1},
    "responses": {"prompts": 1, "responses": 2, "masks": 2, "rewards": 1, "old_logprobs": 2},
}
"""By the key that only one form has: its keys, and how many dimensions the value of one record has."""


def unstacked(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The records in a table: itself, or one a row of its columns. Other keys go to each of them.

    Raises:
        DataError: columns of different lengths.
    """
    form = next((form for key, form in FORMS.items() if key in table), None)
    if form is None:
        return [table]
    columns = {key: value for key, value in table.items() if key in form}
    stacked = {key: _depth(value) > form[key] for key, value in columns.items()}
    if not any(stacked.values()):
        return [table]
    lengths = {key: len(value) if stacked[key] else -1 for key, value in columns.items()}
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{key} {length if length >= 0 else 'one row'}" for key, length in lengths.items())
        raise DataError(f"columns of different lengths: {found}")
    others = {key: value for key, value in table.items() if key not in columns}
    return [others | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list):
        depth, value = depth + 1, value[0] if value else None
    return depth


def read_columns(path: Path, log: ReadLog) -> Iterator[tuple[dict[str, Any], str]]:
    """The segments of an HDF5 file as objects, in numeric order; needs the [formats] extra.

    Raises:
        DataError: no group of a known name, groups of different segments, or a file that cannot be read.
    """
    h5py = optional("h5py", f"{path.name}, an HDF5 file,")
    known = {key for form in FORMS.values() for key in form}
    try:
        with h5py.File(path, "r") as file:
            groups = {name: file[name] for name in file if name in known and isinstance(file[name], h5py.Group)}
            if not groups:
                raise DataError(
                    f"{path}: no group of stored records; it has: {', '.join(map(repr, file)) or 'none'}; known: "
                    f"{', '.join(sorted(known))}"
                )
            names = {key: segments(group, f"{path}: {key}") for key, group in groups.items()}
            first = next(iter(names.values()))
            for key, found in names.items():
                if found != first:
                    raise DataError(
                        f"{path}: group {key!r} has {len(found)} segments and {next(iter(names))!r} {len(first)}"
                    )
            for name in first:
                arrays = {key: group[name][()] for key, group in groups.items()}
                log.done_bytes += sum(array.nbytes for array in arrays.values())
                yield {key: array.tolist() for key, array in arrays.items()}, f"{path}: {name}"
    except (OSError, RuntimeError, KeyError) as error:
        raise DataError(f"{path}: cannot be read as HDF5 ({error})") from error
