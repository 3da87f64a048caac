"""Runs with a made-up ledger: ranks that compute and share one connection, timed as a real one would be."""

import json
import random
from pathlib import Path
from typing import Any

BUCKETS: list[list[tuple[str, list[int]]]] = [
    [("lm_head.weight", [400, 64]), ("model.norm.weight", [64])],
    *(
        [
            (f"model.layers.{layer}.self_attn.{name}_proj.weight", [64, 64])
            for name in "qkvo"
        ]
        + [(f"model.layers.{layer}.mlp.{name}_proj.weight", [160, 64]) for name in ("gate", "up", "down")]
        for layer in (2, 1, 0)
    ),
    [("model.embed_tokens.weight", [400, 64])],
]  # fmt: skip
"""Five buckets in the order in which gradients are ready: name and shape of each parameter."""

Line = dict[str, Any]


def size(parameters: list[tuple[str, list[int]]]) -> int:
    return sum(4 * shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in parameters)


def wire(op: str, payload: int, world: int) -> int:
    return (2 if op == "all_reduce" else 1) * (world - 1) * payload // world if op != "broadcast" else payload


def plan(world: int, mode: str = "ddp") -> Line:
    """ledger/plan.json for an ordinary step of `step_lines`."""
    rows = [row("tokens", "all_reduce", 8, world, "float64")]
    for i, bucket in enumerate(BUCKETS):
        rows.append(row(f"grad/bucket{i}", "all_reduce" if mode == "ddp" else "reduce_scatter", size(bucket), world))
        if mode == "zero1":
            rows.append(row(f"param/bucket{i}", "all_gather", size(bucket), world))
    rows += [row(tag, "all_reduce", 8, world, "float64") for tag in ("loss", "stop")]
    buckets = [
        {
            "tag": f"grad/bucket{i}", "payload_bytes": size(bucket),
            "parameters": [{"name": name, "shape": shape, "bytes": size([(name, shape)])} for name, shape in bucket],
        }
        for i, bucket in enumerate(BUCKETS)
    ]  # fmt: skip
    total = sum(one["wire_bytes"] for one in rows)
    return {"mode": mode, "world_size": world, "step": rows, "wire_bytes": total, "buckets": buckets}


def row(tag: str, op: str, payload: int, world: int, dtype: str = "float32") -> Line:
    return {
        "tag": tag, "op": op, "count": 1, "payload_bytes": payload, "wire_bytes": wire(op, payload, world), "dtype": dtype,
    }  # fmt: skip


class Rank:
    """One rank's step: `compute` and `send` advance its clock and the connection's."""

    def __init__(self, step: int, rank: int, world: int, slow: float = 1.0) -> None:
        self.step, self.world, self.slow = step, world, slow
        self.random = random.Random(1000 * step + rank)
        self.now, self.busy, self.micro = 0.0, 0.0, 0
        self.events: list[Line] = []
        self.spans: list[Line] = []

    def compute(self, phase: str, seconds: float) -> None:
        begin = self.now
        self.now += seconds * self.slow * self.random.uniform(0.95, 1.05)
        self.spans.append({
            "step": self.step, "micro": self.micro, "phase": phase, "t_begin": round(begin, 7), "t_end": round(self.now, 7)
        })  # fmt: skip

    def issue(self, tag: str, op: str, payload: int, phase: str, at: float, owner: tuple[str, ...] = ()) -> Line:
        begin = max(at, self.busy)
        sent = wire(op, payload, self.world)
        self.busy = begin + 0.0008 + sent / 20e6
        kind, item = ("float32", 4) if owner else ("float64", 8)
        event = {
            "step": self.step, "micro": self.micro, "op": op, "tag": tag, "group": "world", "dtype": kind,
            "numel": payload // item, "payload_bytes": payload, "wire_bytes": sent, "owner": list(owner), "phase": phase,
            "t_issue": round(at, 7), "t_wait": 0.0, "t_done": round(self.busy, 7),
        }  # fmt: skip
        self.events.append(event)
        return event

    def wait(self, event: Line) -> None:
        event["t_wait"] = round(self.now, 7)
        self.now = max(self.now, event["t_done"])

    def number(self, tag: str) -> None:
        self.wait(self.issue(tag, "all_reduce", 8, "other", self.now))


def step_lines(step: int, rank: int, world: int, mode: str = "ddp", slow: float = 1.0) -> tuple[list[Line], list[Line]]:
    """Collectives and spans of one rank in one step: 4 micro-batches, 5 buckets that start during the last backward."""
    one = Rank(step, rank, world, slow)
    if step == 0:
        for i, bucket in enumerate(BUCKETS):
            names = tuple(name for name, _ in bucket)
            one.wait(one.issue(f"param/bucket{i}", "broadcast", size(bucket), "other", one.now + 1.5, names))
        return one.events, one.spans
    one.number("tokens")
    pending: list[Line] = []
    for micro in range(4):
        one.micro = micro
        one.compute("forward", 0.014)
        begin = one.now
        one.compute("backward", 0.028)
        if micro == 3:
            for i, bucket in enumerate(BUCKETS):
                op, names = "all_reduce" if mode == "ddp" else "reduce_scatter", tuple(name for name, _ in bucket)
                at = begin + (one.now - begin) * (i + 1) / len(BUCKETS)
                pending.append(one.issue(f"grad/bucket{i}", op, size(bucket), "backward", at, names))
    for event in pending:
        one.wait(event)
    one.compute("optimizer", 0.006)
    if mode == "zero1":
        gathers = [
            one.issue(f"param/bucket{i}", "all_gather", size(bucket), "optimizer", one.now, tuple(n for n, _ in bucket))
            for i, bucket in enumerate(BUCKETS)
        ]
        for event in gathers:
            one.wait(event)
    for tag in ("loss", "stop"):
        one.number(tag)
    if step % 5 == 0:
        one.number("validation")
        one.number("save/state")
    return one.events, one.spans


def make_run(run: Path, *, world: int = 2, steps: int = 12, mode: str = "ddp") -> Path:
    """A run folder whose steps 0 to ``steps`` are recorded; every fifth has a validation and a save, and takes longer."""
    ledger = run / "ledger"
    ledger.mkdir(parents=True)
    (run / "config.toml").write_text(f'[parallel]\nmode = "{mode}"\n')
    (ledger / "plan.json").write_text(json.dumps(plan(world, mode)))
    for rank in range(world):
        events: list[Line] = []
        spans: list[Line] = []
        for step in range(steps + 1):
            more = step_lines(step, rank, world, mode, slow=1 + 0.08 * rank)
            events += more[0]
            spans += more[1]
        write_lines(ledger / f"rank{rank:05d}.jsonl", events)
        write_lines(ledger / f"phases{rank:05d}.jsonl", spans)
    return run


def write_lines(path: Path, lines: list[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
