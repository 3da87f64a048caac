"""Losses as pure functions. Sums with weights, never means of means.

B sequences, T tokens, V vocabulary, P pairs.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def cross_entropy_sum(logits: Tensor, targets: Tensor, loss_mask: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Summed next-token loss in nats over the supervised positions; zero, with zero gradient, where there are none.

    Args:
        logits: ``[..., V]``, any float type; the softmax is computed in float32 or wider.
        targets: ``[...]`` int64.
        loss_mask: ``[...]`` bool, the supervised positions.
        label_smoothing: share of the target mass spread evenly over the vocabulary, in [0, 1).

    Source:
        Szegedy et al. 2016, arXiv:1512.00567, section 7, for label smoothing.
    """
    labels = targets.masked_fill(~loss_mask, IGNORED)
    return F.cross_entropy(
        _wide(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )  # fmt: skip


def z_loss_sum(logits: Tensor, loss_mask: Tensor) -> Tensor:
    """Summed squares of log Z, the logarithm of the softmax's denominator, over the supervised positions.

    Keeps logits from drifting: adding c to all logits of a position changes no probability, but this.

    Args:
        logits: ``[B, T, V]``.
        loss_mask: ``[B, T]`` bool.

    Source:
        Chowdhery et al. 2022, arXiv:2204.02311 (PaLM), section 5, without the factor.
    """
    return (_wide(logits).logsumexp(-1).square() * loss_mask).sum()


def entropy_sum(logits: Tensor, loss_mask: Tensor) -> Tensor:
    """Entropy in nats of the next-token distribution, summed over the supervised positions; no gradient."""
    log_probs = _wide(logits.detach()).log_softmax(-1)
    return (-(log_probs.exp() * log_probs).sum(-1) * loss_mask).sum()


def response_log_probs(logits: Tensor, targets: Tensor, loss_mask: Tensor) -> Tensor:
    """The log-probability in nats of what is supervised in each row: ``[B]``, a sum over tokens, 0 where there is none.

    Args:
        logits: ``[B, T, V]``, any float type; computed in float32 or wider.
        targets: ``[B, T]`` int64.
        loss_mask: ``[B, T]`` bool, the tokens of the response.
    """
    labels = targets.masked_fill(~loss_mask, IGNORED)
    each = F.cross_entropy(_wide(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -each.view(labels.shape).sum(-1)


def dpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float, variant: Literal["sigmoid", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Direct preference loss, one value a pair: ``[P]``, not reduced.

    With h = chosen - rejected:

    - "sigmoid": ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`` with e = label_smoothing, the share of pairs whose
      preference is taken to be the wrong way round. It is log 2 where the policy still is the reference.
    - "ipo": ``(h - 1 / (2 beta))^2``, which stops rewarding a margin beyond 1 / (2 beta). It is 1 / (2 beta)^2 there.

    Args:
        chosen, rejected: ``[P]``, log-probability of the response under the policy less that under the reference. Sums over
            tokens; means if the loss shall not depend on their number.

    Source:
        Rafailov et al. 2023, arXiv:2305.18290, eq. 7; Mitchell 2023, "A note on DPO with noisy preferences", eq. 3, for
        label smoothing (cDPO); Azar et al. 2023, arXiv:2310.12036, eq. 17, for IPO.
    """
    h = chosen - rejected
    if variant == "ipo":
        return (h - 1 / (2 * beta)).square()
    right, wrong = F.logsigmoid(beta * h), F.logsigmoid(-beta * h)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def neftune_noise(
    positions: Tensor, document_ids: Tensor, width: int, *, alpha: float, seed: int, step: int
) -> Tensor:  # fmt: skip
    """Noise for the embeddings of a batch, ``[B, T, width]`` float32: uniform within alpha / sqrt(tokens * width).

    ``tokens`` are those of the document in its row, so that packing changes nothing. Each value is a hash of seed, step,
    document, position and channel: batches, ranks and resuming cannot change it. Padding gets none.

    Args:
        positions: ``[B, T]``, from 0 in each document.
        document_ids: ``[B, T]``; -1 is padding.
        step: the optimizer step, so that a document has other noise in each epoch.

    Source:
        Jain et al. 2023, arXiv:2310.05914, algorithm 1.
    """
    base = _mix64(torch.tensor(_signed(seed * 0x9E3779B97F4A7C15 + step), dtype=torch.int64, device=positions.device))
    token = _mix64(_mix64(base ^ document_ids) ^ positions)
    channels = torch.arange(1, width + 1, device=positions.device) * _signed(0x9E3779B97F4A7C15)
    bits = _mix64(token.unsqueeze(-1) + channels) >> 40 & 0xFFFFFF  # the upper 24 bits: what a float32 holds exactly
    uniform = bits.float() * 2.0**-23 - (1 - 2.0**-24)
    lengths = (document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)).sum(-1)
    size = alpha / (lengths * width).float().sqrt() * (document_ids >= 0)
    return uniform * size.unsqueeze(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype.itemsize >= 4 else logits.float()


def _signed(value: int) -> int:
    """The int64 with the same lowest 64 bits."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, whose products wrap; Steele, Lea & Flood 2014."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift & (1 << (64 - shift)) - 1)) * _signed(factor)
    return x ^ (x >> 31 & (1 << 33) - 1)
