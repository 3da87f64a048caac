"""The moving average of weights: its recurrence, the same in every mode, and through checkpoints on any number of ranks."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from support import TINY, run_ranks, tiny_config, windows

from pellucid import load_model, save_model
from pellucid.config import ModelConfig
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.train import Callback, Trainer
from pellucid.train.ema import EMA_MODEL, EMA_WEIGHTS

DECAY = 0.75


class Weights(Callback):
    """Copies of all weights after each step, and a signal at one of them."""

    def __init__(self, stop_at=None):
        self.seen, self.stop_at = [], stop_at

    def on_optimizer_step(self, trainer, info):
        self.seen.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        if info.step == self.stop_at and comm.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def run(out, *, resume=False, stop_at=None, **changes):
    settings = dict(
        train__steps=6, train__global_batch=6, train__micro_batch=1, train__save_every=2, train__keep_last=0, train__val_every=0,
        train__ema_decay=DECAY,
    )  # fmt: skip
    weights = Weights(stop_at)
    trainer = Trainer(tiny_config(out, **(settings | changes)), train_data=windows(30), callbacks=[weights])
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train(resume=resume)
    return trainer, [start, *weights.seen]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    _, weights = run(out, train__micro_batch=6)
    return out, weights


def averages(out, step=6):
    return load_file(out / f"checkpoints/step_{step:08d}" / EMA_WEIGHTS)


def test_the_average_is_that_of_its_recurrence_from_the_start(alone):
    out, weights = alone
    got = averages(out)
    assert got.keys() == weights[0].keys()
    for name, average in weights[0].items():
        expected = average.double()
        for later in weights[1:]:
            expected = DECAY * expected + (1 - DECAY) * later[name].double()
        torch.testing.assert_close(got[name].double(), expected, rtol=1e-6, atol=1e-7)
        assert (got[name] - weights[-1][name]).norm() > 1e-3 * weights[-1][name].norm()


def test_the_averaged_model_opens_beside_the_model(alone):
    out, weights = alone
    loaded = load_model(out / EMA_MODEL)
    got = averages(out)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, got[name]), name
    assert "moving average, decay 0.75 a step" in (out / EMA_MODEL / "README.md").read_text()
    assert "moving average" not in (out / "model/README.md").read_text()
    for name, parameter in load_model(out / "model").model.named_parameters():
        assert torch.equal(parameter, weights[-1][name]), name


@pytest.mark.parametrize(
    "mode", ["ddp", "zero1", "zero3", *(pytest.param(m, marks=pytest.mark.slow) for m in ("zero2", "fsdp2", "torch_ddp"))]
)  # fmt: skip
def test_ranks_average_what_they_hold(tmp_path, alone, mode):
    def rank():
        trainer, _ = run(tmp_path, parallel__mode=mode)
        return [sum(t.numel() for t in trainer.setup.ema.held.values())]

    held = [n for (n,) in run_ranks(rank, 3)]
    size = sum(p.numel() for p in Transformer(ModelConfig(**TINY)).parameters())
    if mode in ("zero3", "fsdp2"):
        assert max(held) < 0.45 * size, "rows alone"
    else:
        assert held == [size] * 3
    expected, got = averages(alone[0]), averages(tmp_path)
    assert got.keys() == expected.keys()
    for name, average in expected.items():
        torch.testing.assert_close(got[name], average, rtol=1e-4, atol=1e-5)
    opened = dict(load_model(tmp_path / EMA_MODEL).model.named_parameters())
    assert all(torch.equal(opened[name], average) for name, average in got.items())


@pytest.mark.parametrize(
    "mode, size, async_save",
    [
        ("none", 1, True), ("none", 1, False), ("zero3", 2, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("zero1", 2, True), ("zero1", 2, False), ("zero3", 2, False))),
    ],
)  # fmt: skip
def test_a_stopped_run_ends_with_the_same_averages(tmp_path, mode, size, async_save):
    changes = dict(parallel__mode=mode, model__dropout=0.1, train__async_save=async_save)

    def both():
        run(tmp_path / "a", **changes)
        first, _ = run(tmp_path / "b", stop_at=3, **changes)
        assert first.state.step == 3 and not (tmp_path / "b" / EMA_MODEL).exists()
        run(tmp_path / "b", resume=True, **changes)

    both() if size == 1 else run_ranks(both, size)
    a, b = averages(tmp_path / "a"), averages(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_goes_on_with_other_ranks_in_another_mode(tmp_path, alone):
    run_ranks(lambda: run(tmp_path, stop_at=3, parallel__mode="zero3")[0].state.step, 3)
    run_ranks(lambda: run(tmp_path, resume=True, parallel__mode="zero2")[0].state.step, 2)
    expected, got = averages(alone[0]), averages(tmp_path)
    for name, average in expected.items():
        torch.testing.assert_close(got[name], average, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"train.ema_decay was 0.75"):
        run(tmp_path, resume=True, train__ema_decay=0.5)


def test_with_an_adapter_it_alone_is_averaged_and_the_averaged_model_has_it_merged(tmp_path):
    base = tmp_path / "base"
    save_model(base, Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1)))
    lora = {"r": 2, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    run(tmp_path / "run", train__init=str(base), lora=lora, optim__lr=0.05)
    got = averages(tmp_path / "run")
    assert got and all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in got)
    frozen = dict(load_model(base).model.named_parameters())
    merged = dict(load_model(tmp_path / "run" / EMA_MODEL).model.named_parameters())
    name = "model.layers.0.self_attn.q_proj"
    expected = frozen[name + ".weight"] + 4.0 * got[name + ".lora_B.weight"] @ got[name + ".lora_A.weight"]
    torch.testing.assert_close(merged[name + ".weight"], expected)
    assert not torch.equal(merged[name + ".weight"], frozen[name + ".weight"])
    assert torch.equal(merged["model.norm.weight"], frozen["model.norm.weight"])
    adapter = load_model(tmp_path / "run/adapter_ema").model
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        want = load_model(tmp_path / "run" / EMA_MODEL).model(tokens).logits
        torch.testing.assert_close(adapter(tokens).logits, want, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_other_weights_is_refused_by_name(tmp_path):
    trainer, _ = run(tmp_path, train__steps=2)
    path = tmp_path / "checkpoints/step_00000002"
    from pellucid.checkpoint.reshard import SavedFiles
    from pellucid.parallel.parts import WholeTensors

    saved = SavedFiles([path / EMA_WEIGHTS])
    tensors = {name: saved.read(name).view(saved.shape(name)) for name in saved.keys()}  # noqa: SIM118
    trainer.setup.ema.load(WholeTensors(tensors))
    tensors.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"ema.safetensors: .*missing model.norm.weight"):
        trainer.setup.ema.load(WholeTensors(tensors))
    manifest = json.loads((path / "manifest.json").read_text())
    assert EMA_WEIGHTS in manifest["files"]


def test_a_run_without_an_average_writes_none(tmp_path):
    run(tmp_path, train__ema_decay=None, train__steps=2)
    assert not list(tmp_path.rglob("*ema*"))


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ConfigError, match=r"train.ema_decay must be between 0 and 1"):
        tiny_config(train__ema_decay=decay)
