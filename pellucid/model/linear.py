"""Linear layers: torch's, but for bfloat16 on a processor that cannot multiply it.

There torch emulates bfloat16 at a hundredth of the speed of float32 (machine D of bench/RESULTS.md). Our kernel reads
weights in bfloat16 and multiplies in float32, and gradients are float32 products; what goes in and comes out is rounded to
bfloat16 as torch does. The kernel's row has the same bits in any number of rows.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pellucid import kernels


class Linear(nn.Linear):
    """A linear layer as every model of ours has them."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [..., I]`` times ``weight [O, I]``, transposed, plus ``bias [O]``: ``[..., O]`` in the type that autocast says, or x's."""
    if not is_emulated(x) or weight.shape[1] % kernels.GROUP:
        return F.linear(x, weight, bias)
    if x.dtype != weight.dtype and not torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)  # which says what is wrong with that
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)[0]
    out: Tensor = _InFloat32.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def is_emulated(x: Tensor) -> bool:
    """Whether torch would compute products with ``x`` in bfloat16 by emulation, and we need not; compiled code is torch's."""
    return _type_of_products(x) == torch.bfloat16 and _processor_emulates() and kernels.available()


def is_in_float32(x: Tensor) -> bool:
    """Whether our kernels may compute products with ``x``: they do so in float32, which here is no more than torch would."""
    return (_type_of_products(x) == torch.float32 and kernels.available()) or is_emulated(x)


def _type_of_products(x: Tensor) -> torch.dtype | None:
    """As autocast says; None where only torch computes them."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or _elsewhere:
        return None
    if torch.is_autocast_enabled("cpu") and x.dtype != torch.float64:  # which autocast leaves alone
        return torch.get_autocast_dtype("cpu")
    return x.dtype


_elsewhere = False


@contextmanager
def as_elsewhere() -> Iterator[None]:
    """Meanwhile bfloat16 is torch's: for what must not depend on the processor that it is planned on."""
    global _elsewhere
    before, _elsewhere = _elsewhere, True
    try:
        yield
    finally:
        _elsewhere = before


@functools.cache
def _processor_emulates() -> bool:
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`linear`, and x as rows ``[N, I]`` and the weight, both in bfloat16."""
    rows, weight = x.reshape(-1, x.shape[-1]).to(torch.bfloat16), weight.to(torch.bfloat16)
    out = torch.ops.pellucid.bfloat16_linear(rows, weight, None if bias is None else bias.to(torch.bfloat16))
    return out.view(*x.shape[:-1], len(weight)), rows, weight


class _InFloat32(torch.autograd.Function):
    """Saves x and the weight in bfloat16, as torch under autocast does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out, rows, narrow = _product(x, weight, bias)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, narrow if needs_x else None)
        ctx.like = x.shape, x.dtype, weight.dtype, None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        shape, of_x, of_weight, of_bias = ctx.like
        grad = grad.reshape(-1, grad.shape[-1]).float()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        with torch.autocast("cpu", enabled=False):
            return (
                (grad @ weight.float()).to(of_x).view(shape) if needs_x else None,
                (grad.t() @ rows.float()).to(of_weight) if needs_weight else None,
                grad.sum(0).to(of_bias) if needs_bias else None,
            )
