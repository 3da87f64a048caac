"""Mixtures of experts and latent attention in a Hugging Face ``config.json``: Qwen3-MoE, DeepSeek-V2, DeepSeek-V3.

Weights have the same names and bytes on both sides. Rotary rows are never permuted: ``rope_interleave`` says how they
stand. The balancing loss of a sequence is ``aux_loss_alpha`` in DeepSeek's files, which transformers carries along.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pellucid.checkpoint.huggingface_keys import EXPERT_COUNTS, FIELDS, OWN, brief
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model_config import ModelConfig


def family_type(config: ModelConfig, windowed: bool) -> str:
    """The class in transformers that computes a model with experts or latent attention, or our own name.

    Args:
        windowed: some layer has a sliding window.
    """
    if not config.expert_layers or config.attention_gate or config.attention_out_bias is not None:
        return OWN
    if config.is_latent:
        return OWN if config.qk_norm or windowed or not config.n_shared_experts else _deepseek_type(config)
    same = (
        config.qk_norm
        and not config.n_shared_experts
        and (config.scoring_func, config.topk_method) == ("softmax", "greedy")
        and config.routed_scaling_factor == 1
        and not (windowed and config.max_window_layers)
    )
    return "qwen3_moe" if same else OWN


def _deepseek_type(config: ModelConfig) -> str:
    if config.scoring_func == "softmax":
        same = (
            config.topk_method in ("greedy", "group_limited_greedy")
            and not config.norm_topk_prob
            and config.rope_interleave
            and config.hidden_size % config.num_attention_heads == 0  # DeepseekV2Config insists, without need
            and not config.qk_nope_head_dim % 2  # transformers views rotary pairs as complex numbers, where they stand
            and not (config.kv_lora_rank or 0) % 2
        )
        return "deepseek_v2" if same else OWN
    of_group = config.n_routed_experts // config.n_group  # transformers adds up two of them, in one group too
    return "deepseek_v3" if config.topk_method == "noaux_tc" and of_group >= 2 else OWN


def write_family(kind: str, config: ModelConfig) -> dict[str, Any]:
    """Keys of ``kind`` that are not fields under our name."""
    if kind == "qwen3_moe":
        return {
            "num_experts": config.n_routed_experts,
            "mlp_only_layers": list(range(config.first_k_dense_replace)),
            "decoder_sparse_step": 1,
        }
    if kind in ("deepseek_v2", "deepseek_v3"):
        table = {
            "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "moe_layer_freq": 1,
            "scoring_func": config.scoring_func,
            "topk_method": config.topk_method,
            "aux_loss_alpha": config.router_aux_loss_coef,
            "seq_aux": True,
        }
        return table | ({"num_nextn_predict_layers": 0} if kind == "deepseek_v3" else {})
    return {}


def read_family(kind: str, table: dict[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` that ``kind`` has under other names, or only implies.

    Raises:
        ConfigError: what they say cannot be represented; names the key.
    """
    if kind not in EXPERT_COUNTS:
        return {}
    values: dict[str, Any] = {"n_routed_experts": _number_of_experts(kind, table)}
    if kind == "qwen3_moe":
        return values | {"qk_norm": True, "first_k_dense_replace": _dense_layers(table)}
    for name, absent in (("n_group", 1), ("topk_group", 1), ("n_shared_experts", 0), ("norm_topk_prob", False)):
        value = table.get(name, FIELDS[kind][name])
        values[name] = absent if value is None else value
    _check_widths(table)
    values["router_aux_loss_coef"] = _balancing(table)
    if kind == "deepseek_v3":
        return values | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    method = table.get("topk_method") or "greedy"
    if method == "greedy":  # looks at no groups, whatever the file says of them
        values |= {"n_group": 1, "topk_group": 1}
    elif missing := [name for name in ("n_group", "topk_group") if table.get(name) is None]:
        raise ConfigError(f"config.json lacks {', '.join(missing)}, which topk_method {method!r} needs")
    return values | {"topk_method": method, "rope_interleave": True}


def _number_of_experts(kind: str, table: dict[str, Any]) -> Any:
    names = [name for name in EXPERT_COUNTS[kind] if name in table]
    if len({brief(table[name]) for name in names}) > 1:
        said = " and ".join(f"{name} {brief(table[name])}" for name in names)
        raise ConfigError(f"config.json: {said} differ; remove one of them")
    count = table[names[0]] if names else FIELDS[kind].get("n_routed_experts", 128)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"config.json: {names[0]} must be a whole number of at least 1, got {brief(count)}")
    return count


def _dense_layers(table: dict[str, Any]) -> int:
    listed = table.get("mlp_only_layers") or []
    if listed != list(range(len(listed) if isinstance(listed, list) else 0)):
        raise ConfigError(
            f"config.json: mlp_only_layers is {brief(listed)}; only the first layers in order can be dense, as [0, 1]"
        )
    return len(listed)


def _check_widths(table: dict[str, Any]) -> None:
    whole = table.get("qk_head_dim")
    parts = [table.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if whole is not None and all(isinstance(part, int) for part in parts) and whole != sum(parts):  # type: ignore[arg-type]
        raise ConfigError(
            f"config.json: qk_head_dim is {brief(whole)}, and qk_nope_head_dim + qk_rope_head_dim {parts[0]} + {parts[1]}; "
            "remove it"
        )


def _balancing(table: dict[str, Any]) -> float:
    weight = table.get("aux_loss_alpha")
    if weight is None:
        return 0.0
    if not isinstance(weight, (int, float)) or isinstance(weight, bool):
        raise ConfigError(f"config.json: aux_loss_alpha must be a number, got {brief(weight)}")
    if weight and table.get("seq_aux", True) is not True:
        raise ConfigError(
            f"config.json: seq_aux is {brief(table['seq_aux'])}; the balancing loss is one of each sequence, set aux_loss_alpha "
            "to 0 to go without"
        )
    return float(weight)


def check_layout(names: Iterable[str], source: Path) -> None:
    """Whether a folder's weights stand as we read them: an expert's on their own, and no further models beside the decoder.

    Raises:
        CheckpointError: with the way out.
    """
    for name in names:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            raise CheckpointError(
                f"{source}: {name} holds all experts in one tensor; with transformers, open the folder as m, make new = "
                "AutoModelForCausalLM.from_config(m.config), new.load_state_dict(m.state_dict()) and new.save_pretrained(out)"
            )
        if name.endswith(".eh_proj.weight"):
            raise CheckpointError(
                f"{source}: {name} belongs to a layer that predicts a further token (multi-token prediction), which Pellucid "
                "does not have; open the folder with transformers and save it anew, which leaves such layers out"
            )
