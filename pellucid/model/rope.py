"""Rotary position embedding, half-split, and the ways to stretch its window.

Su et al. 2021, arXiv:2104.09864. Element i of the first half of a head turns with element i of the second half, by
the angle ``position * frequency[i]``; every frequency formula equals that of transformers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pellucid.config import ModelConfig


class Rotary(nn.Module):
    """Cosines and sines of the angles at given positions, always in float32.

    Angles come from the positions themselves, not from a table, so that no position is too large. ``inv_freq`` is
    recomputed whenever the module is moved or cast: it never loses precision in ``model.to(torch.bfloat16)`` and is
    right after ``to_empty``. It is not part of a state dict.
    """

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        scaling = config.rope_scaling or {}
        self.dynamic = scaling.get("rope_type") == "dynamic"
        self.attention_factor = _yarn_attention_factor(scaling) if scaling.get("rope_type") == "yarn" else 1.0
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Rotary":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = inverse_frequencies(self.config).to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, rope_length: int | Tensor) -> tuple[Tensor, Tensor]:
        """Positions ``[...]`` -> cos, sin ``[..., 1, d]`` for `rotate`, float32, scaled by YaRN's attention factor.

        Both halves of a head have the same angles; ``sin`` is negative in the first.

        Args:
            positions: of each token in its sequence, ``[T]``, ``[B, T]`` or packed ``[N]``.
            rope_length: the most tokens that the sequence will ever hold, fixed from its first token on: one number,
                ``[B]``, or one per packed token ``[N]``. Only "dynamic" scaling looks at it.
        """
        inv_freq = self.inv_freq
        if self.dynamic:
            inv_freq = self._dynamic(rope_length)
            if inv_freq.dim() == 2 and positions.dim() == 2:
                inv_freq = inv_freq[:, None]
        angles = (positions[..., None].float() * inv_freq).unsqueeze(-2)
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def _dynamic(self, rope_length: int | Tensor) -> Tensor:
        """Frequencies for sequences of that length: ``[d / 2]``, or ``[n, d / 2]`` for n lengths."""
        window, head_dim = self.config.max_position_embeddings, self.config.head_dim
        factor = (self.config.rope_scaling or {})["factor"]
        length = torch.as_tensor(rope_length, device=self.inv_freq.device).clamp(min=window)
        stretch = (factor * length / window - (factor - 1)).float() ** (head_dim / (head_dim - 2))
        theta = (self.config.rope_theta * stretch).float()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=theta.device) / head_dim
        return torch.reciprocal(theta[..., None] ** exponents)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x ``[..., heads, d]`` by what `Rotary` gives, computed in float32 at least, in x's dtype."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _turn(x, cos, sin).to(x.dtype)
    turned: Tensor = _EagerTurn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` in place, without gradients."""
    return x.copy_(_turn(x, cos, sin))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin)


class _EagerTurn(torch.autograd.Function):
    """The gradient of a turn is a turn back: one pass where autograd would take five."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin).to(grad.dtype), None, None


def ntk_theta(theta: float, factor: float, head_dim: int) -> float:
    """The base that static NTK scaling amounts to."""
    return theta * math.pow(factor, head_dim / (head_dim - 2))


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position, ``[head_dim / 2]`` float32 on the CPU; for "dynamic" those within the window."""
    scaling: dict[str, Any] = config.rope_scaling or {"rope_type": "default"}
    kind, dim, theta = scaling["rope_type"], config.head_dim, config.rope_theta
    if kind == "ntk":
        theta = ntk_theta(theta, scaling["factor"], dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    plain: Tensor = torch.reciprocal(theta**exponents)
    if kind == "linear":
        return plain / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(plain, scaling)
    if kind == "yarn":
        return _yarn(plain, scaling, config)
    assert kind in ("default", "ntk", "dynamic"), kind
    return plain


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Slow rotations are divided by the factor, fast ones kept, those between blended (Llama 3.1's release)."""
    low, high, factor = (float(scaling[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = plain * float(scaling["original_max_position_embeddings"]) / (2 * math.pi)  # in the original window
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (1 - keep) / factor + plain * keep


def _yarn(plain: Tensor, scaling: dict[str, Any], config: ModelConfig) -> Tensor:
    """Peng et al. 2023, arXiv:2309.00071, section 3.2."""
    original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings

    def dim_with_turns(turns: float) -> float:
        """The pair of elements, as a fraction, that turns so often in the original window."""
        return config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low: float = dim_with_turns(scaling.get("beta_fast") or 32)
    high: float = dim_with_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    span = high - low or 0.001
    ramp = ((torch.arange(config.head_dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    return plain / float(scaling["factor"]) * ramp + plain * (1 - ramp)


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    """What both cos and sin are multiplied by, so that scores grow with its square."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)
