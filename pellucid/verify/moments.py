"""The moments of a run at which a rank can be killed: file operations, collectives, optimizer steps. They can be listed, too."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pellucid.checkpoint import files
from pellucid.errors import ConfigError
from pellucid.parallel import comm
from pellucid.train import Callback
from pellucid.train.callbacks import StepInfo

Kind = Literal["file", "collective", "step"]


@dataclass(frozen=True, slots=True)
class Moment:
    """The ``number``-th event of a kind in the life of a rank, counted from 1; of "step", 2 n - 1 and 2 n are before and after
    the update of step n, in whichever life."""

    kind: Kind
    rank: int
    number: int
    what: str = field(default="", compare=False)
    """What happens then, for a person."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Moment":
        """From what `str` gives."""
        kind, _, rest = text.partition(":")
        rank, _, number = rest.partition(":")
        if kind not in get_args(Kind) or not rank.isdigit() or not number.isdigit():
            raise ConfigError(f"{text!r} is no moment of a run; write KIND:RANK:NUMBER, such as file:0:12")
        return cls(kind, int(rank), int(number))  # type: ignore[arg-type]


class Moments(Callback):
    """Counts the events of this rank; kills it, by SIGKILL, at one of them. A callback of the run that it is to see.

    Args:
        kill: when; None lets the run live.
    """

    def __init__(self, kill: Moment | None = None) -> None:
        self.kill = kill
        self.seen: list[Moment] = []
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()  # files are also written by a thread

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around the life of the run."""
        files.before_operation = lambda name, path: self._note("file", f"before {name} {_short(path)}")
        files.after_operation = lambda name, path: self._note("file", f"after {name} {_short(path)}")
        comm.before_collective = lambda op, tag: self._note("collective", f"at {op} {tag}")
        try:
            yield
        finally:
            files.before_operation = files.after_operation = comm.before_collective = None

    def on_before_step(self, trainer: Any, info: StepInfo) -> None:
        self._note("step", f"before the update of step {info.step}", 2 * info.step - 1)

    def on_optimizer_step(self, trainer: Any, info: StepInfo) -> None:
        self._note("step", f"after the update of step {info.step}", 2 * info.step)

    def _note(self, kind: Kind, what: str, number: int | None = None) -> None:
        with self._lock:
            if number is None:
                number = self._counts[kind] = self._counts.get(kind, 0) + 1
            moment = Moment(kind, comm.rank(), number, what)
            if moment == self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen.append(moment)


def _short(path: Path) -> str:
    return re.sub(r"\.tmp-\d+", ".tmp", "/".join(path.parts[-2:]))
