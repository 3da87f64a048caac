"""Figures of a served load, against the definitions worked out by hand, on a clock that ticks once a step."""

from typing import Any

import pytest
import torch
from tiny_engine import VOCABULARY, tiny

from pellucid.errors import ConfigError
from pellucid.evaluate.serving import Limits, Run, Served, drive, peak_rss_bytes, report
from pellucid.evaluate.workload import Workload
from pellucid.inference import Engine, Request, SamplingParams, StepRecord, TokenEvent

torch.set_num_threads(1)


class Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class TickingEngine(Engine):
    """Each step takes a second."""

    clock: Clock

    def step(self) -> list[TokenEvent]:
        self.clock.now += 1
        return super().step()


def ticking(model: Any = None, **options: Any) -> TickingEngine:
    engine = TickingEngine(model or tiny(), **{"kv_gb": 0.01, "page_size": 8, **options})
    engine.clock = Clock()
    return engine


def run(engine: TickingEngine, requests: list[Request], **load: Any) -> Run:
    return drive(engine, requests, clock=engine.clock, sleep=engine.clock.sleep, **load)


def request(name: str, prompt: int, new: int) -> Request:
    tokens = torch.randint(VOCABULARY, (prompt,), generator=torch.Generator().manual_seed(len(name) + prompt + new))
    return Request(name, tuple(tokens.tolist()), SamplingParams(temperature=0, max_tokens=new))


def served(sent: float, *chunks: tuple[float, int], error: str | None = None) -> Served:
    return Served(request("x", 4, 9), sent, list(chunks), ended=True, error=error)


# -- one request ---------------------------------------------------------------------------------------------


def test_times_of_a_request_follow_their_definitions() -> None:
    one = served(10.0, (12.0, 1), (13.0, 3), (17.0, 1))
    assert (one.tokens, one.ttft, one.e2el) == (5, 2.0, 7.0)
    assert one.tpot == 5.0 / 4  # not the mean gap, 2.5: a chunk held three tokens
    assert one.gaps == [1.0, 4.0]
    assert served(0.0, (3.0, 1)).tpot is None and served(0.0, (3.0, 1)).gaps == []


def test_a_good_request_meets_every_limit() -> None:
    one = served(0.0, (2.0, 1), (6.0, 2))  # TTFT 2, TPOT 2, E2EL 6
    assert Limits().met_by(one) and Limits(ttft_s=2.0, tpot_s=2.0, e2el_s=6.0).met_by(one)
    for short in (
        Limits(ttft_s=1.9),
        Limits(tpot_s=1.9),
        Limits(e2el_s=5.9),
        Limits(ttft_s=9.0, tpot_s=9.0, e2el_s=5.0),
    ):
        assert not short.met_by(one)
    assert Limits(tpot_s=1e-9).met_by(served(0.0, (2.0, 1)))  # of a single token it is 0
    assert not Limits().met_by(served(0.0, (2.0, 1), error="failed"))
    with pytest.raises(ConfigError, match="the limit tpot_s must be above 0, got 0"):
        Limits(tpot_s=0.0)


# -- a load ---------------------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_running_and_sends_the_next_when_one_ends() -> None:
    engine, together = ticking(), []
    engine.on_step = lambda record: together.append(len(record.chunks))
    done = run(engine, [request(str(i), 5, new) for i, new in enumerate((3, 1, 2, 2))], concurrency=2)
    # at 0: 0 and 1; 1 ends at 1, and 2 is sent; 0 and 2 end at 3, and 3 is sent
    assert [(one.request.id, one.sent) for one in done.served] == [("0", 0), ("1", 0), ("2", 1), ("3", 3)]
    assert [[at for at, _ in one.chunks] for one in done.served] == [[1, 2, 3], [1], [2, 3], [4, 5]]
    assert together == [2, 2, 2, 1, 1]
    assert done.seconds == 5 and all(one.completed for one in done.served)


def test_an_open_loop_counts_from_the_arrival_and_sleeps_when_there_is_nothing_to_do() -> None:
    engine = ticking()
    done = run(engine, [request(str(i), 5, 2) for i in range(3)], arrivals=[0.5, 1.25, 9.0])
    # the first is sent at once after a sleep, the second arrives in the middle of its first step
    assert engine.clock.slept == [0.5, 9.0 - 3.5]
    assert [one.sent for one in done.served] == [0.5, 1.25, 9.0]
    assert [[at for at, _ in one.chunks] for one in done.served] == [[1.5, 2.5], [2.5, 3.5], [10.0, 11.0]]
    assert done.served[1].ttft == 1.25  # the quarter of a step that it had to wait, and a step
    assert done.seconds == 10.5


def test_tokens_told_in_one_step_are_one_chunk() -> None:
    # a prompt that repeats itself makes the model's own answers easy to guess
    engine = ticking(speculate=3)
    repeated = Request("r", (5, 6, 7) * 9, SamplingParams(temperature=0, max_tokens=60))
    done = run(engine, [repeated], concurrency=1)
    [one] = done.served
    assert one.tokens == 60 and len(one.chunks) < 60
    assert max(count for _, count in one.chunks) > 1
    figures = report(done, Limits())
    assert figures.accepted_tokens == sum(count - 1 for _, count in one.chunks) > 0
    assert figures.itl_s is not None and figures.itl_s.mean == 1.0  # a chunk a second
    assert figures.tpot_s is not None and figures.tpot_s.mean == pytest.approx((len(one.chunks) - 1) / 59)


def test_decode_steps_are_those_without_a_prompt_and_know_what_was_seen() -> None:
    engine = ticking()
    done = run(engine, [request("a", 6, 4), request("b", 9, 2)], concurrency=2)
    decode = done.decode
    # after the step that read both prompts: a sees 7, 8, 9 tokens, b sees 10
    assert (decode.steps, decode.sequences, decode.contexts, decode.tokens) == (3, 4, 7 + 8 + 9 + 10, 4)
    assert decode.seconds > 0
    assert done.after.steps - done.before.steps == 4


def test_a_step_that_reads_a_prompt_beside_a_decoding_sequence_does_not_count() -> None:
    done = run(ticking(), [request("a", 6, 5), request("b", 9, 1)], arrivals=[0.0, 1.5])
    # a decodes in steps 2 to 5, and step 3 reads b too
    assert (done.decode.steps, done.decode.tokens) == (3, 3)


def test_the_report_adds_up() -> None:
    done = run(ticking(), [request("a", 6, 3), request("bb", 9, 1), request("ccc", 4, 2)], concurrency=3)
    figures = report(done, Limits(e2el_s=2.0))
    assert (figures.requests, figures.completed, figures.failed) == (3, 3, 0)
    assert (figures.prompt_tokens, figures.output_tokens, figures.seconds) == (19, 6, 3.0)
    assert figures.prefilled_tokens == 19 and figures.reused_tokens == 0
    assert figures.output_tokens_per_s == 2.0 and figures.requests_per_s == 1.0
    assert figures.goodput_requests_per_s == pytest.approx(2 / 3)  # one takes three seconds
    assert figures.e2el_s is not None and figures.tpot_s is not None and figures.itl_s is not None
    # of 1, 2 and 3: the 90th percentile lies at 1.8 of two gaps
    assert (figures.e2el_s.mean, figures.e2el_s.p50) == (2.0, 2.0)
    assert figures.e2el_s.p90 == pytest.approx(2.8) and figures.e2el_s.p99 == pytest.approx(2.98)
    assert figures.tpot_s.mean == 1.0 and figures.itl_s.mean == 1.0
    # pages of 8 tokens: after the first step b is gone, a and c hold one each; of a and b a full one stays
    assert (figures.pages_held_most, figures.pages_cached) == (2, 2)


def test_shared_prefixes_are_reused_and_counted_since_the_run_began() -> None:
    engine = ticking()
    workload = Workload(requests=6, concurrency=2, prompt_tokens=(3, 3), max_tokens=(2, 2), shared_prefix=16, groups=2)
    warm = workload.make_requests(VOCABULARY, salt="warm-up")
    run(engine, warm, concurrency=2)
    figures = report(run(engine, workload.make_requests(VOCABULARY), concurrency=2), Limits())
    assert figures.reused_tokens == 4 * 16  # two of the six are the first of their group
    assert figures.prefilled_tokens == 6 * 19 - 64


def test_preemptions_show(capsys: pytest.CaptureFixture[str]) -> None:
    token = sum(spec.elements_per_token() for spec in tiny().kv_specs()) * 4
    engine = ticking(kv_gb=6.01 * 8 * token / 1e9)  # six pages
    figures = report(run(engine, [request(str(i), 14, 20) for i in range(3)], concurrency=3), Limits())
    assert figures.completed == 3 and figures.preemptions > 0 and figures.pages == 6
    assert figures.pages_held_most <= 6


def test_failures_are_counted_and_are_not_good() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[11] = torch.nan
    fine, broken = (
        Request(name, (3, id_), SamplingParams(temperature=0, max_tokens=2)) for name, id_ in (("a", 4), ("b", 11))
    )
    done = run(ticking(model), [broken], concurrency=1)
    figures = report(done, Limits())
    assert (figures.completed, figures.failed, figures.output_tokens, figures.goodput_requests_per_s) == (0, 1, 0, 0.0)
    assert figures.ttft_s is None and done.served[0].error
    assert not report(run(ticking(), [fine], concurrency=1), Limits()).failed


def test_the_engines_own_log_still_gets_its_steps_and_is_put_back() -> None:
    engine, told = ticking(), []

    def tell(record: StepRecord) -> None:
        told.append(record.step)

    engine.on_step = tell
    run(engine, [request("a", 3, 3)], concurrency=1)
    assert told == [1, 2, 3] and engine.on_step is tell


def test_peak_memory_is_that_of_the_process() -> None:
    before = peak_rss_bytes()
    kept = torch.ones(64 * 2**20 // 4)
    assert 50 * 2**20 < before < peak_rss_bytes() or before > kept.nbytes * 4  # an earlier peak may have been higher
