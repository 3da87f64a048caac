"""An optimizer's state by parameter name, as checkpoints hold it: ``"<parameter name>/<key>"``.

A *slice* is what a rank's optimizer holds of a parameter: elements ``[start, start + numel)`` of it, or all of it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.errors import CheckpointError
from pellucid.parallel.layout import ELEMENTWISE
from pellucid.parallel.parts import Part, SavedTensors, refuse

Optimized = Mapping[str, int]
"""The trainable parameters that an optimizer updates, and the index of the group of each."""


def optimized_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """`Optimized` of an optimizer over ``model``'s own parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: i
        for i, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter in names and parameter.requires_grad
    }


def state_parts(
    name: str, shape: tuple[int, ...], start: int, weight: Tensor, state: Mapping[str, Any]
) -> Iterator[Part]:
    """The state of a slice, not copied. A single number comes from the slice that begins at 0, as a tensor of shape ().

    Args:
        shape: of the whole parameter.
        weight: the slice, as the optimizer has it.

    Raises:
        CheckpointError: an entry is neither a number nor of the slice's shape.
    """
    for key, value in state.items():
        if value is None:
            continue
        entry = f"optimizer state {name}/{key}"
        if not isinstance(value, Tensor | float | int):
            raise CheckpointError(f"{entry} is a {type(value).__name__}; numbers and tensors can be saved")
        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
        if not tensor.ndim:
            if start == 0:
                yield Part(f"{name}/{key}", (), 0, tensor)
        elif tensor.shape == weight.shape:
            yield Part(f"{name}/{key}", shape, start, tensor)
        else:
            raise CheckpointError(
                f"{entry} has shape {tuple(tensor.shape)}, the parameter {tuple(weight.shape)}; numbers and what has a "
                "parameter's shape can be saved"
            )


def state_keys(
    saved: SavedTensors,
    shapes: Mapping[str, tuple[int, ...]],
    optimized: Optimized,
    optimizer: torch.optim.Optimizer,
) -> dict[str, list[str]]:
    """The names of a saved state's entries by parameter (``{"w": ["step", "exp_avg"]}``), checked.

    Args:
        shapes: of every whole parameter of the model.
        optimized: parameters that must have a state, unless there is none at all or they had none when it was saved.

    Raises:
        CheckpointError: a parameter has no state or not all of it, or a state has no parameter or another shape; names it.
    """
    by_name: dict[str, list[str]] = {}
    problems: list[str] = []
    for key in saved.keys():  # noqa: SIM118 - not a mapping
        name, _, part = key.rpartition("/")
        shape = saved.shape(key)
        if name not in shapes:
            problems.append(f"optimizer state {key} belongs to no parameter of this model")
        elif shape and shape != tuple(shapes[name]):
            problems.append(f"optimizer state {key} has shape {shape}, the parameter {tuple(shapes[name])}")
        else:
            by_name.setdefault(name, []).append(part)
    if saved.keys():
        unknown = {key.rpartition("/")[0] for key in saved.keys()} | set(saved.without_state)  # noqa: SIM118
        problems += [f"the checkpoint has no optimizer state for {name}" for name in optimized if name not in unknown]
    if type(optimizer) in ELEMENTWISE:
        problems += _incomplete(by_name, optimized)
    refuse(problems, "the optimizer's state does not fit")
    return by_name


def _incomplete(by_name: Mapping[str, Collection[str]], optimized: Optimized) -> list[str]:
    """Entries that a parameter lacks and others of its group have; torch's own optimizers treat a group alike."""
    whole: dict[int, dict[str, None]] = {}
    for name, keys in by_name.items():
        if name in optimized:
            whole.setdefault(optimized[name], {}).update(dict.fromkeys(keys))
    return [
        f"the checkpoint has no {name}/{key}"
        for name, keys in by_name.items()
        if name in optimized
        for key in whole[optimized[name]]
        if key not in keys
    ]


def load_state(
    optimizer: torch.optim.Optimizer,
    slices: Iterable[tuple[str, int, Tensor]],
    saved: SavedTensors,
    shapes: Mapping[str, tuple[int, ...]],
    optimized: Optimized,
) -> None:
    """Put a saved state into an optimizer that holds ``slices``: their ranges alone are read, dtypes as saved.

    torch's own ``load_state_dict`` would cast moments to the parameter's dtype without a word.

    Args:
        slices: name, first element and tensor of each parameter or slice of one in the optimizer.
        shapes, optimized: of the whole model, as `state_keys` has them.

    Raises:
        CheckpointError: as `state_keys`, before anything is changed.
    """
    keys = state_keys(saved, shapes, optimized, optimizer)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, start, weight in slices:
        optimizer.state.pop(weight, None)
        counts_on_device = on_device(groups.get(id(weight), {}))
        for key in keys.get(name, ()):
            entry = f"{name}/{key}"
            if saved.shape(entry):
                value = saved.read(entry, start, start + weight.numel()).view(weight.shape).to(weight.device)
            else:
                value = saved.read(entry).view(())
                value = value.to(weight.device) if counts_on_device or not weight.ndim else value
            optimizer.state[weight][key] = value


def load_whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedTensors) -> None:
    """`load_state` for an optimizer that holds ``model``'s own parameters."""
    parameters = dict(model.named_parameters())
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    slices = [(name, 0, parameter) for name, parameter in parameters.items() if id(parameter) in held]
    load_state(optimizer, slices, saved, shapes, optimized_parameters(model, optimizer))


def on_device(group: Mapping[str, Any]) -> bool:
    """Whether single numbers of the state, such as counts of steps, belong beside the parameter: fused kernels want that."""
    return bool(group.get("fused") or group.get("capturable"))
