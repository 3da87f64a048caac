"""Next-token prediction on documents."""

from dataclasses import dataclass

from torch import Tensor

from pellucid.data.batches import Batch
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.registry import register
from pellucid.train.forward import bare_model, predict
from pellucid.train.losses import cross_entropy_sum, z_loss_sum
from pellucid.train.routing import routing_sums
from pellucid.train.strategies.base import LossOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainOptions:
    """Next-token prediction on documents."""

    label_smoothing: float = 0.0
    """Share of the target mass spread over the vocabulary in training; validation never smooths."""
    z_loss: float = 0.0
    """Weight of the squared log of the softmax's denominator, which keeps logits from drifting; 1e-4 is usual. Training only."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"strategy.label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if not 0 <= self.z_loss < float("inf"):
            raise ConfigError(f"strategy.z_loss must be finite and not negative, got {self.z_loss}")


@register("strategy", "pretrain", config=PretrainOptions)
class Pretrain:
    """Cross-entropy of the next token at each supervised position; weighs its supervised tokens."""

    unit = "tokens"
    reads = "tokens"

    def __init__(self, options: PretrainOptions) -> None:
        self.label_smoothing, self.z_loss = options.label_smoothing, options.z_loss
        self.metrics = ("z_loss",) if options.z_loss else ()
        """``z_loss`` is the part of the loss that it adds, its weight included."""

    def weight(self, batch: Batch) -> int:
        return int(batch.loss_mask.sum())

    def __call__(self, model: Transformer, batch: Batch) -> LossOutput:
        return self._loss(model, batch, self.label_smoothing, self.z_loss)

    def validate(self, model: Transformer, batch: Batch) -> LossOutput:
        return self._loss(model, batch, 0.0, 0.0)

    def _loss(self, model: Transformer, batch: Batch, label_smoothing: float, z_loss: float) -> LossOutput:
        output = predict(model, batch)
        loss = cross_entropy_sum(output.logits, batch.targets, batch.loss_mask, label_smoothing=label_smoothing)
        metrics: dict[str, Tensor] = {}
        if self.metrics:
            z = z_loss * z_loss_sum(output.logits, batch.loss_mask) if z_loss else loss.new_zeros(())
            loss, metrics = loss + z, {"z_loss": z}
        return LossOutput(loss, metrics, routing_sums(bare_model(model).config, output, batch))
