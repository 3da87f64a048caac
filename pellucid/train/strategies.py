"""Training objectives. A strategy says what a batch weighs, before any forward, and what its summed loss is."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from pellucid.data.batches import Batch
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.registry import register
from pellucid.train.losses import cross_entropy_sum
from pellucid.train.routing import RoutingSums, routing_sums


class LossOutput(NamedTuple):
    """What a strategy gives for one micro-batch."""

    sum: Tensor
    """Scalar, summed over what `Strategy.weight` counts; to be divided by the weight of the whole step."""
    metrics: dict[str, Tensor]
    """Further sums over the same weight, by name."""
    routing: RoutingSums | None = None
    """`routing_sums`, where the model has a mixture of experts."""


class Strategy(Protocol):
    """A training objective."""

    def weight(self, batch: Batch) -> int:
        """What ``batch`` adds to the denominator of the step; supervised tokens, pairs or sequences."""
        ...

    def __call__(self, model: Transformer, batch: Batch) -> LossOutput:
        """The loss that is optimised."""
        ...

    def validate(self, model: Transformer, batch: Batch) -> LossOutput:
        """The loss that is reported for held-out data, over the same weight."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainOptions:
    """Next-token prediction on documents."""

    label_smoothing: float = 0.0
    """Share of the target mass spread over the vocabulary in training; validation never smooths."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"strategy.label_smoothing must be in [0, 1), got {self.label_smoothing}")


@register("strategy", "pretrain", config=PretrainOptions)
class Pretrain:
    """Cross-entropy of the next token at each supervised position; weighs its supervised tokens."""

    def __init__(self, options: PretrainOptions) -> None:
        self.label_smoothing = options.label_smoothing

    def weight(self, batch: Batch) -> int:
        return int(batch.loss_mask.sum())

    def __call__(self, model: Transformer, batch: Batch) -> LossOutput:
        return _next_token_loss(model, batch, self.label_smoothing)

    def validate(self, model: Transformer, batch: Batch) -> LossOutput:
        return _next_token_loss(model, batch, 0.0)


def _next_token_loss(model: Transformer, batch: Batch, label_smoothing: float) -> LossOutput:
    bare: Transformer = getattr(model, "module", model)  # data parallel wrappers hold it so
    attend = bare.make_attend(batch.document_ids if batch.packed else None)
    output = model(batch.tokens, batch.positions, attend)
    loss = cross_entropy_sum(output.logits, batch.targets, batch.loss_mask, label_smoothing=label_smoothing)
    return LossOutput(loss, {}, routing_sums(bare.config, output, batch))
