"""ZeRO stage 1: every rank holds weights and gradients, and a part of the optimizer's state.

W ranks. Each bucket is cut into W equal parts. A rank gets its part of the summed gradients, updates that part of the
weights, and the new weights are gathered.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.errors import CheckpointError, ConfigError
from pellucid.parallel import comm
from pellucid.parallel.bucket import Bucket, Reducer
from pellucid.parallel.ddp import (
    broadcast_module,
    compare_modules,
    mark_owned,
    refuse_late,
    refuse_unfit,
    scale_for_average,
)
from pellucid.parallel.executor import Executor, norms
from pellucid.parallel.layout import MIB, Layout, Slot, sharded_layouts
from pellucid.parallel.optimizer_state import on_device, state_by_parameter
from pellucid.parallel.sharded_optimizer import ShardedOptimizer
from pellucid.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero1Options:
    """Optimizer state is cut into one part a rank; gradients are reduce-scattered, new weights gathered."""

    bucket_size_mb: float | None = None
    """MiB of gradients that travel together; "none": parallel.bucket_size_mb, 25 unless that is set."""

    def __post_init__(self) -> None:
        if self.bucket_size_mb is not None and not self.bucket_size_mb > 0:
            raise ConfigError(f"parallel.zero1.bucket_size_mb must be positive, got {self.bucket_size_mb}")


@dataclass(slots=True)
class Slice:
    """What this rank owns of a parameter: ``weight`` shares memory with it, ``grad`` with the bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    """First element, in the flattened parameter."""
    weight: nn.Parameter
    grad: Tensor


@register("mode", "zero1", config=Zero1Options)
class Zero1Executor(Executor):
    """ZeRO-1; Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1.

    The optimizer that is given keeps its groups, but holds this rank's slices instead of the parameters.
    """

    reducer: Reducer

    def _refuse_world(self) -> None: ...

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.optimizer is None:
            raise ConfigError("parallel.mode zero1 shards an optimizer; give one to prepare()")
        if isinstance(self.optimizer, ShardedOptimizer):
            raise ConfigError("parallel.mode zero1 shards the optimizer itself; give it a plain one, or take mode ddp")
        refuse_unfit(model, self.options.bucket_size_mb or 25)
        compare_modules(model, None)
        broadcast_module(model, None)
        self.rank, self.world_size = comm.rank(), comm.world_size()
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        unknown = next((name for name, p in self.parameters.items() if id(p) not in owned), None)
        if unknown is not None:
            raise ConfigError(f"{unknown} is trainable but not in the optimizer; freeze it or add it to a group")
        layouts = sharded_layouts(self.infos, int((self.options.bucket_size_mb or 25) * MIB), self.world_size)
        self.weights = [_move_weights(layout, self.parameters) for layout in layouts]
        """The parameters' storage, laid out as the buckets are, so that new weights are gathered into their place."""
        # after the weights have moved: their old place is free for gradients
        self.buckets = [Bucket(layout, self.parameters) for layout in layouts]
        self.reducer = Reducer(self.buckets, self._launch)
        self.slices = {piece.name: piece for bucket in self.buckets for piece in self._slices(bucket)}
        mark_owned([*self.parameters.values(), *(piece.weight for piece in self.slices.values())], self.reducer)
        self._hand_over()
        return model

    def _part(self, bucket: Bucket) -> tuple[int, int]:
        """First and last + 1 of the bucket's elements that this rank owns."""
        part = bucket.layout.numel // self.world_size
        return self.rank * part, (self.rank + 1) * part

    def _slices(self, bucket: Bucket) -> Iterator[Slice]:
        first, last = self._part(bucket)
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            start, stop = max(slot.offset, first), min(slot.stop, last)
            if start >= stop:
                continue
            weight = parameter.data.view(-1)[start - slot.offset : stop - slot.offset]
            grad = bucket.flat[start:stop]
            if not slot.info.elementwise or parameter.ndim == 0:  # a number's state has no dimension
                weight, grad = weight.view(parameter.shape), grad.view(parameter.shape)
            yield Slice(slot.info.name, parameter, start - slot.offset, nn.Parameter(weight), grad)

    def _hand_over(self) -> None:
        """Give the optimizer this rank's slices in place of the parameters, with what state it has."""
        optimizer = self.optimizer
        assert optimizer is not None
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        before = {names[p]: state for p, state in optimizer.state.items() if p in names}
        optimizer.state.clear()
        for group in optimizer.param_groups:
            mine = [self.slices[names[p]] for p in group["params"] if p in names and names[p] in self.slices]
            group["params"] = [piece.weight for piece in mine]
            if "param_names" in group:
                group["param_names"] = [piece.name for piece in mine]
        for name, state in before.items():
            if name in self.slices:
                self._put_state(self.slices[name], state)

    def _put_state(self, piece: Slice, state: Mapping[str, Any]) -> None:
        assert self.optimizer is not None
        whole = piece.parameter.shape
        self.optimizer.state[piece.weight] = {
            key: self._cut(piece, value) if isinstance(value, Tensor) and value.shape == whole and whole else value
            for key, value in state.items()
        }

    @staticmethod
    def _cut(piece: Slice, value: Tensor) -> Tensor:
        mine = value.reshape(-1)[piece.start : piece.start + piece.weight.numel()]
        return mine.to(piece.weight.device, copy=True).view(piece.weight.shape)

    # -- a step ---------------------------------------------------------------------------------------------

    @contextmanager
    def _window(self) -> Iterator[None]:
        self.reducer.synchronizing = self.sync_gradients
        self.reducer.expect()
        yield

    def _launch(self, bucket: Bucket) -> comm.Pending:
        if self.average:
            scale_for_average(bucket.flat, self.world_size)
        first, last = self._part(bucket)
        layout = bucket.layout
        return comm.reduce_scatter(
            bucket.flat, bucket.flat[first:last], tag=f"grad/bucket{layout.index}", owner=layout.names
        )

    def backward(self, loss: Tensor) -> None:
        if not self.reducer.expected and not self.reducer.outstanding:  # a loop that does not use accumulate()
            self.reducer.synchronizing = self.sync_gradients
            self.reducer.expect()
        super().backward(loss)

    def _finish(self) -> None:
        if not self.reducer.expected:
            return
        assert self.model is not None
        refuse_late(self.model)
        came = torch.tensor(self.reducer.fill_missing(), dtype=torch.uint8, device=self.buckets[0].flat.device)
        used = comm.all_reduce_(came, tag="used", op="max")
        self.reducer.wait()
        used.wait()
        flags = dict(zip([n for b in self.buckets for n in b.layout.names], came.tolist(), strict=True))
        for parameter in self.parameters.values():
            parameter.grad = None  # its part of the bucket is summed on one rank only
        for name, piece in self.slices.items():
            piece.weight.grad = piece.grad if flags[name] else None

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, piece in self.slices.items():
            if piece.weight.grad is not None:
                yield name, piece.weight.grad

    @property
    def shards_gradients(self) -> bool:
        return True

    def grad_norm(self) -> float:
        self.finish_grads()
        grads = self._grads()
        mine = norms(grads).double() if grads else torch.zeros(1)
        return math.sqrt(comm.all_reduce(float(mine.square().sum()), tag="grad_norm"))

    def _finish_weights(self) -> None:
        waits = []
        for bucket, weights in zip(self.buckets, self.weights, strict=True):
            first, last = self._part(bucket)
            layout = bucket.layout
            waits.append(
                comm.all_gather(weights[first:last], weights, tag=f"param/bucket{layout.index}", owner=layout.names)
            )
        for pending in waits:
            pending.wait()

    def _drop_grads(self) -> None:
        super()._drop_grads()
        for piece in self.slices.values():
            piece.weight.grad = None

    # -- checkpoints ----------------------------------------------------------------------------------------

    gathers_state = True

    def optimizer_state(self) -> dict[str, Tensor]:
        """Gathered one tensor at a time on the first rank; the others get an empty table.

        Raises:
            CheckpointError: on every rank, of an optimizer whose state has a shape of its own.
        """
        assert self.optimizer is not None
        own = {piece.name: self.optimizer.state.get(piece.weight, {}) for piece in self.slices.values()}
        described = {
            name: {key: _describe(value, self.slices[name]) for key, value in state.items() if value is not None}
            for name, state in own.items()
        }
        everybodys = [json.loads(t) for t in comm.all_gather_bytes(json.dumps(described).encode(), tag="save/state")]
        whole: dict[str, Tensor] = {}
        for bucket in self.buckets:
            part = bucket.layout.numel // self.world_size
            for slot in bucket.layout.slots:
                name, first = slot.info.name, slot.offset // part
                for key, (dtype, scalar, other_shape) in everybodys[first].get(name, {}).items():
                    if other_shape is not None:
                        raise CheckpointError(
                            f"optimizer state {name}/{key} has shape {tuple(other_shape)}, the parameter {slot.info.shape}; "
                            "zero1 saves numbers and what has a parameter's shape"
                        )
                    if scalar is not None:
                        value: Tensor | None = torch.tensor(scalar, dtype=getattr(torch, dtype))
                    else:
                        value = self._gather(slot, part, key, own.get(name, {}).get(key), getattr(torch, dtype))
                    if value is not None and self.rank == 0:
                        whole[f"{name}/{key}"] = value
        return whole

    def _gather(self, slot: Slot, part: int, key: str, mine: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """One tensor of the state, whole, on the first rank. Every rank sends as much as the largest slice holds."""
        spans = [(max(slot.offset, r * part), min(slot.stop, (r + 1) * part)) for r in range(self.world_size)]
        longest = max(stop - start for start, stop in spans)
        device = self.slices[next(iter(self.slices))].weight.device if self.slices else torch.device("cpu")
        sent = torch.zeros(longest, dtype=dtype, device=device)
        if mine is not None:
            sent[: mine.numel()] = mine.reshape(-1)
        full = sent.new_empty(self.world_size * longest) if self.rank == 0 else None
        comm.gather(sent, full, tag=f"save/{key}", owner=[slot.info.name]).wait()
        if full is None:
            return None
        rows = full.view(self.world_size, longest)
        pieces = [row[: stop - start] for row, (start, stop) in zip(rows, spans, strict=True) if start < stop]
        return torch.cat(pieces).view(slot.info.shape).cpu()

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        assert self.optimizer is not None and self.model is not None, "prepare() comes first"
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        counts_on_device = any(map(on_device, self.optimizer.param_groups))
        for name, state in state_by_parameter(tensors, shapes, set(self.parameters)).items():
            if name in self.slices:
                piece = self.slices[name]
                place = piece.weight.device if counts_on_device else torch.device("cpu")
                own = {key: value if value.ndim else value.to(place, copy=True) for key, value in state.items()}
                self._put_state(piece, own)


def _move_weights(layout: Layout, parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Put a bucket's parameters into one buffer, of which they are views from then on."""
    flat = torch.zeros(layout.numel, dtype=layout.dtype, device=parameters[layout.names[0]].device)
    for slot in layout.slots:
        view = flat[slot.offset : slot.stop].view(slot.info.shape)
        view.copy_(parameters[slot.info.name].data)
        parameters[slot.info.name].data = view
    return flat


def _describe(value: Any, piece: Slice) -> tuple[str, float | None, list[int] | None]:
    """The dtype of a part of the state, its value where that is one number, its shape where that is not the slice's."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.ndim:
        return dtype, tensor.item(), None
    return dtype, None, None if tensor.shape == piece.weight.shape else list(tensor.shape)
