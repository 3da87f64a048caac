"""What is written of a record comes back, over any borders of files; and damage is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data.index import write_index
from pellucid.data.record_files import Record, RecordData, RecordWriter, part
from pellucid.data.shards import TokenData
from pellucid.errors import DataError
from pellucid.tokenizer import train_bpe

VOCAB = 300


def record(rng: np.random.Generator, lengths: list[int], table: dict[str, Any] | None = None) -> Record:
    parts = [part(rng.integers(0, VOCAB, n), rng.random(n) < 0.5) for n in lengths]
    return Record(tuple(parts), table)


def write(folder: Path, records: list[Record], kind: str, *, shard_tokens: int = 50, rollouts: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(folder, "train", "uint16", shard_tokens, tables=kind == "grpo")
    for each in records:
        writer.add(each)
    write_index(
        folder, dtype="uint16", vocab_size=VOCAB, tokenizer_sha256="", splits={"train": writer.finish()}, sources=[],
        kind=kind, rollouts=rollouts,
    )  # fmt: skip
    return folder


def assert_same(found: Record, wanted: Record) -> None:
    assert found.table == wanted.table and len(found.parts) == len(wanted.parts)
    for a, b in zip(found.parts, wanted.parts, strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.learnt.tolist() == b.learnt.tolist()


KINDS = {
    "sft": ([7], None),
    "dpo": ([5, 3, 4], None),
    "grpo": ([6], {"answer": "64"}),
    "rollouts": ([4, 2, 5, 1], {"rewards": [0.5, 1.0, -0.25]}),
}


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("shard_tokens", [1, 30, 10_000])
def test_records_come_back_as_they_were_over_file_borders(tmp_path: Path, form: str, shard_tokens: int) -> None:
    rng = np.random.default_rng(1)
    lengths, table = KINDS[form]
    records = []
    for i in range(25):
        grown = [max(1, n + int(rng.integers(-2, 3))) for n in lengths]
        if form == "dpo" and i % 5 == 0:
            grown[0] = 0  # answers that share no beginning
        records.append(record(rng, grown, None if table is None else {**table, "nr": i, "text": "ü\n"}))
    kind = "grpo" if form == "rollouts" else form
    split = RecordData.open(
        write(tmp_path, records, kind, shard_tokens=shard_tokens, rollouts=form == "rollouts")
    ).split("train")
    num_files = len(list(tmp_path.glob("train-?????.bin")))
    assert num_files == {1: 25, 10_000: 1}[shard_tokens] if shard_tokens != 30 else 1 < num_files < 25
    for number in (*range(25), 0, 24, 3):
        assert_same(split.record(number), records[number])
    assert split.lengths.tolist() == [each.num_tokens for each in records]
    entry = json.loads((tmp_path / "index.json").read_text())["splits"]["train"]
    assert entry["supervised"] == sum(int(p.learnt.sum()) for each in records for p in each.parts) > 0
    assert entry["longest"] == max(each.num_tokens for each in records)
    split.verify()


@given(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=127), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_groups_of_any_size_come_back(tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]]) -> None:
    rng = np.random.default_rng(0)
    records = [record(rng, lengths, {"rewards": [0.0] * (len(lengths) - 1)}) for lengths in groups]
    folder = write(tmp_path_factory.mktemp("groups"), records, "grpo", rollouts=True)
    split = RecordData.open(folder).split("train")
    for number, wanted in enumerate(records):
        assert_same(split.record(number), wanted)


def test_text_and_records_are_told_apart_with_the_way_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "sft", [record(np.random.default_rng(0), [5])], "sft")
    with pytest.raises(DataError, match=r"holds records for sft, not text; use them with strategy.name sft"):
        TokenData.open(folder)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"kind": "tokens"}))
    with pytest.raises(DataError, match=r"holds text, not records; make records with `pellucid prepare --for sft`"):
        RecordData.open(folder)


def spoil(path: Path, *, offset: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["train-00001.bin", "train-00001.marks.bin", "train-00001.records.jsonl", "train-00001.records.bin"]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    folder = write(tmp_path, [record(rng, [9], {"nr": i}) for i in range(12)], "grpo")
    RecordData.open(folder).split("train").verify()
    spoil(folder / name)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        RecordData.open(folder).split("train").verify()


@pytest.mark.parametrize("name", ["train-00000.marks.bin", "train-00000.records.jsonl", "train-00000.records.bin"])
@pytest.mark.parametrize("change", ["gone", "short"])
def test_a_missing_or_truncated_file_is_named_at_once(tmp_path: Path, name: str, change: str) -> None:
    rng = np.random.default_rng(0)
    folder = write(tmp_path, [record(rng, [9], {"nr": i}) for i in range(12)], "grpo")
    path = folder / name
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        RecordData.open(folder)


def test_another_tokenizer_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, [record(np.random.default_rng(0), [5])], "sft")
    train_bpe(["some text to train on"], 260).save(folder)
    data = RecordData.open(folder)
    with pytest.raises(DataError, match=r"tokenizer .*tokenizer\.json does not belong to this data"):
        data.tokenizer()
    with pytest.raises(DataError, match="has no split 'val'; it has: train"):
        data.split("val")
