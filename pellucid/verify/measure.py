"""What is compared, collected from inside the Trainer's own loop: on one process whole, on ranks as distances from that."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pellucid.config import RunConfig
from pellucid.data.batches import Windows
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.parallel.ledger import CommEvent, CommLedger
from pellucid.parallel.parts import Part
from pellucid.parallel.plan import PlannedCollective, modes
from pellucid.train import Callback, Trainer
from pellucid.train.callbacks import StepInfo
from pellucid.train.setup import plan_mode
from pellucid.verify.shrink import generated_windows, one_process

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(slots=True)
class Reference:
    """A run of one process. Gradients are those that the optimizer sees: summed, divided and clipped."""

    dtype: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of all gradients together, before clipping, by step."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """By step and parameter."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a rank's part of a tensor is from that of one process."""

    start: int
    stop: int
    squared_error: float
    squared_norm: float
    """Of the rank's own part."""


@dataclass(slots=True)
class RankResult:
    """What one rank has to say of a run of one mode."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, list[Distance]]] = field(default_factory=list)
    """By step and parameter."""
    weights: dict[str, Distance] = field(default_factory=dict)
    bytes_wrong: list[str] | None = None
    """Where the ledger is not what was planned, step by step; None: the mode has no plan."""


class ModeRefusedError(Exception):
    """A mode cannot run a configuration, which is no fault of either."""


def run_reference(config: RunConfig, dtype: str, ranks: int) -> Reference:
    """Train a shrunk configuration on this process.

    Args:
        dtype: "fp64" or "fp32", of weights and everything computed with them.
        ranks: whose data it is.
    """
    reference, threads = Reference(dtype), torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have, and as ordered reductions demand
    try:
        trainer = _trainer(one_process(config), dtype, generated_windows(config, ranks), _OneProcess(reference))
        reference.initial = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        train_to_the_end(trainer)
    finally:
        torch.set_num_threads(threads)
    reference.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return reference


def train_to_the_end(trainer: Trainer, *, resume: bool = False) -> None:
    """A run that a signal ends early would save and be content; a proof must not take it for a whole one.

    Raises:
        KeyboardInterrupt: a signal came.
    """
    trainer.train(resume=resume)
    if trainer.stop_reason is not None:
        raise KeyboardInterrupt


def run_mode(config: RunConfig, mode: str, reference: Reference) -> RankResult:
    """Train a shrunk configuration in a mode, on each rank; collective.

    The ranks begin with different weights, so that what makes them equal is part of what is compared.

    Raises:
        ModeRefusedError: the mode cannot run here, as it says before the first step.
    """
    config = replace(config, parallel=replace(config.parallel, mode=mode))
    result = RankResult()
    windows = generated_windows(config, comm.world_size())
    try:
        trainer = _trainer(config, reference.dtype, windows, _OneRank(reference, result))
    except ConfigError as error:
        raise ModeRefusedError(str(error)) from error
    ledger = _KeptLedger()
    with comm.record(ledger):
        train_to_the_end(trainer)
    for name, weight in trainer.setup.executor.weights():
        if weight is not None:
            shape = tuple(weight.shape)
            result.weights[name] = _distance(Part(name, shape, 0, weight.detach()), reference.weights[name])
    result.bytes_wrong = _compare_bytes(trainer, mode, ledger)
    return result


def _trainer(config: RunConfig, dtype: str, windows: Windows, callback: Callback) -> Trainer:
    generator = torch.Generator().manual_seed(config.train.seed + comm.rank())
    model = Transformer(config.model, generator=generator).to(DTYPES[dtype])
    return Trainer(config, model=model, callbacks=[callback], train_data=windows)


class _OneProcess(Callback):
    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    def on_before_step(self, trainer: Trainer, info: StepInfo) -> None:
        self.reference.losses.append(info.loss)
        self.reference.norms.append(info.grad_norm)
        own = {part.name: part.tensor.clone() for part in trainer.setup.executor.gradients()}
        self.reference.gradients.append(own)


class _OneRank(Callback):
    def __init__(self, reference: Reference, result: RankResult) -> None:
        self.reference, self.result = reference, result

    def on_before_step(self, trainer: Trainer, info: StepInfo) -> None:
        self.result.losses.append(info.loss)
        self.result.norms.append(info.grad_norm)
        expected = self.reference.gradients[info.step - 1]
        own: dict[str, list[Distance]] = {}
        for part in trainer.setup.executor.gradients():
            own.setdefault(part.name, []).append(_distance(part, expected[part.name]))
        self.result.gradients.append(own)


def _distance(part: Part, expected: Tensor) -> Distance:
    """Computed in float64, whatever was compared."""
    assert part.shape == tuple(expected.shape), f"{part.name} has shape {part.shape}, not {tuple(expected.shape)}"
    mine = part.tensor.reshape(-1).double()
    error = mine - expected.reshape(-1)[part.start : part.stop].double()
    return Distance(part.start, part.stop, float(error.square().sum()), float(mine.square().sum()))


class _KeptLedger(CommLedger):
    """Keeps what the loop would drop after each step."""

    def clear(self) -> None: ...


def _compare_bytes(trainer: Trainer, mode: str, ledger: CommLedger) -> list[str] | None:
    """Rank 0's ledger beside its plan; the others have nothing to add."""
    if mode not in modes():
        return None
    if comm.rank() != 0:
        return []
    setup = trainer.setup
    executor = setup.executor
    predicted = plan_mode(
        setup.config, executor.infos, mode, world_size=comm.world_size(), micro_batches=executor.grad_accum_steps
    )
    wrong: list[str] = []
    for step in range(1, trainer.state.step + 1):
        events = [event for event in ledger.events if event.step == step]
        wrong += [f"step {step}: {text}" for text in _differences(events, predicted.step)]
    return wrong


def _differences(events: list[CommEvent], planned: tuple[PlannedCollective, ...]) -> list[str]:
    wrong, left = [], list(events)
    by_tag: dict[str, list[PlannedCollective]] = {}
    for row in planned:
        by_tag.setdefault(row.tag, []).append(row)
    for tag, rows in by_tag.items():
        exact = [event for event in left if event.tag == tag]
        own = exact or [event for event in left if event.tag.startswith(f"{tag}/")]  # torch cuts buckets itself
        left = [event for event in left if event not in own]
        count = len(own) if exact else sum(row.count for row in rows)
        did, should = _totals(own, count), _totals(rows, sum(row.count for row in rows))
        if not exact and abs(did["wire_bytes"] - should["wire_bytes"]) < len(own):
            did["wire_bytes"] = should["wire_bytes"]  # each is rounded down by itself
        wrong += [f"{tag}: {key} {did[key]}, planned {should[key]}" for key in did if did[key] != should[key]]
    return wrong + [f"{event.tag}: {event.op} of {event.payload_bytes:,} bytes was not planned" for event in left]


def _totals(moved: Sequence[CommEvent | PlannedCollective], count: int) -> dict[str, Any]:
    return {
        "op": "/".join(sorted({one.op for one in moved})),
        "dtype": "/".join(sorted({one.dtype for one in moved})),
        "payload_bytes": sum(one.payload_bytes for one in moved),
        "wire_bytes": sum(one.wire_bytes for one in moved),
        "count": count,
    }
