"""The ledger files of a run, a step at a time.

Steps never fall from one line to the next, also after a resume, so a step is found by bisection: a long run costs no
more than a short one, in time or in memory.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pellucid.errors import DataError

T = TypeVar("T")

BESIDE_TRAINING = ("init", "validation", "save", "check")
"""First parts of the tags that an ordinary step of training does not have."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One line of rank?????.jsonl. Times are seconds since the step began on that rank."""

    micro: int
    op: str
    tag: str
    group: str
    dtype: str
    numel: int
    payload_bytes: int
    wire_bytes: int
    owner: tuple[str, ...]
    phase: str
    t_issue: float
    t_wait: float
    t_done: float

    @property
    def finished(self) -> bool:
        """Whether anybody waited for it in its own step; what nobody waited for has no end."""
        return self.t_done >= self.t_issue

    @property
    def life(self) -> tuple[float, float]:
        """From issue to done."""
        return self.t_issue, max(self.t_issue, self.t_done)

    @property
    def exposed(self) -> tuple[float, float]:
        """The part of its life in which the rank stood still for it; empty where it was done before."""
        begin, end = self.life
        return min(max(self.t_wait, begin), end), end

    @property
    def beside_training(self) -> bool:
        """Whether it belongs to a start, a validation, a save or a check, which no ordinary step has."""
        return self.tag.split("/")[0] in BESIDE_TRAINING


@dataclass(frozen=True, slots=True)
class Span:
    """One line of phases?????.jsonl: what the rank computed from begin to end, in seconds since the step began."""

    micro: int
    phase: str
    t_begin: float
    t_end: float


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank recorded of one step, in the order of the files."""

    rank: int
    step: int
    collectives: tuple[Collective, ...]
    spans: tuple[Span, ...]

    @property
    def begin(self) -> float:
        """0, but before the first step the first thing that happened: nothing says when "before" began."""
        return 0.0 if self.step else min((begin for begin, _ in self._intervals()), default=0.0)

    @property
    def end(self) -> float:
        """When the last thing was over."""
        return max((end for _, end in self._intervals()), default=0.0)

    @property
    def ordinary(self) -> bool:
        """Whether it trained and did nothing else."""
        return self.step > 0 and not any(event.beside_training for event in self.collectives)

    def _intervals(self) -> Iterator[tuple[float, float]]:
        yield from (event.life for event in self.collectives)
        yield from ((span.t_begin, span.t_end) for span in self.spans)


class LedgerFile:
    """One JSON object a line with a "step" that never falls; an absent file has no lines, a torn last one is none.

    Raises:
        DataError: a line that is looked at is damaged; names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = open(path, "rb") if path.is_file() else io.BytesIO()  # noqa: SIM115 - held until close
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        self._size = self._file.seek(0, io.SEEK_END)

    def close(self) -> None:
        """No more reading."""
        self._file.close()

    @property
    def torn(self) -> bool:
        """Whether the last line is still being written, or never was to its end."""
        if not self._size:
            return False
        self._file.seek(self._size - 1)
        return self._file.read(1) != b"\n"

    def find(self, step: float) -> tuple[int, int | None]:
        """Where the first line with ``step`` or a later one begins, and the step of the line before it, if any."""
        low, high, found, before = 0, self._size, self._size, None
        while low < high:
            middle = (low + high) // 2
            start, line = self._line_from(middle)
            if start >= high or not line.endswith(b"\n"):
                high = middle  # no whole line begins in the upper half
                continue
            here = int(self._parsed(start, line)["step"])
            if here < step:
                # the last line seen on this side is the one right before what is found
                low, before = start + len(line), here
            else:
                found, high = start, middle
        return found, before

    def first_step(self) -> int | None:
        """The step of the first line."""
        line = self._line_from(0)[1]
        return int(self._parsed(0, line)["step"]) if line.endswith(b"\n") else None

    def steps_back(self) -> Iterator[int]:
        """The recorded steps, last first."""
        step = self.find(math.inf)[1]
        while step is not None:
            yield step
            step = self.find(step)[1]

    def read(self, step: int, build: Callable[[dict[str, Any]], T]) -> tuple[T, ...]:
        """What ``build`` makes of each line of a step; it may raise `ValueError` for one that is damaged."""
        start = self.find(step)[0]
        built = []
        while (line := self._line_from(start)[1]).endswith(b"\n"):
            record = self._parsed(start, line)
            if record["step"] != step:
                break
            try:
                built.append(build(record))
            except ValueError as error:
                raise self._damaged(start, str(error)) from None
            start += len(line)
        return tuple(built)

    def _line_from(self, offset: int) -> tuple[int, bytes]:
        """The first line that begins at ``offset`` or behind it, and where."""
        self._file.seek(max(0, offset - 1))
        if offset:
            self._file.readline()
        return self._file.tell(), self._file.readline()

    def _parsed(self, start: int, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise self._damaged(start, "no JSON") from None
        if not isinstance(record, dict):
            raise self._damaged(start, "no JSON object")
        try:
            _whole(record, "step")
        except ValueError as error:
            raise self._damaged(start, str(error)) from None
        return record

    def _damaged(self, start: int, why: str) -> DataError:
        self._file.seek(0)
        number, left = 1, start
        while left > 0 and (block := self._file.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
        return DataError(f"{self.path}:{number} is damaged ({why}); remove that line or look at another --step")


class RankFiles:
    """The two files of one rank, for as long as the context is open."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._events = LedgerFile(folder / f"rank{rank:05d}.jsonl")
        self._spans = LedgerFile(folder / f"phases{rank:05d}.jsonl")

    def __enter__(self) -> "RankFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()
        self._spans.close()

    def read(self, step: int) -> RankStep:
        """What the rank recorded of a step, perhaps nothing."""
        return RankStep(self.rank, step, self._events.read(step, _collective), self._spans.read(step, _span))

    def recorded(self) -> tuple[int, int] | None:
        """First and last recorded step; None if there is no line."""
        files = (self._events, self._spans)
        first = [step for step in (file.first_step() for file in files) if step is not None]
        last = [step for step in (next(file.steps_back(), None) for file in files) if step is not None]
        return (min(first), max(last)) if first else None

    def whole_steps_back(self) -> Iterator[int]:
        """The steps that are recorded to their end, last first."""
        file = self._events if self._events.first_step() is not None else self._spans
        steps = file.steps_back()
        if self._events.torn or self._spans.torn:
            next(steps, None)
        return steps


def find_ranks(folder: Path) -> list[int]:
    """The ranks that have a file in a ledger folder, in order."""
    names = (re.fullmatch(r"(?:rank|phases)(\d{5,})\.jsonl", path.name) for path in folder.iterdir())
    return sorted({int(name[1]) for name in names if name})


def _collective(record: dict[str, Any]) -> Collective:
    owner = record.get("owner")
    if not isinstance(owner, list) or not all(isinstance(name, str) for name in owner):
        raise ValueError('"owner" is no list of names')
    return Collective(
        micro=_whole(record, "micro"), op=_text(record, "op"), tag=_text(record, "tag"), group=_text(record, "group"),
        dtype=_text(record, "dtype"), numel=_whole(record, "numel"), payload_bytes=_whole(record, "payload_bytes"),
        wire_bytes=_whole(record, "wire_bytes"), owner=tuple(owner), phase=_text(record, "phase"),
        t_issue=_number(record, "t_issue"), t_wait=_number(record, "t_wait"), t_done=_number(record, "t_done"),
    )  # fmt: skip


def _span(record: dict[str, Any]) -> Span:
    begin, end = _number(record, "t_begin"), _number(record, "t_end")
    return Span(_whole(record, "micro"), _text(record, "phase"), begin, max(begin, end))


def _text(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f'"{key}" is no text')
    return value


def _whole(record: dict[str, Any], key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f'"{key}" is no whole number')
    return value


def _number(record: dict[str, Any], key: str) -> float:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f'"{key}" is no number')
    return float(value)
