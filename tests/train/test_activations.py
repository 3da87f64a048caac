"""Predicted activation memory against the allocator's own events."""

import resource
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from experts import EXPERTS, LATENT
from experts import changes as changes_of
from support import TINY
from torch.profiler import ProfilerActivity, profile

from pellucid.config import RunConfig, load_config, options_of, run_config
from pellucid.data.batches import Batch
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.model.linear import as_elsewhere
from pellucid.registry import lookup
from pellucid.train.activations import peak_activation_bytes
from pellucid.train.precision import DTYPES, autocast
from pellucid.train.strategies import LossOutput, Pretrain, PretrainOptions

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL: dict[str, Any] = {
    "model.vocab_size": 8192, "train.dtype": "float32", "train.device": "cpu", "train.micro_batch": 1, "train.global_batch": 1,
}  # fmt: skip


LITTLE_LATENT = changes_of(LATENT | {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "v_head_dim": 16})
LITTLE_EXPERTS = changes_of(EXPERTS | {"moe_intermediate_size": 40})


def small(**changes: Any) -> RunConfig:
    return load_config(
        CONFIGS / "small.toml", SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    )


def little(**changes: Any) -> RunConfig:
    """A model on which attention, masks and norms weigh more than the head."""
    model = TINY | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    train = {"dtype": "float32", "device": "cpu", "micro_batch": 2, "global_batch": 2}
    table: dict[str, Any] = {"model": model, "train": train}
    for key, value in changes.items():
        room, _, name = key.partition("__")
        table[room] = table.get(room, {}) | {name: value}
    return run_config(table)


def measured_peak(config: RunConfig, documents: int = 1) -> int:
    """Highest sum of the allocator's events over forward and backward of the second micro-batch of a step."""
    rows, tokens = config.train.micro_batch, config.data.context or config.model.max_position_embeddings
    model = Transformer(config.model)
    model.activation_checkpointing = config.train.activation_checkpointing
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, config.model.vocab_size, (2, rows, tokens))
    batch = Batch(
        tokens=ids[0],
        targets=ids[1],
        loss_mask=torch.ones(rows, tokens, dtype=torch.bool),
        positions=torch.arange(tokens).repeat(rows, 1),
        document_ids=(torch.arange(tokens) * documents // tokens).repeat(rows, 1),
        sample_ids=torch.arange(rows),
        packed=documents > 1,
    )
    strategy = Pretrain(options_of("strategy", "pretrain", config.strategy.options))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with autocast(torch.device("cpu"), DTYPES[config.train.dtype]):
            out = strategy(model, batch)
        loss = out.sum / 7 if out.routing is None else out.sum / 7 + out.routing.loss / 7
        loss.backward()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_small_model_in_float32_takes_what_was_predicted(checkpointing):
    config = small(train__activation_checkpointing=checkpointing)
    assert peak_activation_bytes(config, documents=1) == pytest.approx(measured_peak(config), rel=0.03)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("context", "layers"), [(32, 2), pytest.param(256, 6, marks=pytest.mark.slow)])
def test_the_small_model_under_bfloat16_autocast_takes_what_was_predicted(context, layers, checkpointing):
    """Less of it in the ordinary run: bfloat16 is slow on processors that lack it."""
    config = small(
        train__dtype="bfloat16",
        train__activation_checkpointing=checkpointing,
        data__context=context,
        model__num_hidden_layers=layers,
    )
    assert peak_activation_bytes(config, documents=1) == pytest.approx(measured_peak(config), rel=0.03)


@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__qk_norm": True, "model__attention_gate": True, "model__attention_bias": True},
        {"model__dropout": 0.1, "train__activation_checkpointing": True},
        {"model__sliding_window": 40, "model__max_window_layers": 1, "model__tie_word_embeddings": False},
        {"model__attend": "canonical"},
        {"strategy__label_smoothing": 0.1, "train__micro_batch": 1},
        {"train__dtype": "bfloat16", "model__num_hidden_layers": 3},
        LITTLE_LATENT,
        LITTLE_LATENT | {"model__attend": "canonical", "train__activation_checkpointing": True},
        LITTLE_EXPERTS,
        LITTLE_EXPERTS | {"train__activation_checkpointing": True, "model__first_k_dense_replace": 1},
        LITTLE_LATENT | LITTLE_EXPERTS | {"train__dtype": "bfloat16"},
    ],
    ids=lambda changes: " ".join(f"{key.partition('__')[2]}={value}" for key, value in changes.items())[:80] or "plain",
)
def test_every_kind_of_model_takes_what_was_predicted(changes, documents):
    config = little(**changes)
    predicted = peak_activation_bytes(config, documents=documents)
    assert predicted == pytest.approx(measured_peak(config, documents), rel=0.03)


def test_masks_of_packed_documents_are_counted():
    config = little(model__max_position_embeddings=256)
    one, two = (peak_activation_bytes(config, documents=n) for n in (1, 2))
    assert two - one >= config.model.num_hidden_layers * 2 * 256 * 256 * 4  # kept by each layer, in float32


@cache
def predicted_8b(layers: int) -> int:
    with as_elsewhere():  # emulated bfloat16 keeps no copies of weights
        return peak_activation_bytes(load_config(CONFIGS / "8b.toml", {"model.num_hidden_layers": layers}))


def test_an_8b_model_is_measured_without_its_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    predicted = predicted_8b(20)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    logits, inputs_of_blocks = 8192 * 128256 * (2 + 4 + 4), 20 * 8192 * 4096 * 4
    assert logits + inputs_of_blocks < predicted < 1.5 * (logits + inputs_of_blocks)
    assert grown < 0.5e9


def test_depth_is_run_and_not_extrapolated():
    """Under autocast with checkpointing few layers peak in backward and many in forward: no line through 2 and 3 will do."""
    line = predicted_8b(3) + 17 * (predicted_8b(3) - predicted_8b(2))
    assert predicted_8b(20) > 1.04 * line


def test_it_draws_no_random_number_and_leaves_no_mode_behind():
    before = torch.get_rng_state()
    peak_activation_bytes(little(model__dropout=0.1, train__activation_checkpointing=True))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        peak_activation_bytes(little())
    assert torch.zeros(2).tolist() == [0.0, 0.0]


def test_the_vocabulary_can_be_passed_and_must_be_known():
    config = little()
    unknown = replace(config, model=replace(config.model, vocab_size=0))
    assert peak_activation_bytes(unknown, vocab_size=61) == peak_activation_bytes(config)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 0"):
        peak_activation_bytes(unknown)


class Curious(Pretrain):
    """Looks at its loss."""

    def __call__(self, model: Transformer, batch: Batch) -> LossOutput:
        out = super().__call__(model, batch)
        return LossOutput(out.sum * (2 if out.sum.item() > 1 else 1), {})


class Doubled(Pretrain):
    """Two forwards: what a strategy really does counts, not what most do."""

    def __call__(self, model: Transformer, batch: Batch) -> LossOutput:
        return LossOutput(super().__call__(model, batch).sum + super().__call__(model, batch).sum, {})


def test_the_given_strategy_is_what_runs_unless_it_needs_values():
    config, options = little(), PretrainOptions()
    plain = peak_activation_bytes(config)
    assert peak_activation_bytes(config, strategy=Doubled(options)) > 1.5 * plain
    assert peak_activation_bytes(config, strategy=Curious(options)) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_cuda_takes_what_was_predicted(checkpointing):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    config = small(train__dtype="bfloat16", train__activation_checkpointing=checkpointing)
    model = Transformer(config.model, device=device)
    model.activation_checkpointing = checkpointing
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    shape = (config.train.micro_batch, config.model.max_position_embeddings)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    batch = Batch(ids, ids, ids == 0, ids, ids, ids[:, 0], False)
    strategy = lookup("strategy", "pretrain").target(PretrainOptions())
    for _ in range(2):  # the first makes the libraries' workspaces
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with autocast(device, torch.bfloat16):
            loss = strategy(model, batch).sum
        loss.backward()
        del loss
    measured = torch.cuda.max_memory_allocated() - before
    assert peak_activation_bytes(config, device=device, documents=1) == pytest.approx(measured, rel=0.15)
