"""ZeRO stage 1: every rank holds weights and gradients, and a part of the optimizer's state.

W ranks. Each bucket is cut into W equal parts. A rank gets its part of the summed gradients, updates that part of the
weights, and the new weights are gathered.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.errors import ConfigError
from pellucid.parallel import comm, ordered
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
from pellucid.parallel.layout import MIB, Layout, sharded_layouts
from pellucid.parallel.optimizer_state import load_state, state_parts
from pellucid.parallel.parts import Part, SavedTensors
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
        trainable = [info for info in self.infos if info.trainable]
        layouts = sharded_layouts(trainable, int((self.options.bucket_size_mb or 25) * MIB), self.world_size)
        self.weight_buffers = [_move_weights(layout, self.parameters) for layout in layouts]
        """The parameters' storage, laid out as the buckets are, so that new weights are gathered into their place."""
        # after the weights have moved: their old place is free for gradients
        self.buckets = [self._bucket(layout) for layout in layouts]
        self.reducer = Reducer(self.buckets, self._launch)
        self.slices = {piece.name: piece for bucket in self.buckets for piece in self._slices(bucket)}
        mark_owned([*self.parameters.values(), *(piece.weight for piece in self.slices.values())], self.reducer)
        self._hand_over()
        return model

    def _bucket(self, layout: Layout) -> Bucket:
        return Bucket(layout, self.parameters)

    def _own_gradients(self, bucket: Bucket) -> Tensor:
        """This rank's part of the bucket's gradients, once they are final."""
        first, last = self._part(bucket)
        return bucket.flat[first:last]

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
            grad = self._own_gradients(bucket)[start - first : stop - first]
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
        self.reducer.synchronizing = self._reduces
        self.reducer.expect()
        yield

    def _launch(self, bucket: Bucket) -> comm.Pending:
        if self.average:
            scale_for_average(bucket.flat, self.world_size)
        first, last = self._part(bucket)
        layout = bucket.layout
        reduce_scatter = ordered.reduce_scatter if self.reduction == "ordered" else comm.reduce_scatter
        return reduce_scatter(
            bucket.flat, bucket.flat[first:last], tag=f"grad/bucket{layout.index}", owner=layout.names
        )

    def backward(self, loss: Tensor) -> None:
        if not self.reducer.expected and not self.reducer.outstanding:  # a loop that does not use accumulate()
            self.reducer.synchronizing = self._reduces
            self.reducer.expect()
        super().backward(loss)

    @property
    def _reduces(self) -> bool:
        """Whether gradients of the micro-batch under way are sent."""
        return self.sync_gradients

    def _finish(self) -> None:
        if not self.reducer.expected:
            return
        assert self.model is not None
        refuse_late(self.model)
        came = torch.tensor(self.reducer.fill_missing(), dtype=torch.uint8, device=self.buckets[0].flat.device)
        used = comm.all_reduce_(came, tag="used", op="max")
        self.reducer.wait()
        used.wait()
        self._hand_out(came)

    def _hand_out(self, came: Tensor) -> None:
        """Give this rank's slices their final gradients; ``came`` says which parameters have one, in bucket order."""
        flags = dict(zip([n for b in self.buckets for n in b.layout.names], came.tolist(), strict=True))
        for parameter in self.parameters.values():
            parameter.grad = None  # its part of the bucket is summed on one rank only
        for name, piece in self.slices.items():
            piece.weight.grad = piece.grad if flags[name] else None

    def gradients(self) -> Iterator[Part]:
        for name, piece in self.slices.items():
            if piece.weight.grad is not None:
                yield Part(name, tuple(piece.parameter.shape), piece.start, piece.weight.grad)

    @property
    def shards_gradients(self) -> bool:
        return True

    def grad_norm(self) -> float:
        if self.reduction == "ordered":
            return super().grad_norm()
        self.finish_grads()
        grads = self._grads()
        mine = norms(grads).double() if grads else torch.zeros(1)
        return math.sqrt(comm.all_reduce(float(mine.square().sum()), tag="grad_norm"))

    def _finish_weights(self) -> None:
        waits = []
        for bucket, weights in zip(self.buckets, self.weight_buffers, strict=True):
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

    shards_state = True

    def optimizer_parts(self) -> Iterator[Part]:
        _, optimizer = self._checkpointed()
        for name, piece in self.slices.items():
            state = optimizer.state.get(piece.weight, {})
            yield from state_parts(name, tuple(piece.parameter.shape), piece.start, piece.weight, state)

    def load_optimizer_state(self, saved: SavedTensors) -> None:
        model, optimizer = self._checkpointed()
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        slices = [(name, piece.start, piece.weight) for name, piece in self.slices.items()]
        load_state(optimizer, slices, saved, shapes, self.optimized)


def _move_weights(layout: Layout, parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Put a bucket's parameters into one buffer, of which they are views from then on."""
    flat = torch.zeros(layout.numel, dtype=layout.dtype, device=parameters[layout.names[0]].device)
    for slot in layout.slots:
        view = flat[slot.offset : slot.stop].view(slot.info.shape)
        view.copy_(parameters[slot.info.name].data)
        parameters[slot.info.name].data = view
    return flat
