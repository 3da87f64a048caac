"""What a mode will hold and send, from names and shapes alone: the same layouts that a run uses, before it runs.

W ranks, k micro-batches an optimizer step. Bytes are those of rank 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pellucid.errors import ConfigError
from pellucid.parallel.layout import MIB, Layout, ParameterInfo, group_by_size, replicated_layout, sharded_layouts
from pellucid.parallel.ledger import wire_bytes

SCALARS = {"tokens": 2, "loss": 1, "stop": 1}
"""Numbers in float64 that the Trainer sums over ranks in each step, by tag."""


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """The collectives of one tag in one step; bytes are those of all ``count`` together."""

    tag: str
    op: str
    count: int
    payload_bytes: int
    wire_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A bucket and the parameters inside."""

    tag: str
    payload_bytes: int
    parameters: tuple[ParameterInfo, ...]


@dataclass(frozen=True, slots=True)
class ModePlan:
    """One mode on W ranks, without activations."""

    mode: str
    world_size: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    padding_bytes: int
    """Bytes that the collectives of a step carry and that are no parameter's."""
    step: tuple[PlannedCollective, ...]
    buckets: tuple[PlannedBucket, ...] = field(default=())

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(row.wire_bytes for row in self.step)

    def to_json(self) -> dict[str, Any]:
        """As ``ledger/plan.json`` holds it."""
        rows = [{f: getattr(row, f) for f in PlannedCollective.__slots__} for row in self.step]
        buckets = [
            {
                "tag": bucket.tag,
                "payload_bytes": bucket.payload_bytes,
                "parameters": [
                    {"name": p.name, "shape": list(p.shape), "bytes": p.num_bytes} for p in bucket.parameters
                ],
            }
            for bucket in self.buckets
        ]
        return {
            "mode": self.mode, "world_size": self.world_size, "step": rows, "wire_bytes": self.wire_bytes, "buckets": buckets,
        }  # fmt: skip


def plan(
    parameters: Sequence[ParameterInfo],
    *,
    mode: str,
    world_size: int,
    micro_batches: int = 1,
    bucket_size_mb: float = 25,
    reduce_dtype: torch.dtype | None = None,
) -> ModePlan:
    """What rank 0 of ``world_size`` holds and sends in one ordinary step of the Trainer.

    Args:
        parameters: the trainable ones, in the model's order.
        micro_batches: forwards and backwards an optimizer step on each rank.
        reduce_dtype: as `DDP` has it.

    Raises:
        ConfigError: the mode has no plan: it is none of Pellucid's own.
    """
    if mode not in _PLANS:
        raise ConfigError(f"mode {mode!r} cannot be planned; known: {', '.join(_PLANS)}")
    if world_size == 1:
        mode = "none"
    return _PLANS[mode](list(parameters), world_size, micro_batches, int(bucket_size_mb * MIB), reduce_dtype)


def modes() -> list[str]:
    """Modes that `plan` knows."""
    return list(_PLANS)


def _none(
    infos: list[ParameterInfo], world_size: int, micro_batches: int, bucket_bytes: int, dtype: torch.dtype | None
) -> ModePlan:
    weights = sum(info.num_bytes for info in infos)
    return ModePlan("none", world_size, weights, weights, _state_bytes(infos), 0, ())


def _ddp(
    infos: list[ParameterInfo], world_size: int, micro_batches: int, bucket_bytes: int, dtype: torch.dtype | None
) -> ModePlan:
    layouts = _replicated(infos, bucket_bytes, dtype)
    rows = [_row(f"grad/bucket{b.index}", "all_reduce", b.num_bytes, b.dtype, world_size) for b in layouts]
    rows += _small(len(infos), world_size)
    weights = sum(info.num_bytes for info in infos)
    held = sum(b.num_bytes for b in layouts)
    held += sum(info.num_bytes for info in infos if dtype not in (None, info.dtype))  # .grad, beside the bucket
    return ModePlan("ddp", world_size, weights, held, _state_bytes(infos), 0, tuple(rows), _buckets(layouts))


def _torch_ddp(
    infos: list[ParameterInfo], world_size: int, micro_batches: int, bucket_bytes: int, dtype: torch.dtype | None
) -> ModePlan:
    """torch moves tensors between buckets after the first step: the bytes are known, their division is not quite."""
    layouts = _replicated(infos, bucket_bytes, None)
    weights = sum(info.num_bytes for info in infos)
    grads = _row("grad", "all_reduce", weights, infos[0].dtype, world_size, count=len(layouts))
    rows = [grads, *_small(0, world_size)]
    return ModePlan("torch_ddp", world_size, weights, weights, _state_bytes(infos), 0, tuple(rows), _buckets(layouts))


def _zero1(
    infos: list[ParameterInfo], world_size: int, micro_batches: int, bucket_bytes: int, dtype: torch.dtype | None
) -> ModePlan:
    layouts = sharded_layouts(infos, bucket_bytes, world_size)
    rows = [_row(f"grad/bucket{b.index}", "reduce_scatter", b.num_bytes, b.dtype, world_size) for b in layouts]
    rows += [_row(f"param/bucket{b.index}", "all_gather", b.num_bytes, b.dtype, world_size) for b in layouts]
    rows += [*_small(len(infos), world_size), _row("grad_norm", "all_reduce", 8, torch.float64, world_size)]
    weights = sum(info.num_bytes for info in infos)
    return ModePlan(
        "zero1",
        world_size,
        weights,
        sum(b.num_bytes for b in layouts),
        sum(_own_state_bytes(layout, world_size) for layout in layouts),
        2 * sum(b.padding_bytes for b in layouts),
        tuple(rows),
        _buckets(layouts),
    )


_Plan = Callable[[list[ParameterInfo], int, int, int, torch.dtype | None], ModePlan]
_PLANS: dict[str, _Plan] = {"none": _none, "ddp": _ddp, "zero1": _zero1, "torch_ddp": _torch_ddp}


def _replicated(infos: list[ParameterInfo], bucket_bytes: int, dtype: torch.dtype | None) -> list[Layout]:
    anywhere = [replace(info, elementwise=True) for info in infos]
    groups = group_by_size(anywhere, bucket_bytes, dtype=dtype)
    return [replicated_layout(i, group, dtype) for i, group in enumerate(groups)]


def _small(num_parameters: int, world_size: int) -> list[PlannedCollective]:
    """The scalars of a step, and which parameters have a gradient."""
    rows = [_row(tag, "all_reduce", 8 * n, torch.float64, world_size) for tag, n in SCALARS.items()]
    if num_parameters:
        rows.append(_row("used", "all_reduce", num_parameters, torch.uint8, world_size))
    return rows


def _row(tag: str, op: str, payload: int, dtype: torch.dtype, world_size: int, *, count: int = 1) -> PlannedCollective:
    sent = wire_bytes(op, payload, world_size)
    return PlannedCollective(tag, op, count, payload, sent, str(dtype).removeprefix("torch."))


def _buckets(layouts: list[Layout]) -> tuple[PlannedBucket, ...]:
    return tuple(
        PlannedBucket(f"grad/bucket{b.index}", b.num_bytes, tuple(slot.info for slot in b.slots)) for b in layouts
    )


def _state_bytes(infos: list[ParameterInfo]) -> int:
    return sum(info.state_tensors * info.num_bytes for info in infos)


def _own_state_bytes(layout: Layout, world_size: int) -> int:
    """What the owner of the first part keeps."""
    part = layout.numel // world_size
    owned = ((slot.info, min(slot.stop, part) - slot.offset) for slot in layout.slots if slot.offset < part)
    return sum(info.state_tensors * numel * info.dtype.itemsize for info, numel in owned)
