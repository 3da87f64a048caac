"""Which parameters are decayed."""

from typing import Any

from torch import nn


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
