"""Small models of the architectures that transformers has too, and of those that only we have."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pellucid.checkpoint.model_folder import save_model
from pellucid.config import ModelConfig
from pellucid.model import Transformer

SHAPE: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
GQA: dict[str, Any] = {"num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
V2_LITE: dict[str, Any] = {
    **LATENT,
    **EXPERTS,
    "n_shared_experts": 2,
    "rope_interleave": True,
    "first_k_dense_replace": 1,
}
V2: dict[str, Any] = {
    **V2_LITE, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
V3: dict[str, Any] = {
    **V2, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_shared_experts": 1,
}  # fmt: skip

TOKENS = torch.randint(0, 60, (2, 45), generator=torch.Generator().manual_seed(1))
"""Longer than the window of 32."""

STD = 0.1
"""Of random matrices: attention that differs between tokens, and no exponential that magnifies a rounding."""


def make_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Large random weights everywhere, norms and biases too: nothing may hide behind a one or a zero."""
    model = Transformer(config, generator=torch.Generator().manual_seed(seed)).eval()
    randomize(model, seed + 2)
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            p.copy_(torch.rand(p.shape, generator=g) + 0.5)
        elif "inv_freq" not in name:
            p.copy_(torch.randn(p.shape, generator=g) * (0.3 if p.dim() == 1 else STD))


def open_with_transformers(folder: Path, dtype: Any = torch.float32) -> PreTrainedModel:
    """Every weight must have come from the folder, and have gone somewhere."""
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )  # another implementation of experts wants rows of 16 bytes
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return theirs.eval()


def exported(config: ModelConfig, folder: Path) -> tuple[Transformer, PreTrainedModel]:
    """A random model of ours, and what transformers makes of its folder."""
    model = make_model(config)
    save_model(folder, model)
    return model, open_with_transformers(folder)


def saved_by_transformers(config: PreTrainedConfig, folder: Path, **options: Any) -> PreTrainedModel:
    """A random model of transformers', saved by it."""
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(theirs, 0)
    theirs.save_pretrained(folder, **options)
    return theirs


@torch.no_grad()
def largest_difference(ours: Transformer, theirs: PreTrainedModel, tokens: torch.Tensor = TOKENS) -> float:
    """Between the logits of both, relative to their standard deviation, within the window and beyond."""
    worst = 0.0
    for some in (tokens[:, :20], tokens):
        mine, foreign = ours(some).logits, theirs(some).logits
        assert mine.std() > 0.1
        worst = max(worst, float((mine - foreign).abs().max() / foreign.std()))
    return worst
