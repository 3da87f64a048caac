"""Code of a user's own at fixed points of the loop, and the callbacks that come with Pellucid.

The order of one optimizer step, which is also the order of the methods below:

    on_epoch_begin                            before the first step of an epoch
    on_batch_begin  on_batch_end              around forward and backward of each micro-batch
    on_before_step                            gradients are final and clipped; weights are the old ones
    (the optimizer step; the step line of metrics.jsonl; validation, if due)
    on_validation                             if a validation was due
    on_optimizer_step                         the step is finished
    on_epoch_end                              after the last step of an epoch
    (the checkpoint, if due; callbacks' own state goes into it)
    on_save                                   when a checkpoint is complete on disk, which may be steps later

Around them stand on_train_begin and on_train_end; on_error comes before the error leaves `Trainer.train`.
With several ranks every rank calls its own, on_save excepted, which only the first does: it writes.
Callbacks are called in the order of the configuration's [callbacks] table, then those given to `Trainer`.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pellucid.data.batches import Batch
from pellucid.errors import ConfigError
from pellucid.registry import register
from pellucid.train.ranks import gather_json
from pellucid.train.routing import RouterInfo

if TYPE_CHECKING:
    from pellucid.train.loop import Trainer
    from pellucid.train.state import TrainState


class StopTraining(Exception):
    """Raised in a callback: end the run after this step, with a checkpoint."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """One micro-batch."""

    step: int
    """The step that it belongs to, from 1."""
    micro: int
    """Its place within the step, from 0."""
    batch: Batch
    loss_sum: float | None
    """Summed loss; None before the forward."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One optimizer step."""

    step: int
    """From 1."""
    epoch: int
    """From 0."""
    tokens: int
    """Tokens seen by all ranks in the whole run so far."""
    loss: float
    """Nats per supervised token, or per pair, of the global batch, as optimised; a balancing loss of experts stands beside it."""
    lr: float
    grad_norm: float
    """Before clipping."""
    seconds: float
    """Of this step."""
    tokens_per_s: float
    total_steps: int
    router: RouterInfo | None = None
    """Of a model with a mixture of experts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the strategy measures beside its loss, over the same weight."""
    supervised: float = 1.0
    """Share of the step's tokens that the loss looks at."""
    counted: dict[str, int] | None = None
    """What the loss is a mean of, where that is not tokens: ``{"pairs": 16}``."""


@dataclass(frozen=True, slots=True)
class ValidationInfo:
    """One pass over the validation split."""

    step: int
    loss: float
    """Nats per supervised token, or per pair, without label smoothing."""
    tokens: int
    """Supervised tokens, or pairs: what the loss is a mean of."""
    unit: str = "tokens"
    """Which of them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the strategy measures beside its loss, over the same weight."""


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """One complete checkpoint."""

    step: int
    path: Path


class Callback:
    """Override what is needed. ``name`` is the file under a checkpoint's ``extra/``, where there is state to keep."""

    name = ""

    def on_train_begin(self, trainer: "Trainer", info: "TrainState") -> None: ...
    def on_epoch_begin(self, trainer: "Trainer", info: "TrainState") -> None: ...
    def on_batch_begin(self, trainer: "Trainer", info: BatchInfo) -> None: ...
    def on_batch_end(self, trainer: "Trainer", info: BatchInfo) -> None: ...
    def on_before_step(self, trainer: "Trainer", info: StepInfo) -> None: ...
    def on_validation(self, trainer: "Trainer", info: ValidationInfo) -> None: ...
    def on_optimizer_step(self, trainer: "Trainer", info: StepInfo) -> None: ...
    def on_epoch_end(self, trainer: "Trainer", info: "TrainState") -> None: ...
    def on_save(self, trainer: "Trainer", info: SaveInfo) -> None: ...
    def on_error(self, trainer: "Trainer", info: BaseException) -> None: ...
    def on_train_end(self, trainer: "Trainer", info: "TrainState") -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """JSON values, or tensors only; an empty one is not saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStoppingOptions:
    """Stop when validation no longer improves."""

    patience: int = 3
    """Validations in a row without improvement."""
    min_delta: float = 0.0
    """Nats by which a validation must beat the best to count."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"callbacks.early_stopping.patience must be at least 1, got {self.patience}")
        if self.min_delta < 0:
            raise ConfigError(f"callbacks.early_stopping.min_delta must not be negative, got {self.min_delta}")


@register("callback", "early_stopping", config=EarlyStoppingOptions)
class EarlyStopping(Callback):
    """Stops after ``patience`` validations that did not improve on the best."""

    name = "early_stopping"

    def __init__(self, options: EarlyStoppingOptions) -> None:
        self.options = options
        self.best: float | None = None
        self.bad = 0

    def on_validation(self, trainer: "Trainer", info: ValidationInfo) -> None:
        if self.best is None or info.loss < self.best - self.options.min_delta:
            self.best, self.bad = info.loss, 0
            return
        self.bad += 1
        if self.bad >= self.options.patience:
            raise StopTraining(f"validation loss has not improved on {self.best:.4f} for {self.bad} validations")

    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None else {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.bad = state["best"], state["bad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientStatisticsOptions:
    """Write statistics of each parameter's gradient into metrics.jsonl."""

    every: int = 100
    """Optimizer steps between them."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"callbacks.gradient_statistics.every must be at least 1, got {self.every}")


@register("callback", "gradient_statistics", config=GradientStatisticsOptions)
class GradientStatistics(Callback):
    """Adds ``{"event": "gradients", "step", "parameters": {name: {norm, mean, std, min, max}}}`` to the log."""

    name = "gradient_statistics"

    def __init__(self, options: GradientStatisticsOptions) -> None:
        self.every = options.every

    def on_before_step(self, trainer: "Trainer", info: StepInfo) -> None:
        if info.step % self.every:
            return
        executor = trainer.setup.executor
        mine = {part.name: _sums(part.tensor) for part in executor.gradients()}
        tables = gather_json(mine, tag="gradients") if executor.shards_gradients else [mine]
        names = [name for name, _ in trainer.model.named_parameters() if any(name in table for table in tables)]
        merged = {name: _merge([table[name] for table in tables if name in table]) for name in names}
        trainer.log({"event": "gradients", "step": info.step, "parameters": merged})


def _sums(grad: torch.Tensor) -> list[float]:
    wide = grad.double()
    return [grad.numel(), float(wide.sum()), float(wide.square().sum()), float(grad.min()), float(grad.max())]


def _merge(slices: list[list[float]]) -> dict[str, float]:
    """Statistics of a gradient from those of its slices."""
    numel, total, squares = (math.fsum(part[i] for part in slices) for i in range(3))
    mean = total / numel
    return {
        "norm": math.sqrt(squares),
        "mean": mean,
        "std": math.sqrt(max(0.0, squares / numel - mean * mean)),
        "min": min(part[3] for part in slices),
        "max": max(part[4] for part in slices),
    }
