"""The record of every collective: what moved, how much of it, when, and what the rank computed meanwhile.

W ranks, N bytes of payload: the whole tensor that is reduced, gathered or broadcast, on one rank.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from pellucid.errors import StorageError

Phase = Literal["forward", "backward", "optimizer", "other"]


def wire_bytes(op: str, payload_bytes: int, world_size: int, rank: int = 0) -> int:
    """Bytes that one rank sends, by the algorithms that gloo and nccl use for large payloads.

    A ring for the reductions and gathers, each part straight to its rank for an all_to_all; a binomial tree for a
    broadcast and for a gather to rank 0, which the ranks do not share evenly: over all ranks it is (W - 1) N for a
    broadcast and (W - 1) / W N for a gather.
    """
    if world_size == 1:
        return 0
    if op == "all_reduce":
        return 2 * (world_size - 1) * payload_bytes // world_size
    if op in ("reduce_scatter", "all_gather", "all_to_all"):
        return (world_size - 1) * payload_bytes // world_size
    if op == "gather":
        return 0 if rank == 0 else payload_bytes // world_size
    if op == "broadcast":
        return payload_bytes * _tree_children(rank, world_size)
    assert op == "barrier", op
    return 0


def _tree_children(rank: int, world_size: int) -> int:
    """How many ranks a rank sends to when rank 0 broadcasts along gloo's binomial tree."""
    # rank r got it from r without its lowest bit 2^b, and hands it on to r + 2^k for each k < b
    lowest = (rank & -rank).bit_length() - 1 if rank else (world_size - 1).bit_length()
    return sum(1 for k in range(lowest) if rank + (1 << k) < world_size)


@dataclass(slots=True)
class CommEvent:
    """One collective on one rank. Times are seconds since the step began."""

    step: int
    """The step that was under way, from 1; 0 before the first."""
    micro: int
    """The micro-batch of the step, from 0."""
    op: str
    tag: str
    group: str
    dtype: str
    numel: int
    payload_bytes: int
    wire_bytes: int
    """Bytes that this rank sends, computed by `wire_bytes`."""
    owner: tuple[str, ...]
    """Names of the parameters inside."""
    phase: Phase
    t_issue: float
    t_wait: float = 0.0
    """When this rank first stood still for it."""
    t_done: float = 0.0


@dataclass(slots=True)
class Span:
    """Computation of one rank between two points of a step, in seconds since it began."""

    step: int
    micro: int
    phase: Phase
    t_begin: float
    t_end: float


@dataclass(slots=True)
class CommLedger:
    """Collectives and computation of this rank, in the order in which they began."""

    events: list[CommEvent] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def clear(self) -> None:
        """Forget everything."""
        self.events.clear()
        self.spans.clear()

    def ops(self) -> list[str]:
        """``"all_reduce:grad/bucket0"`` and so on."""
        return [f"{event.op}:{event.tag}" for event in self.events]

    def payload_bytes(self, prefix: str = "") -> int:
        """Payload of the collectives whose tag begins with ``prefix``."""
        return sum(event.payload_bytes for event in self.events if event.tag.startswith(prefix))

    def wire_bytes(self, prefix: str = "") -> int:
        """Bytes sent by the collectives whose tag begins with ``prefix``."""
        return sum(event.wire_bytes for event in self.events if event.tag.startswith(prefix))


@dataclass(slots=True)
class Clock:
    """Where in a step this rank is, and since when."""

    step: int = 0
    micro: int = 0
    phase: Phase = "other"
    began: float = field(default_factory=time.perf_counter)
    phase_began: float = 0.0

    def now(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.began

    def begin_step(self, step: int) -> None:
        """``step`` is under way from now on."""
        self.step, self.micro, self.phase, self.began = step, 0, "other", time.perf_counter()

    def enter(self, phase: Phase, ledger: CommLedger | None) -> None:
        """End the phase under way, noting it if it was one of computation, and begin ``phase``."""
        now = self.now()
        if ledger is not None and self.phase != "other":
            ledger.spans.append(Span(self.step, self.micro, self.phase, self.phase_began, now))
        self.phase, self.phase_began = phase, now


class LedgerFiles:
    """``ledger/rank00000.jsonl`` and ``ledger/phases00000.jsonl`` of one rank, a line a collective and a span.

    Args:
        folder: the run's ``ledger/``, made if it is not there.
        after: keep what earlier lines say up to this step; a resumed run cuts the rest away.
    """

    def __init__(self, folder: Path, rank: int, *, after: int) -> None:
        with _storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._events = _open_after(folder / f"rank{rank:05d}.jsonl", after)
            self._spans = _open_after(folder / f"phases{rank:05d}.jsonl", after)
        self._folder = folder

    def write(self, ledger: CommLedger) -> None:
        """Append what ``ledger`` holds, and empty it; `StorageError` where the disk refuses."""
        with _storage_errors(self._folder):
            self._events.write("".join(_line(asdict(event)) for event in ledger.events))
            self._spans.write("".join(_line(asdict(span)) for span in ledger.spans))
            self._events.flush()
            self._spans.flush()
        ledger.clear()

    def close(self) -> None:
        """No more lines. What a full disk refused before is lost, and was told then."""
        for file in (self._events, self._spans):
            with suppress(OSError):
                file.close()


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {folder}: {error.strerror or error}; make room, or set parallel.ledger = false"
        ) from error


def _line(record: dict[str, Any]) -> str:
    rounded = {key: round(value, 7) if isinstance(value, float) else value for key, value in record.items()}
    return json.dumps(rounded) + "\n"


def _open_after(path: Path, after: int) -> TextIO:
    """The file, open for appending, without the lines of later steps and without a torn last one."""
    keep = 0
    if path.exists():
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n") or _step_of(line) > after:
                    break
                keep += len(line)
        with open(path, "r+b") as file:
            file.truncate(keep)
    return open(path, "a", encoding="utf-8")


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return float("inf")  # damaged: it and all after it are cut away
