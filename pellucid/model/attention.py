"""Attention layers that know projections and positions, and nothing about caches or masks.

Shapes: ``...`` any leading dims (``[B, T]`` in training, ``[N]`` packed when serving), D model width, H query heads,
K key/value heads, d head width. Only the ``attend`` that is passed in lets one token see another; everything else
here is token-wise, which is why one forward serves both layouts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.config import ModelConfig
from pellucid.model.layers import RMSNorm, linear_together
from pellucid.model.linear import Linear
from pellucid.model.rope import rotate, rotate_


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one token leaves in the cache of one layer."""

    heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False
    """The value is ``key[..., :value_dim]``; store one tensor."""

    def elements_per_token(self) -> int:
        return self.heads * (self.key_dim if self.value_in_key else self.key_dim + self.value_dim)


class Attend(Protocol):
    """Mix tokens: q ``[..., H, d]``, k ``[..., K, d]``, v ``[..., K, e]`` -> ``[..., H, e]``; H is a multiple of K.

    ``layer`` counts from 0 and selects a cache or a mask; the keys arrive with their rotary embedding applied. Values may
    have another width than keys, and give the result theirs. One that keeps keys and values for later tokens has an
    attribute ``caches = True``.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor: ...


class Attention(nn.Module):
    """Grouped-query attention with optional QK-norm (before the rotary embedding, as in Qwen3) and output gate.

    The gate is ``sigmoid(gate_proj(x))``, one value for each element of the concatenated heads, x being the block's
    normed input (Qiu et al. 2025, arXiv:2505.06708).
    """

    joinable = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: ModelConfig, layer: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.join = config.attend == "sdpa"  # "canonical" must compute alike with gradients and without
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = Linear(width, self.heads * self.head_dim, bias=bias, device=device)
        self.k_proj = Linear(width, self.kv_heads * self.head_dim, bias=bias, device=device)
        self.v_proj = Linear(width, self.kv_heads * self.head_dim, bias=bias, device=device)
        out_bias = bias if config.attention_out_bias is None else config.attention_out_bias
        self.o_proj = Linear(self.heads * self.head_dim, width, bias=out_bias, device=device)
        self.gate_proj = (
            Linear(width, self.heads * self.head_dim, bias=bias, device=device) if config.attention_gate else None
        )
        self.joined: nn.Module | None = None
        """One layer instead of the ``joinable`` three, which are None then: packed for inference."""
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, device) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, device) if config.qk_norm else None

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec(self.kv_heads, self.head_dim, self.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x ``[..., D]``, cos and sin ``[..., 1, d]`` (leading dims broadcast) -> ``[..., D]``."""
        heads, kv_heads = self.heads, self.kv_heads
        if self.joined is not None:
            made = self.joined(x).unflatten(-1, (-1, self.head_dim))
            turning = made.narrow(-2, 0, heads + kv_heads)
            if self.q_norm is not None and self.k_norm is not None:
                turning = torch.cat([self.q_norm(turning[..., :heads, :]), self.k_norm(turning[..., heads:, :])], -2)
            rotate_(turning, cos, sin)
            q, k = turning.narrow(-2, 0, heads), turning.narrow(-2, heads, kv_heads)
            v = made.narrow(-2, heads + kv_heads, kv_heads)
        else:
            q, k, v = linear_together(x, (self.q_proj, self.k_proj, self.v_proj), join=self.join)
            q = q.unflatten(-1, (heads, self.head_dim))
            k = k.unflatten(-1, (kv_heads, self.head_dim))
            v = v.unflatten(-1, (kv_heads, self.head_dim))
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = attend(self.layer, q, k, v, scale=self.head_dim**-0.5).flatten(-2)
        if self.gate_proj is not None:
            mixed = mixed * F.sigmoid(self.gate_proj(x))
        out: Tensor = self.o_proj(mixed)
        return out
