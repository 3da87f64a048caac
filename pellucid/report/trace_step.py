"""One step of a run in numbers: how long ranks stood still for the network, and whether the plan foretold its bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pellucid.report.files import read_object
from pellucid.report.trace_ledger import Collective, RankStep

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones, in order; empty intervals vanish."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """How much time a union of intervals covers; what overlaps counts once."""
    return sum(end - begin for begin, end in merged(intervals))


def stacked(intervals: Sequence[Interval]) -> list[int]:
    """For each interval the row to draw it in, from 0, so that no two in a row overlap, with as few rows as there can be."""
    rows = [0] * len(intervals)
    free: list[float] = []
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        begin, end = intervals[i]
        row = next((row for row, since in enumerate(free) if since <= begin), len(free))
        free[row : row + 1] = [end]
        rows[i] = row
    return rows


def standstill(step: RankStep) -> list[Interval]:
    """When the rank stood still for one collective or several."""
    return merged(event.exposed for event in step.collectives)


def parts(event: Collective, still: Sequence[Interval]) -> list[tuple[str, Interval]]:
    """The life of a collective, cut into what the rank did meanwhile.

    "hidden": it went on. "behind": it stood still for another one (``still`` is its `standstill`). "exposed": it stood
    still for this one. So the union of all "hidden" parts of a step is its hidden time.
    """
    begin, end = event.life
    waited, _ = event.exposed
    cut: list[tuple[str, Interval]] = []
    at = begin
    for since, until in ((max(since, begin), min(until, waited)) for since, until in still):
        if since < until:
            cut += [("hidden", (at, since)), ("behind", (since, until))]
            at = until
    cut += [("hidden", (at, waited)), ("exposed", (waited, end))]
    return [(kind, (since, until)) for kind, (since, until) in cut if since < until]


@dataclass(frozen=True, slots=True)
class Totals:
    """Communication of one rank in one step. Times in seconds; what overlaps counts once."""

    rank: int
    step_s: float
    communication_s: float
    """Something was under way."""
    exposed_s: float
    """The rank stood still for it."""
    collectives: int
    payload_bytes: int
    wire_bytes: int
    """Bytes that the rank sent."""

    @property
    def hidden_s(self) -> float:
        """Under way while the rank went on."""
        return self.communication_s - self.exposed_s

    @property
    def exposed_share(self) -> float:
        """Of the communication time; 0 where there was none."""
        return self.exposed_s / self.communication_s if self.communication_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes sent a second of communication; 0 where there was none."""
        return self.wire_bytes / self.communication_s if self.communication_s else 0.0


def totals(step: RankStep) -> Totals:
    """The sums of one rank's step."""
    events = step.collectives
    return Totals(
        rank=step.rank,
        step_s=step.end - step.begin,
        communication_s=length(event.life for event in events),
        exposed_s=length(standstill(step)),
        collectives=len(events),
        payload_bytes=sum(event.payload_bytes for event in events),
        wire_bytes=sum(event.wire_bytes for event in events),
    )


@dataclass(frozen=True, slots=True)
class Amount:
    """Collectives of one tag and op in one step of one rank."""

    dtype: str
    count: int
    payload_bytes: int
    wire_bytes: int


@dataclass(slots=True)
class Row:
    """What the plan says of a tag and op, and what the ranks recorded."""

    tag: str
    op: str
    predicted: Amount | None
    recorded: dict[Amount, list[int]] = field(default_factory=dict)
    """The ranks that recorded an amount; more than one entry where ranks differ."""
    expected: bool = True
    """Whether a plan of an ordinary step would have to name it."""
    divided: bool = False
    """Whether tags below this one are counted here: how many there are was not predicted, only their sum."""
    at_most: bool = False
    """Whether fewer bytes than predicted are as well: how long answers become nobody knows before."""

    @property
    def matches(self) -> bool | None:
        """Whether every rank recorded what was predicted; None where nothing had to be predicted."""
        if self.predicted is None and not self.expected:
            return None
        return all(self.agrees(amount) for amount in self.recorded)

    def agrees(self, recorded: Amount) -> bool:
        """Whether one rank's amount is the predicted one; what the plan does not name is predicted not to be there."""
        wanted = self.predicted or Amount(recorded.dtype, 0, 0, 0)
        if self.at_most:
            fits = recorded.payload_bytes <= wanted.payload_bytes and recorded.wire_bytes <= wanted.wire_bytes
            return fits and (recorded.dtype, recorded.count) == (wanted.dtype, wanted.count)
        if not self.divided:
            return recorded == wanted
        same = recorded.dtype == wanted.dtype and recorded.payload_bytes == wanted.payload_bytes
        # each piece's share of the wire is rounded down by itself
        return same and abs(recorded.wire_bytes - wanted.wire_bytes) <= recorded.count


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as the plan's buckets name it."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    bucket: str


@dataclass(frozen=True, slots=True)
class Plan:
    """ledger/plan.json: what one ordinary step of training moves."""

    mode: str
    world_size: int
    step: dict[tuple[str, str], Amount]
    """By tag and op."""
    parameters: tuple[Parameter, ...]
    rollout: dict[tuple[str, str], Amount] = field(default_factory=dict)
    """What the first of each ``rollout_every`` steps moves besides; without what nobody can know before."""
    rollout_every: int = 1
    at_most: frozenset[tuple[str, str]] = frozenset()
    """Of ``rollout``: bytes that may be fewer."""

    def of_step(self, step: int) -> dict[tuple[str, str], Amount]:
        """What step number ``step`` moves, from 1; before the first nothing is foretold."""
        if step == 0:
            return {}
        return self.step | (self.rollout if (step - 1) % self.rollout_every == 0 else {})


def read_plan(path: Path) -> Plan | None:
    """The plan, or None where there is none that can be read."""
    table = read_object(path)
    try:
        step: dict[tuple[str, str], Amount] = {}
        for row in table["step"]:
            amount = _amount(row)
            key = str(row["tag"]), str(row["op"])
            step[key] = _added(step[key], amount) if key in step else amount
        parameters = tuple(
            Parameter(str(p["name"]), tuple(map(int, p["shape"])), int(p["bytes"]), str(bucket["tag"]))
            for bucket in table.get("buckets", [])
            for p in bucket["parameters"]
        )
        mode, size, every = str(table["mode"]), int(table["world_size"]), 1
        rollout, at_most = dict[tuple[str, str], Amount](), set[tuple[str, str]]()
        if "rollout" in table:
            every = max(1, int(table["rollout"]["every"]))
            for row in table["rollout"]["rows"]:
                if row["payload_bytes"] is not None:
                    key = str(row["tag"]), str(row["op"])
                    rollout[key] = _amount(row)
                    at_most |= set() if row["exact"] else {key}
        return Plan(mode, size, step, parameters, rollout, every, frozenset(at_most))
    except (KeyError, TypeError, ValueError):
        return None


def _amount(row: dict[str, Any]) -> Amount:
    return Amount(str(row["dtype"]), *(int(row[key]) for key in ("count", "payload_bytes", "wire_bytes")))


def compare(plan: Plan | None, ranks: Sequence[RankStep]) -> list[Row]:
    """A row a tag and op in the order in which they were first issued, then what the plan has besides.

    Before the first step, and without a plan, nothing had to be predicted. Neither had what a validation, a save or a
    decision adds to an ordinary step; parameters that travel without being foretold had.
    """
    predicted = plan.of_step(ranks[0].step) if plan is not None else {}
    planned_tags = {tag for tag, _ in predicted}
    rows: dict[tuple[str, str], Row] = {}
    sums: list[dict[tuple[str, str], Amount]] = []
    for rank in ranks:
        amounts: dict[tuple[str, str], Amount] = {}
        for event in rank.collectives:
            key = _row_key(event, predicted)
            if key not in rows:
                foretold = bool(event.owner) or event.tag in planned_tags
                expected = bool(predicted) and foretold and not event.beside_training
                rows[key] = Row(*key, predicted.get(key), expected=expected, divided=key[0] != event.tag)
            one = Amount(event.dtype, 1, event.payload_bytes, event.wire_bytes)
            amounts[key] = _added(amounts[key], one) if key in amounts else one
        sums.append(amounts)
    for key, amount in predicted.items():
        rows.setdefault(key, Row(*key, amount))
    for key, row in rows.items():
        row.at_most = plan is not None and key in plan.at_most and row.predicted is not None
        for rank, amounts in zip(ranks, sums, strict=True):
            nothing = Amount(row.predicted.dtype if row.predicted else "", 0, 0, 0)
            row.recorded.setdefault(amounts.get(key, nothing), []).append(rank.rank)
    return list(rows.values())


def _row_key(event: Collective, predicted: dict[tuple[str, str], Amount]) -> tuple[str, str]:
    """Tag and op, or those of the plan's row for all tags below one, where it has such a row and none for this tag."""
    exact, above = (event.tag, event.op), (event.tag.split("/")[0], event.op)
    return above if exact not in predicted and above in predicted else exact


def bytes_match(rows: Iterable[Row]) -> bool | None:
    """Whether all that was predicted came, and nothing else; None where nothing was predicted."""
    judged = [row.matches for row in rows if row.matches is not None]
    return all(judged) if judged else None


def summary(step: int, plan: Plan | None, ranks: Sequence[RankStep], rows: Sequence[Row]) -> dict[str, Any]:
    """The step for a program: totals of each rank, the worst exposed share, and bytes predicted and recorded.

    ``exposed_share`` is that of the rank that stood still most, in proportion to its communication.
    """
    sums = [totals(rank) for rank in ranks]
    return {
        "step": step,
        "mode": plan.mode if plan else None,
        "world_size": plan.world_size if plan else None,
        "exposed_share": max(one.exposed_share for one in sums),
        "bytes_match": bytes_match(rows),
        "ranks": [
            {
                "rank": one.rank, "step_s": one.step_s, "communication_s": one.communication_s,
                "exposed_s": one.exposed_s, "hidden_s": one.hidden_s, "exposed_share": one.exposed_share,
                "collectives": one.collectives, "payload_bytes": one.payload_bytes, "wire_bytes": one.wire_bytes,
                "bytes_per_s": one.bytes_per_s,
            }
            for one in sums
        ],
        "bytes": [
            {
                "tag": row.tag, "op": row.op, "matches": row.matches, "at_most": row.at_most,
                "predicted": asdict(row.predicted) if row.predicted else None,
                "recorded": [asdict(amount) | {"ranks": of} for amount, of in row.recorded.items()],
            }
            for row in rows
        ],
    }  # fmt: skip


def _added(one: Amount, other: Amount) -> Amount:
    dtype = one.dtype if one.dtype == other.dtype else "+".join(sorted({*one.dtype.split("+"), other.dtype}))
    count, payload = one.count + other.count, one.payload_bytes + other.payload_bytes
    return Amount(dtype, count, payload, one.wire_bytes + other.wire_bytes)


def format_time(seconds: float) -> str:
    """0.0123 as "12.3 ms", 0.00032 as "320 µs", 1.5 as "1.50 s", 0 as "0"."""
    if not seconds:
        return "0"
    if abs(seconds) >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"
