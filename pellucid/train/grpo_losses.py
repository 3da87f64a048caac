"""What GRPO is made of, as pure functions. Sums with weights, never means of means.

R answers, T tokens of a row, V vocabulary. Masks say which targets are of an answer; what stands elsewhere is never looked at.
"""

from typing import Literal

import torch
from torch import Tensor

Advantage = Literal["grpo", "dr_grpo"]
Denominator = Literal["sequence", "token", "constant"]

STD_EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards."""
MAX_LOG_RATIO = 20.0
"""Nats. Log-ratios are cut here, without gradient beyond, so that no exponential becomes infinite."""


def group_advantages(rewards: Tensor, group_ids: Tensor, *, variant: Advantage, epsilon: float = STD_EPSILON) -> Tensor:
    """How much better each answer is than the others of its group, ``[R]`` float32, without gradient.

    - "grpo": ``(r - mean) / (std + epsilon)`` with the sample standard deviation, of divisor n - 1.
    - "dr_grpo": ``r - mean``. Dividing by the deviation weighs groups that are nearly all right or all wrong more.

    Exactly 0 where all rewards of a group are equal, and so for a group of one. Computed in float64 from differences to the
    group's lowest reward, so that a constant added to all of them does not tell.

    Args:
        rewards: ``[R]``, finite.
        group_ids: ``[R]`` int64, answers of one prompt share one; in any order. Negative ones fill up and get 0.

    Source:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2; Liu et al. 2025, arXiv:2503.20783, section 3.2, for "dr_grpo".
    """
    _, group = group_ids.unique(return_inverse=True)
    wide = rewards.double()
    lowest = wide.new_full((len(wide),), torch.inf).scatter_reduce_(0, group, wide, "amin")[group]
    highest = wide.new_full((len(wide),), -torch.inf).scatter_reduce_(0, group, wide, "amax")[group]
    above, count = wide - lowest, _of_group(torch.ones_like(wide), group)
    centred = above - _of_group(above, group) / count
    if variant == "grpo":
        std = (_of_group(centred.square(), group) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + epsilon)
    return centred.where((highest > lowest) & (group_ids >= 0), 0.0).float()


def token_log_probs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """The log-probability in nats of each target at a temperature, ``[R, T]``, float32 or wider.

    At temperature 1 of the same logits it is the engine's own number to the bit.

    Args:
        logits: ``[R, T, V]``, any float type.
        targets: ``[R, T]`` int64.
    """
    wide = _tempered(logits, temperature)
    return wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(-1)


def token_entropies(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of the next-token distribution at a temperature, ``[R, T]``; no gradient."""
    log_probs = _tempered(logits.detach(), temperature).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def clipped_policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of each token, ``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)``.

    Args:
        log_probs: ``[R, T]``, with gradient.
        old: ``[R, T]``, under the policy that said the answers.
        advantages: ``[R]``, those of the whole answer.
        mask: ``[R, T]`` bool.

    Returns:
        ``[R, T]`` losses, 0 outside of the mask, and whether each is cut and has no gradient, bool.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025, arXiv:2503.14476, eq. 10, for two widths.
    """
    ratio = _log_ratio(log_probs, old, mask).exp()
    advantage = advantages.unsqueeze(-1).to(ratio.dtype)
    free, cut = ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return -torch.minimum(free, cut).where(mask, 0), (cut < free) & mask


def k3(log_probs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """``exp(d) - d - 1`` with d = reference - log_probs, ``[R, T]``, 0 outside of the mask: KL(policy || reference).

    Never negative; its mean over tokens drawn from the policy is the divergence. Its gradient is that of the estimate.

    Source:
        Schulman 2020, "Approximating KL divergence"; Shao et al. 2024, arXiv:2402.03300, eq. 4.
    """
    d = _log_ratio(reference, log_probs, mask)
    return (d.exp() - d - 1).where(mask, 0)


def sum_tokens(values: Tensor, mask: Tensor, denominator: Denominator, *, constant: int) -> Tensor:
    """Per-token values as one scalar to be divided by the step's answers, or with "token" by its answers' tokens.

    - "sequence": the mean over each answer, summed; an answer without tokens adds 0. Long answers weigh as much as short ones.
    - "token": the plain sum; each token weighs alike.
    - "constant": the sum over ``constant``, which no answer's length changes.

    Source:
        Shao et al. 2024, arXiv:2402.03300, eq. 3; Yu et al. 2025, arXiv:2503.14476, section 3.3, for "token"; Liu et al. 2025,
        arXiv:2503.20783, section 3.2 and appendix G, for "constant".
    """
    sums = values.where(mask, 0).sum(-1)
    if denominator == "sequence":
        sums = sums / mask.sum(-1).clamp(min=1)
    total = sums.sum()
    return total / constant if denominator == "constant" else total


def _of_group(values: Tensor, group: Tensor) -> Tensor:
    """The sum over each one's group, ``[R]``."""
    return torch.zeros_like(values).index_add_(0, group, values)[group]


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    return wide if temperature == 1 else wide / temperature


def _log_ratio(over: Tensor, under: Tensor, mask: Tensor) -> Tensor:
    """0 outside of the mask, where anything may stand."""
    return (over - under).where(mask, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
