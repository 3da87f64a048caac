"""Runs that are killed and go on, and what they leave: the same bits as a run that nothing interrupted, or not.

A life is one start of a run on some ranks, which ends at its last step or by a kill. Everything is on disk between lives.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pellucid.checkpoint.store import Checkpoint, checkpoints, open_checkpoint
from pellucid.config import RunConfig
from pellucid.errors import CheckpointError, ConfigError, PellucidError, RankError
from pellucid.parallel import comm
from pellucid.parallel.launch import launch
from pellucid.parallel.parts import SavedTensors
from pellucid.registry import load_plugins
from pellucid.train import Callback, Trainer
from pellucid.train.callbacks import BatchInfo
from pellucid.verify.certificate import bound
from pellucid.verify.measure import run_reference, train_to_the_end
from pellucid.verify.moments import Moment, Moments
from pellucid.verify.shrink import ROWS, TIMEOUT_S, generated_windows, shrink

STAYING_STEPS, MOVING_STEPS, SAVE_EVERY = 6, 4, 2
GRACE_S = 0.05
"""For the ranks that outlive one that was killed; what they are in the middle of then is cut off, too."""
STDERR = 2
DROPOUT = 0.1
"""Where the configuration has none: generators must be restored for anything to be equal."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run lives: a mode, and how many ranks."""

    mode: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.mode} x {self.ranks}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What all lives of a proof have in common."""

    config: RunConfig
    """Shrunk, with a global batch that every number of ranks can share."""
    max_ranks: int
    """The largest of these numbers; the data are made for it."""

    def at(self, place: Place, out: Path) -> RunConfig:
        """The configuration of a life."""
        return replace(
            self.config,
            parallel=replace(self.config.parallel, mode=place.mode),
            train=replace(self.config.train, out=str(out)),
        )


def plan_lives(config: RunConfig, max_ranks: int, *, stays: bool) -> Plan:
    """The lives of a user's configuration.

    Args:
        stays: all lives are on ``max_ranks`` ranks, and so dropout is on; it draws other numbers on other numbers of ranks.
            `STAYING_STEPS` are enough to be killed after the first checkpoint, also of one written in the background. Else
            the global batch is one that 1 to ``max_ranks`` ranks can share.
    """
    steps = STAYING_STEPS if stays else MOVING_STEPS
    small = shrink(config, max_ranks)
    dropout = (config.model.dropout or DROPOUT) if stays else 0.0
    batch = small.train.global_batch if stays else ROWS * math.lcm(*range(1, max_ranks + 1))
    train = replace(small.train, steps=steps, global_batch=batch, save_every=SAVE_EVERY, keep_last=0)
    return Plan(replace(small, model=replace(small.model, dropout=dropout), train=train), max_ranks)


def warm_up(plan: Plan) -> None:
    """A first step in this process: forked ranks inherit what it imports, which would cost each of them seconds."""
    run_reference(plan.config, "fp32", plan.max_ranks)


# -- a life -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """How a life ended that was not killed: with the moments of all its ranks."""

    moments: list[Moment]


def live(plan: Plan, place: Place, out: Path, kill: Moment | None = None) -> Ended | None:
    """Start or go on with the run in ``out``; None where it was killed.

    Raises:
        RankError: it failed in another way than by ``kill``.
        ConfigError: the mode refuses the configuration.
    """
    try:
        ranks = launch(
            _life, place.ranks, plan, place, out, kill,
            start_method="fork", backend="gloo", timeout_s=TIMEOUT_S, grace_s=GRACE_S,
        )  # fmt: skip
    except RankError as error:
        if kill is not None and error.error == "SIGKILL" and error.rank == kill.rank:
            if error.interrupted:  # the death was wanted, the signal is a person's
                raise KeyboardInterrupt from error
            return None
        if error.error == ConfigError.__name__:
            raise ConfigError(str(error)) from error
        raise
    return Ended([Moment(*facts) for moments in ranks for facts in moments])  # type: ignore[arg-type]


def _life(plan: Plan, place: Place, out: Path, kill: Moment | None) -> list[tuple[str, int, int, str]]:
    """On each rank."""
    torch.set_num_threads(1)
    load_plugins(plan.config.plugins)
    if kill is not None:  # torch's own code describes at length how it loses a rank
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
    moments = Moments(kill)
    with moments.watch():
        trainer = start(plan, place, out, [moments])
        train_to_the_end(trainer, resume=True)
    return [(moment.kind, moment.rank, moment.number, moment.what) for moment in moments.seen]


def start(plan: Plan, place: Place, out: Path, callbacks: list[Callback]) -> Trainer:
    """The Trainer of a life, which also writes down which samples it sees."""
    config = plan.at(place, out)
    windows = generated_windows(config, plan.max_ranks, steps=plan.config.train.steps or 0)
    return Trainer(config, callbacks=[Samples(out), *callbacks], train_data=windows)


class Samples(Callback):
    """Appends ``{"step", "ids"}`` to ``OUT/samples<rank>.jsonl`` at each micro-batch."""

    def __init__(self, out: Path) -> None:
        self.path = out / f"samples{comm.rank()}.jsonl"

    def on_batch_begin(self, trainer: Trainer, info: BatchInfo) -> None:
        ids = [i for i in info.batch.sample_ids.tolist() if i >= 0]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": info.step, "micro": info.micro, "ids": ids}) + "\n")


def samples(out: Path) -> dict[int, list[int]]:
    """The samples of each step of a run, of all ranks, sorted; those of a step that was done twice must be the same.

    Raises:
        CheckpointError: they are not.
    """
    seen: dict[tuple[int, int, int], list[int]] = {}
    for rank, path in enumerate(sorted(out.glob("samples*.jsonl"))):
        for line in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            key = (told["step"], rank, told["micro"])
            if seen.setdefault(key, told["ids"]) != told["ids"]:
                raise CheckpointError(f"step {told['step']} had samples {seen[key]} and later {told['ids']}")
    steps: dict[int, list[int]] = {}
    for (step, _, _), ids in seen.items():
        steps[step] = sorted(steps.get(step, []) + ids)
    return steps


# -- what it leaves -----------------------------------------------------------------------------------------

PARTS = ("weights", "moments", "rng", "cursor", "samples", "losses")
EXACT_ALWAYS = ("rng", "cursor", "samples")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What must not depend on interruptions, as hashes."""

    tensors: dict[str, dict[str, str]]
    """By part and name."""

    def part_hash(self, part: str) -> str:
        """One short hash of all that a part holds."""
        return hashlib.sha256(json.dumps(self.tensors[part], sort_keys=True).encode()).hexdigest()[:16]

    def first_difference(self, other: "Outcome", parts: tuple[str, ...] = PARTS) -> str:
        """The first thing in which two outcomes differ, with its part; "" where they are the same."""
        for part in parts:
            mine, theirs = self.tensors[part], other.tensors[part]
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    return f"{part} {name}"
        return ""


def outcome(plan: Plan, out: Path) -> Outcome:
    """That of a run that has ended.

    Raises:
        CheckpointError: it did not end as it should: its last checkpoint, its model or its log is not there, or something
            else is.
    """
    step = plan.config.train.steps or 0
    last = open_checkpoint(out / "checkpoints" / f"step_{step:08d}")
    if leftovers := sorted(path.name for path in out.rglob("*.tmp-*")):
        raise CheckpointError(f"{leftovers[0]} was left behind by a rank that was killed")
    if not (out / "model" / "model.safetensors").is_file():
        raise CheckpointError(f"{out / 'model'} is not there although the run has ended")
    logged = [
        record for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if (record := json.loads(line))["event"] == "step"
    ]  # fmt: skip
    if [record["step"] for record in logged] != list(range(1, step + 1)):
        raise CheckpointError(
            f"{out / 'metrics.jsonl'} has steps {[record['step'] for record in logged]}, not 1 to {step}"
        )
    cursor = last.state["cursor"] | {"tokens_seen": last.state["tokens_seen"]}
    return Outcome(
        {
            "weights": _hashes(last.model),
            "moments": _hashes(last.optimizer),
            "rng": _hashes(last.rng),
            "cursor": {key: str(value) for key, value in cursor.items()},
            "samples": {f"of step {s}": json.dumps(ids) for s, ids in samples(out).items()},
            "losses": {f"of step {record['step']}": repr(record["loss"]) for record in logged},
        }
    )


def keeps_bits(place: Place) -> bool:
    """Whether a resumed run has the bits of one that was not interrupted.

    torch's DDP moves tensors between buckets after the first step that it sees, and gloo adds up in an order that depends
    on the buckets from three ranks on: a life that begins in the middle has other last bits.
    """
    return place.mode != "torch_ddp" or place.ranks <= 2


def difference(plan: Plan, place: Place, whole: Path, expected: Outcome, out: Path) -> str:
    """The first thing that a run which was killed and resumed has not in common with one that was not, or "".

    Where bits cannot be kept, weights and moments must be within the certificate's bound.

    Args:
        whole: the run that was not, whose outcome is ``expected``.

    Raises:
        CheckpointError: as `outcome`.
    """
    got = outcome(plan, out)
    if keeps_bits(place):
        return expected.first_difference(got)
    if different := expected.first_difference(got, EXACT_ALWAYS):
        return different
    step = plan.config.train.steps or 0
    ours, theirs = checkpoint_at(out, step), checkpoint_at(whole, step)
    for part, mine, alone in (("weights", ours.model, theirs.model), ("moments", ours.optimizer, theirs.optimizer)):
        where, distance = farthest(mine, alone)
        if not distance <= bound(plan.config.model, "fp32"):
            return f"{part} {where}, {distance:.1e} away"
    return ""


def farthest(ours: SavedTensors, theirs: SavedTensors) -> tuple[str, float]:
    """The tensor farthest from its counterpart, and how far, relative to the norm of that."""
    distances: dict[str, float] = {}
    for name in theirs.keys():  # noqa: SIM118 - not a mapping
        expected = theirs.read(name).double()
        error, norm = float((ours.read(name).double() - expected).norm()), float(expected.norm())
        distances[name] = error / norm if norm else error
    where = max(distances, key=distances.__getitem__)
    return where, distances[where]


def checkpoint_at(out: Path, step: int) -> Checkpoint:
    """A run's checkpoint of a step."""
    return open_checkpoint(out / "checkpoints" / f"step_{step:08d}")


def saved_steps(out: Path) -> list[int]:
    """Steps of which a run has a checkpoint."""
    return [int(path.name[5:]) for path in checkpoints(out / "checkpoints")]


def _hashes(saved: SavedTensors) -> dict[str, str]:
    return {name: _hash(saved.read(name)) for name in saved.keys()}  # noqa: SIM118 - not a mapping


def _hash(tensor: Tensor) -> str:
    """Of its type and bytes."""
    data = tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor
    return hashlib.sha256(str(tensor.dtype).encode() + data.numpy().tobytes()).hexdigest()


def error_text(error: PellucidError) -> str:
    """The first line of what went wrong."""
    return str(error).splitlines()[0]
