"""Full sharding: a rank holds some rows of every matrix, and whole weights exist only while a unit of the model computes.

W ranks. A unit is an element of the model's outermost ``ModuleList``s and ``Sequential``s, such as a decoder layer; what
is in none of them, or in several, is the root unit. Parameters of fewer than two dimensions stay whole on every rank.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pellucid.errors import ConfigError, TrainingError
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
from pellucid.parallel.fsdp_unit import BesideMatrix, Order, ShardedParameter, Unit
from pellucid.parallel.layout import (
    CHUNK_BYTES,
    ParameterInfo,
    group_by_size,
    replicated_layout,
    units_of,
)


class FSDP(nn.Module):
    """Shards ``module``: weights, gradients and with them the optimizer's state, 1/W of each matrix a rank.

    Every parameter of two or more dimensions is cut along its first; `rows_each` rows a rank, fewer or none on the last
    ones. ``module``'s own parameter objects then hold this rank's rows under their bare names, so an optimizer made before or
    after works on rows. In forward and again in backward each unit gathers whole weights, the next one's while it computes,
    and frees them. Gradients are reduce-scattered when a unit's backward is over; those of replicated parameters are
    reduced in buckets. After a backward, `finish_gradient_sync` makes gradients final. A norm of theirs takes all ranks: an
    executor of mode zero3 clips, ``torch.nn.utils.clip_grad_norm_`` would scale each rank by another factor.

    All ranks must use the same units in the same order. Gradients enter a unit through what its forward returns. A unit may
    not change its inputs in place, nor return its weights or views of them. Losses may not need gradients of gradients.

    Args:
        module: the bare model. The first rank's weights are everybody's.
        compute_dtype: gather matrices, and compute with them, in this type; the vectors of the same modules, such as
            biases, follow. Gradients are summed in the parameters' own type. None: that of each parameter.
        process_group: the ranks to shard over; None is all.
        average: multiply gradients by 1/W before the sum; False sums.
        reshard_after_forward: free a unit's weights after its forward, and gather them again for backward. False keeps them
            between the two: a third less is sent, and every rank holds whole weights for that time.
        tag: what the ledger's tags of gathered weights begin with.

    Raises:
        ConfigError: wrapped twice, sparse gradients, nothing to train, gradients that are there already, hooks on those of
            a matrix, which would not run.
        RankError: ranks hold different modules; names the first difference.
        TrainingError: in forward, of a weight that is touched outside the forward of a module that owns it, changed in
            place, or moved, cast or replaced since; in backward, of weights that are not those of forward any more.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        average: bool = True,
        reshard_after_forward: bool = True,
        tag: str = "param",
    ) -> None:
        super().__init__()
        _refuse_wrapped(module)
        refuse_unfit(module, 1)
        refuse_gradients(module)
        refuse_hooks({name: p for name, p in module.named_parameters() if p.ndim >= 2})
        self.module, self.group, self.average = module, process_group, average
        self.reshard_after_forward, self._tag = reshard_after_forward, tag
        self.rank, self.world_size = comm.rank(process_group), comm.world_size(process_group)
        compare_modules(module, process_group)
        broadcast_module(module, process_group)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        """Of whole parameters, by bare name."""
        whole = {name: p for name, p in trainable.items() if p.ndim < 2}
        infos = [ParameterInfo(n, tuple(p.shape), p.dtype, device=str(p.device)) for n, p in whole.items()]
        layouts = [replicated_layout(i, g) for i, g in enumerate(group_by_size(infos, CHUNK_BYTES))]
        self.buckets = [Bucket(layout, whole) for layout in layouts]
        self.reducer = Reducer(self.buckets, self._reduce_bucket)
        self.reducer.in_backward = False
        mark_owned(trainable.values(), self.reducer)
        self.units = self._make_units(compute_dtype)
        """The root unit first."""
        self.root = self.units[0]
        self.forward_order, self.backward_order = Order(), Order()
        self.keeps_whole_gradients = False
        """Inside `no_sync`: gradients are accumulated whole, and nothing is sent."""
        self._inside = False
        self._in_backward = False
        self._on_wire: list[tuple[list[ShardedParameter], list[Tensor], comm.Pending]] = []
        self._register_hooks()

    @property
    def sharded(self) -> Iterator[ShardedParameter]:
        """The matrices of all units."""
        return (p for unit in self.units for p in unit.sharded)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``module`` gives."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of a micro-batch whose gradients are only accumulated, whole, and sent by a later one.

        `zero_grad` drops them; that of an optimizer, which has rows alone, does not.
        """
        before = self.reducer.synchronizing, self.keeps_whole_gradients
        self.reducer.synchronizing, self.keeps_whole_gradients = False, True
        try:
            yield
        finally:
            self.reducer.synchronizing, self.keeps_whole_gradients = before

    def finish_gradient_sync(self) -> None:
        """Gradients are final after this: sends what backward has not sent, waits. A second call does nothing."""
        if not self.reducer.expected and not self.reducer.outstanding:
            return
        self._backward_runs()
        for unit in self.units:  # a forward may have had no backward
            unit.release(stand_in=False)
        refuse_late(self.module)
        for unit in self.units:  # kept whole by a micro-batch in no_sync, and not reached by the last one
            if any(p.whole.grad is not None for p in unit.sharded):
                self._reduce(unit)
        self._settle(0)
        trained = [p for p in self.sharded if p.parameter.requires_grad]
        came = [p.reached for p in trained] + self.reducer.fill_missing()
        flags = torch.tensor(came, dtype=torch.uint8, device=next(iter(self.module.parameters())).device)
        used = comm.all_reduce_(flags, tag="used", op="max", group=self.group)
        self.reducer.wait()
        used.wait()
        reached = iter(flags.tolist())
        for p in trained:
            p.reached = False
            if not next(reached):
                p.parameter.grad = None
            elif p.parameter.grad is None:
                p.parameter.grad = torch.zeros_like(p.parameter)
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if next(reached) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients: rows, whole ones that `no_sync` has kept, and what is still on the wire."""
        self._settle(0)
        for p in self.sharded:
            p.whole.grad, p.reached = None, False
        for bucket in self.buckets:
            bucket.ready = [False] * len(bucket.ready)
        super().zero_grad(set_to_none)

    def gather_full_params(self) -> dict[str, Tensor]:
        """Collective: whole copies of all parameters by bare name, on every rank."""
        by_name = {p.name: p for p in self.sharded}
        gathered = {}
        for name, parameter in self.module.named_parameters():
            if name not in by_name:
                gathered[name] = parameter.detach().clone()
                continue
            p = by_name[name]
            mine = p.parameter.detach().new_zeros((p.num_rows, *p.shape[1:]))
            mine[: p.last - p.first].copy_(p.parameter.detach())
            full = mine.new_empty(p.padded.shape)
            comm.all_gather(
                mine.view(-1), full.view(-1), tag=f"param/{name}/whole", owner=[name], group=self.group
            ).wait()
            gathered[name] = full[: p.shape[0]]
        return gathered

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the bare module, with this rank's rows; `gather_full_params` gives whole parameters."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the bare module: this rank's rows."""
        return self.module.load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TrainingError(
            "an FSDP wrapper cannot be copied or pickled, as other ranks hold the other rows; save gather_full_params(), "
            "or build the module anew and wrap it"
        )

    # -- construction ---------------------------------------------------------------------------------------

    def _make_units(self, compute_dtype: torch.dtype | None) -> list[Unit]:
        paths = units_of(self.module)
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.module.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, attribute))
        by_path: dict[str, list[ShardedParameter]] = {"": []}
        vectors: dict[str, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
        for name, parameter in list(self.module.named_parameters()):
            if parameter.ndim >= 2:
                p = ShardedParameter(name, parameter, places[id(parameter)], compute_dtype, self.rank, self.world_size)
                by_path.setdefault(paths[name], []).append(p)
            else:
                vectors[name] = parameter, places[id(parameter)]
        self.vectors = vectors
        """What is replicated: the parameter, and the modules and attributes that it is at."""
        return [
            Unit(path, self.module.get_submodule(path), sharded, self._beside(sharded), self.group, self._tag)
            for path, sharded in by_path.items()
        ]

    def _beside(self, sharded: list[ShardedParameter]) -> list[BesideMatrix]:
        """Vectors that must be cast for a unit's matrices to be computed with; none that its module names in ``own_types``."""
        cast = {module: p.padded.dtype for p in sharded if p.padded.dtype != p.dtype for module, _ in p.places}
        return [
            BesideMatrix(module, attribute, parameter, cast[module])
            for parameter, places in self.vectors.values()
            for module, attribute in places
            if module in cast
            and parameter.is_floating_point()
            and parameter.dtype != cast[module]
            and attribute not in getattr(module, "own_types", ())
        ]

    def _register_hooks(self) -> None:
        """They live as long as the module: without them it could not be used."""
        self.module.register_forward_pre_hook(_weakly(self, FSDP._before_model), with_kwargs=True, prepend=True)
        self.module.register_forward_hook(_weakly(self, FSDP._after_model), always_call=True)
        for unit in self.units[1:]:
            unit.module.register_forward_pre_hook(
                _weakly(self, FSDP._before_unit, unit), with_kwargs=True, prepend=True
            )
            unit.module.register_forward_hook(_weakly(self, FSDP._after_unit, unit))

    # -- forward --------------------------------------------------------------------------------------------

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        _refuse_copy(module, self.module)
        if self._backward_runs():
            return
        self._refuse_changed()
        if torch.is_grad_enabled():
            self.reducer.expect()
        for unit in self.units:  # weights may be new since, and a forward may have ended in an error
            unit.release(stand_in=True)
        self._inside = True
        self.forward_order.begin()
        self.root.start("forward")
        first = self.forward_order.first()
        if first is not None:
            first.start("forward")
        self.root.gather("forward")

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also after a forward that has raised: ``output`` is None then."""
        if self._backward_runs() or not self._inside:
            return
        self._inside = False
        for unit in self.units[1:]:
            if unit.num_uses and not self.reshard_after_forward:
                unit.show_rows()
            else:
                unit.release(stand_in=False)  # gathered ahead, and not used
        if not torch.is_grad_enabled():
            self.root.release(stand_in=False)
        self.root.show_rows()  # a caller may now drop gradients, or save: of rows
        graph = self._watch_outputs(self.root, output)
        self.root.refuse_changed("in forward")
        last = self.backward_order.first()
        if graph and last is not None:
            last.start("backward")

    def _before_unit(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        _refuse_copy(module, unit.module)
        if self._backward_runs():
            unit.gather("backward")
            if unit.num_uses:  # recomputed, and the graph of the first time is the one that counts
                return None
        else:
            unit.gather("forward")
            following = self.forward_order.came(unit) if self._inside else None
            if following is not None and following is not unit:
                following.start("forward")
        if not torch.is_grad_enabled():
            return None
        unit.num_uses += 1
        # a list or a dictionary stays the caller's own: the unit may write into it
        leaves, spec = tree_flatten((args, kwargs), is_leaf=lambda x: x is not kwargs and not isinstance(x, tuple))
        tracked = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        if not tracked:
            return None
        marked = InputOfFSDPUnit.apply(self, unit, *(leaves[i] for i in tracked))  # type: ignore[no-untyped-call]
        for i, tensor in zip(tracked, marked, strict=True):
            leaves[i] = tensor
        new_args, new_kwargs = tree_unflatten(leaves, spec)
        return new_args, new_kwargs

    def _after_unit(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        self._watch_outputs(unit, output)
        if self._backward_runs():
            return
        unit.refuse_changed("in forward")
        if unit.num_uses and not self.reshard_after_forward:
            unit.show_rows(stand_in=self._inside)
        else:
            unit.release(stand_in=self._inside)

    def _watch_outputs(self, unit: Unit, output: Any) -> bool:
        """Gather again when the gradient of an output is there; returns whether there can be one."""
        found = False
        reference = weakref.ref(self)
        freed = {p.padded.untyped_storage()._cdata: p.name for p in unit.sharded}

        def gradient_came(_grad: Tensor) -> None:
            me = reference()
            if me is not None:
                me._begin_backward(unit)

        for tensor in _tensors(output, set()):
            name = freed.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
            if name is not None:
                raise TrainingError(
                    f"the forward of {unit.path} returns its weight {name}, or a view of it, whose memory is freed after it; "
                    "return a clone()"
                )
            if torch.is_grad_enabled() and tensor.grad_fn is not None:
                found = True
                tensor.register_hook(gradient_came)
        return found

    def _refuse_changed(self) -> None:
        """An error if modules hold other parameters than those that were wrapped, or of another type or place."""
        refuse_hooks({p.name: p.parameter for p in self.sharded})
        for p in self.sharded:
            for module, attribute in p.places:
                held = module._parameters.get(attribute)
                if held is not p.parameter and held is not p.whole and held is not p.stand_in:
                    raise TrainingError(_REPLACED.format(p.name))
            if p.parameter.dtype != p.dtype or p.parameter.device != p.device:
                raise TrainingError(_MOVED.format(p.name, p.parameter.dtype, p.parameter.device))
        for name, (parameter, places) in self.vectors.items():
            if any(module._parameters.get(attribute) is not parameter for module, attribute in places):
                raise TrainingError(_REPLACED.format(name))
        for bucket in self.buckets:
            for name, parameter, view in zip(bucket.layout.names, bucket.parameters, bucket.views, strict=True):
                if parameter.dtype != view.dtype or parameter.device != view.device:
                    raise TrainingError(_MOVED.format(name, parameter.dtype, parameter.device))

    # -- backward -------------------------------------------------------------------------------------------

    def _backward_runs(self) -> bool:
        """Whether a backward is under way; puts things right after one that has ended in an error."""
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._in_backward = False
            for unit in self.units:
                unit.in_backward, unit.num_uses = False, 0
                unit.release(stand_in=False)
        return self._in_backward

    def _begin_backward(self, unit: Unit) -> None:
        if torch.is_grad_enabled():
            raise TrainingError(
                "backward with create_graph=True through an FSDP module: its weights are freed before gradients of "
                "gradients are taken; take mode ddp"
            )
        if not self._backward_runs():
            self._in_backward = True
            self.reducer.outstanding |= self.reducer.synchronizing
            self.backward_order.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            for other in self.units:
                other.hide(stand_in=True)
        if unit.in_backward:
            return
        unit.refuse_changed("between forward and backward")
        unit.in_backward = True
        unit.gather("backward")
        if unit is self.root:
            return
        following = self.backward_order.came(unit)
        if following is not None and following is not unit:
            following.start("backward")

    def _backward_over(self, unit: Unit) -> None:
        """The gradient of the unit's inputs is there: nothing of its weights is needed any more."""
        unit.num_uses = max(0, unit.num_uses - 1)
        if unit.num_uses == 0 and unit.in_backward:
            self._finish_unit(unit)

    def _end_backward(self) -> None:
        for unit in reversed(self.units):  # those without a differentiable input, and the root
            if unit.in_backward or any(p.whole.grad is not None for p in unit.sharded):
                self._finish_unit(unit)
            unit.num_uses = 0
        for unit in self.units:
            unit.release(stand_in=False)
        self._in_backward = False

    def _finish_unit(self, unit: Unit) -> None:
        unit.in_backward = False
        unit.release(stand_in=True)
        if not self.keeps_whole_gradients:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Send a unit's gradients; at most one unit's are on the wire beside them."""
        trained = [p for p in unit.sharded if p.parameter.requires_grad]
        if not trained:
            return
        whole = [p.take_gradient() for p in trained]
        if self.average and self.world_size > 1:
            for grad in whole:
                scale_for_average(grad, self.world_size)
        sections = [grad.new_empty(grad.numel() // self.world_size) for grad in whole]
        names = [p.name for p in trained]
        pending = comm.reduce_scatter(whole, sections, tag=f"grad/{unit.path}", owner=names, group=self.group)
        self._settle(1)
        self._on_wire.append((trained, sections, pending))

    def _settle(self, num_left: int) -> None:
        """Wait until at most ``num_left`` units' gradients are on the wire."""
        while len(self._on_wire) > num_left:
            trained, sections, pending = self._on_wire.pop(0)
            pending.wait()
            for p, section in zip(trained, sections, strict=True):
                p.add_gradient(section)

    def _reduce_bucket(self, bucket: Bucket) -> comm.Pending:
        if self.average and self.world_size > 1:
            scale_for_average(bucket.flat, self.world_size)
        layout = bucket.layout
        return comm.all_reduce_(bucket.flat, tag=f"grad/bucket{layout.index}", owner=layout.names, group=self.group)


class InputOfFSDPUnit(torch.autograd.Function):
    """Passes a unit's inputs through; its backward comes when all of the unit's has been.

    torch names it where a unit changes an input in place: what the caller holds would not get the gradient of the change.
    """

    @staticmethod
    def forward(ctx: Any, fsdp: FSDP, unit: Unit, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.fsdp, ctx.unit = fsdp, unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.fsdp._backward_over(ctx.unit)
        return (None, None, *grads)


def _weakly(fsdp: FSDP, method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A hook that does not keep the wrapper alive, since the module that holds it is the wrapper's own."""
    reference = weakref.ref(fsdp)

    def hook(*args: Any) -> Any:
        me = reference()
        if me is None:
            raise TrainingError("the FSDP wrapper of this module is gone, and with it the other rows; keep it")
        return method(me, *first, *args)

    # torch.compile cuts its graph here: a unit is compiled, gathering and freeing are not
    return torch.compiler.disable(hook)  # type: ignore[no-any-return]


_REPLACED = "{} is not the parameter any more that was wrapped; write into it, as load_state_dict() does without assign"
_MOVED = "{} has become {} on {} since it was wrapped; move and cast a module before wrapping it"


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors in what a forward has returned: in containers, and in attributes of objects."""
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, str | bytes | int | float | type | nn.Module) or id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[Any]
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    else:
        inner = list(getattr(value, "__dict__", {}).values())
        if dataclasses.is_dataclass(value):  # its fields may be slots
            inner += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for one in inner:
        yield from _tensors(one, seen)


def _refuse_copy(module: nn.Module, wrapped: nn.Module) -> None:
    if module is not wrapped:
        raise TrainingError(
            "this module is a copy of one that FSDP has wrapped: it holds this rank's rows alone and cannot run; "
            "build it anew and fill it from gather_full_params()"
        )


def refuse_gradients(module: nn.Module) -> None:
    """`ConfigError` if a parameter has a gradient: it is whole, and not summed over ranks."""
    name = next((name for name, p in module.named_parameters() if p.grad is not None), None)
    if name is not None:
        raise ConfigError(f"{name} has a gradient already, which cannot be sharded; call zero_grad() before wrapping")


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """`ConfigError` if a parameter that is sharded has hooks of others on its gradient: whole weights get it instead."""
    for name, parameter in parameters.items():
        hooks = [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
        if any(getattr(hook, "__module__", None) != Reducer.__module__ for hook in hooks):
            raise ConfigError(
                f"{name} has a hook on its gradient, which would not run, as the parameter is sharded; remove it and look "
                "at the rows of its gradient after finish_gradient_sync(), or take mode ddp"
            )


def _refuse_wrapped(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, FSDP):
            raise ConfigError(f"{name or 'the module'} is wrapped in FSDP already; wrap the bare module once")
