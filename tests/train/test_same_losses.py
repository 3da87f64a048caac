"""The demo's model on real text: a step's loss is the same number on one process and on several ranks, in every mode."""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import digest, load_moments, run_ranks
from torch._dynamo.utils import counters

from pellucid.config import load_config
from pellucid.train import Trainer

DEMO = Path(__file__).resolve().parents[2] / "configs/demo.toml"
MODES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp")
SHORT = {"train.steps": 20, "train.global_batch": 4, "train.val_every": 10, "train.save_every": 20, "data.context": 32}
LONG = {
    "train.steps": 200,
    "train.global_batch": 12,
    "train.val_every": 100,
    "train.save_every": 100,
    "data.context": 32,
}


@pytest.fixture(scope="module")
def train(data_folder):
    """A function that runs the demo's configuration, changed, and returns what this rank knows at the end."""

    def run(out, mode, changes):
        settings = {
            "data.path": str(data_folder), "train.out": str(out), "train.dtype": "float32", "train.device": "cpu",
            "model.vocab_size": 4096, "parallel.mode": mode,
        }  # fmt: skip
        trainer = Trainer(load_config(DEMO, settings | changes))
        before = counters["stats"]["unique_graphs"]
        trainer.train()
        graphs = counters["stats"]["unique_graphs"] - before
        assert (graphs > 0) == trainer.config.train.compile
        executor = trainer.setup.executor
        size = sum(math.prod(shape) for shape, _ in executor.weight_shapes().values())
        return [size, "" if executor.shards_weights else digest(trainer.model)]

    return run


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    """By length, what one process logged that takes each batch at once."""
    known = {}

    def log(changes):
        steps = changes["train.steps"]
        if steps not in known:
            out = tmp_path_factory.mktemp("alone") / str(steps)
            size, _ = train(out, "none", {"train.micro_batch": changes["train.global_batch"]} | changes)
            assert 1.8e6 < size < 1.9e6
            known[steps] = read_log(out)
            losses = [loss for _, _, loss in known[steps]]
            assert losses[0] > losses[-1] + 0.5, "it must learn, or equal losses say little"
        return known[steps]

    return log


def read_log(out):
    """(event, step, loss) of steps and validations."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["event"], line["step"], line["loss"]) for line in lines if line["event"] != "save"]


def check(out, train, alone, mode, size, micro, changes, *, rtol, wall_s=60.0):
    """Train on ``size`` ranks and compare every logged loss with one process's."""
    changes = changes | {"train.micro_batch": micro}
    results = run_ranks(lambda: train(out, mode, changes), size, timeout=wall_s)
    assert all(result == results[0] for result in results), "replicas differ"
    expected = alone(
        {key: value for key, value in changes.items() if key not in ("train.micro_batch", "train.compile")}
    )
    got = read_log(out)
    assert [line[:2] for line in got] == [line[:2] for line in expected]
    assert {event for event, *_ in got} == {"step", "validation"}
    worst = max(abs(ours / theirs - 1) for (*_, ours), (*_, theirs) in zip(got, expected, strict=True))
    assert worst <= rtol, f"{mode} on {size} ranks is off by {worst:.1e}"
    assert_communicated(out, mode, size, changes)
    last = out / f"checkpoints/step_{changes['train.steps']:08d}"
    weights = load_file(last / "model.safetensors")
    kinds = {key.rpartition("/")[2] for key in load_moments(last)}
    assert kinds == {"momentum", "step", "exp_avg", "exp_avg_sq"} and len(weights) > 20
    shutil.rmtree(out)


def assert_communicated(out, mode, size, changes):
    """Every step of every rank moved the gradients of each parameter, as bytes of float32, and tokens and loss.

    Once, or once a micro-batch where gradients are sharded.
    """
    steps = changes["train.steps"]
    times = changes["train.global_batch"] // (changes["train.micro_batch"] * size)
    for rank in range(size):
        lines = [json.loads(text) for text in (out / f"ledger/rank{rank:05d}.jsonl").read_text().splitlines()]
        for step in range(1, steps + 1):
            own = [line for line in lines if line["step"] == step]
            gradients = [line for line in own if line["tag"].startswith("grad/")]
            often = {line["micro"] for line in gradients} if mode in ("zero2", "zero3", "fsdp2") else {times - 1}
            assert often == (set(range(times)) if len(often) > 1 else {times - 1})
            names = [name for line in gradients for name in line["owner"] if line["micro"] == times - 1]
            assert len(names) == len(set(names)) > 20, f"step {step}: {names}"
            assert sum(line["payload_bytes"] for line in gradients) >= 1.6e6 * 4 * len(often)
            ops = {"ddp": {"all_reduce"}, "torch_ddp": {"all_reduce"}, "zero3": {"reduce_scatter", "all_reduce"}}
            assert {line["op"] for line in gradients} == ops.get(mode, {"reduce_scatter"})
            assert [line["tag"] for line in own].count("tokens") == [line["tag"] for line in own].count("loss") == 1


@pytest.mark.parametrize(
    "mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2", pytest.param("torch_ddp", marks=pytest.mark.slow)]
)
def test_twenty_steps_on_two_ranks_have_the_losses_of_one_process(tmp_path, train, alone, mode):
    check(tmp_path / "run", train, alone, mode, 2, 2, SHORT, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size, micro", [(2, 2), (3, 4), (4, 1)])
def test_two_hundred_steps_stay_together(tmp_path, train, alone, mode, size, micro):
    check(tmp_path / "run", train, alone, mode, size, micro, LONG, rtol=1e-4, wall_s=600)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("mode", ["ddp", "zero3", "fsdp2"])
def test_a_compiled_model_communicates_and_has_the_same_losses(tmp_path, train, alone, mode):
    compiled = SHORT | {"train.compile": True}
    check(tmp_path / "run", train, alone, mode, 2, 1, compiled, rtol=1e-4, wall_s=600)
