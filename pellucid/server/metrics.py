"""The numbers of a server in Prometheus' text form."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pellucid.inference.records import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One model's engine at this moment."""

    name: str
    stats: EngineStats
    up: bool
    """It takes requests."""
    refused: int
    """Requests that found no place."""


class Metrics:
    """Counters and histograms of requests, and what ``engines`` tells when somebody asks."""

    def __init__(self, engines: Callable[[], Iterable[EngineReport]]) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "pellucid_requests", "HTTP requests that have been answered.", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "pellucid_request_seconds", "From the first byte of a request to the last of its answer.", ["route"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.first_token_seconds = Histogram(
            "pellucid_first_token_seconds", "From a request's admission to its first token.", ["model"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.left = Counter(
            "pellucid_clients_left", "Clients that went away before their answer ended.", registry=registry
        )
        self.embedded = Counter(
            "pellucid_embedded_tokens", "Tokens of texts that became vectors.", ["model"], registry=registry
        )
        registry.register(_Engines(engines))
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """All of them, now."""
        return generate_latest(self._registry)


class _Engines(Collector):
    def __init__(self, engines: Callable[[], Iterable[EngineReport]]) -> None:
        self._engines = engines

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask engines yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Each number of each engine."""
        reports = list(self._engines())
        up = GaugeMetricFamily("pellucid_engine_up", "1 while the engine takes requests.", labels=["model"])
        running = GaugeMetricFamily("pellucid_sequences", "Sequences that run or wait.", labels=["model", "state"])
        blocks = GaugeMetricFamily("pellucid_blocks", "Blocks of the cache.", labels=["model", "state"])
        tokens = CounterMetricFamily(
            "pellucid_tokens", "Prompt tokens computed and reused, and tokens drawn.", labels=["model", "kind"]
        )
        counts = CounterMetricFamily(
            "pellucid_engine_events", "Steps, pre-emptions, evictions, and requests refused for want of a place.",
            labels=["model", "event"],
        )  # fmt: skip
        for one in reports:
            stats = one.stats
            up.add_metric([one.name], float(one.up))
            for state, value in (("running", stats.running), ("waiting", stats.waiting)):
                running.add_metric([one.name, state], value)
            for state, value in (("free", stats.free), ("cached", stats.cached), ("held", stats.held)):
                blocks.add_metric([one.name, state], value)
            for kind, value in (("prefilled", stats.prefilled), ("reused", stats.reused), ("decoded", stats.decoded)):
                tokens.add_metric([one.name, kind], value)
            events = {"step": stats.steps, "preemption": stats.preemptions, "eviction": stats.evictions}
            for event, value in (events | {"refused": one.refused}).items():
                counts.add_metric([one.name, event], value)
        yield from (up, running, blocks, tokens, counts)
