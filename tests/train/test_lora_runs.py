"""Runs that train an adapter: the same in every mode, resumed bit for bit, and the base untouched."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import TINY, fork, run_ranks, tensors_of, tiny_config, whole_weights, windows

from pellucid import load_model, save_model
from pellucid.checkpoint import export_model, files
from pellucid.config import LoraConfig, ModelConfig, RunConfig
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.model.lora import add_lora, is_adapter_weight, lora_of
from pellucid.train import Callback, Trainer
from pellucid.train.estimate import estimate, planned_parameters

TOKENS = torch.arange(24).view(2, 12) * 7 % 61
LORA: dict[str, Any] = {"r": 2, "alpha": 8.0, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    save_model(folder, Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1)))
    return folder


def config(base: Path, out: Path | str = "", **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "train__init": str(base), "lora": LORA, "train__steps": 4, "train__save_every": 2, "train__val_every": 0,
        "train__keep_last": 0, "optim__schedule": "constant", "optim__eps": 1e-4, "train__micro_batch": 1,
        "optim__lr": 0.05,
    }  # fmt: skip
    return tiny_config(out, **(settings | changes))


def train(config: RunConfig, *, resume: bool = False) -> Trainer:
    trainer = Trainer(config, train_data=windows(12))
    trainer.train(resume=resume)
    return trainer


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(TOKENS).logits


# -- modes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(base: Path) -> dict[str, torch.Tensor]:
    """One process."""
    trainer = train(config(base))
    return {name: weight.clone() for name, weight in trainer.setup.executor.weights()}


def test_one_process_moves_every_adapter_and_no_bit_of_the_base(base: Path, alone: dict[str, torch.Tensor]) -> None:
    before = load_model(base).model
    add_lora(
        before, LoraConfig(**LORA | {"targets": tuple(LORA["targets"])}), generator=torch.Generator().manual_seed(3)
    )
    for name, parameter in before.named_parameters():
        if is_adapter_weight(name):
            assert (alone[name] - parameter).abs().max() > 1e-3, name
        else:
            assert torch.equal(alone[name], parameter), name
    assert alone.keys() == dict(before.named_parameters()).keys()


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "torch_ddp", "fsdp2"])
def test_two_ranks_of_each_mode_train_the_adapter_of_one_process(
    base: Path, alone: dict[str, torch.Tensor], mode: str
) -> None:
    def rank() -> list[Any]:
        executor = train(config(base, parallel__mode=mode)).setup.executor
        return [list(executor.weight_shapes()), whole_weights(executor)]

    for names, weights in run_ranks(rank, 2):
        assert set(names) == alone.keys()
        for name, weight in zip(names, weights, strict=True):
            if is_adapter_weight(name):
                torch.testing.assert_close(torch.tensor(weight), alone[name], atol=1e-5, rtol=1e-4)
            else:
                assert torch.equal(torch.tensor(weight), alone[name]), name


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2"])
def test_only_the_adapter_s_gradients_travel(tmp_path: Path, base: Path, mode: str) -> None:
    run_ranks(lambda: bool(train(config(base, tmp_path / "run", parallel__mode=mode))), 2)
    lines = map(json.loads, (tmp_path / "run/ledger/rank00000.jsonl").read_text().splitlines())
    buckets = [line for line in lines if line["step"] == 1 and line["tag"].startswith(("grad/", "param/"))]
    adapters = {
        name for name in load_file(tmp_path / "run/checkpoints/step_00000002/model.safetensors") if "lora" in name
    }
    assert {name for line in buckets for name in line["owner"]} == adapters


# -- files ---------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_adapter_a_merged_model_and_checkpoints_that_open(tmp_path: Path, base: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    before = {file.name: file.read_bytes() for file in base.iterdir()}
    trainer = train(config(base, tmp_path / "run"))
    trained = logits(trainer.model)
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    assert (trained - logits(load_model(base).model)).abs().max() > 1e-2

    from_adapter = load_model(tmp_path / "run/adapter").model
    assert torch.equal(logits(from_adapter), trained)
    from_checkpoint = load_model(tmp_path / "run/checkpoints/step_00000004").model
    assert torch.equal(logits(from_checkpoint), trained)
    assert lora_of(from_adapter) == lora_of(from_checkpoint) == lora_of(trainer.model)
    merged = load_model(tmp_path / "run")
    assert f"| {merged.model.num_parameters():,} |" in (tmp_path / "run/model/README.md").read_text()
    assert lora_of(merged.model) is None
    torch.testing.assert_close(logits(merged.model), trained, atol=1e-5, rtol=0)
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "run/adapter"))
    torch.testing.assert_close(logits(theirs), trained, atol=1e-5, rtol=0)

    export_model(tmp_path / "run/checkpoints/step_00000002", tmp_path / "early")
    early = logits(load_model(tmp_path / "early").model)
    assert (early - trained).abs().max() > 1e-3
    stepped = logits(load_model(tmp_path / "run/checkpoints/step_00000002").model)
    torch.testing.assert_close(early, stepped, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_ranks_that_hold_parts_write_the_same_adapter_and_model(tmp_path: Path, base: Path, mode: str) -> None:
    train(config(base, tmp_path / "one"))
    run_ranks(lambda: bool(train(config(base, tmp_path / "two", parallel__mode=mode))), 2)
    for file in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        one, two = load_file(tmp_path / "one" / file), load_file(tmp_path / "two" / file)
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-4)
    settings = [json.loads((tmp_path / run / "adapter/adapter_config.json").read_text()) for run in ("one", "two")]
    assert settings[0] == settings[1]


@pytest.mark.parametrize("mode", ["none", "ddp", "zero1", "zero2", "zero3"])
def test_stopped_and_resumed_it_has_the_same_bits(tmp_path: Path, base: Path, mode: str) -> None:
    changes: dict[str, Any] = {"lora": LORA | {"dropout": 0.3}, "parallel__mode": mode}

    def lives() -> bool:
        train(config(base, tmp_path / "whole", **changes))
        train(config(base, tmp_path / "parts", **changes, train__steps=2))
        train(config(base, tmp_path / "parts", **changes), resume=True)
        return True

    assert lives() if mode == "none" else run_ranks(lives, 2)
    whole, parts = (tensors_of(tmp_path / run / "checkpoints/step_00000004") for run in ("whole", "parts"))
    first = tensors_of(tmp_path / "parts/checkpoints/step_00000002")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(parts[key], tensor) for key, tensor in whole.items())
    assert any(not torch.equal(first[key], whole[key]) for key in whole if key[0] == "model")
    moments = {name.rpartition("/")[0] for kind, name in whole if kind == "optimizer"}
    assert moments and all(is_adapter_weight(name) for name in moments)
    model = [load_file(tmp_path / run / "model/model.safetensors") for run in ("whole", "parts")]
    assert all(torch.equal(model[1][name], tensor) for name, tensor in model[0].items())


def test_a_resumed_run_takes_the_finished_adapter_away_until_it_ends_again(tmp_path: Path, base: Path) -> None:
    train(config(base, tmp_path / "run", train__steps=2))
    assert (tmp_path / "run/adapter").is_dir()
    there = []

    class Look(Callback):
        def on_optimizer_step(self, trainer: Any, info: Any) -> None:
            there.append((tmp_path / "run/adapter").exists())

    Trainer(config(base, tmp_path / "run"), train_data=windows(12), callbacks=[Look()]).train(resume=True)
    assert there == [False, False] and (tmp_path / "run/adapter").is_dir()


@pytest.mark.parametrize(
    ("operation", "part"), [("write", "adapter.tmp"), ("rename", "adapter.tmp"), ("rename", "model.tmp")]
)
def test_killed_while_it_writes_its_results_a_run_writes_them_when_resumed(
    tmp_path: Path, base: Path, operation: str, part: str
) -> None:
    def die(name: str, path: Path) -> None:
        if name == operation and part in str(path):
            os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> None:
        files.before_operation = die
        train(config(base, tmp_path / "run"))

    assert fork(killed) == -signal.SIGKILL
    assert (tmp_path / "run/adapter").exists() == (part == "model.tmp") and not (tmp_path / "run/model").exists()
    train(config(base, tmp_path / "run"), resume=True)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"adapter", "model"} <= left and not any(".tmp-" in name for name in left)
    apart = logits(load_model(tmp_path / "run/adapter").model)
    torch.testing.assert_close(logits(load_model(tmp_path / "run").model), apart, atol=1e-5, rtol=0)


def test_an_adapter_of_a_model_that_was_given_leaves_its_base_to_the_reader(tmp_path: Path, base: Path) -> None:
    Trainer(config("", tmp_path / "run", train__init=""), model=load_model(base).model, train_data=windows(12)).train()
    assert json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())["base_model_name_or_path"] is None
    given = load_model(tmp_path / "run/adapter", base=base).model
    torch.testing.assert_close(logits(given), logits(load_model(tmp_path / "run").model), atol=1e-5, rtol=0)


# -- what a run says before it starts ------------------------------------------------------------------------


def test_the_estimate_counts_gradients_and_moments_of_the_adapter_alone(base: Path) -> None:
    whole, lora = (Trainer(config(base, lora=table), train_data=windows(12)).setup for table in ("none", LORA))
    assert estimate(lora).state_bytes < 0.6 * estimate(whole).state_bytes
    infos = planned_parameters(lora.config)
    assert [info.trainable for info in infos] == [is_adapter_weight(info.name) for info in infos]
    assert {info.name for info in infos} == {name for name, _ in lora.model.named_parameters()}


def test_an_adapter_needs_a_base_that_has_none(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ConfigError, match="name it with --init MODEL"):
        Trainer(config("", train__init=""), train_data=windows(12))
    train(config(base, tmp_path / "run"))
    for source in ("adapter", "checkpoints/step_00000002"):
        for lora in (LORA, "none"):
            with pytest.raises(ConfigError, match="has an adapter, and a run starts from a model without one"):
                Trainer(config(tmp_path / "run" / source, lora=lora), train_data=windows(12))
    Trainer(config(tmp_path / "run"), train_data=windows(12))  # its merged model is a base like any other


def test_a_resumed_run_keeps_its_rank(tmp_path: Path, base: Path) -> None:
    train(config(base, tmp_path / "run", train__steps=2))
    for changes, key in (({"lora": LORA | {"r": 3}}, r"lora\.r was 2"), ({"lora": "none"}, r"lora\.\w+ was")):
        with pytest.raises(ConfigError, match=key):
            train(config(base, tmp_path / "run", **changes), resume=True)


# -- together with other settings ----------------------------------------------------------------------------


def test_recomputing_activations_changes_nothing(base: Path, alone: dict[str, torch.Tensor]) -> None:
    again = dict(train(config(base, train__activation_checkpointing=True)).setup.executor.weights())
    for name, weight in alone.items():
        torch.testing.assert_close(again[name], weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_ordered_sums_give_the_same_bits_on_two_ranks(base: Path, mode: str) -> None:
    changes: dict[str, Any] = {"parallel__reduction": "ordered", "lora": LORA | {"dropout": 0.2}}

    def rank(mode: str) -> list[Any]:
        return whole_weights(train(config(base, **changes, parallel__mode=mode)).setup.executor)

    (one,) = run_ranks(lambda: rank("none"), 1)
    two = run_ranks(lambda: rank(mode), 2)
    assert two == [one, one]


@pytest.mark.parametrize("changes", [{"train__dtype": "bfloat16"}, {"optim__name": "muon"}])
def test_the_base_stays_with_other_types_and_optimizers(base: Path, changes: dict[str, Any]) -> None:
    given = {"optim__name": "adamw"} | changes
    settings = tiny_config("", train__init=str(base), lora=LORA, train__val_every=0, **given)
    trained, before = train(settings).model, dict(load_model(base).model.named_parameters())
    for name, parameter in trained.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name]), name
        elif name.endswith("lora_B.weight"):
            assert parameter.abs().max() > 1e-4, name
