"""Canonical attention: the same bits for a token whether it is decoded alone, in chunks, or in a whole sequence.

A kernel's order of additions depends on the shapes it is given. Here they never vary: query rows go in tiles of `TILE` at
positions that are multiples of it, keys are padded with masked rows to a number that the tile's position alone decides
(`padded_keys`), and the mask is explicit. Measured on torch 2.13, float32 and bfloat16; matrix products elsewhere in the model
need at least `matmul_rows` rows as well.

Shapes: n query rows at positions start ... start + n - 1 of one sequence, L >= start + n keys from position 0 on,
H query heads, K key/value heads, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.model.attend import of_one_width

TILE = 4
KEY_BLOCK = 512
KEY_BINS = (64, 128, 256, KEY_BLOCK)
"""Numbers of keys of tiles that end there or before; later ones have a multiple of `KEY_BLOCK`, and any one will do."""
MATMUL_ROWS = 16
"""Float32 matrix products of fewer rows may round in another way; measured, 4 on an AMD Zen 4 and 16 on an Intel with AMX."""


def matmul_rows(dtype: torch.dtype) -> int:
    """The fewest rows of a matrix product whose bits do not depend on their number; narrow types have one way of rounding."""
    return MATMUL_ROWS if dtype.itemsize >= 4 else 1


def padded_keys(end: int) -> int:
    """The keys of a tile whose last position is below ``end``."""
    return next((size for size in KEY_BINS if end <= size), -(-end // KEY_BLOCK) * KEY_BLOCK)


def canonical_attention(
    q: Tensor, k: Tensor, v: Tensor, *, start: int, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of rows ``[n, H, d]`` of one sequence over its keys ``[L, K, d]`` and values -> ``[n, H, d]``.

    Values may have another width than keys, and give it to the result. ``window``: how many tokens a row sees, itself
    included; None: all before it.
    """
    stop, width = start + q.shape[0], v.shape[-1]
    q, k, v = of_one_width(q, k, v)
    outs = []
    for low, high in zip((0, *KEY_BINS), (*KEY_BINS, stop), strict=True):
        first, last = max(start, low), min(stop, high)
        if first < last:
            rows = q[first - start : last - start]
            outs.append(_attend_in_tiles(rows, k[:last], v[:last], start=first, scale=scale, window=window))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[..., :width]


def _attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, *, start: int, scale: float, window: int | None) -> Tensor:
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
    rows = torch.arange(first, end, device=q.device).view(tiles, 1, TILE, 1)
    columns = torch.arange(keys, device=q.device)
    mask = columns <= rows
    if window is not None:
        mask = mask & (columns > rows - window)
    out = F.scaled_dot_product_attention(
        q,
        k.expand(tiles, -1, -1, -1),
        v.expand(tiles, -1, -1, -1),
        attn_mask=mask,
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        rows, tokens = q.shape[:2]
        spans = self.spans or [[(0, tokens)]] * rows
        window = self.windows[layer]
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


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of equal ids."""
    borders = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1]]
    return list(zip([0, *borders], [*borders, len(ids)], strict=True))
