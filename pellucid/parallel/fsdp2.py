"""torch's own full sharding, ``fully_shard``, behind the executor's methods: for those who outgrow one host.

W ranks. Its collectives go through `comm`, one a unit, so the ledger shows them; its buffers and prefetching are its own.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pellucid.errors import ConfigError, TrainingError
from pellucid.parallel import comm
from pellucid.parallel.ddp import broadcast_module, compare_modules, refuse_unfit
from pellucid.parallel.fsdp import refuse_gradients, refuse_hooks
from pellucid.parallel.layout import row_range, units_of
from pellucid.parallel.parts import Rows
from pellucid.parallel.rows import RowExecutor
from pellucid.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Options:
    """torch's fully_shard, a layer a unit."""

    reshard_after_forward: bool = True
    """Free a layer's weights after its forward, and gather them again in backward."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Gather weights in this type, and compute in it; "none": in that of the weights."""


@register("mode", "fsdp2", config=FSDP2Options)
class FSDP2Executor(RowExecutor):
    """`fully_shard` on each unit of `units_of` and on the model. Every parameter is cut by rows, vectors too.

    The optimizer that is given keeps its groups, but holds this rank's rows as plain tensors instead of the parameters.
    """

    _interrupted = False
    """A backward is under way, or one has ended in an error."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._refuse_optimizer("fsdp2")
        refuse_unfit(model, 1)
        refuse_gradients(model)
        refuse_hooks(dict(model.named_parameters()))
        _refuse_what_torch_cannot_shard(model)
        compare_modules(model, None)
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # torch takes no other
        broadcast_module(model, None)
        before = dict(model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in before.items()}
        self._shard(model)
        model.register_forward_hook(_free_without_backward)
        self.rows = [self._rows(name, shapes[name], p) for name, p in model.named_parameters()]
        self.sharded = dict(model.named_parameters())
        self.whole, self.held = [], {}
        if self.optimizer is not None:
            self._hand_over(self.optimizer, {parameter: name for name, parameter in before.items()})
        return model

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from pellucid.parallel.fsdp2_transport import UnitGather, UnitScatter

        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (comm.world_size(),))
        dtype = getattr(torch, self.options.compute_dtype) if self.options.compute_dtype else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        members: dict[str, list[str]] = {}
        for name, path in units_of(model).items():
            members.setdefault(path, []).append(name)
        members.setdefault("", [])
        transports = []
        for path in sorted(members, key=lambda path: not path):  # the root last: it takes what is left
            again = self.options.reshard_after_forward and path != ""
            unit = fully_shard(model.get_submodule(path), mesh=mesh, reshard_after_forward=again, mp_policy=policy)
            if not members[path]:
                continue
            transports.append((unit, path, members[path]))
            unit.set_gradient_divide_factor(float(comm.world_size()) if self.average else 1.0)
            unit.set_force_sum_reduction_for_comms(True)
        sharded = dict(model.named_parameters())
        for unit, path, names in transports:
            parameters = {name: sharded[name] for name in names}
            unit.set_custom_all_gather(UnitGather(path, parameters, self.weights_tag))
            unit.set_custom_reduce_scatter(UnitScatter(path, parameters, "grad"))

    @staticmethod
    def _rows(name: str, shape: tuple[int, ...], parameter: nn.Parameter) -> Rows:
        first, _ = row_range(shape[0], comm.rank(), comm.world_size())
        local = nn.Parameter(_local(parameter).detach(), requires_grad=parameter.requires_grad)
        return Rows(name, shape, first * math.prod(shape[1:]), local)

    def backward(self, loss: Tensor) -> None:
        if self._interrupted:
            raise TrainingError(
                "a backward has ended in an error, and torch's fully_shard keeps what it left behind; start again from a "
                "checkpoint, or take mode zero3"
            )
        self._interrupted = True
        super().backward(loss)
        self._interrupted = False

    def _finish(self) -> None:
        for row in self.rows:
            grad = self.sharded[row.name].grad
            row.weight.grad = None if grad is None else _local(grad)

    def _drop_grads(self) -> None:
        super()._drop_grads()
        for row in self.rows:
            row.weight.grad = None


def _refuse_what_torch_cannot_shard(model: nn.Module) -> None:
    dtypes: dict[str, torch.dtype] = {}
    units = units_of(model)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise ConfigError(f"{name} is sharded by torch already; prepare a module once")
        if parameter.ndim == 0:
            raise ConfigError(f"parallel.mode fsdp2 cannot shard the single number {name}; choose zero3")
        first = dtypes.setdefault(units[name], parameter.dtype) if parameter.requires_grad else parameter.dtype
        if first != parameter.dtype:
            raise ConfigError(
                f"parallel.mode fsdp2 trains one type a unit, and {units[name] or 'the root unit'} has {first} and "
                f"{parameter.dtype} ({name}); choose zero3"
            )


def _free_without_backward(model: nn.Module, _args: Any, _output: Any) -> None:
    """torch keeps the root unit gathered until a backward, which evaluation does not have."""
    if not torch.is_grad_enabled():
        model.reshard()  # type: ignore[operator]


def _local(sharded: Tensor) -> Tensor:
    """This rank's rows of a ``DTensor``, sharing its memory."""
    rows: Tensor = sharded.to_local()  # type: ignore[attr-defined]
    return rows
