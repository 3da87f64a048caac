"""The token-wise pieces that blocks share."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pellucid.model.linear import Linear, linear


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, in x's dtype, computed in float32 at least."""

    def __init__(self, width: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                return _normed(x, self.weight, self.eps)[0]
            normed: Tensor = _EagerRMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return normed
        if x.dtype != self.weight.dtype:  # a head's norm under autocast: torch would warn, and round the weight
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _EagerRMSNorm(torch.autograd.Function):
    """`RMSNorm` in fewer passes over memory than autograd's own, which has no fused kernel on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, grad = x * inverse, grad.to(inverse.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        scaled = grad * weight
        along = (scaled * normed).mean(-1, keepdim=True)  # a longer x changes nothing
        return ((scaled - normed * along) * inverse).to(x.dtype), grad_weight.to(weight.dtype), None


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`RMSNorm`, and what it multiplies each row with before the weight."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    # norm^2 / width + eps in few calls: they are what one row costs
    inverse = torch.rsub(norm.mul_(norm), eps, alpha=-1 / x.shape[-1]).rsqrt_()
    normed = wide.mul_(inverse) if wide is not x else wide * inverse  # a copy of our own
    return normed.mul_(weight).to(x.dtype), inverse


def linear_together(x: Tensor, linears: tuple[nn.Module, ...], *, join: bool) -> tuple[Tensor, ...]:
    """Each linear of the same ``x``; with ``join``, and while gradients are recorded, as one matrix product.

    One product casts x once under autocast and adds up its gradient inside the product instead of in passes of their
    own. Without gradients joining the weights would cost more than it saves (decoding is bound by reading them).
    Linears of another class, or of which only some have biases, are called one by one.
    """
    plain = [layer for layer in linears if type(layer) is Linear]
    biases: list[Tensor] = [layer.bias for layer in plain if layer.bias is not None]
    if not join or not torch.is_grad_enabled() or len(plain) < len(linears) or len(biases) not in (0, len(plain)):
        return tuple(layer(x) for layer in linears)
    weights: list[Tensor] = [layer.weight for layer in plain]
    joined = linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return tuple(joined.split([layer.out_features for layer in plain], dim=-1))
