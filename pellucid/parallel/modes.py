"""The parallel modes in which every rank holds the whole model: our DDP and torch's."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pellucid.errors import ConfigError
from pellucid.parallel import comm
from pellucid.parallel.ddp import DDP, scale_for_average
from pellucid.parallel.executor import Executor
from pellucid.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
class DDPOptions:
    """Every rank holds everything; gradients are summed in buckets while backward runs."""

    bucket_size_mb: float | None = None
    """MiB of gradients that travel together; "none": parallel.bucket_size_mb, 25 unless that is set."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Reduce gradients in this type; "none": in their own."""

    def __post_init__(self) -> None:
        if self.bucket_size_mb is not None and not self.bucket_size_mb > 0:
            raise ConfigError(f"parallel.ddp.bucket_size_mb must be positive, got {self.bucket_size_mb}")


@register("mode", "ddp", config=DDPOptions)
class DDPExecutor(Executor):
    """`DDP` around the model."""

    ddp: DDP

    def _refuse_world(self) -> None: ...

    def _wrap(self, model: nn.Module) -> nn.Module:
        reduce_dtype = getattr(torch, self.options.reduce_dtype) if self.options.reduce_dtype else None
        self.ddp = DDP(
            model,
            self.options.bucket_size_mb or 25,
            average=self.average,
            reduce_dtype=reduce_dtype,
            reduction=self.reduction,
        )
        return self.ddp

    @contextmanager
    def _window(self) -> Iterator[None]:
        with nullcontext() if self.sync_gradients else self.ddp.no_sync():
            yield

    def backward(self, loss: Tensor) -> None:
        self.ddp.reducer.expect()
        super().backward(loss)

    def _finish(self) -> None:
        self.ddp.finish_gradient_sync()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DDP) else model


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchDDPOptions:
    """torch's DistributedDataParallel, with its own options."""

    bucket_cap_mb: float | None = None
    """As torch has it; "none": parallel.bucket_size_mb, 25 unless that is set."""
    broadcast_buffers: bool = False
    """Copy the first rank's buffers to the others at each forward."""
    find_unused_parameters: bool = False
    """Look for parameters that a loss does not reach."""
    gradient_as_bucket_view: bool = True
    """Gradients are views of the buckets."""
    static_graph: bool = False
    """The same parameters are used in the same way at each step; crashes torch with accumulation."""


@register("mode", "torch_ddp", config=TorchDDPOptions)
class TorchDDPExecutor(Executor):
    """torch's own engine. Its reductions go through our communication hook, and so into the ledger."""

    ddp: DistributedDataParallel

    def _refuse_world(self) -> None:
        if self.options.static_graph and self.grad_accum_steps > 1:
            raise ConfigError(
                "parallel.torch_ddp.static_graph crashes torch when gradients are accumulated; "
                "switch it off, or make train.micro_batch = global_batch / ranks"
            )

    def _wrap(self, model: nn.Module) -> nn.Module:
        options = asdict(self.options)
        options["bucket_cap_mb"] = options["bucket_cap_mb"] or 25
        if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
            options["forward_sync_buffers"] = options.pop("broadcast_buffers")  # its name since torch 2.13
        self.ddp = DistributedDataParallel(model, **options)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.ddp.register_comm_hook((self.average, names), _reduce_bucket)
        return self.ddp

    @contextmanager
    def _window(self) -> Iterator[None]:
        with nullcontext() if self.sync_gradients else self.ddp.no_sync():
            yield

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model


def _reduce_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """torch divides by the number of ranks; here the sum stays a sum unless ranks average."""
    average, names = state
    if average:
        scale_for_average(bucket.buffer(), comm.world_size())
    owner = [names[parameter] for parameter in bucket.parameters()]
    return comm.all_reduce_(bucket.buffer(), tag=f"grad/bucket{bucket.index()}", owner=owner).future(bucket.buffer())
