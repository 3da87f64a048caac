"""A little model with a mixture of experts, for tests of several rooms."""

from typing import Any

EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "router_aux_loss_coef": 0.1,
    "router_bias_update_speed": 0.01,
}  # fmt: skip
"""Both layers of `support.TINY` route, with a balancing loss and a bias that balances."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 2, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
"""Latent attention for it."""


def changes(table: dict[str, Any]) -> dict[str, Any]:
    """As `support.tiny_config` takes them."""
    return {f"model__{key}": value for key, value in table.items()}
