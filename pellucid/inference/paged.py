"""Keys and values in blocks, and the attention that reads them there.

Shapes: N packed tokens of a step, S positions of a sequence, H query heads, K key/value heads, d and e width of a key and of a
value head. A slot is a token's place in the cache: block * block_size + offset.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.model.attend import fused_attention, of_one_width
from pellucid.model.attention import KVSpec
from pellucid.model.canonical import KEY_BLOCK, TILE, canonical_attention, padded_keys


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
        slots = (num_blocks + 1) * block_size
        # zeros, since a masked value still takes part in the product and NaN times 0 is NaN
        self.keys = [torch.zeros(slots, s.heads, s.key_dim, dtype=dtype, device=device) for s in self.specs]
        self.values = [
            k[..., : s.value_dim]
            if s.value_in_key
            else torch.zeros(slots, s.heads, s.value_dim, dtype=dtype, device=device)
            for k, s in zip(self.keys, self.specs, strict=True)
        ]

    def copy(self, source: int, target: int) -> None:
        """One block's content into another."""
        for tensor in self._stored():
            blocks = tensor.view(-1, self.block_size, *tensor.shape[1:])
            blocks[target].copy_(blocks[source])

    def save(self, blocks: SequenceOf[int]) -> list[Tensor]:
        """Copies of what blocks hold."""
        index = torch.tensor(blocks, device=self.keys[0].device)
        return [t.view(-1, self.block_size, *t.shape[1:]).index_select(0, index) for t in self._stored()]

    def restore(self, saved: list[Tensor], blocks: SequenceOf[int]) -> None:
        """Put back what `save` gave, into other blocks."""
        index = torch.tensor(blocks, device=self.keys[0].device)
        for tensor, content in zip(self._stored(), saved, strict=True):
            tensor.view(-1, self.block_size, *tensor.shape[1:]).index_copy_(0, index, content)

    def clear(self, blocks: SequenceOf[int]) -> None:
        """Zeros, where NaN may stand."""
        for tensor in self._stored():
            tensor.view(-1, self.block_size, *tensor.shape[1:])[list(blocks)] = 0

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
        slots = [span.blocks[p // size] * size + p % size for span in spans for p in _positions(span)]
        self.slots = torch.tensor(slots, device=device)
        self.written = sum(span.count for span in spans)
        self.singles = [_Singles(cache, group, exact=exact) for group in _of_one_length(spans, exact=exact)]
        self.chunks = [(span, self._slots_of(span, device)) for span in spans if span.count > 1]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        cache, window = self.cache, self.windows[layer]
        keys, values, spec = cache.keys[layer], cache.values[layer], cache.specs[layer]
        keys.index_copy_(0, self.slots, k[: self.written].to(keys.dtype))
        if not spec.value_in_key:
            values.index_copy_(0, self.slots, v[: self.written].to(values.dtype))
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for singles in self.singles:
            out.index_copy_(0, singles.rows, singles.attend(q, keys, values, spec, scale, window))
        for span, slots in self.chunks:
            rows = slice(span.row, span.row + span.count)
            old = keys.index_select(0, slots).to(q.dtype)
            content = old[..., : spec.value_dim] if spec.value_in_key else values.index_select(0, slots).to(q.dtype)
            if self.exact:
                out[rows] = canonical_attention(q[rows], old, content, start=span.start, scale=scale, window=window)
            else:
                mask = _causal(span.start, span.count, len(slots), window, q.device)
                out[rows] = fused_attention(q[rows][None], old[None], content[None], mask, scale)[0]
        return out

    def _slots_of(self, span: Span, device: torch.device) -> Tensor:
        """Of every token of the sequence so far."""
        size = self.cache.block_size
        blocks = torch.tensor(span.blocks, device=device)
        slots = blocks[:, None] * size + torch.arange(size, device=device)
        return slots.flatten()[: span.start + span.count]


class _Singles:
    """One new token each of several sequences, which are attended to in one call."""

    def __init__(self, cache: PagedCache, spans: SequenceOf[Span], *, exact: bool) -> None:
        device, size = cache.keys[0].device, cache.block_size
        self.rows = torch.tensor([s.row for s in spans], dtype=torch.int64, device=device)
        self.exact = exact
        longest = max(s.start + 1 for s in spans)
        self.length = padded_keys(longest) if exact else longest
        blocks = -(-self.length // size)
        tables = [[*s.blocks[:blocks], *[0] * (blocks - len(s.blocks))] for s in spans]
        self.tables = torch.tensor(tables, device=device)
        self.positions = torch.tensor([s.start for s in spans], device=device)
        self.size = size
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, spec: KVSpec, scale: float, window: int | None) -> Tensor:
        """``[rows, H, e]`` for these rows of q ``[N, H, d]``."""
        mine = q.index_select(0, self.rows)
        k = self._gathered(keys, mine.dtype)
        v = k[..., : spec.value_dim] if spec.value_in_key else self._gathered(values, mine.dtype)
        width = v.shape[-1]
        mine, k, v = of_one_width(mine, k, v)
        tiles = 1
        if self.exact:  # in a tile of its own, where its position puts it
            tiles = TILE
            spread = mine.new_zeros(len(mine), TILE, *mine.shape[1:])
            spread[torch.arange(len(mine), device=q.device), self.positions % TILE] = mine
            mine = spread
        else:
            mine = mine[:, None]
        out = F.scaled_dot_product_attention(
            mine.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=self._mask(window, tiles), scale=scale, enable_gqa=mine.shape[2] != k.shape[2],
        ).transpose(1, 2)[..., :width]  # fmt: skip
        if not self.exact:
            return out[:, 0]
        return out[torch.arange(len(out), device=q.device), self.positions % TILE]

    def _gathered(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """``[rows, S, K, d]``."""
        by_block = stored.view(-1, self.size, *stored.shape[1:]) if stored.is_contiguous() else stored
        found = by_block.index_select(0, self.tables.flatten())
        return found.view(len(self.tables), -1, *stored.shape[1:])[:, : self.length].to(dtype)

    def _mask(self, window: int | None, tiles: int) -> Tensor:
        """``[rows, 1, tiles, S]``."""
        if window not in self.masks:
            first = self.positions - self.positions % tiles
            at = (first[:, None] + torch.arange(tiles, device=first.device))[:, None, :, None]
            columns = torch.arange(self.length, device=first.device)
            mask = columns <= at
            self.masks[window] = mask if window is None else mask & (columns > at - window)
        return self.masks[window]


def _of_one_length(spans: SequenceOf[Span], *, exact: bool) -> list[list[Span]]:
    """Single tokens that can be attended to together: with ``exact`` those whose position asks for as many keys."""
    groups: dict[int, list[Span]] = {}
    for span in spans:
        if span.count == 1:
            keys = (
                min(padded_keys(span.start + 1), KEY_BLOCK + 1) if exact else 0
            )  # of the long ones any multiple will do
            groups.setdefault(keys, []).append(span)
    return list(groups.values())


def _positions(span: Span) -> range:
    return range(span.start, span.start + span.count)


def _causal(start: int, count: int, length: int, window: int | None, device: torch.device) -> Tensor:
    rows = torch.arange(start, start + count, device=device)[:, None]
    columns = torch.arange(length, device=device)
    mask = columns <= rows
    return mask if window is None else mask & (columns > rows - window)
