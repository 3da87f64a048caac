"""OUT/report.html of several runs that follow one another: their curves, samples of each, and what each came to."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any

from pellucid.errors import DataError
from pellucid.report.chart import Chart, Curve
from pellucid.report.files import read_object, read_samples, read_text
from pellucid.report.metrics import RunLog, Series, read_log
from pellucid.report.page import render, write_text
from pellucid.report.report import TEMPLATE, chart_notes, charts, final_numbers, marked_toml, tables
from pellucid.report.terminal import format_seconds
from pellucid.version import __version__

COLORS = ("c1", "c2", "c3", "c4", "c5")


def build_stages_report(out: str | Path, stages: Mapping[str, str | None], *, shared: str = "exact_match") -> Path:
    """Write OUT/report.html from the runs OUT/STAGE, OUT/samples.jsonl and OUT/evaluation.json (a table for each stage).

    Args:
        stages: each run with the one that it started from, which comes before it, or None; one without a log is left out.
        shared: a number of validation lines that one chart shows of all stages, each from where its first step stands.

    Raises:
        DataError: there is no such folder.
        StorageError: the page cannot be written.
    """
    folder = Path(out)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    logs = {name: log for name in stages if (log := read_log(folder / name / "metrics.jsonl")).steps}
    path = folder / "report.html"
    write_text(path, render(TEMPLATE, _contents(folder, logs, stages, shared)))
    return path


def _contents(folder: Path, logs: dict[str, RunLog], stages: Mapping[str, str | None], shared: str) -> dict[str, Any]:
    scores = read_object(folder / "evaluation.json")
    samples, num_samples = read_samples(folder / "samples.jsonl")
    drawn, notes = [_shared_chart(logs, stages, shared)], []
    for name, log in logs.items():
        own = [_named(chart, name) for chart in charts(log) if chart.id != f"metric_{shared}"]
        notes += chart_notes(log, own)
        drawn += own
    judged = [sample.good for sample in samples if sample.good is not None]
    configs = [(name, read_text(folder / name / "config.toml")) for name in logs]
    return {
        "title": folder.resolve().name,
        "version": __version__,
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "cards": [_card(name, score, logs.get(name), shared) for name, score in scores.items()],
        "notes": notes,
        "charts": drawn,
        "data": [chart.data() for chart in drawn],
        "samples": samples,
        "num_samples": num_samples,
        "judged": f"{sum(judged)} of {len(judged)} pass" if judged else "",
        "evaluation": tables(scores),
        "config": marked_toml("\n".join(f"# {name}\n\n{text}" for name, text in configs)),
        "facts": [],
        "card": "",
        "saves": [],
    }


def _shared_chart(logs: dict[str, RunLog], stages: Mapping[str, str | None], key: str) -> Chart:
    """``key`` of all stages over all steps since the first; where two started from one, their curves part."""
    curves: list[Curve] = []
    ends: dict[str | None, int] = {None: 0}
    for color, (name, log) in zip(cycle(COLORS), logs.items(), strict=False):
        began = ends.get(stages[name], 0)
        ends[name] = began + log.steps[-1]["step"]
        series = log.validation(key)
        moved = Series([began + step for step in series.steps], series.values, series.odd)
        curves.append(Curve(name, moved, color, dots=True))
    return Chart(key, f"{key.replace('_', ' ').capitalize()}, validation", "share", tuple(curves), wide=True, zero=True)


def _named(chart: Chart, stage: str) -> Chart:
    return replace(chart, id=f"{stage.replace('-', '_')}_{chart.id}", title=f"{stage}: {chart.title}", wide=False)


def _card(name: str, score: Any, log: RunLog | None, shared: str) -> tuple[str, str, str]:
    """(label, value, remark) of a stage."""
    value = score.get(shared) if isinstance(score, dict) else None
    seconds = final_numbers(log).get("seconds") if log is not None else None
    text = f"{value:.1%}" if isinstance(value, float | int) else "unknown"
    return name, text, f"after {format_seconds(seconds)} of steps" if seconds is not None else "before any stage"
