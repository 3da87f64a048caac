"""Qwen2, Qwen3-MoE and DeepSeek both ways: weights, logits, config.json, and what is refused."""

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    EXPERTS,
    GQA,
    LATENT,
    SHAPE,
    TOKENS,
    V2,
    V2_LITE,
    V3,
    exported,
    largest_difference,
    make_model,
    open_with_transformers,
    saved_by_transformers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pellucid.checkpoint.huggingface import from_hf_config, to_hf_config
from pellucid.checkpoint.model_folder import export_model, load_model, open_model, save_model
from pellucid.cli import main
from pellucid.config import ModelConfig
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model import Transformer

CLOSE = 1e-4

QWEN3_MOE = {**GQA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
THEIR_V2 = {key: value for key, value in V2.items() if key not in ("rope_interleave", "norm_topk_prob")}
THEIR_V2_LITE = {key: value for key, value in V2_LITE.items() if key != "rope_interleave"} | {"q_lora_rank": None}
THEIR_V3 = {key: value for key, value in V3.items() if key not in ("scoring_func", "topk_method")}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5, "original_max_position_embeddings": 8,
}  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8, "truncate": False},
    YARN,
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
]  # fmt: skip
WINDOWED = {"use_sliding_window": True, "sliding_window": 7}


def qwen2(**changes: Any) -> PreTrainedConfig:
    return Qwen2Config(**SHAPE | GQA | changes)


def qwen3_moe(**changes: Any) -> PreTrainedConfig:
    return Qwen3MoeConfig(**SHAPE | QWEN3_MOE | changes)


def deepseek_v2(**changes: Any) -> PreTrainedConfig:
    return DeepseekV2Config(**SHAPE | THEIR_V2 | changes)


def deepseek_v2_lite(**changes: Any) -> PreTrainedConfig:
    return DeepseekV2Config(**SHAPE | THEIR_V2_LITE | changes)


def deepseek_v3(**changes: Any) -> PreTrainedConfig:
    return DeepseekV3Config(**SHAPE | THEIR_V3 | {"num_key_value_heads": 4} | changes)


THEIRS = {
    "qwen2": qwen2(),
    "qwen2-tied-head_dim": qwen2(tie_word_embeddings=True, head_dim=20),
    "qwen2-windows": qwen2(**WINDOWED, max_window_layers=1),
    "qwen3_moe": qwen3_moe(norm_topk_prob=True, head_dim=16),
    "qwen3_moe-dense-first": qwen3_moe(mlp_only_layers=[0, 1], attention_bias=True, tie_word_embeddings=True),
    "qwen3_moe-windows": qwen3_moe(**WINDOWED),
    "deepseek_v2": deepseek_v2(),
    "deepseek_v2-biases": deepseek_v2(attention_bias=True, tie_word_embeddings=True, first_k_dense_replace=0),
    "deepseek_v2-lite": deepseek_v2_lite(),
    "deepseek_v2-lite-yarn": deepseek_v2_lite(rope_parameters=YARN | {"rope_theta": 500.0}),
    "deepseek_v3": deepseek_v3(),
    "deepseek_v3-halves": deepseek_v3(rope_interleave=False, q_lora_rank=None, norm_topk_prob=False, n_group=1, topk_group=1),
    "deepseek_v3-biases": deepseek_v3(attention_bias=True, tie_word_embeddings=True, n_shared_experts=2),
    "deepseek_v3-dense": deepseek_v3(first_k_dense_replace=3),
}  # fmt: skip


# -- weights and logits, in both directions -------------------------------------------------------------------


@pytest.mark.parametrize("name", THEIRS)
def test_a_folder_saved_by_transformers_loads_with_equal_logits_and_goes_back(name: str, tmp_path: Path) -> None:
    theirs = saved_by_transformers(copy.deepcopy(THEIRS[name]), tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs").model
    assert largest_difference(ours, theirs) < CLOSE
    save_model(tmp_path / "ours", ours)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    before = {key: value for key, value in before.items() if key in after}  # transformers may store a tied head twice
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in after)
    if name != "deepseek_v3-dense":  # which has no expert at all
        assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == theirs.config.model_type
        assert largest_difference(ours, open_with_transformers(tmp_path / "ours")) < CLOSE


LARGE = {"vocab_size": 200}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE | GQA | LARGE, tie_word_embeddings=True),
        MistralConfig(**SHAPE | GQA | LARGE),
        Qwen3Config(**SHAPE | GQA | LARGE, tie_word_embeddings=True),
        qwen2(**LARGE),
        qwen3_moe(**LARGE, tie_word_embeddings=True),
        deepseek_v2(**LARGE),
        deepseek_v2_lite(**LARGE, tie_word_embeddings=True),
        deepseek_v3(**LARGE),
    ],
    ids=lambda config: f"{config.model_type}-{'tied' if config.tie_word_embeddings else 'untied'}",
)
def test_sharded_files_load(config: PreTrainedConfig, tmp_path: Path) -> None:
    theirs = saved_by_transformers(config, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2 and not (tmp_path / "model.safetensors").exists()
    assert largest_difference(load_model(tmp_path).model, theirs) < CLOSE
    export_model(tmp_path, tmp_path / "whole")
    assert largest_difference(load_model(tmp_path / "whole").model, theirs) < CLOSE


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(rope)[10:40])
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3_moe", "deepseek_v3-halves")),
     "deepseek_v2", "deepseek_v3"],
)  # fmt: skip
def test_each_rope_type_both_ways(name: str, rope: dict[str, Any], tmp_path: Path) -> None:
    config = copy.deepcopy(THEIRS[name])
    config.rope_parameters = rope | {"rope_theta": 500.0}
    theirs = saved_by_transformers(config, tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs").model
    assert rope.items() <= (ours.config.rope_scaling or {}).items()  # transformers may write what it takes by default
    assert largest_difference(ours, theirs) < CLOSE
    save_model(tmp_path / "ours", ours)
    assert largest_difference(ours, open_with_transformers(tmp_path / "ours")) < CLOSE
    plain = Transformer(replace(ours.config, rope_scaling=None), device="meta").eval()
    plain.load_state_dict(ours.state_dict(), assign=True)
    assert not torch.allclose(plain(TOKENS).logits, ours(TOKENS).logits, atol=1e-2)  # the scaling matters


def test_the_weights_in_a_file_decide_where_pairs_stand(tmp_path: Path) -> None:
    """With rope_interleave turned round the same bytes mean another model, in transformers as here."""
    theirs = saved_by_transformers(deepseek_v3(), tmp_path)
    right = load_model(tmp_path).model
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_interleave": False}))
    wrong = load_model(tmp_path).model
    assert largest_difference(right, theirs) < CLOSE < 1e-2 < largest_difference(wrong, theirs)
    assert largest_difference(wrong, open_with_transformers(tmp_path)) < CLOSE


@pytest.mark.parametrize("changes", [V3, V2, EXPERTS | GQA | {"qk_norm": True}], ids=["v3", "v2", "qwen3_moe"])
def test_an_export_in_bfloat16_keeps_the_balancing_bias_in_float32(changes: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(ModelConfig(**SHAPE, **changes))
    save_model(tmp_path / "model", model)
    export_model(tmp_path / "model", tmp_path / "half", dtype="bfloat16")
    table = json.loads((tmp_path / "half" / "config.json").read_text())
    assert table["dtype"] == "bfloat16"
    for name, tensor in load_file(tmp_path / "half" / "model.safetensors").items():
        wanted = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == wanted, name
        assert torch.equal(tensor, model.get_parameter(name).to(wanted)), name
    export_model(tmp_path / "half", tmp_path / "again")
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16), name
    ours = load_model(tmp_path / "half", dtype="float32").model
    assert largest_difference(ours, open_with_transformers(tmp_path / "half")) < CLOSE


# -- every configuration --------------------------------------------------------------------------------------


def experts(draw: st.DrawFn) -> dict[str, Any]:
    groups, of_group = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    allowed = draw(st.integers(1, groups))
    return {
        "n_routed_experts": groups * of_group,
        "n_group": groups,
        "topk_group": allowed,
        "num_experts_per_tok": draw(st.integers(1, allowed * of_group)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
        "first_k_dense_replace": draw(st.sampled_from([0, 0, 1, 2])),
        "norm_topk_prob": draw(st.booleans()),
        "router_aux_loss_coef": draw(st.sampled_from([0.0, 0.001, 0.5])),
    }


ONE_GROUP = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}


KINDS = ["qwen2", "qwen3_moe", "deepseek_v2", "deepseek_v3", "free"]


@st.composite
def family_configs(draw: st.DrawFn, kind: str) -> ModelConfig:
    """A model as a class of transformers has it, and often one thing about it that the class has not."""
    heads = draw(st.integers(1, 4))
    table: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": heads * draw(st.sampled_from([4, 6])),
        "intermediate_size": draw(st.integers(1, 30)),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "max_position_embeddings": 32,
        "rope_theta": draw(st.sampled_from([500.0, 1e4])),
        "rope_scaling": draw(st.sampled_from([None, *ROPES, {"rope_type": "ntk", "factor": 2.0}])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "attention_bias": draw(st.booleans()),
        "attend": draw(st.sampled_from(["sdpa", "canonical"])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "initializer_range": draw(st.sampled_from([0.02, 0.3])),
    }
    if kind == "qwen2":
        table |= {"attention_bias": True, "attention_out_bias": False}
    else:
        table |= experts(draw)
    if kind in ("qwen2", "qwen3_moe"):
        table |= {"num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))}
        table |= {"head_dim": draw(st.sampled_from([4, 8])), "sliding_window": draw(st.sampled_from([None, 5]))}
    if kind == "qwen3_moe":
        table |= {"qk_norm": True, "num_experts_per_tok": 1} | ONE_GROUP
    if kind in ("deepseek_v2", "deepseek_v3"):
        widths = {
            name: draw(st.sampled_from([2, 3, 6, 8])) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        }
        table |= widths | {
            "qk_rope_head_dim": draw(st.sampled_from([4, 6])),
            "q_lora_rank": draw(st.sampled_from([None, 5])),
        }
        table |= {
            "n_shared_experts": draw(st.integers(1, 2)),
            "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        }
    if kind == "deepseek_v2":
        table |= {"rope_interleave": True, "norm_topk_prob": False}
        table |= draw(
            st.sampled_from([{"topk_method": "group_limited_greedy"}, ONE_GROUP | {"num_experts_per_tok": 1}])
        )
    if kind == "deepseek_v3":
        table |= {"rope_interleave": draw(st.booleans()), "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        table |= {"router_bias_update_speed": draw(st.sampled_from([0.0, 0.001]))}
    for name in draw(st.lists(st.sampled_from(list(ODD)), max_size=1 if kind != "free" else 3)):
        table[name] = draw(st.sampled_from(ODD[name]))
    try:
        return ModelConfig(**table)
    except ConfigError:
        return ModelConfig(**SHAPE | GQA)


ODD: dict[str, list[Any]] = {
    "qk_norm": [True, False], "attention_gate": [True], "attention_out_bias": [True, False], "mlp_bias": [True],
    "sliding_window": [4], "max_window_layers": [1, 2], "n_shared_experts": [0, 1], "first_k_dense_replace": [2],
    "scoring_func": ["sigmoid", "softmax"], "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "norm_topk_prob": [True, False], "routed_scaling_factor": [2.0], "rope_interleave": [False, True],
    "hidden_size": [10], "n_group": [1], "kv_lora_rank": [5],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_every_config_comes_back_as_itself_through_json(kind: str, data: st.DataObject) -> None:
    config = data.draw(family_configs(kind))
    table = json.loads(json.dumps(to_hf_config(config, eos_token_id=[0, 2], bos_token_id=1)))
    assert from_hf_config(table) == config
    assert table["eos_token_id"] == [0, 2] and table["bos_token_id"] == 1


def assert_transformers_agrees(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    if to_hf_config(config)["model_type"] != "pellucid":
        assert largest_difference(*exported(config, tmp_path_factory.mktemp("model"))) < CLOSE


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, derandomize=True)  # two experts may score alike to the last bit, and any may be chosen
@given(data=st.data())
def test_where_transformers_has_the_class_it_computes_the_same(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    assert_transformers_agrees(data.draw(family_configs(kind)), tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(data=st.data())
def test_where_transformers_has_the_class_it_computes_the_same_at_length(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    assert_transformers_agrees(data.draw(family_configs(kind)), tmp_path_factory)


V3_LIKE, V2_LIKE = SHAPE | V3, SHAPE | V2
MOE = SHAPE | GQA | EXPERTS | {"qk_norm": True}


@pytest.mark.parametrize(
    ("table", "model_type"),
    [
        (V3_LIKE, "deepseek_v3"),
        (V3_LIKE | {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True}, "deepseek_v3"),
        (V3_LIKE | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}, "deepseek_v3"),
        (V3_LIKE | {"router_bias_update_speed": 0.001, "router_aux_loss_coef": 0.1}, "deepseek_v3"),
        (V3_LIKE | {"sliding_window": 4, "max_window_layers": 3}, "deepseek_v3"),  # no layer has a window
        (V3_LIKE | {"sliding_window": 4}, "pellucid"),
        (V3_LIKE | {"qk_norm": True}, "pellucid"),
        (V3_LIKE | {"attention_gate": True}, "pellucid"),
        (V3_LIKE | {"attention_out_bias": True}, "pellucid"),
        (V3_LIKE | {"n_shared_experts": 0}, "pellucid"),
        (V3_LIKE | {"n_group": 8, "topk_group": 8}, "pellucid"),  # transformers takes two of each group
        (V3_LIKE | {"topk_method": "group_limited_greedy"}, "pellucid"),
        (V3_LIKE | {"scoring_func": "softmax"}, "pellucid"),
        (V3_LIKE | {"first_k_dense_replace": 3}, "pellucid"),
        (V3_LIKE | {"num_attention_heads": 5}, "deepseek_v3"),
        (V2_LIKE, "deepseek_v2"),
        (SHAPE | V2_LITE, "deepseek_v2"),
        (V2_LIKE | {"num_attention_heads": 5}, "pellucid"),  # DeepseekV2Config wants it to divide hidden_size
        (V2_LIKE | {"norm_topk_prob": True}, "pellucid"),
        (V2_LIKE | {"rope_interleave": False}, "pellucid"),
        (V2_LIKE | {"kv_lora_rank": 15}, "pellucid"),
        (V2_LIKE | {"scoring_func": "sigmoid"}, "pellucid"),
        (SHAPE | LATENT, "pellucid"),
        (MOE, "qwen3_moe"),
        (MOE | {"norm_topk_prob": True, "first_k_dense_replace": 2, "attention_bias": True}, "qwen3_moe"),
        (MOE | {"sliding_window": 4}, "qwen3_moe"),
        (MOE | {"sliding_window": 4, "max_window_layers": 1}, "pellucid"),
        (MOE | {"qk_norm": False}, "pellucid"),
        (MOE | {"n_shared_experts": 1}, "pellucid"),
        (MOE | {"routed_scaling_factor": 2.0}, "pellucid"),
        (MOE | {"scoring_func": "sigmoid"}, "pellucid"),
        (MOE | {"topk_method": "noaux_tc"}, "pellucid"),
        (MOE | {"attention_bias": True, "attention_out_bias": False}, "pellucid"),
        (MOE | {"attention_gate": True}, "pellucid"),
        (SHAPE | GQA | {"attention_bias": True, "attention_out_bias": False}, "qwen2"),
        (SHAPE | GQA | {"attention_bias": True, "attention_out_bias": False, "sliding_window": 4}, "qwen2"),
        (SHAPE | GQA | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True}, "pellucid"),
        (SHAPE | GQA | {"attention_bias": True, "attention_out_bias": False, "qk_norm": True}, "pellucid"),
        (SHAPE | GQA | {"attention_out_bias": True}, "pellucid"),
    ],
)  # fmt: skip
def test_the_model_type_is_one_that_computes_the_same(table: dict[str, Any], model_type: str) -> None:
    assert to_hf_config(ModelConfig(**table))["model_type"] == model_type


@pytest.mark.parametrize("theirs", [Qwen2Config, Qwen3MoeConfig, DeepseekV2Config, DeepseekV3Config])
def test_missing_keys_take_the_values_of_their_class_in_transformers(theirs: type[PreTrainedConfig]) -> None:
    shape = dict(list(SHAPE.items())[:4]) | {"hidden_size": 256, "num_attention_heads": 128}
    if theirs is DeepseekV2Config:
        shape |= {"num_experts_per_tok": 2, "q_lora_rank": 20}
    config, expected = from_hf_config({**shape, "model_type": theirs.model_type}), theirs(**shape)
    same = {f.name for f in fields(ModelConfig)} & set(expected.to_dict()) - {"max_window_layers"}
    assert len(same) >= 10
    for name in same:
        value = getattr(expected, name)
        assert getattr(config, name) == (1 if name in ("n_group", "topk_group") and value is None else value), name
    if theirs is not Qwen2Config:
        assert config.n_routed_experts == getattr(expected, "num_experts", None) or expected.num_local_experts


# -- files of the hub -----------------------------------------------------------------------------------------

HUB: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
        "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
        "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
}  # fmt: skip
PARAMETERS = {"Qwen2.5-0.5B": 494_032_768, "Qwen3-30B-A3B": 30_532_122_624, "DeepSeek-V2-Lite": 15_706_484_224}
"""As the model cards' files have them."""


@pytest.mark.parametrize("name", HUB)
def test_the_configs_of_the_hub_are_read(name: str) -> None:
    table = HUB[name]
    config = from_hf_config(table)
    assert from_hf_config(json.loads(json.dumps(to_hf_config(config)))) == config
    assert to_hf_config(config)["model_type"] == table["model_type"]
    if name in PARAMETERS:  # the others take seconds to build
        small = replace(config, num_hidden_layers=config.first_k_dense_replace + 1)
        dense = Transformer(small, device="meta")
        a_layer = sum(p.numel() for p in dense.model.layers[-1].parameters())
        assert (
            dense.num_parameters() + a_layer * (config.num_hidden_layers - small.num_hidden_layers) == PARAMETERS[name]
        )


def test_the_routing_of_the_hub_is_read() -> None:
    lite, v3 = from_hf_config(HUB["DeepSeek-V2-Lite"]), from_hf_config(HUB["DeepSeek-V3"])
    assert (lite.scoring_func, lite.topk_method, lite.router_aux_loss_coef) == ("softmax", "greedy", 0.001)
    assert (v3.scoring_func, v3.topk_method, v3.n_group, v3.topk_group) == ("sigmoid", "noaux_tc", 8, 4)
    assert lite.rope_interleave and v3.rope_interleave and lite.rope_scaling["mscale_all_dim"] == 0.707
    moe = from_hf_config(HUB["Qwen3-30B-A3B"])
    assert (moe.n_routed_experts, moe.router_aux_loss_coef, moe.sliding_window) == (128, 0.001, None)
    assert not from_hf_config(HUB["Qwen2.5-0.5B"]).attention_out_bias


# -- refused --------------------------------------------------------------------------------------------------


def without(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def as_table(config: PreTrainedConfig, **changes: Any) -> dict[str, Any]:
    return config.to_dict() | {"model_type": config.model_type} | changes


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (HUB["DeepSeek-V3"] | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
        (HUB["DeepSeek-V3"] | {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        (HUB["DeepSeek-V3"] | {"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc'"),
        (HUB["DeepSeek-V3"] | {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1"),
        (HUB["DeepSeek-V3"] | {"num_local_experts": 8}, "n_routed_experts 256 and num_local_experts 8 differ"),
        (HUB["DeepSeek-V3"] | {"n_routed_experts": "8"}, "n_routed_experts must be a whole number"),
        (HUB["DeepSeek-V3"] | {"n_group": 7}, "n_routed_experts 256 is not divisible by model.n_group 7"),
        (HUB["DeepSeek-V3"] | {"topk_group": 9}, "topk_group must be between 1 and model.n_group (8), got 9"),
        (HUB["DeepSeek-V3"] | {"num_experts_per_tok": 257}, "num_experts_per_tok must be between 1 and"),
        (HUB["DeepSeek-V3"] | {"head_dim": 128}, "head_dim is 128; with latent attention it is model.qk_rope_head_dim (64)"),
        (HUB["DeepSeek-V3"] | {"qk_head_dim": 64}, "qk_head_dim is 64, and qk_nope_head_dim + qk_rope_head_dim 128 + 64"),
        (HUB["DeepSeek-V3"] | {"qk_rope_head_dim": 63}, "head_dim must be even"),
        (HUB["DeepSeek-V3"] | {"num_key_value_heads": 8}, "num_key_value_heads is 8; latent attention"),
        (HUB["DeepSeek-V3"] | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (HUB["DeepSeek-V3"] | {"mlp_bias": True}, "mlp_bias is True"),
        (HUB["DeepSeek-V3"] | {"sliding_window": 4096}, "key sliding_window (4096) means nothing to model_type 'deepseek_v3'"),
        (HUB["DeepSeek-V3"] | {"seq_aux": False}, "seq_aux is False"),
        (HUB["DeepSeek-V3"] | {"aux_loss_alpha": "a"}, "aux_loss_alpha must be a number"),
        (HUB["DeepSeek-V3"] | {"index_topk": 2048}, "key index_topk (2048) means nothing"),
        (HUB["DeepSeek-V3"] | {"rope_scaling": {"type": "su", "factor": 4.0}}, "rope_type is 'su'"),
        (HUB["DeepSeek-V2-Lite"] | {"norm_topk_prob": True}, "norm_topk_prob is True; only False"),
        (HUB["DeepSeek-V2-Lite"] | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'softmax'"),
        (HUB["DeepSeek-V2-Lite"] | {"topk_method": "noaux_tc"}, "only 'greedy' or 'group_limited_greedy'"),
        (HUB["DeepSeek-V2-Lite"] | {"topk_method": "group_limited_greedy", "n_group": None}, "lacks n_group"),
        (HUB["DeepSeek-V2-Lite"] | {"rope_interleave": False}, "rope_interleave is False"),
        (HUB["DeepSeek-V2-Lite"] | {"kv_lora_rank": None}, "qk_nope_head_dim is 128 and belongs to latent attention"),
        (without(HUB["DeepSeek-V2-Lite"], "num_experts_per_tok"), "num_experts_per_tok"),
        (HUB["Qwen3-30B-A3B"] | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1"),
        (HUB["Qwen3-30B-A3B"] | {"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        (HUB["Qwen3-30B-A3B"] | {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        (HUB["Qwen3-30B-A3B"] | {"mlp_only_layers": list(range(49))}, "first_k_dense_replace 49 is more than"),
        (HUB["Qwen3-30B-A3B"] | {"num_experts": 0}, "num_experts must be a whole number of at least 1, got 0"),
        (HUB["Qwen3-30B-A3B"] | {"num_local_experts": 64}, "num_experts 128 and num_local_experts 64 differ"),
        (HUB["Qwen3-30B-A3B"] | {"n_shared_experts": 1}, "key n_shared_experts (1) means nothing"),
        (HUB["Qwen3-30B-A3B"] | {"use_sliding_window": True, "sliding_window": 9}, "max_window_layers is 48; with use_sl"),
        (HUB["Qwen2.5-0.5B"] | {"attention_bias": False}, "key attention_bias (False) means nothing to model_type 'qwen2'"),
        (HUB["Qwen2.5-0.5B"] | {"use_mrope": True}, "use_mrope is True"),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_refused_by_name(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf_config(table)
    assert message in str(error.value)


def test_groups_mean_nothing_to_a_greedy_choice() -> None:
    """As in transformers, which does not look at them then."""
    config = from_hf_config(as_table(deepseek_v2(topk_method="greedy")))
    assert (config.topk_method, config.n_group, config.topk_group) == ("greedy", 1, 1)


JUNK = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "greedy", [0], {}])
)
KEYS = sorted({key for table in HUB.values() for key in table} | {"num_local_experts", "qk_head_dim", "layer_types"})


@settings(max_examples=150)
@given(
    st.sampled_from(list(HUB.values())),
    st.dictionaries(st.sampled_from(KEYS), JUNK | st.lists(JUNK, max_size=2), max_size=3),
)
def test_junk_in_a_config_is_refused_and_nothing_else(table: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        config = from_hf_config(table | changes)
    except ConfigError:
        return
    assert from_hf_config(json.loads(json.dumps(to_hf_config(config)))) == config


def spoiled(folder: Path, config: PreTrainedConfig, change: Any, **options: Any) -> Path:
    saved_by_transformers(config, folder, **options)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), f"missing {EXPERT}"),
        (lambda t: t.update({EXPERT.replace(".7.", ".8."): t[EXPERT].clone()}), "unexpected model.layers.1.mlp.experts.8.up_proj"),
        (lambda t: t.update({EXPERT: t[EXPERT].t().contiguous()}), f"{EXPERT} has shape (48, 20)"),
        (lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"), "missing model.layers.1.mlp.gate.e_score"),
        (lambda t: t.pop("model.layers.1.self_attn.kv_a_layernorm.weight"), "missing model.layers.1.self_attn.kv_a_layernorm"),
        (lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(2)}), "model.layers.3.eh_proj.weight belongs to"),
    ],
    ids=["missing", "extra", "misshaped", "no-bias", "no-norm", "multi-token-prediction"],
)  # fmt: skip
@pytest.mark.parametrize("opened", [load_model, open_model])
def test_weights_that_do_not_fit_are_named(change: Any, message: str, opened: Any, tmp_path: Path) -> None:
    folder = spoiled(tmp_path, deepseek_v3(), change)
    with pytest.raises(CheckpointError) as error:
        opened(folder)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_in_one_tensor_are_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    theirs = saved_by_transformers(copy.deepcopy(THEIRS[name]), tmp_path / "fused", save_original_format=False)
    with pytest.raises(CheckpointError, match=r"from_config\(m.config\)") as error:
        load_model(tmp_path / "fused")
    assert ".mlp.experts." in str(error.value)
    opened = open_with_transformers(tmp_path / "fused")
    anew = AutoModelForCausalLM.from_config(opened.config)
    anew.load_state_dict(opened.state_dict())
    anew.save_pretrained(tmp_path / "apart")
    assert largest_difference(load_model(tmp_path / "apart").model, theirs) < CLOSE


def test_layers_for_further_tokens_are_left_out_by_transformers(tmp_path: Path) -> None:
    """The way out that their refusal names."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        further = {key.replace("layers.2.", "layers.3."): tensor.clone() for key, tensor in tensors.items()}
        tensors.update(further | {"model.layers.3.eh_proj.weight": torch.ones(48, 96)})

    spoiled(tmp_path / "given", deepseek_v3(), add)
    with pytest.raises(CheckpointError, match="multi-token prediction"):
        load_model(tmp_path / "given")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "given", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    theirs.save_pretrained(tmp_path / "anew")
    assert largest_difference(load_model(tmp_path / "anew").model, theirs) < CLOSE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_routed_experts": 4, "n_group": 2}, "unexpected model.layers.1.mlp.experts.4"),
        ({"n_routed_experts": 12}, "missing model.layers.1.mlp.experts.8"),
        ({"kv_lora_rank": 20}, "kv_a_proj_with_mqa.weight has shape (20, 48)"),
        ({"first_k_dense_replace": 2}, "missing model.layers.1.mlp.gate_proj.weight"),
        ({"q_lora_rank": None}, "missing model.layers.0.self_attn.q_proj.weight"),
        ({"attention_bias": True}, "missing model.layers.0.self_attn.q_a_proj.bias"),
        ({"n_shared_experts": 0}, "unexpected model.layers.1.mlp.shared_experts"),
        ({"num_hidden_layers": 2}, "unexpected model.layers.2."),
    ],
)
def test_a_config_that_contradicts_its_weights_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved_by_transformers(deepseek_v3(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path)
    assert message in str(error.value)


def test_the_model_card_tells_latents_and_experts(tmp_path: Path) -> None:
    save_model(tmp_path / "v3", make_model(ModelConfig(**SHAPE, **V3)))
    save_model(tmp_path / "moe", make_model(ModelConfig(**MOE)))
    card = (tmp_path / "v3" / "README.md").read_text()
    assert "| heads (latent attention) | 4, of a latent of 16 + 4 |" in card
    assert "| experts a token | 3 of 8, 1 shared, in 2 layers |" in card and "key-value" not in card
    assert "| heads (query / key-value) | 4 / 2 |" in (tmp_path / "moe" / "README.md").read_text()


def test_inspect_says_what_is_there_and_nothing_of_experts_that_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for name, config in {"v3": V3, "qwen2": GQA | {"attention_bias": True, "attention_out_bias": False}}.items():
        save_model(tmp_path / name, make_model(ModelConfig(**SHAPE | config)))
        assert main(["inspect", str(tmp_path / name), "--json"]) == 0
        shown[name] = json.loads(capsys.readouterr().out)["config"]
    assert V3.items() <= shown["v3"].items()
    assert shown["qwen2"]["attention_bias"] is True and shown["qwen2"]["attention_out_bias"] is False
    assert not {
        key for key in shown["qwen2"] if "expert" in key or "topk" in key or "group" in key or key == "scoring_func"
    }
