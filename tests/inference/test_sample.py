"""Sampling against closed forms, published random numbers and counted frequencies."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.inference import SamplingParams
from pellucid.inference import sample as sampler
from pellucid.inference.request import Row
from pellucid.inference.sample import NOT_FINITE, Sampled, filtered_probs, philox, prompt_logprobs, sample, uniform

torch.set_num_threads(1)


def sample_rows(logits: torch.Tensor, *, seed: int = 5, **params: Any) -> Sampled:
    """One token a row, row i at position i."""
    one = SamplingParams(**params)
    return sample(logits, [Row(one, seed, 0, i) for i in range(len(logits))])


def draw(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    return sample_rows(logits, **params).tokens


def reference_filter(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[float]:
    """The filters written out for one row, with Python's own numbers."""
    top = max(logits)
    probs = [math.exp((x - top) / temperature) for x in logits]
    order = sorted(range(len(probs)), key=lambda i: (-logits[i], i))[: top_k or None]
    total = math.fsum(probs[i] for i in order)
    kept: list[int] = []
    for i in order:
        if kept and math.fsum(probs[j] for j in kept) >= top_p * total:
            break
        kept.append(i)
    kept = [i for i in kept if probs[i] >= min_p]  # the most probable has 1
    mass = math.fsum(probs[i] for i in kept)
    return [probs[i] / mass if i in kept else 0.0 for i in range(len(probs))]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    """Known answers of the authors' Random123 distribution."""
    out = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert out[:, 0].tolist() == words


def test_noise_is_uniform_and_depends_on_seed_sample_and_position() -> None:
    rows = 20_000
    noise = uniform([2**63 + 1] * rows, [3] * rows, list(range(rows)))
    counts = torch.histc(noise.float(), 20, 0, 1)
    assert float(((counts - rows / 20) ** 2 / (rows / 20)).sum()) < 44  # chi-square of 19 degrees, p = 0.001
    assert noise.min() >= 0 and noise.max() < 1
    assert len({float(uniform([a], [b], [c])) for a in (0, 1, 2**40) for b in (0, 1) for c in (0, 1, 9)}) == 18
    assert torch.equal(uniform([1, 7, 7], [0, 2, 2], [4, 5, 6])[1:], uniform([7, 7], [2, 2], [5, 6]))


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.full((40, 1000), -1.0)
    for row in range(40):
        logits[row, [row * 3 + 5, row * 3 + 600, row * 3 + 90]] = 2.5
    assert draw(logits, temperature=0).tolist() == [row * 3 + 5 for row in range(40)]


@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5001, 2.0, 4.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.83, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_filters_equal_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = filtered_probs(torch.tensor([logits]), [params])[0]
    wanted = reference_filter(torch.tensor(logits).tolist(), temperature, top_k, top_p, min_p)
    assert (probs / probs.sum()).tolist() == pytest.approx(wanted, abs=1e-9)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in [(0.0, 1), (0.4, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.88, 4), (1.0, 4)]:
        assert int((filtered_probs(logits, [SamplingParams(top_p=top_p)]) > 0).sum()) == kept


def test_top_p_acts_on_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs = filtered_probs(logits, [SamplingParams(top_k=2, top_p=0.5)])  # 0.4 of 0.7 is 0.57
    assert (probs[0] > 0).tolist() == [True, False, False, False]


def test_a_top_k_beyond_every_vocabulary_keeps_all() -> None:
    logits = torch.tensor([[0.1, 2.0, 0.3, -1.0]])
    for top_k in (4, 5, 2**63, 10**400):
        assert torch.equal(
            filtered_probs(logits, [SamplingParams(top_k=top_k)]), filtered_probs(logits, [SamplingParams(top_k=0)])
        )


def test_of_equal_logits_top_k_keeps_the_lowest_ids() -> None:
    kept = filtered_probs(torch.zeros(1, 5000), [SamplingParams(top_k=7)])[0].nonzero()[:, 0]
    assert kept.tolist() == list(range(7))


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 2.0, "top_k": 4}]
)
def test_drawn_frequencies_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    rows = 20_000
    logits = torch.tensor([1.0, -0.5, 2.0, 0.3, -4.0, 1.5])
    counts = torch.bincount(draw(logits.expand(rows, -1), **params), minlength=6).double()
    p = SamplingParams(**params)
    expected = rows * torch.tensor(reference_filter(logits.tolist(), p.temperature, p.top_k, p.top_p)).double()
    assert bool((counts[expected == 0] == 0).all())
    some = expected > 0
    assert float(((counts - expected)[some] ** 2 / expected[some]).sum()) < 20.6  # chi-square of 5 degrees, p = 0.001


def halve(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that looks at both of its arguments."""
    return logits.index_fill(0, torch.tensor([ids[-1]]), 9.0) / 2


class Even:
    """A constraint's state: even ids, and the end after an even number of them."""

    def __init__(self, length: int) -> None:
        self.may_end = length % 2 == 0
        self.finished = False

    def mask(self) -> torch.Tensor:
        return torch.arange(400) % 2 == 0

    def accept(self, token: int) -> None:
        self.may_end = not self.may_end

    def copy(self) -> "Even":
        return Even(int(not self.may_end))


class Evens:
    vocab_size = 400

    def start(self) -> Even:
        return Even(0)


def random_row(draws: random.Random, vocabulary: int) -> Row:
    """A row with any mixture of what can be asked for."""
    some = lambda chance, value, other: value if draws.random() < chance else other  # noqa: E731
    ids = lambda n: [draws.randrange(vocabulary) for _ in range(n)]  # noqa: E731
    constraint, allowed = draws.choice([(Evens(), None), (None, ids(30)), (None, None), (None, None)])
    output = ids(draws.randrange(12))
    params = SamplingParams(
        temperature=draws.choice([0, 0.3, 1.0, 2.5]),
        top_k=draws.choice([0, 0, 1, 3, 40, 300]),
        top_p=draws.choice([1.0, 1.0, 0.0, 0.4, 0.9, 0.999]),
        min_p=draws.choice([0.0, 0.0, 0.1]),
        repetition_penalty=some(0.4, 1.3, 1.0), presence_penalty=some(0.3, -0.7, 0.0),
        frequency_penalty=some(0.3, 0.9, 0.0), logit_bias=some(0.3, dict.fromkeys(ids(5), 3.5), {}),
        allowed_ids=allowed, constraint=constraint, stop_ids=tuple(ids(draws.randrange(3))),
        min_tokens=draws.choice([0, 5]), top_logprobs=draws.choice([0, 0, 1, 5, 20]),
        logits_processors=some(0.2, [halve], []),
    )  # fmt: skip
    state = None if constraint is None else Even(len(output))
    return Row(params, draws.randrange(2**64), draws.randrange(3), draws.randrange(5000), ids(7), output, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_not_changed_by_its_neighbours(dtype: torch.dtype) -> None:
    draws = random.Random(1)
    rows = [random_row(draws, 517) for _ in range(300)]
    logits = (torch.randn(300, 517, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    logits[::50, 3] = math.nan
    logits[::29, 20:] = -math.inf
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2)).tolist()
    together = sample(logits, rows)
    shuffled = sample(logits[order], [rows[i] for i in order])
    alone = [sample(logits[i : i + 1], [rows[i]]) for i in range(300)]
    for at, i in enumerate(order):
        for one, j in ((alone[i], 0), (shuffled, at)):
            assert one.errors[j] == together.errors[i]
            assert one.tokens[j] == together.tokens[i] and one.ok[j] == together.ok[i]
            assert one.logprobs[j].tolist() == pytest.approx(together.logprobs[i].tolist(), abs=0, rel=0, nan_ok=True)
            assert one.top[j] == together.top[i]
    assert 200 < int(together.ok.sum()) < 300


def test_a_large_vocabulary_gives_a_row_the_same_bits_alone_under_two_threads() -> None:
    """Of that size, torch adds up a single row in parts, one for each thread."""
    logits = torch.randn(3, 49153, generator=torch.Generator().manual_seed(3))
    rows = [Row(SamplingParams(top_p=0.9 if i % 2 else 1.0, top_logprobs=2), 1, 0, i) for i in range(3)]
    torch.set_num_threads(2)
    try:
        many = torch.randn(16, 49153, generator=torch.Generator().manual_seed(4))
        assert torch.equal(torch.cat([sampler._norm(row[None]) for row in many]), sampler._norm(many))
        together = sample(logits, rows)
        for i in range(3):
            alone = sample(logits[i : i + 1], rows[i : i + 1])
            assert (alone.tokens[0], alone.logprobs[0], alone.top[0]) == (
                together.tokens[i],
                together.logprobs[i],
                together.top[i],
            )
    finally:
        torch.set_num_threads(1)


@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.05, 1.0, 4.0]),
    coarse=st.booleans(),
    top_k=st.sampled_from([0, 2, 7, 30, 200]),
    top_p=st.sampled_from([0.2, 0.8, 0.95, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02]),
)
@settings(max_examples=150, deadline=None)
def test_a_prefix_of_the_vocabulary_draws_what_sorting_all_of_it_draws(
    seed: int, scale: float, coarse: bool, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(5, 4096, generator=torch.Generator().manual_seed(seed)) * scale
    logits = (logits * 4).round() / 4 if coarse else logits  # many ties
    params = [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=0.8)] * 5
    noise = uniform([seed] * 5, [0] * 5, [0, 1, 2, 3, 4])
    wanted = sampler._invert(sampler._filtered(logits, params), noise)
    assert torch.equal(sampler.draw(logits, params, noise), wanted)


def test_no_vocabulary_is_sorted_where_a_prefix_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)) * 5
    params = [SamplingParams(top_k=40), SamplingParams(top_p=0.9), SamplingParams(temperature=0.5), SamplingParams()]
    flat = torch.zeros(1, 20_000)
    noise = uniform([0] * 4, [0] * 4, [0] * 4)
    sorted_rows: list[int] = []
    argsort = torch.Tensor.argsort
    monkeypatch.setattr(torch.Tensor, "argsort", lambda x, *a, **k: sorted_rows.append(len(x)) or argsort(x, *a, **k))
    sampler.draw(logits, params, noise)
    assert sorted_rows == []
    sampler.draw(torch.cat([logits[:3], flat]), [*params[:3], SamplingParams(top_p=0.9)], noise)
    assert sorted_rows == [1]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}, {"top_p": 0.0, "temperature": 3.0}])
def test_every_way_to_ask_for_the_best_token_is_the_same(params: dict[str, Any]) -> None:
    logits = torch.zeros(50, 300)
    logits[:, 250:] = 1.0  # many ties: noise would show
    assert draw(logits, **params).tolist() == [250] * 50


def test_logprobs_are_those_of_the_unfiltered_model_at_temperature_1() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2))
    drawn = sample_rows(logits, temperature=0.2, top_k=3, top_p=0.4, logit_bias={4: 30}, stop_ids=[4], min_tokens=1)
    wanted = logits.log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, wanted)


def test_extreme_values_still_draw_the_only_sensible_token() -> None:
    logits = torch.tensor([[0.0, 1e4, -1e4, 9e3]])
    for temperature in (1e-300, 1e-6, 1.0, 50.0):
        assert draw(logits, temperature=temperature).tolist() == [1]
    masked = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert draw(masked.expand(200, -1), temperature=100.0).unique().tolist() == [1]
    last = sampler.draw(masked, [SamplingParams()], torch.tensor([1.0 - 2**-53], dtype=torch.float64))
    first = sampler.draw(masked, [SamplingParams()], torch.zeros(1, dtype=torch.float64))
    assert first.tolist() == last.tolist() == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_told(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    drawn = sample_rows(logits, temperature=temperature, top_logprobs=2, repetition_penalty=1.2)
    assert drawn.ok.tolist() == [True, False, True]
    assert drawn.errors == [None, NOT_FINITE, None]
    assert drawn.logprobs.isnan().tolist() == [False, True, False]
    assert [len(top) for top in drawn.top] in ([2, 0, 2], [3, 0, 3], [2, 0, 3], [3, 0, 2])
    nothing = sample_rows(torch.full((1, 4), -math.inf), temperature=temperature)
    assert nothing.ok.tolist() == [False]


def test_bfloat16_logits_are_drawn_from_as_they_are() -> None:
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(draw(logits, top_p=0.8), draw(logits.float(), top_p=0.8))


# -- penalties, biases, masks, processors ---------------------------------------------------------------------------


def one_row(prompt: Sequence[int] = (), output: Sequence[int] = (), **params: Any) -> Row:
    return Row(SamplingParams(**({"temperature": 0} | params)), 0, 0, len(prompt) + len(output), prompt, output)


def adjusted(logits: list[float], row: Row) -> list[float]:
    from pellucid.inference.penalties import adjust

    given = torch.tensor([logits])
    work, errors = adjust(given, [row])
    assert errors == {} and given.tolist() == [pytest.approx(logits)]
    return work[0].tolist()


def test_penalties_equal_their_definitions() -> None:
    logits = [2.0, -1.0, 0.5, 3.0, -2.0]
    row = one_row([0, 1], [1, 2, 2, 2], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    # id 0: prompt only; id 1: both; id 2: three times in the output
    wanted = [2.0 / 2, -1.0 * 2 - 0.5 - 0.25, 0.5 / 2 - 0.5 - 3 * 0.25, 3.0, -2.0]
    assert adjusted(logits, row) == pytest.approx(wanted)
    only_output = one_row([0, 1], [2], presence_penalty=1.0, frequency_penalty=-0.5)
    assert adjusted(logits, only_output) == pytest.approx([2.0, -1.0, 0.5 - 1.0 + 0.5, 3.0, -2.0])


def test_penalties_are_those_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 60, generator=draws)
    prompt, output = (
        torch.randint(60, (9,), generator=draws).tolist(),
        torch.randint(60, (5,), generator=draws).tolist(),
    )
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    assert adjusted(logits[0].tolist(), one_row(prompt, output, repetition_penalty=1.7)) == wanted[0].tolist()
    assert not torch.equal(wanted, logits)


def test_a_bias_is_added_before_the_penalties() -> None:
    row = one_row([0], [], logit_bias={0: 3.0, 2: -100.0}, repetition_penalty=2.0)
    assert adjusted([-1.0, 0.0, 1.0], row) == [1.0, 0.0, -99.0]


def test_only_allowed_ids_are_drawn_whatever_else_is_asked() -> None:
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(1)) * 4
    drawn = draw(logits, allowed_ids=[7, 9, 30], temperature=5.0, top_k=20, logit_bias={8: 100})
    assert set(drawn.tolist()) == {7, 9, 30}


def test_stop_ids_are_not_drawn_before_min_tokens() -> None:
    logits = [1.0, 5.0, 0.0, 4.0]
    for length, token in ((0, 0), (1, 0), (2, 1)):
        row = one_row([0], [2] * length, stop_ids=[1, 3], min_tokens=2)
        assert sample(torch.tensor([logits]), [row]).tokens.tolist() == [token]


def test_a_stop_id_is_drawn_early_where_nothing_else_is_left() -> None:
    def only_the_stop(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(torch.arange(len(logits)) != 1, -math.inf)

    row = one_row([0], stop_ids=[1], min_tokens=2, logits_processors=[only_the_stop])
    assert sample(torch.zeros(1, 4), [row]).tokens.tolist() == [1]


def test_a_row_whose_allowed_ids_the_model_rules_out_is_told() -> None:
    logits = torch.zeros(2, 5)
    logits[:, 3] = -math.inf
    drawn = sample(logits, [one_row(allowed_ids=[3]), one_row(allowed_ids=[3, 4])])
    assert drawn.errors == ["the logits of all tokens that may be drawn here are -inf", None]
    assert drawn.tokens.tolist() == [0, 4] and drawn.logprobs.isnan().tolist() == [True, False]


def test_a_processor_sees_prompt_and_output_and_cannot_change_the_models_logits() -> None:
    seen: list[list[int]] = []

    def push(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(ids))
        logits.zero_()
        logits[3] = 1.0
        return logits

    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0]])
    drawn = sample(logits, [one_row([8, 9], [7], logits_processors=[push])])
    assert seen == [[8, 9, 7]] and drawn.tokens.tolist() == [3]
    assert logits.tolist() == [[5.0, 0.0, 0.0, 0.0]]
    assert float(drawn.logprobs[0]) == pytest.approx(float(logits.log_softmax(-1)[0, 3]))


def boom(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (boom, "the logits processor boom raised KeyError: 'lost'"),
        (lambda ids, x: x[:-1], "returned torch.float32 of shape [3]; it must return torch.float32 of shape [4]"),
        (lambda ids, x: x.double(), "returned torch.float64 of shape [4]; it must return torch.float32"),
        (lambda ids, x: None, "returned NoneType; it must return torch.float32 of shape [4]"),
        (lambda ids, x: x * math.nan, "returned NaN, +inf or nothing but -inf"),
        (lambda ids, x: x + math.inf, "returned NaN, +inf or nothing but -inf"),
        (lambda ids, x: x - math.inf, "returned NaN, +inf or nothing but -inf"),
    ],
)
def test_a_failing_processor_ends_its_own_row_alone(processor: Callable[..., Any], words: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]]).repeat(3, 1)
    rows = [one_row(), one_row([1], logits_processors=[processor], top_logprobs=3), one_row(logit_bias={0: 50})]
    drawn = sample(logits, rows)
    assert drawn.tokens.tolist() == [2, 0, 0] and drawn.ok.tolist() == [True, False, True]
    assert drawn.errors[0] is None and drawn.errors[2] is None and words in str(drawn.errors[1])


# -- alternatives ---------------------------------------------------------------------------------------------------


def test_alternatives_are_the_models_own_and_hold_the_drawn_token() -> None:
    logits = torch.randn(200, 80, generator=torch.Generator().manual_seed(4))
    drawn = sample_rows(logits, temperature=4.0, top_logprobs=3, logit_bias={5: 20}, presence_penalty=1.0)
    wanted = logits.log_softmax(-1).topk(3)
    sizes = set()
    for i, top in enumerate(drawn.top):
        assert [id_ for id_, _ in top[:3]] == wanted.indices[i].tolist()
        assert [value for _, value in top[:3]] == pytest.approx(wanted.values[i].tolist(), abs=1e-6)
        token = int(drawn.tokens[i])
        assert dict(top)[token] == float(drawn.logprobs[i])
        assert len(top) == (3 if token in wanted.indices[i].tolist() else 4)
        sizes.add(len(top))
    assert sizes == {3, 4}


def test_of_equally_probable_alternatives_the_lowest_ids_are_told() -> None:
    logits = torch.zeros(3, 1000)
    logits[1, 900] = 1.0
    logits[2, 5:] = -math.inf
    tops = sample_rows(logits, temperature=0, top_logprobs=7).top
    assert [[id_ for id_, _ in top] for top in tops] == [list(range(7)), [900, 0, 1, 2, 3, 4, 5], list(range(5))]


def test_prompt_logprobs_are_those_of_the_tokens_that_follow() -> None:
    logits = torch.randn(9, 70, generator=torch.Generator().manual_seed(5)).bfloat16()
    ids = [3, 69, 0, 4, 4, 12, 33, 1, 2]
    told = prompt_logprobs(logits, ids, 2)
    whole = logits.float().log_softmax(-1)
    assert [t.logprob for t in told] == pytest.approx([float(whole[i, id_]) for i, id_ in enumerate(ids)], abs=1e-5)
    for i, (t, id_) in enumerate(zip(told, ids, strict=True)):
        assert [a for a, _ in t.top[:2]] == whole[i].argsort(descending=True, stable=True)[:2].tolist()
        assert dict(t.top)[id_] == t.logprob
    assert [t.top for t in prompt_logprobs(logits, ids)] == [()] * 9
    assert prompt_logprobs(logits[:4], ids[:4], 2) == told[:4]
    assert prompt_logprobs(logits[:0], []) == []


SMALLEST, LARGEST = 5e-324, 1.7e308


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": SMALLEST}, {"temperature": LARGEST}, {"top_p": SMALLEST}, {"min_p": SMALLEST}, {"min_p": 1.0},
        {"repetition_penalty": SMALLEST}, {"repetition_penalty": 1e-37, "logit_bias": {3: 100.0}},
        {"repetition_penalty": LARGEST}, {"repetition_penalty": 1e-38, "temperature": SMALLEST, "top_p": SMALLEST},
        {"repetition_penalty": LARGEST, "temperature": LARGEST, "min_p": 1.0, "presence_penalty": -2, "frequency_penalty": 2},
    ],
)  # fmt: skip
def test_settings_at_the_end_of_their_range_draw_a_token_and_hurt_no_neighbour(extreme: dict[str, Any]) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 7], logits[0, 8] = 0.0, -math.inf
    plain = Row(SamplingParams(), seed=2, choice=0, position=5)
    odd = Row(SamplingParams(**extreme), seed=1, choice=0, position=5, prompt=(0, 1, 2, 3, 7, 8), output=(4, 5, 4))
    drawn = sample(logits, [odd, plain])
    assert drawn.errors == [None, None] and 0 <= int(drawn.tokens[0]) < 50 and int(drawn.tokens[0]) != 8
    alone = sample(logits[1:], [plain])
    assert drawn.tokens[1] == alone.tokens[0] and drawn.logprobs[1] == alone.logprobs[0]
