"""Attention in our kernel: torch's numbers, and for each row the same bits however it is asked for."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from kernel_variants import VARIANTS, compiled, using
from torch import Tensor

from pellucid import kernels
from pellucid.inference.paged import PagedAttend, PagedCache, Span
from pellucid.kernels.attention import attend, disagreement, fits, of_documents
from pellucid.model.attention import KVSpec
from pellucid.model.canonical import CanonicalAttend, in_kernel
from pellucid.model.linear import as_elsewhere

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels here: {kernels.missing()}")


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each way that the kernels can be compiled."""
    library = compiled(request.param, tmp_path_factory.mktemp("kernels"))
    with using(library):
        assert disagreement(library) is None
        yield


SHAPES = {
    "grouped": (6, KVSpec(2, 64, 64)),
    "one by one": (4, KVSpec(4, 16, 16)),
    "odd widths": (5, KVSpec(1, 24, 80)),
    "values in keys": (16, KVSpec(1, 72, 64, value_in_key=True)),
    "wide group": (60, KVSpec(1, 8, 16)),
}


def drawn(heads: int, spec: KVSpec, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(tokens, n, d, generator=g).to(dtype)
        for n, d in ((heads, spec.key_dim), (spec.heads, spec.key_dim), (spec.heads, spec.value_dim))
    )
    return q, k, k[..., : spec.value_dim] if spec.value_in_key else v


def by_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One document, in float64."""
    index = torch.arange(len(q))
    distance = index[:, None] - index
    mask = (distance >= 0) & (distance < (window or len(q)))
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 5, 50])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_gives_the_numbers_of_torch(shape: tuple[int, KVSpec], window: int | None, variant: None) -> None:
    q, k, v = drawn(*shape, 133)
    starts = torch.tensor([0] * 40 + [40] + [41] * 92)
    out = of_documents(q, k, v, starts, 0.3, window or 0)
    parts = [by_torch(*(x[a:b] for x in (q, k, v)), 0.3, window) for a, b in ((0, 40), (40, 41), (41, 133))]
    assert (out - torch.cat(parts)).abs().max() < 1e-5


@pytest.mark.parametrize(("dtype", "stored"), list(itertools.product([torch.float32, torch.bfloat16], repeat=2)))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_has_the_same_bits_in_any_step_any_blocks_and_any_number_of_threads(
    shape: tuple[int, KVSpec], dtype: torch.dtype, stored: torch.dtype, variant: None
) -> None:
    heads, spec = shape
    sequences = [drawn(heads, spec, tokens, dtype) for tokens in (70, 33, 1, 18)]
    if stored == torch.bfloat16:  # what the cache holds is what whole documents are given
        sequences = [(q, k.bfloat16().to(dtype), v.bfloat16().to(dtype)) for q, k, v in sequences]
    before = torch.get_num_threads()
    draw = random.Random(5)
    for window in (None, 20):
        whole = [
            of_documents(q, k, v, torch.zeros(len(q), dtype=torch.int64), 0.2, window or 0) for q, k, v in sequences
        ]
        for size in (1, 3, 16, 32):
            blocks = list(range(1, 1 + sum(-(-len(q) // size) for q, _, _ in sequences)))
            draw.shuffle(blocks)
            cache = PagedCache([spec], len(blocks), size, dtype=stored, device=torch.device("cpu"))
            cache.stored[0][0][0] = torch.nan  # block 0 is nobody's
            tables = [[blocks.pop() for _ in range(0, len(q), size)] for q, _, _ in sequences]
            done = [0] * len(sequences)
            while any(d < len(q) for d, (q, _, _) in zip(done, sequences, strict=True)):
                spans, rows = [], []
                for i, (q, _, _) in enumerate(sequences):
                    count = min(draw.choice([0, 1, 1, 2, 7, 50]), len(q) - done[i])
                    if count:
                        spans.append(Span(len(rows), done[i], count, tables[i]))
                        rows += [(i, p) for p in range(done[i], done[i] + count)]
                        done[i] += count
                if not rows:
                    continue
                packed = (torch.stack([sequences[i][part][p] for i, p in rows]) for part in range(3))
                torch.set_num_threads(draw.choice([1, 2, 3]))
                try:
                    out = in_blocks(cache, spans, *packed, window=window)
                finally:
                    torch.set_num_threads(before)
                for made, (i, p) in zip(out, rows, strict=True):
                    assert torch.equal(made, whole[i][p]), (i, p, size, window)


def in_blocks(
    cache: PagedCache, spans: list[Span], q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None
) -> Tensor:
    """By the kernel on every processor."""
    spec = cache.specs[0]
    return attend(
        q, *cache.places(0), PagedAttend(cache, spans, (window,), exact=True)._index, kv_heads=spec.heads,
        value_width=spec.value_dim, block_size=cache.block_size, stored=cache.stored[0][0].dtype, scale=0.2, window=window,
        new=(k, None if spec.value_in_key else v),
    )  # fmt: skip


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_what_it_writes_is_what_the_operators_write(stored: torch.dtype) -> None:
    for heads, spec in SHAPES.values():
        packed = drawn(heads, spec, 9)
        caches = [PagedCache([spec], 4, 4, dtype=stored, device=torch.device("cpu")) for _ in range(2)]
        spans = [Span(0, 0, 5, [3, 1]), Span(5, 4, 4, [2, 4])]
        in_blocks(caches[0], spans, *packed)
        with as_elsewhere():
            PagedAttend(caches[1], spans, (None,), exact=True)(0, *packed, scale=0.2)
        for ours, theirs in zip(*(cache.stored[0] for cache in caches), strict=True):
            assert torch.equal(ours, theirs) and ours.abs().sum() > 10


def test_rows_may_be_parts_of_wider_ones() -> None:
    made = torch.randn(20, 10, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = made[:, :6], made[:, 6:8], made[:, 8:]
    starts = torch.zeros(20, dtype=torch.int64)
    whole = of_documents(*(x.contiguous() for x in (q, k, v)), starts, 0.2, 0)
    assert torch.equal(of_documents(q, k, v, starts, 0.2, 0), whole)
    turned = q.transpose(0, 2).contiguous().transpose(0, 2)
    assert not turned.is_contiguous() and torch.equal(of_documents(turned, k, v, starts, 0.2, 0), whole)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_stay_in_their_document_and_behind_their_row(bad: float) -> None:
    q, k, v = drawn(6, KVSpec(2, 64, 64), 60)
    starts = torch.tensor([0] * 30 + [30] * 30)
    clean = of_documents(q, k, v, starts, 0.2, 0)
    for part in (0, 1, 2):
        inputs = [x.clone() for x in (q, k, v)]
        inputs[part][17] = bad
        out = of_documents(*inputs, starts, 0.2, 0)
        assert torch.equal(out[:17], clean[:17]) and torch.equal(out[30:], clean[30:])
        assert not out[17].isfinite().all()
        if part == 0:
            assert torch.equal(out[18:30], clean[18:30])
        elif bad != bad:
            assert out[18:30].isnan().all(-1).any(-1).all()


def test_very_different_scores_do_not_overflow() -> None:
    q, k, v = drawn(6, KVSpec(2, 64, 64), 60)
    out = of_documents(q * 300, k * 300, v, torch.zeros(60, dtype=torch.int64), 1.0, 0)
    torch.testing.assert_close(out.double(), by_torch(q * 300, k * 300, v, 1.0, None), rtol=1e-4, atol=1e-4)


def test_a_long_document_and_more_scores_than_a_thread_holds() -> None:
    q, k, v = drawn(2, KVSpec(1, 16, 16), 9000)
    out = of_documents(q, k, v, torch.zeros(9000, dtype=torch.int64), 0.2, 0)
    rows = torch.tensor([0, 15, 16, 4095, 8191, 8999])
    for row in rows.tolist():
        scores = torch.einsum("hd,kd->hk", q[row].double(), k[: row + 1, 0].double()) * 0.2
        expected = scores.softmax(-1) @ v[: row + 1, 0].double()
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_no_rows_and_what_does_not_fit() -> None:
    nothing = torch.empty(0, 2, 16)
    assert of_documents(nothing, nothing, nothing, torch.empty(0, dtype=torch.int64), 1.0, 0).shape == (0, 2, 16)
    q = torch.randn(1, 2, 16)
    assert fits(q, key_width=16, value_width=16) and in_kernel(q, 16, 16)
    assert not fits(q, key_width=12, value_width=16) and not fits(q, key_width=16, value_width=24)
    assert not fits(q.double(), key_width=16, value_width=16) and not fits(q.to("meta"), key_width=16, value_width=16)
    with as_elsewhere():
        assert not in_kernel(q, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):  # elsewhere than where torch emulates it, torch's
        assert in_kernel(q, 16, 16) == in_kernel(q.bfloat16(), 16, 16)


def test_traced_shapes_are_those_of_the_kernel() -> None:
    q, k, v = drawn(6, KVSpec(2, 16, 32), 11)
    args = (q, k, v, torch.zeros(11, dtype=torch.int64), 0.2, 0)
    torch.library.opcheck(torch.ops.pellucid.attention.default, args, test_utils=("test_schema", "test_faketensor"))


def test_the_trainer_asks_the_kernel_once_for_all_documents() -> None:
    q, k, v = (x.view(2, 30, *x.shape[1:]) for x in drawn(6, KVSpec(2, 32, 32), 60))
    ids = torch.tensor([[0] * 7 + [1] * 23, [3] * 29 + [4]])
    with torch.profiler.profile() as profile:
        out = CanonicalAttend((None,), ids)(0, q, k, v, scale=0.2)
    assert [e.count for e in profile.key_averages() if e.key == "pellucid::attention"] == [1]
    for row, a, b in ((0, 0, 7), (0, 7, 30), (1, 0, 29), (1, 29, 30)):
        one = by_torch(q[row, a:b], k[row, a:b], v[row, a:b], 0.2, None)
        torch.testing.assert_close(out[row, a:b].double(), one, rtol=1e-5, atol=1e-5)


def test_an_attend_may_see_batches_of_several_shapes() -> None:
    q, k, v = drawn(6, KVSpec(2, 32, 32), 48)
    attend = CanonicalAttend((None,))
    for rows in (2, 4, 3, 2):
        parts = [x.view(rows, -1, *x.shape[1:]) for x in (q, k, v)]
        out = attend(0, *parts, scale=0.2)
        for row in range(rows):
            one = by_torch(*(x[row] for x in parts), 0.2, None)
            torch.testing.assert_close(out[row].double(), one, rtol=1e-5, atol=1e-5)
