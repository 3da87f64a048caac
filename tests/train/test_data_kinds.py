"""Which data a strategy reads: folders of records train, those of another kind are refused with the way out."""

import json

import numpy as np
import pytest
from support import tiny_config

from pellucid.cli import main
from pellucid.config import load_config
from pellucid.errors import ConfigError, DataError
from pellucid.train import Trainer


@pytest.fixture(scope="module")
def folders(tmp_path_factory, data_folder):
    """A folder of each kind, with one tokenizer."""
    root = tmp_path_factory.mktemp("kinds")
    rng = np.random.default_rng(0)
    words = ["red", "blue", "cat", "dog", "ran", "sat", "one", "two"]

    def text():
        return " ".join(rng.choice(words, int(rng.integers(1, 5))))

    chats = [
        {"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]} for _ in range(40)
    ]
    prefs = [{"prompt": text(), "chosen": text() + " yes", "rejected": text() + " no"} for _ in range(40)]
    for kind, records in (("sft", chats), ("dpo", prefs)):
        source = root / f"{kind}.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        arguments = ["prepare", str(source), "--for", kind, "--tokenizer", str(data_folder), "--out", str(root / kind)]
        assert main([*arguments, "--val-fraction", "0.2"]) == 0
    return {"sft": root / "sft", "dpo": root / "dpo", "tokens": data_folder}


def config(folders, kind, **changes):
    settings = dict(
        data__path=str(folders[kind]), model__vocab_size=0, model__max_position_embeddings=64, train__steps=2,
        train__val_every=2, train__sample_every=2,
    )  # fmt: skip
    return tiny_config(**(settings | changes))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_records_train_validate_and_leave_samples(tmp_path, folders, kind):
    trainer = Trainer(config(folders, kind, strategy__name=kind, train__out=str(tmp_path)))
    assert trainer.train().step == 2
    events = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events == ["step", "step", "validation", "save"]
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == min(4, len(trainer.setup.val_data)) and all(
        line["step"] == 2 and line["prompt"] for line in samples
    )
    assert any("records" in note for note in trainer.setup.notes) == (kind == "sft")


@pytest.mark.parametrize(
    "kind, strategy, words",
    [
        ("dpo", "sft", ["pairs of answers (kind dpo)", "strategy.name is sft", "conversations (kind sft)", "--strategy.name dpo",
                        "--for sft"]),
        ("sft", "dpo", ["conversations (kind sft)", "strategy.name is dpo", "--strategy.name sft", "--for dpo"]),
        ("tokens", "sft", ["text (kind tokens)", "strategy.name is sft", "--strategy.name pretrain", "--for sft"]),
        ("sft", "pretrain", ["conversations (kind sft)", "strategy.name is pretrain", "--strategy.name sft"]),
    ],
)  # fmt: skip
def test_data_of_another_kind_is_refused_with_both_and_the_way_out(folders, kind, strategy, words):
    with pytest.raises(DataError) as error:
        Trainer(config(folders, kind, strategy__name=strategy))
    assert all(word in str(error.value) for word in words), error.value


def test_a_stride_is_refused_where_records_are_visited_once(folders):
    with pytest.raises(ConfigError, match=r"data.stride is 8 and .* holds records"):
        Trainer(config(folders, "sft", strategy__name="sft", data__stride=8))


@pytest.mark.parametrize("name, nearest", [("spt", "sft"), ("dop", "dpo"), ("pretrane", "pretrain")])
def test_an_unknown_strategy_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(ConfigError, match=f"unknown strategy '{name}'; did you mean {nearest}"):
        load_config(None, {"strategy.name": name})
