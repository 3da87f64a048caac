"""Parquet and HDF5 as documents; needs the [formats] extra."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pellucid.data.documents import Document, ReadLog, document_from
from pellucid.data.readers import from_record, optional
from pellucid.errors import DataError

SEGMENT_IDS = 1 << 20
_SEGMENT = re.compile(r"data_(\d+)")


def read_parquet(path: Path, text_key: str, log: ReadLog) -> Iterator[Document]:
    """A row is a document: the column ``text_key``, "messages" or "ids", whichever is there first."""
    parquet = optional("pyarrow.parquet", f"{path.name}, a parquet file,")
    errors = (OSError, ValueError, optional("pyarrow", "a parquet file").ArrowException)
    size = path.stat().st_size if path.is_file() else 0
    try:
        with parquet.ParquetFile(path) as file:
            names: list[str] = file.schema_arrow.names
            column = next((key for key in (text_key, "messages", "ids") if key in names), None)
            if column is None:
                from_record(dict.fromkeys(names), str(path), text_key)  # raises, naming the columns
            rows, done = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                values = batch.column(0).to_pylist()
                log.done_bytes += size * len(values) // rows
                for number, value in enumerate(values, done + 1):
                    yield from _checked(value, f"{path}: row {number}", log)
                done += len(values)
    except errors as error:
        raise DataError(f"{path}: cannot be read as parquet ({error})") from error


def parquet_objects(path: Path, log: ReadLog) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row as an object, with its location; null cells are left out."""
    parquet = optional("pyarrow.parquet", f"{path.name}, a parquet file,")
    errors = (OSError, ValueError, optional("pyarrow", "a parquet file").ArrowException)
    size = path.stat().st_size if path.is_file() else 0
    try:
        with parquet.ParquetFile(path) as file:
            rows, done = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(batch_size=1024):
                tables = batch.to_pylist()
                log.done_bytes += size * len(tables) // rows
                for number, table in enumerate(tables, done + 1):
                    yield _without_nulls(table), f"{path}: row {number}"
                done += len(tables)
    except errors as error:
        raise DataError(f"{path}: cannot be read as parquet ({error})") from error


def _without_nulls(value: Any) -> Any:
    # a column of objects has every key in every row
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def read_hdf5(path: Path, key: str, log: ReadLog) -> Iterator[Document]:
    """A segment ``data_<n>`` of token ids is a document, in numeric order; longer ones come in `SEGMENT_IDS` pieces.

    The group is ``key``, else "ids", else the only one in the file.
    """
    h5py = optional("h5py", f"{path.name}, an HDF5 file,")
    try:
        with h5py.File(path, "r") as file:
            group_name = _group_of(file, key, path)
            group = file[group_name]
            if not isinstance(group, h5py.Group):
                raise DataError(
                    f"{path}: {group_name!r} is not a group; its segments belong at {group_name}/data_0, ..."
                )
            for name in segments(group, f"{path}: {group_name}"):
                yield from _segment(group[name], f"{path}: {group_name}/{name}", log)
    except (OSError, RuntimeError, KeyError) as error:
        raise DataError(f"{path}: cannot be read as HDF5 ({error})") from error


def _group_of(file: Any, key: str, path: Path) -> str:
    names = list(file)
    for name in (key, "ids"):
        if name in names:
            return name
    if len(names) == 1:
        return str(names[0])
    raise DataError(
        f"{path}: no group {key!r}; it has: {', '.join(map(repr, names)) or 'none'}; name the right one with --text-key"
    )


def segments(group: Any, where: str) -> list[str]:
    """The names ``data_<n>`` in a group, in numeric order."""
    numbers: dict[int, str] = {}
    for name in group:
        match = _SEGMENT.fullmatch(name)
        if not match:
            raise DataError(f"{where}/{name}: segments are named data_0, data_1, ...")
        numbers[int(match[1])] = name
    return [numbers[number] for number in sorted(numbers)]


def _segment(dataset: Any, where: str, log: ReadLog) -> Iterator[Document]:
    if len(getattr(dataset, "shape", ())) != 1 or dataset.dtype.kind not in "iu":
        log.report(DataError(f"{where}: a segment must be one row of whole numbers (token ids)"))
        return
    if not len(dataset):
        log.num_empty += 1
    for start in range(0, len(dataset), SEGMENT_IDS):
        ids = dataset[start : start + SEGMENT_IDS]
        log.done_bytes += ids.nbytes
        yield from _checked(ids, where if len(dataset) <= SEGMENT_IDS else f"{where}[{start}]", log)


def _checked(value: Any, location: str, log: ReadLog) -> Iterator[Document]:
    try:
        document = document_from(value, location)
    except DataError as error:
        log.report(error)
        return
    if document:
        yield document
    else:
        log.num_empty += 1
