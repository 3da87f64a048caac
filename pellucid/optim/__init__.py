"""Optimizers as classes, schedules as functions of the step, parameter groups."""

from pellucid.optim.adamw import AdamWOptions, build_adamw
from pellucid.optim.groups import parameter_groups
from pellucid.optim.muon import Muon, MuonOptions
from pellucid.optim.schedules import build_schedule
from pellucid.optim.sgd import SGDOptions, build_sgd

__all__ = [
    "AdamWOptions",
    "Muon",
    "MuonOptions",
    "SGDOptions",
    "build_adamw",
    "build_schedule",
    "build_sgd",
    "parameter_groups",
]
