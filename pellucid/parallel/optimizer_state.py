"""An optimizer's state by parameter name, as checkpoints hold it: ``"<parameter name>/<key>"``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.errors import CheckpointError


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer over ``model``'s own parameters, not copied; numbers become tensors."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def state_by_parameter(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], optimized: set[str]
) -> dict[str, dict[str, Tensor]]:
    """A saved state, grouped by parameter and checked.

    Args:
        shapes: of every parameter of the model.
        optimized: parameters that must have a state, unless there is none at all.

    Raises:
        CheckpointError: a parameter has no state, or a state has no parameter or another shape; names it.
    """
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, part = key.rpartition("/")
        if name not in shapes:
            raise CheckpointError(f"optimizer state {key} belongs to no parameter of this model")
        if value.ndim and value.shape != shapes[name]:
            raise CheckpointError(
                f"optimizer state {key} has shape {tuple(value.shape)}, the parameter {tuple(shapes[name])}"
            )
        by_name.setdefault(name, {})[part] = value
    missing = next((name for name in shapes if tensors and name in optimized and name not in by_name), None)
    if missing is not None:
        raise CheckpointError(f"the checkpoint has no optimizer state for {missing}")
    return by_name


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put a saved state back, dtypes as saved.

    torch's own ``load_state_dict`` would cast moments to the parameter's dtype without a word.

    Raises:
        CheckpointError: as `state_by_parameter`.
    """
    parameters = dict(model.named_parameters())
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    optimized = {name for name, parameter in parameters.items() if id(parameter) in groups}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for name, state in state_by_parameter(tensors, shapes, optimized).items():
        parameter = parameters[name]
        counts_on_device = on_device(groups.get(id(parameter), {}))
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if value.ndim or counts_on_device else value for key, value in state.items()
        }


def on_device(group: Mapping[str, Any]) -> bool:
    """Whether single numbers of the state, such as counts of steps, belong beside the parameter: fused kernels want that."""
    return bool(group.get("fused") or group.get("capturable"))
