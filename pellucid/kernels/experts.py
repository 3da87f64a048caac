"""The experts of a layer, forward and backward, in the kernel of experts.cpp.

Shapes: N tokens, D model width, E experts, K experts a token, I width inside an expert. Rows are a token once for each of its K
experts; those of one expert are neighbours.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pellucid.kernels.build import available, check, library
from pellucid.kernels.linear import LANES


class _Experts(ctypes.Structure):
    """`Experts` of experts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "choices", "experts", "width", "inner", "threads")),
        *((name, ctypes.c_void_p) for name in ("starts", "order", "x", "shares", "weights", "wide")),
    )


class _Gradients(ctypes.Structure):
    """`Gradients` of experts.cpp."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("out", "x", "shares", "wide", "down"))


def fits(x: Tensor, experts: Sequence[Tensor], *, widened: bool = False) -> bool:
    """Whether the kernel computes this: float32 on the CPU, sizes that are multiples of `LANES`.

    Args:
        widened: everything will be made float32 before.
    """
    return (
        x.device.type == "cpu"
        and not any(size % LANES for size in experts[0].shape)
        and (widened or {x.dtype, *(w.dtype for w in experts)} == {torch.float32})
        and all(w.is_contiguous() for w in experts)
        and available()
    )


def _struct(
    x: Tensor, weights: Tensor, order: Tensor, counts: Sequence[int], experts: Sequence[Tensor], wide: Tensor
) -> tuple[_Experts, object]:
    """The second must be held as long as the first is."""
    starts = (ctypes.c_int64 * (len(counts) + 1))(*accumulate(counts, initial=0))
    addresses = (ctypes.c_void_p * len(experts))(*(w.data_ptr() for w in experts))
    inner, width = experts[0].shape
    assert starts[len(counts)] == len(order) == weights.numel() and len(experts) == 3 * len(counts)
    described = _Experts(
        len(x), weights.shape[1], len(counts), width, inner, torch.get_num_threads(), ctypes.addressof(starts),
        order.data_ptr(), x.data_ptr(), weights.data_ptr(), ctypes.addressof(addresses), wide.data_ptr(),
    )  # fmt: skip
    return described, (starts, addresses)


torch.library.define(
    "pellucid::experts",
    "(Tensor x, Tensor weights, Tensor order, int[] counts, Tensor[] experts) -> (Tensor, Tensor)",
)
torch.library.define(
    "pellucid::experts_backward",
    "(Tensor grad, Tensor x, Tensor weights, Tensor order, int[] counts, Tensor[] experts, Tensor wide, bool trained)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


def forward(
    library: ctypes.CDLL, x: Tensor, weights: Tensor, order: Tensor, counts: Sequence[int], experts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """``[N, D]``, and what backward needs: gates and ups, ``[N K, 2 I]``.

    Args:
        x: ``[N, D]``.
        weights: ``[N, K]``, by which a token's experts count.
        order: ``[N K]``, sorts the pairs of a token and an expert by expert.
        counts: rows of each expert.
        experts: gate ``[I, D]``, up ``[I, D]`` and down ``[D, I]`` of the first, of the second, ...
    """
    x, weights, order = x.contiguous(), weights.contiguous(), order.contiguous()
    out, wide = _forward_shapes(x, weights, order, counts, experts)
    described, held = _struct(x, weights, order, counts, experts, wide)
    check(library.pellucid_experts_forward(ctypes.addressof(described), out.data_ptr()))
    del held
    return out, wide


def backward(
    library: ctypes.CDLL, grad: Tensor, x: Tensor, weights: Tensor, order: Tensor, counts: Sequence[int],
    experts: Sequence[Tensor], wide: Tensor, trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of x ``[N, D]`` and of the weights ``[N, K]``; of gates and ups ``[2 E, I, D]`` and of downs ``[E, D, I]``.

    The last two are empty where no expert is trained.
    """
    grad, x, weights, order = grad.contiguous(), x.contiguous(), weights.contiguous(), order.contiguous()
    grads: tuple[Tensor, Tensor, Tensor, Tensor] = _backward_shapes(
        grad, x, weights, order, counts, experts, wide, trained
    )
    described, held = _struct(x, weights, order, counts, experts, wide)
    pointers = _Gradients(*(g.data_ptr() if g.numel() else None for g in (grad, *grads)))
    check(library.pellucid_experts_backward(ctypes.addressof(described), ctypes.addressof(pointers)))
    del held
    return grads


def disagreement(library: ctypes.CDLL) -> str | None:
    """What a library computes otherwise than torch, in words: a few tokens through two experts, forward and backward."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    x, weights, grad = drawn(13, 32), drawn(13, 1), drawn(13, 32)
    experts = [drawn(*shape) for _ in range(2) for shape in ((16, 32), (16, 32), (32, 16))]
    described = x, weights, torch.arange(13, device="cpu"), [8, 5], experts
    out, wide = forward(library, *described)
    grad_x, grad_weights, wides, downs = backward(library, grad, *described, wide, True)
    for e, rows in enumerate((slice(0, 8), slice(8, 13))):
        found = out[rows], grad_x[rows], grad_weights[rows], wides[2 * e], wides[2 * e + 1], downs[e]
        exact = _exactly(*(t.double() for t in (x[rows], weights[rows], grad[rows], *experts[3 * e : 3 * e + 3])))
        for ours, theirs in zip(found, exact, strict=True):
            if not bool((ours - theirs).abs().max() < 1e-4 * theirs.abs().max()):
                return "outputs or gradients of experts are not torch's"
    return None


def _exactly(x: Tensor, weight: Tensor, grad: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """Of one expert, written out, since autograd may be switched off: its output and all gradients."""
    gates, ups = x @ gate.T, x @ up.T
    sigmoid = gates.sigmoid()
    inner = gates * sigmoid * ups
    grad_inner = grad * weight @ down
    of_ups = grad_inner * gates * sigmoid
    of_gates = grad_inner * ups * sigmoid * (1 + gates * (1 - sigmoid))
    return (
        inner @ down.T * weight,
        of_gates @ gate + of_ups @ up,
        (grad * (inner @ down.T)).sum(1, keepdim=True),
        of_gates.T @ x,
        of_ups.T @ x,
        (grad * weight).T @ inner,
    )


@torch.library.impl("pellucid::experts", "CPU")
def _forward(
    x: Tensor, weights: Tensor, order: Tensor, counts: Sequence[int], experts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    return forward(library(), x, weights, order, counts, experts)


@torch.library.impl("pellucid::experts_backward", "CPU")
def _backward(
    grad: Tensor, x: Tensor, weights: Tensor, order: Tensor, counts: Sequence[int], experts: Sequence[Tensor],
    wide: Tensor, trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return backward(library(), grad, x, weights, order, counts, experts, wide, trained)


@torch.library.register_fake("pellucid::experts")  # type: ignore[untyped-decorator]
def _forward_shapes(
    x: Tensor, weights: Tensor, order: Tensor, counts: Sequence[int], experts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(len(order), 2 * experts[0].shape[0])


@torch.library.register_fake("pellucid::experts_backward")  # type: ignore[untyped-decorator]
def _backward_shapes(
    grad: Tensor, x: Tensor, weights: Tensor, order: Tensor, counts: Sequence[int], experts: Sequence[Tensor],
    wide: Tensor, trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    num = len(counts) if trained else 0
    of_experts = x.new_empty(2 * num, *experts[0].shape), x.new_empty(num, *experts[2].shape)
    return x.new_empty(x.shape), weights.new_empty(weights.shape), *of_experts
