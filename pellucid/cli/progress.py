"""The progress of a training run, as a callback."""

import time

from pellucid.cli.output import Progress, notice
from pellucid.report.terminal import format_seconds
from pellucid.train.callbacks import Callback, StepInfo, ValidationInfo
from pellucid.train.loop import Trainer
from pellucid.train.state import TrainState


class TrainProgress(Callback):
    """Loss, learning rate, tokens/s and time left, on stderr."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.seconds = 0.0
        self._progress: Progress | None = None
        self._speed = 0.0
        self._began = time.monotonic()

    def on_train_begin(self, trainer: Trainer, info: TrainState) -> None:
        if info.step and not self.quiet:
            notice(f"resuming after step {info.step:,}")
        self._began = time.monotonic()
        self._progress = Progress("training", trainer.setup.total_steps, quiet=self.quiet)
        self._progress.__enter__()

    def on_optimizer_step(self, trainer: Trainer, info: StepInfo) -> None:
        assert self._progress is not None
        self._speed = info.tokens_per_s if not self._speed else 0.9 * self._speed + 0.1 * info.tokens_per_s
        mean_seconds = info.seconds * info.tokens_per_s / self._speed
        left = format_seconds((info.total_steps - info.step) * mean_seconds)
        self._progress.update(
            info.step,
            f"step {info.step:,}/{info.total_steps:,} loss {info.loss:.4f} lr {info.lr:.2e} {self._speed:,.0f} tok/s, {left} left",
        )

    def on_validation(self, trainer: Trainer, info: ValidationInfo) -> None:
        if not self.quiet:
            what = "".join(f", {name} {value:.4g}" for name, value in info.metrics.items())
            one = info.unit.removesuffix("s")
            notice(
                f"step {info.step:,}: validation loss {info.loss:.4f} nats/{one}{what} over {info.tokens:,} {info.unit}"
            )

    def on_train_end(self, trainer: Trainer, info: TrainState) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the screen; a second call does nothing."""
        if self._progress is not None:
            self.seconds = time.monotonic() - self._began
            self._progress.__exit__()
            self._progress = None
