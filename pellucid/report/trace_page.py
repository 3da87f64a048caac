"""What trace.html shows of a step: lanes as SVG, cards, the bytes beside their prediction, data for the page's script."""

import html
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pellucid.report.chart import ticks
from pellucid.report.page import render
from pellucid.report.terminal import format_bytes
from pellucid.report.trace_events import LANES
from pellucid.report.trace_ledger import Collective, RankStep, Span
from pellucid.report.trace_step import (
    Amount,
    Interval,
    Plan,
    Row,
    bytes_match,
    format_time,
    length,
    parts,
    stacked,
    standstill,
    totals,
)
from pellucid.version import __version__

TEMPLATE = "trace.html.jinja"
MAX_RANKS = 8
"""Ranks whose lanes are drawn."""
ROW, PITCH, LANE_GAP, TOP = 20, 23, 9, 4
"""Height of a bar, from row to row, between lanes and above the first, in pixels."""
NAMED = 12
"""Parameters named in the text of a bar, which is what is left of the page without its script."""


def trace_page(
    run: str, step: int, recorded: Interval, plan: Plan | None, ranks: Sequence[RankStep], rows: Sequence[Row],
    notes: Sequence[str],
) -> str:  # fmt: skip
    """The page as text. ``ranks`` are all that recorded the step, the first `MAX_RANKS` are drawn."""
    shown = ranks[:MAX_RANKS]
    window = min(rank.begin for rank in shown), max(rank.end for rank in shown)
    lanes = [RankLanes(rank, window) for rank in shown]
    bars: list[dict[str, Any]] = []
    svgs = [one.svg(bars) for one in lanes]
    sums = [totals(rank) for rank in ranks]
    return render(
        TEMPLATE,
        {
            "title": run, "step": step, "recorded": recorded, "version": __version__, "plan": plan,
            "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"), "notes": notes,
            "cards": _cards(ranks, rows), "lead": _lead(ranks), "sums": sums, "longest": max(one.step_s for one in sums),
            "ranks": [{"lanes": one, "svg": svg} for one, svg in zip(lanes, svgs, strict=True)], "num_ranks": len(ranks),
            "axis": _axis(window), "rows": [_byte_lines(row) for row in rows], "time": format_time, "size": format_bytes,
            "data": _data(window, bars, plan, shown),
        },
    )  # fmt: skip


class RankLanes:
    """The lanes of one rank: bars placed in rows, in percent of the window of time that all ranks share."""

    def __init__(self, step: RankStep, window: Interval) -> None:
        self.step, self.window, self.still = step, window, standstill(step)
        lanes: dict[str, list[Span | Collective]] = {lane: [] for lane in LANES}
        for span in step.spans:
            lanes.setdefault(span.phase, []).append(span)
        lanes["communication"] += step.collectives
        self.lanes: list[tuple[str, int, int, list[tuple[Span | Collective, int]]]] = []
        """Name, top, height and each bar with its own top."""
        top = TOP
        for name, items in lanes.items():
            rows = stacked([_interval(item) for item in items])
            height = PITCH * (max(rows, default=0) + 1) + LANE_GAP
            placed = [(item, top + PITCH * row) for item, row in zip(items, rows, strict=True)]
            self.lanes.append((name, top, height, placed))
            top += height
        self.height = top

    def svg(self, bars: list[dict[str, Any]]) -> str:
        """The drawing; appends what the script needs of each bar to ``bars``, where its ``data-i`` points."""
        drawn = [
            f'<svg class="lanes" height="{self.height}" aria-label="rank {self.step.rank}"><svg class="view" width="100%">',
            '<g class="ticks">', _grid(self.window), "</g>",
        ]  # fmt: skip
        for begin, end in self.still:
            drawn.append(f'<rect class="still" {self._across(begin, end)} y="0" height="{self.height}"/>')
        for name, _, _, placed in self.lanes:
            drawn.append(f'<g class="lane" data-lane="{html.escape(name)}">')
            for item, y in placed:
                drawn.append(self._bar(item, name, y, len(bars)))
                bars.append(self._data(item, name))
            drawn.append("</g>")
        return "".join([*drawn, "</svg></svg>"])

    def _bar(self, item: Span | Collective, lane: str, y: int, index: int) -> str:
        begin, end = _interval(item)
        label = item.tag if isinstance(item, Collective) else f"micro {item.micro}" if lane != "optimizer" else "step"
        box = f'{self._across(begin, end)} y="{y}" height="{ROW}"'
        drawn = [f'<g class="bar {html.escape(lane)}" data-i="{index}"><title>{html.escape(_words(item))}</title>']
        if isinstance(item, Collective):
            # one that took no time is a hair's width
            for kind, (since, until) in parts(item, self.still) or [("hidden", (begin, end))]:
                drawn.append(f'<rect class="{kind}" {self._across(since, until)} y="{y}" height="{ROW}"/>')
        else:
            drawn.append(f'<rect class="work" {box} rx="2"/>')
        # a nested drawing cuts its text off where the bar ends
        drawn.append(f'<svg class="label" {box}><text x="6" y="14">{html.escape(label)}</text></svg></g>')
        return "".join(drawn)

    def _data(self, item: Span | Collective, lane: str) -> dict[str, Any]:
        begin, end = _interval(item)
        data: dict[str, Any] = {"rank": self.step.rank, "lane": lane, "micro": item.micro, "phase": item.phase}
        data |= {"begin": begin, "end": end}
        if isinstance(item, Collective):
            cut = parts(item, self.still)
            spent = {kind: length(i for k, i in cut if k == kind) for kind in ("hidden", "behind", "exposed")}
            data |= spent | {
                "tag": item.tag, "op": item.op, "dtype": item.dtype, "group": item.group, "payload": item.payload_bytes,
                "wire": item.wire_bytes, "owner": item.owner, "finished": item.finished,
            }  # fmt: skip
        return data

    def _across(self, begin: float, end: float) -> str:
        return f'x="{_percent(begin - self.window[0], self.window)}%" width="{_percent(end - begin, self.window)}%"'


def _interval(item: Span | Collective) -> Interval:
    return item.life if isinstance(item, Collective) else (item.t_begin, item.t_end)


def _percent(time: float, window: Interval) -> str:
    """A length of time as a share of the window's."""
    begin, end = window
    return f"{time / (end - begin) * 100 if end > begin else 0:.6g}"


def _words(item: Span | Collective) -> str:
    begin, end = _interval(item)
    when = f"{format_time(begin)} to {format_time(end)}, {format_time(end - begin)}"
    if isinstance(item, Span):
        return (
            f"{item.phase}, {when}" if item.phase == "optimizer" else f"{item.phase}, micro-batch {item.micro}, {when}"
        )
    still, _ = item.exposed
    inside = ", ".join(item.owner[:NAMED]) + (f" and {len(item.owner) - NAMED} more" if len(item.owner) > NAMED else "")
    return (
        f"{item.tag}, {item.op}, {format_bytes(item.payload_bytes)}, {when}, {format_time(end - still)} of it exposed"
        + (f"; {inside}" if inside else "")
    )


def _data(window: Interval, bars: list[dict[str, Any]], plan: Plan | None, ranks: Sequence[RankStep]) -> dict[str, Any]:
    """Parameters in the order of the plan's buckets, then those that only the ledger names; bars refer to them."""
    known: dict[str, dict[str, Any]] = {}
    for parameter in plan.parameters if plan else ():
        shape = " × ".join(map(str, parameter.shape)) or "scalar"
        known[parameter.name] = {"name": parameter.name, "shape": shape, "bytes": parameter.num_bytes}
    for name in (name for rank in ranks for event in rank.collectives for name in event.owner):
        known.setdefault(name, {"name": name})
    index = {name: i for i, name in enumerate(known)}
    # a bucket's many names are written once, however often it travels
    owners: dict[tuple[str, ...], int] = {}
    for bar in bars:
        if "owner" in bar:
            bar["owner"] = owners.setdefault(bar["owner"], len(owners))
    return {
        "begin": window[0], "end": window[1], "bars": bars, "parameters": list(known.values()),
        "owners": [[index[name] for name in owner] for owner in owners],
    }  # fmt: skip


def _marks(window: Interval) -> list[tuple[str, str]]:
    """Position in percent and text of round times."""
    begin, end = window
    if end <= begin:
        return []
    return [(_percent(at - begin, window), format_time(at)) for at in ticks(begin, end, 8)]


def _grid(window: Interval) -> str:
    return "".join(f'<line class="grid" x1="{x}%" x2="{x}%" y1="0" y2="100%"/>' for x, _ in _marks(window))


def _axis(window: Interval) -> str:
    texts = "".join(f'<text class="tick" x="{x}%" y="16">{text}</text>' for x, text in _marks(window))
    return f'<svg class="axis" height="24" aria-hidden="true"><svg class="view" width="100%">{texts}</svg></svg>'


def _lead(ranks: Sequence[RankStep]) -> str:
    worst = max((totals(rank) for rank in ranks), key=lambda one: one.exposed_share)
    if not worst.communication_s:
        return "Nothing was sent in this step."
    who = f"Rank {worst.rank}" if len(ranks) > 1 else "The rank"
    return (
        f"{who} stood still for {format_time(worst.exposed_s)} of its {format_time(worst.communication_s)} of communication "
        f"({worst.exposed_share:.0%}); the other {format_time(worst.hidden_s)} passed while it went on."
    )


def _cards(ranks: Sequence[RankStep], rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """(label, value, remark, class) of the numbers at the top, each of the rank where it is largest."""
    sums = [totals(rank) for rank in ranks]
    slowest, busiest = (max(sums, key=key) for key in (lambda one: one.step_s, lambda one: one.communication_s))
    worst, sender = (max(sums, key=key) for key in (lambda one: one.exposed_share, lambda one: one.wire_bytes))
    fastest = max(sums, key=lambda one: one.bytes_per_s)

    def of(rank: int) -> str:
        return f"rank {rank}" if len(ranks) > 1 else "the one rank recorded"

    match = bytes_match(rows)
    how = "every tag, to the byte" + (", answers at most" if any(row.at_most for row in rows) else "")
    verdict = ("not compared", "no prediction for this step", "") if match is None else (
        ("✓ as predicted", how, "good") if match else ("✗ differ", "see the table below", "bad")
    )  # fmt: skip
    return [
        ("step", format_time(slowest.step_s), of(slowest.rank), ""),
        ("communication", format_time(busiest.communication_s), of(busiest.rank), ""),
        ("exposed", f"{worst.exposed_share:.0%}", f"{format_time(worst.exposed_s)}, {of(worst.rank)}", ""),
        ("sent", format_bytes(sender.wire_bytes), f"{sender.collectives:,} collectives, {of(sender.rank)}", ""),
        ("reached", f"{format_bytes(fastest.bytes_per_s)}/s", f"while under way, {of(fastest.rank)}", ""),
        ("bytes", *verdict),
    ]


def _byte_lines(row: Row) -> dict[str, Any]:
    """One row of the table of bytes: a line each group of ranks that recorded the same."""
    return {
        "tag": f"{row.tag}/…" if row.divided else row.tag, "op": row.op, "predicted": row.predicted, "at_most": row.at_most,
        "matches": row.matches, "alike": len(row.recorded) == 1,
        "lines": [
            {
                "amount": amount, "ranks": ", ".join(map(str, ranks)),
                "differences": {} if row.matches is None or row.agrees(amount) else _differences(row.predicted, amount),
            }
            for amount, ranks in row.recorded.items()
        ],
    }  # fmt: skip


def _differences(predicted: Amount | None, recorded: Amount) -> dict[str, str]:
    """Recorded minus predicted, signed, of each number that differs."""
    wanted = predicted or Amount(recorded.dtype, 0, 0, 0)
    found = {
        name: f"{getattr(recorded, name) - getattr(wanted, name):+,}"
        for name in ("count", "payload_bytes", "wire_bytes")
        if getattr(recorded, name) != getattr(wanted, name)
    }
    return found | ({"dtype": f"{wanted.dtype} predicted"} if recorded.dtype != wanted.dtype else {})
