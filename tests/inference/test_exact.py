"""Bits, not closeness: the same request gives the same ids and log-probabilities alone and in any company, and those of the
trainer's forward. Where a probe finds that this machine does not hold it, the engine says so and nothing is compared."""

import random

import pytest
import torch
from tiny_engine import KINDS, VOCABULARY, alone, bits, dtype_of, engine, prompt, random_requests, tiny

from pellucid.inference.probe import exactness_problem
from pellucid.inference.request import Request, Result, SamplingParams
from pellucid.model.linear import as_elsewhere
from pellucid.model.quantize import quantize_

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def exact(model, **options):
    problem = exactness_problem(model)
    if problem is not None and "number of rows" in problem:
        pytest.skip(f"this machine's matrix products: {problem}")
    assert problem is None  # attention and what stands around it are ours
    return engine(model, **options)


def random_options(rng):
    """A pool in which not everybody has room, and every way to run."""
    running = rng.choice([3, 6, 12])
    return {
        "blocks": rng.choice([17, 24, 40]),
        "max_running": running,
        "token_budget": rng.choice([running, 16, 48, 512]),
        "prefix_cache": rng.random() < 0.7,
        "preempt": rng.choice(["copy", "recompute"]),
        "speculate": rng.choice([0, 0, 3]),
    }


def in_company(one, requests, rng):
    """The results of requests that come while others run, and of which some are cancelled (None)."""
    waiting, samples, cancelled = list(enumerate(requests)), {}, set()
    while waiting or one.has_work:
        while waiting and (not one.has_work or rng.random() < 0.3):
            i, (tokens, params) = waiting.pop()
            one.submit(Request(str(i), tuple(tokens), params))
        if rng.random() < 0.03 and (running := [s.request.id for s in one.scheduler.running]):
            cancelled.add(name := rng.choice(running))
            assert one.cancel(name)
        for event in one.step():
            samples.setdefault((event.request_id, event.sample), []).append(event)
        one.pool.check()
    assert one.stats().held == 0
    return [
        None if str(i) in cancelled else [told(samples[str(i), n]) for n in range(params.n)]
        for i, (_, params) in enumerate(requests)
    ]


def told(events):
    drawn = [e for e in events if e.token is not None]
    return (
        [e.token for e in drawn],
        [e.logprob for e in drawn],
        [e.top_logprobs for e in drawn],
        events[-1].finish_reason,
    )


def as_told(result: Result):
    tops = result.top_logprobs or [()] * len(result.ids)
    return result.ids, result.logprobs, tops, result.finish_reason


def compare(model, seed, count, rounds):
    rng = random.Random(seed)
    requests = random_requests(seed, count)
    single = exact(model, prefix_cache=False)
    expected = [[as_told(r) for r in single.generate([tokens], params)] for tokens, params in requests]
    assert sum(len(ids) for samples in expected for ids, *_ in samples) > 5 * count
    preemptions = reused = 0
    for _ in range(rounds):
        one = engine(model, **random_options(rng))
        for found, right, request in zip(in_company(one, requests, rng), expected, requests, strict=True):
            assert found is None or found == right, request
        preemptions, reused = preemptions + one.stats().preemptions, reused + one.stats().reused
    return preemptions, reused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "attend"), [(torch.float32, "canonical"), (torch.bfloat16, "sdpa")])
def test_a_request_has_the_same_bits_alone_and_in_any_company(kind, dtype, attend):
    preemptions, reused = compare(tiny(kind, dtype, attend=attend), seed=len(kind), count=12, rounds=2)
    assert preemptions + reused > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attend", ["canonical", "sdpa"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hundreds_of_requests_have_the_same_bits_alone_and_in_any_company(kind, dtype, attend, threads):
    preemptions, reused = compare(tiny(kind, dtype, attend=attend), seed=threads, count=40, rounds=4)
    assert preemptions > 0 and reused > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_the_bits_of_the_trainers_forward(kind, dtype):
    check_against_trainer(kind, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_without_kernels_of_our_own_bits_are_the_same_alone_in_any_company_and_in_the_trainer(kind):
    with as_elsewhere():
        preemptions, reused = compare(tiny(kind, torch.float32), seed=len(kind), count=8, rounds=1)
        assert preemptions + reused > 0
        check_against_trainer(kind, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_the_bits_of_the_trainers_forward_on_several_threads(kind, dtype, threads):
    check_against_trainer(kind, dtype)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 here")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_bfloat16_weights_give_the_bits_of_the_trainers_forward(kind):
    packed = tiny(kind, torch.bfloat16)
    quantize_(packed, "bf16")
    check_against_trainer(kind, torch.bfloat16, engine_of=exact(packed))


@pytest.mark.parametrize("width", [24, 50])
def test_a_width_that_is_no_multiple_of_a_vector_gives_the_bits_of_the_trainers_forward(width):
    check_against_trainer("gqa", torch.float32, lengths=(1, 2, 17, 18, 33), intermediate_size=width)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_weights_give_the_same_bits_alone_and_in_any_company(weights):
    model = tiny("gqa", torch.bfloat16)
    quantize_(model, weights)
    preemptions, reused = compare(model, seed=3, count=12, rounds=2)
    assert preemptions + reused > 0


@pytest.mark.parametrize("length", [1018, 1530])
def test_bfloat16_rows_beyond_the_bins_of_keys_have_the_bits_of_the_trainers_forward(length):
    """Where the next token needs 1,024 keys, more than any bin, and another 512."""
    overrides = {"max_position_embeddings": 2048, "head_dim": 64}
    check_against_trainer("gqa", torch.bfloat16, lengths=(length, 9, 300), kv_gb=0.05, **overrides)


def check_against_trainer(kind, dtype, *, lengths=(1, 5, 30, 61), engine_of=None, kv_gb=0.01, **overrides):
    model = tiny(kind, dtype, **overrides)
    requests = [(prompt(i, length), SamplingParams(max_tokens=12, seed=i)) for i, length in enumerate(lengths)]
    one = engine_of or exact(model, kv_gb=kv_gb)
    results = one.generate([tokens for tokens, _ in requests], [params for _, params in requests])
    for (tokens, _), result in zip(requests, results, strict=True):
        whole = torch.tensor([tokens + result.ids])
        logits = model(whole).logits[0, len(tokens) - 1 : -1].detach().float()
        norm = logits.logsumexp(-1)
        expected = (logits.gather(1, torch.tensor(result.ids)[:, None])[:, 0] - norm).tolist()
        assert result.logprobs == expected


def test_a_short_sequence_has_the_same_bits_beside_one_of_several_key_blocks():
    model = tiny(max_position_embeddings=2048)
    requests = [
        (prompt(1, 700), SamplingParams(max_tokens=12, seed=1)),
        (prompt(2, 9), SamplingParams(max_tokens=12, seed=2)),
    ]
    one = exact(model, kv_gb=0.05)
    assert [[bits(r)] for r in one.generate([t for t, _ in requests], [p for _, p in requests])] == alone(
        model, requests
    )


def test_dynamic_rotary_frequencies_have_the_same_bits_in_any_company():
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = tiny(max_position_embeddings=64, head_dim=24, rope_scaling=scaling)
    requests = [(prompt(i, 40 + i), SamplingParams(max_tokens=30 + i, seed=i)) for i in range(12)]
    results = exact(model).generate([tokens for tokens, _ in requests], [params for _, params in requests])
    assert [[bits(r)] for r in results] == alone(model, requests)


def test_all_rows_of_a_narrow_cache_have_the_same_bits():
    model = tiny()
    requests = random_requests(2, 8)
    one = exact(model, kv_dtype=torch.bfloat16, blocks=24, token_budget=8, max_running=4)
    together = iter(one.generate([t for t, _ in requests], [p for _, p in requests]))
    expected = alone(model, requests, kv_dtype=torch.bfloat16)
    assert [[bits(next(together)) for _ in samples] for samples in expected] == expected


@pytest.mark.parametrize("attend", ["sdpa", "canonical"])
def test_routers_and_experts_of_an_exact_engine_compute_each_token_alike_whatever_attend_says(attend):
    model = tiny("moe", attend=attend)
    layer = model.model.layers[0].mlp
    seen = []
    layer.register_forward_pre_hook(lambda module, _: seen.append((module.min_rows, module.gate.padding)))
    before = layer.min_rows, layer.gate.padding
    exact(model).generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert set(seen) == {(16, 26)}
    seen.clear()
    engine(model, exact=False).generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert set(seen) == {(1, 0)} and (layer.min_rows, layer.gate.padding) == before


@pytest.mark.parametrize("kind", KINDS)
def test_an_inexact_engine_is_close(kind):
    model = tiny(kind)
    params = SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=0)
    prompts = [prompt(i, 30) for i in range(4)]
    loose, tight = (engine(model, exact=e).generate(prompts, params) for e in (False, True))
    for a, b in zip(loose, tight, strict=True):
        assert a.ids == b.ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert [t.logprob for t in a.prompt_logprobs[1:]] == pytest.approx(
            [t.logprob for t in b.prompt_logprobs[1:]], abs=1e-4
        )
    assert dtype_of(model) == torch.float32 and max(map(max, prompts)) < VOCABULARY
