"""The certificate: every parallel mode computes what one process computes, as exactly as its number type allows."""

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from pellucid.config import ModelConfig, RunConfig
from pellucid.errors import ConfigError, PellucidError, RankError
from pellucid.model.moe import BALANCING_BIAS
from pellucid.parallel import comm
from pellucid.parallel.launch import launch
from pellucid.registry import load_plugins, names
from pellucid.verify.measure import (
    DTYPES,
    Distance,
    ModeRefusedError,
    RankResult,
    Reference,
    run_mode,
    run_reference,
)
from pellucid.verify.shrink import TIMEOUT_S, shrink

BOUND_FACTOR = 40.0
"""Of `bound`, by measurement: see docs/verify.md."""


def bound(model: ModelConfig, dtype: str) -> float:
    """The largest relative distance that counts as equal: machine epsilon x depth x `BOUND_FACTOR`.

    Depth is what a gradient passes: attention and feed-forward of each layer and the head, forward and backward.
    """
    depth = 2 * (2 * model.num_hidden_layers + 1)
    return BOUND_FACTOR * torch.finfo(DTYPES[dtype]).eps * depth


@dataclass(frozen=True, slots=True)
class Number:
    """The largest distance of a mode in one number type, relative to one process."""

    worst: float
    bound: float
    where: str
    """The tensor of the largest distance, and when."""
    first_outside: str = ""
    """Of the first step in which something is too far, what is farthest."""

    @property
    def is_within(self) -> bool:
        """Not so where the number is NaN."""
        return self.worst <= self.bound


@dataclass(slots=True)
class ModeResult:
    """What became of one mode."""

    mode: str
    numbers: dict[str, Number] = field(default_factory=dict)
    """By "fp64" and "fp32"."""
    bytes: Literal["ok", "wrong", "not planned"] = "not planned"
    bytes_wrong: list[str] = field(default_factory=list)
    zero_gradients: list[str] = field(default_factory=list)
    """Parameters whose gradient is zero where that of one process is not, or zero there too."""
    failure: str = ""
    """What fails first: the number type and the tensor, or what the mode raised."""
    skipped: str = ""
    """Why the mode cannot run here."""

    @property
    def passed(self) -> bool:
        """Ran, and nothing failed."""
        return not self.failure and not self.skipped

    def line(self) -> str:
        """As `pellucid verify` prints it."""
        if self.skipped:
            return f"{self.mode}  cannot run here: {self.skipped}"
        parts = [self.mode]
        for dtype, number in self.numbers.items():
            sign = "<=" if number.is_within else ">"
            parts.append(f"{dtype} {number.worst:.1e} {sign} {number.bound:.1e}")
        if self.numbers:
            parts.append(f"bytes {self.bytes}")
            parts.append(f"grads {'zero' if self.zero_gradients else 'nonzero'}")
        return "  ".join([*parts, "PASS" if self.passed else "FAIL"])


@dataclass(slots=True)
class Certificate:
    """The modes of one configuration on one number of ranks."""

    ranks: int
    modes: list[ModeResult]

    @property
    def passed(self) -> bool:
        """At least one mode ran, and all that ran passed."""
        return any(mode.passed for mode in self.modes) and not any(mode.failure for mode in self.modes)

    def last_line(self) -> str:
        """The verdict, which scripts may rely on."""
        failed = next((mode for mode in self.modes if mode.failure), None)
        if failed is not None:
            return f"FAILED: {failed.mode} {failed.failure}"
        passed = sum(mode.passed for mode in self.modes)
        if not passed:
            return "FAILED: no mode can run here"
        return f"verified: {passed} mode{'s' if passed > 1 else ''}, {self.ranks} ranks"

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "passed": self.passed,
            "ranks": self.ranks,
            "modes": {
                mode.mode: asdict(mode)
                | {"passed": mode.passed}
                | {"numbers": {d: asdict(n) | {"worst": plain(n.worst)} for d, n in mode.numbers.items()}}
                for mode in self.modes
            },
        }  # fmt: skip


def plain(value: float) -> float | str:
    """A number for JSON, which has no infinity: a string then."""
    return value if math.isfinite(value) else str(value)


def verify_modes(
    config: RunConfig,
    ranks: int,
    *,
    modes: Sequence[str] | None = None,
    report: Callable[[ModeResult], None] = lambda result: None,
) -> Certificate:
    """Run the shrunk configuration in every mode on ``ranks`` forked ranks, and compare each with one process.

    Args:
        config: the user's own; `shrink` says what is left of it.
        modes: registered names; None: all but ``none``.
        report: called with each mode's result.

    Raises:
        ConfigError: fewer than two ranks, or the configuration cannot even run on one process.
    """
    if ranks < 2:
        raise ConfigError(f"--nproc must be at least 2 to compare ranks with one process, got {ranks}")
    small = shrink(config, ranks)
    references = {dtype: run_reference(small, dtype, ranks) for dtype in DTYPES}
    chosen = [mode for mode in names("mode") if mode != "none"] if modes is None else list(modes)
    cases = [(mode, dtype) for mode in chosen for dtype in DTYPES]
    outcomes = _run_all(small, ranks, references, cases)
    results: list[ModeResult] = []
    for mode in chosen:
        results.append(_judge(small, mode, references, {dtype: outcomes[mode, dtype] for dtype in DTYPES}))
        report(results[-1])
    return Certificate(ranks, results)


# -- on the ranks -------------------------------------------------------------------------------------------

Case = tuple[str, str]
"""A mode and a number type."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """The mode refused the configuration, on every rank alike."""

    reason: str


Outcome = list[RankResult] | _Refused | RankError


def _run_all(config: RunConfig, ranks: int, references: dict[str, Reference], cases: list[Case]) -> dict[Case, Outcome]:
    """Each case on the same ranks, one after the other; on new ones after a case that ended them."""
    outcomes: dict[Case, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="pellucid-verify-") as folder:
        while left := [case for case in cases if case not in outcomes]:
            failure: RankError | None = None
            try:
                launch(
                    _rank, ranks, config, references, left, folder,
                    start_method="fork", backend="gloo", timeout_s=TIMEOUT_S,
                )  # fmt: skip
            except RankError as error:
                failure = error
            for mode, dtype in left:
                told = [_read(Path(folder), mode, dtype, rank) for rank in range(ranks)]
                said = [what for what in told if what is not None]
                refused = next((what for what in said if isinstance(what, _Refused)), None)
                if len(said) == ranks:
                    outcomes[mode, dtype] = refused or [what for what in said if isinstance(what, RankResult)]
                    continue
                assert failure is not None, f"{mode} {dtype} left no result"
                outcomes[mode, dtype] = failure
                break
    return outcomes


def _rank(config: RunConfig, references: dict[str, Reference], cases: list[Case], folder: str) -> None:
    """All cases on one rank; what comes of each is in a file before the next one begins."""
    torch.set_num_threads(1)
    load_plugins(config.plugins)
    for mode, dtype in cases:
        try:
            told: dict[str, Any] = asdict(run_mode(config, mode, references[dtype]))
        except ModeRefusedError as error:
            told = {"refused": str(error)}
        _file(Path(folder), mode, dtype, comm.rank()).write_text(json.dumps(told), encoding="utf-8")


def _file(folder: Path, mode: str, dtype: str, rank: int) -> Path:
    return folder / f"{mode}-{dtype}-{rank}.json"


def _read(folder: Path, mode: str, dtype: str, rank: int) -> RankResult | _Refused | None:
    path = _file(folder, mode, dtype, rank)
    if not path.exists():
        return None
    told = json.loads(path.read_text(encoding="utf-8"))
    if "refused" in told:
        return _Refused(told["refused"])
    gradients = [{name: [Distance(**d) for d in parts] for name, parts in step.items()} for step in told["gradients"]]
    weights = {name: Distance(**distance) for name, distance in told["weights"].items()}
    return RankResult(told["losses"], told["norms"], gradients, weights, told["bytes_wrong"])


# -- the verdict --------------------------------------------------------------------------------------------


def _judge(config: RunConfig, mode: str, references: dict[str, Reference], outcomes: dict[str, Outcome]) -> ModeResult:
    result = ModeResult(mode)
    for dtype, outcome in outcomes.items():
        if isinstance(outcome, _Refused):
            result.skipped = outcome.reason
            return result
        if isinstance(outcome, PellucidError):
            result.failure = result.failure or f"{dtype} {str(outcome).splitlines()[0]}"
            continue
        reference = references[dtype]
        number = _number(reference, outcome, bound(config.model, dtype))
        result.numbers[dtype] = number
        if not number.is_within:
            result.failure = result.failure or f"{dtype} {number.first_outside}"
        result.zero_gradients += _zero_gradients(reference, outcome)
        for wrong in (rank.bytes_wrong for rank in outcome):
            if wrong is not None:
                result.bytes_wrong += wrong
                result.bytes = "wrong" if result.bytes_wrong else "ok"
        still = _unmoved(reference, bound(config.model, "fp64"), biases=bool(config.model.router_bias_update_speed))
        result.failure = result.failure or (f"{dtype} {still} does not move" if still else "")
    if not result.failure and result.bytes_wrong:
        result.failure = f"bytes {result.bytes_wrong[0]}"
    if not result.failure and result.zero_gradients:
        result.failure = f"zero gradient {result.zero_gradients[0]}"
    return result


def _number(reference: Reference, ranks: list[RankResult], limit: float) -> Number:
    """The worst of everything that is compared; a tensor that is missing or not whole is infinitely far."""
    stages = [_step_distances(reference, ranks, i) for i in range(len(reference.losses))]
    stages.append({})
    for name, expected in reference.weights.items():
        parts = [rank.weights[name] for rank in ranks if name in rank.weights]
        stages[-1][f"{name} (weight)"] = _relative(parts, expected)
    tops = [max(stage.items(), key=lambda item: item[1]) for stage in stages]
    where, worst = max(tops, key=lambda item: item[1])
    return Number(worst, limit, where, next((what for what, distance in tops if distance > limit), ""))


def _step_distances(reference: Reference, ranks: list[RankResult], i: int) -> dict[str, float]:
    """What is compared of the i-th step, and how far it is."""
    found: dict[str, float] = {}
    for name, expected in reference.gradients[i].items():
        parts = [part for rank in ranks for part in rank.gradients[i].get(name, [])]
        found[f"{name} (gradient of step {i + 1})"] = _relative(parts, expected)
    for what, mine, alone in (
        ("loss", [rank.losses[i] for rank in ranks], reference.losses[i]),
        ("gradient norm", [rank.norms[i] for rank in ranks], reference.norms[i]),
    ):
        found[f"{what} of step {i + 1}"] = max(_nan_is_far(abs(value - alone) / (abs(alone) or 1)) for value in mine)
    return found


def _relative(parts: list[Distance], expected: torch.Tensor) -> float:
    """||g - g1|| / ||g1|| of slices that make up the whole; of equal slices, which replicas have, the worst."""
    worst: dict[tuple[int, int], float] = {}
    for part in parts:
        key = (part.start, part.stop)
        worst[key] = max(worst.get(key, 0.0), _nan_is_far(part.squared_error))
    end = 0
    for start, stop in sorted(worst):
        if start != end:
            return math.inf
        end = stop
    if end != expected.numel():
        return math.inf
    norm = float(expected.double().norm())
    error = math.sqrt(sum(worst.values()))
    return error / norm if norm else math.inf if error else 0.0


def _nan_is_far(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _zero_gradients(reference: Reference, ranks: list[RankResult]) -> list[str]:
    found: list[str] = []
    for i, gradients in enumerate(reference.gradients):
        for name, expected in gradients.items():
            parts = [part for rank in ranks for part in rank.gradients[i].get(name, [])]
            if not expected.any() or not any(part.squared_norm > 0 for part in parts):
                found.append(f"{name} of step {i + 1}")
    trained = {name for name in reference.weights if not name.endswith(BALANCING_BIAS)}
    missing = trained - set().union(*reference.gradients)
    return found + sorted(missing)


def _unmoved(reference: Reference, limit: float, *, biases: bool) -> str:
    """A weight, or the loss, that moves so little in all steps that being equal would say nothing; "" if there is none.

    Args:
        biases: those of routers should move too.
    """
    if max(reference.losses) - min(reference.losses) <= limit * max(reference.losses):
        return "the loss"
    for name, weight in reference.weights.items():
        if name.endswith(BALANCING_BIAS) and not biases:
            continue
        before = reference.initial[name].double()
        if float((weight.double() - before).norm()) <= 10 * limit * float(before.norm()):
            return name
    return ""
