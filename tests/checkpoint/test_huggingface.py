import copy
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from pellucid.checkpoint.huggingface import from_hf_config, to_hf_config
from pellucid.checkpoint.model_folder import load_model
from pellucid.config import ModelConfig
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model import Transformer

SHAPE: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "ntk", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    LLAMA3,
]
KINDS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    {"qk_norm": True, "head_dim": 20},
    {"qk_norm": True, "tie_word_embeddings": False, "attention_bias": True},
    {"qk_norm": True, "sliding_window": 7, "max_window_layers": 1},
    {"sliding_window": 7},
    {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8},
]
TOKENS = torch.randint(0, 60, (2, 45), generator=torch.Generator().manual_seed(1))
"""Longer than the window of 32."""


def make_model(config: ModelConfig) -> Transformer:
    """Large random weights everywhere, norms and biases too: nothing may hide behind a one or a zero."""
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=g) + 0.5 if p.dim() == 1 else torch.randn(p.shape, generator=g) * 0.2)
    return model


def export(model: Transformer, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(to_hf_config(model.config)))
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> Transformer:
    model = Transformer(from_hf_config(json.loads((folder / "config.json").read_text())), device="meta").eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    return model


def assert_same_logits(ours: Transformer, theirs: PreTrainedModel) -> None:
    with torch.no_grad():
        for tokens in (TOKENS[:, :20], TOKENS):  # within the window, and beyond
            mine, foreign = ours(tokens).logits, theirs.eval()(tokens).logits
            assert mine.std() > 0.5
            torch.testing.assert_close(mine, foreign, rtol=1e-4, atol=1e-4)


# -- logits, in both directions ----------------------------------------------------------------------------


def opened_by_transformers(config: ModelConfig, folder: Path) -> tuple[Transformer, PreTrainedModel]:
    model = make_model(config)
    export(model, folder)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model, theirs


@pytest.mark.parametrize("changes", KINDS)
def test_a_saved_model_opens_in_transformers_with_equal_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_same_logits(*opened_by_transformers(ModelConfig(**SHAPE | changes), tmp_path))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS[1:])
def test_each_rope_type_opens_in_transformers_with_equal_logits(
    scaling: dict[str, Any], qk_norm: bool, tmp_path: Path
) -> None:
    config = ModelConfig(**SHAPE, rope_scaling=scaling, rope_theta=500.0, qk_norm=qk_norm)
    ours, theirs = opened_by_transformers(config, tmp_path)
    assert_same_logits(ours, theirs)
    plain = Transformer(ModelConfig(**SHAPE, rope_theta=500.0, qk_norm=qk_norm), device="meta").eval()
    plain.load_state_dict(ours.state_dict(), assign=True)
    assert not torch.allclose(plain(TOKENS).logits, ours(TOKENS).logits, atol=1e-2)  # the scaling matters


def saved_by_transformers(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.rand(p.shape) + 0.5 if p.dim() == 1 else torch.randn(p.shape) * 0.2)
    theirs.save_pretrained(folder)
    return theirs


WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, tie_word_embeddings=True),
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=16),
        Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
        Qwen3Config(**SHAPE, attention_bias=True, rms_norm_eps=1e-3, **WINDOWED),
        MistralConfig(**SHAPE, sliding_window=9),
        MistralConfig(**SHAPE, sliding_window=None, tie_word_embeddings=True),
    ],
    ids=lambda c: f"{c.model_type}-{'tied' if c.tie_word_embeddings else 'untied'}",
)
def test_a_folder_saved_by_transformers_loads_with_equal_logits(config: PreTrainedConfig, tmp_path: Path) -> None:
    theirs = saved_by_transformers(config, tmp_path)
    assert_same_logits(load(tmp_path), theirs)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("scaling", [s for s in SCALINGS if not s or s["rope_type"] != "ntk"])
def test_each_rope_type_loads_from_both_generations_of_keys(
    scaling: dict[str, Any] | None, legacy: bool, tmp_path: Path
) -> None:
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": 500.0}
    theirs = saved_by_transformers(LlamaConfig(**SHAPE, rope_parameters=rope), tmp_path)
    path = tmp_path / "config.json"
    table = json.loads(path.read_text())
    assert "rope_parameters" in table and "rope_scaling" not in table
    if legacy:
        old = table.pop("rope_parameters")
        table["rope_theta"] = old.pop("rope_theta")
        old["type"] = old.pop("rope_type")
        table["rope_scaling"] = old if scaling else None
        path.write_text(json.dumps(table))
    assert_same_logits(load(tmp_path), theirs)


# -- config.json alone -------------------------------------------------------------------------------------


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([0, 4, 6, 16]))
    layers = draw(st.integers(1, 4))
    booleans = ("tie_word_embeddings", "attention_bias", "mlp_bias", "qk_norm", "attention_gate")
    return ModelConfig(
        vocab_size=draw(st.integers(1, 300)),
        hidden_size=draw(st.integers(1, 50)) if head_dim else 4 * heads,
        intermediate_size=draw(st.integers(1, 90)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=draw(st.integers(17, 5000)),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope_theta=draw(st.floats(2, 1e7)),
        rope_scaling=draw(st.sampled_from([*SCALINGS, {"rope_type": "default"}])),
        sliding_window=draw(st.none() | st.integers(1, 40)),
        max_window_layers=draw(st.integers(0, layers + 1)),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        initializer_range=draw(st.floats(0.001, 0.9)),
        attend=draw(st.sampled_from(["sdpa", "canonical"])),
        **{name: draw(st.booleans()) for name in booleans},
    )


@settings(max_examples=200, deadline=None)
@given(configs())
def test_every_config_comes_back_as_itself_through_json(config: ModelConfig) -> None:
    table = json.loads(json.dumps(to_hf_config(config, dtype="bfloat16", eos_token_id=[0, 2], pad_token_id=0)))
    assert from_hf_config(table) == config
    assert table["dtype"] == "bfloat16" and table["eos_token_id"] == [0, 2] and table["bos_token_id"] is None
    assert "rope_scaling" not in table and "rope_theta" not in table  # the newest keys alone


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({}, "llama"),
        ({"dropout": 0.1, "attend": "canonical"}, "llama"),
        ({"sliding_window": 5, "max_window_layers": 2}, "llama"),  # no layer has a window
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": True, "mlp_bias": True}, "pellucid"),
        ({"sliding_window": 5}, "mistral"),
        ({"sliding_window": 5, "attention_bias": True}, "pellucid"),
        ({"sliding_window": 5, "max_window_layers": 1}, "pellucid"),
        ({"attention_gate": True}, "pellucid"),
    ],
)
def test_the_model_type_is_one_that_computes_the_same(changes: dict[str, Any], model_type: str) -> None:
    assert to_hf_config(ModelConfig(**SHAPE | changes))["model_type"] == model_type


def llama(**changes: Any) -> dict[str, Any]:
    return LlamaConfig(**SHAPE).to_dict() | changes


def qwen3(**changes: Any) -> dict[str, Any]:
    return Qwen3Config(**SHAPE).to_dict() | changes


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (llama(model_type="gpt2"), "model_type 'gpt2' cannot be read"),
        (llama(model_type="lama"), "did you mean llama"),
        ({}, "model_type None"),
        (llama(hidden_act="gelu"), "hidden_act is 'gelu'; only 'silu'"),
        (llama(pretraining_tp=2), "pretraining_tp is 2"),
        (llama(attention_dropout=0.1), "attention_dropout is 0.1"),
        (llama(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (llama(quantization_config={"bits": 4}), "quantization_config is {'bits': 4}"),
        (llama(logit_softcap=30.0), "key logit_softcap (30.0) means nothing"),
        (llama(qk_norm=True), "key qk_norm"),
        (llama(sliding_window=5), "key sliding_window"),
        (llama(hidden_size=None), "lacks hidden_size"),
        (llama(hidden_size="48"), "hidden_size must be a whole number"),
        (llama(num_hidden_layers="2"), "num_hidden_layers must be a whole number"),
        (llama(num_hidden_layers=10**9), "num_hidden_layers must be a whole number up to 10,000, got 1000000000"),
        (llama(num_key_value_heads=3), "num_attention_heads 4 is not divisible by"),
        (llama(num_key_value_heads=0), "num_key_value_heads is 0; give at least 1, or leave it out"),
        (llama(head_dim=0), "head_dim is 0; give at least 1, or leave it out"),
        (llama(rope_parameters=None, rope_theta=0), "rope_theta must be positive and finite, got 0"),
        (llama(rope_parameters={"rope_type": "linear", "factor": 2.0}, rope_theta=0), "rope_theta must be positive"),
        (
            llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_theta=5e5),
            "rope_theta is 500000.0 and rope_parameters.rope_theta 10000.0; remove one of them",
        ),
        (llama(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "'longrope'"),
        (llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "lacks factor"),
        (llama(rope_parameters={"rope_type": "default", "factor": 2.0}), "factor is not known to rope_type 'default'"),
        (llama(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5"),
        (llama(rope_parameters=[1]), "rope_parameters must be a table"),
        (llama(rope_scaling={"type": "linear", "factor": 2.0}), "rope_parameters and rope_scaling are both there"),
        (llama(rope_parameters=None, rope_scaling={"type": "linear", "rope_type": "yarn"}), "type 'linear' and rope_type"),
        (llama(original_max_position_embeddings=7), "original_max_position_embeddings 7"),
        (llama(layer_types=["full_attention", "sliding_attention"]), "layer_types must all be full_attention"),
        (qwen3(layer_types=["sliding_attention", "full_attention"], **WINDOWED), "layer_types"),
        (qwen3(layer_types=["full_attention"], **WINDOWED), "layer_types"),
        (qwen3(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (
            qwen3(
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e6},
                }
            ),
            "rope_parameters differs between layer types",
        ),
        (llama(pellucid={"dropuot": 0.1}), "unknown key pellucid.dropuot; did you mean pellucid.dropout?"),
        (llama(pellucid=[1]), "pellucid must be a table"),
        (llama(pellucid={"hidden_size": 96}), "makes hidden_size 96, but the keys beside it make it 48"),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_refused_by_name(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf_config(table)
    assert message in str(error.value)


def test_a_config_that_is_nested_too_deeply_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: maximum recursion depth"):
        load_model(tmp_path)


def test_our_own_table_may_not_contradict_an_edited_rope() -> None:
    table = to_hf_config(ModelConfig(**SHAPE, rope_scaling={"rope_type": "ntk", "factor": 2.0}))
    assert table["rope_parameters"]["rope_type"] == "default" and table["rope_parameters"]["rope_theta"] > 20_000
    table["rope_parameters"]["rope_theta"] = 9.0
    with pytest.raises(ConfigError, match=r"but the keys beside it make it 9\.0"):
        from_hf_config(table)


def test_equal_ropes_of_all_layer_types_are_one_rope() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    config = from_hf_config(qwen3(rope_parameters={"full_attention": rope, "sliding_attention": dict(rope)}))
    assert (config.rope_theta, config.rope_scaling) == (77.0, {"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize("theirs", [LlamaConfig, Qwen3Config, MistralConfig])
def test_missing_keys_take_the_values_of_their_class_in_transformers(theirs: type[PreTrainedConfig]) -> None:
    shape = dict(list(SHAPE.items())[:4]) | {"hidden_size": 64, "num_attention_heads": 32}
    config, expected = from_hf_config({**shape, "model_type": theirs.model_type}), theirs(**shape)
    shared = {f.name for f in fields(ModelConfig)} & set(expected.to_dict()) - {"max_window_layers"}
    assert len(shared) >= 10
    for name in shared:
        assert getattr(config, name) == getattr(expected, name), name
    assert config.rope_theta == expected.rope_parameters["rope_theta"]


def test_a_config_of_the_previous_generation_is_read() -> None:
    """SmolLM2's file, as transformers 4.42 wrote it."""
    table = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
        "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    }  # fmt: skip
    config = from_hf_config(table)
    assert (config.rope_theta, config.num_key_value_heads, config.head_dim) == (100_000.0, 3, 64)
    assert Transformer(config, device="meta").num_parameters() == 134_515_008


JSON = st.none() | st.booleans() | st.integers(-3, 100) | st.floats(allow_nan=False) | st.text(max_size=3)
KEYS = sorted(
    {*asdict(ModelConfig()), "layer_types", "rope_parameters", "use_sliding_window", "hidden_act", "pellucid"}
)
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "truncate", "beta_fast"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([llama(), qwen3()]),
    st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(JSON, max_size=3), max_size=2),
    st.dictionaries(st.sampled_from(ROPE_KEYS), JSON | st.lists(JSON, max_size=2), max_size=3),
)
def test_junk_in_a_config_is_refused_and_nothing_else(
    table: dict[str, Any], changes: dict[str, Any], rope: dict[str, Any]
) -> None:
    table = copy.deepcopy(table)
    table["rope_parameters"] |= rope
    try:
        config = from_hf_config(table | changes)
    except ConfigError:
        return
    assert isinstance(config, ModelConfig)
