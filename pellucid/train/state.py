"""What a run is at a finished step, and how it goes into a checkpoint and back."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pellucid.errors import CheckpointError


@dataclass(slots=True)
class TrainState:
    """Counts of a run. The step is complete only when ``step`` counts it."""

    step: int = 0
    """Finished optimizer steps."""
    epoch: int = 0
    """Passes over the data before this one."""
    tokens_seen: int = 0
    """Tokens of all ranks, padding not counted."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """The loader's state: the same for every world size."""
    rng: dict[str, Tensor] = field(default_factory=dict)
    """Generator states, as they were at the last checkpoint or at the end."""


def capture_rng() -> dict[str, Tensor]:
    """The states of torch's, numpy's and Python's global generators, as tensors."""
    state_of_numpy: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]
    kind, keys, position, has_gauss, gauss = state_of_numpy
    assert kind == "MT19937"
    version, words, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy/keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy/rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python/words": torch.tensor([version, *words], dtype=torch.int64),
        "python/gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Tensor]) -> None:
    """Put back what `capture_rng` gave."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy/rest"].tolist()
    np.random.set_state(
        ("MT19937", state["numpy/keys"].numpy().astype(np.uint32), int(position), int(has_gauss), gauss)
    )
    version, *words = state["python/words"].tolist()
    gauss_list = state["python/gauss"].tolist()
    random.setstate((version, tuple(words), gauss_list[0] if gauss_list else None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed the global generators (dropout draws from torch's). Initial weights and data order have their own."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``"<parameter name>/<key>"``, not copied."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put a saved state back, dtypes as saved.

    torch's own ``load_state_dict`` would cast moments to the parameter's dtype without a word.

    Raises:
        CheckpointError: a parameter has no state, or a state has no parameter or another shape; names it.
    """
    parameters = dict(model.named_parameters())
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, part = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"optimizer state {key} belongs to no parameter of this model")
        if value.ndim and value.shape != parameters[name].shape:
            raise CheckpointError(
                f"optimizer state {key} has shape {tuple(value.shape)}, the parameter {tuple(parameters[name].shape)}"
            )
        by_name.setdefault(name, {})[part] = value
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) in optimized and name not in by_name and tensors:
            raise CheckpointError(f"the checkpoint has no optimizer state for {name}")
    for name, state in by_name.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {k: v.to(parameter.device) if v.ndim else v for k, v in state.items()}


def clone_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
