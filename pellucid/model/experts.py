"""The products of all experts of a layer, forward and backward, over tokens sorted by expert.

Shapes: N tokens, D model width, E experts, K experts a token, I width inside an expert. ``experts`` are their weights in the
order gate ``[I, D]``, up ``[I, D]``, down ``[D, I]`` of the first, of the second, ... Rows are a token once for each of its
K experts; those of one expert are neighbours.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def mix(
    x: Tensor, weights: Tensor, order: Tensor, counts: list[int], experts: Sequence[Tensor], *, min_rows: int
) -> Tensor:
    """Every token's experts, weighted and added up: ``[N, D]``, in x's type.

    Args:
        x: ``[N, D]``, in the type to compute in.
        weights: ``[N, K]``.
        order: sorts the N K rows by expert.
        counts: rows of each expert.
        min_rows: a product gets at least so many rows, by padding, so that its bits do not depend on how many there are.
    """
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

    def of_widen(self, grad: Tensor, x: Tensor) -> list[Tensor]:
        """The gradients of the gates and ups, ``[2 I, D]`` for each expert."""
        ...

    def of_narrow(self, grad: Tensor, inner: Tensor) -> list[Tensor]:
        """The gradients of the downs, ``[D, I]`` for each expert."""
        ...


class _Grouped:
    """One call for all experts."""

    def __init__(self, wide: Tensor, down: Tensor, counts: list[int], dtype: torch.dtype) -> None:
        self.wide, self.down = wide.to(dtype), down.to(dtype)
        self.ends = torch.tensor(counts).cumsum(0).to(wide.device, torch.int32)

    def widen(self, x: Tensor) -> Tensor:
        return F.grouped_mm(x, self.wide.transpose(1, 2), offs=self.ends)

    def narrow(self, inner: Tensor) -> Tensor:
        return F.grouped_mm(inner, self.down.transpose(1, 2), offs=self.ends)

    def widen_back(self, grad: Tensor) -> Tensor:
        return F.grouped_mm(grad, self.wide, offs=self.ends)

    def narrow_back(self, grad: Tensor) -> Tensor:
        return F.grouped_mm(grad, self.down, offs=self.ends)

    def of_widen(self, grad: Tensor, x: Tensor) -> list[Tensor]:
        return list(F.grouped_mm(grad.t(), x, offs=self.ends).unbind())

    def of_narrow(self, grad: Tensor, inner: Tensor) -> list[Tensor]:
        return list(F.grouped_mm(grad.t(), inner, offs=self.ends).unbind())


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

    def of_widen(self, grad: Tensor, x: Tensor) -> list[Tensor]:
        return [torch.mm(grad[rows].t(), x[rows]) for rows in self._rows()]

    def of_narrow(self, grad: Tensor, inner: Tensor) -> list[Tensor]:
        return [torch.mm(grad[rows].t(), inner[rows]) for rows in self._rows()]

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
            return _Grouped(*found, counts, dtype)
    return _OneByOne(experts, counts, min_rows, dtype)


class _Mix(torch.autograd.Function):
    """What is the same for all experts is one operation over all rows; only products go by expert.

    Saves the inputs and one ``[N K, 2 I]``; rows are gathered again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, order: Tensor, counts: list[int], min_rows: int, *experts: Tensor
    ) -> Tensor:
        products = _products(experts, counts, min_rows, x.dtype)
        wide = products.widen(x.index_select(0, order // weights.shape[1]))
        gate, up = wide.chunk(2, dim=1)
        out = products.narrow(F.silu(gate).mul_(up))
        ctx.save_for_backward(x, weights, order, wide, *experts)
        ctx.counts = counts
        return add_up(out, weights, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, wide, *experts = ctx.saved_tensors
        token = order // weights.shape[1]
        products = _products(experts, ctx.counts, 1, x.dtype)
        gate, up = wide.chunk(2, dim=1)
        inner = F.silu(gate).mul_(up)
        grad_out = grad.index_select(0, token)
        grad_inner = products.narrow_back(grad_out)  # not yet weighted
        grad_weights = torch.empty_like(weights).flatten()
        grad_weights[order] = _dot(grad_inner, inner).to(weights.dtype)
        share = weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        grad_inner *= share
        grad_out *= share
        trained = ctx.needs_input_grad[5:]
        downs = products.of_narrow(grad_out, inner) if any(trained) else []
        del grad_out
        grad_wide = torch.empty_like(wide)
        grad_gate, grad_up = grad_wide.chunk(2, dim=1)
        torch.mul(grad_inner, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad_inner.mul_(up), gate))
        wides = products.of_widen(grad_wide, x.index_select(0, token)) if any(trained) else []
        grad_x = add_up(products.widen_back(grad_wide), torch.ones_like(weights), order)
        grads = [g for w, down in zip(wides, downs, strict=True) for g in (*w.chunk(2), down)]
        typed = [g.to(w.dtype) if t else None for g, w, t in zip(grads, experts, trained, strict=True)] if grads else ()
        return (grad_x, grad_weights.view(weights.shape), None, None, None, *(typed or [None] * len(experts)))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of each row, summed in float32 at least."""
    return (a.float() * b.float()).sum(-1) if a.dtype.itemsize < 4 else (a * b).sum(-1)


def add_up(out: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Rows in the order of experts ``[N K, D] -> [N, D]``, each token's K in the order they were chosen in."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    chosen = out.index_select(0, place).view(*weights.shape, -1)  # [N, K, D]
    return torch.bmm(weights.to(out.dtype).unsqueeze(1), chosen).squeeze(1)


def padded(x: Tensor, rows: int) -> Tensor:
    """``x`` with at least so many rows."""
    return x if len(x) >= rows else F.pad(x, (0, 0, 0, rows - len(x)))
