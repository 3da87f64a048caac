"""`Engine`: what is computed, told, shared, limited and given back, and what one bad request does to the others."""

import logging

import pytest
import torch
from tiny_engine import VOCABULARY, bits, engine, prompt, random_requests, tiny

from pellucid.errors import ConfigError, RequestError
from pellucid.inference.engine import MAX_FAILURES, EngineError
from pellucid.inference.request import Request, SamplingParams
from pellucid.inference.sample import prompt_logprobs
from pellucid.inference.sample import sample as draw
from pellucid.inference.scheduler import QueueFullError

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def greedy(new=6, **others):
    return SamplingParams(temperature=0, max_tokens=new, **others)


@pytest.fixture(scope="module")
def model():
    return tiny()


def counted(one, fails=()):
    """Counts the model's forwards, and lets those in ``fails`` raise."""
    calls = []
    inner = one.runner.forward_hidden

    def forward(tokens, *args, **kwargs):
        calls.append(tokens.tolist())
        if fails == "all" or len(calls) in fails:
            raise RuntimeError("broken")
        return inner(tokens, *args, **kwargs)

    one.runner.forward_hidden = forward
    return calls


def finished(one):
    """All events until nothing is left, the books checked after each step."""
    events = []
    while one.has_work:
        events += one.step()
        one.pool.check()
    return events


def idle(one):
    one.pool.check()
    stats = one.stats()
    return (stats.running, stats.waiting, stats.held) == (0, 0, 0)


# -- what is computed ---------------------------------------------------------------------------------------------------


def test_it_gives_what_the_whole_model_gives_token_by_token(model):
    tokens = prompt(1, 20)
    result = engine(model).generate([tokens], greedy(8))[0]
    for i in range(8):
        logits = model(torch.tensor([tokens + result.ids[:i]])).logits[0, -1].detach()
        assert result.ids[i] == logits.argmax()
        assert result.logprobs[i] == pytest.approx(float(logits.log_softmax(-1)[result.ids[i]]), abs=1e-5)
    assert result.finish_reason == "length" and len(set(result.ids)) > 1


def test_each_prompt_is_read_once_and_all_decode_together(model):
    one = engine(model, prefix_cache=False)
    calls = counted(one)
    prompts = [prompt(i, length) for i, length in enumerate((3, 17, 40, 29))]
    one.generate(prompts, greedy(10))
    assert len(calls) <= 4 + 10
    stats = one.stats()
    assert (stats.prefilled, stats.decoded, stats.forwards) == (89, 40, len(calls))


def test_a_step_never_computes_more_tokens_than_its_budget(model):
    one = engine(model, token_budget=16, max_running=5)
    calls = counted(one)
    one.generate([prompt(i, 50) for i in range(6)], greedy(12, n=2))
    assert max(map(len, calls)) == 16


def test_groups_that_begin_alike_are_read_with_a_fifth_of_the_tokens(model):
    shared = [prompt(group, 64) for group in range(8)]
    prompts = [shared[i % 8] + prompt(100 + i, 4) for i in range(64)]
    plain, reusing = (engine(model, prefix_cache=cached, kv_gb=0.05) for cached in (False, True))
    assert list(map(bits, plain.generate(prompts, greedy(2)))) == list(map(bits, reusing.generate(prompts, greedy(2))))
    assert plain.stats().prefilled == 64 * 68
    assert reusing.stats().prefilled * 5 <= plain.stats().prefilled
    assert reusing.stats().reused + reusing.stats().prefilled == 64 * 68


def test_prompts_with_another_salt_share_nothing(model):
    one = engine(model)
    for salt, reused in (("a", 0), ("b", 0), ("a", 16)):
        before = one.stats().reused
        one.submit(Request("r", tuple(prompt(1, 20)), GREEDY, salt))
        finished(one)
        assert one.stats().reused - before == reused


def test_the_oldest_prefixes_are_evicted_when_the_cache_is_full(model):
    one = engine(model, blocks=8)
    for i in range(6):
        one.generate([prompt(i, 24)], greedy(4))
    stats = one.stats()
    assert stats.evictions > 0 and stats.free + stats.cached == stats.blocks == 8
    before = one.stats().reused
    one.generate([prompt(5, 24)], greedy(4))
    assert one.stats().reused == before + 16
    one.generate([prompt(0, 24)], greedy(4))
    assert one.stats().reused == before + 16


@pytest.mark.parametrize("preempt", ["copy", "recompute"])
def test_when_blocks_run_out_requests_are_sent_away_and_come_back(model, preempt):
    one = engine(model, blocks=12, preempt=preempt)
    for i in range(6):
        one.submit(Request(str(i), tuple(prompt(i, 12)), greedy(40, n=2)))
    events = finished(one)
    assert one.stats().preemptions > 0 and idle(one)
    counts = [len([e for e in events if e.request_id == str(i) and e.sample == n]) for i in range(6) for n in (0, 1)]
    assert counts == [40] * 12  # none lost, none twice


def test_samples_of_one_prompt_share_its_blocks(model):
    records = []
    one = engine(model, on_step=records.append)
    one.submit(Request("a", tuple(prompt(1, 20)), SamplingParams(max_tokens=3, n=4, seed=1)))
    one.step()
    assert one.stats().held == 3 and one.stats().prefilled == 20
    one.step()
    assert records[1].copied == 3 and one.stats().held == 2 + 4
    finished(one)
    assert idle(one)


def test_samples_differ_and_each_is_what_it_would_be_alone(model):
    params = SamplingParams(max_tokens=8, n=3, seed=5)
    three = engine(model).generate([prompt(1, 9)], params)
    assert len({tuple(r.ids) for r in three}) == 3
    assert three[0].ids == engine(model).generate([prompt(1, 9)], SamplingParams(max_tokens=8, seed=5))[0].ids


def test_latent_attention_caches_its_latent_and_a_cache_can_be_narrower_than_the_weights():
    latent, plain = engine(tiny("mla")), engine(tiny("gqa"))
    for (stored,) in latent.runner.cache.stored:  # values are a part of it
        assert stored.shape[1:] == (1, latent.runner.cache.block_size, 24)
    assert latent.stats().blocks == int(0.01e9) // (8 * 2 * 24 * 4)
    assert plain.stats().blocks == int(0.01e9) // (8 * 2 * 2 * 2 * 16 * 4)
    narrow = engine(tiny("gqa"), kv_dtype=torch.bfloat16)
    assert narrow.stats().blocks in range(2 * plain.stats().blocks, 2 * plain.stats().blocks + 2)
    wide, rounded = plain.generate([prompt(1, 30)], greedy(1)), narrow.generate([prompt(1, 30)], greedy(1))
    assert wide[0].logprobs[0] == pytest.approx(rounded[0].logprobs[0], abs=0.05)
    assert wide[0].logprobs[0] != rounded[0].logprobs[0]


@pytest.mark.parametrize("options", [{}, {"token_budget": 7, "max_running": 7}, {"blocks": 14}])
def test_prompt_log_probabilities_are_the_forwards_own(model, options):
    one = engine(model, **options)
    prompts = [prompt(i, 40) for i in range(4)]
    one.generate(prompts, greedy(1))  # what is cached has no logits
    results = one.generate(prompts, greedy(30, prompt_logprobs=2, n=2))
    for tokens, told in zip([p for p in prompts for _ in range(2)], results, strict=True):
        expected = prompt_logprobs(model(torch.tensor([tokens])).logits[0, :-1], tokens[1:], 2)
        assert told.prompt_logprobs == [None, *expected]
    assert ("blocks" in options) == (one.stats().preemptions > 0)


def test_the_first_event_of_each_sample_tells_what_the_model_thought_of_the_prompt(model):
    tokens = prompt(3, 30)
    for new in (0, 5):
        one = engine(model, token_budget=16)
        asked = greedy(new, prompt_logprobs=2, n=2)
        expected = one.generate([tokens], asked)
        one.submit(Request("a", tuple(tokens), asked))
        events = []
        while one.has_work:
            events += one.step()
        for sample in range(2):
            mine = [e for e in events if e.sample == sample]
            assert (
                mine[0].prompt_logprobs == expected[sample].prompt_logprobs and len(expected[0].prompt_logprobs) == 30
            )
            assert all(e.prompt_logprobs is None for e in mine[1:]) and len(mine) == max(1, new)


def test_prompt_log_probabilities_are_told_once_where_the_prompt_is_read_twice(model):
    one = engine(model, blocks=22, preempt="recompute", token_budget=8, max_running=8)
    for i in range(5):
        one.submit(Request(str(i), tuple(prompt(i, 8)), greedy(100)))
    for _ in range(3):
        one.step()
    tokens = prompt(9, 50)
    asked = one.results([Request("asked", tuple(tokens), greedy(2, prompt_logprobs=0))])
    told = next(asked)[0].prompt_logprobs
    assert one.stats().preemptions > 0 and len(told) == 50
    assert told == [None, *prompt_logprobs(model(torch.tensor([tokens])).logits[0, :-1], tokens[1:])]


def test_dynamic_rotary_scaling_shares_keys_only_between_sequences_of_one_length():
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = tiny(max_position_embeddings=32, rope_scaling=scaling)
    tokens = prompt(1, 24)
    one = engine(model)
    short, long = one.generate([tokens], greedy(4))[0], one.generate([tokens], greedy(60))[0]
    assert one.stats().reused == 0
    assert bits(long) == bits(engine(model).generate([tokens], greedy(60))[0])
    assert short.ids != long.ids[:4] or short.logprobs != long.logprobs[:4]  # the keys do differ
    one.generate([tokens], greedy(60))
    one.generate([tokens], greedy(2))  # within the window, as the first was
    assert one.stats().reused == 32


def test_a_model_in_training_mode_is_asked_without_dropout_and_left_as_it_was(model):
    trained = tiny(dropout=0.5).train()
    result = engine(trained).generate([prompt(1, 10)], GREEDY)[0]
    assert bits(result) == bits(engine(model).generate([prompt(1, 10)], GREEDY)[0])
    assert trained.training and trained.model.layers[0].training


# -- what is told -------------------------------------------------------------------------------------------------------


def test_each_token_is_told_once_and_the_last_with_the_reason(model):
    one, told = engine(model), []
    results = one.generate([prompt(1, 5), prompt(2, 30)], greedy(4, n=2), on_event=told.append)
    for i, result in enumerate(results):
        mine = [e for e in told if (e.request_id, e.sample) == (str(i // 2), i % 2)]
        assert [e.token for e in mine] == result.ids and [e.logprob for e in mine] == result.logprobs
        assert [e.finish_reason for e in mine] == [None, None, None, "length"]


def test_a_stop_id_ends_it_and_is_its_last_token(model):
    ids = engine(model).generate([prompt(1, 5)], greedy(12))[0].ids
    stop = ids[4]
    result = engine(model).generate([prompt(1, 5)], greedy(12, stop_ids=(stop,)))[0]
    assert result.ids == ids[: ids.index(stop) + 1] and result.finish_reason == "stop"


@pytest.mark.parametrize("new", [0, 1, 2])
def test_no_more_tokens_than_asked_for(model, new):
    one = engine(model)
    one.submit(Request("a", tuple(prompt(1, 16)), greedy(new, n=2)))
    events = finished(one)
    assert len(events) == 2 * max(new, 1) and [e.token is None for e in events] == [new == 0] * len(events)
    assert [e.finish_reason for e in events[-2:]] == ["length", "length"] and idle(one)
    results = one.generate([prompt(1, 16)], greedy(new, prompt_logprobs=1))
    assert len(results[0].ids) == new and len(results[0].prompt_logprobs) == 16


def test_the_window_ends_a_request_and_a_prompt_may_fill_it(model):
    one = engine(model)
    result = one.generate([prompt(1, 250)], greedy(50))[0]
    assert len(result.ids) == 6 and result.finish_reason == "length"
    assert one.generate([prompt(1, 256)], greedy(0))[0].finish_reason == "length"
    for length, new in ((256, 1), (257, 0)):
        with pytest.raises(RequestError, match=f"prompt has {length} tokens and the model's window is 256"):
            one.submit(Request("a", tuple(prompt(1, length)), greedy(new)))
    assert not one.has_work


def test_a_step_tells_what_it_did(model):
    records = []
    one = engine(model, blocks=12, on_step=records.append, token_budget=16, max_running=4)
    one.generate([prompt(1, 20)], greedy(2))
    first = [(r.step, r.chunks, r.finished) for r in records]
    assert [chunks for _, chunks, _ in first] == [
        (("generate-0-0", 0, 0, 16),), (("generate-0-0", 0, 16, 4),), (("generate-0-0", 0, 20, 1),)
    ]  # fmt: skip
    assert [step for step, _, _ in first] == [1, 2, 3] and first[-1][2] == (("generate-0-0", 0, "length"),)
    for i in range(2, 7):
        one.submit(Request(str(i), tuple(prompt(1, 16) + prompt(i, 8)), greedy(40)))
    finished(one)
    stats = one.stats()
    assert sum(sum(r.reused.values()) for r in records) == stats.reused > 0
    assert sum(len(r.preempted) for r in records) == stats.preemptions > 0
    assert sum(r.evicted for r in records) == stats.evictions > 0
    assert all(r.free + r.cached + r.held == 12 and r.seconds > 0 for r in records)
    assert max(r.waiting for r in records) > 0 and records[-1].waiting == 0
    assert len(records) == stats.steps


# -- at the door, and on the way out ------------------------------------------------------------------------------------


def test_requests_are_refused_at_the_door(model):
    one = engine(model, blocks=4, max_waiting=2, max_running=2)
    for tokens, params, message in (
        ((), GREEDY, "prompt is empty"),
        ((VOCABULARY,), GREEDY, f"token id {VOCABULARY}"),
        ((1,), greedy(2, stop_ids=(VOCABULARY,)), "stop_ids"),
        ((1,) * 20, greedy(20), "cache holds 32"),
        ((1,), greedy(1, n=3), "n is 3"),
    ):
        with pytest.raises(RequestError, match=message):
            one.submit(Request("a", tokens, params))
    one.submit(Request("a", (1,), GREEDY))
    with pytest.raises(RequestError, match="'a' is running"):
        one.submit(Request("a", (1,), GREEDY))
    one.submit(Request("b", (1,), GREEDY))
    with pytest.raises(QueueFullError):
        one.submit(Request("c", (1,), GREEDY))
    assert {e.request_id for e in finished(one)} == {"a", "b"}


def test_a_bad_prompt_among_others_lets_none_run(model):
    one = engine(model)
    calls = counted(one)
    with pytest.raises(RequestError):
        one.generate([prompt(1, 4), []], GREEDY)
    assert not calls and idle(one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"kv_gb": 1e-9}, "kv_gb 1e-09 has no room"),
        ({"kv_gb": float("inf")}, "kv_gb inf"),
        (
            {"kv_gb": 1e12},
            r"a cache of 1,000,000,000,000\.0 GB .* was asked for, and the machine has [\d,.]+ GB; lower kv_gb",
        ),
        ({"max_running": 0}, "max_running"),
        ({"preempt": "drop"}, "preempt must be"),
        ({"speculate": -1}, "speculate"),
    ],
)
def test_options_out_of_range_are_refused_by_name(model, options, message):
    with pytest.raises(ConfigError, match=message):
        engine(model, **options)


@pytest.mark.parametrize("steps", range(6))
def test_a_request_can_be_cancelled_at_any_point_and_only_once(model, steps):
    one = engine(model, token_budget=8, max_running=4, blocks=40)
    for name in "ab":
        one.submit(Request(name, tuple(prompt(name, 20)), SamplingParams(max_tokens=6, n=3, seed=1)))
    for _ in range(steps):
        one.step()
    assert one.cancel("a") and not one.cancel("a") and not one.cancel("nobody")
    one.pool.check()
    later = finished(one)
    assert {e.request_id for e in later} == {"b"} and idle(one)
    expected = engine(model).generate([prompt("b", 20)], SamplingParams(max_tokens=6, n=3, seed=1))
    for sample in range(3):
        assert [e.token for e in later if e.sample == sample] == expected[sample].ids


def test_what_a_cancelled_request_computed_is_there_for_the_next(model):
    one = engine(model)
    one.submit(Request("a", tuple(prompt(1, 40)), greedy(20)))
    one.step()
    one.cancel("a")
    one.generate([prompt(1, 40)], GREEDY)
    assert one.stats().reused == 32


def test_a_closed_stream_is_cancelled(model):
    one = engine(model)
    stream = one.stream(Request("a", tuple(prompt(1, 20)), greedy(20)))
    assert next(stream).token is not None and one.has_work
    stream.close()
    assert idle(one)


def test_a_request_sent_away_can_be_cancelled(model):
    one = engine(model, blocks=10)
    for i in range(3):
        one.submit(Request(str(i), tuple(prompt(i, 12)), greedy(60)))
    while not one.stats().preemptions:
        one.step()
    assert one.cancel("2") and not one.scheduler.waiting
    assert {e.request_id for e in finished(one)} == {"0", "1"} and idle(one)


# -- one that goes wrong ------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned():
    """An id whose embedding is NaN."""
    model = tiny(tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = torch.nan
    return model


def clean(seed, length):
    return [t if t != 13 else 14 for t in prompt(seed, length)]


def no_nan_left(one):
    return not any(t.isnan().any() for layer in one.runner.cache.stored for t in layer)


@pytest.mark.parametrize("at", [3, 20, 49])
@pytest.mark.parametrize("n", [1, 3])
def test_a_nan_ends_its_request_alone_and_stays_in_no_block(poisoned, at, n):
    one = engine(poisoned, blocks=40, token_budget=16, max_running=8)
    bad = clean(1, 50)
    bad[at] = 13
    results = one.generate([clean(2, 20), bad, clean(3, 40)], greedy(8, n=n))
    assert [r.finish_reason for r in results] == ["length"] * n + ["error"] * n + ["length"] * n
    assert all(r.ids == [] and "not finite" in r.error for r in results[n : 2 * n])
    assert idle(one) and no_nan_left(one)
    assert [bits(r) for r in results[:n]] == [
        bits(r) for r in engine(poisoned).generate([clean(2, 20)], greedy(8, n=n))
    ]
    again = one.generate([clean(i, 30) for i in range(8)], greedy(8))  # in the blocks that it had
    assert all(r.finish_reason == "length" for r in again)


def test_a_nan_prompt_that_is_cancelled_half_read_leaves_none_behind(poisoned):
    one = engine(poisoned, blocks=40, token_budget=8, max_running=8)
    one.submit(Request("bad", (13, *clean(1, 30)), greedy(8)))
    events = one.step()
    one.cancel("bad")
    assert [e.finish_reason for e in events] == ["error"] and idle(one) and no_nan_left(one)


def test_a_nan_drawn_later_ends_it_there(poisoned):
    one = engine(poisoned)
    result = one.generate([clean(1, 10)], greedy(8, allowed_ids=(13,)))[0]
    assert result.ids == [13] and result.finish_reason == "error" and no_nan_left(one)


def test_a_forward_that_raises_once_costs_one_request_alone_and_none_in_a_batch(model):
    one = engine(model)
    counted(one, fails={1})
    result = one.generate([prompt(1, 10)], GREEDY)[0]
    assert result.finish_reason == "error" and "RuntimeError: broken" in result.error
    assert one.generate([prompt(1, 10)], GREEDY)[0].finish_reason == "length" and idle(one)
    several = engine(model)
    counted(several, fails={1})
    assert {r.finish_reason for r in several.generate([prompt(i, 10) for i in range(3)], GREEDY)} == {"length"}


def test_in_a_batch_only_the_request_whose_forward_raises_fails(model):
    one = engine(model)
    inner = one.runner.forward_hidden

    def forward(tokens, *args, **kwargs):
        if 5 in tokens.tolist():
            raise MemoryError("too much")
        return inner(tokens, *args, **kwargs)

    one.runner.forward_hidden = forward
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    params = greedy(4, n=2, logit_bias={5: -100})
    results = one.generate(prompts, params)
    assert [r.finish_reason for r in results] == ["length"] * 2 + ["error"] * 2 + ["length"] * 2
    assert bits(results[0]) == bits(engine(model).generate(prompts[:1], params)[0]) and idle(one)


def test_samples_of_a_request_that_fails_while_they_decode_end_once_each(model):
    one = engine(model)
    one.submit(Request("a", tuple(prompt(1, 10)), SamplingParams(max_tokens=9, n=3, seed=1)))
    one.submit(Request("b", tuple(prompt(2, 10)), greedy(9)))
    one.step()
    counted(one, fails={1, 2})
    events = finished(one)
    assert sorted((e.request_id, e.sample) for e in events if e.finish_reason == "error") == [
        ("a", i) for i in range(3)
    ]
    assert [e.finish_reason for e in events if e.request_id == "b"][-1] == "length" and idle(one)


def test_a_model_that_always_raises_ends_all_that_run_and_wait_at_once(model, caplog):
    one = engine(model, max_running=2, max_waiting=100)
    calls = counted(one, fails="all")
    for i in range(50):
        one.submit(Request(str(i), tuple(prompt(i, 10)), greedy(4, n=2)))
    with caplog.at_level(logging.ERROR):
        events = finished(one)
    assert sorted((int(e.request_id), e.sample) for e in events) == [(i, n) for i in range(50) for n in (0, 1)]
    assert {e.finish_reason for e in events} == {"error"} and len(calls) <= 2 * MAX_FAILURES and idle(one)
    assert "the engine gives up" in caplog.text
    with pytest.raises(EngineError, match="broken"):
        one.submit(Request("later", (1,), GREEDY))


def test_failures_between_which_others_work_are_no_reason_to_give_up(model):
    one = engine(model)
    counted(one, fails=set(range(1, 20, 2)))
    for _ in range(MAX_FAILURES + 1):
        assert one.generate([prompt(1, 10)], greedy(1))[0].finish_reason == "error"
        assert one.generate([prompt(1, 10)], greedy(1))[0].finish_reason == "length"


def test_several_requests_that_fail_beside_one_that_works_are_no_reason_to_give_up(model):
    one = engine(model)
    inner = one.runner.forward_hidden

    def forward(tokens, *args, **kwargs):
        if 5 in tokens.tolist():
            raise MemoryError("too much")
        return inner(tokens, *args, **kwargs)

    one.runner.forward_hidden = forward
    prompts = [[1, 2], *([5, i] for i in range(2 * MAX_FAILURES))]
    results = one.generate(prompts, greedy(4, logit_bias={5: -100}))
    assert [r.finish_reason for r in results] == ["length"] + ["error"] * 2 * MAX_FAILURES and one.broken is None


def test_a_processor_or_constraint_that_raises_ends_its_own_request(model):
    def processor(ids, logits):
        if len(ids) == 12:
            raise ValueError("mine")
        return logits

    one = engine(model)
    ok, bad = prompt(2, 10), prompt(1, 10)
    results = one.generate([ok, bad], [greedy(5), greedy(5, logits_processors=(processor,))])
    assert results[0].finish_reason == "length" and len(results[0].ids) == 5
    assert results[1].finish_reason == "error" and len(results[1].ids) == 2 and "ValueError: mine" in results[1].error
    results = one.generate([ok, bad], [greedy(5), greedy(5, constraint=Failing())])
    assert results[0].finish_reason == "length" and idle(one)
    assert results[1].finish_reason == "error" and results[1].ids == [] and "full" in results[1].error


def test_where_drawing_raises_only_the_request_that_it_raises_for_ends(model, monkeypatch, caplog):
    """A fault of the sampler's own, such as numbers that it did not foresee."""
    prompts, params = [prompt(i, 10) for i in range(3)], greedy(5, n=2)
    alone = engine(model).generate(prompts, params)
    one, drawn = engine(model), []

    def drawing(logits, rows):
        drawn.append(len(rows))
        if any(list(row.prompt) == prompts[1] and len(row.output) == 2 and row.choice == 1 for row in rows):
            raise OverflowError("not foreseen")
        return draw(logits, rows)

    monkeypatch.setattr("pellucid.inference.engine.sample", drawing)
    with caplog.at_level(logging.CRITICAL):
        results = one.generate(prompts, params)
    assert [r.finish_reason for r in results] == ["length"] * 3 + ["error"] + ["length"] * 2
    assert "OverflowError: not foreseen" in results[3].error and len(results[3].ids) == 2
    assert [bits(r) for i, r in enumerate(results) if i != 3] == [bits(r) for i, r in enumerate(alone) if i != 3]
    assert max(drawn) == 6 and drawn.count(1) == 6 and one.broken is None and idle(one)


class Failing:
    """A constraint that cannot take a token."""

    vocab_size = VOCABULARY
    may_end = finished = False

    def start(self):
        return self

    def mask(self):
        return torch.ones(VOCABULARY, dtype=torch.bool)

    def accept(self, token):
        raise RequestError("the grammar is full")

    def copy(self):
        return self


def test_random_requests_on_a_tiny_pool_leave_the_books_right(model):
    one = engine(model, blocks=20, token_budget=16, max_running=8, speculate=2)
    requests = random_requests(3, 25)
    for i, (tokens, params) in enumerate(requests):
        one.submit(Request(str(i), tuple(tokens), params))
    ends = [(e.request_id, e.sample) for e in finished(one) if e.finish_reason is not None]
    assert sorted(ends) == sorted((str(i), n) for i, (_, p) in enumerate(requests) for n in range(p.n))
    assert one.stats().preemptions > 0 and one.stats().evictions > 0 and idle(one)


def test_requests_behind_a_long_first_one_are_not_held_back():
    one = engine(tiny("gqa"), max_running=2)
    steps = []
    one.on_step = lambda record: steps.append({name for name, *_ in record.chunks})
    requests = [Request("long", (1, 2, 3), greedy(40)), *(Request(f"{i}", (1, 2, 3 + i), greedy(2)) for i in range(12))]
    found = [[len(result.ids) for result in results] for results in one.results(iter(requests))]
    assert found == [[40], *[[2]] * 12]
    last = max(i for i, names in enumerate(steps) if "long" in names)
    assert len({name for names in steps[:last] for name in names}) == 13  # all ran beside it
