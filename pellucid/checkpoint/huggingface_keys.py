"""The keys of a Hugging Face ``config.json``, by model_type: fields of `ModelConfig`, and keys that must say one thing."""

import dataclasses
from typing import Any

from pellucid.model_config import ModelConfig

OWN = "pellucid"
"""Our model_type, and the key of the table of what transformers has no key for."""

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    OWN: "PellucidForCausalLM",
}
"""The architecture of each model_type."""

SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
"""Fields that every config.json must have, under the same name as ours."""

_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_DEEPSEEK: dict[str, Any] = _COMMON | {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "n_group": None,
    "topk_group": None,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"attention_bias": False, "mlp_bias": False},
    "mistral": _COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "qwen2": _COMMON | {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": _COMMON
    | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768, "attention_bias": False},
    "qwen3_moe": _COMMON
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "attention_bias": False,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    "deepseek_v2": _DEEPSEEK | {"mlp_bias": False, "topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK
    | {
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    OWN: {
        f.name: f.default
        for f in dataclasses.fields(ModelConfig)
        if f.name not in SHAPE and f.name not in ("rope_theta", "rope_scaling", "dropout", "attend", "embedding_range")
    },
}
"""Fields of each model_type that have our name, and what its config class in transformers 5 takes where they lack."""

WINDOW_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3_moe": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0},
}
"""Of each model_type with sliding windows, and what lacking ones mean."""

EXPERT_COUNTS = {
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "deepseek_v2": ("n_routed_experts", "num_experts"),
    "deepseek_v3": ("n_routed_experts", "num_local_experts"),
}
"""Names of the number of experts, of which the first is written."""

ROPE_KEYS = {"rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings", "layer_types"}

_DEEPSEEK_KEYS = {"qk_head_dim", "aux_loss_alpha", "seq_aux"}
MORE_KEYS: dict[str, set[str]] = {
    "qwen3_moe": {*EXPERT_COUNTS["qwen3_moe"], "mlp_only_layers"},
    "deepseek_v2": {*EXPERT_COUNTS["deepseek_v2"], *_DEEPSEEK_KEYS},
    "deepseek_v3": {*EXPERT_COUNTS["deepseek_v3"], *_DEEPSEEK_KEYS, "num_nextn_predict_layers", "num_mtp_layers"},
}
"""Keys that `huggingface_family` reads. Layers that predict further tokens are seen, and refused, among the weights:
transformers writes their number where there are none."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "chunk_size_feed_forward": (0,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "quantization_config": (None,),
    "use_mrope": (False, None),
}
_DEEPSEEK_ONLY: dict[str, tuple[Any, ...]] = {"moe_layer_freq": (1,), "mlp_bias": (False,)}
_ONLY_IN: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3_moe": {"decoder_sparse_step": (1,)},
    # transformers ignores norm_topk_prob of deepseek_v2, and DeepSeek's own code does not
    "deepseek_v2": _DEEPSEEK_ONLY
    | {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy", None),
        "norm_topk_prob": (False, None),
        "rope_interleave": (True,),
    },
    "deepseek_v3": _DEEPSEEK_ONLY | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}

HARMLESS = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "_name_or_path", "name_or_path", "_attn_implementation", "attn_implementation",
    "return_dict", "id2label", "label2id", "problem_type", "is_llama_config", "transformers.js_config", "task_specific_params",
    "unsloth_version", "unsloth_fixed", "auto_map", "ep_size", "output_router_logits",
}  # fmt: skip
"""Keys that say nothing about the logits."""


def only(kind: str) -> dict[str, tuple[Any, ...]]:
    """Keys that change the model, and the values of them that leave it the one we compute."""
    return _ONLY | _ONLY_IN.get(kind, {})


def brief(value: Any) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
