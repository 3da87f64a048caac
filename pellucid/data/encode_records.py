"""Examples -> records, in order, in this process or in worker processes."""

import json
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pellucid.data.documents import RawRecord
from pellucid.data.examples import Kind, example
from pellucid.data.record_files import Part, Record
from pellucid.data.workers import Frame, Workers, answer_requests
from pellucid.errors import DataError

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

BATCH_BYTES = 1 << 18
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from pellucid.data.encode_records import serve; "
    "serve(sys.argv[2], sys.argv[3])"
)


def encode_records(
    tokenizer: "Tokenizer", folder: Path, kind: Kind, raws: Iterable[RawRecord], workers: int
) -> Generator[tuple[RawRecord, Record | DataError], None, None]:
    """Each example with its record, or with what is wrong with it; the result does not depend on ``workers``.

    Args:
        folder: holds the saved ``tokenizer``; worker processes load it from there.
        workers: processes; 1 encodes in this one. Close the generator to end them.

    Raises:
        PellucidError: a worker process died.
    """
    if workers == 1:
        for raw in raws:
            yield raw, _tried(raw.table, kind, tokenizer, raw.location)
        return
    with Workers(_BOOT, [str(folder), kind], workers) as pool:
        for batch, answer in pool.in_order((batch, _question(batch)) for batch in _batches(raws)):
            yield from zip(batch, _records(*answer, batch), strict=True)


def serve(folder: str, kind: Kind) -> None:
    """A worker's whole life: encode batches of examples."""
    from pellucid.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)

    def answer(header: dict[str, Any], body: bytes) -> Frame:
        tables = json.loads(body)
        both = zip(tables, header["places"], strict=True)
        return _answer([_tried(table, kind, tokenizer, place) for table, place in both], tables)

    answer_requests(answer)


def _tried(table: dict[str, Any], kind: Kind, tokenizer: "Tokenizer", location: str) -> Record | DataError:
    try:
        return example(table, kind, tokenizer, location)
    except DataError as error:
        return error


def _batches(raws: Iterable[RawRecord]) -> Iterator[list[RawRecord]]:
    batch: list[RawRecord] = []
    num_bytes = 0
    for raw in raws:
        batch.append(raw)
        num_bytes += raw.num_bytes
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


# -- frames -------------------------------------------------------------------------------------------------


def _question(batch: list[RawRecord]) -> Frame:
    return {"places": [raw.location for raw in batch]}, json.dumps([raw.table for raw in batch]).encode()


def _answer(tried: list[Record | DataError], tables: list[dict[str, Any]]) -> Frame:
    """Of each example its parts' lengths and its table where that is another one now, or the message; then ids and masks."""
    entries: list[dict[str, Any]] = []
    ids, learnt = [], []
    for result, table in zip(tried, tables, strict=True):
        if isinstance(result, DataError):
            entries.append({"refused": str(result)})
            continue
        changed = {} if result.table is None or result.table is table else {"table": result.table}
        entries.append(
            {"lengths": [len(part.ids) for part in result.parts], "tabled": result.table is not None} | changed
        )
        ids += [part.ids for part in result.parts]
        learnt += [part.learnt for part in result.parts]
    body = b"".join(array.astype("<i8").tobytes() for array in ids) + b"".join(mask.tobytes() for mask in learnt)
    return {"records": entries}, body


def _records(header: dict[str, Any], body: bytes, batch: list[RawRecord]) -> Iterator[Record | DataError]:
    entries = header["records"]
    total = sum(length for entry in entries for length in entry.get("lengths", ()))
    ids = np.frombuffer(body, "<i8", total).astype(np.int64)
    learnt = np.frombuffer(body, bool, offset=8 * total)
    start = 0
    for entry, raw in zip(entries, batch, strict=True):
        if "refused" in entry:
            yield DataError(entry["refused"])
            continue
        parts = []
        for length in entry["lengths"]:
            parts.append(Part(ids[start : start + length], learnt[start : start + length]))
            start += length
        yield Record(tuple(parts), entry.get("table", raw.table) if entry["tabled"] else None)
