"""The examples of docs/guides/extending.md, each put into a module of its own and used through a configuration."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support import TINY, fork, run_ranks, tiny_config, whole_weights, windows

from pellucid.checkpoint.model_folder import save_model
from pellucid.cli import main
from pellucid.config import ModelConfig
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.registry import load_plugins, lookup
from pellucid.tokenizer import train_bpe
from pellucid.train import Trainer

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/extending.md"
MODULES = {
    name: text
    for text in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for name in re.findall(r"\A# (my_\w+)\.py", text)
}
PARTS = dict(
    plugins=["my_strategy", "my_schedule", "my_optimizer", "my_callback"], strategy__name="focal", strategy__gamma=1.5,
    optim__name="sign", optim__decay=0.8, optim__schedule={"name": "halving", "every": 2}, optim__warmup_steps=0,
    callbacks={"enough": {"loss": 0.5}}, train__steps=4, train__val_every=2, train__save_every=4, train__micro_batch=1,
    train__global_batch=6, optim__lr=0.01,
)  # fmt: skip


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """In the current folder; entries that are registered stay, so tests run in children."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def child(function):
    assert fork(function, timeout=120) == 0


def run(out="", **changes):
    config = tiny_config(out, **(PARTS | changes))
    trainer = Trainer(config, train_data=windows(30), val_data=windows(5, seed=9, score_once=True))
    trainer.train()
    return trainer


def test_the_guide_has_one_of_each_kind():
    kinds = {re.search(r'@register\("(\w+)"', text)[1] for text in MODULES.values()}
    assert kinds == {"strategy", "schedule", "optimizer", "callback", "reward", "source", "task"}


def test_a_strategy_schedule_optimizer_and_callback_of_one_s_own_run(modules):
    def use():
        trainer = run(modules / "run")
        log = [json.loads(line) for line in (modules / "run/metrics.jsonl").read_text().splitlines()]
        steps = [line for line in log if line["event"] == "step"]
        assert [line["lr"] for line in steps] == pytest.approx([0.01, 0.01, 0.005, 0.005])
        assert all(0 <= line["sure"] <= 1 for line in log if line["event"] != "save")
        start = Transformer(trainer.model.config, generator=torch.Generator().manual_seed(3))
        for before, after in zip(start.parameters(), trainer.model.parameters(), strict=True):
            assert 0 < (after - before).abs().max() <= 0.0301, "each step moves a weight by the rate or not at all"
        assert type(trainer.optimizer).__name__ == "Sign" and trainer.optimizer.param_groups[0]["decay"] == 0.8
        extra = json.loads((modules / "run/checkpoints/step_00000004/extra/enough.json").read_text())
        assert extra == {"seen": 2}
        stopped = run(callbacks={"enough": {"loss": 100.0}})
        assert stopped.state.step == 2 and "is below 100" in stopped.stop_reason

    child(use)


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_ranks_use_them_as_one_process_does(modules, mode):
    def use():
        def weights(**changes):
            trainer = run(train__steps=1, optim__lr=1e-3, **changes)
            executor = trainer.setup.executor
            return dict(zip(executor.weight_shapes(), whole_weights(executor), strict=True))

        alone = weights(train__micro_batch=6)
        for got in run_ranks(lambda: weights(parallel__mode=mode), 2):
            for name, values in alone.items():
                flat, theirs = (_flat(values), _flat(got[name]))
                other = sum(abs(a - b) > 1e-6 for a, b in zip(flat, theirs, strict=True))
                assert other <= 0.02 * len(flat), "a sign may only turn where a gradient is nearly 0"

    child(use)


def _flat(values):
    return [x for row in values for x in _flat(row)] if isinstance(values, list) else [values]


def test_a_misspelt_option_of_one_s_own_is_refused_with_the_nearest(modules):
    def use():
        with pytest.raises(ConfigError, match=r"unknown key strategy.gama; did you mean strategy.gamma"):
            run(strategy__gama=1.0)
        with pytest.raises(ConfigError, match=r"unknown optimizer 'sgin'; did you mean sign"):
            run(optim__name="sgin")

    child(use)


def test_a_source_of_one_s_own_is_prepared(modules):
    def use():
        sys.path.insert(0, str(modules))
        arguments = ["prepare", "mine:fables", "--plugins", "my_source", "--vocab-size", "300", "--out", "data"]
        assert main([*arguments, "--val-fraction", "0"]) == 0
        index = json.loads((modules / "data/index.json").read_text())
        assert index["sources"][0]["name"] == "mine:fables" and index["splits"]["train"]["documents"] == 2
        assert main(["prepare", "mine:fabels", "--vocab-size", "300", "--out", "other"]) == 2

    child(use)


def test_a_reward_is_found_by_name(modules):
    def use():
        load_plugins(("my_reward",))
        short = lookup("reward", "short").target
        assert [short("", "x" * n, {"limit": 3}) for n in (2, 3, 4)] == [1.0, 1.0, 0.0]
        with pytest.raises(ConfigError, match="unknown reward 'shrot'; did you mean short"):
            lookup("reward", "shrot")

    child(use)


def test_a_task_of_one_s_own_is_scored(modules, capfd):
    tokenizer = train_bpe(["The capital of France is Paris and that of Peru is Lima"] * 3, 280)
    model = Transformer(ModelConfig(**(TINY | {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64})))
    save_model(modules / "model", model, tokenizer)

    def use():
        sys.path.insert(0, str(modules))
        assert main(["eval", "model", "--tasks", "capitals", "capitals,size=2", "--plugins", "my_task", "--json"]) == 0
        assert main(["eval", "model", "--tasks", "capitols", "--plugins", "my_task"]) == 2

    child(use)
    out, err = capfd.readouterr()
    tasks = json.loads(out)["tasks"]
    assert {name: score["n"] for name, score in tasks.items()} == {"capitals": 3, "capitals,size=2": 2}
    assert all(list(score) == ["acc", "acc_norm", "n"] for score in tasks.values())
    assert "no task of that name; did you mean capitals" in err
