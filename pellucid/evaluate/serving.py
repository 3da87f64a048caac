"""Load for an engine, measured: who waited how long, what came out a second, what the engine did meanwhile.

Offline: requests go straight to `Engine`. Seconds count from the start of a run. A chunk is the tokens of one request that one
step gave: one, or several where guesses were right.

Source:
    The definitions are those of vLLM's and genai-perf's serving benchmarks, so that figures compare: time to the first token
    (TTFT), time per output token after it (TPOT), inter-token latency (ITL), end-to-end latency (E2EL), goodput.
"""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from pellucid.errors import ConfigError
from pellucid.evaluate.roofline import DecodeSteps
from pellucid.inference import Engine, EngineStats, Request, StepRecord, TokenEvent


@dataclass(slots=True)
class Served:
    """What became of one request."""

    request: Request
    sent: float
    """When it arrived in an open loop, though the engine may have been in the middle of a step; else when it was submitted."""
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    ended: bool = False
    error: str | None = None

    @property
    def completed(self) -> bool:
        """Whether it got its whole answer."""
        return self.ended and self.error is None

    @property
    def tokens(self) -> int:
        """That it got."""
        return sum(count for _, count in self.chunks)

    @property
    def ttft(self) -> float:
        """From sending to the first token."""
        return self.chunks[0][0] - self.sent

    @property
    def e2el(self) -> float:
        """From sending to the last token."""
        return self.chunks[-1][0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None where there is none."""
        return (self.e2el - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between chunks."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.chunks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What makes a request good: every limit that is set is met. Seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2el_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"the limit {name} must be above 0, got {value}")

    def met_by(self, one: Served) -> bool:
        """Whether a request was completed within them; the TPOT of a single token is 0."""
        if not one.completed:
            return False
        pairs = ((self.ttft_s, one.ttft), (self.tpot_s, one.tpot or 0.0), (self.e2el_s, one.e2el))
        return all(limit is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Run:
    """One load, served."""

    served: list[Served]
    seconds: float
    """From the first request sent to the last token."""
    decode: DecodeSteps
    pages_held: int
    """The most that sequences held after a step."""
    before: EngineStats
    after: EngineStats


def drive(
    engine: Engine,
    requests: Sequence[Request],
    *,
    concurrency: int | None = None,
    arrivals: Sequence[float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[int], None] | None = None,
) -> Run:
    """Send requests as they are due, and step the engine until all have ended.

    Args:
        engine: without other work.
        concurrency: so many at a time; None: as ``arrivals`` says, or all at once.
        arrivals: of each request, ascending.
        progress: called after each step with how many requests have ended.
    """
    records: list[StepRecord] = []
    told, engine.on_step = engine.on_step, records.append
    prompts, due = (
        {r.id: len(r.tokens) for r in requests},
        deque(zip(requests, arrivals or [0.0] * len(requests), strict=True)),
    )
    served: dict[str, Served] = {}
    decode, held, ended, before, begin = DecodeSteps(), 0, 0, engine.stats(), clock()
    try:
        while due or engine.has_work:
            now = clock() - begin
            while due and due[0][1] <= now and (concurrency is None or len(served) - ended < concurrency):
                request, at = due.popleft()
                served[request.id] = Served(request, now if arrivals is None else at)
                engine.submit(request)
            if not engine.has_work:
                sleep(due[0][1] - now)
                continue
            events = engine.step()
            ended += _take(served, events, clock() - begin)
            for record in records:
                held = max(held, record.held)
                decode.add(record, prompts, sum(event.token is not None for event in events))
                if told is not None:
                    told(record)
            records.clear()
            if progress is not None:
                progress(ended)
    finally:
        engine.on_step = told
    last = max((one.chunks[-1][0] for one in served.values() if one.chunks), default=clock() - begin)
    return Run(
        list(served.values()), last - min(one.sent for one in served.values()), decode, held, before, engine.stats()
    )


def _take(served: dict[str, Served], events: list[TokenEvent], now: float) -> int:
    """Note the tokens of a step; how many requests ended in it."""
    counts: dict[str, int] = {}
    ended = 0
    for event in events:
        one = served[event.request_id]
        if event.token is not None:
            counts[event.request_id] = counts.get(event.request_id, 0) + 1
        if event.finish_reason is not None:
            one.ended, one.error, ended = True, event.error, ended + 1
    for name, count in counts.items():
        served[name].chunks.append((now, count))
    return ended


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles, interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Report:
    """A run in figures. Times in seconds, of completed requests; a spread of nothing is None."""

    requests: int
    completed: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    """Of completed requests."""
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    e2el_s: Spread | None
    output_tokens_per_s: float
    requests_per_s: float
    goodput_requests_per_s: float
    """Completed requests within all limits a second; equals ``requests_per_s`` without limits."""
    prefilled_tokens: int
    reused_tokens: int
    """Prompt tokens that were in the cache."""
    drafted_tokens: int
    accepted_tokens: int
    steps: int
    preemptions: int
    evictions: int
    pages: int
    pages_held_most: int
    pages_cached: int
    """At the end."""


def report(run: Run, limits: Limits) -> Report:
    """The figures of a run."""
    done = [one for one in run.served if one.completed]
    output, seconds, before, after = sum(one.tokens for one in done), run.seconds, run.before, run.after
    return Report(
        requests=len(run.served),
        completed=len(done),
        failed=len(run.served) - len(done),
        seconds=seconds,
        prompt_tokens=sum(len(one.request.tokens) for one in run.served),
        output_tokens=output,
        ttft_s=_spread([one.ttft for one in done]),
        tpot_s=_spread([one.tpot for one in done if one.tpot is not None]),
        itl_s=_spread([gap for one in done for gap in one.gaps]),
        e2el_s=_spread([one.e2el for one in done]),
        output_tokens_per_s=output / seconds,
        requests_per_s=len(done) / seconds,
        goodput_requests_per_s=sum(map(limits.met_by, run.served)) / seconds,
        prefilled_tokens=after.prefilled - before.prefilled,
        reused_tokens=after.reused - before.reused,
        drafted_tokens=after.drafted - before.drafted,
        accepted_tokens=after.accepted - before.accepted,
        steps=after.steps - before.steps,
        preemptions=after.preemptions - before.preemptions,
        evictions=after.evictions - before.evictions,
        pages=after.blocks,
        pages_held_most=run.pages_held,
        pages_cached=after.cached,
    )


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Spread(sum(values) / len(values), p50, p90, p99)


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
