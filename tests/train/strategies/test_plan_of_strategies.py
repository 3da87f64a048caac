"""The plan of a step is the ledger of a step for every strategy too: metrics, counts and a live reference."""

import json

import pytest
import torch
from records import conversations, pairs
from support import TINY, run_ranks, tiny_config

from pellucid import save_model
from pellucid.config import ModelConfig
from pellucid.model import Transformer
from pellucid.parallel.layout import parameter_infos
from pellucid.parallel.plan import plan
from pellucid.train import Trainer
from pellucid.train.activations import peak_activation_bytes
from pellucid.train.setup import plan_mode


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    run("", "none", 1, train__steps=1, strategy__name="sft")


def run(out, mode, size, **changes):
    settings = dict(
        parallel__mode=mode, train__global_batch=2 * size, train__micro_batch=1, train__steps=3, train__save_every=0,
        train__val_every=3,
    )  # fmt: skip
    config = tiny_config(out, **(settings | changes))
    data = pairs if config.strategy.name == "dpo" else conversations
    trainer = Trainer(config, train_data=data(21), val_data=data(5, seed=5))
    trainer.train()
    return trainer


def recorded(out, step=2):
    rows = {}
    for line in (out / "ledger/rank00000.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["step"] == step:
            row = rows.setdefault((event["tag"], event["op"], event["dtype"]), [0, 0, 0])
            for i, value in enumerate((1, event["payload_bytes"], event["wire_bytes"])):
                row[i] += value
    return rows


def written(out):
    steps = json.loads((out / "ledger/plan.json").read_text())["step"]
    return {(r["tag"], r["op"], r["dtype"]): [r["count"], r["payload_bytes"], r["wire_bytes"]] for r in steps}


CASES = {
    "sft with entropy": ("ddp", {"strategy__name": "sft", "strategy__entropy": True}),
    "dpo": ("zero1", {"strategy__name": "dpo"}),
    "dpo, live": ("zero3", {"strategy__name": "dpo", "strategy__reference": "live"}),
    "dpo, live, torch's": ("fsdp2", {"strategy__name": "dpo", "strategy__reference": "live"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_ordinary_step_sends_what_was_planned(tmp_path, name, size):
    mode, changes = CASES[name]
    run_ranks(lambda: run(tmp_path, mode, size, **changes).state.step, size)
    got, expected = recorded(tmp_path), written(tmp_path)
    assert got == expected
    rows = {tag: row for (tag, *_), row in got.items()}
    assert rows["loss"][1] == 8 * (2 if changes["strategy__name"] == "sft" else 5)
    assert rows["tokens"][1] == 8 * (2 if changes["strategy__name"] == "sft" else 3)
    live = [row for tag, row in rows.items() if tag.startswith("reference/")]
    assert len(live) == (3 if "strategy__reference" in changes else 0)
    assert all(count == 2 for count, *_ in live), "once in each micro-batch"


@pytest.mark.parametrize("mode", ["zero3", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_below_an_adapter_the_model_itself_is_gathered_once_more(tmp_path, mode):
    base = tmp_path / "base"
    save_model(base, Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1)))
    lora = {"r": 2, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    changes = dict(strategy__name="dpo", strategy__reference="live", train__init=str(base), lora=lora)
    run_ranks(lambda: run(tmp_path / "run", mode, 2, **changes).state.step, 2)
    assert recorded(tmp_path / "run") == written(tmp_path / "run")


@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_a_plan_counts_the_memory_of_a_reference_and_of_an_average(tmp_path, mode):
    infos = parameter_infos(Transformer(tiny_config().model, device="meta"))
    size = sum(info.num_bytes for info in infos)
    plain = plan(infos, mode=mode, world_size=2)
    both = plan(infos, mode=mode, world_size=2, reference=infos, averages_weights=True)
    held = both.weights_bytes - plain.weights_bytes
    assert held == both.optimizer_bytes - plain.optimizer_bytes == plain.weights_bytes
    assert held == size if mode == "ddp" else held < 0.6 * size
    config = tiny_config(strategy__name="dpo", strategy__reference="live", train__ema_decay=0.9, model__vocab_size=61)
    again = plan_mode(config, infos, mode, world_size=2, micro_batches=1)
    assert (again.weights_bytes, again.optimizer_bytes) == (both.weights_bytes, both.optimizer_bytes)


def test_two_answers_take_twice_the_activations():
    sizes = {
        name: peak_activation_bytes(tiny_config(strategy__name=name, train__micro_batch=4), documents=1)
        for name in ("sft", "dpo")
    }
    assert 1.8 < sizes["dpo"] / sizes["sft"] < 2.4
