"""metrics.jsonl as curves: one pass over the file, non-finite values kept apart, thinned without losing a spike."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

MAX_POINTS = 2000
"""Points a drawn curve has at most; more than a screen has columns."""


@dataclass(slots=True)
class Series:
    """One quantity over the optimizer steps, both lists of equal length; `odd` holds what is not a finite number."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    odd: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True)
class RunLog:
    """What metrics.jsonl says. A step that a resumed run did again counts once, as it was done last."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    bad_lines: list[int] = field(default_factory=list)
    """Line numbers (from 1) that are no event. A last line that was cut short by a kill is not counted."""

    def series(self, key: str) -> Series:
        """The training curve of ``key``; steps where it is absent are left out."""
        return _series(self.steps, key)

    def validation(self, key: str = "loss") -> Series:
        """The validation curve of ``key``: the loss is in nats a supervised token, or a pair."""
        return _series(self.validations, key)


def read_log(path: Path) -> RunLog:
    """The events of a metrics.jsonl; an absent file is an empty log."""
    log = RunLog()
    kinds = {"step": log.steps, "validation": log.validations, "save": log.saves}
    for number, event in _lines(path):
        step = event.get("step") if event is not None else None
        if event is None or not isinstance(step, int) or isinstance(step, bool):
            log.bad_lines.append(number)
            continue
        kind = event.get("event")
        if kind == "step":
            for earlier in kinds.values():
                _cut(earlier, step)
        elif isinstance(kind, str) and kind in kinds:
            _cut(kinds[kind], step)
        if isinstance(kind, str) and kind in kinds:
            kinds[kind].append(event)
    return log


def thin(series: Series, limit: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most ``limit`` points of a curve: first, last, and the lowest and highest of each stretch between."""
    assert limit >= 4
    points = list(zip(series.steps, series.values, strict=True))
    if len(points) <= limit:
        return points
    kept = [points[0]]
    for start, stop in _stretches(1, len(points) - 1, (limit - 2) // 2):
        stretch = range(start, stop)
        low = min(stretch, key=series.values.__getitem__)
        high = max(stretch, key=series.values.__getitem__)
        kept += [points[i] for i in sorted({low, high})]
    return [*kept, points[-1]]


def means(series: Series, limit: int = MAX_POINTS // 4) -> list[tuple[int, float]]:
    """The mean of each of at most ``limit`` stretches, at its last step: what a smoothed line may start from.

    `thin` keeps extremes, whose average says nothing about the curve's.
    """
    return [
        (series.steps[stop - 1], math.fsum(series.values[start:stop]) / (stop - start))
        for start, stop in _stretches(0, len(series.steps), min(limit, len(series.steps)))
    ]


def number(value: object) -> float | None:
    """A logged number as a float, the strings for non-finite ones included; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for i, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith("\n"):
                    return
                event = None
            yield i, event if isinstance(event, dict) else None


def _cut(events: list[dict[str, Any]], step: int) -> None:
    while events and events[-1]["step"] >= step:
        events.pop()


def _series(events: list[dict[str, Any]], key: str) -> Series:
    series = Series()
    for event in events:
        value = number(event.get(key))
        if value is None:
            continue
        if math.isfinite(value):
            series.steps.append(event["step"])
            series.values.append(value)
        else:
            series.odd.append((event["step"], str(value)))
    return series


def _stretches(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut into at most ``count`` stretches: even ones, and early short ones for a logarithmic axis."""
    length, even = stop - start, max(1, count // 2)
    borders = {length * i // even for i in range(even + 1)}
    borders |= {round(length ** (i / (count - even))) for i in range(1, count - even)}
    yield from pairwise(start + border for border in sorted(borders))
