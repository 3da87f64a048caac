"""Which parameters are decayed, and of which type they must be."""

from typing import Any

import torch
from torch import nn

from pellucid.errors import ConfigError


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one of two groups: decayed matrices, and the rest.

    Matrices are parameters of two or more dimensions, except embeddings (a tied head is its embedding).
    Parameters come as (name, tensor) pairs, which torch's optimizers keep as ``param_names``.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[tuple[str, nn.Parameter]] = []
    plain: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decayed if matrix else plain).append((name, parameter))
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def require_wide(model: nn.Module, optimizer: str) -> None:
    """`ConfigError` if a trainable parameter is narrower than float32.

    In bfloat16 an update of 6e-4 to a weight of 1.0 rounds to nothing.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"{optimizer}: {name} is {parameter.dtype}; its updates would round away. "
                "Keep the model in float32 and set train.dtype for the matrix products"
            )
