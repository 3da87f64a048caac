"""Supervised fine-tuning: next-token prediction on the answers of conversations."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from pellucid.data.batches import Batch
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.registry import register
from pellucid.train.forward import bare_model, places, predict
from pellucid.train.losses import cross_entropy_sum, entropy_sum, neftune_noise
from pellucid.train.routing import routing_sums
from pellucid.train.strategies.base import LossOutput

if TYPE_CHECKING:
    from pellucid.train.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class SftOptions:
    """Next-token prediction on what the stored mask supervises."""

    label_smoothing: float = 0.0
    """Share of the target mass spread over the vocabulary in training; validation never smooths."""
    neftune_alpha: float = 0.0
    """Uniform noise on the embeddings in training, of size alpha / sqrt(tokens * width); 5 is usual (arXiv:2310.05914)."""
    entropy: bool = False
    """Log the entropy of the next-token distribution, in nats, mean over supervised tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"strategy.label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if not 0 <= self.neftune_alpha < float("inf"):
            raise ConfigError(f"strategy.neftune_alpha must be finite and not negative, got {self.neftune_alpha}")


class NoisyBatch(NamedTuple):
    """A batch and what is added to its embeddings, ``[B, T, D]``."""

    batch: Batch
    noise: Tensor


@register("strategy", "sft", config=SftOptions)
class Sft:
    """Cross-entropy of the next token at the positions that the data supervises; weighs its supervised tokens."""

    unit = "tokens"
    reads = "sft"

    def __init__(self, options: SftOptions) -> None:
        self.options = options
        self.metrics = ("entropy",) if options.entropy else ()
        self._seed = self._width = 0

    def begin(self, setup: "Setup", folder: Path | None) -> None:
        self._seed, self._width = setup.config.train.seed, setup.model.config.hidden_size

    def annotate(self, batch: Batch, *, step: int, validation: bool) -> Batch | NoisyBatch:
        alpha = self.options.neftune_alpha
        if validation or not alpha:
            return batch
        assert self._width, "begin() comes first"
        where = batch.positions, batch.document_ids
        return NoisyBatch(batch, neftune_noise(*where, self._width, alpha=alpha, seed=self._seed, step=step))

    def weight(self, batch: Batch) -> int:
        return int(batch.loss_mask.sum())

    def __call__(self, model: Transformer, batch: Batch | NoisyBatch) -> LossOutput:
        plain, noise = (batch.batch, batch.noise) if isinstance(batch, NoisyBatch) else (batch, None)
        return self._loss(model, plain, noise, self.options.label_smoothing)

    def validate(self, model: Transformer, batch: Batch) -> LossOutput:
        return self._loss(model, batch, None, 0.0)

    def _loss(self, model: Transformer, batch: Batch, noise: Tensor | None, label_smoothing: float) -> LossOutput:
        at = places(batch.loss_mask)
        output = predict(model, batch, noise, at=at)
        targets, mask = batch.targets.flatten()[at], batch.loss_mask.flatten()[at]
        loss = cross_entropy_sum(output.logits, targets, mask, label_smoothing=label_smoothing)
        metrics = {"entropy": entropy_sum(output.logits, mask)} if self.options.entropy else {}
        return LossOutput(loss, metrics, routing_sums(bare_model(model).config, output, batch))
