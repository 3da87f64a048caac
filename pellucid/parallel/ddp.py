"""Data parallelism: every rank holds the whole model, and gradients are summed in buckets while backward runs.

W ranks.
"""

import hashlib
import json
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pellucid.errors import ConfigError, RankError, TrainingError
from pellucid.parallel import comm, ordered
from pellucid.parallel.bucket import Bucket, Reducer
from pellucid.parallel.layout import MIB, ParameterInfo, chunks, group_by_size, replicated_layout

_MARK = "_pellucid_reducer"
"""Attribute of a parameter: a weak reference to the `Reducer` of its gradient."""


def mark_owned(parameters: Iterable[nn.Parameter], reducer: Reducer) -> None:
    """Say that ``reducer`` makes the gradients of ``parameters`` final."""
    for parameter in parameters:
        setattr(parameter, _MARK, weakref.ref(reducer))


def reducer_of(parameter: Tensor) -> Reducer | None:
    """What makes the gradient of ``parameter`` global, if something of ours does."""
    reference = getattr(parameter, _MARK, None)
    return None if reference is None else reference()


_ROWS = "_pellucid_rows"


def mark_rows(parameter: nn.Parameter) -> None:
    """Say that ``parameter`` holds some rows of a matrix, others on each rank."""
    setattr(parameter, _ROWS, True)


def holds_rows(parameter: Tensor) -> bool:
    """Whether ranks hold different rows in ``parameter``."""
    return getattr(parameter, _ROWS, False)


class DDP(nn.Module):
    """Replicates ``module``: the first rank's weights and buffers everywhere, gradients reduced over ranks.

    After a backward, `finish_gradient_sync` (or nothing, inside `no_sync`) makes gradients final. They then live in the
    buckets' buffers: a gradient is a view of its bucket until it is set to None. A parameter that no rank's loss reaches
    keeps the gradient None; one that some rank's loss reaches counts as zero on the others.

    Args:
        module: the bare model; its parameter names are those of ``state_dict()``, without a prefix.
        bucket_size_mb: MiB of gradients that travel together; a bucket closes when its bytes reach this, the closing
            tensor included. The first one closes at 1 MiB.
        process_group: the ranks to reduce over; None is all.
        average: multiply by 1/W before the sum. False sums, for losses that are divided by the global weight already.
        reduce_dtype: reduce in this type, such as float32 for bfloat16 gradients; None: in that of each parameter.
        reduction: "ordered" adds what 2, 4, 8, ... ranks hold in a binary tree, rank 0's and rank 1's first; what one rank
            accumulates it adds as it comes, unless an executor's `MicroBatchTree` does that.

    Raises:
        ConfigError: wrapped twice, sparse gradients, nothing to train.
        RankError: ranks hold different modules; names the first difference.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float = 25,
        process_group: dist.ProcessGroup | None = None,
        *,
        average: bool = True,
        reduce_dtype: torch.dtype | None = None,
        reduction: ordered.Reduction = "sum",
    ) -> None:
        super().__init__()
        refuse_unfit(module, bucket_size_mb)
        self.module = module
        self.group, self.average = process_group, average
        self.world_size = comm.world_size(process_group)
        self.reduction = reduction
        if reduction == "ordered":
            ordered.refuse_order("ddp", None, 1, self.world_size)
        compare_modules(module, process_group)
        broadcast_module(module, process_group)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        infos = [ParameterInfo(n, tuple(p.shape), p.dtype, device=str(p.device)) for n, p in trainable.items()]
        groups = group_by_size(infos, int(bucket_size_mb * MIB), dtype=reduce_dtype)
        num_parts = self.world_size if reduction == "ordered" else 1
        layouts = [replicated_layout(i, group, reduce_dtype, num_parts) for i, group in enumerate(groups)]
        self.buckets = [Bucket(layout, trainable) for layout in layouts]
        self.reducer = Reducer(self.buckets, self._launch)
        mark_owned(trainable.values(), self.reducer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``module`` gives."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled, `Executor.backward` expects
            self.reducer.expect()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of a micro-batch whose gradients are only accumulated."""
        before, self.reducer.synchronizing = self.reducer.synchronizing, False
        try:
            yield
        finally:
            self.reducer.synchronizing = before

    def finish_gradient_sync(self) -> None:
        """Gradients are final after this: sends what backward has not sent, waits. A second call does nothing."""
        if not self.reducer.expected:
            return
        refuse_late(self.module)
        came = torch.tensor(self.reducer.fill_missing(), dtype=torch.uint8, device=self.buckets[0].flat.device)
        used = comm.all_reduce_(came, tag="used", op="max", group=self.group)
        self.reducer.wait(self._gather if self.reduction == "ordered" else None)
        used.wait()
        flags = iter(came.tolist())
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if not next(flags):
                    parameter.grad = None
                elif view.dtype == parameter.dtype:
                    parameter.grad = view
                else:
                    parameter.grad = view.to(parameter.dtype)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the bare module: a checkpoint never sees the wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the bare module."""
        return self.module.load_state_dict(*args, **kwargs)

    def _launch(self, bucket: Bucket) -> comm.Pending:
        if self.average and self.world_size > 1:
            scale_for_average(bucket.flat, self.world_size)
        layout, tag = bucket.layout, f"grad/bucket{bucket.layout.index}"
        if self.reduction == "ordered":
            return ordered.reduce_scatter(
                bucket.flat, self._part(bucket), tag=tag, owner=layout.names, group=self.group
            )
        return comm.all_reduce_(bucket.flat, tag=tag, owner=layout.names, group=self.group)

    def _gather(self, bucket: Bucket) -> comm.Pending:
        """The sums of all parts, where each rank has made those of its own."""
        layout = bucket.layout
        return comm.all_gather(
            self._part(bucket),
            bucket.flat,
            tag=f"grad/bucket{layout.index}/gather",
            owner=layout.names,
            group=self.group,
        )

    def _part(self, bucket: Bucket) -> Tensor:
        return bucket.flat.view(self.world_size, -1)[comm.rank(self.group)]


def scale_for_average(flat: Tensor, num_ranks: int) -> None:
    """Multiply by 1/W before the sum, so that float16 cannot overflow in it: the one place where ranks average."""
    flat.mul_(1 / num_ranks)


def refuse_unfit(module: nn.Module, bucket_size_mb: float) -> None:
    """`ConfigError` where gradients of ``module`` cannot be reduced by us, or are already."""
    if not bucket_size_mb > 0:
        raise ConfigError(f"bucket_size_mb must be positive, got {bucket_size_mb}")
    for name, inner in module.named_modules():
        if isinstance(inner, DDP):
            raise ConfigError(f"{name or 'the module'} is wrapped in DDP already; wrap the bare module once")
        if getattr(inner, "sparse", False) is True and isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            raise ConfigError(f"{name or 'the module'} has sparse gradients, which DDP cannot reduce; set sparse=False")
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("the module has no parameter that requires a gradient; there is nothing to reduce")
    for name, parameter in trainable:
        if reducer_of(parameter) is not None:
            raise ConfigError(f"{name} is reduced by another wrapper already; wrap a module once")


def refuse_late(module: nn.Module) -> None:
    """`TrainingError` for a parameter that was frozen when its gradients' reduction was set up and is not any more."""
    late = next((n for n, p in module.named_parameters() if p.requires_grad and reducer_of(p) is None), None)
    if late is not None:
        raise TrainingError(
            f"{late} was frozen when it was wrapped, so its gradient is not reduced; wrap it after unfreezing"
        )


# -- the same module everywhere -----------------------------------------------------------------------------


def compare_modules(module: nn.Module, group: comm.Group) -> None:
    """`RankError` on every rank if ranks hold modules of different parameters or buffers."""
    mine = json.dumps(_describe(module)).encode()
    digests = comm.all_gather_bytes(hashlib.sha256(mine).digest(), tag="init/digest", group=group)
    if len(set(digests)) == 1:
        return
    everybodys = [json.loads(text) for text in comm.all_gather_bytes(mine, tag="init/description", group=group)]
    first = everybodys[0]
    other = next(r for r, theirs in enumerate(everybodys) if theirs != first)
    for i in range(max(len(first), len(everybodys[other]))):
        left, right = (side[i] if i < len(side) else None for side in (first, everybodys[other]))
        if left != right:
            raise RankError(
                f"ranks hold different modules: rank 0 has {_words(left)}, rank {other} has {_words(right)}; "
                "build the same module, with the same parts frozen, on every rank"
            )


def _describe(module: nn.Module) -> list[list[Any]]:
    parameters = [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in module.named_parameters()]
    buffers = [[n, list(b.shape), str(b.dtype), "buffer"] for n, b in module.named_buffers()]
    return parameters + buffers


def _words(line: list[Any] | None) -> str:
    if line is None:
        return "nothing more"
    name, shape, dtype, kind = line
    kind = {True: "trainable", False: "frozen"}.get(kind, kind)
    return f"{name} {dtype.removeprefix('torch.')} {shape} ({kind})"


def broadcast_module(module: nn.Module, group: comm.Group) -> None:
    """Copy the first rank's parameters, frozen ones too, and buffers to every rank, about 25 MiB at a time."""
    if comm.world_size(group) == 1:
        return
    named: list[tuple[str, Tensor]] = [(n, p.data) for n, p in module.named_parameters()]
    named += [(n, b) for n, b in module.named_buffers()]
    for number, chunk in enumerate(chunks([tensor for _, tensor in named])):
        tensors = [named[i][1] for i in chunk]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        comm.broadcast(flat, tag=f"init/{number}", owner=[named[i][0] for i in chunk], group=group).wait()
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


# -- nobody steps on gradients that are still moving --------------------------------------------------------


def _refuse_early_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reducer = reducer_of(parameter)
            if reducer is not None and reducer.outstanding:
                raise TrainingError(
                    "an optimizer step while gradients are still on the wire; call finish_gradient_sync() first"
                )


register_optimizer_step_pre_hook(_refuse_early_step)
