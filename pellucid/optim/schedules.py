"""Learning-rate schedules: functions from the optimizer step to a factor on the peak rate.

``factor(step)`` is for the step after ``step`` finished ones, so it depends on nothing but the count of optimizer
steps: not on the world size, accumulation or epochs. Every shape begins after a linear warm-up whose last step
has factor 1, and stays at or above the floor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pellucid.config import OptimConfig, options_of
from pellucid.errors import ConfigError
from pellucid.registry import lookup, register

Schedule = Callable[[int], float]
Shape = Callable[[int, int, Any], float]
"""(steps since warm-up, steps after warm-up in all, options) -> factor in [0, 1], before the floor."""


def build_schedule(optim: OptimConfig, total_steps: int) -> Schedule:
    """The factor on ``optim.lr`` for each step of a run of ``total_steps``."""
    name, warmup, floor = optim.schedule.name, optim.warmup_steps, optim.min_lr_ratio
    shape: Shape = lookup("schedule", name).target
    options = options_of("schedule", name, optim.schedule.options)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return floor + (1 - floor) * shape(step - warmup, max(1, total_steps - warmup), options)

    return factor


@register("schedule", "constant")
def constant(step: int, total: int, options: object) -> float:
    """1."""
    return 1.0


@register("schedule", "linear")
def linear(step: int, total: int, options: object) -> float:
    """From 1 to 0 over the run."""
    return max(0.0, 1 - step / total)


@register("schedule", "cosine")
def cosine(step: int, total: int, options: object) -> float:
    """Half a cosine from 1 to 0 over the run."""
    return (1 + math.cos(math.pi * min(1.0, step / total))) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDROptions:
    """Cosine with warm restarts; Loshchilov & Hutter 2017, arXiv:1608.03983."""

    cycle_steps: int = 1000
    """Steps of the first cycle."""
    cycle_mult: int = 2
    """Each cycle is this many times as long as the one before it."""

    def __post_init__(self) -> None:
        if self.cycle_steps < 1 or self.cycle_mult < 1:
            raise ConfigError(
                f"optim.schedule.cycle_steps and cycle_mult must be at least 1, got {self.cycle_steps} and {self.cycle_mult}"
            )


@register("schedule", "sgdr", config=SGDROptions)
def sgdr(step: int, total: int, options: SGDROptions) -> float:
    """Half cosines over cycles of c, c·m, c·m², ... steps, each from 1."""
    length = options.cycle_steps
    while step >= length:
        step -= length
        length *= options.cycle_mult
        if options.cycle_mult == 1:
            step %= length
    return (1 + math.cos(math.pi * step / length)) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class WSDOptions:
    """Warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395."""

    decay_ratio: float = 0.2
    """Share of the steps after warm-up over which the rate falls linearly at the end."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay_ratio <= 1:
            raise ConfigError(f"optim.schedule.decay_ratio must be in [0, 1], got {self.decay_ratio}")


@register("schedule", "wsd", config=WSDOptions)
def wsd(step: int, total: int, options: WSDOptions) -> float:
    """1, then linear to 0 over the last ``decay_ratio`` of the steps."""
    decay = round(total * options.decay_ratio)
    return 1.0 if step < total - decay else max(0.0, (total - step) / max(1, decay))
