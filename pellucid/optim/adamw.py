"""AdamW, torch's own, with decay on matrices only."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from pellucid.errors import ConfigError
from pellucid.optim.groups import parameter_groups, require_wide
from pellucid.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWOptions:
    """Decoupled weight decay Adam; Loshchilov & Hutter 2019, arXiv:1711.05101."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decay a step, times the learning rate, of matrices; norms, biases and embeddings are not decayed."""

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas must be in [0, 1), got {list(self.betas)}")
        if not self.eps > 0:
            raise ConfigError(f"optim.eps must be positive, got {self.eps}")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optim.weight_decay must be a number from 0 on, got {self.weight_decay}")


@register("optimizer", "adamw", config=AdamWOptions)
def build_adamw(model: nn.Module, lr: float, options: AdamWOptions) -> torch.optim.Optimizer:
    """Fused AdamW over ``model``'s trainable parameters, which must be float32.

    Raises:
        ConfigError: a parameter is of a narrower type. In bfloat16 an update of 6e-4 to a weight of 1.0 rounds
            to nothing; keep float32 masters and let ``train.dtype`` narrow the matrix products.
    """
    require_wide(model, "adamw")
    groups = parameter_groups(model, weight_decay=options.weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=options.betas, eps=options.eps, fused=True)
