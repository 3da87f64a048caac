"""The token-wise pieces that blocks share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, in x's dtype, computed in float32 at least."""

    def __init__(self, width: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # a head's norm under autocast: torch would warn, and round the weight
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def linear_together(x: Tensor, linears: tuple[nn.Module, ...], *, join: bool) -> tuple[Tensor, ...]:
    """Each linear of the same ``x``; with ``join``, and while gradients are recorded, as one matrix product.

    One product casts x once under autocast and adds up its gradient inside the product instead of in passes of their
    own. Without gradients joining the weights would cost more than it saves (decoding is bound by reading them).
    Linears of another class, or of which only some have biases, are called one by one.
    """
    plain = [linear for linear in linears if type(linear) is nn.Linear]
    biases: list[Tensor] = [linear.bias for linear in plain if linear.bias is not None]
    if not join or not torch.is_grad_enabled() or len(plain) < len(linears) or len(biases) not in (0, len(plain)):
        return tuple(linear(x) for linear in linears)
    weights: list[Tensor] = [linear.weight for linear in plain]
    joined = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    return tuple(joined.split([linear.out_features for linear in plain], dim=-1))
