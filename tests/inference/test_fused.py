"""A whole forward as one kernel, against the model's own in torch; and its bits, whatever else is in a step."""

import random

import pytest
import torch
from kernel_variants import VARIANTS, compiled, using
from tiny_engine import alone, bits, prompt, random_requests

from pellucid import kernels
from pellucid.config import ModelConfig
from pellucid.inference import Engine, SamplingParams
from pellucid.inference.fused import FusedDecoder, can_be_fused
from pellucid.inference.paged import PagedCache, Span
from pellucid.inference.probe import exactness_problem
from pellucid.kernels.build import library
from pellucid.model import Transformer
from pellucid.model.quantize import quantize_

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.missing()}")
SHAPES = {
    "llama": {},
    "qwen2": {"attention_bias": True, "mlp_bias": True},
    "qwen3, untied": {"qk_norm": True, "tie_word_embeddings": False, "head_dim": 48},
    "one head each": {"num_key_value_heads": 4},
    "many queries a head": {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 16},
    "mistral": {"sliding_window": 20, "max_window_layers": 1},
    "wide heads": {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 40},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
}
CUTS = [(0, 1), (1, 2), (2, 4), (4, 11), (11, 41), (41, 42), (42, 66), (66, 90)]
VOCABULARY, TOKENS = 101, 90  # `prompt` gives ids below 97


def model_of(shape="llama", kind="int4", dtype=torch.float32, **changes):
    table = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }  # fmt: skip
    config = ModelConfig(**{k: v for k, v in (table | SHAPES[shape] | changes).items() if v is not None})
    model = Transformer(config, generator=torch.Generator().manual_seed(1)).eval().to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # which are all ones, or zeros
            parameter.data = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(2)).to(dtype) + 0.5
    if kind is not None:
        quantize_(model, kind)
    return model


def cache_of(model, dtype=torch.float32, size=16):
    return PagedCache(model.kv_specs(), 2 * -(-TOKENS // size), size, dtype=dtype, device=torch.device("cpu"))


def run(decoder, pieces):
    """Logits of the last of some (tokens, start, blocks) in one step."""
    spans, tokens, positions = [], [], []
    for part, start, blocks in pieces:
        spans.append(Span(len(tokens), start, len(part), blocks))
        tokens += part.tolist()
        positions += range(start, start + len(part))
    admitted = torch.full((len(tokens),), TOKENS)
    chosen = range(len(tokens) - len(pieces[-1][0]), len(tokens))
    with torch.inference_mode():
        hidden, logits = decoder(torch.tensor(tokens), torch.tensor(positions), admitted, spans, list(chosen))
    assert hidden.shape == (len(tokens), decoder.model.config.hidden_size)
    return logits


def sequence(seed):
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4", None])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_models_forward_in_torch(shape, kind, dtype):
    model, tokens = model_of(shape, kind), sequence(0)
    cache = cache_of(model, dtype)
    assert can_be_fused(model, dtype, 16, exact=kind is not None)
    with torch.no_grad():
        expected = model(tokens[None], rope_length=TOKENS).logits[0]
    out = run(FusedDecoder(model, cache), [(tokens, 0, [3, 5, 7, 9, 11, 1])])
    rounded = dtype == torch.bfloat16 or (kind == "int4" and library().pellucid_pairs())
    # of keys and values in bfloat16, far more than of sums in another order
    assert (out - expected).abs().max() < (0.06 if rounded else 3e-5) * expected.abs().max()
    assert not torch.equal(
        out, run(FusedDecoder(model, cache_of(model, dtype)), [(tokens.flip(0), 0, [3, 5, 7, 9, 11, 1])])
    )


def test_plain_weights_of_bfloat16_give_the_logits_of_the_models_forward():
    model, tokens = model_of(kind=None, dtype=torch.bfloat16, vocab_size=103), sequence(0)
    with torch.no_grad():
        expected = model.float()(tokens[None]).logits[0]
    model = model.bfloat16()
    out = run(FusedDecoder(model, cache_of(model, torch.bfloat16)), [(tokens, 0, [3, 5, 7, 9, 11, 1])])
    assert out.shape == (TOKENS, 103) and (out - expected).abs().max() < 0.06 * expected.abs().max()


@pytest.mark.parametrize("kind", ["int4", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_cuts_and_company(shape, size, dtype, kind):
    model, rng = model_of(shape, kind, dtype), random.Random(shape)
    mine, other = sequence(0), sequence(1)
    blocks = list(range(1, 2 * -(-TOKENS // size) + 1))
    rng.shuffle(blocks)
    mine_in, other_in = blocks[::2], blocks[1::2]
    whole = run(FusedDecoder(model, cache_of(model, dtype, size)), [(mine, 0, mine_in)])
    decoder, parts, at, beside = FusedDecoder(model, cache_of(model, dtype, size)), [], 0, 0
    while at < TOKENS:
        count, more = min(rng.choice([1, 1, 2, 7, 30]), TOKENS - at), min(rng.choice([1, 5, 13]), TOKENS - beside)
        company = [(other[beside : beside + more], beside, other_in)] if more else []
        parts.append(run(decoder, [*company, (mine[at : at + count], at, mine_in)]))
        at, beside = at + count, beside + more
    assert_alike(torch.cat(parts), whole, kind, dtype)


def assert_alike(parts, whole, kind, cache_dtype):
    """To the bit of packed weights; many rows of plain ones are added up in another order than few."""
    if kind is not None:
        assert torch.equal(parts, whole)
    else:
        assert (parts - whole).abs().max() < (0.02 if cache_dtype == torch.bfloat16 else 2e-5) * whole.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_engine_gives_the_same_bits_alone_and_in_any_company(kind):
    model = model_of(kind=kind, dtype=torch.bfloat16)
    requests = random_requests(0, 10)
    expected = alone(model, requests, page_size=16)
    for options in ({}, {"prefix_cache": False}, {"preempt": "recompute"}, {"speculate": 3}, {"token_budget": 16}):
        one = Engine(model, kv_gb=0.0009, page_size=16, max_running=6, **({"token_budget": 48} | options))
        assert one.runner.fused is not None and one.exact
        results = one.generate([t for t, _ in requests], [p for _, p in requests])
        at = 0
        for (_, params), told in zip(requests, expected, strict=True):
            assert [bits(r) for r in results[at : at + params.n]] == told
            at += params.n


def test_an_engine_that_need_not_be_exact_reads_the_models_own_weights():
    model = model_of(kind=None)
    engines = [Engine(model, kv_gb=0.001, page_size=16, exact=exact) for exact in (False, True)]
    assert engines[0].runner.fused is not None and engines[1].runner.fused is None
    fast, exact = (e.generate([prompt(1, 9)], SamplingParams(max_tokens=8, temperature=0))[0] for e in engines)
    assert (
        fast.ids == exact.ids
        and fast.logprobs == pytest.approx(exact.logprobs, abs=1e-4)
        and fast.logprobs != exact.logprobs
    )
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(3)  # a step of a trainer
    again = Engine(model, kv_gb=0.001, page_size=16, exact=False)
    assert again.generate([prompt(1, 9)], SamplingParams(max_tokens=8, temperature=0))[0].logprobs != fast.logprobs


@pytest.mark.parametrize("variant", [name for name, flags in VARIANTS.items() if flags is not None])
def test_other_processors(variant, tmp_path_factory):
    """What this one does not run: pairs of bfloat16, and no vectors at all."""
    library, tokens, other, blocks = (
        compiled(variant, tmp_path_factory.mktemp("kernels")),
        sequence(0),
        sequence(1),
        [3, 5, 7, 9, 11, 1],
    )
    for shape in ("qwen3, untied", "mistral", "many queries a head"):
        for kind, dtype in (("int4", torch.bfloat16), (None, torch.bfloat16), (None, torch.float32)):
            model = model_of(shape, kind, dtype)
            expected = run(FusedDecoder(model, cache_of(model)), [(tokens, 0, blocks)])
            with using(library):
                whole = run(FusedDecoder(model, cache_of(model)), [(tokens, 0, blocks)])
                decoder = FusedDecoder(model, cache_of(model))
                parts = [
                    run(decoder, [(other[a:b], a, [2, 4, 6, 8, 10, 12]), (tokens[a:b], a, blocks)]) for a, b in CUTS
                ]
            assert_alike(torch.cat(parts), whole, kind, dtype)
            rounded = dtype == torch.bfloat16 and library.pellucid_pairs()
            assert (whole - expected).abs().max() < (0.06 if rounded else 3e-5) * expected.abs().max()


def test_bits_do_not_depend_on_the_number_of_threads():
    model, tokens, before = model_of(), sequence(0), torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            outs.append(run(FusedDecoder(model, cache_of(model)), [(tokens, 0, [3, 5, 7, 9, 11, 1])]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_what_stands_in_unused_places_of_the_cache_is_of_no_account():
    model, tokens, blocks = model_of("mistral"), sequence(0)[:37], [3, 5, 7]
    clean, dirty = cache_of(model), cache_of(model)
    for layer in dirty.stored:
        for tensor in layer:
            tensor.fill_(torch.nan)
    assert torch.equal(*(run(FusedDecoder(model, c), [(tokens, 0, blocks)]) for c in (clean, dirty)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_type_is_of_no_account(dtype):
    model = model_of()
    engine = Engine(model, kv_gb=0.001, page_size=16)
    params = SamplingParams(max_tokens=6, temperature=0)
    [expected] = engine.generate([prompt(1, 9)], params)
    torch.set_default_dtype(dtype)
    try:
        [found] = Engine(model, kv_gb=0.001, page_size=16).generate([prompt(1, 9)], params)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.ids == expected.ids


def test_an_embedding_that_does_not_lie_in_one_piece_is_left_to_torch():
    model = model_of()
    table = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = torch.nn.Parameter(table.t().contiguous().t(), requires_grad=False)
    assert not can_be_fused(model, torch.float32, 16, exact=True)


def test_weights_that_a_model_has_replaced_are_still_there():
    model, tokens = model_of(kind=None), sequence(0)
    decoder, blocks = FusedDecoder(model, cache_of(model)), [3, 5, 7, 9, 11, 1]
    before = run(decoder, [(tokens, 0, blocks)])
    model.to(torch.bfloat16)
    assert torch.equal(run(decoder, [(tokens, 0, blocks)]), before)


def test_a_row_that_is_not_finite_ends_alone():
    model = model_of(dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[100] = torch.nan
    engine = Engine(model, kv_gb=0.001, page_size=16)
    params = SamplingParams(max_tokens=5, temperature=0, logit_bias={97: -100.0, 98: -100.0, 99: -100.0, 100: -100.0})
    clean = engine.generate([prompt(1, 9)], params)
    bad, good = engine.generate([[1, 100, 3], prompt(1, 9)], params)
    assert bad.finish_reason == "error" and good.ids == clean[0].ids and good.logprobs == clean[0].logprobs
    assert engine.generate([prompt(1, 9)], params)[0].logprobs == clean[0].logprobs  # nothing is left behind


@pytest.mark.parametrize(
    "changes",
    [{"attention_gate": True}, {"hidden_size": 48}, {"intermediate_size": 100}, {"head_dim": 24}, {"kind": None},
     {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
     {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": None}],
)  # fmt: skip
def test_models_that_the_kernel_does_not_know_run_in_torch(changes):
    model = model_of(**changes)
    assert not can_be_fused(model, torch.float32, 16, exact=True)
    engine = Engine(model, kv_gb=0.001, page_size=16)
    assert engine.runner.fused is None
    [result] = engine.generate([prompt(1, 9)], SamplingParams(max_tokens=5, temperature=0))
    assert len(result.ids) == 5


def test_blocks_that_are_no_multiple_of_a_vector_run_in_torch():
    model = model_of()
    assert can_be_fused(model, torch.float32, 48, exact=True)
    assert not can_be_fused(model, torch.float32, 24, exact=True)
    assert not can_be_fused(model, torch.float16, 16, exact=True)


def test_the_probe_finds_a_kernel_that_rounds_by_company(monkeypatch):
    model = model_of(hidden_size=96)
    assert exactness_problem(model) is None
    plain = FusedDecoder.__call__

    def by_company(self, tokens, positions, admitted, spans, chosen):
        hidden, logits = plain(self, tokens, positions, admitted, spans, chosen)
        return hidden * (1 + 1e-6 * len(tokens)), logits

    monkeypatch.setattr(FusedDecoder, "__call__", by_company)
    model = model_of(hidden_size=96, intermediate_size=128)  # not known yet
    assert "kernel" in exactness_problem(model)
