"""Losses, strategies, the loop and callbacks. Names load on first use: a worker that judges completions needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pellucid.train.callbacks import Callback, StopTraining
    from pellucid.train.loop import Trainer
    from pellucid.train.state import TrainState

_HOMES = {"Callback": "callbacks", "StopTraining": "callbacks", "TrainState": "state", "Trainer": "loop"}

__all__ = ["Callback", "StopTraining", "TrainState", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pellucid.train' has no attribute {name!r}")
    return getattr(import_module(f"pellucid.train.{_HOMES[name]}"), name)
