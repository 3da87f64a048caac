"""Feed-forward layers: token-wise, ``[..., D] -> [..., D]``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.config import ModelConfig
from pellucid.model.layers import linear_together
from pellucid.model.linear import Linear


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202).

    Args:
        width: inside; None: ``config.intermediate_size``.
    """

    joinable = ("gate_proj", "up_proj")

    def __init__(
        self, config: ModelConfig, device: torch.device | str | None = None, *, width: int | None = None
    ) -> None:
        super().__init__()
        self.join = config.attend == "sdpa"  # "canonical" must compute alike with gradients and without
        inner, bias = config.intermediate_size if width is None else width, config.mlp_bias
        width = config.hidden_size
        self.gate_proj = Linear(width, inner, bias=bias, device=device)
        self.up_proj = Linear(width, inner, bias=bias, device=device)
        self.down_proj = Linear(inner, width, bias=bias, device=device)
        self.joined: nn.Module | None = None
        """One layer instead of the ``joinable`` two, which are None then: packed for inference."""

    def forward(self, x: Tensor) -> Tensor:
        if self.joined is not None:
            gate, up = self.joined(x).chunk(2, dim=-1)
            packed: Tensor = self.down_proj(_silu_alike(gate) * up)
            return packed
        # joined, the halves of the product are strided, which only pays where x is cast before each product
        join = self.join and torch.is_autocast_enabled(x.device.type)
        gate, up = linear_together(x, (self.gate_proj, self.up_proj), join=join)
        alike = not self.join or not torch.is_grad_enabled()
        out: Tensor = self.down_proj((_silu_alike(gate) if alike else F.silu(gate)) * up)
        return out


def _silu_alike(gate: Tensor) -> Tensor:
    """Of every row alike, however many there are: torch rounds the last numel % 32 elements by another routine."""
    width = gate.shape[-1]
    return F.silu(gate) if width % 32 == 0 else F.silu(F.pad(gate, (0, -width % 32)))[..., :width]
