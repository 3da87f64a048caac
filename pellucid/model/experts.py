"""The products of all experts of a layer, forward and backward, over tokens sorted by expert.

Shapes: N tokens, D model width, E experts, K experts a token, I width inside an expert. ``experts`` are their weights in the
order gate ``[I, D]``, up ``[I, D]``, down ``[D, I]`` of the first, of the second, ... Rows are a token once for each of its
K experts; those of one expert are neighbours.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pellucid.kernels.experts import fits
from pellucid.model.linear import is_emulated


def mix(
    x: Tensor, weights: Tensor, order: Tensor, counts: list[int], experts: Sequence[Tensor], *, min_rows: int
) -> Tensor:
    """Every token's experts, weighted and added up: ``[N, D]``, in x's type.

    In float32 on the CPU, and in bfloat16 that would be emulated, by the kernel of `pellucid.kernels.experts`, else by torch's
    products.

    Args:
        x: ``[N, D]``, in the type to compute in.
        weights: ``[N, K]``.
        order: sorts the N K rows by expert.
        counts: rows of each expert.
        min_rows: a product gets at least so many rows, by padding, so that its bits do not depend on how many there are; the
            kernel's never do.
    """
    if fits(x, experts, widened=x.dtype == torch.bfloat16 and is_emulated(x)):
        by_kernel: Tensor = _MixByKernel.apply(x, weights, order, counts, *experts)  # type: ignore[no-untyped-call]
        return by_kernel
    mixed: Tensor = _Mix.apply(x, weights, order, counts, min_rows, *experts)  # type: ignore[no-untyped-call]
    return mixed


def pack(experts: Sequence[Tensor]) -> None:
    """Let the weights of all experts lie one after another in one storage, where `Grouped` multiplies them in one call."""
    first = experts[0]
    if first.is_meta or stacked(experts) is not None or len({(w.dtype, w.device) for w in experts}) > 1:
        return
    storage = torch.empty(sum(w.numel() for w in experts), dtype=first.dtype, device=first.device)
    start = 0
    for weight in experts:
        place = storage[start : start + weight.numel()].view(weight.shape)
        place.copy_(weight.data)
        weight.data = place
        start += weight.numel()


def stacked(experts: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Views ``[E, 2 I, D]`` of all gates and ups and ``[E, D, I]`` of all downs; None where they do not lie so."""
    gate, down = experts[0], experts[2]
    inner, width = gate.shape
    if len({w.untyped_storage()._cdata for w in experts}) > 1 or not all(w.is_contiguous() for w in experts):
        return None
    starts = [w.storage_offset() for w in experts]
    step = starts[3] - starts[0] if len(experts) > 3 else 3 * gate.numel()
    expected = [starts[i] + e * step for e in range(len(experts) // 3) for i in range(3)]
    if step < 3 * gate.numel() or starts != expected or starts[1] != starts[0] + gate.numel():
        return None
    num = len(experts) // 3
    wide = torch.as_strided(gate.detach(), (num, 2 * inner, width), (step, width, 1))
    return wide, torch.as_strided(down.detach(), (num, width, inner), (step, inner, 1))


class _Products(Protocol):
    """What `_Mix` multiplies with; a name says what a row's width becomes."""

    def widen(self, x: Tensor) -> Tensor:
        """``[rows, D] -> [rows, 2 I]``: gates, then ups."""
        ...

    def narrow(self, inner: Tensor) -> Tensor:
        """``[rows, I] -> [rows, D]``."""
        ...

    def widen_back(self, grad: Tensor) -> Tensor:
        """``[rows, 2 I] -> [rows, D]``, the gradient of `widen`."""
        ...

    def narrow_back(self, grad: Tensor) -> Tensor:
        """``[rows, D] -> [rows, I]``, the gradient of `narrow`."""
        ...

    def of_widen(self, grad: Tensor, x: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """The gradients of gate and up, ``[I, D]`` each, of the first expert, of the second, ..., in that type."""
        ...

    def of_narrow(self, grad: Tensor, inner: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        """The gradients of the downs, ``[D, I]`` for each expert, in that type."""
        ...


class _Grouped:
    """One call for all experts."""

    def __init__(self, wide: Tensor, down: Tensor, counts: list[int]) -> None:
        self.wide, self.down = wide, down
        self.ends = torch.tensor(counts).cumsum(0).to(wide.device, torch.int32)

    def widen(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x, self.wide.transpose(1, 2), offs=self.ends)

    def narrow(self, inner: Tensor) -> Tensor:
        return F.grouped_mm(inner, self.down.transpose(1, 2), offs=self.ends)

    def widen_back(self, grad: Tensor) -> Tensor:
        return F.grouped_mm(grad, self.wide, offs=self.ends)

    def narrow_back(self, grad: Tensor) -> Tensor:
        return F.grouped_mm(grad, self.down, offs=self.ends)

    def of_widen(self, grad: Tensor, x: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        both = F.grouped_mm(grad.t(), x, offs=self.ends).to(dtype)
        return both.view(2 * len(both), -1, both.shape[-1]).unbind()

    def of_narrow(self, grad: Tensor, inner: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        return F.grouped_mm(grad.t(), inner, offs=self.ends).to(dtype).unbind()


class _OneByOne:
    """A call for each expert: for types and widths that the grouped kernel does not take, and for padded rows.

    Weights are brought into the type of the rows one at a time.
    """

    def __init__(self, experts: Sequence[Tensor], counts: list[int], min_rows: int, dtype: torch.dtype) -> None:
        self.gates, self.ups, self.downs = (experts[i::3] for i in range(3))
        self.counts, self.min_rows, self.dtype = counts, min_rows, dtype

    def widen(self, x: Tensor) -> Tensor:
        inner = len(self.gates[0])
        out = x.new_empty(len(x), 2 * inner)
        for rows, gate, up in zip(self._rows(), self.gates, self.ups, strict=True):
            self._product(x[rows], gate, out[rows, :inner])
            self._product(x[rows], up, out[rows, inner:])
        return out

    def narrow(self, inner: Tensor) -> Tensor:
        out = inner.new_empty(len(inner), len(self.downs[0]))
        for rows, down in zip(self._rows(), self.downs, strict=True):
            self._product(inner[rows], down, out[rows])
        return out

    def widen_back(self, grad: Tensor) -> Tensor:
        gates, ups = grad.chunk(2, dim=1)
        out = grad.new_empty(len(grad), self.gates[0].shape[1])
        for rows, gate, up in zip(self._rows(), self.gates, self.ups, strict=True):
            torch.mm(gates[rows], gate.to(self.dtype), out=out[rows])
            out[rows].addmm_(ups[rows], up.to(self.dtype))
        return out

    def narrow_back(self, grad: Tensor) -> Tensor:
        out = grad.new_empty(len(grad), self.downs[0].shape[1])
        for rows, down in zip(self._rows(), self.downs, strict=True):
            torch.mm(grad[rows], down.to(self.dtype), out=out[rows])
        return out

    def of_widen(self, grad: Tensor, x: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        products = (torch.mm(grad[rows].t(), x[rows]).to(dtype) for rows in self._rows())
        return [half for both in products for half in both.chunk(2)]

    def of_narrow(self, grad: Tensor, inner: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
        return [torch.mm(grad[rows].t(), inner[rows]).to(dtype) for rows in self._rows()]

    def _rows(self) -> list[slice]:
        ends, end = [], 0
        for count in self.counts:
            ends.append(slice(end, end + count))
            end += count
        return ends

    def _product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        weight = weight.t().to(self.dtype)
        if len(x) >= self.min_rows:
            torch.mm(x, weight, out=out)
        elif len(x):
            out.copy_(torch.mm(padded(x, self.min_rows), weight)[: len(x)])


def _products(experts: Sequence[Tensor], counts: list[int], min_rows: int, dtype: torch.dtype) -> _Products:
    inner, width = experts[0].shape
    aligned = inner * dtype.itemsize % 16 == 0 and width * dtype.itemsize % 16 == 0
    known = dtype == torch.bfloat16 or (dtype == torch.float32 and experts[0].device.type == "cpu")
    if min_rows == 1 and aligned and known and hasattr(F, "grouped_mm"):
        found = stacked(experts)
        if found is not None:
            return _Grouped(found[0].to(dtype), found[1].to(dtype), counts)
    return _OneByOne(experts, counts, min_rows, dtype)


def _is_cast(products: _Products, experts: Sequence[Tensor]) -> TypeGuard[_Grouped]:
    return isinstance(products, _Grouped) and products.wide.dtype != experts[0].dtype


ROUND = 16
"""Rows of an expert are filled up to a multiple of this where oneDNN multiplies: it makes a kernel for each new number of rows,
and numbers change from step to step (measured at 64 experts and 1,024 tokens: half of the time of a step)."""


class _Places:
    """Where the rows of a token stand among those of all experts.

    Args:
        order: as in `mix`.
        per_token: K.
        counts: rows of each expert.
        multiple: fill each expert's rows up to a multiple of this, with rows that count for nothing.
    """

    def __init__(self, order: Tensor, per_token: int, counts: list[int], multiple: int) -> None:
        self.counts = [-(-count // multiple) * multiple for count in counts]
        token = order // per_token
        self.token, self.slot = token, torch.arange(len(order), device=order.device)
        """Which token each row is of, and the row of each element of ``order``."""
        filling = [full - count for full, count in zip(self.counts, counts, strict=True)]
        if any(filling):
            before = torch.tensor([0, *filling[:-1]]).cumsum(0).to(order.device)
            self.slot += before.repeat_interleave(torch.tensor(counts).to(order.device), output_size=len(order))
            self.token = token.new_zeros(sum(self.counts)).index_copy_(0, self.slot, token)


class _Mix(torch.autograd.Function):
    """What is the same for all experts is one operation over all rows; only products go by expert.

    Saves the inputs, one ``[N K, 2 I]`` and, as autocast does, weights that it cast; rows are gathered again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, order: Tensor, counts: list[int], min_rows: int, *experts: Tensor
    ) -> Tensor:
        rounded = x.device.type == "cpu" and x.dtype == torch.bfloat16 and min_rows == 1
        places = _Places(order, weights.shape[1], counts, ROUND if rounded else 1)
        products = _products(experts, places.counts, min_rows, x.dtype)
        wide = products.widen(x.index_select(0, places.token))
        gate, up = wide.chunk(2, dim=1)
        out = products.narrow(F.silu(gate).mul_(up))
        cast = (products.wide, products.down) if _is_cast(products, experts) else ()
        ctx.save_for_backward(x, weights, order, wide, *cast, *experts)
        ctx.places, ctx.num_cast = places, len(cast)
        return add_up(out, weights, order, places.slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, wide, *rest = ctx.saved_tensors
        cast, experts = rest[: ctx.num_cast], rest[ctx.num_cast :]
        token, slot, counts = ctx.places.token, ctx.places.slot, ctx.places.counts
        products = _Grouped(cast[0], cast[1], counts) if cast else _products(experts, counts, 1, x.dtype)
        gate, up = wide.chunk(2, dim=1)
        active = F.silu(gate)
        inner = active * up
        grad_out = grad.index_select(0, token)
        grad_inner = products.narrow_back(grad_out)  # not yet weighted
        grad_weights = torch.empty_like(weights).flatten()
        grad_weights[order] = _dot(grad_inner, inner).to(weights.dtype)[slot]
        share = x.new_zeros(len(token)).index_copy_(0, slot, weights.flatten()[order].to(x.dtype)).unsqueeze(-1)
        grad_inner *= share
        grad_out *= share
        trained, dtype = ctx.needs_input_grad[5:], experts[0].dtype
        downs = products.of_narrow(grad_out, inner, dtype) if any(trained) else ()
        del grad_out
        grad_wide = torch.empty_like(wide)
        grad_gate, grad_up = grad_wide.chunk(2, dim=1)
        torch.mul(grad_inner, active, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad_inner.mul_(up), gate))
        wides = products.of_widen(grad_wide, x.index_select(0, token), dtype) if any(trained) else ()
        grad_x = add_up(products.widen_back(grad_wide), torch.ones_like(weights), order, slot)
        of_experts = _of_experts(wides, downs, trained)
        return (grad_x, grad_weights.view(weights.shape), None, None, None, *of_experts)


class _MixByKernel(torch.autograd.Function):
    """As `_Mix`, in one call. Saves the inputs and one ``[N K, 2 I]`` in float32; weights are widened again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, order: Tensor, counts: list[int], *experts: Tensor) -> Tensor:
        wide_weights, wide_experts = weights.float(), _widened(experts, counts, x.dtype)
        out, wide = torch.ops.pellucid.experts(x.float(), wide_weights, order, counts, wide_experts)
        ctx.save_for_backward(x, weights, order, wide, *experts)
        ctx.counts = counts
        return cast(Tensor, out).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, wide, *experts = ctx.saved_tensors
        trained, wide_experts = ctx.needs_input_grad[4:], _widened(experts, ctx.counts, x.dtype)
        grad_x, grad_weights, wides, downs = torch.ops.pellucid.experts_backward(
            grad.float(), x.float(), weights.float(), order, ctx.counts, wide_experts, wide, any(trained)
        )
        dtype = experts[0].dtype
        of_experts = _of_experts(wides.to(dtype).unbind(), downs.to(dtype).unbind(), trained)
        return (grad_x.to(x.dtype), grad_weights.to(weights.dtype), None, None, *of_experts)


def _widened(experts: Sequence[Tensor], counts: Sequence[int], dtype: torch.dtype) -> Sequence[Tensor]:
    """In float32, rounded to ``dtype`` before; those that no row goes to, which nobody reads, as they are."""
    if dtype == torch.float32:
        return experts
    return [w.to(dtype).float() if counts[i // 3] else w for i, w in enumerate(experts)]


def _of_experts(wides: Sequence[Tensor], downs: Sequence[Tensor], trained: Sequence[bool]) -> list[Tensor | None]:
    """The gradients in the order of ``experts``, None where it is not trained."""
    found: list[Tensor | None] = [None] * len(trained)
    if any(trained):
        found[0::3], found[1::3], found[2::3] = wides[0::2], wides[1::2], downs
    return [g if t else None for g, t in zip(found, trained, strict=True)]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of each row, summed in float32 at least."""
    return (a.float() * b.float()).sum(-1) if a.dtype.itemsize < 4 else (a * b).sum(-1)


def add_up(out: Tensor, weights: Tensor, order: Tensor, slot: Tensor | None = None) -> Tensor:
    """Rows in the order of experts ``[rows, D] -> [N, D]``, each token's K in the order they were chosen in.

    Args:
        slot: the row of each element of ``order``; None: they are the rows.
    """
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) if slot is None else slot
    chosen = out.index_select(0, place).view(*weights.shape, -1)  # [N, K, D]
    return torch.bmm(weights.to(out.dtype).unsqueeze(1), chosen).squeeze(1)


def padded(x: Tensor, rows: int) -> Tensor:
    """``x`` with at least so many rows."""
    return x if len(x) >= rows else F.pad(x, (0, 0, 0, rows - len(x)))
