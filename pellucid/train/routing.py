"""What a mixture of experts adds to training: the balancing loss, and who got how many tokens.

B sequences, T tokens a sequence, E experts, K experts a token, L layers with experts. Padding counts nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.data.batches import Batch
from pellucid.data.records import PreferenceBatch, RolloutBatch
from pellucid.model import ModelOutput
from pellucid.parallel import comm


class RoutingSums(NamedTuple):
    """The router in one micro-batch."""

    loss: Tensor
    """Scalar: the balancing losses of its sequences, summed, ``router_aux_loss_coef`` included; weighs `num_sequences`."""
    counts: Tensor
    """Tokens that went to each expert, ``[L, E]``."""
    entropy: Tensor
    """Of each layer's probabilities, in nats, summed over tokens, ``[L]``."""

    def detach(self) -> "RoutingSums":
        """The same without its graph."""
        return RoutingSums(*(each.detach() for each in self))


@dataclass(frozen=True, slots=True)
class RouterInfo:
    """The router in one optimizer step, over all ranks."""

    loss: float
    """The balancing loss that was added to ``loss``, coefficient included: a mean over sequences."""
    entropy: float
    """Nats, mean over tokens and layers; ln E where every expert is as likely."""
    load: float
    """Tokens of the busiest expert of any layer, as a multiple of an equal share."""
    dead: int
    """Experts, over all layers, that got no token."""


def routing_sums(
    config: ModelConfig, output: ModelOutput, batch: Batch | PreferenceBatch | RolloutBatch
) -> RoutingSums | None:
    """What a strategy gives along with its loss; None where the model has no experts."""
    if not output.router_probs:
        return None
    real = batch.document_ids >= 0
    loss = output.router_probs[0].new_zeros(())
    counts, entropies = [], []
    for probs, chosen in zip(output.router_probs, output.router_choices, strict=True):
        taken = tokens_of_experts(chosen, real, probs.shape[-1])
        if config.router_aux_loss_coef:
            loss = loss + config.router_aux_loss_coef * balancing_loss(probs, taken, real, chosen.shape[-1]).sum()
        counts.append(taken.sum(0))
        entropies.append((torch.special.entr(probs.detach()).sum(-1) * real).sum())
    return RoutingSums(loss, torch.stack(counts), torch.stack(entropies))


def tokens_of_experts(chosen: Tensor, real: Tensor, experts: int) -> Tensor:
    """Tokens of each sequence that went to each expert, ``[B, E]`` float32, from choices ``[B, T, K]``.

    Args:
        real: ``[B, T]`` bool; other tokens are not counted.
    """
    counts = torch.zeros(len(chosen), experts, device=chosen.device)
    return counts.scatter_add_(1, chosen.flatten(1), real.repeat_interleave(chosen.shape[-1], 1).float())


def balancing_loss(probs: Tensor, counts: Tensor, real: Tensor, num_chosen: int) -> Tensor:
    """How unequally each sequence uses the experts, ``[B]``: 1 if equally, up to E / K; 0 for a sequence without a token.

    For each sequence on its own, so that the loss does not depend on how sequences are divided into micro-batches.

    Args:
        probs: ``[B, T, E]``, adding up to 1 for each token; gradients flow through these.
        counts: `tokens_of_experts`.
        real: ``[B, T]`` bool.
        num_chosen: K.

    Source:
        DeepSeek-V3 2024, arXiv:2412.19437, eq. 17 to 20, without alpha.
    """
    tokens = real.sum(1, keepdim=True).clamp(min=1)
    share = counts * probs.shape[-1] / (num_chosen * tokens)
    mean_probs = (probs * real.unsqueeze(-1)).sum(1) / tokens
    return (share * mean_probs).sum(-1)


def num_sequences(batch: Batch | PreferenceBatch | RolloutBatch) -> int:
    """Sequences with a token in them: what the balancing loss weighs."""
    return int((batch.document_ids >= 0).any(1).sum())


def reduce_routing(sums: Sequence[RoutingSums], *, num_tokens: float, sequences: float) -> tuple[RouterInfo, Tensor]:
    """★ One step's router over all micro-batches and ranks, and the tokens of each expert ``[L, E]``.

    Counts are exact. So are sums of micro-batches' float32 values in float64, unless these are very far apart: the order of
    additions, and with it the number of ranks, is not seen.

    Args:
        num_tokens, sequences: of the whole step.
    """
    counts = torch.stack([s.counts for s in sums]).double().sum(0)
    entropy = sum(float(s.entropy.double().sum()) for s in sums)
    loss = sum(float(s.loss) for s in sums)
    loss, entropy, *flat = comm.all_reduce([loss, entropy, *counts.flatten().tolist()], tag="router")
    counts = torch.tensor(flat, dtype=torch.float64).view(counts.shape)
    layers = counts.shape[0]
    load = float((counts / counts.mean(1, keepdim=True)).max())
    dead = int((counts == 0).sum())
    return RouterInfo(loss / sequences, entropy / (num_tokens * layers), load, dead), counts
