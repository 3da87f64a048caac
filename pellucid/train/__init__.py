"""Losses, strategies, the loop and callbacks."""

from pellucid.train.callbacks import Callback, StopTraining
from pellucid.train.loop import Trainer
from pellucid.train.state import TrainState

__all__ = ["Callback", "StopTraining", "TrainState", "Trainer"]
