"""What a rank holds of a tensor: the one form in which modes name their slices of weights, gradients and state."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pellucid.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``[start, start + tensor.numel())`` of a tensor that is flattened in row-major order."""

    name: str
    """Of the tensor: a parameter's, or ``"<parameter>/exp_avg"`` of an optimizer's state."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    tensor: Tensor
    """Of any shape, in row-major order, not copied."""

    @property
    def stop(self) -> int:
        """One after its last element."""
        return self.start + self.tensor.numel()


@dataclass(frozen=True, slots=True)
class Rows:
    """What a rank holds of a parameter, as the optimizer has it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """First element, in the flattened parameter."""
    weight: nn.Parameter
    replicated: bool = False
    """Every rank holds all of it, and the same."""


class SavedTensors(Protocol):
    """Whole tensors by name, of which any range of elements can be read."""

    @property
    def without_state(self) -> Collection[str]:
        """Of an optimizer's state: trainable parameters that had none when it was saved, as no loss had reached them."""
        ...

    def keys(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``[start, stop)`` in row-major order, ``[stop - start]``, by copy and with the dtype as saved."""
        ...


class WholeTensors:
    """`SavedTensors` that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor], *, without_state: Collection[str] = ()) -> None:
        self.tensors = tensors
        self.without_state = without_state

    def keys(self) -> Collection[str]:
        """Their names."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensors[name].shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of elements ``[start, stop)``."""
        return self.tensors[name].reshape(-1)[start:stop].clone()


def weight_shapes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every parameter by name, tied ones once; wide types first, as files want them."""
    named = ((name, (tuple(p.shape), p.dtype)) for name, p in model.named_parameters())
    return dict(sorted(named, key=lambda item: -item[1][1].itemsize))


def check_weights(saved: SavedTensors, shapes: Mapping[str, tuple[int, ...]], *, ignore: Collection[str] = ()) -> None:
    """Whether saved weights are those of a model with parameters of these shapes; their types may be others.

    Args:
        ignore: names of saved weights that need not be the model's.

    Raises:
        CheckpointError: weights are missing, extra or of another shape; names them.
    """
    keys = [name for name in saved.keys() if name not in ignore]  # noqa: SIM118 - not a mapping
    problems = [f"missing {name}" for name in shapes if name not in saved.keys()]  # noqa: SIM118
    problems += [f"unexpected {name}" for name in keys if name not in shapes]
    problems += [
        f"{name} has shape {saved.shape(name)}, the model's has {tuple(shape)}"
        for name, shape in shapes.items()
        if name in saved.keys() and saved.shape(name) != tuple(shape)  # noqa: SIM118
    ]
    refuse(problems, "weights do not fit the model")


def refuse(problems: list[str], what: str) -> None:
    """`CheckpointError` naming the first few ``problems``, if there is one."""
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{what}: {'; '.join(problems[:5])}{more}")
