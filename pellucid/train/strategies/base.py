"""What a strategy is to the loop."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from pellucid.config import RunConfig
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.parallel.plan import Rollout
from pellucid.train.routing import RoutingSums

if TYPE_CHECKING:
    from pellucid.train.setup import Setup


class LossOutput(NamedTuple):
    """What a strategy gives for one micro-batch."""

    sum: Tensor
    """Scalar, summed over what `Strategy.weight` counts; to be divided by the weight of the whole step."""
    metrics: dict[str, Tensor]
    """Further sums over the same weight, by name: those that the strategy's ``metrics`` names, logged as means."""
    routing: RoutingSums | None = None
    """`routing_sums`, where the model has a mixture of experts."""


class Strategy(Protocol):
    """A training objective.

    A batch is what the data gives (`pellucid.data.batches.Batch` and its kin), or what `UsesRun.annotate` makes of it.

    It may also have:

    - ``unit``, what `weight` counts: "tokens" (where it says nothing), "pairs", "sequences";
    - ``metrics``, the names of `LossOutput.metrics`, in validation too; none where it says nothing;
    - ``reads``, the kind of data that it wants, as index.json has it; any where it says nothing;
    - ``updates``, steps in a row that get the same samples; 1 where it says nothing;
    - ``rows_each``, rows of a forward that one sample becomes; 2 of pairs, otherwise 1, where it says nothing;
    - ``whole_weights``, whether it refuses modes that shard weights; False where it says nothing.
    """

    def weight(self, batch: Any) -> int:
        """What ``batch`` adds to the denominator of the step; supervised tokens, pairs or sequences."""
        ...

    def __call__(self, model: Transformer, batch: Any) -> LossOutput:
        """The loss that is optimised."""
        ...

    def validate(self, model: Transformer, batch: Any) -> LossOutput:
        """The loss that is reported for held-out data, over the same weight."""
        ...


@runtime_checkable
class UsesRun(Protocol):
    """A strategy that has to know the run it is in. Both methods are called on every rank and may communicate."""

    def begin(self, setup: "Setup", folder: Path | None) -> None:
        """Before the first step, and before a resumed run gets its weights back: the model is as it starts.

        Args:
            folder: the run's own; None where nothing is written.
        """
        ...

    def annotate(self, batch: Any, *, step: int, validation: bool) -> Any:
        """What `Strategy.__call__`, or `Strategy.validate`, gets for ``batch``; outside of a compiled graph.

        Args:
            step: the optimizer step, from 1.
        """
        ...


@runtime_checkable
class MakesBatches(Protocol):
    """A strategy that learns from something else than what the data gives: it samples, say. Called on every rank."""

    def make_batches(self, window: list[Any], *, step: int, fresh: bool) -> list[Any]:
        """The micro-batches of a step, as many as ``window`` has, before they are weighed; may communicate.

        Args:
            step: the optimizer step, from 1.
            fresh: the first step that gets these samples; False for the others of ``updates``.
        """
        ...


@runtime_checkable
class PlansRollouts(Protocol):
    """A strategy whose ranks tell each other something in `MakesBatches.make_batches`."""

    def rollout(self, config: RunConfig, *, prompts: int) -> Rollout:
        """What that is, for `pellucid plan` and the run's own.

        Args:
            prompts: samples of a rank in a step.
        """
        ...


RESERVED = {
    "event", "step", "epoch", "tokens", "loss", "lr", "grad_norm", "time", "seconds", "tokens_per_s", "supervised", "pairs",
    "sequences",
}  # fmt: skip
"""Fields of a line of metrics.jsonl that no metric may be called."""


def unit_of(strategy: Strategy) -> str:
    """What the loss of a strategy is divided by."""
    return str(getattr(strategy, "unit", "tokens"))


def rows_of(strategy: Strategy) -> int:
    """Rows of a forward that one sample becomes."""
    return int(getattr(strategy, "rows_each", 2 if unit_of(strategy) == "pairs" else 1))


def metrics_of(strategy: Strategy) -> tuple[str, ...]:
    """The metrics of a strategy; `ConfigError` for a name that a line of the log has already."""
    names = tuple(getattr(strategy, "metrics", ()))
    taken = next((name for name in names if name in RESERVED or name.startswith("router_")), None)
    if taken is not None:
        raise ConfigError(
            f"{type(strategy).__name__}.metrics has {taken!r}, which metrics.jsonl has already; rename it"
        )
    return names


def reads_of(strategy: Strategy) -> str | None:
    """The kind of data that a strategy wants; None: any."""
    kind: str | None = getattr(strategy, "reads", None)
    return kind


def ordered_metrics(strategy: Strategy, output: LossOutput, names: tuple[str, ...]) -> list[Tensor]:
    """The metrics of one micro-batch in the order of ``names``, without their graph.

    Raises:
        ConfigError: they are not those that the strategy declares.
    """
    if output.metrics.keys() != set(names):
        raise ConfigError(
            f"{type(strategy).__name__} gives the metrics {sorted(output.metrics)} and declares {sorted(names)}; "
            "name them in its attribute metrics"
        )
    return [output.metrics[name].detach() for name in names]
