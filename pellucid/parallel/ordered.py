"""Sums in one order, whatever the number of ranks: ``parallel.reduction = "ordered"``.

W ranks, k micro-batches a rank in a step, both powers of two. Micro-batch ``r k + i`` of a step is the i-th of rank r. Its
gradients are added in the binary tree over these numbers, ``((0 + 1) + (2 + 3)) + ...``: the lower log2(k) levels on each
rank while micro-batches come (`MicroBatchTree`), the upper log2(W) between ranks (`reduce_scatter`). A micro-batch that is
missing, at the end of an epoch, and one that a parameter has no part in, count as zero.

Adding zero changes no number but the sign of a zero, so a finished sum gets + 0.0, which leaves no negative zero.
"""

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.errors import ConfigError, TrainingError
from pellucid.parallel import comm
from pellucid.parallel.layout import ALIGNMENT
from pellucid.parallel.parts import Part

Reduction = Literal["sum", "ordered"]

ORDERED_MODES = ("none", "ddp", "zero1")
"""Modes whose sums can be ordered."""


def refuse_order(mode: str, reduce_dtype: Any, micro_batches: int, world_size: int) -> None:
    """`ConfigError` where sums of this mode cannot be ordered.

    Args:
        reduce_dtype: the mode's option, where it has it.
        micro_batches: of each rank in a step.
    """
    ordered = 'parallel.reduction "ordered"'
    if mode not in ORDERED_MODES:
        raise ConfigError(
            f"{ordered} works in modes {', '.join(ORDERED_MODES)}, and parallel.mode is {mode}; "
            'choose one of those, or parallel.reduction "sum"'
        )
    if reduce_dtype is not None:
        raise ConfigError(
            f'{ordered} adds gradients in their own type, and parallel.{mode}.reduce_dtype is {reduce_dtype}; set it to "none"'
        )
    if world_size.bit_count() != 1:
        raise ConfigError(
            f'{ordered} needs 1, 2, 4, 8, ... ranks, and there are {world_size}; change --nproc, or take parallel.reduction "sum"'
        )
    if micro_batches.bit_count() != 1:
        total = micro_batches * world_size
        raise ConfigError(
            f"{ordered} needs 1, 2, 4, 8, ... micro-batches a step, and train.global_batch / train.micro_batch is {total}; "
            f"change one of them so that it is {1 << total.bit_length() - 1} or {1 << total.bit_length()}"
        )


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """What torch's generator starts a forward with, so that dropout depends on nothing else.

    Args:
        seed: the run's.
        step: from 1.
        micro_batch: of the step, over all ranks, from 0.
    """
    text = f"dropout/{seed}/{step}/{micro_batch}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "little")  # as much as torch's CPU generator takes


class MicroBatchTree:
    """Adds up the gradients of a rank's micro-batches in the order of the tree, as a binary counter counts.

    Args:
        parameters: all of the model, trained or not, by name.

    Between micro-batches a parameter's ``.grad`` is None, and the sums of finished subtrees, at most log2(k) of them, are
    kept here. After the last one ``.grad`` is the sum of all. Hooks that come later see it so: make this before what else
    listens to gradients.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        every = list(parameters)
        for _, parameter in every:
            # in bytes; loaded weights may lie anywhere and experts lie together, and kernels are chosen by it
            if parameter.data_ptr() % 64 or parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()
        named = [(name, parameter) for name, parameter in every if parameter.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self._sums: list[dict[int, Tensor]] = [{} for _ in named]
        """Of each parameter, by level: a sum of 2 ** level micro-batches."""
        self._came = [False] * len(named)
        self._open, self._last = False, True
        self._level = 0
        """The subtree that the micro-batch under way completes; those below it are merged."""
        for i, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(i))

    @property
    def bytes_held(self) -> int:
        """Of gradients that wait for others."""
        return sum(total.nbytes for sums in self._sums for total in sums.values())

    @contextmanager
    def micro_batch(self, number: int, *, last: bool) -> Iterator[None]:
        """Around forward and backward of this rank's micro-batch ``number``, from 0."""
        if number == 0:
            for sums in self._sums:
                sums.clear()
        trailing_ones = (~number & (number + 1)).bit_length() - 1
        self._open, self._last, self._level = True, last, number.bit_length() if last else trailing_ones
        self._came = [False] * len(self._came)
        try:
            yield
            for i, came in enumerate(self._came):
                if not came and any(level < self._level for level in self._sums[i]):
                    self._parameters[i].grad = torch.zeros_like(self._parameters[i])
                    self._add(i)
        finally:
            self._open = False

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        owner = weakref.ref(self)  # the hook lives as long as the parameter

        def gradient_ready(parameter: Tensor) -> None:
            self = owner()
            if self is None:
                return
            if not self._open:
                raise TrainingError(
                    'parallel.reduction "ordered" counts micro-batches; run forward and backward of each inside '
                    "executor.accumulate(model)"
                )
            if self._came[i]:
                raise TrainingError(
                    f"the gradient of {self._names[i]} arrived twice in one micro-batch, which parallel.reduction "
                    '"ordered" cannot place; add the losses up and call backward once'
                )
            self._came[i] = True
            self._add(i)

        return gradient_ready

    def _add(self, i: int) -> None:
        """Put the gradient that has come where it belongs."""
        parameter, sums = self._parameters[i], self._sums[i]
        total = parameter.grad
        assert total is not None
        for level in sorted(sums):
            if level < self._level:
                total.add_(sums.pop(level))
        if self._last:
            total.add_(0.0)
        else:
            sums[self._level] = total
            parameter.grad = None


def reduce_scatter(
    full: Tensor, shard: Tensor, *, tag: str, owner: Sequence[str] = (), group: comm.Group = None
) -> comm.Pending:
    """As `comm.reduce_scatter`, by one all_to_all, and what ranks hold is added in the order of the tree."""
    received = torch.empty_like(full)

    def add_up() -> None:
        rows = list(received.view(comm.world_size(group), -1).unbind())
        while len(rows) > 1:
            rows = [left.add_(right) for left, right in zip(rows[::2], rows[1::2], strict=True)]
        torch.add(rows[0], 0.0, out=shard)

    return comm.all_to_all(full, received, tag=tag, owner=owner, group=group).then(add_up)


# -- the norm of gradients ----------------------------------------------------------------------------------

_SPLIT = 30
"""Bits of the lower half of a summand, so that the sums of 2 ** 33 halves fit into int64."""
_LOWEST = 1104
"""Below the exponent of every float64, and a multiple of 8."""
_NUM_BINS = (1024 + _LOWEST) // 8 + 1
NORM_SIZE = 2 * _NUM_BINS + 1
"""int64s that ranks sum for a norm."""
_BLOCK = 1 << 16
"""Elements squared at a time, for which caches are large enough; a multiple of 64."""


def global_norm(parts: Iterable[Part], *, sharded: bool) -> float:
    """The L2 norm of gradients, the same float however they are divided; nan if one is not finite.

    The squares of each 64 elements, counted from the start of their tensor, are added in float64 in a fixed order, and
    those sums exactly. Slices must therefore begin at multiples of 64, as those of zero1 do.

    Args:
        sharded: ``parts`` are this rank's; sum over all ranks.
    """
    table = torch.zeros(NORM_SIZE, dtype=torch.int64)
    for part in parts:
        assert part.start % ALIGNMENT == 0, part
        _count(torch.cat([_squares(block) for block in part.tensor.reshape(-1).split(_BLOCK)]), table)
    if sharded:
        comm.all_reduce_(table, tag="grad_norm").wait()
    low, high, (not_finite,) = (half.tolist() for half in table.split([_NUM_BINS, _NUM_BINS, 1]))
    if not_finite:
        return math.nan
    total = sum((b << _SPLIT) + a << 8 * i for i, (a, b) in enumerate(zip(low, high, strict=True)))
    return math.sqrt(total / (1 << _LOWEST + 53))  # of whole numbers, rounded once


def _squares(block: Tensor) -> Tensor:
    """Sums of the squares of 64 elements each, float64; pairs are added, then pairs of pairs."""
    wide = F.pad(block.double(), (0, -block.numel() % ALIGNMENT)).square_().view(-1, ALIGNMENT)
    while wide.shape[1] > 1:
        half = wide.shape[1] // 2
        wide = wide[:, :half] + wide[:, half:]
    return wide.view(-1)


def _count(sums: Tensor, table: Tensor) -> None:
    """Add numbers to a table of whole ones: bin i counts units of 2 ** (8 i - `_LOWEST` - 53)."""
    finite = torch.isfinite(sums)
    table[-1] += int((~finite).sum())
    mantissa, exponent = torch.frexp(sums.where(finite, 0.0))
    exponent = exponent.to(torch.int64) + _LOWEST
    units = (mantissa * 2.0**53).to(torch.int64) << (exponent & 7)
    low, high = table[:_NUM_BINS], table[_NUM_BINS : 2 * _NUM_BINS]
    low.index_add_(0, exponent >> 3, units & (1 << _SPLIT) - 1)
    high.index_add_(0, exponent >> 3, units >> _SPLIT)
