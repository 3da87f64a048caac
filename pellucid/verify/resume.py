"""The resume proof: a run that is killed and goes on has the bits of one that was not, and goes on anywhere else too."""

import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from pellucid.config import RunConfig
from pellucid.errors import CheckpointError, ConfigError, PellucidError
from pellucid.registry import names
from pellucid.verify.certificate import bound, plain
from pellucid.verify.crossings import Crossing, cross
from pellucid.verify.lives import (
    PARTS,
    STAYING_STEPS,
    Ended,
    Place,
    Plan,
    difference,
    error_text,
    keeps_bits,
    live,
    outcome,
    plan_lives,
    saved_steps,
    warm_up,
)
from pellucid.verify.moments import Moment


@dataclass(slots=True)
class SamePlace:
    """A run that was killed, twice, and resumed in the same mode on as many ranks."""

    place: Place
    kills: list[Moment] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    """Of what the unbroken run left, by part: weights, moments, rng, cursor, samples, losses."""
    resumed_from: int = 0
    """The step of the checkpoint that the last life went on from."""
    failure: str = ""
    """The first thing that differs (see `difference`), or what went wrong."""
    skipped: str = ""

    def lines(self) -> str:
        """As `pellucid verify --resume` prints it: the hashes and the verdict, then how it was killed."""
        if self.skipped:
            return f"{self.place}  cannot run here: {self.skipped}"
        killed = " and ".join(f"{moment.what} (rank {moment.rank})" for moment in self.kills)
        hashes = "  ".join(f"{part} {self.hashes[part][:8]}" for part in PARTS if part in self.hashes)
        equal = "same bits" if keeps_bits(self.place) else "same within the bound"
        verdict = f"FAIL: {self.failure}" if self.failure else equal
        told = f"\n    killed {killed}, resumed from step {self.resumed_from}" if self.kills else ""
        return f"{self.place}  {hashes}  {verdict}{told}"


@dataclass(slots=True)
class ResumeProof:
    """What was tried, and what came of it."""

    same: list[SamePlace]
    crossings: list[Crossing]
    places: list[Place]
    bound: float

    @property
    def num_proved(self) -> int:
        """Runs that went on as they should."""
        return sum(not one.failure for one in self._tried())

    @property
    def passed(self) -> bool:
        """All of them, and there were some."""
        return 0 < self.num_proved == len(self._tried())

    def last_line(self) -> str:
        """The verdict, which scripts may rely on."""
        return f"resumed: {self.num_proved} of {len(self._tried())}"

    def failures(self) -> list[str]:
        """A line each."""
        return [
            f"FAILED: {one.place if isinstance(one, SamePlace) else f'{one.source} to {one.target}'}: {one.failure}"
            for one in self._tried()
            if one.failure
        ]

    def _tried(self) -> "list[SamePlace | Crossing]":
        return [*(one for one in self.same if not one.skipped), *self.crossings]

    def table(self) -> list[list[str]]:
        """From each place (rows) to each mode (columns), a sign for each of its numbers of ranks.

        "+" went on as it should, "X" did not, "." was not tried.
        """
        modes = list(dict.fromkeys(place.mode for place in self.places))
        found = {(one.source, one.target): "X" if one.failure else "+" for one in self.crossings}
        rows = [["from", *modes]]
        for source in self.places:
            cells = []
            for mode in modes:
                targets = [place for place in self.places if place.mode == mode]
                cells.append("".join(found.get((source, target), ".") for target in targets))
            rows.append([str(source), *cells])
        return rows

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "passed": self.passed,
            "proved": self.num_proved,
            "tried": len(self._tried()),
            "bound": self.bound,
            "same": [
                {
                    "mode": one.place.mode, "ranks": one.place.ranks, "hashes": one.hashes, "failure": one.failure,
                    "resumed_from": one.resumed_from,
                    "skipped": one.skipped,
                    "kills": [{"moment": str(kill), "what": kill.what} for kill in one.kills],
                }
                for one in self.same
            ],
            "crossings": [
                {
                    "from": {"mode": one.source.mode, "ranks": one.source.ranks},
                    "to": {"mode": one.target.mode, "ranks": one.target.ranks},
                    "distance": plain(one.distance),
                    "failure": one.failure,
                }
                for one in self.crossings
            ],
            "table": self.table(),
        }  # fmt: skip


def verify_resume(
    config: RunConfig,
    max_ranks: int,
    *,
    modes: Sequence[str] | None = None,
    everything: bool = False,
    seed: int = 0,
    report: Callable[[SamePlace], None] = lambda same: None,
) -> ResumeProof:
    """Kill runs of the shrunk configuration and go on with them, where they were and elsewhere.

    In the same place: with dropout, killed once at a moment that ``seed`` draws and once between two steps. Elsewhere:
    without dropout, from a checkpoint of each place (a mode and 1, 2 or ``max_ranks`` ranks).

    Args:
        modes: registered names beside ``none``; None: all.
        everything: from each place to each place, and the same place on every number of ranks, not a selection.
        report: called with each run that stayed in its place.

    Raises:
        ConfigError: fewer than two ranks.
    """
    if max_ranks < 2:
        raise ConfigError(f"--nproc must be at least 2 to resume on other numbers of ranks, got {max_ranks}")
    chosen = [mode for mode in names("mode") if mode != "none"] if modes is None else list(modes)
    with tempfile.TemporaryDirectory(prefix="pellucid-resume-") as folder:
        root = Path(folder)
        plan = plan_lives(config, max_ranks, stays=False)
        warm_up(plan)
        same = []
        sizes = range(2, max_ranks + 1) if everything else (2,)
        for place in [Place("none", 1), *(Place(mode, size) for mode in chosen for size in sizes)]:
            same.append(_stay(plan_lives(config, place.ranks, stays=True), place, root / f"same {place}", seed))
            report(same[-1])
        refusing = {one.place.mode for one in same if one.skipped}
        crossed = range(2, max_ranks + 1) if everything else sorted({2, max_ranks})
        places = [Place("none", 1), *(Place(m, size) for m in chosen if m not in refusing for size in crossed)]
        crossings = cross(plan, places, root, everything=everything)
    return ResumeProof(same, crossings, places, bound(plan.config.model, "fp32"))


# -- in the same place --------------------------------------------------------------------------------------


def _stay(plan: Plan, place: Place, root: Path, seed: int) -> SamePlace:
    result = SamePlace(place)
    try:
        whole = live(plan, place, root / "whole")
    except ConfigError as error:
        result.skipped = str(error)
        return result
    except PellucidError as error:
        result.failure = error_text(error)
        return result
    assert whole is not None
    try:
        expected = outcome(plan, root / "whole")
        result.hashes = {part: expected.part_hash(part) for part in PARTS}
        result.kills = _draw(whole, place, seed)
        for kill in result.kills:
            if live(plan, place, root / "killed", kill) is not None:
                raise CheckpointError(f"the run ended before it could be killed {kill.what}")
        result.resumed_from = saved_steps(root / "killed")[-1]
        live(plan, place, root / "killed")
        result.failure = difference(plan, place, root / "whole", expected, root / "killed")
    except PellucidError as error:  # a refusal, too: what began there must go on there
        result.failure = error_text(error)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return result


def _draw(whole: Ended, place: Place, seed: int) -> list[Moment]:
    """Any moment of the run before its last update but one, then between that and the last: there is a checkpoint by then."""
    draw = random.Random(f"{seed} {place}")
    rank, between = draw.randrange(place.ranks), 2 * (STAYING_STEPS - 1)
    mine = [moment for moment in whole.moments if moment.rank == rank]
    early = list(takewhile(lambda moment: moment.kind != "step" or moment.number < between - 1, mine))
    rank = draw.randrange(place.ranks)
    (last,) = (one for one in whole.moments if (one.kind, one.rank, one.number) == ("step", rank, between))
    return [draw.choice([moment for moment in early if moment.kind != "step"]), last]
