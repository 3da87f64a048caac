"""RUN/trace.html and RUN/trace.json: one step of a run, every rank, what it computed and what it sent."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pellucid.errors import DataError
from pellucid.report.page import write_text
from pellucid.report.terminal import format_bytes, print_table
from pellucid.report.trace_events import trace_events
from pellucid.report.trace_ledger import RankFiles, RankStep, find_ranks
from pellucid.report.trace_page import MAX_RANKS, trace_page
from pellucid.report.trace_step import Plan, Row, bytes_match, compare, format_time, read_plan, summary, totals
from pellucid.report.trace_text import print_picture

LAST_STEPS = 5
"""Ordinary steps from the end of a run among which the one of median duration stands for all."""
LOOK_BACK = 50
"""Steps that are looked at to find them."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded step of a run."""

    run: Path
    step: int
    recorded: tuple[int, int]
    """First and last recorded step of the run."""
    plan: Plan | None
    ranks: tuple[RankStep, ...]
    """Those that recorded the step; at least one."""
    rows: tuple[Row, ...]
    """Bytes by tag, predicted and recorded."""
    notes: tuple[str, ...]
    """What a reader has to know before drawing conclusions."""

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers of the step as `pellucid trace --json` prints them."""
        return {"run": str(self.run)} | summary(self.step, self.plan, self.ranks, self.rows)


def read_trace(run_dir: str | Path, step: int | None = None) -> Trace:
    """Read one step from the ledger of a run, which may still be going on.

    Args:
        step: 0 is what happened before the first; None takes a typical one: of the last 5 that trained and did
            nothing else, the one of median duration.

    Raises:
        DataError: there is no run, no ledger, no such step, or a damaged line in it; names the file and the line.
    """
    run = Path(run_dir)
    folder = run / "ledger"
    if not run.is_dir():
        raise DataError(f"{run}: no such run folder")
    if not folder.is_dir():
        raise DataError(f"{run} has no ledger; it was trained with parallel.mode none or with parallel.ledger = false")
    plan, known = read_plan(folder / "plan.json"), find_ranks(folder)
    if step is None:
        # a run resumed on fewer ranks leaves the files of the others behind
        now = [rank for rank in known if plan is None or rank < plan.world_size] or known
        step = _typical_step(folder, now) if now else None
        if step is None:
            raise DataError(f"{folder} holds no step yet")
    ranks, recorded = _read_ranks(folder, known, step)
    if not ranks:
        there = f"steps {recorded[0]} to {recorded[1]} are recorded" if recorded else "nothing is recorded yet"
        raise DataError(f"{run} has no step {step} in its ledger; {there}")
    assert recorded is not None
    rows = tuple(compare(plan, ranks))
    return Trace(run, step, recorded, plan, ranks, rows, tuple(_notes(plan, ranks, known)))


def build_trace(trace: Trace) -> tuple[Path, Path]:
    """Write RUN/trace.html and RUN/trace.json, replacing older ones at once; returns their paths.

    The page needs nothing else and shows up to 8 ranks; trace.json has all, for ui.perfetto.dev.

    Raises:
        StorageError: one of them cannot be written.
    """
    page, events = trace.run / "trace.html", trace.run / "trace.json"
    name = trace.run.resolve().name
    write_text(page, trace_page(name, trace.step, trace.recorded, trace.plan, trace.ranks, trace.rows, trace.notes))
    write_text(events, json.dumps(trace_events(trace.ranks), allow_nan=False))
    return page, events


def print_trace(trace: Trace, file: TextIO) -> None:
    """The step as a picture in characters, without writing anything."""
    print_picture(trace.ranks[:MAX_RANKS], file)
    if len(trace.ranks) > MAX_RANKS:
        print(f"drawn are {MAX_RANKS} of the {len(trace.ranks)} ranks that recorded this step", file=file)
    _print_verdict(trace, file)


def print_summary(trace: Trace, file: TextIO) -> None:
    """A line a rank, and whether the bytes are those predicted."""
    columns = ["rank", "step", "communication", "hidden", "exposed", "exposed share", "sent", "reached"]
    cells = [
        [
            one.rank, format_time(one.step_s), format_time(one.communication_s), format_time(one.hidden_s),
            format_time(one.exposed_s), f"{one.exposed_share:.1%}", format_bytes(one.wire_bytes),
            f"{format_bytes(one.bytes_per_s)}/s",
        ]
        for one in map(totals, trace.ranks)
    ]  # fmt: skip
    mode = f", {trace.plan.mode} on {trace.plan.world_size} ranks" if trace.plan else ""
    title = f"step {trace.step} of {trace.recorded[0]} to {trace.recorded[1]}{mode}"
    print_table(columns, cells, title=title, file=file)
    _print_verdict(trace, file)


def _print_verdict(trace: Trace, file: TextIO) -> None:
    match = bytes_match(trace.rows)
    wrong = ", ".join(f"{row.tag} ({row.op})" for row in trace.rows if row.matches is False)
    bounded = ", ".join(row.tag for row in trace.rows if row.at_most)
    most = f"; {bounded} at most" if bounded else ""
    words = {True: f"as predicted, payload and sent, every tag{most}", False: f"differ from the prediction: {wrong}"}
    print(
        f"bytes: {words[match]}" if match is not None else "bytes: not compared, no prediction for this step", file=file
    )
    for note in trace.notes:
        print(f"note: {note}", file=file)


def _typical_step(folder: Path, ranks: list[int]) -> int | None:
    """The one of median duration among the last ordinary steps that all ``ranks`` recorded; None without a step.

    Where no step is ordinary any will do, and where there is none at all what happened before the first.
    """
    newest: float = math.inf
    for rank in ranks:
        with RankFiles(folder, rank) as files:
            newest = min(newest, next(files.whole_steps_back(), math.inf))
    looked: list[RankStep] = []
    with RankFiles(folder, ranks[0]) as files:
        for step in files.whole_steps_back():
            if step <= newest:
                looked.append(files.read(step))
            if len(looked) == LOOK_BACK or sum(one.ordinary for one in looked) == LAST_STEPS:
                break
        recorded = files.recorded()
    steps = [one for one in looked if one.ordinary] or [one for one in looked if one.step > 0] or looked
    if not steps:
        return recorded[0] if recorded else None
    by_duration = sorted(steps[:LAST_STEPS], key=lambda one: one.end - one.begin)
    return by_duration[(len(by_duration) - 1) // 2].step


def _read_ranks(folder: Path, known: Sequence[int], step: int) -> tuple[tuple[RankStep, ...], tuple[int, int] | None]:
    """What each rank recorded of the step, ranks without a line left out, and the range of steps over all ranks."""
    found: list[RankStep] = []
    ranges: list[tuple[int, int]] = []
    for rank in known:
        with RankFiles(folder, rank) as files:
            one = files.read(step)
            if one.collectives or one.spans:
                found.append(one)
            if (recorded := files.recorded()) is not None:
                ranges.append(recorded)
    both = (min(first for first, _ in ranges), max(last for _, last in ranges)) if ranges else None
    return tuple(found), both


def _notes(plan: Plan | None, ranks: Sequence[RankStep], known: Sequence[int]) -> list[str]:
    notes = []
    there = {rank.rank for rank in ranks}
    wanted = set(range(plan.world_size)) if plan else set(known)
    if missing := sorted(wanted - there):
        notes.append(f"Nothing of this step is recorded by rank {', '.join(map(str, missing))}.")
    if plan is None:
        notes.append("ledger/plan.json is missing or cannot be read, so there is no prediction to compare bytes with.")
    elif more := sorted(there - wanted):
        notes.append(
            f"The prediction is for {plan.world_size} ranks; this step was also recorded by rank {', '.join(map(str, more))}."
        )
    if lost := sum(not event.finished for rank in ranks for event in rank.collectives):
        notes.append(f"Not waited for within the step: {lost} collectives. They count as bytes but not as time.")
    return notes
