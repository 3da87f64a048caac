"""Keys and values in blocks, and the attention that reads them there.

Shapes: N packed tokens of a step, R sequences, S positions of a sequence, H query heads, K key/value heads, d and e width of
a key and of a value head. A block holds its tokens head by head, so that those of a head can be gathered in one piece.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.model.attend import fused_attention, of_one_width
from pellucid.model.attention import KVSpec
from pellucid.model.canonical import (
    KEY_BINS,
    TILE,
    as_bias,
    canonical_attention,
    in_products,
    masked_attention,
    padded_keys,
    seen,
)


class PagedCache:
    """The cache of every layer.

    Args:
        specs: what a token leaves in each layer.
        num_blocks: beside block 0, which takes what padding writes.
        dtype: of keys and values.
    """

    def __init__(
        self, specs: SequenceOf[KVSpec], num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.specs, self.block_size = list(specs), block_size

        def blocks(heads: int, width: int) -> Tensor:
            # zeros, since a masked value still takes part in the product and NaN times 0 is NaN
            return torch.zeros(num_blocks + 1, heads, block_size, width, dtype=dtype, device=device)

        self.keys = [blocks(s.heads, s.key_dim) for s in self.specs]
        """``[blocks, K, block_size, d]`` of each layer."""
        self.values = [
            k[..., : s.value_dim] if s.value_in_key else blocks(s.heads, s.value_dim)
            for k, s in zip(self.keys, self.specs, strict=True)
        ]

    def copy(self, source: int, target: int) -> None:
        """One block's content into another."""
        for tensor in self._stored():
            tensor[target].copy_(tensor[source])

    def save(self, blocks: SequenceOf[int]) -> list[Tensor]:
        """Copies of what blocks hold."""
        index = torch.tensor(blocks, device=self.keys[0].device)
        return [tensor.index_select(0, index) for tensor in self._stored()]

    def restore(self, saved: list[Tensor], blocks: SequenceOf[int]) -> None:
        """Put back what `save` gave, into other blocks."""
        index = torch.tensor(blocks, device=self.keys[0].device)
        for tensor, content in zip(self._stored(), saved, strict=True):
            tensor.index_copy_(0, index, content)

    def clear(self, blocks: SequenceOf[int]) -> None:
        """Zeros, where NaN may stand."""
        for tensor in self._stored():
            tensor[list(blocks)] = 0

    def _stored(self) -> list[Tensor]:
        own = [v for v, s in zip(self.values, self.specs, strict=True) if not s.value_in_key]
        return [*self.keys, *own]


def bytes_per_token(specs: SequenceOf[KVSpec], dtype: torch.dtype) -> int:
    """Of all layers."""
    return sum(spec.elements_per_token() for spec in specs) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence: ``count`` of them, packed from ``row`` on, at positions ``start ...`` of the sequence."""

    row: int
    start: int
    count: int
    blocks: SequenceOf[int]
    """Of the whole sequence, the new tokens included."""


class PagedAttend:
    """An `Attend` for packed tokens ``[N, H, d]`` of one step. Everything that layers share is made once, here.

    New keys and values are written first; a token sees its own sequence up to itself, of a layer with a sliding window the
    last of it. Rows that belong to no span come back as zeros.

    Args:
        spans: in the order of their rows.
        windows: sliding window of each layer, None where it sees everything before it.
        exact: canonical attention: the same bits whatever else is in the step and however the sequence is cut.
    """

    caches = True

    def __init__(
        self, cache: PagedCache, spans: SequenceOf[Span], windows: tuple[int | None, ...], *, exact: bool
    ) -> None:
        self.cache, self.windows, self.exact = cache, windows, exact
        device, size = cache.keys[0].device, cache.block_size
        places = [(span.blocks[p // size], p % size) for span in spans for p in _positions(span)]
        blocks, offsets = torch.tensor(places, device=device).unbind(1)
        self.written = len(places)
        self.slots = {
            heads: (
                ((blocks[:, None] * heads + torch.arange(heads, device=device)) * size) + offsets[:, None]
            ).flatten()
            for heads in {spec.heads for spec in cache.specs}
        }
        """By number of heads, where each head of each token stands in a layer's keys seen as ``[blocks * K * size, d]``."""
        self.singles = [_Singles(cache, group, exact=exact) for group in _of_one_length(spans, exact=exact)]
        self.chunks = [_Chunk(cache, span, exact=exact) for span in spans if span.count > 1]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        cache, window = self.cache, self.windows[layer]
        keys, values, spec = cache.keys[layer], cache.values[layer], cache.specs[layer]
        self._write(keys, k)
        if not spec.value_in_key:
            self._write(values, v)
        if len(self.singles) == 1 and not self.chunks and self.written == len(q):
            return self.singles[0].attend(q, keys, values, spec, scale, window)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for singles in self.singles:
            out.index_copy_(
                0, singles.rows, singles.attend(q.index_select(0, singles.rows), keys, values, spec, scale, window)
            )
        for chunk in self.chunks:
            out[chunk.rows] = chunk.attend(q[chunk.rows], keys, values, spec, scale, window)
        return out

    def _write(self, stored: Tensor, new: Tensor) -> None:
        heads, width = new.shape[1:]
        new = new[: self.written].reshape(-1, width).to(stored.dtype)
        stored.view(-1, width).index_copy_(0, self.slots[heads], new)


def _gathered(stored: Tensor, index: Tensor, rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """The first ``length`` keys of ``rows`` sequences, ``[R, K, length, d]``, whose blocks ``index`` names, head by head."""
    heads, size, width = stored.shape[1:]
    found = stored.view(-1, size, width).index_select(0, index).view(rows, heads, -1, width)
    if found.shape[2] != length:
        found = found[:, :, :length]
    return found if found.dtype == dtype else found.to(dtype)


def _by_head(tables: Tensor, heads: int) -> Tensor:
    """Where the blocks ``[R, blocks]`` of each head stand among those of all heads, ``[R * K * blocks]``."""
    return (tables[:, None] * heads + torch.arange(heads, device=tables.device)[:, None]).flatten()


class _Chunk:
    """Several new tokens of one sequence."""

    def __init__(self, cache: PagedCache, span: Span, *, exact: bool) -> None:
        self.rows = slice(span.row, span.row + span.count)
        self.start, self.end, self.exact = span.start, span.start + span.count, exact
        blocks = torch.tensor(span.blocks[: -(-self.end // cache.block_size)], device=cache.keys[0].device)
        self.index = {heads: _by_head(blocks[None], heads) for heads in {spec.heads for spec in cache.specs}}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spec: KVSpec, scale: float, window: int | None) -> Tensor:
        """``[n, H, e]`` for these rows ``[n, H, d]``."""
        index = self.index[spec.heads]
        k = _gathered(keys, index, 1, self.end, q.dtype)[0].transpose(0, 1)
        if spec.value_in_key:
            v = k[..., : spec.value_dim]
        else:
            v = _gathered(values, index, 1, self.end, q.dtype)[0].transpose(0, 1)
        if self.exact:
            return canonical_attention(q, k, v, start=self.start, scale=scale, window=window)
        mask = seen(torch.arange(self.start, self.end, device=q.device), self.end, window)
        return fused_attention(q[None], k[None], v[None], mask, scale)[0]


class _Singles:
    """One new token each of several sequences, which are attended to in one call."""

    def __init__(self, cache: PagedCache, spans: SequenceOf[Span], *, exact: bool) -> None:
        device, size = cache.keys[0].device, cache.block_size
        self.rows = torch.tensor([s.row for s in spans], dtype=torch.int64, device=device)
        self.exact = exact
        longest = max(s.start + 1 for s in spans)
        blocks = -(-(padded_keys(longest) if exact else longest) // size)
        self.length = padded_keys(longest) if exact else blocks * size
        tables = torch.tensor([[*s.blocks[:blocks], *[0] * (blocks - len(s.blocks))] for s in spans], device=device)
        self.index = {heads: _by_head(tables, heads) for heads in {spec.heads for spec in cache.specs}}
        self.positions = torch.tensor([s.start for s in spans], device=device)
        # each in a tile of its own, where its position puts it
        self.places = torch.arange(len(spans), device=device) * TILE + self.positions % TILE
        self.biases: dict[int | None, Tensor] = {}
        self.tiles: Tensor | None = None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spec: KVSpec, scale: float, window: int | None) -> Tensor:
        """``[R, H, e]`` for these rows ``[R, H, d]``."""
        index = self.index[spec.heads]
        k = _gathered(keys, index, len(q), self.length, q.dtype)
        if spec.value_in_key:
            v = k[..., : spec.value_dim]
        else:
            v = _gathered(values, index, len(q), self.length, q.dtype)
        if in_products(q.dtype):
            return masked_attention(q[:, None], k, v, self._bias(window, 1, torch.float32), scale)[:, 0]
        width = v.shape[-1]
        q, k, v = of_one_width(q, k, v)
        tiles = TILE if self.exact else 1
        mine = self._in_tiles(q) if self.exact else q[:, None]
        out = F.scaled_dot_product_attention(
            mine.transpose(1, 2), k, v,
            attn_mask=self._bias(window, tiles, q.dtype)[:, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1],
        ).transpose(1, 2)[..., :width]  # fmt: skip
        return out.flatten(0, 1).index_select(0, self.places) if self.exact else out[:, 0]

    def _in_tiles(self, q: Tensor) -> Tensor:
        """``[R, TILE, H, d]``; the rows beside these are zeros in every layer."""
        if self.tiles is None or self.tiles.shape[2:] != q.shape[1:]:
            self.tiles = q.new_zeros(len(q), TILE, *q.shape[1:])
        self.tiles.flatten(0, 1).index_copy_(0, self.places, q)
        return self.tiles

    def _bias(self, window: int | None, tiles: int, dtype: torch.dtype) -> Tensor:
        """``[R, tiles, S]``."""
        if window not in self.biases:
            first = self.positions - self.positions % tiles
            at = first[:, None] + torch.arange(tiles, device=first.device)
            self.biases[window] = as_bias(seen(at, self.length, window), dtype)
        return self.biases[window]


def _of_one_length(spans: SequenceOf[Span], *, exact: bool) -> list[list[Span]]:
    """Single tokens that can be attended to together: with ``exact`` those whose position asks for as many keys."""
    groups: dict[int, list[Span]] = {}
    for span in spans:
        if span.count == 1:
            # of the long ones any multiple will do
            keys = min(padded_keys(span.start + 1), KEY_BINS[-1] + 1) if exact else 0
            groups.setdefault(keys, []).append(span)
    return list(groups.values())


def _positions(span: Span) -> range:
    return range(span.start, span.start + span.count)
