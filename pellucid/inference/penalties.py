"""What requests change about logits before one is drawn: biases, penalties, processors, and what may not be drawn.

Shapes: R rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pellucid.errors import RequestError
from pellucid.inference.request import LogitsProcessor, Row

_Ids = npt.NDArray[np.int64]
_FLOAT32 = torch.finfo(torch.float32)


def adjust(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, dict[int, str]]:
    """The logits that rows are drawn from, in the order that `SamplingParams` tells.

    Args:
        logits: [R, V] float32; not changed. Every row has a finite maximum.

    Returns:
        [R, V], ``logits`` itself where no row asks for anything; and for each row that cannot be drawn what its processor
        or constraint did, that row being as it came.
    """
    if not any(map(_asks, rows)):
        return logits, {}
    work = logits.clone()
    _add_biases(work, rows)
    _penalise(work, rows)
    errors: dict[int, str] = {}
    forbidden = torch.zeros(work.shape, dtype=torch.bool, device=work.device)
    for i, row in enumerate(rows):
        try:
            if row.params.logits_processors:
                work[i] = _process(work[i], row)
            _forbid(forbidden[i], row)
        except RequestError as error:
            errors[i] = str(error)
    work.masked_fill_(forbidden, -math.inf)
    _forbid_early_stops(work, rows)
    for i in (work.amax(dim=-1) == -math.inf).nonzero()[:, 0].tolist():
        errors.setdefault(i, "the logits of all tokens that may be drawn here are -inf")
    for i in errors:
        work[i] = logits[i]
    return work, errors


def _asks(row: Row) -> bool:
    p = row.params
    return bool(
        p.logit_bias or _penalises(row) or p.logits_processors or p.allowed_ids or p.constraint or _may_not_stop(row)
    )


def _penalises(row: Row) -> bool:
    p = row.params
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


def _may_not_stop(row: Row) -> bool:
    return bool(row.params.stop_ids) and len(row.output) < row.params.min_tokens


def _add_biases(work: Tensor, rows: Sequence[Row]) -> None:
    at: list[_Ids] = []
    values: list[npt.NDArray[np.float32]] = []
    for i, row in enumerate(rows):
        if bias := row.params.logit_bias:
            at.append(_flat(i, np.fromiter(bias, np.int64, len(bias)), work))
            values.append(np.fromiter(bias.values(), np.float32, len(bias)))
    if at:
        flat, index = work.view(-1), torch.from_numpy(np.concatenate(at)).to(work.device)
        flat[index] += torch.from_numpy(np.concatenate(values)).to(work.device)


def _penalise(work: Tensor, rows: Sequence[Row]) -> None:
    at: list[_Ids] = []
    factors: list[npt.NDArray[np.float32]] = []
    amounts: list[npt.NDArray[np.float32]] = []
    for i, row in enumerate(rows):
        if not _penalises(row):
            continue
        p = row.params
        ids, counts = _occurrences(row)
        at.append(_flat(i, ids, work))
        factors.append(np.full(len(ids), min(max(p.repetition_penalty, _FLOAT32.tiny), _FLOAT32.max), np.float32))
        amounts.append((p.frequency_penalty * counts + p.presence_penalty * (counts > 0)).astype(np.float32))
    if at:
        flat, index = work.view(-1), torch.from_numpy(np.concatenate(at)).to(work.device)
        factor = torch.from_numpy(np.concatenate(factors)).to(work.device)
        amount = torch.from_numpy(np.concatenate(amounts)).to(work.device)
        old = flat[index]
        # a tiny factor must not make +inf, of which nothing could be drawn
        flat[index] = torch.where(old > 0, old / factor, old * factor).clamp_(max=_FLOAT32.max) - amount


def _occurrences(row: Row) -> tuple[_Ids, _Ids]:
    """The distinct ids that a row's penalties are about, and how often each is in the output."""
    output = np.asarray(row.output, dtype=np.int64)
    if row.params.repetition_penalty == 1:
        ids, counts = np.unique(output, return_counts=True)
        return ids, counts
    prompt = np.asarray(row.prompt, dtype=np.int64)
    ids, inverse = np.unique(np.concatenate([output, prompt]), return_inverse=True)
    return ids, np.bincount(inverse[: len(output)], minlength=len(ids))


def _flat(row: int, ids: _Ids, work: Tensor) -> _Ids:
    """Where a row's ids stand in the flattened logits."""
    assert not len(ids) or (ids.min() >= 0 and ids.max() < work.shape[1]), "check_request lets no such id in"
    return ids + row * work.shape[1]


def _process(logits: Tensor, row: Row) -> Tensor:
    for processor in row.params.logits_processors:
        ids = [*row.prompt, *row.output]
        name = getattr(processor, "__name__", type(processor).__name__)
        logits = _checked(_call(processor, ids, logits, name), logits, name)
    return logits


def _call(processor: LogitsProcessor, ids: list[int], logits: Tensor, name: str) -> object:
    try:
        return processor(ids, logits)
    except Exception as error:  # foreign code: whatever it does is this request's affair alone
        raise RequestError(f"the logits processor {name} raised {type(error).__name__}: {error}") from error


def _checked(new: object, old: Tensor, name: str) -> Tensor:
    who = f"the logits processor {name} returned"
    wanted = f"it must return {old.dtype} of shape {list(old.shape)}"
    if not isinstance(new, Tensor):
        raise RequestError(f"{who} {type(new).__name__}; {wanted}")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise RequestError(f"{who} {new.dtype} of shape {list(new.shape)}; {wanted}")
    if not math.isfinite(float(new.amax())):  # a NaN anywhere is the maximum
        raise RequestError(f"{who} NaN, +inf or nothing but -inf")
    return new.to(old.device)


def _forbid(forbidden: Tensor, row: Row) -> None:
    """Mark in ``forbidden`` [V], all False, what allowed_ids or the constraint leave out."""
    p = row.params
    if p.allowed_ids is not None:
        forbidden.fill_(True)
        forbidden[_index(p.allowed_ids, forbidden)] = False
    if p.constraint is not None:
        assert row.constraint is not None, "a request with a constraint has a state of it"
        mask = row.constraint.mask()
        forbidden[: len(mask)] = ~mask.to(forbidden.device)
        forbidden[len(mask) :] = True
        if p.stop_ids:
            forbidden[_index(p.stop_ids, forbidden)] = not row.constraint.may_end


def _forbid_early_stops(work: Tensor, rows: Sequence[Row]) -> None:
    """Stop ids to -inf in rows that have not drawn min_tokens, except where nothing would be left."""
    early = [i for i, row in enumerate(rows) if _may_not_stop(row)]
    if not early:
        return
    ids = [np.asarray(rows[i].params.stop_ids, dtype=np.int64) for i in early]
    flat, index = (
        work.view(-1),
        [torch.from_numpy(_flat(i, x, work)).to(work.device) for i, x in zip(early, ids, strict=True)],
    )
    old = [flat[at] for at in index]
    flat[torch.cat(index)] = -math.inf
    left = (work[torch.tensor(early, device=work.device)].amax(dim=-1) > -math.inf).tolist()
    for at, values, some in zip(index, old, left, strict=True):
        if not some:
            flat[at] = values


def _index(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)
