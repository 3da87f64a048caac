"""RUN/report.html: one page without outside resources that says what a run did."""

import html
import json
import math
import re
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from pellucid.errors import DataError
from pellucid.report.chart import Chart, Curve
from pellucid.report.files import count_parameters, find_model, read_config, read_object, read_samples, read_text
from pellucid.report.metrics import RunLog, number, read_log
from pellucid.report.page import render, write_text
from pellucid.report.terminal import format_bytes, format_cell, format_count, format_seconds
from pellucid.version import __version__

TEMPLATE = "report.html.jinja"
PLAIN = {
    "event", "step", "epoch", "tokens", "loss", "lr", "grad_norm", "time", "seconds", "tokens_per_s", "pairs", "sequences",
}  # fmt: skip
"""Fields of a line of metrics.jsonl that are no measurement of a strategy's."""
LAST = 50
"""Steps over which the closing training loss is averaged: one step's loss is mostly noise."""


def build_report(run_dir: str | Path) -> Path:
    """Write RUN/report.html from what the run's folder holds so far, replacing an older one at once.

    Missing files leave their section out; broken lines are counted on the page.

    Raises:
        DataError: there is no such folder.
        StorageError: the page cannot be written.
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise DataError(f"{run}: no such run folder")
    page = render(TEMPLATE, _contents(run))
    path = run / "report.html"
    write_text(path, page)
    return path


def final_numbers(log: RunLog) -> dict[str, float | int]:
    """Where a run stands, from its log; what is unknown is absent.

    Keys: step, loss (mean of the last 50 logged steps), validation_loss, best_validation_loss,
    best_validation_step, tokens, tokens_per_s (median), seconds (of training, saves and validation not counted).
    """
    numbers: dict[str, float | int] = {}
    if log.steps:
        numbers["step"] = log.steps[-1]["step"]
    if losses := log.series("loss").values:
        numbers["loss"] = math.fsum(losses[-LAST:]) / len(losses[-LAST:])
    validation = log.validation()
    if validation.values:
        best = min(range(len(validation.values)), key=validation.values.__getitem__)
        numbers["validation_loss"] = validation.values[-1]
        numbers["best_validation_loss"] = validation.values[best]
        numbers["best_validation_step"] = validation.steps[best]
    if tokens := log.series("tokens").values:
        numbers["tokens"] = int(tokens[-1])
    if rates := log.series("tokens_per_s").values:
        numbers["tokens_per_s"] = median(rates)
    if seconds := log.series("seconds").values:
        # with train.log_every > 1 the steps between are taken to last as long
        numbers["seconds"] = math.fsum(seconds) / len(seconds) * log.steps[-1]["step"]
    return numbers


def charts(log: RunLog) -> list[Chart]:
    """The curves of a run, those without a point left out."""
    validation = Curve("validation", log.validation(), "c2", dots=True)
    per = f"nats per {unit_of(log)}"
    loss = (Curve("training", log.series("loss")), validation)
    drawn = [
        Chart("loss", "Loss", per, loss, wide=True),
        Chart("validation", "Validation loss", per, (validation,)),
        Chart("lr", "Learning rate", "", (Curve("lr", log.series("lr"), "c3"),)),
        Chart("grad_norm", "Gradient norm, before clipping", "", (Curve("norm", log.series("grad_norm"), "c4"),)),
        Chart(
            "tokens_per_s", "Throughput", "tokens/s", (Curve("tokens/s", log.series("tokens_per_s"), "c5"),), zero=True
        ),
        *_router_charts(log),
        *_metric_charts(log),
    ]
    for chart in drawn:
        assert re.fullmatch(r"\w+", chart.id)
    return [chart for chart in drawn if any(curve.series.steps or curve.series.odd for curve in chart.curves)]


def _router_charts(log: RunLog) -> list[Chart]:
    """Of a model with a mixture of experts."""
    titles = {
        "router_loss": ("Balancing loss of the experts", "nats per sequence"),
        "router_entropy": ("Entropy of the router", "nats per token"),
        "router_load": ("Busiest expert", "times an equal share"),
        "router_dead": ("Experts without a token", ""),
    }
    return [
        Chart(key, title, unit, (Curve(key.removeprefix("router_"), log.series(key), "c1"),))
        for key, (title, unit) in titles.items()
    ]


def unit_of(log: RunLog) -> str:
    """What the loss is a mean over: "token", "pair", "sequence"."""
    last = (log.steps or log.validations or [{}])[-1]
    return next((unit for unit in ("pair", "sequence") if f"{unit}s" in last), "token")


def _metric_charts(log: RunLog) -> list[Chart]:
    """What the strategy measured beside its loss, in training and validation."""
    names = dict.fromkeys(
        key for event in (*log.steps[-1:], *log.validations[-1:]) for key in event if key not in PLAIN
    )
    charts = []
    for name in names:
        if re.fullmatch(r"\w+", name) is None or name.startswith("router_"):
            continue
        curves = (
            Curve("training", log.series(name), "c1"), Curve("validation", log.validation(name), "c2", dots=True),
        )  # fmt: skip
        charts.append(Chart(f"metric_{name}", name.replace("_", " ").capitalize(), "", curves))
    return charts


def _contents(run: Path) -> dict[str, Any]:
    log = read_log(run / "metrics.jsonl")
    samples, num_samples = read_samples(run / "samples.jsonl")
    config_text = read_text(run / "config.toml")
    judged = [sample.good for sample in samples if sample.good is not None]
    drawn = charts(log)
    return {
        "title": run.resolve().name,
        "version": __version__,
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "cards": _cards(log, read_config(run / "config.toml")),
        "notes": chart_notes(log, drawn),
        "charts": drawn,
        "data": [chart.data() for chart in drawn],
        "samples": samples,
        "num_samples": num_samples,
        "judged": f"{sum(judged)} of {len(judged)} pass" if judged else "",
        "evaluation": tables(read_object(run / "evaluation.json")),
        "config": marked_toml(config_text),
        "facts": _model_facts(run),
        "card": read_text((find_model(run) or run / "model") / "README.md"),
        "saves": [f"step {event['step']:,}" for event in log.saves],
    }


def _cards(log: RunLog, config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value, remark) of each final number."""
    numbers = final_numbers(log)
    train = config.get("train")
    planned = train.get("steps") if isinstance(train, dict) else None
    cards: list[tuple[str, str, str]] = []
    if "step" in numbers:
        of = f"of {planned:,}" if isinstance(planned, int) and not isinstance(planned, bool) else ""
        cards.append(("steps", f"{numbers['step']:,}", of))
    if "loss" in numbers:
        cards.append(
            ("training loss", f"{numbers['loss']:.4f}", f"mean of the last {min(LAST, len(log.steps))} logged steps")
        )
    if "validation_loss" in numbers:
        best = f"best {numbers['best_validation_loss']:.4f} at step {numbers['best_validation_step']:,}"
        cards.append(("validation loss", f"{numbers['validation_loss']:.4f}", best))
        if numbers["validation_loss"] < 700 and unit_of(log) == "token":
            perplexity = math.exp(numbers["validation_loss"])
            cards.append(("perplexity", f"{perplexity:,.4g}", "exp of validation loss"))
    if "tokens" in numbers:
        cards.append(("tokens seen", format_count(numbers["tokens"]), f"{numbers['tokens']:,}"))
    if "tokens_per_s" in numbers:
        cards.append(("throughput", f"{numbers['tokens_per_s']:,.0f}/s", "tokens, median of steps"))
    if "seconds" in numbers:
        cards.append(("training time", format_seconds(numbers["seconds"]), "steps alone"))
    return cards


def chart_notes(log: RunLog, drawn: list[Chart]) -> list[str]:
    """What is wrong with the numbers of a log: values that are not finite, lines that cannot be read."""
    notes = []
    for chart in drawn:
        if chart.id.endswith("validation"):  # stands in the loss chart too
            continue
        for odd in (curve.series.odd for curve in chart.curves if curve.series.odd):
            notes.append(f"{chart.title}: {len(odd):,} non-finite, the first {odd[0][1]} at step {odd[0][0]:,}.")
    if log.bad_lines:
        shown = ", ".join(map(str, log.bad_lines[:5])) + (", …" if len(log.bad_lines) > 5 else "")
        notes.append(f"metrics.jsonl: {len(log.bad_lines):,} broken, line {shown}.")
    return notes


def tables(values: dict[str, Any], title: str = "") -> list[tuple[str, list[tuple[str, str]]]]:
    """A JSON object as tables of its plain values, one for it and one for each object inside."""
    rows = [(key, _cell(value)) for key, value in values.items() if not isinstance(value, dict)]
    found = [(title, rows)] if rows else []
    for key, value in values.items():
        if isinstance(value, dict):
            found += tables(value, f"{title} / {key}" if title else key)
    return found


def _cell(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else format_cell(value)


def _model_facts(run: Path) -> list[tuple[str, str]]:
    folder = find_model(run)
    if folder is None:
        return []
    config = read_object(folder / "config.json")
    facts = [("folder", folder.relative_to(run).as_posix())]
    numbers, size = count_parameters(folder)
    if numbers:
        facts += [("parameters", f"{numbers:,}"), ("weights", format_bytes(size))]
    plain = {
        key: value for key, value in config.items() if number(value) is not None or isinstance(value, bool | list | str)
    }
    return facts + [(key, _cell(value)) for key, value in plain.items()]


def marked_toml(text: str) -> str:
    """TOML text, escaped, with its comments and table headers marked up."""
    lines = []
    for line in html.escape(text).splitlines():
        kind = "comment" if line.lstrip().startswith("#") else "header" if line.startswith("[") else ""
        lines.append(f'<span class="{kind}">{line}</span>' if kind else line)
    return "\n".join(lines)
