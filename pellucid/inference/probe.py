"""Whether this machine computes a token's row with the same bits whatever else is in the product. Exactness rests on it."""

from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.inference.fused import FusedDecoder, can_be_fused
from pellucid.inference.paged import PagedAttend, PagedCache, Span
from pellucid.inference.runner import evaluating, experts_of
from pellucid.model import Transformer
from pellucid.model.quantize import least_rows
from pellucid.model.transformer import Block

ROWS = {torch.float32: 200}
"""Rows of a product; narrower types have one class of rounding (measured from 1 row to 512), and may be slow."""
FEW_ROWS = 48
TOKENS = 23
DRAWS = 3
"""Of the input of a layer, where rounding may show in a few elements of the last row only."""

_known: dict[tuple[object, ...], str | None] = {}
"""What was found for a shape of model, so that the second engine of a process starts at once."""


def exactness_problem(model: Transformer, *, kv_dtype: torch.dtype | None = None, page_size: int = 16) -> str | None:
    """What is not the same, in words; None where everything is.

    Every kind and shape of linear layer of the model, its head, its attention and a layer of each kind are tried on random
    input, about as much work as a prompt of some hundred tokens; or the kernel that stands in for all of it.

    Args:
        kv_dtype, page_size: of the cache; None: of the model's weights.
    """
    dtype = model.model.embed_tokens.weight.dtype
    fused = can_be_fused(model, kv_dtype or dtype, page_size, exact=True)
    linears = {(type(m), shape): (name, m) for name, m in model.named_modules() if (shape := _shape(m)) is not None}
    key = (
        repr(model.config),
        dtype,
        fused and kv_dtype,
        torch.get_num_threads(),
        frozenset(linears),
        frozenset(map(type, model.modules())),
    )
    if key not in _known:
        with torch.inference_mode(), evaluating(model, experts_of(model), exact=True):
            _known[key] = _fused_problem(model, kv_dtype or dtype) if fused else _problem(model, linears, dtype)
    return _known[key]


def _fused_problem(model: Transformer, kv_dtype: torch.dtype) -> str | None:
    """Two layers: a sequence at once against the same in pieces, each beside the same piece of another."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (2, TOKENS), generator=generator)

    def piece(decoder: FusedDecoder, start: int, end: int, sequences: int) -> Tensor:
        count = end - start
        spans = [Span(i * count, start, count, [2 * i + 1, 2 * i + 2]) for i in range(sequences)]
        packed, positions = tokens[:sequences, start:end].flatten(), torch.arange(start, end).repeat(sequences)
        admitted = torch.full_like(packed, TOKENS)
        return torch.cat([x[:count] for x in decoder(packed, positions, admitted, spans, range(count))], -1)

    whole = piece(FusedDecoder(model, _cache(model, kv_dtype), layers=2), 0, TOKENS, 1)
    decoder = FusedDecoder(model, _cache(model, kv_dtype), layers=2)
    pieces = [piece(decoder, a, b, 2) for a, b in pairwise((0, 2, 9, 10, TOKENS))]
    return None if _same(torch.cat(pieces), whole) else "the kernel of packed weights rounds by how a sequence is cut"


_Kind = tuple[type, tuple[int, int]]


def _problem(model: Transformer, linears: dict[_Kind, tuple[str, nn.Module]], dtype: torch.dtype) -> str | None:
    return _linear_problem(model, linears, dtype) or _attention_problem(model, dtype) or _layer_problem(model, dtype)


def _linear_problem(model: Transformer, linears: dict[_Kind, tuple[str, nn.Module]], dtype: torch.dtype) -> str | None:
    generator, rows, least = torch.Generator().manual_seed(0), ROWS.get(dtype, FEW_ROWS), least_rows(model)
    for (_, (inner, outer)), (name, module) in linears.items():
        if not _rows_agree(module, least, torch.randn(rows, inner, generator=generator).to(dtype)):
            return f"{name} ({inner} to {outer}, {dtype}) rounds by the number of rows"
    if not _rows_agree(model.head, least, torch.randn(rows, model.config.hidden_size, generator=generator).to(dtype)):
        return f"the head ({dtype}) rounds by the number of rows"
    return None


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """In and out of a linear layer, packed ones too."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if isinstance(sizes[0], int) and isinstance(sizes[1], int) else None  # type: ignore[return-value]


def _rows_agree(layer: object, least: int, x: Tensor) -> bool:
    whole: Tensor = layer(x)  # type: ignore[operator]
    cuts = ((0, least), (5, 5 + least), (3, 4 + least), (len(x) // 4, len(x) // 2), (len(x) // 3, len(x)))
    return all(_same(layer(x[a:b]), whole[a:b]) for a, b in cuts if b - a >= least)  # type: ignore[operator]


def _same(a: Tensor, b: Tensor) -> bool:
    """A NaN that the weights hold is as good as another."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _attention_problem(model: Transformer, dtype: torch.dtype) -> str | None:
    """One sequence read at once against the same decoded token by token beside another."""
    generator = torch.Generator().manual_seed(0)
    spec, heads = model.kv_specs()[0], model.config.num_attention_heads
    size = 16

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k, v = (random(TOKENS, heads, spec.key_dim), random(TOKENS, spec.heads, spec.key_dim),
               random(TOKENS, spec.heads, spec.value_dim))  # fmt: skip
    outs: list[Tensor] = []
    for together in (True, False):
        cache = PagedCache([spec], 8, size, dtype=dtype, device=torch.device("cpu"))
        if together:
            attend = PagedAttend(cache, [Span(0, 0, TOKENS, [1, 2])], (None,), exact=True)
            outs.append(attend(0, q, k, v, scale=0.3))
            continue
        rows = []
        for i in range(TOKENS):
            spans = [Span(0, i, 1, [1, 2]), Span(1, TOKENS - 1 - i, 1, [3, 4])]
            pair = [torch.stack([x[i], x[TOKENS - 1 - i]]) for x in (q, k, v)]
            rows.append(PagedAttend(cache, spans, (None,), exact=True)(0, *pair, scale=0.3)[0])
        outs.append(torch.stack(rows))
    return None if torch.equal(*outs) else f"attention ({dtype}) rounds by how a sequence is cut"


def _layer_problem(model: Transformer, dtype: torch.dtype) -> str | None:
    """One layer of each kind: a sequence at once against the same in pieces, each beside the same piece of another."""
    generator, windows = torch.Generator().manual_seed(0), model.layer_windows()
    kinds = {
        (type(block.mlp), window): i for i, (block, window) in enumerate(zip(_layers(model), windows, strict=True))
    }
    for layer in [layer for layer in kinds.values() for _ in range(DRAWS)]:
        x = torch.randn(2, TOKENS, model.config.hidden_size, generator=generator).to(dtype)
        whole = _piece(model, layer, _cache(model, dtype), x[:1], 0)
        cache = _cache(model, dtype)
        pieces = [_piece(model, layer, cache, x[:, a:b], a) for a, b in pairwise((0, 2, 9, 10, TOKENS))]
        if not _same(torch.cat(pieces), whole):
            return f"layer {layer} ({dtype}) rounds by how a sequence is cut"
    return None


def _piece(model: Transformer, layer: int, cache: PagedCache, x: Tensor, start: int) -> Tensor:
    """What a layer makes of tokens ``start ...`` ``[sequences, T, D]`` of several; of the first of these."""
    count = x.shape[1]
    packed = x.flatten(0, 1)
    missing = max(0, least_rows(model) - len(packed))
    positions = torch.arange(start, start + count).repeat(len(x))
    cos, sin = model.model.rotary(F.pad(positions, (0, missing)), TOKENS)
    spans = [Span(i * count, start, count, [2 * i + 1, 2 * i + 2]) for i in range(len(x))]
    attend = PagedAttend(cache, spans, model.layer_windows(), exact=True)
    out: Tensor = _layers(model)[layer](F.pad(packed, (0, 0, 0, missing)), cos, sin, attend)[0]
    return out[:count]


def _cache(model: Transformer, dtype: torch.dtype) -> PagedCache:
    return PagedCache(model.kv_specs(), 4, 16, dtype=dtype, device=torch.device("cpu"))


def _layers(model: Transformer) -> list[Block]:
    return cast(list[Block], list(model.model.layers))
