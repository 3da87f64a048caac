"""Canonical attention: the same bits for a token whether it is decoded alone, in chunks, or in a whole sequence.

What is computed in float32, bfloat16 included that would be emulated, is our own kernel's where there is one (`in_kernel`),
which adds up in an order that a row's position alone decides. Elsewhere it is torch's operators. A kernel's order of additions
depends on the shapes it is given. Here they never vary where it matters: keys are padded with masked rows to a number that the
position alone decides (`padded_keys`), and the mask is explicit. In bfloat16 attention is two batched products
(`in_two_products`), which round a row alike in any number of rows but one; in float32 it is torch's fused kernel on tiles of
`TILE` query rows at positions that are multiples of it.
Measured on torch 2.13; matrix products elsewhere in the model need at least `matmul_rows` rows as well.

Shapes: n query rows at positions start ... start + n - 1 of one sequence, L >= start + n keys from position 0 on,
H query heads, K key/value heads, d head width, S keys with the padding, e width of a value.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pellucid.kernels import attention
from pellucid.model.attend import causal_mask, fused_attention, of_one_width
from pellucid.model.linear import is_emulated, is_in_float32

TILE = 4
KEY_BLOCK = 512
KEY_BINS = (64, 128, 256, 512, 1024)
"""Numbers of keys of rows that end there or before; later ones have a multiple of `KEY_BLOCK`, and any one will do."""
MATMUL_ROWS = 16
"""Float32 matrix products of fewer rows may round in another way; measured, 4 on an AMD Zen 4 and 16 on an Intel with AMX."""
NARROW_ROWS = 2
"""Of bfloat16 only a single row may: measured from 2,560 inputs by 4,096 outputs on."""
SMALL_PRODUCT = 4096
"""Multiplications up to which torch computes a bfloat16 product in another way."""
MAX_SCORES = 2**23
"""Scores that are held at a time."""
Biases = dict[tuple[int, int | None], Tensor]
"""What is added to the scores of rows from there on with that window."""


def matmul_rows(dtype: torch.dtype) -> int:
    """The fewest rows of a matrix product whose bits do not depend on their number; `narrow_rows` of small matrices."""
    return MATMUL_ROWS if dtype.itemsize >= 4 else NARROW_ROWS


def narrow_rows(size: int) -> int:
    """The fewest rows of a bfloat16 product with a matrix of ``size`` elements, so that its bits do not depend on their number."""
    return max(NARROW_ROWS, SMALL_PRODUCT // size + 1)


def in_products(dtype: torch.dtype) -> bool:
    """Whether canonical attention of that type is two batched products; else it is the fused kernel on tiles."""
    return dtype.itemsize < 4


def in_kernel(q: Tensor, key_width: int, value_width: int) -> bool:
    """Whether attention of queries of that type to keys and values of these widths is our kernel's."""
    return is_in_float32(q) and attention.fits(q, key_width=key_width, value_width=value_width)


def padded_keys(end: int) -> int:
    """The keys of a tile whose last position is below ``end``."""
    return next((size for size in KEY_BINS if end <= size), -(-end // KEY_BLOCK) * KEY_BLOCK)


def canonical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    biases: Biases | None = None,
) -> Tensor:
    """Causal attention of rows ``[n, H, d]`` of one sequence over its keys ``[L, K, d]`` and values ``[L, K, e]`` -> ``[n, H, e]``.

    By torch's operators.

    Args:
        window: how many tokens a row sees, itself included; None: all before it.
        biases: kept from a call to the next of the same rows, in another layer of as many heads.
    """
    stop, width = start + q.shape[0], v.shape[-1]
    biases = {} if biases is None else biases
    if is_emulated(q):
        with torch.autocast("cpu", enabled=False):
            wide = (x.float() for x in (q, k, v))
            out = canonical_attention(*wide, start=start, scale=scale, window=window, biases=biases)
        return out.to(torch.bfloat16)
    attend = _attend_in_products if in_products(q.dtype) else _attend_in_tiles
    if not in_products(q.dtype):
        q, k, v = of_one_width(q, k, v)
    outs = []
    for low, high in zip((0, *KEY_BINS), (*KEY_BINS, stop), strict=True):
        first, last = max(start, low), min(stop, high)
        if first < last:
            rows = q[first - start : last - start]
            outs.append(attend(rows, k[:last], v[:last], first, scale, window, biases))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[..., :width]


def in_two_products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Rows ``[B, n, d]`` over keys ``[B, S, d]`` and values ``[B, S, e]`` -> ``[B, n, e]``.

    Scores and their softmax are rounded to the type that comes in, and computed in float32.

    Args:
        bias: of that type, ``[1 or B, 1 or n, S]``, 0 where a row sees a key and -inf where not; each sees one at least.
    """
    rows = q.shape[1]
    missing = max(0, narrow_rows(k.shape[1] * min(k.shape[2], v.shape[2])) - rows)
    if missing:
        q = F.pad(q, (0, 0, 0, missing))
        bias = bias if bias.shape[1] == 1 else F.pad(bias, (0, 0, 0, missing))
    weights = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale).softmax(-1)
    out = torch.bmm(weights, v)
    return out[:, :rows] if missing else out


def seen(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """Whether rows at positions ``[...]`` see each of ``keys`` keys: those up to themselves, ``window`` of them; ``[..., keys]``."""
    columns = torch.arange(keys, device=positions.device)
    at = positions[..., None]
    mask = columns <= at
    return mask if window is None else mask & (columns > at - window)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a mask is true, -inf where not."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _attend_in_products(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None, biases: Biases
) -> Tensor:
    """Rows that all have as many keys."""
    n, heads, width = q.shape
    kv_heads = k.shape[1]
    group, keys = heads // kv_heads, padded_keys(start + n)
    k, v = (F.pad(x, (0, 0, 0, 0, 0, keys - start - n)).transpose(0, 1) for x in (k, v))
    # the query heads of a group stand as rows, so that keys are not repeated
    stacked = q.view(n, kv_heads, group, width).transpose(0, 1).reshape(kv_heads, n * group, width)
    together = max(1, MAX_SCORES // (heads * keys))
    outs = []
    for first in range(0, n, together):
        last = min(n, first + together)
        bias = biases.get((start + first, window))
        if bias is None:
            bias = as_bias(seen(torch.arange(start + first, start + last, device=q.device), keys, window), q.dtype)
            bias = bias.repeat_interleave(group, 0)[None]
            if last - first == n:  # of longer texts it would be large
                biases[start, window] = bias
        outs.append(in_two_products(stacked[:, first * group : last * group], k, v, bias, scale))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    return out.reshape(kv_heads, n, group, -1).transpose(0, 1).reshape(n, heads, -1)


def _attend_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None, biases: Biases
) -> Tensor:
    """Rows whose tiles all have as many keys."""
    n = q.shape[0]
    first = start // TILE * TILE
    lead = start - first
    tail = -(lead + n) % TILE
    tiles = (lead + n + tail) // TILE
    end = first + tiles * TILE
    keys = padded_keys(end)
    q = F.pad(q, (0, 0, 0, 0, lead, tail)).view(tiles, TILE, *q.shape[1:]).transpose(1, 2)  # [tiles, H, TILE, d]
    k, v = (F.pad(x, (0, 0, 0, 0, 0, keys - start - n)).transpose(0, 1) for x in (k, v))  # [K, keys, d]
    bias = biases.get((start, window))
    if bias is None:
        mask = seen(torch.arange(first, end, device=q.device).view(tiles, 1, TILE), keys, window)
        bias = as_bias(mask, q.dtype)
        if bias.numel() <= MAX_SCORES:  # of longer texts it would be large
            biases[start, window] = bias
    out = F.scaled_dot_product_attention(
        q,
        k.expand(tiles, -1, -1, -1),
        v.expand(tiles, -1, -1, -1),
        attn_mask=bias,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return out.transpose(1, 2).reshape(tiles * TILE, *out.shape[1:2], out.shape[-1])[lead : lead + n]


class CanonicalAttend:
    """An `Attend` for whole rows ``[B, T]`` by `canonical_attention`, each document on its own.

    A token gets the bits that its document alone would give it: positions count from the document's first token in
    the row. Not for torch.compile, which may fuse differently for each shape.

    Args:
        windows: sliding window of each layer, None where it sees everything before it.
        documents: ids ``[B, T]``; a document is a run of equal ids. None: each row is one document.
    """

    def __init__(self, windows: tuple[int | None, ...], documents: Tensor | None = None) -> None:
        self.windows = windows
        self.spans = None if documents is None else [_runs(row) for row in documents.tolist()]
        self.documents: tuple[tuple[int, int], list[int], Tensor] | None = None
        """For the kernel: rows and tokens, the lengths of all documents, and the first token of each token's."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        rows, tokens = q.shape[:2]
        spans = self.spans or [[(0, tokens)]] * rows
        window = self.windows[layer]
        if in_kernel(q, k.shape[-1], v.shape[-1]):
            if self.documents is None or self.documents[0] != (rows, tokens):
                each = [b - a for row in spans for a, b in row]
                lengths = torch.tensor(each)
                starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=rows * tokens)
                self.documents = (rows, tokens), each, starts
            _, each, first = self.documents
            flat = (x.flatten(0, 1) for x in (q, k, v))
            out: Tensor = _InKernel.apply(*flat, first, each, scale, window)  # type: ignore[no-untyped-call]
            return out.view(rows, tokens, *out.shape[1:])
        return torch.stack(
            [
                torch.cat(
                    [
                        canonical_attention(q[row, a:b], k[row, a:b], v[row, a:b], start=0, scale=scale, window=window)
                        for a, b in spans[row]
                    ]
                )
                for row in range(rows)
            ]
        )


class _InKernel(torch.autograd.Function):
    """Forward by our kernel; gradients by torch's fused one, which computes the same once more."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Sequence[int], scale: float, window: int | None
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, k, v)
        ctx.how = lengths, scale, window
        out: Tensor = torch.ops.pellucid.attention(q, k, v, starts, scale, window or 0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lengths, scale, window = ctx.how
        made: list[tuple[Tensor, ...]] = []
        for document in zip(*(x.split(lengths) for x in (*ctx.saved_tensors, grad)), strict=True):
            q, k, v, given = (x[None].float() for x in document)
            inputs, tokens = (q, k, v), given.shape[1]
            mask = None if window is None or window >= tokens else causal_mask(tokens, window, device=given.device)
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                for x in inputs:
                    x.requires_grad_()
                made.append(torch.autograd.grad(fused_attention(q, k, v, mask, scale), inputs, given))
        whole = (torch.cat([x[0] for x in parts]) for parts in zip(*made, strict=True))
        grads = (g.to(x.dtype) for g, x in zip(whole, ctx.saved_tensors, strict=True))
        return (*grads, None, None, None, None)


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of equal ids."""
    borders = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1]]
    return list(zip([0, *borders], [*borders, len(ids)], strict=True))
