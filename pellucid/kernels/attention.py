"""Causal attention in the kernel of attention.cpp: a row has the same bits alone, in any batch, and however its sequence is cut.

Shapes: N rows, H query heads, K key/value heads, d and e width of a key and of a value head.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.kernels.build import available, check, library
from pellucid.kernels.linear import LANES

ONE_PIECE = 2**62
"""Block size of keys that lie in one piece."""


class Place(ctypes.Structure):
    """`Place` of attention.cpp."""

    _fields_ = (("first", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("block", "head", "token")))


class _Attention(ctypes.Structure):
    """`Attention` of attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "key_width", "value_width")),
        *((name, ctypes.c_int64) for name in ("block_size", "window", "threads", "is_bfloat16", "cache_is_bfloat16")),
        ("scale", ctypes.c_float),
        *((name, Place) for name in ("keys", "values")),
        *((name, ctypes.c_void_p) for name in ("positions", "tables", "blocks", "q", "new_keys", "new_values")),
        *((name, ctypes.c_int64) for name in ("q_stride", "key_stride", "value_stride")),
        ("out", ctypes.c_void_p),
    )


def fits(q: Tensor, *, key_width: int, value_width: int) -> bool:
    """Whether the kernel knows rows of that device, type and these widths."""
    return (
        q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16)
        and key_width % 8 == value_width % LANES == 0
        and available()
    )


def place(stored: Tensor, *, head: int = 0) -> Place:
    """Where keys or values stand: ``stored`` is ``[blocks, heads, tokens, width]``, and theirs are the heads from this one on."""
    blocks, heads, tokens, within = stored.stride()
    assert within == 1
    return Place(stored.data_ptr() + head * heads * stored.itemsize, blocks, heads, tokens)


def _rows(x: Tensor) -> Tensor:
    """The same, a row in one piece."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def attend(
    q: Tensor,
    keys: Place,
    values: Place,
    index: tuple[Tensor, Tensor, Tensor],
    *,
    kv_heads: int,
    value_width: int,
    block_size: int,
    stored: torch.dtype,
    scale: float,
    window: int | None,
    new: tuple[Tensor, Tensor | None] | None = None,
    library_: ctypes.CDLL | None = None,
) -> Tensor:
    """``[N, H, e]`` of rows ``[N, H, d]``, for which `fits` holds.

    Args:
        index: int64: the position of each row, where the blocks of its sequence begin in the third, and which they are.
        stored: type of keys and values.
        new: the keys ``[N, K, d]`` and values ``[N, K, e]`` of these rows, which are written first, in q's type; values that
            are part of their keys are None.
    """
    rows, heads, width = q.shape
    q, out = _rows(q), q.new_empty(rows, heads, value_width)
    new_keys, new_values = new or (None, None)
    if new_keys is not None:
        new_keys = _rows(new_keys)
    if new_values is not None:
        new_values = _rows(new_values)
    assert len(index[0]) == len(index[1]) == rows and all(x.dtype == torch.int64 for x in index)
    assert all(x is None or x.dtype == q.dtype for x in (new_keys, new_values))
    described = _Attention(
        rows, heads, kv_heads, width, value_width, block_size, window or 0, torch.get_num_threads(),
        q.dtype == torch.bfloat16, stored == torch.bfloat16, scale, keys, values, *(x.data_ptr() for x in index),
        *(None if x is None else x.data_ptr() for x in (q, new_keys, new_values)),
        *(0 if x is None else x.stride(0) for x in (q, new_keys, new_values)), out.data_ptr(),
    )  # fmt: skip
    if rows:
        check((library_ or library()).pellucid_attend(ctypes.addressof(described)))
    return out


def of_documents(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int, library_: ctypes.CDLL | None = None
) -> Tensor:
    """Each of N rows ``[N, H, d]`` sees those from ``starts`` of it up to itself, the last ``window`` of them if that is not 0.

    Args:
        k, v: ``[N, K, d]`` and ``[N, K, e]``, of q's type.
        starts: int64 ``[N]``: the first row of each row's document.
    """
    assert q.dtype == k.dtype == v.dtype
    k, v = _rows(k), _rows(v)
    numbers = torch.arange(len(q))
    # a document is a block, and its first row the block's number; rows of one have one table, so that they are read together
    keys, values = (Place(x.data_ptr(), x.stride(0), x.stride(1), x.stride(0)) for x in (k, v))
    return attend(
        q, keys, values, (numbers - starts, starts, numbers), kv_heads=k.shape[1], value_width=v.shape[2], block_size=ONE_PIECE,
        stored=k.dtype, scale=scale, window=window or None, library_=library_,
    )  # fmt: skip


def disagreement(library: ctypes.CDLL) -> str | None:
    """What a library computes otherwise than torch, in words: two small documents."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(21, heads, 32, generator=generator, dtype=torch.float32) for heads in (4, 2, 2))
    starts = torch.tensor([0] * 8 + [8] * 13)
    out = of_documents(q, k, v, starts, 0.2, 5, library)
    index = torch.arange(21)
    mask = (index[:, None] >= index) & (index[:, None] - index < 5) & (starts[:, None] == starts)
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2, enable_gqa=True).transpose(0, 1)
    return None if bool((out - expected).abs().max() < 1e-5) else "attention is not torch's"


torch.library.define(
    "pellucid::attention", "(Tensor q, Tensor k, Tensor v, Tensor starts, float scale, int window) -> Tensor"
)
torch.library.impl("pellucid::attention", "CPU")(of_documents)


@torch.library.register_fake("pellucid::attention")  # type: ignore[untyped-decorator]
def _shape(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, window: int) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
