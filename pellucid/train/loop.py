"""The training loop, defined once. Lines that may communicate are marked ★."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from pellucid.checkpoint.store import Snapshot
from pellucid.config import RunConfig
from pellucid.data.batches import Batch, Windows
from pellucid.errors import TrainingError
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.train.callbacks import BatchInfo, Callback, SaveInfo, StepInfo, StopTraining, ValidationInfo
from pellucid.train.precision import autocast
from pellucid.train.saving import RunWriter, restore
from pellucid.train.setup import Setup, prepare
from pellucid.train.state import TrainState, capture_rng
from pellucid.train.strategies import LossOutput, Strategy


class Trainer:
    """Trains one model as a `RunConfig` says.

    Args:
        config: the run; ``train.out`` is its folder, and without one nothing is written.
        model: None builds one from ``config.model``, or loads ``train.init``.
        strategy: None builds ``config.strategy``.
        callbacks: called after those of ``config.callbacks``.
        train_data, val_data: None opens ``config.data.path``.

    Raises:
        ConfigError, DataError, CheckpointError: before the first step, with what to change.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model: Transformer | None = None,
        strategy: Strategy | None = None,
        callbacks: Sequence[Callback] = (),
        train_data: Windows | None = None,
        val_data: Windows | None = None,
    ) -> None:
        self.setup: Setup = prepare(config, model, strategy, callbacks, train_data, val_data)
        self.config = self.setup.config
        self.model = self.setup.model
        self.optimizer = self.setup.optimizer
        self.state = TrainState()
        self.stop_reason: str | None = None
        self._writer: RunWriter | None = None
        self._loss = _compiled(self.setup.strategy.__call__, self.config)
        self._validation_loss = _compiled(self.setup.strategy.validate, self.config)

    def train(self, resume: bool = False) -> TrainState:
        """Run to the last step, or until a signal, a callback or ``train.max_seconds`` ends it after a step.

        Args:
            resume: continue from the newest complete checkpoint in ``train.out``, if there is one.

        Returns:
            The state at the last finished step; a checkpoint of it is on disk.

        Raises:
            TrainingError: a non-finite loss or gradient; weights are those of the last finished step.
            StorageError: a checkpoint or the log could not be written.
            ConfigError: the run folder was used before and ``resume`` is False, or cannot be used.
        """
        self._writer = RunWriter(self.setup, resume=resume) if self.config.train.out else None
        try:
            if self._writer is not None:
                restored = self._writer.load_newest() if resume else None
                if restored is not None:
                    self._restore(restored)
                self._writer.begin(self.state.step)
            with _signals(self._request_stop):
                self._call("on_train_begin", self.state)
                self._run()
                self._call("on_train_end", self.state)
        except BaseException as error:
            for callback in self.setup.callbacks:
                callback.on_error(self, error)
            raise
        finally:
            if self._writer is not None:
                self._writer.close()
        return self.state

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to the run's metrics.jsonl; it should have "event" and "step"."""
        if self._writer is not None:
            self._writer.folder.log(record)

    # -- the loop -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        setup, state, train = self.setup, self.state, self.config.train
        started = time.monotonic()
        self.model.train()
        while state.step < setup.total_steps and self.stop_reason is None:
            loader = setup.loader
            if loader.samples in (0, len(loader.windows)):
                self._call("on_epoch_begin", state)
            info = self._step()
            if state.step % train.log_every == 0 or state.step == setup.total_steps:
                self.log(_step_record(info))
            if train.val_every and setup.val_data and state.step % train.val_every == 0:
                self._call("on_validation", self.validate())
            self._call("on_optimizer_step", info)
            if loader.samples == len(loader.windows):
                self._call("on_epoch_end", state)
            if train.max_seconds is not None and time.monotonic() - started > train.max_seconds:
                self._request_stop(f"train.max_seconds = {train.max_seconds:g} are over")
            if train.save_every and state.step % train.save_every == 0:
                self._save()
            self._announce_saves()
        self._finish()

    def _step(self) -> StepInfo:
        """One optimizer step; ``state`` counts it when it is complete."""
        setup, state, executor = self.setup, self.state, self.setup.executor
        begin = time.perf_counter()
        lr = self.config.optim.lr * setup.schedule(state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        window = [batch.to(setup.device) for batch in setup.loader.next_window()]
        weight = comm.all_reduce(sum(map(setup.strategy.weight, window)), tag="tokens")  # ★
        if weight == 0:
            raise TrainingError(
                f"step {state.step + 1} has no supervised token; look at the data with `pellucid inspect`"
            )
        sums: list[torch.Tensor] = []
        for i, batch in enumerate(window):
            self._call("on_batch_begin", BatchInfo(state.step + 1, i, batch, None))
            with executor.accumulate(self.model, last=i == len(window) - 1):
                with autocast(setup.device, setup.dtype):
                    loss = self._loss(setup.wrapped, batch)  # ★ zero3 only: units gather their weights
                executor.backward(loss.sum / weight)  # ★ buckets start as they fill
            sums.append(loss.sum.detach())
            self._call("on_batch_end", BatchInfo(state.step + 1, i, batch, None), loss=sums[-1])
        executor.finish_grads()  # ★ wait for what is still on the wire
        mine = [float(value) for value in sums]
        loss_value = comm.all_reduce(math.fsum(mine), tag="loss") / weight  # ★
        norm = executor.grad_norm()  # ★ one scalar, if gradients are sharded
        update = self._refuse_or_clip(norm, mine, window)
        tokens = int(comm.all_reduce(sum(int((b.document_ids >= 0).sum()) for b in window), tag="tokens_seen"))  # ★
        seconds = time.perf_counter() - begin
        info = StepInfo(
            state.step + 1, setup.loader.epoch, state.tokens_seen + tokens, loss_value, lr, norm, seconds, tokens / seconds,
            setup.total_steps,
        )  # fmt: skip
        self._call("on_before_step", info)
        if update:
            executor.step()  # ★ ZeRO-1/2: gather the new weights
        else:
            executor.zero_grad()
        state.step, state.epoch, state.tokens_seen = info.step, info.epoch, info.tokens
        seconds = time.perf_counter() - begin
        return replace(info, seconds=seconds, tokens_per_s=tokens / seconds)

    def _refuse_or_clip(self, norm: float, sums: list[float], window: list[Batch]) -> bool:
        """Clip; False where a float16 step is skipped and its scale lowered. Non-finite: nobody steps."""
        executor, step = self.setup.executor, self.state.step + 1
        finite = math.isfinite(norm) and all(map(math.isfinite, sums))
        if executor.scaler is not None and all(map(math.isfinite, sums)):
            executor.scaler.update(finite=finite)
            if not finite and executor.scaler.scale >= 1:
                return False
        if not finite:
            executor.zero_grad()
            bad = [i for i, value in enumerate(sums) if not math.isfinite(value)]
            what = f"loss of micro-batch {bad[0]}" if bad else f"gradient norm ({norm})"
            batches = [window[i] for i in bad] or window
            raise TrainingError(
                f"step {step}: non-finite {what}; the weights are those of step {step - 1}. "
                f"Documents in it: {_documents(batches)}. Lower optim.lr, or look at those documents"
            )
        if self.config.optim.max_grad_norm is not None:
            executor.clip_grad_norm_(self.config.optim.max_grad_norm, norm)
        return True

    @torch.no_grad()
    def validate(self) -> ValidationInfo:
        """The loss over the whole validation split, each token once; changes no training state."""
        setup, windows = self.setup, self.setup.val_data
        assert windows is not None, "there is no validation split"
        self.model.eval()
        total, weight = 0.0, 0
        for batch in windows.batches(self.config.train.micro_batch):
            batch = batch.to(setup.device)
            with autocast(setup.device, setup.dtype):
                total += float(self._validation_loss(setup.wrapped, batch).sum)
            weight += setup.strategy.weight(batch)
        self.model.train()
        if weight == 0:
            raise TrainingError("the validation split has no supervised token")
        info = ValidationInfo(self.state.step, total / weight, weight)
        self.log({"event": "validation", "step": info.step, "loss": info.loss, "tokens": info.tokens})
        return info

    # -- ends and saves -------------------------------------------------------------------------------------

    def _finish(self) -> None:
        setup, state = self.setup, self.state
        state.cursor, state.rng = setup.loader.state_dict(), capture_rng()
        if self._writer is None:
            return
        if self._writer.last_saved != state.step and state.step > 0:
            self._save()
        self._writer.store.wait()
        self._announce_saves()
        if state.step > 0 and (state.step >= setup.total_steps or self._writer.stopped_by_callback):
            self._writer.write_model(state)

    def _save(self) -> None:
        assert self._writer is not None or not self.config.train.out
        self.state.cursor, self.state.rng = self.setup.loader.state_dict(), capture_rng()
        if self._writer is not None:
            self._writer.save(self.state)

    def _announce_saves(self) -> None:
        if self._writer is not None:
            for path in self._writer.take_published():
                self._call("on_save", SaveInfo(int(path.name[5:]), path))

    def _restore(self, snapshot: Snapshot) -> None:
        restore(self.setup, snapshot)
        state = snapshot.state
        self.state.step, self.state.epoch = state["step"], state["epoch"]
        self.state.tokens_seen = state["tokens_seen"]
        if state.get("stopped") and state["total_steps"] == self.setup.total_steps:
            self.stop_reason = state["stopped"]
            assert self._writer is not None
            self._writer.stopped_by_callback = self.stop_reason

    def _request_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason

    def _call(self, hook: str, info: Any, *, loss: torch.Tensor | None = None) -> None:
        if not self.setup.callbacks:
            return
        if loss is not None:
            info = replace(info, loss_sum=float(loss))
        for callback in self.setup.callbacks:
            try:
                getattr(callback, hook)(self, info)
            except StopTraining as stop:
                self._request_stop(stop.reason)
                if self._writer is not None:
                    self._writer.stopped_by_callback = stop.reason


def _compiled(
    function: Callable[[Transformer, Batch], LossOutput], config: RunConfig
) -> Callable[[Any, Batch], LossOutput]:
    """Model and loss as one graph, of fixed shapes, if ``train.compile`` asks for it."""
    if not config.train.compile:
        return function
    return torch.compile(function, dynamic=False)


def _step_record(info: StepInfo) -> dict[str, Any]:
    return {
        "event": "step", "step": info.step, "epoch": info.epoch, "tokens": info.tokens, "loss": info.loss, "lr": info.lr,
        "grad_norm": info.grad_norm, "time": time.time(), "seconds": info.seconds, "tokens_per_s": info.tokens_per_s,
    }  # fmt: skip


def _documents(batches: list[Batch], limit: int = 20) -> str:
    ids = sorted({int(i) for batch in batches for i in batch.document_ids.unique() if i >= 0})
    more = f" and {len(ids) - limit} more" if len(ids) > limit else ""
    return ", ".join(map(str, ids[:limit])) + more


@contextmanager
def _signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop after this step; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        request_stop(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
