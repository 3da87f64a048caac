"""Where parameters lie in flat buffers, computed from names and shapes alone: `plan` predicts with it what a run does.

W ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MIB = 2**20
ALIGNMENT = 64
"""Elements. Shards begin at multiples of it: torch's fused AdamW rounds the odd tail of a tensor differently."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """What a layout has to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    elementwise: bool = True
    """The optimizer may update a slice of it alone; False keeps it whole on one rank."""
    state_tensors: int = 2
    """Tensors of its shape that the optimizer keeps."""
    device: str = "cpu"
    unit: str = ""
    """As `units_of` has it."""
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter."""
        return self.numel * self.dtype.itemsize


ELEMENTWISE = (
    torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta,
)  # fmt: skip
"""Optimizers whose update of an element looks at that element alone. Parameters of others stay whole on one rank, unless
their group says ``"elementwise": True``."""


def is_elementwise(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a slice of a parameter of this group can be updated without the rest of it."""
    return bool(group.get("elementwise", type(optimizer) in ELEMENTWISE))


def parameter_infos(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[ParameterInfo]:
    """What layouts have to know of ``model``'s parameters, in its order; shapes alone, so meta tensors will do."""
    whole = {
        id(p) for group in (optimizer.param_groups if optimizer is not None else ()) for p in group["params"]
        if optimizer is not None and not is_elementwise(optimizer, group)
    }  # fmt: skip
    units = units_of(model)
    return [
        ParameterInfo(
            name, tuple(p.shape), p.dtype, elementwise=id(p) not in whole, device=str(p.device), unit=units[name],
            trainable=p.requires_grad,
        )
        for name, p in model.named_parameters()
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter lies in its bucket, in elements."""

    info: ParameterInfo
    offset: int

    @property
    def stop(self) -> int:
        """One after its last element."""
        return self.offset + self.info.numel


@dataclass(frozen=True, slots=True)
class Layout:
    """One bucket."""

    index: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int
    """Elements, padding included; a multiple of the ranks where the bucket is sharded."""

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters inside, in their order."""
        return tuple(slot.info.name for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        """Bytes that a collective over the bucket carries."""
        return self.numel * self.dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of it that are no parameter's."""
        return self.num_bytes - sum(slot.info.numel for slot in self.slots) * self.dtype.itemsize


MAX_PADDING = 1 / 8
"""Of a bucket of whole tensors, as far as more tensors can prevent it."""


def group_by_size(
    infos: Sequence[ParameterInfo],
    bucket_bytes: int,
    *,
    first_bytes: int = MIB,
    dtype: torch.dtype | None = None,
    num_shards: int = 1,
) -> list[list[ParameterInfo]]:
    """Parameters in the order in which backward reaches them, the last first, cut into buckets of one kind each.

    A bucket closes when its bytes reach ``bucket_bytes``, the closing tensor included; the very first one closes at
    ``first_bytes`` so that communication starts early. Parameters of another dtype, device or way of sharding fill buckets
    of their own. Where tensors stay whole, a bucket also waits until they fill ``num_shards`` equal parts well: one large
    tensor alone would move that many times its bytes.

    Args:
        dtype: the type in which gradients are reduced; None is that of each parameter.
        num_shards: parts into which buckets will be cut.
    """
    closed: list[list[ParameterInfo]] = []
    open_: dict[tuple[torch.dtype, str, bool], list[ParameterInfo]] = {}
    for info in reversed(infos):
        key = (dtype or info.dtype, info.device, info.elementwise)
        bucket = open_.setdefault(key, [])
        bucket.append(info)
        cap = bucket_bytes if closed else min(first_bytes, bucket_bytes)
        if sum(i.numel for i in bucket) * key[0].itemsize >= cap and (info.elementwise or _fills(bucket, num_shards)):
            closed.append(open_.pop(key))
    return closed + list(open_.values())


def _fills(infos: Sequence[ParameterInfo], num_shards: int) -> bool:
    """Whether whole tensors can be shared out to equal parts without much padding."""
    sizes = [info.numel for info in infos]
    fullest = max(sum(sizes[i] for i in mine) for mine in assign_whole(sizes, num_shards))
    return fullest * num_shards <= sum(sizes) * (1 + MAX_PADDING)


def replicated_layout(
    index: int, infos: Sequence[ParameterInfo], dtype: torch.dtype | None = None, num_parts: int = 1
) -> Layout:
    """A bucket that every rank holds whole: its parameters end to end, filled up to ``num_parts`` equal parts."""
    slots, offset = [], 0
    for info in infos:
        slots.append(Slot(info, offset))
        offset += info.numel
    return Layout(index, dtype or infos[0].dtype, tuple(slots), -(-offset // num_parts) * num_parts)


def sharded_layouts(infos: Sequence[ParameterInfo], bucket_bytes: int, num_shards: int) -> list[Layout]:
    """The buckets of `group_by_size`, cut into equal parts.

    Of the tensors that stay whole the most loaded owner has, over all buckets, at most the mean plus the largest.
    """
    load = [0] * num_shards
    groups = group_by_size(infos, bucket_bytes, num_shards=num_shards)
    return [sharded_layout(i, group, num_shards, load) for i, group in enumerate(groups)]


def sharded_layout(
    index: int, infos: Sequence[ParameterInfo], num_shards: int, load: list[int] | None = None
) -> Layout:
    """A bucket of which rank r owns the r-th of ``num_shards`` equal parts.

    Elementwise parameters lie end to end, each at a multiple of 64, and may be cut where a part ends, at multiples of 64.
    Others stay whole: each goes to the part with the least in it, the largest first.

    Args:
        load: bytes of whole tensors that each rank owns already; the fullest part goes to the rank with the least. Counts on.
    """
    slots: list[Slot] = []
    if infos[0].elementwise:
        offset = 0
        for info in infos:
            slots.append(Slot(info, offset))
            offset = _align(offset + info.numel)
        part = _align(-(-offset // num_shards))
    else:
        filled = assign_whole([info.numel for info in infos], num_shards)
        sizes = [sum(infos[i].numel for i in mine) for mine in filled]
        part = _align(max(sizes))
        load = [0] * num_shards if load is None else load
        fullest_first = sorted(range(num_shards), key=lambda j: -sizes[j])
        for r, j in zip(sorted(range(num_shards), key=load.__getitem__), fullest_first, strict=True):
            load[r] += sizes[j] * infos[0].dtype.itemsize
            offset = r * part
            for i in filled[j]:
                slots.append(Slot(infos[i], offset))
                offset += infos[i].numel
    return Layout(index, infos[0].dtype, tuple(slots), part * num_shards)


def assign_whole(sizes: Sequence[int], num_owners: int, load: list[int] | None = None) -> list[list[int]]:
    """Indices of ``sizes`` for each owner, balanced: the most loaded has at most the mean plus the largest size.

    Args:
        load: what owners have already; counts on.
    """
    owners: list[list[int]] = [[] for _ in range(num_owners)]
    load = [0] * num_owners if load is None else load
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = load.index(min(load))
        owners[least].append(i)
        load[least] += sizes[i]
    return [sorted(mine) for mine in owners]


CHUNK_BYTES = 25 * MIB
"""Of tensors that travel together without being a bucket."""


def chunks(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors of one dtype and device each, in order, cut at `CHUNK_BYTES`; a tensor is never cut."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
    for same in kinds.values():
        chunk: list[int] = []
        for i in same:
            if chunk and sum(tensors[j].nbytes for j in chunk) + tensors[i].nbytes > CHUNK_BYTES:
                yield chunk
                chunk = []
            chunk.append(i)
        yield chunk


def _align(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


# -- rows, for full sharding --------------------------------------------------------------------------------


def rows_each(num_rows: int, num_shards: int) -> int:
    """Rows of each section of a matrix; the last ones may hold fewer, or none."""
    return -(-num_rows // num_shards)


def row_range(num_rows: int, shard: int, num_shards: int) -> tuple[int, int]:
    """First row of a section and one after its last."""
    each = rows_each(num_rows, num_shards)
    return min(shard * each, num_rows), min((shard + 1) * each, num_rows)


def units_of(model: nn.Module) -> dict[str, str]:
    """Of each parameter, by name, the path of its unit: what full sharding gathers together.

    Units are the elements of the outermost ``ModuleList``s and ``Sequential``s. A parameter of none of them, or of
    several, has the path "": the root unit.
    """
    paths: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        lists = isinstance(module, nn.ModuleList | nn.Sequential)
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if lists and not isinstance(child, nn.ModuleList):
                paths.append(inner)
            else:
                look(child, inner)

    look(model, "")
    homes: dict[int, set[str]] = {}
    for module_path, module in model.named_modules(remove_duplicate=False):
        home = next((p for p in paths if module_path == p or module_path.startswith(f"{p}.")), "")
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(home)
    return {
        name: next(iter(homes[id(parameter)])) if len(homes[id(parameter)]) == 1 else ""
        for name, parameter in model.named_parameters()
    }
