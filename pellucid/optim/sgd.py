"""SGD, torch's own, with decay on matrices only."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from pellucid.errors import ConfigError
from pellucid.optim.groups import parameter_groups, require_wide
from pellucid.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDOptions:
    """Stochastic gradient descent; Robbins & Monro 1951, with momentum Polyak 1964."""

    momentum: float = 0.0
    """Decay rate of the momentum; 0 keeps no state at all."""
    nesterov: bool = False
    """Look one step ahead along the momentum; Nesterov 1983."""
    weight_decay: float = 0.0
    """Added to the gradient, times the weight, of matrices; norms, biases and embeddings are not decayed."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.momentum must be in [0, 1), got {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ConfigError("optim.nesterov is true and optim.momentum 0; give it a momentum, or leave nesterov out")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optim.weight_decay must be a number from 0 on, got {self.weight_decay}")


@register("optimizer", "sgd", config=SGDOptions)
def build_sgd(model: nn.Module, lr: float, options: SGDOptions) -> torch.optim.Optimizer:
    """Fused SGD over ``model``'s trainable parameters.

    Raises:
        ConfigError: a parameter is of a narrower type than float32.
    """
    require_wide(model, "sgd")
    groups = parameter_groups(model, weight_decay=options.weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=options.momentum, nesterov=options.nesterov, fused=True)
