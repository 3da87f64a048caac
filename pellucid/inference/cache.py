"""Contiguous keys and values of a batch of sequences, and the attention that reads them.

Shapes: R sequences, T new tokens of each, S positions of the cache, H query heads, K key/value heads, d head width, e that of a value.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.model.attend import fused_attention
from pellucid.model.attention import KVSpec
from pellucid.model.canonical import canonical_attention


class CachedAttend:
    """An `Attend` that remembers: new keys and values are written at their positions, then attended to.

    A query at position p sees positions 0 to p of its own sequence, of a layer with a sliding window the last of them.
    Shorter rows are padded on the right: what padding writes lies behind every real query, and the token that takes
    the position later overwrites it first, so it is never seen.

    Args:
        rows: sequences.
        capacity: positions a sequence, padding included.
        windows: sliding window of each layer, None where it sees everything before it.
        specs: what a token leaves in each layer.
        canonical: attend with the same bits however the tokens are batched and chunked.
    """

    caches = True

    def __init__(
        self,
        rows: int,
        capacity: int,
        windows: tuple[int | None, ...],
        specs: Sequence[KVSpec],
        *,
        canonical: bool = False,
    ) -> None:
        self._rows, self._capacity, self._windows, self._specs = rows, capacity, windows, specs
        self._canonical = canonical
        self._cache: list[tuple[Tensor, Tensor] | None] = [None] * len(windows)
        self._masks: dict[int | None, Tensor] = {}
        self._positions = torch.empty(0)
        self._starts: list[int] = []
        self._end = 0

    def at(self, positions: Tensor) -> None:
        """Say where the tokens of the next forward stand: ``[R, T]``, rising by one along each row."""
        self._positions, self._starts = positions, positions[:, 0].tolist()
        self._end = max(self._starts) + positions.shape[1]
        distance = positions[:, None, :, None] - torch.arange(self._end, device=positions.device)  # [R, 1, T, S]
        for window in set(self._windows):
            self._masks[window] = distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """q ``[R, T, H, d]``, k ``[R, T, K, d]``, v ``[R, T, K, e]`` -> ``[R, T, H, e]``."""
        keys, values = self._of_layer(layer, k, v)
        row = torch.arange(len(q), device=q.device)[:, None]
        keys[row, self._positions] = k
        if not self._specs[layer].value_in_key:
            values[row, self._positions] = v
        window = self._windows[layer]
        if self._canonical:
            rows = zip(q, keys, values, self._starts, strict=True)
            return torch.stack([canonical_attention(*x, start=start, scale=scale, window=window) for *x, start in rows])
        return fused_attention(q, keys[:, : self._end], values[:, : self._end], self._masks[window], scale)

    def keep(self, rows: list[int]) -> None:
        """Forget every sequence but these."""
        self._rows = len(rows)
        for layer, cached in enumerate(self._cache):
            if cached is not None:
                keys, values = cached
                kept = keys[rows]
                in_key = self._specs[layer].value_in_key
                self._cache[layer] = kept, kept[..., : values.shape[-1]] if in_key else values[rows]

    def _of_layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cached = self._cache[layer]
        if cached is None:
            # zeros, since a masked value still takes part in the product and NaN times 0 is NaN
            keys = k.new_zeros(self._rows, self._capacity, *k.shape[2:])
            in_key = self._specs[layer].value_in_key
            values = keys[..., : v.shape[-1]] if in_key else v.new_zeros(self._rows, self._capacity, *v.shape[2:])
            cached = self._cache[layer] = (keys, values)
        return cached
