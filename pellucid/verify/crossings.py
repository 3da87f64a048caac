"""Runs that go on elsewhere: from a checkpoint of one mode and number of ranks in another mode, on another number of ranks."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pellucid.errors import RankError
from pellucid.parallel import comm
from pellucid.parallel.launch import launch
from pellucid.parallel.parts import SavedTensors
from pellucid.registry import load_plugins
from pellucid.train import Callback, Trainer
from pellucid.verify.certificate import bound
from pellucid.verify.lives import SAVE_EVERY, Place, Plan, checkpoint_at, error_text, farthest, samples, start
from pellucid.verify.measure import train_to_the_end
from pellucid.verify.shrink import TIMEOUT_S

STRIDE = 5
"""Without ``everything``, a checkpoint goes to the place that stands so much further in the list of all."""


@dataclass(slots=True)
class Crossing:
    """A checkpoint of one place that a run goes on from in another."""

    source: Place
    target: Place
    distance: float = 0.0
    """Of the weights at the end, the worst tensor, relative to one process that nothing interrupted."""
    failure: str = ""


def cross(plan: Plan, places: list[Place], root: Path, *, everything: bool) -> list[Crossing]:
    """Every place makes a checkpoint; then runs go on from them, all of those on as many ranks in one process group.

    Args:
        places: that of one process first; all others are compared with it.
        root: a folder for the runs.
        everything: from each place to each; else each is left once and entered once.
    """
    pairs = [
        (source, target)
        for i, source in enumerate(places)
        for j, target in enumerate(places)
        if everything or (i + STRIDE) % len(places) == j
    ]
    sources = _make_all(plan, places, root)
    known = {pair: Crossing(*pair, failure=sources.get(pair[0]) or sources.get(places[0], "")) for pair in pairs}
    for size in sorted({target.ranks for _, target in pairs}):
        left = [pair for pair in pairs if pair[1].ranks == size and not known[pair].failure]
        while left:
            failure = _launch(_go_on, size, plan, left, root)
            untold = [pair for pair in left if not _told(root, *pair)]
            assert failure or not untold, f"{untold[0]} left no result"
            if untold:
                known[untold[0]].failure = failure
            for pair in left:
                if pair not in untold:
                    _compare(plan, known[pair], root / "from" / str(places[0]), root)
            left = untold[1:]
    return list(known.values())


def _make_all(plan: Plan, places: list[Place], root: Path) -> dict[Place, str]:
    """A whole run in each place, with its checkpoints; what went wrong for each, if something did."""
    wrong: dict[Place, str] = {}
    for size in sorted({place.ranks for place in places}):
        same_size = [place for place in places if place.ranks == size]
        failure = _launch(_make_sources, size, plan, same_size, root)
        if failure:
            wrong |= dict.fromkeys(same_size, failure)
    return wrong


def _launch(function: Callable[..., None], ranks: int, plan: Plan, work: list[Any], root: Path) -> str:
    """Do ``work`` on ranks; the first line of what went wrong, or nothing."""
    try:
        launch(function, ranks, plan, work, root, start_method="fork", backend="gloo", timeout_s=TIMEOUT_S)
    except RankError as error:
        return error_text(error)
    return ""


def _make_sources(plan: Plan, places: list[Place], root: Path) -> None:
    """On each rank: a whole run in each place, with its checkpoints."""
    torch.set_num_threads(1)
    load_plugins(plan.config.plugins)
    for place in places:
        train_to_the_end(start(plan, place, root / "from" / str(place), []), resume=True)


def _go_on(plan: Plan, pairs: list[tuple[Place, Place]], root: Path) -> None:
    """On each rank: go on from the sources' middle checkpoints."""
    torch.set_num_threads(1)
    load_plugins(plan.config.plugins)
    for source, target in pairs:
        out = _folder(root, source, target)
        if comm.rank() == 0:
            _borrow(root / "from" / str(source), out)
        comm.barrier(tag="verify/borrowed")
        loaded = _Loaded(checkpoint_at(out, SAVE_EVERY).optimizer)
        train_to_the_end(start(plan, target, out, [loaded]), resume=True)
        told = {"different": loaded.different, "held": loaded.held}
        (out / f"loaded{comm.rank()}.json").write_text(json.dumps(told), encoding="utf-8")


def _folder(root: Path, source: Place, target: Place) -> Path:
    return root / "to" / f"{source} to {target}"


def _told(root: Path, source: Place, target: Place) -> bool:
    return all((_folder(root, source, target) / f"loaded{rank}.json").exists() for rank in range(target.ranks))


def _borrow(source: Path, out: Path) -> None:
    """The middle checkpoint of a run as that of another one; checkpoints are never written to, so links will do."""
    name = f"checkpoints/step_{SAVE_EVERY:08d}"
    shutil.copytree(source / name, out / name, copy_function=os.link)


class _Loaded(Callback):
    """Compares this rank's part of the optimizer's state with the file, before the first step."""

    def __init__(self, saved: SavedTensors) -> None:
        self.saved = saved
        self.different: list[str] = []
        self.held: dict[str, list[tuple[int, int]]] = {}

    def on_train_begin(self, trainer: Trainer, info: Any) -> None:
        for part in trainer.setup.executor.optimizer_parts():
            expected = self.saved.read(part.name, part.start, part.stop)
            mine = part.tensor.detach().cpu().reshape(-1)
            if mine.dtype != expected.dtype or not torch.equal(mine, expected):
                self.different.append(part.name)
            self.held.setdefault(part.name, []).append((part.start, part.stop))


def _compare(plan: Plan, crossing: Crossing, alone: Path, root: Path) -> None:
    """Put into ``crossing`` what is wrong with it, first what was loaded, then samples, then weights at the end."""
    out = _folder(root, crossing.source, crossing.target)
    told = [json.loads((out / f"loaded{rank}.json").read_text()) for rank in range(crossing.target.ranks)]
    saved = checkpoint_at(out, SAVE_EVERY).optimizer
    different = sorted({name for rank in told for name in rank["different"]})
    for name in saved.keys():  # noqa: SIM118 - not a mapping
        spans = sorted(tuple(span) for rank in told for span in rank["held"].get(name, []))
        numel = saved.read(name).numel()
        if [start for start, _ in spans] != [0, *(stop for _, stop in spans[:-1])] or spans[-1][1] != numel:
            different.append(name)
    if different:
        crossing.failure = f"moments {different[0]} are not those of the checkpoint after loading"
        return
    expected, got = samples(alone), samples(out)
    for step in range(SAVE_EVERY + 1, (plan.config.train.steps or 0) + 1):
        if got.get(step) != expected[step]:
            crossing.failure = f"step {step} had samples {got.get(step)}, not {expected[step]}"
            return
    step = plan.config.train.steps or 0
    where, crossing.distance = farthest(checkpoint_at(out, step).model, checkpoint_at(alone, step).model)
    if not crossing.distance <= bound(plan.config.model, "fp32"):
        crossing.failure = f"{where} is {crossing.distance:.1e} away at the end"
