"""Multi-head latent attention: keys and values of all heads are made of one narrow latent (DeepSeek-V2, arXiv:2405.04434).

Shapes: ``...`` any leading dims (``[B, T]`` in training, ``[N]`` packed when serving), D model width, H heads, r latent
width (``kv_lora_rank``), n, p and v widths of a head's plain part, rotary part and value.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.config import ModelConfig
from pellucid.model.attention import Attend, KVSpec
from pellucid.model.layers import RMSNorm
from pellucid.model.linear import Linear
from pellucid.model.rope import rotate

LATENT_NORM_EPS = 1e-6
"""Inside the norms of latents, whatever ``rms_norm_eps`` is; as DeepSeek's models have it."""


class LatentAttention(nn.Module):
    """MLA with parameters named as in DeepSeek-V2 and V3; the key's rotary part is shared by all heads.

    Two forms of one function. Expanded, keys and values of every head are computed from the latents. Absorbed, queries are
    brought into the latent's space instead, and all heads attend to ``[latent, rotary key]`` itself, so that a cache holds
    r + p numbers a token. Training computes expanded, where an `Attend` keeps keys (``attend.caches``) or must give the
    same bits as one that does (``attend = "canonical"``) absorbed.

    With QK-norm or a gate, or where ``kv_b_proj`` is not a plain linear layer (an adapter, packed weights), attention is
    expanded always, and so are the keys in a cache: `absorbs` and `kv_spec` say so. A norm for each head does not commute
    with absorption; it acts on the whole head ``[plain, rotary]`` before the rotary embedding.
    """

    def __init__(self, config: ModelConfig, layer: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        assert config.kv_lora_rank is not None
        self.layer = layer
        self.canonical = config.attend == "canonical"
        self.interleaved = config.rope_interleave
        self.heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scale = (self.nope + self.rope) ** -0.5 * _yarn_scale(config)
        width, bias, queries = config.hidden_size, config.attention_bias, self.heads * (self.nope + self.rope)
        out_bias = bias if config.attention_out_bias is None else config.attention_out_bias
        rank = config.q_lora_rank
        if rank is None:
            self.q_proj = Linear(width, queries, bias=False, device=device)
        else:
            self.q_a_proj = Linear(width, rank, bias=bias, device=device)
            self.q_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS, device)
            self.q_b_proj = Linear(rank, queries, bias=False, device=device)
        self.low_rank_queries = rank is not None
        self.kv_a_proj_with_mqa = Linear(width, self.rank + self.rope, bias=bias, device=device)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_NORM_EPS, device)
        self.kv_b_proj = Linear(self.rank, self.heads * (self.nope + self.value), bias=False, device=device)
        self.o_proj = Linear(self.heads * self.value, width, bias=out_bias, device=device)
        self.gate_proj = (
            Linear(width, self.heads * self.value, bias=bias, device=device) if config.attention_gate else None
        )
        self.q_norm = RMSNorm(self.nope + self.rope, config.rms_norm_eps, device) if config.qk_norm else None
        self.k_norm = RMSNorm(self.nope + self.rope, config.rms_norm_eps, device) if config.qk_norm else None

    @property
    def absorbs(self) -> bool:
        """Whether a cache holds latents."""
        return self.q_norm is None and self.gate_proj is None and type(self.kv_b_proj) is Linear

    @property
    def kv_spec(self) -> KVSpec:
        if self.absorbs:
            return KVSpec(1, self.rank + self.rope, self.rank, value_in_key=True)
        return KVSpec(self.heads, self.nope + self.rope, self.value)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x ``[..., D]``, cos and sin ``[..., 1, p]`` (leading dims broadcast) -> ``[..., D]``."""
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank_queries else self.q_proj(x)
        q = queries.unflatten(-1, (self.heads, self.nope + self.rope))
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        latent, shared = self.kv_a_layernorm(latent), shared.unsqueeze(-2)  # [..., r], [..., 1, p]
        if self.absorbs and (self.canonical or getattr(attend, "caches", False)):
            mixed = self._absorbed(q, latent, shared, cos, sin, attend)
        else:
            mixed = self._expanded(q, latent, shared, cos, sin, attend)
        mixed = mixed.flatten(-2)
        if self.gate_proj is not None:
            mixed = mixed * F.sigmoid(self.gate_proj(x))
        out: Tensor = self.o_proj(mixed)
        return out

    def _expanded(self, q: Tensor, latent: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        made = self.kv_b_proj(latent).unflatten(-1, (self.heads, self.nope + self.value))
        k_nope, v = made.split([self.nope, self.value], dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k_nope, shared = self.k_norm(self._whole(k_nope, shared)).split([self.nope, self.rope], dim=-1)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        q = self._whole(q_nope, self._turned(q_rope, cos, sin))
        k = self._whole(k_nope, self._turned(shared, cos, sin))
        return attend(self.layer, q, k, v, scale=self.scale)

    def _absorbed(self, q: Tensor, latent: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """``q . (W_k c) = (W_k^T q) . c``, and values ``W_v c`` are made after they are mixed."""
        weight = self.kv_b_proj.weight.to(q.dtype).view(self.heads, self.nope + self.value, self.rank)
        w_k, w_v = weight.split([self.nope, self.value], dim=1)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        q = torch.cat([_by_head(q_nope, w_k), self._turned(q_rope, cos, sin)], dim=-1)  # [..., H, r + p]
        k = torch.cat([latent.unsqueeze(-2), self._turned(shared, cos, sin)], dim=-1)  # [..., 1, r + p]
        mixed = attend(self.layer, q, k, k[..., : self.rank], scale=self.scale)
        return _by_head(mixed, w_v.transpose(1, 2))

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary elements in halves, wherever they stood in the weights: a score does not depend on their order."""
        return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.interleaved else x, cos, sin)

    def _whole(self, nope: Tensor, rope: Tensor) -> Tensor:
        return torch.cat([nope, rope.expand(*nope.shape[:-1], self.rope)], dim=-1)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x ``[..., H, a]`` times each head's own ``[H, a, b]`` -> ``[..., H, b]``."""
    rows = x.flatten(0, -3).transpose(0, 1)  # [H, rows, a]
    return torch.bmm(rows, weight).transpose(0, 1).view(*x.shape[:-1], weight.shape[-1])


def _yarn_scale(config: ModelConfig) -> float:
    """What scaled rotary embeddings multiply scores by; DeepSeek applies it to the whole head, not only to its rotary part."""
    scaling = config.rope_scaling or {"rope_type": "default"}
    weight = scaling.get("mscale_all_dim")
    if scaling["rope_type"] == "default" or not weight or scaling["factor"] <= 1:
        return 1.0
    magnitude: float = 0.1 * weight * math.log(scaling["factor"]) + 1.0
    return magnitude**2
