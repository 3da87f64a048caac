"""Sampling against closed forms, published random numbers and counted frequencies."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.inference import SamplingParams
from pellucid.inference.sample import filtered_probs, philox, sample, uniform

torch.set_num_threads(1)


def draw(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """One token a row, row i at position i."""
    rows = len(logits)
    noise = uniform([5] * rows, [0] * rows, list(range(rows)))
    return sample(logits, [SamplingParams(**params)] * rows, noise).tokens


def reference_filter(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
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
)
@settings(max_examples=300, deadline=None)
def test_filters_equal_the_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = filtered_probs(torch.tensor([logits]), [params])[0]
    wanted = reference_filter(torch.tensor(logits).tolist(), temperature, top_k, top_p)
    assert (probs / probs.sum()).tolist() == pytest.approx(wanted, abs=1e-9)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_p, kept in [(0.0, 1), (0.4, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.88, 4), (1.0, 4)]:
        assert int((filtered_probs(logits, [SamplingParams(top_p=top_p)]) > 0).sum()) == kept


def test_top_p_acts_on_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs = filtered_probs(logits, [SamplingParams(top_k=2, top_p=0.5)])  # 0.4 of 0.7 is 0.57
    assert (probs[0] > 0).tolist() == [True, False, False, False]


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


def test_a_row_is_not_changed_by_its_neighbours() -> None:
    draws = torch.Generator().manual_seed(1)
    logits = torch.randn(30, 517, generator=draws) * 3
    params = [
        SamplingParams(temperature=(0, 0.7, 1.0)[i % 3], top_k=(0, 40)[i % 2], top_p=(1.0, 0.9, 0.5, 1.0)[i % 4])
        for i in range(30)
    ]
    noise = uniform([9] * 30, list(range(30)), [4] * 30)
    together = sample(logits, params, noise)
    for i in range(30):
        alone = sample(logits[i : i + 1], params[i : i + 1], noise[i : i + 1])
        assert alone.tokens[0] == together.tokens[i] and alone.logprobs[0] == together.logprobs[i]


def test_logprobs_are_those_of_the_unfiltered_model_at_temperature_1() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(temperature=0.2, top_k=3, top_p=0.4)] * 8
    drawn = sample(logits, params, uniform([1] * 8, [0] * 8, list(range(8))))
    wanted = logits.log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, wanted)


def test_extreme_values_still_draw_the_only_sensible_token() -> None:
    logits = torch.tensor([[0.0, 1e4, -1e4, 9e3]])
    for temperature in (1e-300, 1e-6, 1.0, 50.0):
        assert draw(logits, temperature=temperature).tolist() == [1]
    masked = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert draw(masked.expand(200, -1), temperature=100.0).unique().tolist() == [1]
    last = sample(masked, [SamplingParams()], torch.tensor([1.0 - 2**-53], dtype=torch.float64))
    first = sample(masked, [SamplingParams()], torch.zeros(1, dtype=torch.float64))
    assert first.tokens.tolist() == last.tokens.tolist() == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_told(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    drawn = sample(logits, [SamplingParams(temperature=temperature)] * 3, uniform([0] * 3, [0] * 3, [0] * 3))
    assert drawn.ok.tolist() == [True, False, True]
    assert drawn.logprobs.isnan().tolist() == [False, True, False]
    nothing = sample(torch.full((1, 4), -math.inf), [SamplingParams()], torch.zeros(1, dtype=torch.float64))
    assert nothing.ok.tolist() == [False]


def test_bfloat16_logits_are_drawn_from_as_they_are() -> None:
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(draw(logits, top_p=0.8), draw(logits.float(), top_p=0.8))
