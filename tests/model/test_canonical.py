"""Bits, not closeness. What matrix products outside of attention do is the processor's choice, so whole models are
compared only where a probe finds that this one's linears do not depend on the number of rows (from four on)."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.inference.paged import PagedAttend, PagedCache, Span
from pellucid.model import Transformer
from pellucid.model.attend import WindowAttend, fused_attention
from pellucid.model.canonical import MATMUL_ROWS, CanonicalAttend, canonical_attention
from pellucid.model.linear import as_elsewhere
from pellucid.model.moe import Router

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["kernels", "operators"])
def by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Our kernels where there are some, and torch's operators alone."""
    with as_elsewhere() if request.param == "operators" else nullcontext():
        yield request.param


def heads(tokens: int, h: int, k: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(tokens, n, d, generator=g).to(dtype) for n in (h, k, k))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h", "k", "d"), [(6, 2, 64), (4, 4, 16), (8, 2, 128)])
def test_a_token_decoded_alone_has_the_bits_of_the_whole_sequence(
    threads: int, dtype: torch.dtype, h: int, k: int, d: int
) -> None:
    q, keys, values = heads(83, h, k, d, dtype)
    whole = canonical_attention(q, keys, values, start=0, scale=d**-0.5)
    for p in range(83):
        alone = canonical_attention(q[p : p + 1], keys[: p + 1], values[: p + 1], start=p, scale=d**-0.5)
        assert torch.equal(alone[0], whole[p]), p


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_any_length_and_more_keys_than_one_block_have_the_same_bits(threads: int, dtype: torch.dtype) -> None:
    q, keys, values = heads(600, 6, 2, 32, dtype)
    whole = canonical_attention(q, keys, values, start=0, scale=0.2, window=100)
    start = 0
    for length in (1, 7, 16, 300, 3, 250, 23):
        stop = start + length
        chunk = canonical_attention(q[start:stop], keys[:stop], values[:stop], start=start, scale=0.2, window=100)
        assert torch.equal(chunk, whole[start:stop])
        start = stop
    assert start == 600


def test_it_is_causal_attention() -> None:
    q, k, v = heads(45, 6, 2, 16, torch.float32)
    expected = fused_attention(q[None], k[None], v[None], None, 0.25)[0]
    torch.testing.assert_close(canonical_attention(q, k, v, start=0, scale=0.25), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 6])
def test_it_has_the_gradients_of_causal_attention(by: str, window: int | None) -> None:
    gradients = []
    ids = torch.tensor([[0] * 8 + [1] * 13])
    for fused in (False, True):
        leaves = [x.clone().requires_grad_() for x in heads(21, 4, 2, 16, torch.float32)]
        rows = [x[None] for x in leaves]
        attend = WindowAttend((window,), ids) if fused else CanonicalAttend((window,), ids)
        attend(0, *rows, scale=0.25).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for canonical, fused_one in zip(*gradients, strict=True):
        assert canonical is not None and canonical.abs().max() > 0.1
        torch.testing.assert_close(canonical, fused_one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_documents_have_the_bits_that_they_have_alone(dtype: torch.dtype, by: str) -> None:
    q, k, v = (x[None] for x in heads(50, 6, 2, 32, dtype))
    ids = torch.tensor([[0] * 9 + [1] * 22 + [2] * 19])  # tiles are not aligned with the row
    packed = CanonicalAttend((None,), ids)(0, q, k, v, scale=0.2)
    plain = CanonicalAttend((None,))
    for a, b in ((0, 9), (9, 31), (31, 50)):
        assert torch.equal(packed[:, a:b], plain(0, q[:, a:b], k[:, a:b], v[:, a:b], scale=0.2))
    assert not torch.equal(packed, plain(0, q, k, v, scale=0.2))


def test_a_row_has_the_same_bits_in_every_batch(by: str) -> None:
    q, k, v = (torch.stack([x, x.flip(0), x * 0.5]) for x in heads(30, 6, 2, 32, torch.float32))
    attend = CanonicalAttend((None,))
    batch = attend(0, q, k, v, scale=0.2)
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(batch[one], attend(0, q[one], k[one], v[one], scale=0.2))


MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
MOE: dict[str, Any] = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "everything": {"qk_norm": True, "attention_gate": True, "tie_word_embeddings": False},
    "mla": MLA | {"q_lora_rank": 32, "rope_interleave": True, "sliding_window": 7, "max_window_layers": 1},
    "mla-expanded": MLA | {"qk_norm": True},
    "moe": MOE,
    "mla-moe": MLA
    | MOE
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_shared_experts": 1},
}


def row_count_matters(model: Transformer, rows: int, dtype: torch.dtype) -> bool:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Router):
            wide = torch.float32 if isinstance(module, Router) else dtype
            x, weight = torch.randn(rows, module.weight.shape[1]).to(wide), module.weight.to(wide)
            if not torch.equal(F.linear(x, weight)[:MATMUL_ROWS], F.linear(x[:MATMUL_ROWS], weight)):
                return True
    return False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_decoding_a_model_token_by_token_gives_the_bits_of_the_training_forward(
    threads: int, dtype: torch.dtype, changes: dict[str, Any], by: str
) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.2,
    }  # fmt: skip
    config = ModelConfig(**shape | changes, attend="canonical")
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).to(dtype).train()
    if row_count_matters(model, 2 * 21, dtype):
        pytest.skip("on this processor the bits of a linear depend on the number of rows")
    tokens = torch.randint(0, 64, (2, 21), generator=torch.Generator().manual_seed(1))
    whole = model(tokens).logits[0]
    assert whole.requires_grad
    cache = PagedCache(model.kv_specs(), 6, 4, dtype=dtype, device=torch.device("cpu"))
    for p in range(21):
        attend = PagedAttend(cache, [Span(0, p, 1, range(1, 7))], model.layer_windows(), exact=True)
        row = torch.cat([tokens[0, p : p + 1], torch.zeros(MATMUL_ROWS - 1, dtype=torch.long)])
        with torch.no_grad():
            alone = model(row, torch.full((MATMUL_ROWS,), p), attend).logits[0]
        assert torch.equal(alone, whole[p]), p
