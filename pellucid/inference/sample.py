"""Draw the next token of each row. A row's draw depends on its own logits, parameters and place, never on its neighbours.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pellucid.inference.request import SamplingParams


class Sampled(NamedTuple):
    """The drawn ids [R], their logprobs [R] (nats; temperature 1, unfiltered), and which rows had finite logits [R]."""

    tokens: Tensor
    logprobs: Tensor
    ok: Tensor


def sample(logits: Tensor, params: Sequence[SamplingParams], noise: Tensor) -> Sampled:
    """One token a row.

    Args:
        logits: [R, V], any floating dtype.
        params: of each row.
        noise: [R] float64 in [0, 1), from `uniform`; greedy rows ignore theirs.

    Returns:
        Rows that are not ``ok`` (a NaN, +inf, or nothing but -inf among the logits) carry token 0 and logprob NaN.
    """
    logits = logits.float()
    if logits.device.type == "mps":  # no float64 there
        logits = logits.cpu()
    norm = logits.logsumexp(dim=-1)
    ok = norm.isfinite()
    tokens = logits.argmax(dim=-1)  # the first of equal maxima
    warm = [i for i, p in enumerate(params) if p.temperature > 0]
    if warm:
        rows = torch.tensor(warm, device=logits.device)
        drawn = _draw(logits[rows], [params[i] for i in warm], noise.to(logits.device)[rows])
        tokens = tokens.index_copy(0, rows, drawn)
    tokens = torch.where(ok, tokens, 0)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - norm
    return Sampled(tokens, logprobs.where(ok, torch.nan), ok)


def _draw(logits: Tensor, params: Sequence[SamplingParams], noise: Tensor) -> Tensor:
    """Invert the cumulative distribution over ids in ascending order, in float64, at ``noise``; [R]."""
    probs = filtered_probs(logits, params)
    cumulative = probs.cumsum(dim=-1)
    target = noise[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # rounding may push the target onto the total; the last id with any mass is then meant
    ids = torch.arange(probs.shape[-1], device=probs.device)
    return torch.minimum(drawn, torch.where(probs > 0, ids, 0).amax(dim=-1))


def filtered_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that rows are drawn from, [R, V] float64: temperature, then top-k, then top-p.

    ``temperature`` must be positive. Ids of equal logits are kept in ascending order.
    """
    scaled = logits.double()
    temperature = scaled.new_tensor([[p.temperature] for p in params])
    # subtracting the maximum first keeps tiny temperatures finite
    probs = ((scaled - scaled.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    if all(p.top_k == 0 and p.top_p == 1 for p in params):
        return probs
    vocabulary = logits.shape[-1]
    top_k = torch.tensor([[p.top_k or vocabulary] for p in params], device=logits.device)
    # 2 switches top-p off, whatever rounding does
    top_p = scaled.new_tensor([[p.top_p if p.top_p < 1 else 2.0] for p in params])
    order = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = probs.gather(1, order)
    rank = torch.arange(vocabulary, device=logits.device)
    ranked = ranked.where(rank < top_k, 0.0)
    before = ranked.cumsum(dim=-1) - ranked  # the mass of the tokens ahead of this one
    ranked = ranked.where((before < top_p * ranked.sum(dim=-1, keepdim=True)) | (rank == 0), 0.0)
    return torch.zeros_like(probs).scatter(1, order, ranked)


def uniform(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Noise in [0, 1) for each row, [R] float64: a pure function of (seed, sample, position).

    The seed is the key and (position, sample) the counter of one Philox-4x32-10 block, of which 53 bits are used.
    """
    seed, at = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(at)
    counter = np.stack([at & _LOW, at >> _32, np.array(samples, dtype=np.uint64), zero])
    block = philox(counter, np.stack([seed & _LOW, seed >> _32]))
    return torch.from_numpy(((block[0] << _32 | block[1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_Words = npt.NDArray[np.uint64]


def philox(counter: _Words, key: _Words) -> _Words:
    """Philox-4x32-10: ``counter`` [4, R] and ``key`` [2, R] of 32-bit words (held in uint64) to four random words [4, R].

    Source:
        Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> _32) ^ c1 ^ k0, right & _LOW, (left >> _32) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return np.stack([c0, c1, c2, c3])
