"""Losses as pure functions. Sums with weights, never means of means.

B sequences, T tokens, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def cross_entropy_sum(logits: Tensor, targets: Tensor, loss_mask: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Summed next-token loss in nats over the supervised positions; zero, with zero gradient, where there are none.

    Args:
        logits: ``[B, T, V]``, any float type; the softmax is computed in float32 or wider.
        targets: ``[B, T]`` int64.
        loss_mask: ``[B, T]`` bool, the supervised positions.
        label_smoothing: share of the target mass spread evenly over the vocabulary, in [0, 1).

    Source:
        Szegedy et al. 2016, arXiv:1512.00567, section 7, for label smoothing.
    """
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    labels = targets.masked_fill(~loss_mask, IGNORED)
    return F.cross_entropy(
        wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
