import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.config import OptimConfig, ScheduleConfig, build
from pellucid.errors import ConfigError
from pellucid.optim import build_schedule
from pellucid.registry import names


def schedule(name, total, warmup=0, floor=0.0, **options):
    optim = OptimConfig(
        warmup_steps=warmup,
        min_lr_ratio=floor,
        schedule=build(ScheduleConfig, {"name": name} | options, "optim.schedule."),
    )
    return build_schedule(optim, total)


@given(st.sampled_from(names("schedule")), st.integers(0, 40), st.integers(0, 60), st.floats(0, 1))
def test_every_schedule_stays_between_floor_and_one_for_every_length(name, total, warmup, floor):
    factor = schedule(name, total, warmup, floor)
    for step in range(max(total, 1) + 5):
        value = factor(step)
        assert 0 < value <= 1 if step < warmup else floor - 1e-12 <= value <= 1 + 1e-12


@pytest.mark.parametrize("name", names("schedule"))
def test_a_run_of_one_step_takes_the_peak_rate(name):
    assert schedule(name, 1)(0) == 1.0


def test_warm_up_rises_linearly_and_ends_at_the_peak():
    factor = schedule("cosine", 100, warmup=4)
    assert [factor(i) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_equals_torchs_annealing():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.2)
    ours = schedule("cosine", 20, floor=0.1)
    for step in range(20):
        assert 2.0 * ours(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("mult", [1, 2, 3])
def test_sgdr_equals_torchs_warm_restarts(mult):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=mult)
    ours = schedule("sgdr", 100, cycle_steps=5, cycle_mult=mult)
    for step in range(70):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        optimizer.step()
        theirs.step()


def test_linear_and_wsd_have_their_closed_forms():
    linear = schedule("linear", 10, floor=0.5)
    assert [linear(i) for i in (0, 5, 10)] == [1.0, 0.75, 0.5]
    wsd = schedule("wsd", 104, warmup=4, decay_ratio=0.25)
    assert [wsd(i) for i in (4, 78, 79, 103)] == [1.0, 1.0, 1.0, pytest.approx(1 / 25)]
    assert math.isclose(wsd(104), 0)


def test_an_option_of_another_schedule_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"optim\.schedule\.cycle_steps.*cosine"):
        schedule("cosine", 10, cycle_steps=3)
