"""The pieces of full sharding: a matrix of which a rank holds rows, and units that are gathered and freed together.

W ranks. See `pellucid.parallel.fsdp`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pellucid.errors import TrainingError
from pellucid.parallel import comm
from pellucid.parallel.ddp import mark_rows
from pellucid.parallel.layout import row_range, rows_each


class Elsewhere(nn.Parameter):
    """What stands in a module's place for a weight while the module that owns it does not run."""

    weight_name: str

    @classmethod
    def of(cls, name: str, shape: torch.Size, like: Tensor) -> "Elsewhere":
        """A stand-in that knows the shape and dtype of the weight and nothing else."""
        nothing = torch.empty(1, dtype=like.dtype, device=like.device).expand(shape)
        made: Elsewhere = torch.Tensor._make_subclass(cls, nothing, like.requires_grad)
        made.weight_name = name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" or func is Tensor.size or func is Tensor.dim:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        named = next(x.weight_name for x in tree_flatten((args, kwargs))[0] if isinstance(x, Elsewhere))
        raise TrainingError(
            f"{named} is first touched outside the forward of a module that owns it, where this rank holds only its own rows; "
            "use it inside that module's forward, or move the layer out of its ModuleList or Sequential"
        )


class ShardedParameter:
    """A matrix of which this rank holds some rows. ``parameter``, the module's own object, holds just those."""

    def __init__(
        self, name: str, parameter: nn.Parameter, places: list[tuple[nn.Module, str]], compute_dtype: torch.dtype | None,
        rank: int, num_ranks: int,
    ) -> None:  # fmt: skip
        self.name, self.parameter, self.places, self.shape = name, parameter, places, parameter.shape
        self.num_rows = rows_each(parameter.shape[0], num_ranks)
        """Of each rank's section; the last ranks may hold fewer."""
        self.first, self.last = row_range(parameter.shape[0], rank, num_ranks)
        self.section = slice(rank * self.num_rows, (rank + 1) * self.num_rows)
        padded = (self.num_rows * num_ranks, *self.shape[1:])
        self.dtype, self.device = parameter.dtype, parameter.device
        computes = compute_dtype if compute_dtype is not None and self.dtype.is_floating_point else self.dtype
        self.padded = torch.empty(padded, dtype=computes, device=self.device)
        """All sections, in a storage that is there only while the unit computes."""
        # not a view of it: what is written by a gather is not a change that autograd has to know of
        whole = torch.empty(0, dtype=self.padded.dtype, device=parameter.device)
        whole.set_(self.padded.untyped_storage(), 0, self.shape, self.padded.stride())
        self.whole = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        self.stand_in = Elsewhere.of(name, self.shape, self.whole)
        self.num_bytes = self.padded.untyped_storage().nbytes()
        self.free()
        parameter.data = parameter.data[self.first : self.last].clone(memory_format=torch.contiguous_format)
        mark_rows(parameter)
        self._versions = self.whole._version, parameter._version
        self.reached = False
        """A gradient came in this accumulation window."""

    @property
    def start(self) -> int:
        """This rank's first element, in the flattened parameter."""
        return self.first * self.shape[1:].numel()

    def allocate(self) -> Tensor:
        """Room for the whole weight, with this rank's rows in their place; returns that place, flat."""
        self.padded.untyped_storage().resize_(self.num_bytes)
        mine = self.padded[self.section]
        own = self.last - self.first
        mine[:own].copy_(self.parameter.detach())
        mine[own:].zero_()
        return mine.view(-1)

    def note_forward(self) -> None:
        """A forward uses the weight as it is now."""
        self._versions = self.whole._version, self.parameter._version

    def refuse_changed(self, when: str) -> None:
        """`TrainingError` if the weight is no longer what a forward has used."""
        before, self._versions = self._versions, (self.whole._version, self.parameter._version)
        if self._versions[0] != before[0]:
            raise TrainingError(
                f"{self.name} is changed in place {when}, in a copy that is dropped after it; change it between steps"
            )
        if self._versions[1] != before[1]:
            raise TrainingError(f"{self.name} has changed {when}; backward needs the weights of its forward")

    def free(self) -> None:
        """Give the whole weight's memory back. What autograd has saved of it is there again after the next gather."""
        self.padded.untyped_storage().resize_(0)

    def put(self, what: nn.Parameter) -> None:
        """What the modules that own the weight see."""
        for module, attribute in self.places:
            module._parameters[attribute] = what

    def take_gradient(self) -> Tensor:
        """The whole gradient, flat, one section a rank, zero where none came; the weight has none afterwards."""
        grad, self.whole.grad = self.whole.grad, None
        self.reached |= grad is not None
        dtype = self.parameter.dtype
        if grad is not None and grad.dtype == dtype and grad.shape == self.padded.shape and grad.is_contiguous():
            return grad.view(-1)
        padded = torch.zeros(self.padded.shape, dtype=dtype, device=self.padded.device)
        if grad is not None:
            padded[: self.shape[0]].copy_(grad)
        return padded.view(-1)

    def add_gradient(self, section: Tensor) -> None:
        """Add this rank's section of a gradient that is summed over ranks."""
        own = section.view(self.num_rows, *self.shape[1:])[: self.last - self.first]
        if self.parameter.grad is None:
            self.parameter.grad = own
        else:
            self.parameter.grad.add_(own)


@dataclass(frozen=True, slots=True)
class BesideMatrix:
    """A replicated vector, such as a bias, of a module whose matrix is computed with in another type."""

    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    dtype: torch.dtype

    def put(self, *, cast: bool) -> None:
        """What the module sees: the vector in the matrix's type, or the parameter."""
        what: Any = self.parameter.to(self.dtype) if cast else self.parameter
        self.module._parameters[self.attribute] = what


class Unit:
    """Parameters that are gathered and freed together."""

    def __init__(
        self, path: str, module: nn.Module, sharded: list[ShardedParameter], beside: list[BesideMatrix],
        group: comm.Group, tag: str = "param",
    ) -> None:  # fmt: skip
        self.path, self.module, self.sharded, self.group, self.tag = path or "root", module, sharded, group, tag
        self.beside = beside
        self.names = [p.name for p in sharded]
        self.gathered = False
        self.in_backward = False
        self.num_uses = 0
        """Forwards whose backward has not been through."""
        self._pending: comm.Pending | None = None

    @torch.no_grad()
    def start(self, phase: str) -> None:
        """Begin to gather, unless that is done or under way."""
        if self.gathered or self._pending is not None or not self.sharded:
            return
        sections = [p.allocate() for p in self.sharded]
        if phase == "forward":
            for p in self.sharded:
                p.note_forward()
        whole = [p.padded.view(-1) for p in self.sharded]
        self._pending = comm.all_gather(
            sections, whole, tag=f"{self.tag}/{self.path}/{phase}", owner=self.names, group=self.group
        )

    def gather(self, phase: str) -> None:
        """The modules see whole weights after this."""
        self.start(phase)
        if self._pending is not None:
            self._pending.wait()
            self._pending, self.gathered = None, True
        for p in self.sharded:
            p.whole.requires_grad_(p.parameter.requires_grad)
            p.put(p.whole)
        for vector in self.beside:
            vector.put(cast=True)

    def release(self, *, stand_in: bool) -> None:
        """Free whole weights; the modules see this rank's rows again, or, while others compute, a stand-in."""
        if self._pending is not None:
            self._pending.wait()
        if self.gathered or self._pending is not None:
            for p in self.sharded:
                p.free()
        self._pending, self.gathered = None, False
        self.hide(stand_in=stand_in)

    def hide(self, *, stand_in: bool) -> None:
        """What modules see while the weights are not gathered."""
        if not self.gathered:
            self.show_rows(stand_in=stand_in)

    def show_rows(self, *, stand_in: bool = False) -> None:
        """Modules see this rank's rows, or a stand-in, whether or not whole weights are there."""
        for p in self.sharded:
            p.put(p.stand_in if stand_in else p.parameter)
        for vector in self.beside:
            vector.put(cast=False)

    def refuse_changed(self, when: str) -> None:
        """`TrainingError` if a weight is no longer what the last forward has used."""
        for p in self.sharded:
            p.refuse_changed(when)


class Order:
    """In which order units are used, as the time before showed, so that the next can be gathered ahead."""

    def __init__(self) -> None:
        self.known: list[Unit] = []
        self.num_changes = 0
        """How often a unit came that was not expected; nothing is gathered ahead then until the order is known anew."""
        self._now: list[Unit] = []
        self._as_known = True

    def begin(self) -> None:
        """A pass over the model begins."""
        if self._now:
            self.num_changes += self._as_known and len(self._now) < len(self.known)
            self.known = self._now
        self._now, self._as_known = [], True

    def came(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` is used; returns the one that should come next."""
        i = len(self._now)
        self._now.append(unit)
        if self._as_known and self.known and (i >= len(self.known) or self.known[i] is not unit):
            self._as_known = False
            self.num_changes += 1
        return self.known[i + 1] if self._as_known and i + 1 < len(self.known) else None

    def first(self) -> Unit | None:
        """The unit that should come first in the next pass, or in the one that has just begun."""
        return next(iter(self._now or self.known), None)
