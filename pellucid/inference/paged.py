"""Keys and values in blocks, and the attention that reads them there.

Shapes: N packed tokens of a step, R sequences, S positions of a sequence, H query heads, K key/value heads, d and e width of
a key and of a value head. A block holds its tokens head by head, so that those of a head can be gathered in one piece.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.kernels.attention import Place, place
from pellucid.kernels.attention import attend as attend_in_kernel
from pellucid.model.attend import fused_attention, of_one_width
from pellucid.model.attention import KVSpec
from pellucid.model.canonical import (
    KEY_BINS,
    TILE,
    Biases,
    as_bias,
    canonical_attention,
    in_kernel,
    in_products,
    in_two_products,
    padded_keys,
    seen,
)
from pellucid.model.linear import is_emulated


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
        self.specs, self.kinds, self.block_size, self.device = list(specs), set(specs), block_size, device

        def blocks(heads: int, width: int) -> Tensor:
            # zeros, since a masked value still takes part in the product and NaN times 0 is NaN
            return torch.zeros(num_blocks + 1, heads, block_size, width, dtype=dtype, device=device)

        self.stored: list[tuple[Tensor, ...]] = []
        """Of each layer, ``[blocks, heads, block_size, width]``: keys and behind them values where both are as wide, in one
        tensor, else in two; or the keys alone, that hold the values."""
        for spec in self.specs:
            own_values = () if spec.value_in_key or _joint(spec) else (blocks(spec.heads, spec.value_dim),)
            self.stored.append((blocks(spec.heads * _parts(spec), spec.key_dim), *own_values))

    def write(self, layer: int, k: Tensor, v: Tensor, slots: dict[KVSpec, Tensor]) -> None:
        """Keys ``[n, K, d]`` and values ``[n, K, e]`` of n tokens, each head of each in its slot."""
        spec = self.specs[layer]
        new = (torch.cat([k, v], dim=1),) if _joint(spec) else (k,) if spec.value_in_key else (k, v)
        for stored, content in zip(self.stored[layer], new, strict=True):
            rows = content.reshape(-1, content.shape[-1])
            if rows.dtype != stored.dtype:
                rows = rows.to(stored.dtype)
            stored.view(-1, rows.shape[-1]).index_copy_(0, slots[spec], rows)

    def read(
        self, layer: int, index: dict[KVSpec, Tensor], blocks: int, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The first ``length`` keys ``[R * K, S, d]`` and values ``[R * K, S, e]`` of sequences of so many blocks each."""
        spec = self.specs[layer]
        found = [_gathered(stored, index[spec], blocks, length, dtype) for stored in self.stored[layer]]
        if spec.value_in_key:
            return found[0], found[0][..., : spec.value_dim]
        if not _joint(spec):
            return found[0], found[1]
        half = len(found[0]) // 2
        return found[0].narrow(0, 0, half), found[0].narrow(0, half, half)

    def places(self, layer: int) -> tuple[Place, Place]:
        """Of keys and of values, for the kernel."""
        spec, stored = self.specs[layer], self.stored[layer]
        if _joint(spec):
            return place(stored[0]), place(stored[0], head=spec.heads)
        return place(stored[0]), place(stored[-1])

    def copy(self, source: int, target: int) -> None:
        """One block's content into another."""
        for tensor in self._tensors():
            tensor[target].copy_(tensor[source])

    def save(self, blocks: SequenceOf[int]) -> list[Tensor]:
        """Copies of what blocks hold."""
        index = torch.tensor(blocks, device=self.device)
        return [tensor.index_select(0, index) for tensor in self._tensors()]

    def restore(self, saved: list[Tensor], blocks: SequenceOf[int]) -> None:
        """Put back what `save` gave, into other blocks."""
        index = torch.tensor(blocks, device=self.device)
        for tensor, content in zip(self._tensors(), saved, strict=True):
            tensor.index_copy_(0, index, content)

    def clear(self, blocks: SequenceOf[int]) -> None:
        """Zeros, where NaN may stand."""
        for tensor in self._tensors():
            tensor[list(blocks)] = 0

    def _tensors(self) -> Iterator[Tensor]:
        return (tensor for layer in self.stored for tensor in layer)


def _gathered(stored: Tensor, index: Tensor, blocks: int, length: int, dtype: torch.dtype) -> Tensor:
    size, width = stored.shape[2:]
    found = stored.view(-1, size, width).index_select(0, index).view(-1, blocks * size, width)
    if blocks * size != length:
        found = found.narrow(1, 0, length)
    return found if found.dtype == dtype else found.to(dtype)


def _joint(spec: KVSpec) -> bool:
    """Whether keys and values stand in one tensor."""
    return spec.key_dim == spec.value_dim and not spec.value_in_key


def _parts(spec: KVSpec) -> int:
    return 2 if _joint(spec) else 1


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
    """An `Attend` for packed tokens ``[N, H, d]`` of one step. Everything that layers share is made once.

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
        self.cache, self.spans, self.windows, self.exact = cache, spans, windows, exact
        self.written = sum(span.count for span in spans)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        n, spec, window = self.written, self.cache.specs[layer], self.windows[layer]
        if n != len(q):  # rows beside them are padding
            out = q.new_zeros(*q.shape[:-1], spec.value_dim)
            if n:
                out[:n] = self(layer, q[:n], k[:n], v[:n], scale=scale)
            return out
        if not in_kernel(q, spec.key_dim, spec.value_dim):
            self.cache.write(layer, k, v, self._slots)
            return self._attend(layer, q, scale, window)
        return attend_in_kernel(
            q, *self.cache.places(layer), self._index, kv_heads=spec.heads, value_width=spec.value_dim,
            block_size=self.cache.block_size, stored=self.cache.stored[layer][0].dtype, scale=scale, window=window,
            new=(k, None if spec.value_in_key else v),
        )  # fmt: skip

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor, Tensor]:
        """For the kernel: of each row its position, and where the blocks of its sequence begin among all blocks."""
        positions = [p for span in self.spans for p in _positions(span)]
        begins = accumulate((len(span.blocks) for span in self.spans), initial=0)
        tables = [begin for span, begin in zip(self.spans, begins, strict=False) for _ in _positions(span)]
        blocks = [block for span in self.spans for block in span.blocks]
        return torch.tensor(positions), torch.tensor(tables), torch.tensor(blocks)

    @cached_property
    def _slots(self) -> dict[KVSpec, Tensor]:
        """Where each head of each token stands in a layer's tensors seen as ``[blocks * heads * size, width]``."""
        device, size, slots = self.cache.device, self.cache.block_size, {}
        places = [(span.blocks[p // size], p % size) for span in self.spans for p in _positions(span)]
        blocks, offsets = torch.tensor(places, device=device).unbind(1)
        for spec in self.cache.kinds:
            heads = spec.heads * _parts(spec)
            each = (blocks[:, None] * heads + torch.arange(heads, device=device)) * size + offsets[:, None]
            slots[spec] = each.flatten()
        return slots

    @cached_property
    def _singles(self) -> list["_Singles"]:
        groups = _of_one_length(self.spans, exact=self.exact)
        return [_Singles(self.cache, group, exact=self.exact) for group in groups]

    @cached_property
    def _chunks(self) -> list["_Chunk"]:
        return [_Chunk(self.cache, span, exact=self.exact) for span in self.spans if span.count > 1]

    def _attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """By torch's operators."""
        if len(self._singles) == 1 and not self._chunks:
            return self._singles[0].attend(layer, q, scale, window)
        out = q.new_zeros(*q.shape[:-1], self.cache.specs[layer].value_dim)
        for singles in self._singles:
            out.index_copy_(0, singles.rows, singles.attend(layer, q.index_select(0, singles.rows), scale, window))
        for chunk in self._chunks:
            out[chunk.rows] = chunk.attend(layer, q[chunk.rows], scale, window)
        return out


def _by_head(tables: Tensor, kinds: Iterable[KVSpec]) -> dict[KVSpec, Tensor]:
    """Where the blocks ``[R, blocks]`` of each head stand among those of all heads: ``[keys and values, R, K, blocks]``, flat."""
    index = {}
    for spec in kinds:
        parts, heads = _parts(spec), spec.heads
        part, head = torch.arange(parts, device=tables.device), torch.arange(heads, device=tables.device)
        within = part[:, None, None, None] * heads + head[:, None]
        index[spec] = (tables[:, None] * (parts * heads) + within).flatten()
    return index


class _Chunk:
    """Several new tokens of one sequence."""

    def __init__(self, cache: PagedCache, span: Span, *, exact: bool) -> None:
        self.cache, self.exact = cache, exact
        self.rows = slice(span.row, span.row + span.count)
        self.start, self.end = span.start, span.start + span.count
        self.blocks = -(-self.end // cache.block_size)
        self.biases: Biases = {}
        self.index = _by_head(torch.tensor([span.blocks[: self.blocks]], device=cache.device), cache.kinds)

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """``[n, H, e]`` for these rows ``[n, H, d]``."""
        k, v = self.cache.read(layer, self.index, self.blocks, self.end, q.dtype)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if self.exact:
            return canonical_attention(q, k, v, start=self.start, scale=scale, window=window, biases=self.biases)
        mask = seen(torch.arange(self.start, self.end, device=q.device), self.end, window)
        return fused_attention(q[None], k[None], v[None], mask, scale)[0]


class _Singles:
    """One new token each of several sequences, which are attended to in one call."""

    def __init__(self, cache: PagedCache, spans: SequenceOf[Span], *, exact: bool) -> None:
        device, size = cache.device, cache.block_size
        self.cache, self.exact = cache, exact
        self.rows = torch.tensor([s.row for s in spans], dtype=torch.int64, device=device)
        longest = max(s.start + 1 for s in spans)
        self.blocks = -(-(padded_keys(longest) if exact else longest) // size)
        self.length = padded_keys(longest) if exact else self.blocks * size
        tables = [[*s.blocks[: self.blocks], *[0] * (self.blocks - len(s.blocks))] for s in spans]
        self.index = _by_head(torch.tensor(tables, device=device), cache.kinds)
        self.positions = torch.tensor([s.start for s in spans], device=device)
        # each in a tile of its own, where its position puts it
        self.places = torch.arange(len(spans), device=device) * TILE + self.positions % TILE
        self.biases: dict[int | None, Tensor] = {}
        """By window."""
        self.tiles: Tensor | None = None

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """``[R, H, e]`` for these rows ``[R, H, d]``."""
        if is_emulated(q):
            with torch.autocast("cpu", enabled=False):
                return self.attend(layer, q.float(), scale, window).to(torch.bfloat16)
        count, heads, width = q.shape
        kv_heads = self.cache.specs[layer].heads
        k, v = self.cache.read(layer, self.index, self.blocks, self.length, q.dtype)
        if in_products(q.dtype):
            stacked = q.reshape(count * kv_heads, heads // kv_heads, width)
            bias = self._bias(window, 1, kv_heads, q.dtype)
            return in_two_products(stacked, k, v, bias, scale).reshape(count, heads, -1)
        k, v = k.unflatten(0, (count, kv_heads)), v.unflatten(0, (count, kv_heads))
        width = v.shape[-1]
        q, k, v = of_one_width(q, k, v)
        tiles = TILE if self.exact else 1
        mine = self._in_tiles(q) if self.exact else q[:, None]
        out = F.scaled_dot_product_attention(
            mine.transpose(1, 2), k, v,
            attn_mask=self._bias(window, tiles, 1, q.dtype)[:, None], scale=scale, enable_gqa=heads != kv_heads,
        ).transpose(1, 2)[..., :width]  # fmt: skip
        return out.flatten(0, 1).index_select(0, self.places) if self.exact else out[:, 0]

    def _in_tiles(self, q: Tensor) -> Tensor:
        """``[R, TILE, H, d]``; the rows beside these are zeros in every layer."""
        if self.tiles is None or self.tiles.shape[2:] != q.shape[1:]:
            self.tiles = q.new_zeros(len(q), TILE, *q.shape[1:])
        self.tiles.flatten(0, 1).index_copy_(0, self.places, q)
        return self.tiles

    def _bias(self, window: int | None, tiles: int, times: int, dtype: torch.dtype) -> Tensor:
        """``[R * times, tiles, S]``."""
        if window not in self.biases:
            first = self.positions - self.positions % tiles
            at = first[:, None] + torch.arange(tiles, device=first.device)
            self.biases[window] = as_bias(seen(at, self.length, window), dtype).repeat_interleave(times, 0)
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
