"""The optimizer's state of a checkpoint, for training loops of one's own."""

from pathlib import Path

import torch
from torch import nn

from pellucid.checkpoint.store import STATE, find_checkpoint, open_checkpoint, verify
from pellucid.errors import CheckpointError, ConfigError
from pellucid.parallel.optimizer_state import load_whole_state
from pellucid.parallel.sharded_optimizer import ShardedOptimizer


def load_optimizer(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the state that a checkpoint has for ``model``'s parameters into an optimizer over them, dtypes as saved.

    One rank may have saved it or many, in any mode: parameters are found by their names. Learning rates and other settings
    of groups stay as they are.

    Args:
        path: a checkpoint, or a run: its newest complete one.
        model: the bare model, whose parameters the optimizer holds.
        optimizer: of the class that was trained with, or one whose state has the same entries.

    Raises:
        CheckpointError: there is no checkpoint, its state is damaged, or it is not that of this model; names the first bad
            file or entry, and nothing is changed.
        ConfigError: a `ShardedOptimizer`, which holds a part of its state alone.
    """
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigError(
            "load_optimizer needs a plain optimizer; give ShardedOptimizer the state with load_state_dict()"
        )
    folder = find_checkpoint(path)
    names = verify(folder, hashes=False)["files"]
    verify(folder, hashes=[name for name in names if name == STATE or name.startswith("optimizer")])
    try:
        load_whole_state(model, optimizer, open_checkpoint(folder, hashes=False).optimizer)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
