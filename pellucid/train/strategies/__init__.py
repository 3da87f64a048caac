"""Training objectives. A strategy says what a batch weighs, before any forward, and what its summed loss is."""

from pellucid.train.strategies.base import (
    LossOutput,
    MakesBatches,
    PlansRollouts,
    Strategy,
    UsesRun,
    metrics_of,
    reads_of,
    rows_of,
    unit_of,
)
from pellucid.train.strategies.dpo import Dpo, DpoOptions
from pellucid.train.strategies.grpo import Grpo
from pellucid.train.strategies.grpo_options import GrpoOptions
from pellucid.train.strategies.pretrain import Pretrain, PretrainOptions
from pellucid.train.strategies.sft import Sft, SftOptions

__all__ = [
    "Dpo",
    "DpoOptions",
    "Grpo",
    "GrpoOptions",
    "LossOutput",
    "MakesBatches",
    "PlansRollouts",
    "Pretrain",
    "PretrainOptions",
    "Sft",
    "SftOptions",
    "Strategy",
    "UsesRun",
    "metrics_of",
    "reads_of",
    "rows_of",
    "unit_of",
]
