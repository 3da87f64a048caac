"""Made-up load: repeatable, of the lengths that were asked for, alike exactly where it should be, and Poisson."""

import statistics
from typing import Any

import pytest

from pellucid.errors import ConfigError
from pellucid.evaluate.workload import Workload


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    loads = [Workload(requests=5, rate=2.0, prompt_tokens=(3, 9), max_tokens=(2, 7), seed=s) for s in (4, 4, 5)]
    made = [[(r.tokens, r.params.max_tokens) for r in load.make_requests(50)] for load in loads]
    assert made[0] == made[1] != made[2]
    assert loads[0].arrivals() == loads[1].arrivals() != loads[2].arrivals()


def test_lengths_cover_their_range_and_ids_the_vocabulary() -> None:
    requests = Workload(requests=300, concurrency=1, prompt_tokens=(3, 6), max_tokens=(1, 4)).make_requests(7)
    assert {len(r.tokens) for r in requests} == {3, 4, 5, 6}
    assert {r.params.max_tokens for r in requests} == {1, 2, 3, 4}
    assert {token for r in requests for token in r.tokens} == set(range(7))
    assert len({r.id for r in requests}) == 300
    assert all(r.params.greedy and not r.params.stop_ids for r in requests)


def test_prompts_of_a_group_begin_alike_and_no_further() -> None:
    requests = Workload(requests=9, concurrency=1, prompt_tokens=(8, 8), shared_prefix=16, groups=3).make_requests(1000)
    assert {len(r.tokens) for r in requests} == {24}
    heads, tails = [r.tokens[:16] for r in requests], [r.tokens[16:] for r in requests]
    assert heads == heads[:3] * 3 and len(set(heads)) == 3
    assert len(set(tails)) == 9


def test_groups_that_no_request_belongs_to_are_not_drawn() -> None:
    requests = Workload(requests=2, concurrency=1, shared_prefix=16, groups=10**12).make_requests(1000)
    assert requests[0].tokens[:16] != requests[1].tokens[:16]


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = Workload(requests=20_000, rate=4.0).arrivals()
    assert arrivals is not None
    gaps = [later - earlier for earlier, later in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) > 0
    # an exponential distribution has mean and deviation 1/rate, and a share 1/e of its mass above them
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)
    assert Workload(requests=3, concurrency=2).arrivals() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"rate": 1.0}, "give one of concurrency"),
        ({"concurrency": None}, "give one of concurrency"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"concurrency": None, "rate": 0.0}, "rate must be finite and at least 0.001, got 0.0"),
        ({"concurrency": None, "rate": 1e-300}, "rate must be finite and at least 0.001, got 1e-300"),
        ({"requests": 100_001}, "requests must be at most 100000, got 100001"),
        ({"concurrency": 10**30}, "concurrency must be at most 100000, got 1000"),
        ({"concurrency": None, "rate": float("nan")}, "rate must be finite and at least 0.001, got nan"),
        ({"prompt_tokens": (5, 4)}, "prompt_tokens must be two lengths of at least 1, the lesser first, got 5:4"),
        ({"max_tokens": (0, 4)}, "max_tokens must be two lengths of at least 1, the lesser first, got 0:4"),
        ({"shared_prefix": -1}, "shared_prefix must be at least 0, got -1"),
        ({"groups": 2}, "groups 2 differ in their shared_prefix, which is 0"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        Workload(**({"concurrency": 1} | changes))
