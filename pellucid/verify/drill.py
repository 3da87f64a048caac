"""Drills: a rank is killed at one moment after the other, and each time the run goes on to the bits that it would have had."""

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pellucid.config import RunConfig
from pellucid.errors import ConfigError, PellucidError
from pellucid.verify.lives import Outcome, Place, Plan, difference, error_text, live, outcome, plan_lives, warm_up
from pellucid.verify.moments import Moment

KINDS = ("file", "collective", "step")
DEFAULT_MODE = "zero1"
"""Where the configuration's own is none: a mode in which every rank writes a part of each checkpoint."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kill, and what became of the run."""

    kill: Moment
    failure: str = ""
    """What the resumed run did not recover; "": it ended with the bits of the unbroken one."""


@dataclass(slots=True)
class Drill:
    """The cases that were tried, of all that there are."""

    place: Place
    num_moments: dict[str, int]
    """By kind, those of a whole run."""
    cases: list[Case] = field(default_factory=list)

    @property
    def num_recovered(self) -> int:
        """Cases that ended with the same bits."""
        return sum(not case.failure for case in self.cases)

    @property
    def passed(self) -> bool:
        """All, and there were some."""
        return 0 < self.num_recovered == len(self.cases)

    def lines(self) -> list[str]:
        """A line a kind, a line a failure, and the verdict, which scripts may rely on."""
        lines = []
        for kind, total in self.num_moments.items():
            own = [case for case in self.cases if case.kill.kind == kind]
            recovered = sum(not case.failure for case in own)
            lines.append(f"{kind}  {recovered} of {len(own)} recovered  ({total} moments in a run)")
        for case in self.cases:
            if case.failure:
                lines.append(
                    f"FAILED: killed {case.kill.what} (rank {case.kill.rank}, --case {case.kill}): {case.failure}"
                )
        return [*lines, f"{self.num_recovered} of {len(self.cases)} recovered"]

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "passed": self.passed,
            "mode": self.place.mode,
            "ranks": self.place.ranks,
            "recovered": self.num_recovered,
            "tried": len(self.cases),
            "moments": self.num_moments,
            "cases": [
                {"case": str(case.kill), "what": case.kill.what, "rank": case.kill.rank, "failure": case.failure}
                for case in self.cases
            ],
        }


def drill(
    config: RunConfig,
    ranks: int,
    *,
    max_seconds: float | None = None,
    sample: int | None = None,
    seed: int = 0,
    only: Moment | None = None,
    report: Callable[[Case], None] = lambda case: None,
) -> Drill:
    """Run the shrunk configuration once unbroken, then once for each kill, and compare.

    Args:
        config: drilled in its own mode, `DEFAULT_MODE` if that is none.
        max_seconds: begin no case later than this; kinds take turns, so that each has its share.
        sample: cases of each kind at most, drawn with ``seed``; None: all moments, in an order drawn with ``seed``.
        only: this moment alone.
        report: called with each case.

    Raises:
        ConfigError: fewer than two ranks, the mode refuses the configuration, or there is no such moment.
    """
    if ranks < 2:
        raise ConfigError(f"--nproc must be at least 2, so that others outlive a killed rank, got {ranks}")
    began = time.monotonic()
    place = Place(DEFAULT_MODE if config.parallel.mode == "none" else config.parallel.mode, ranks)
    plan = plan_lives(config, ranks, stays=True)
    warm_up(plan)
    with tempfile.TemporaryDirectory(prefix="pellucid-drill-") as folder:
        root = Path(folder)
        whole = live(plan, place, root / "whole")
        assert whole is not None
        expected = outcome(plan, root / "whole")
        by_kind = {kind: [moment for moment in whole.moments if moment.kind == kind] for kind in KINDS}
        result = Drill(place, {kind: len(moments) for kind, moments in by_kind.items()})
        for kill in _chosen(by_kind, sample, seed, only):
            if max_seconds is not None and result.cases and time.monotonic() - began > max_seconds:
                break
            result.cases.append(Case(kill, _recover(plan, place, root, kill, expected)))
            report(result.cases[-1])
    return result


def _chosen(by_kind: dict[str, list[Moment]], sample: int | None, seed: int, only: Moment | None) -> list[Moment]:
    """The kinds in turn, each in an order of its own."""
    if only is not None:
        found = next((moment for moment in by_kind[only.kind] if moment == only), None)
        if found is None:
            counts = ", ".join(f"{kind} {len(moments)}" for kind, moments in by_kind.items())
            raise ConfigError(f"--case {only}: this run has no such moment; it has {counts} on all ranks together")
        return [found]
    draw = random.Random(seed)
    queues = [
        draw.sample(moments, len(moments) if sample is None else min(sample, len(moments)))
        for moments in by_kind.values()
    ]
    return [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]


def _recover(plan: Plan, place: Place, root: Path, kill: Moment, expected: Outcome) -> str:
    out = root / "run"
    try:
        if live(plan, place, out, kill) is not None:
            return "the run ended without coming to this moment"
        live(plan, place, out)
        different = difference(plan, place, root / "whole", expected, out)
        return f"{different} is not what it is without the kill" if different else ""
    except PellucidError as error:
        return error_text(error)
    finally:
        shutil.rmtree(out, ignore_errors=True)
