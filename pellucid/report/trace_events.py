"""trace.json: one step in the trace event format, which ui.perfetto.dev and chrome://tracing open."""

from collections.abc import Sequence
from typing import Any

from pellucid.report.trace_ledger import RankStep
from pellucid.report.trace_step import Interval, stacked

LANES = ("forward", "backward", "communication", "optimizer")
"""From top to bottom, in the page too."""


def trace_events(ranks: Sequence[RankStep]) -> dict[str, Any]:
    """A process a rank, and in it a thread a lane; times in microseconds since the rank's step began.

    Slices of a thread must not overlap in part, so collectives that do get threads of their own beside each other.
    Inside the slice of a collective stands one named "exposed" for the time in which the rank stood still.
    """
    events: list[dict[str, Any]] = []
    for step in ranks:
        process = {"pid": step.rank}
        events.append({"ph": "M", "name": "process_name", **process, "args": {"name": f"rank {step.rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", **process, "args": {"sort_index": step.rank}})
        for number, (lane, slices) in enumerate(_lanes(step)):
            rows = stacked([interval for interval, _, _ in slices])
            for row in range(max(rows, default=0) + 1):
                # 1000 threads a lane, so that lanes keep their order however many rows one has
                thread = process | {"tid": number * 1000 + row + 1}
                name = lane if row == 0 else f"{lane} {row + 1}"
                events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": name}})
                events.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}})
                events += [
                    event | thread for (_, _, made), at in zip(slices, rows, strict=True) if at == row for event in made
                ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


Slices = list[tuple[Interval, str, list[dict[str, Any]]]]


def _lanes(step: RankStep) -> list[tuple[str, Slices]]:
    lanes: dict[str, Slices] = {lane: [] for lane in LANES}
    for span in step.spans:
        interval, name = (span.t_begin, span.t_end), f"{span.phase} {span.micro}"
        slices = lanes.setdefault(span.phase, [])
        slices.append((interval, name, [_slice(name, interval, {"step": step.step, "micro": span.micro})]))
    for event in step.collectives:
        facts = {
            "step": step.step, "micro": event.micro, "op": event.op, "group": event.group, "dtype": event.dtype,
            "numel": event.numel, "payload_bytes": event.payload_bytes, "wire_bytes": event.wire_bytes,
            "phase": event.phase, "parameters": ", ".join(event.owner),
        }  # fmt: skip
        made = [_slice(event.tag, event.life, facts)]
        begin, end = event.exposed
        if end > begin:
            made.append(_slice("exposed", event.exposed, {"tag": event.tag}))
        lanes["communication"].append((event.life, event.tag, made))
    return list(lanes.items())


def _slice(name: str, interval: Interval, facts: dict[str, Any]) -> dict[str, Any]:
    begin, end = (round(at * 1e6, 3) for at in interval)
    return {"ph": "X", "name": name, "cat": "pellucid", "ts": begin, "dur": round(end - begin, 3), "args": facts}
