"""Model folders and checkpoints: written aside, published by one rename, verified when read."""

from pellucid.checkpoint.model_folder import export_model
from pellucid.checkpoint.optimizer import load_optimizer
from pellucid.checkpoint.store import (
    Checkpoint,
    checkpoints,
    find_checkpoint,
    newest_undamaged,
    open_checkpoint,
    verify,
)

__all__ = [
    "Checkpoint",
    "checkpoints",
    "export_model",
    "find_checkpoint",
    "load_optimizer",
    "newest_undamaged",
    "open_checkpoint",
    "verify",
]
