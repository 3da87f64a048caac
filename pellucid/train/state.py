"""What a run is at a finished step, and how it goes into a checkpoint and back."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed the global generators (dropout draws from torch's), each rank's apart from the others'.

    Initial weights and data order have generators of their own.
    """
    seed += rank * 0x9E3779B1
    torch.manual_seed(seed % 2**64)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def clone_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
