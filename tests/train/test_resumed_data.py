"""A run goes on with the data that it began with: by what is in the files, wherever the folder lies."""

import json
import shutil

import pytest
from support import tiny_config

from pellucid.data.batches import Loader, Windows
from pellucid.data.prepare import PrepareOptions, prepare
from pellucid.data.prepare_records import prepare_records
from pellucid.data.record_files import RecordData
from pellucid.data.records import open_records
from pellucid.data.shards import TokenData
from pellucid.errors import CheckpointError
from pellucid.train import Trainer

WORDS = ["red", "blue", "cat", "dog", "ran", "sat"]
ROWS = {
    "tokens": [{"text": f"{a} {b} {a} {a}"} for a in WORDS for b in WORDS],
    "sft": [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a in WORDS
        for b in WORDS
    ],
    "dpo": [{"prompt": a, "chosen": a + " " + b, "rejected": b + " " + a} for a in WORDS for b in WORDS if a != b],
    "grpo": [{"prompt": a + " " + b, "answer": b} for a in WORDS for b in WORDS],
}


def make(folder, kind, rows, tokenizer):
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = dict(inputs=(str(source),), out=folder, workers=1, val_fraction=0.0, tokenizer=tokenizer)
    if kind == "tokens":
        prepare(PrepareOptions(**options))
    else:
        prepare_records(PrepareOptions(**options, records=kind))
    return folder


def loader_of(folder, kind):
    if kind == "tokens":
        samples = Windows(TokenData.open(folder).split("train"), 16)
    else:
        samples = open_records(RecordData.open(folder), "train", context=64)
    return Loader(samples, global_batch=4, micro_batch=2, seed=3)


@pytest.mark.parametrize("kind", ROWS)
def test_a_cursor_is_of_the_contents_of_its_data_and_not_of_its_place(tmp_path, data_folder, kind):
    first = make(tmp_path / "first", kind, ROWS[kind], data_folder)
    again = make(tmp_path / "again", kind, ROWS[kind], data_folder)
    turned = make(tmp_path / "turned", kind, ROWS[kind][::-1], data_folder)
    saved = loader_of(first, kind)
    saved.next_window()
    cursor = json.loads(json.dumps(saved.state_dict()))
    resumed = loader_of(again, kind)
    resumed.load_state_dict(cursor)
    assert resumed.state_dict() == cursor and resumed.samples == 4
    with pytest.raises(
        CheckpointError, match=r"cursor is in training data of hash \w{12}, and this run has .*data\.path"
    ):
        loader_of(turned, kind).load_state_dict(cursor)
    index = json.loads((again / "index.json").read_text())
    (again / "index.json").write_text(json.dumps(index | {"tokenizer_sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match=r"tokenizer of hash .* tokenizer of hash 000000000000; resume with"):
        loader_of(again, kind).load_state_dict(cursor)


def test_a_cursor_or_an_index_of_before_that_says_nothing_of_its_data_is_taken(tmp_path, data_folder):
    first = make(tmp_path / "first", "tokens", ROWS["tokens"], data_folder)
    cursor = loader_of(first, "tokens").state_dict()
    old = {key: cursor[key] for key in ("epoch", "samples", "windows", "seed")}
    loader_of(first, "tokens").load_state_dict(old)
    index = json.loads((first / "index.json").read_text())
    del index["splits"]["train"]["sha256"]
    (first / "index.json").write_text(json.dumps(index))
    loader_of(first, "tokens").load_state_dict(cursor)


def test_a_run_is_resumed_on_a_renamed_copy_of_its_data_and_not_on_the_same_documents_in_another_order(
    tmp_path, data_folder
):
    def run(data, steps):
        changes = dict(data__path=str(data), model__vocab_size=0, train__steps=steps, train__val_every=0)
        trainer = Trainer(tiny_config(tmp_path / "run", **changes))
        return trainer.train(resume=True).step

    first = make(tmp_path / "first", "tokens", ROWS["tokens"], data_folder)
    turned = make(tmp_path / "turned", "tokens", ROWS["tokens"][::-1], data_folder)
    assert run(first, 2) == 2
    with pytest.raises(CheckpointError, match="training data of hash"):
        run(turned, 4)
    shutil.move(first, tmp_path / "moved")
    assert run(tmp_path / "moved", 4) == 4
