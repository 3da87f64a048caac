"""Draw the next token of each row. A row's draw depends on its own logits, parameters and place, never on its neighbours.

The whole vocabulary is sorted only where a prefix of the largest logits cannot decide; results are the same, to the bit.

Shapes: R rows, V vocabulary, K ranks.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pellucid.inference.penalties import adjust
from pellucid.inference.request import Alternatives, Row, SamplingParams, TokenLogprob


class Sampled(NamedTuple):
    """What was drawn. Logprobs (nats) are the model's own: temperature 1, no filter, penalty, bias or mask."""

    tokens: Tensor
    """[R] int64; 0 where not ok."""
    logprobs: Tensor
    """[R] float32; NaN where not ok."""
    ok: Tensor
    """[R] bool."""
    top: list[Alternatives]
    """Of the rows that ask for them; ids of probability 0 are left out."""
    errors: list[str | None]
    """Why a row is not ok."""


NOT_FINITE = "the model's logits are not finite (a NaN, +inf, or nothing but -inf)"


def sample(logits: Tensor, rows: Sequence[Row]) -> Sampled:
    """One token a row.

    Args:
        logits: [R, V], any floating dtype; not changed.

    Returns:
        On the device of ``logits`` (the CPU for mps). A row whose logits, processors or constraint do not allow a draw is not
        ok, and the others are not affected.
    """
    logits = _workable(logits)
    norm = _norm(logits)
    errors: list[str | None] = [None if fine else NOT_FINITE for fine in norm.isfinite().tolist()]
    adjusted = _adjust(logits, rows, errors)
    warm = [i for i, row in enumerate(rows) if not row.params.greedy and errors[i] is None]
    if len(warm) < len(rows):
        tokens = adjusted.argmax(dim=-1)  # the first of equal maxima
    else:
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    if warm:
        index = torch.tensor(warm, device=logits.device)
        chosen = [rows[i] for i in warm]
        noise = uniform([r.seed for r in chosen], [r.choice for r in chosen], [r.position for r in chosen])
        part = adjusted if len(warm) == len(rows) else adjusted[index]
        drawn = draw(part, [r.params for r in chosen], noise.to(logits.device))
        tokens = tokens.index_copy(0, index, drawn)
    ok = torch.tensor([error is None for error in errors], dtype=torch.bool, device=logits.device)
    tokens = torch.where(ok, tokens, 0)
    logprobs = (logits.gather(1, tokens[:, None])[:, 0] - norm).where(ok, torch.nan)
    counts = [row.params.top_logprobs if error is None else 0 for row, error in zip(rows, errors, strict=True)]
    return Sampled(tokens, logprobs, ok, _alternatives(logits, norm, tokens, counts), errors)


def prompt_logprobs(logits: Tensor, ids: Sequence[int], top: int = 0) -> list[TokenLogprob]:
    """What the model thought of tokens that it was given.

    Args:
        logits: [T, V], any floating dtype, after each of T tokens.
        ids: the T tokens that came next.
        top: alternatives of each.
    """
    if not len(ids):
        return []
    logits = _workable(logits)
    norm, given = _norm(logits), torch.tensor(ids, device=logits.device)
    logprobs = (logits.gather(1, given[:, None])[:, 0] - norm).tolist()
    alternatives = _alternatives(logits, norm, given, [top] * len(ids))
    return [TokenLogprob(*pair) for pair in zip(logprobs, alternatives, strict=True)]


def _workable(logits: Tensor) -> Tensor:
    logits = logits.float()
    return logits.cpu() if logits.device.type == "mps" else logits  # no float64 there


def _norm(logits: Tensor) -> Tensor:
    """``logsumexp`` of each row, [R]; not finite exactly where a row has a NaN, +inf, or nothing but -inf."""
    if len(logits) > 1:
        return logits.logsumexp(dim=-1)
    # torch sums up a single row in as many parts as there are threads, several rows one by one
    return torch.cat([logits, logits]).logsumexp(dim=-1)[:1]


def _adjust(logits: Tensor, rows: Sequence[Row], errors: list[str | None]) -> Tensor:
    """What rows without an error are drawn from, [R, V]; puts the errors of processors and constraints into ``errors``."""
    good = [i for i, error in enumerate(errors) if error is None]
    if len(good) == len(rows):
        adjusted, found = adjust(logits, rows)
    else:
        index = torch.tensor(good, dtype=torch.int64, device=logits.device)
        part, found = adjust(logits[index], [rows[i] for i in good])
        adjusted = logits.index_copy(0, index, part)
    for at, message in found.items():
        errors[good[at]] = message
    return adjusted


# -- the most probable ids ------------------------------------------------------------------------------------------


def _ranked(scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ids of the ``width`` largest scores, largest first, of equal ones the lowest id first.

    Returns:
        scores, ids and whether that rank is certain, each [R, K]. Among scores equal to the last one, others with lower
        ids may have been left out; ranks of -inf are never certain.
    """
    values, ids = scores.topk(width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_value), values > values[:, -1:]


_TOP_WIDTH = 64
"""Ranks among which alternatives are looked for; more than those asked for, so that a tie rarely needs a sort."""


def _alternatives(logits: Tensor, norm: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[Alternatives]:
    """The ``counts`` most probable ids of each row with their logprobs, and its token with its own."""
    asking = [i for i, count in enumerate(counts) if count]
    told: list[Alternatives] = [()] * len(counts)
    if not asking:
        return told
    index = torch.tensor(asking, device=logits.device)
    scores, norm, tokens = logits[index], norm[index], tokens[index]
    values, ids = _largest(scores, min(max(counts), scores.shape[1]))
    told_of_tokens = (scores.gather(1, tokens[:, None])[:, 0] - norm).tolist()
    columns = (ids.tolist(), (values - norm[:, None]).tolist(), tokens.tolist(), told_of_tokens)
    for i, row_ids, logprobs, token, logprob in zip(asking, *columns, strict=True):
        ranked = list(zip(row_ids, logprobs, strict=True))[: counts[i]]
        top = [(id_, value) for id_, value in ranked if value > -math.inf]
        told[i] = tuple(top if token in (id_ for id_, _ in top) else [*top, (token, logprob)])
    return told


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest scores of each row and their ids, [R, count]; of equal ones the lowest ids first."""
    values, ids, certain = _ranked(scores, min(_TOP_WIDTH, scores.shape[1]))
    values, ids, certain = values[:, :count], ids[:, :count], certain[:, :count]
    unsure = (~certain & (values > -math.inf)).any(dim=-1).nonzero()[:, 0]
    if len(unsure):
        whole = scores[unsure].sort(dim=-1, descending=True, stable=True)
        values = values.index_copy(0, unsure, whole.values[:, :count])
        ids = ids.index_copy(0, unsure, whole.indices[:, :count])
    return values, ids


# -- drawing --------------------------------------------------------------------------------------------------------

_WIDTH = 256
"""Ranks that a top_p alone is first looked for in."""
_WIDER = 16
"""By how much more where those do not hold its mass."""
_WORTH_IT = 8
"""A prefix of more than this part of the vocabulary is no cheaper than sorting all of it."""


def draw(logits: Tensor, params: Sequence[SamplingParams], noise: Tensor) -> Tensor:
    """One id a row, [R]: the filtered cumulative distribution over ids in ascending order, inverted at ``noise`` in float64.

    Args:
        logits: [R, V] float32, each row with a finite maximum.
        params: of each row; ``temperature`` must be positive.
        noise: [R] float64 in [0, 1), from `uniform`.
    """
    tokens = torch.zeros(len(params), dtype=torch.int64, device=logits.device)
    waiting: dict[int, list[int]] = {}  # rows by the width of the prefix that is tried next
    for i, p in enumerate(params):
        waiting.setdefault(_first_width(p, logits.shape[1]), []).append(i)
    while waiting:
        width = min(waiting)
        rows = waiting.pop(width)
        index = torch.tensor(rows, device=logits.device)
        part = logits if len(rows) == len(params) else logits[index]
        chosen = [params[i] for i in rows]
        if width == 0:
            tokens[index] = _invert(_filtered(part, chosen), noise[index])
            continue
        drawn, decided = _draw_from_prefix(part, chosen, noise[index], width)
        tokens[index] = drawn  # undecided rows get theirs later
        undecided = [i for i, done in zip(rows, decided.tolist(), strict=True) if not done]
        if undecided:
            waiting.setdefault(_fitting(width * _WIDER, logits.shape[1]), []).extend(undecided)
    return tokens


def filtered_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that rows are drawn from, [R, V] float64: temperature, then top-k, top-p and min-p.

    ``temperature`` must be positive. Of ids of equal logits the lowest are kept.
    """
    weights = _filtered(logits.float(), params)
    return weights / weights.sum(dim=-1, keepdim=True)


def _first_width(p: SamplingParams, vocabulary: int) -> int:
    """How many ranks to begin with; 0: all of the vocabulary is looked at."""
    if p.top_k == 0 and p.top_p == 1:
        return 0
    # twice the ranks wanted, so that a tie at the cut is likely seen whole; a power of two, so that rows share it
    return _fitting(_WIDTH if p.top_k == 0 else 2 << (p.top_k - 1).bit_length(), vocabulary)


def _fitting(width: int, vocabulary: int) -> int:
    return width if width * _WORTH_IT <= vocabulary else 0


def _weights(logits: Tensor, top: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities at each row's temperature, times a constant so that the most probable id has 1; float64."""
    weights = logits.double()
    temperature = weights.new_tensor([[p.temperature] for p in params])
    # subtracting the maximum first keeps tiny temperatures finite; in place: these are the large tensors
    return weights.sub_(top).div_(temperature).exp_()


def _filtered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The weights that are kept, 0 for the others, [R, V]; sorts the whole vocabulary of rows with top_k or top_p."""
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), params)
    ranking = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1]
    if ranking:
        index = torch.tensor(ranking, device=logits.device)
        order = logits[index].argsort(dim=-1, descending=True, stable=True)
        ranked = weights[index].gather(1, order)
        kept = _kept(ranked, weights[index].cumsum(dim=-1)[:, -1:], [params[i] for i in ranking])
        weights[index] = torch.zeros_like(ranked).scatter_(1, order, ranked.where(kept, 0.0))
    if any(p.min_p for p in params):
        least = weights.new_tensor([[p.min_p] for p in params])
        weights.masked_fill_(weights < least, 0.0)
    return weights


def _kept(ranked: Tensor, total: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which of the largest weights [R, K] pass top-k, top-p and min-p.

    ``total``: the weight of the whole vocabulary, [R, 1]; needed by rows with top-p and without top-k, which K holds all of.
    """
    device, width = ranked.device, ranked.shape[1]
    top_k = torch.tensor([[min(p.top_k or width, width)] for p in params], device=device)
    limited = torch.tensor([[p.top_k > 0] for p in params], device=device)
    # 2 switches top-p off, whatever rounding does
    top_p = ranked.new_tensor([[p.top_p if p.top_p < 1 else 2.0] for p in params])
    min_p = ranked.new_tensor([[p.min_p] for p in params])
    rank = torch.arange(width, device=device)
    ranked = ranked.where(rank < top_k, 0.0)
    mass = ranked.cumsum(dim=-1)  # in order, so that a longer prefix begins with the same sums
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))  # of the ids ahead of this one
    total = torch.where(limited, mass[:, -1:], total)
    return ((before < top_p * total) | (rank == 0)) & (ranked >= min_p) & (ranked > 0)


def _draw_from_prefix(
    logits: Tensor, params: Sequence[SamplingParams], noise: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """`draw` from the ``width`` largest logits, at least top_k; and which rows these decide, [R] each."""
    values, ids, certain = _ranked(logits, width)
    top = values[:, :1]
    total = torch.zeros_like(top, dtype=torch.float64)
    whole = [i for i, p in enumerate(params) if p.top_k == 0]
    if whole:
        index = torch.tensor(whole, device=logits.device)
        part = logits if len(whole) == len(params) else logits[index]
        # the last cumulative sum, not a sum: those of one row and of many are added up differently
        mass = _weights(part, top[index], [params[i] for i in whole]).cumsum_(dim=-1)
        total[index] = mass[:, -1:]
    ranked = _weights(values, top, params)
    kept = _kept(ranked, total, params)
    decided = (certain | ~kept).all(dim=-1)  # the last rank is never certain: what goes on beyond it is not decided
    ids, by_id = ids.sort(dim=-1)
    at = _invert(ranked.where(kept, 0.0).gather(1, by_id), noise)
    return ids.gather(1, at[:, None])[:, 0], decided


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """Where the cumulative ``weights`` [R, K], which are overwritten, reach the share ``noise`` [R] of their sum, [R]."""
    cumulative = weights.cumsum_(dim=-1)
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, noise[:, None] * total, right=True)[:, 0]
    # rounding may push the target onto the total; the last id with any mass is then meant
    last = torch.searchsorted(cumulative, total)[:, 0]
    return torch.minimum(drawn, last)


# -- noise ----------------------------------------------------------------------------------------------------------


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
