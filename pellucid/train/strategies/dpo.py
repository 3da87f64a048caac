"""Direct preference optimisation: chosen answers become likelier than rejected ones, as far as a reference allows.

P pairs; a batch holds 2 P rows, the chosen ones first.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from pellucid.data.batches import Batch
from pellucid.data.records import PreferenceBatch
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.registry import register
from pellucid.train.forward import bare_model, predict
from pellucid.train.losses import dpo_loss, response_log_probs
from pellucid.train.reference import Reference, reference_table
from pellucid.train.routing import routing_sums
from pellucid.train.strategies.base import LossOutput

if TYPE_CHECKING:
    from pellucid.train.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoOptions:
    """Preferences between two answers to a prompt; Rafailov et al. 2023, arXiv:2305.18290."""

    beta: float = 0.1
    """How dear it is to leave the reference."""
    variant: Literal["sigmoid", "ipo"] = "sigmoid"
    """"sigmoid" is DPO; "ipo" squares the distance of the margin from 1 / (2 beta) (Azar et al. 2023, arXiv:2310.12036)."""
    label_smoothing: float = 0.0
    """Share of pairs whose preference is taken to be the wrong way round (cDPO), below 0.5; for "sigmoid", in training."""
    length_normalised: bool = False
    """Compare mean log-probabilities a token, not sums over the answer."""
    reference: Literal["precomputed", "live"] = "precomputed"
    """"precomputed" runs the reference once over all pairs before the first step and keeps what it said in RUN/reference;
    "live" runs it beside the model in each step."""
    reference_model: str = ""
    """The reference; "": the model as it is before the first step, with [lora] the base without the adapter."""

    def __post_init__(self) -> None:
        if not 0 < self.beta < float("inf"):
            raise ConfigError(f"strategy.beta must be positive and finite, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"strategy.label_smoothing must be in [0, 0.5) for dpo, got {self.label_smoothing}")
        if self.variant == "ipo" and self.label_smoothing:
            raise ConfigError(
                f'strategy.label_smoothing is {self.label_smoothing} and strategy.variant "ipo" has none; set it to 0, or '
                'the variant to "sigmoid"'
            )


class ComparedBatch(NamedTuple):
    """Pairs, and the log-probabilities of their answers under the reference, ``[2 P]``, sums over tokens."""

    batch: PreferenceBatch
    reference: Tensor


@register("strategy", "dpo", config=DpoOptions)
class Dpo:
    """`dpo_loss` of each pair; weighs pairs."""

    unit = "pairs"
    reads = "dpo"
    metrics = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    """Means over pairs: of reward(chosen) > reward(rejected), of their difference, and of both. A reward is
    beta * (log-probability of the answer - that under the reference)."""

    def __init__(self, options: DpoOptions) -> None:
        self.options = options
        self._live: Reference | None = None
        self._tables: dict[bool, Tensor] = {}
        """What the reference said of the pairs, ``[pairs, 2]``, of training (False) and of validation (True)."""

    @property
    def live_reference(self) -> str | None:
        """The model that each micro-batch also has a forward of: a path, or "" for the run's own as it began; None: none."""
        return self.options.reference_model if self.options.reference == "live" else None

    def begin(self, setup: "Setup", folder: Path | None) -> None:
        if setup.config.model.dropout or (setup.config.lora is not None and setup.config.lora.dropout):
            key = "model.dropout" if setup.config.model.dropout else "lora.dropout"
            raise ConfigError(f"{key} is not 0, and dpo compares the model with one that drops nothing; set {key} to 0")
        reference = Reference(setup, self.options.reference_model, live=self.options.reference == "live", folder=folder)
        if self.options.reference == "live":
            self._live = reference
            return
        self._tables[False] = reference_table(reference, setup.loader.windows, setup, folder, "train")
        if setup.val_data is not None and setup.config.train.val_every:
            self._tables[True] = reference_table(reference, setup.val_data, setup, folder, "val")

    def annotate(self, batch: PreferenceBatch, *, step: int, validation: bool) -> ComparedBatch:
        if self._live is not None:
            return ComparedBatch(batch, self._live(batch))
        table = self._tables[validation]
        rows = table[batch.pair_ids.clamp(min=0).to(table.device)].to(batch.tokens.device)
        return ComparedBatch(batch, rows.T.flatten())

    def weight(self, batch: PreferenceBatch) -> int:
        return int((batch.pair_ids >= 0).sum())

    def __call__(self, model: Transformer, batch: ComparedBatch) -> LossOutput:
        return self._loss(model, batch, self.options.label_smoothing)

    def validate(self, model: Transformer, batch: ComparedBatch) -> LossOutput:
        return self._loss(model, batch, 0.0)

    def example(self, batch: Batch) -> ComparedBatch:
        """Pairs of the shape of ``batch``, whose values nobody reads."""
        twice = {name: getattr(batch, name).repeat(2, 1) for name in PAIRED}
        pairs = PreferenceBatch(**twice, pair_ids=batch.sample_ids)
        return ComparedBatch(pairs, torch.zeros(2 * len(batch.sample_ids), device=batch.tokens.device))

    def _loss(self, model: Transformer, compared: ComparedBatch, label_smoothing: float) -> LossOutput:
        options, batch = self.options, compared.batch
        output = predict(model, batch)
        log_probs = response_log_probs(output.logits, batch.targets, batch.loss_mask)
        ratios = log_probs - compared.reference.to(log_probs.dtype)
        if options.length_normalised:
            ratios = ratios / batch.loss_mask.sum(-1).clamp(min=1)
        chosen, rejected = ratios.chunk(2)  # [P] each
        real = batch.pair_ids >= 0
        losses = dpo_loss(chosen, rejected, beta=options.beta, variant=options.variant, label_smoothing=label_smoothing)
        rewards = (options.beta * chosen).detach(), (options.beta * rejected).detach()
        each = {
            "accuracy": (rewards[0] > rewards[1]).to(losses.dtype), "margin": rewards[0] - rewards[1],
            "chosen_reward": rewards[0], "rejected_reward": rewards[1],
        }  # fmt: skip
        sums = {name: value.where(real, 0).sum() for name, value in each.items()}
        routing = routing_sums(bare_model(model).config, output, batch)
        return LossOutput(losses.where(real, 0).sum(), sums, routing)


PAIRED = ("tokens", "targets", "loss_mask", "positions", "document_ids")
"""The tensors of a batch that have two rows a pair."""
