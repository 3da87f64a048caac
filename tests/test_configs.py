"""The configurations that ship: shapes of published models, and runs that make sense."""

from pathlib import Path
from typing import Any

import pytest

from pellucid.config import RunConfig, load_config
from pellucid.model import Transformer
from pellucid.model.linear import as_elsewhere
from pellucid.train.activations import peak_activation_bytes

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
GIB = 2**30

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0, "rope_scaling": None,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "max_position_embeddings": 131072,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "rope_scaling": LLAMA3_ROPE | {"factor": 8.0}, "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""From config.json of SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B."""


def shipped(name: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.toml")


@pytest.mark.parametrize(("name", "parameters"), [("135m", 134_515_008), ("1b", 1_235_814_400), ("8b", 8_030_261_248)])
def test_a_large_configuration_has_the_shape_and_the_parameters_of_its_original(name, parameters):
    model = shipped(name).model
    assert {key: getattr(model, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    assert Transformer(model, device="meta").num_parameters() == parameters


@pytest.mark.parametrize(("name", "ranks"), [("135m", 8), ("1b", 8), ("1b", 64), ("8b", 64), ("8b", 1024)])
def test_the_batch_of_a_large_configuration_divides_over_its_ranks(name, ranks):
    train = shipped(name).train
    assert train.global_batch % (train.micro_batch * ranks) == 0


@pytest.mark.parametrize(("name", "gib"), [("135m", 22), ("1b", 29)])  # 8b: tests/cli/test_plan.py
def test_activations_are_what_the_comment_says(name, gib):
    text = (CONFIGS / f"{name}.toml").read_text()
    assert f"bout {gib} GiB of activations" in text
    with as_elsewhere():
        assert peak_activation_bytes(shipped(name)) / GIB == pytest.approx(gib, abs=0.7)


@pytest.mark.parametrize("name", ["demo", "small", *PUBLISHED])
def test_a_run_has_an_end_and_warms_up_within_it(name):
    config = shipped(name)
    assert config.train.steps is not None
    assert 0 < config.optim.warmup_steps < config.train.steps / 4
