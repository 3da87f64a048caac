"""What a mode will hold and send, from names and shapes alone: the same layouts that a run uses, before it runs.

W ranks, k micro-batches an optimizer step. Bytes are those of rank 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from pellucid.errors import ConfigError
from pellucid.parallel.layout import (
    CHUNK_BYTES,
    MIB,
    Layout,
    ParameterInfo,
    assign_whole,
    group_by_size,
    replicated_layout,
    rows_each,
    sharded_layouts,
)
from pellucid.parallel.ledger import wire_bytes
from pellucid.parallel.ordered import NORM_SIZE, Reduction, refuse_order
from pellucid.parallel.whole import part_numel, section_numel

SCALARS = {"tokens": 2, "loss": 1, "stop": 2}
"""Numbers in float64 that the Trainer sums over ranks in each step, by tag."""
ROUTER_SUMS = 2
"""Those of "router" beside the tokens of each expert: the balancing loss and the entropy."""


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
class Message:
    """What every rank tells all others, as `comm.all_gather_bytes` sends it."""

    tag: str
    max_bytes: int | None
    """Of one rank; None where nobody knows before."""
    exact: bool
    """It is always so many bytes; otherwise at most."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What ranks tell each other at the beginning of every ``every``-th step."""

    every: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """The collectives of one tag in one rollout."""

    tag: str
    op: str
    count: int
    payload_bytes: int | None
    """All ``count`` together, exactly or at most; None where nobody knows before."""
    wire_bytes: int | None
    dtype: str
    exact: bool


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
    scratch_bytes: int = 0
    """The most that is there beside these for a while: buffers of what is gathered and reduced."""
    rollout: tuple[PlannedMessage, ...] = ()
    """Beside ``step``, in every ``rollout_every``-th step from the first."""
    rollout_every: int = 1

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in a step, without a rollout's."""
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
        } | self.rollout_json()  # fmt: skip

    def rollout_json(self) -> dict[str, Any]:
        """The key "rollout", where there is one."""
        if not self.rollout:
            return {}
        return {"rollout": {"every": self.rollout_every, "rows": [asdict(row) for row in self.rollout]}}


def plan(
    parameters: Sequence[ParameterInfo],
    *,
    mode: str,
    world_size: int,
    micro_batches: int = 1,
    bucket_size_mb: float = 25,
    reduce_dtype: torch.dtype | None = None,
    reduction: Reduction = "sum",
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    expert_layers: int = 0,
    experts: int = 0,
    metrics: int = 0,
    counts_supervised: bool = False,
    reference: Sequence[ParameterInfo] | Literal["own"] | None = None,
    averages_weights: bool = False,
    rollout: Rollout | None = None,
) -> ModePlan:
    """What rank 0 of ``world_size`` holds and sends in one ordinary step of the Trainer.

    Args:
        parameters: in the model's order, frozen ones too.
        micro_batches: forwards and backwards an optimizer step on each rank.
        reduce_dtype: as `DDP` has it.
        reduction: as `create_executor` has it.
        compute_dtype, reshard_after_forward: as the options of zero3 and fsdp2 have them.
        expert_layers, experts: layers with a mixture of experts, and the experts of each.
        metrics: numbers that are summed along with the loss.
        counts_supervised: whether supervised tokens are counted beside what the loss weighs.
        reference: the parameters of a frozen model that also has a forward in each micro-batch, held as the mode holds
            weights; "own": it is the model itself, below an adapter.
        averages_weights: whether a moving average of what is trained stands beside the optimizer's state.
        rollout: what ranks tell each other before they learn from it.

    Raises:
        ConfigError: the mode has no plan: it is none of Pellucid's own; or its sums cannot be ordered and should be.
    """
    if mode not in modes():
        raise ConfigError(f"mode {mode!r} cannot be planned; known: {', '.join(modes())}")
    if reduction == "ordered":
        refuse_order(mode, reduce_dtype, micro_batches, world_size)
    if world_size == 1:
        mode = "none"
    if mode in ("zero3", "fsdp2"):
        rows = _by_rows(mode, list(parameters), world_size, micro_batches, compute_dtype, reshard_after_forward)
        rows = _with_reference(rows, mode, parameters, reference, micro_batches, compute_dtype)
        if averages_weights:  # of the rows that have gradients
            rows = replace(rows, optimizer_bytes=rows.optimizer_bytes + rows.gradients_bytes)
        return _with_rollout(_with_sums(rows, expert_layers, experts, metrics, counts_supervised), rollout)
    trainable = [info for info in parameters if info.trainable]
    planned = _PLANS[mode](trainable, world_size, micro_batches, int(bucket_size_mb * MIB), reduce_dtype)
    frozen = sum(info.num_bytes for info in parameters if not info.trainable)
    planned = replace(planned, weights_bytes=planned.weights_bytes + frozen)
    planned = planned if reduction == "sum" else _ordered(planned, micro_batches)
    if reference is not None and reference != "own":
        beside = sum(info.num_bytes for info in reference)
        planned = replace(planned, weights_bytes=planned.weights_bytes + beside)
    if averages_weights:
        averages = sum(info.num_bytes for info in trainable)
        planned = replace(planned, optimizer_bytes=planned.optimizer_bytes + averages)
    return _with_rollout(_with_sums(planned, expert_layers, experts, metrics, counts_supervised), rollout)


def modes() -> list[str]:
    """Modes that `plan` knows."""
    return [*_PLANS, "zero3", "fsdp2"]


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


def _with_reference(
    planned: ModePlan,
    mode: str,
    parameters: Sequence[ParameterInfo],
    reference: Sequence[ParameterInfo] | Literal["own"] | None,
    micro_batches: int,
    dtype: torch.dtype | None,
) -> ModePlan:
    """A frozen model that is gathered for a forward in each micro-batch: rows of its own, or more of the model's."""
    if reference is None:
        return planned
    infos, tag = (parameters, "param") if reference == "own" else (reference, "reference")
    cut = [info for info in infos if mode == "fsdp2" or len(info.shape) > 1]
    rows, padding, size = {row.tag: row for row in planned.step}, planned.padding_bytes, planned.world_size
    for path in dict.fromkeys(info.unit or "root" for info in cut):
        members = [info for info in cut if (info.unit or "root") == path]
        gathered, spare = _sections(members, size, dtype)
        name = f"{tag}/{path}/forward" if mode == "zero3" else f"{tag}/{path}"
        count, payload = micro_batches, micro_batches * gathered
        if name in rows:
            count, payload = count + rows[name].count, payload + rows[name].payload_bytes
        rows[name] = _row(name, "all_gather", payload, dtype or members[0].dtype, size, count=count)
        padding += micro_batches * spare
    held = (
        0
        if reference == "own"
        else sum(_held(info, size).num_bytes if info in cut else info.num_bytes for info in infos)
    )
    return replace(
        planned, step=tuple(rows.values()), padding_bytes=padding, weights_bytes=planned.weights_bytes + held
    )


def _with_sums(planned: ModePlan, layers: int, experts: int, metrics: int, counts_supervised: bool) -> ModePlan:
    """What is summed beside tokens and loss: metrics, and of a model with experts sequences and who got how many tokens."""
    if not planned.step:
        return planned
    counts = SCALARS["tokens"] + (layers > 0) + counts_supervised
    rows: list[PlannedCollective] = []
    for row in planned.step:
        if row.tag == "tokens":
            row = _row("tokens", "all_reduce", 8 * counts, torch.float64, planned.world_size)
        elif row.tag == "loss":
            row = _row("loss", "all_reduce", row.payload_bytes * (1 + metrics), torch.float64, planned.world_size)
        rows.append(row)
        if row.tag == "loss" and layers:
            numbers = layers * experts + ROUTER_SUMS
            rows.append(_row("router", "all_reduce", 8 * numbers, torch.float64, planned.world_size))
    return replace(planned, step=tuple(rows))


def _with_rollout(planned: ModePlan, rollout: Rollout | None) -> ModePlan:
    """Each message is two gathers: of how long each rank's is, and of all of them, filled up to the longest."""
    if rollout is None or not planned.step:
        return planned
    size, rows = planned.world_size, list[PlannedMessage]()
    for message in rollout.messages:
        lengths = _row(f"{message.tag}/lengths", "all_gather", 8 * size, torch.int64, size)
        rows.append(PlannedMessage(**asdict(lengths), exact=True))
        told = PlannedMessage(message.tag, "all_gather", 1, None, None, "uint8", message.exact)
        if message.max_bytes is not None:
            payload = size * message.max_bytes
            told = replace(told, payload_bytes=payload, wire_bytes=wire_bytes("all_gather", payload, size))
        rows.append(told)
    return replace(planned, rollout=tuple(rows), rollout_every=rollout.every)


def _ordered(planned: ModePlan, micro_batches: int) -> ModePlan:
    """A mode whose sums are ordered: up to log2(k) more copies of the gradients, and other collectives for them."""
    size = planned.world_size
    rows: list[PlannedCollective] = []
    padding = 0
    for row in planned.step:
        if row.op == "all_reduce" and row.tag.startswith("grad/"):  # becomes two, over equal parts
            dtype = getattr(torch, row.dtype)
            parts = size * dtype.itemsize
            payload = -(-row.payload_bytes // parts) * parts
            padding += payload - row.payload_bytes
            rows.append(_row(row.tag, "all_to_all", payload, dtype, size))
            rows.append(_row(f"{row.tag}/gather", "all_gather", payload, dtype, size))
        elif row.op == "reduce_scatter":
            rows.append(replace(row, op="all_to_all"))
        elif row.tag == "grad_norm":
            rows.append(_row(row.tag, row.op, 8 * NORM_SIZE, torch.int64, size))
        elif row.tag == "loss":
            rows.append(_row(row.tag, row.op, 8 * micro_batches * size, torch.float64, size))
        else:
            rows.append(row)
    copies = micro_batches.bit_length() - 1
    payloads = {row.tag: row.payload_bytes for row in rows}
    return replace(
        planned,
        gradients_bytes=planned.gradients_bytes + padding + copies * planned.weights_bytes,
        padding_bytes=planned.padding_bytes + 2 * padding,
        step=tuple(rows),
        buckets=tuple(replace(bucket, payload_bytes=payloads[bucket.tag]) for bucket in planned.buckets),
    )


def _zero2(
    infos: list[ParameterInfo], world_size: int, micro_batches: int, bucket_bytes: int, dtype: torch.dtype | None
) -> ModePlan:
    """As zero1, but each micro-batch's gradients are reduced, through at most two buckets' buffers."""
    once = _zero1(infos, world_size, micro_batches, bucket_bytes, dtype)
    sizes = sorted((bucket.payload_bytes for bucket in once.buckets), reverse=True)
    return replace(
        once,
        mode="zero2",
        gradients_bytes=once.gradients_bytes // world_size,
        padding_bytes=once.padding_bytes // 2 * (1 + micro_batches),
        step=tuple(_times(row, micro_batches) if row.op == "reduce_scatter" else row for row in once.step),
        scratch_bytes=sum(sizes[:2]),
    )


def _by_rows(
    mode: str, infos: list[ParameterInfo], world_size: int, micro_batches: int, dtype: torch.dtype | None, reshard: bool
) -> ModePlan:
    """zero3, where vectors are whole and their gradients in buckets as ddp's, and fsdp2, where they are cut as well."""
    number = next((info.name for info in infos if mode == "fsdp2" and not info.shape), None)
    if number is not None:
        raise ConfigError(f"parallel.mode fsdp2 cannot shard the single number {number}; choose zero3")
    cut = [info for info in infos if mode == "fsdp2" or len(info.shape) > 1]
    whole = [info for info in infos if info not in cut]
    layouts = _replicated([info for info in whole if info.trainable], CHUNK_BYTES, None)
    units: dict[str, list[ParameterInfo]] = {}
    for info in sorted(cut, key=lambda info: info.unit != ""):
        units.setdefault(info.unit or "root", []).append(info)
    first = next((i for i, info in enumerate(infos) if info.trainable), len(infos))
    # no gradient reaches what lies before the first trainable parameter; torch's engine gathers it all the same
    unreached = {i.unit for i in infos[:first]} - {i.unit for i in infos[first:]} if mode == "zero3" else set()
    rows, sizes, padding, kept = [], {"root": 0}, 0, 0
    for path, members in units.items():
        gathered, spare = _sections(members, world_size, dtype)
        trained = [info for info in members if info.trainable]
        reduced, spare_reduced = _sections(trained, world_size, None)
        passes = 2 if path != "root" and reshard and path not in unreached else 1
        names = ["forward", "backward"][:passes] if mode == "zero3" else []
        for tag in [f"param/{path}/{name}" for name in names] or [f"param/{path}"]:
            times = micro_batches if names else micro_batches * passes
            rows.append(_row(tag, "all_gather", times * gathered, dtype or members[0].dtype, world_size, count=times))
        if trained:
            sent = _row(f"grad/{path}", "reduce_scatter", micro_batches * reduced, trained[0].dtype, world_size)
            rows.append(replace(sent, count=micro_batches))
        sizes[path] = gathered + reduced
        kept += gathered if path != "root" and not reshard else 0
        padding += micro_batches * (passes * spare + spare_reduced)
    rows += [_row(f"grad/bucket{b.index}", "all_reduce", b.num_bytes, b.dtype, world_size) for b in layouts]
    rows += _small(sum(info.trainable for info in infos) if mode == "zero3" else 0, world_size)
    rows.append(_row("grad_norm", "all_reduce", 8, torch.float64, world_size))
    held = [*(_held(info, world_size) for info in cut), *whole]
    own = [info for info in held if info.trainable]
    matrices = [info for info in cut if info.trainable and not info.elementwise]
    rows += _whole_updates(matrices, world_size)
    sizes_of = [section_numel(info.shape, world_size) for info in matrices]
    updated = [matrices[i] for i in assign_whole(sizes_of, world_size)[0]]
    updated_whole = {info.name for info in matrices}
    root, others = sizes.pop("root"), sorted(sizes.values(), reverse=True)
    return ModePlan(
        mode,
        world_size,
        sum(info.num_bytes for info in held),
        sum(info.num_bytes for info in own),
        _state_bytes([info for info in own if info.name not in updated_whole] + updated),
        padding,
        tuple(rows),
        _buckets(layouts) + _unit_buckets(units, rows, micro_batches),
        root + max(sum(others[:2]), kept),
    )


def _held(info: ParameterInfo, world_size: int) -> ParameterInfo:
    """The rows of rank 0."""
    return replace(info, shape=(min(rows_each(info.shape[0], world_size), info.shape[0]), *info.shape[1:]))


def _whole_updates(matrices: list[ParameterInfo], world_size: int) -> list[PlannedCollective]:
    """How matrices that the optimizer updates whole come to their owners and back."""
    rows = []
    for dtype in dict.fromkeys(info.dtype for info in matrices):
        payload = world_size * part_numel([i for i in matrices if i.dtype == dtype], world_size) * dtype.itemsize
        rows += [_row(f"matrix/{what}", "all_to_all", payload, dtype, world_size) for what in ("weight", "grad", "new")]
    return rows


def _sections(infos: Sequence[ParameterInfo], world_size: int, dtype: torch.dtype | None) -> tuple[int, int]:
    """Bytes of whole tensors of which every rank's section has equally many rows, and how many of them are no weight's."""
    total = spare = 0
    for info in infos:
        itemsize = (dtype or info.dtype).itemsize
        rows, width = info.shape[0], info.numel // max(1, info.shape[0])
        padded = rows_each(rows, world_size) * world_size
        total += padded * width * itemsize
        spare += (padded - rows) * width * itemsize
    return total, spare


def _unit_buckets(
    units: dict[str, list[ParameterInfo]], rows: Sequence[PlannedCollective], micro_batches: int
) -> tuple[PlannedBucket, ...]:
    sent = {row.tag: row.payload_bytes // micro_batches for row in rows}
    return tuple(
        PlannedBucket(f"grad/{path}", sent[f"grad/{path}"], tuple(info for info in members if info.trainable))
        for path, members in units.items()
        if f"grad/{path}" in sent
    )


def _times(row: PlannedCollective, times: int) -> PlannedCollective:
    return replace(
        row, count=row.count * times, payload_bytes=row.payload_bytes * times, wire_bytes=row.wire_bytes * times
    )


_Plan = Callable[[list[ParameterInfo], int, int, int, torch.dtype | None], ModePlan]
_PLANS: dict[str, _Plan] = {"none": _none, "ddp": _ddp, "zero1": _zero1, "zero2": _zero2, "torch_ddp": _torch_ddp}


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
