"""The training loop, defined once. Lines that may communicate are marked ★."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from pellucid.checkpoint.store import Checkpoint
from pellucid.config import RunConfig
from pellucid.data.batches import Batch, Samples
from pellucid.errors import ConfigError, TrainingError
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.parallel.fingerprint import weights_sha256
from pellucid.parallel.ledger import LedgerFiles
from pellucid.parallel.ordered import micro_batch_seed
from pellucid.train.callbacks import BatchInfo, Callback, SaveInfo, StepInfo, StopTraining, ValidationInfo
from pellucid.train.checkpointing import Saver
from pellucid.train.precision import autocast
from pellucid.train.ranks import gather_json, on_every_rank, on_first_rank, stop_reason
from pellucid.train.rollout import complete_prompts
from pellucid.train.routing import RoutingSums, num_sequences, reduce_routing
from pellucid.train.saving import RunWriter, newest_everywhere, restore, write_plan
from pellucid.train.setup import CHECKED_STEPS, Setup, prepare
from pellucid.train.state import TrainState, capture_rng
from pellucid.train.strategies import LossOutput, MakesBatches, Strategy, UsesRun, metrics_of, unit_of
from pellucid.train.strategies.base import ordered_metrics


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
        train_data: Samples[Any] | None = None,
        val_data: Samples[Any] | None = None,
    ) -> None:
        self.setup: Setup = prepare(config, model, strategy, callbacks, train_data, val_data)
        self.config = self.setup.config
        self.model = self.setup.model
        self.optimizer = self.setup.optimizer
        self.state = TrainState()
        self.stop_reason: str | None = None
        """Why the run ends before its last step, once all ranks know."""
        self._stopped_by_callback = False
        self._wants_stop: str | None = None
        """Why this rank wants to end; a signal may set it at any time."""
        self._callback_wants_stop = False
        self._last_saved = 0
        self._writer: RunWriter | None = None
        """The first rank's."""
        self._saver: Saver | None = None
        self._ledger_files: LedgerFiles | None = None
        strategy = self.setup.strategy
        self._loss = _compiled(strategy.__call__, self.config)
        self._validation_loss = _compiled(strategy.validate, self.config)
        self._metrics = metrics_of(strategy)
        """What is summed along with the loss."""
        self._unit = unit_of(strategy)
        """What the loss is divided by: tokens, pairs, sequences."""
        self._annotates = strategy if isinstance(strategy, UsesRun) else None
        self._makes = strategy if isinstance(strategy, MakesBatches) else None
        self._begun = False

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
        try:
            if self.config.train.out:
                self._open(resume=resume)
            self._begin()
            with _signals(self._request_stop):
                self._call("on_train_begin", self.state)
                self._run()
                self._call("on_train_end", self.state)
            comm.leave("it has finished its run")
        except BaseException as error:
            comm.leave(f"it failed: {type(error).__name__}: {error}")
            for callback in self.setup.callbacks:
                callback.on_error(self, error)
            raise
        finally:
            if self._ledger_files is not None:
                self._ledger_files.close()
            if self._saver is not None:
                self._saver.close()
        return self.state

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to the run's metrics.jsonl; it should have "event" and "step"."""
        if self._writer is not None:
            self._writer.folder.log(record)

    def _open(self, *, resume: bool) -> None:
        """The run's folder: written by the first rank, read by all."""
        self._writer = on_first_rank(lambda: RunWriter(self.setup, resume=resume), tag="init/folder")
        self._saver = Saver(self.setup, self._writer)
        self._begin()  # a reference is the model before it gets back what it has learnt
        found = newest_everywhere(self.setup) if resume else None
        if found is not None:
            on_every_rank(lambda: self._restore(found), tag="init/restored")
        self._last_saved = self.state.step
        writer, step, ended = self._writer, self.state.step, self._stopped_by_callback
        on_first_rank(lambda: writer.begin(step, ended=ended) if writer else None, tag="init/log")
        if comm.ledger() is not None:
            on_every_rank(self._open_ledger, tag="init/ledger")

    def _begin(self) -> None:
        """Show the strategy the run, once."""
        if self._annotates is not None and not self._begun:
            out = self.config.train.out
            self._annotates.begin(self.setup, Path(out) if out and self._saver is not None else None)  # ★
        self._begun = True

    def _open_ledger(self) -> None:
        folder = Path(self.config.train.out) / "ledger"
        self._ledger_files = LedgerFiles(folder, comm.rank(), after=self.state.step or -1)  # from 0: all anew
        if comm.rank() == 0:
            write_plan(self.setup, folder)
            for path in folder.glob("rank*.jsonl"):  # of an earlier part of the run, on more ranks
                if int(path.stem[4:]) >= comm.world_size():
                    LedgerFiles(folder, int(path.stem[4:]), after=self.state.step or -1).close()

    # -- the loop -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        setup, state, train = self.setup, self.state, self.config.train
        started = time.monotonic()
        self.model.train()
        self._agree_on_stop()
        ledger = comm.ledger()
        if ledger is not None and state.step:
            ledger.clear()  # how ranks started is recorded once, before step 1
        while state.step < setup.total_steps and self.stop_reason is None:
            loader = setup.loader
            if loader.samples in (0, len(loader.windows)) and not loader.repeat:
                self._call("on_epoch_begin", state)
            info = self._step()
            if state.step % train.log_every == 0 or state.step == setup.total_steps:
                self.log(_step_record(info))
            if train.hash_every and state.step % train.hash_every == 0:
                weights = setup.executor.weights()  # ★ modes that shard weights
                sha256 = weights_sha256((name, tensor if comm.rank() == 0 else None) for name, tensor in weights)
                self.log({"event": "hash", "step": state.step, "sha256": sha256})
            if train.val_every and setup.val_data and state.step % train.val_every == 0:
                self._call("on_validation", self.validate())
            if train.sample_every and state.step % train.sample_every == 0:
                self._sample()  # ★ modes that shard weights
            self._call("on_optimizer_step", info)
            if loader.samples == len(loader.windows):
                self._call("on_epoch_end", state)
            if train.max_seconds is not None and time.monotonic() - started > train.max_seconds:
                self._request_stop(f"train.max_seconds = {train.max_seconds:g} are over")
            self._agree_on_stop()  # ★ a signal reaches one rank, the end is everybody's; so is a finished checkpoint
            if comm.decide("save", bool(train.save_every) and state.step % train.save_every == 0):
                self._save()
            self._announce_saves()
            self._write_ledger()
        self._finish()

    def _step(self) -> StepInfo:
        """One optimizer step; ``state`` counts it when it is complete."""
        setup, state, executor = self.setup, self.state, self.setup.executor
        begin = time.perf_counter()
        comm.begin_step(state.step + 1)
        lr = self.config.optim.lr * setup.schedule(state.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        fresh = not setup.loader.repeat
        window = [batch.to(setup.device) for batch in setup.loader.next_window()]
        if self._makes is not None:
            window = self._makes.make_batches(
                window, step=state.step + 1, fresh=fresh
            )  # ★ grpo: answers to the prompts
        weight, num_tokens, supervised, *sequences = self._count(window)  # ★
        if supervised == 0:
            raise TrainingError(
                f"step {state.step + 1} has no supervised token; look at the data with `pellucid inspect`"
            )
        sums: list[list[torch.Tensor]] = []
        routings: list[RoutingSums] = []
        for i, batch in enumerate(window):
            self._call("on_batch_begin", BatchInfo(state.step + 1, i, batch, None))
            self._key_dropout(i)
            with executor.accumulate(self.model, last=i == len(window) - 1):
                with autocast(setup.device, setup.dtype):
                    given = batch
                    if self._annotates is not None:
                        given = self._annotates.annotate(
                            batch, step=state.step + 1, validation=False
                        )  # ★ a live reference
                    loss = self._loss(setup.wrapped, given)  # ★ zero3 only: units gather their weights
                executor.backward(self._share(loss, weight, sequences))  # ★ buckets start as they fill
            sums.append([loss.sum.detach(), *ordered_metrics(setup.strategy, loss, self._metrics)])
            if loss.routing is not None:
                routings.append(loss.routing.detach())
            self._call("on_batch_end", BatchInfo(state.step + 1, i, batch, None), loss=sums[-1][0])
        executor.finish_grads()  # ★ wait for what is still on the wire
        parts = [[float(value) for value in of_micro] for of_micro in sums]
        loss_value, *metrics = (total / weight for total in self._totals(parts))  # ★
        losses = [of_micro[0] for of_micro in parts]
        router, counts = None, torch.empty(0)
        if sequences:
            router, counts = reduce_routing(routings, num_tokens=num_tokens, sequences=sequences[0])  # ★
        norm = executor.grad_norm()  # ★ one scalar, if gradients are sharded
        update = comm.decide("step", self._refuse_or_clip(norm, loss_value, losses, window))
        tokens = int(num_tokens)
        seconds = time.perf_counter() - begin
        info = StepInfo(
            state.step + 1, setup.loader.epoch, state.tokens_seen + tokens, loss_value, lr, norm, seconds, tokens / seconds,
            setup.total_steps, router, dict(zip(self._metrics, metrics, strict=True)), supervised / num_tokens,
            None if self._unit == "tokens" else {self._unit: int(weight)},
        )  # fmt: skip
        self._call("on_before_step", info)
        if update:
            executor.step()  # ★ ZeRO-1/2: gather the new weights
            if self.config.lora is None:  # an adapter's base stays as it is, and its biases would not be saved
                for name, delta in self.model.balance_experts(counts).items():
                    executor.add_to_weight(name, delta)
            if setup.ema is not None:
                setup.ema.update()
        else:
            executor.zero_grad()
        state.step, state.epoch, state.tokens_seen = info.step, info.epoch, info.tokens
        seconds = time.perf_counter() - begin
        return replace(info, seconds=seconds, tokens_per_s=tokens / seconds)

    def _count(self, window: list[Any]) -> list[float]:
        """What the step weighs, its tokens without padding, the supervised ones, and with experts its sequences."""
        strategy = self.setup.strategy
        mine = [sum(map(strategy.weight, window)), sum(int((b.document_ids >= 0).sum()) for b in window)]
        if self._unit != "tokens":
            mine.append(sum(int(b.loss_mask.sum()) for b in window))
        if self.model.config.expert_layers:
            mine.append(sum(map(num_sequences, window)))
        counts = comm.all_reduce(mine, tag="tokens")  # ★
        return counts if self._unit != "tokens" else [*counts[:2], counts[0], *counts[2:]]

    def _share(self, loss: LossOutput, weight: float, sequences: list[float]) -> torch.Tensor:
        """What a micro-batch adds to the loss of the step: its sum, and with experts their balancing loss, each by its weight."""
        if not sequences:
            return loss.sum / weight
        if loss.routing is None:
            raise ConfigError(
                f"the model has experts (model.n_routed_experts), and the strategy {type(self.setup.strategy).__name__} says "
                "nothing of where tokens went; let it give LossOutput(..., routing=routing_sums(model.config, output, batch))"
            )
        return loss.sum / weight + loss.routing.loss / sequences[0]

    def _key_dropout(self, micro: int) -> None:
        """With ordered reductions dropout is the same whichever rank has the micro-batch."""
        executor = self.setup.executor
        if executor.reduction == "ordered":
            number = comm.rank() * executor.grad_accum_steps + micro
            torch.manual_seed(micro_batch_seed(self.config.train.seed, self.state.step + 1, number))

    def _totals(self, mine: list[list[float]]) -> list[float]:
        """Loss and metrics summed over all ranks, of which each micro-batch is one's: exact with ordered reductions."""
        executor, width = self.setup.executor, 1 + len(self._metrics)
        if executor.reduction == "sum":
            return comm.all_reduce([math.fsum(column) for column in zip(*mine, strict=True)], tag="loss")
        parts = [0.0] * (executor.grad_accum_steps * comm.world_size() * width)
        first = comm.rank() * executor.grad_accum_steps * width
        parts[first : first + len(mine) * width] = [value for of_micro in mine for value in of_micro]
        everybodys = comm.all_reduce(parts, tag="loss")
        return [math.fsum(everybodys[i::width]) for i in range(width)]

    def _refuse_or_clip(self, norm: float, loss: float, mine: list[float], window: list[Batch]) -> bool:
        """Clip; False where a float16 step is skipped and its scale lowered. Non-finite on any rank: nobody steps.

        ``norm`` and ``loss`` are the same numbers on every rank, so all ranks take the same branch.
        """
        executor = self.setup.executor
        finite = math.isfinite(norm) and math.isfinite(loss)
        if executor.scaler is not None and math.isfinite(loss):
            executor.scaler.update(finite=finite)
            if not finite and executor.scaler.scale >= 1:
                return False
        if not finite:
            self._refuse_step(norm, mine, window)
        if self.config.optim.max_grad_norm is not None:
            executor.clip_grad_norm_(self.config.optim.max_grad_norm, norm)
        return True

    def _refuse_step(self, norm: float, mine: list[float], window: list[Batch]) -> NoReturn:
        executor = self.setup.executor
        bad = [i for i, value in enumerate(mine) if not math.isfinite(value)]
        documents = _documents([window[i] for i in bad] or window)
        where = next((part.name for part in executor.gradients() if not part.tensor.isfinite().all()), None)
        executor.zero_grad()
        everybodys = gather_json([bad[0] if bad else None, documents, where], tag="refused")
        if self._saver is not None:
            self._saver.finish_before_error()  # ★ all ranks are here
        culprit = next((rank for rank, (micro, *_) in enumerate(everybodys) if micro is not None), None)
        if culprit is None:
            found = [(rank, name) for rank, (*_, name) in enumerate(everybodys) if name is not None]
            what = f"gradient norm ({norm})" + (f", first in {found[0][1]}" if found else "")
            what += f" on rank {found[0][0]}" if found and executor.shards_gradients else ""
        else:
            what = f"loss of micro-batch {everybodys[culprit][0]}"
            what += f" on rank {culprit}" if len(everybodys) > 1 else ""
        chosen = everybodys if culprit is None else [everybodys[culprit]]
        ids = sorted({i for _, documents, _ in chosen for i in documents})
        raise TrainingError(
            f"step {self.state.step + 1}: non-finite {what}; the weights are those of step {self.state.step}, {self._saved()}. "
            f"Documents in it: {_listed(ids)}. Lower optim.lr, or look at those documents"
        )

    def _saved(self) -> str:
        """What of a run that cannot go on is on disk, in words."""
        if self._saver is None:
            return "and nothing is saved"
        return (
            f"and the newest checkpoint is of step {self._last_saved}" if self._last_saved else "and none is saved yet"
        )

    @torch.no_grad()
    def validate(self) -> ValidationInfo:
        """Loss and metrics over the whole validation split, each token or pair once; changes no training state."""
        setup, windows = self.setup, self.setup.val_data
        assert windows is not None, "there is no validation split"
        self._begin()
        self.model.eval()
        size, micro_batch, width = comm.world_size(), self.config.train.micro_batch, 1 + len(self._metrics)
        num_batches = -(-len(windows) // micro_batch)
        sums, weight = [0.0] * (num_batches * width), 0
        for first in range(0, num_batches, size):
            i = min(first + comm.rank(), num_batches - 1)  # a rank without a batch of its own still gathers weights
            batch = windows.batch_number(i, micro_batch).to(setup.device)
            with autocast(setup.device, setup.dtype):
                given: Any = batch
                if self._annotates is not None:
                    given = self._annotates.annotate(batch, step=self.state.step + 1, validation=True)  # ★
                loss = self._validation_loss(self.model, given)  # ★ zero3 only
            if i == first + comm.rank():
                parts = [loss.sum, *ordered_metrics(setup.strategy, loss, self._metrics)]
                sums[i * width : (i + 1) * width] = map(float, parts)
                weight += setup.strategy.weight(batch)
        # ★ each batch's loss is one rank's, so that their exact sum is the same for any number of ranks
        *sums, total_weight = comm.all_reduce([*sums, float(weight)], tag="validation")
        weight = int(total_weight)
        self.model.train()
        if weight == 0:
            raise TrainingError("the validation split has no supervised token")
        loss_value, *metrics = (math.fsum(sums[i::width]) / weight for i in range(width))
        named = dict(zip(self._metrics, metrics, strict=True))
        info = ValidationInfo(self.state.step, loss_value, weight, self._unit, named)
        self.log({"event": "validation", "step": info.step, "loss": info.loss, self._unit: weight, **named})
        return info

    def _sample(self) -> None:
        """Answers to the first prompts of the validation split, for the report."""
        samples = complete_prompts(self.setup, self.state.step)  # ★ modes that shard weights
        if self._writer is not None:
            self._writer.folder.keep_samples(samples)

    # -- ends and saves -------------------------------------------------------------------------------------

    def _finish(self) -> None:
        setup, state = self.setup, self.state
        state.cursor, state.rng = setup.loader.state_dict(), capture_rng()
        if self._saver is not None:
            if self._last_saved != state.step and state.step > 0:
                self._save()
            self._saver.finish()  # ★ a background save that failed on one rank, failed for all
            on_every_rank(self._complete_folder, tag="end")  # ★
        self._write_ledger()

    def _complete_folder(self) -> None:
        assert self._saver is not None
        self._announce_saves()
        ended = self.state.step >= self.setup.total_steps or self._stopped_by_callback
        if self.state.step > 0 and ended:
            self._saver.write_model(self.state)  # ★ modes that shard weights

    def _save(self) -> None:
        """A checkpoint of the finished step; every rank writes what it holds."""
        setup, state = self.setup, self.state
        state.cursor, state.rng = setup.loader.state_dict(), capture_rng()
        if self._saver is None:
            return
        comm.enter("other")
        self._saver.save(state, stopped=self.stop_reason if self._stopped_by_callback else None)  # ★
        self._last_saved = state.step

    def _announce_saves(self) -> None:
        if self._writer is not None:
            for path in self._writer.take_published():
                self._call("on_save", SaveInfo(int(path.name[5:]), path))

    def _write_ledger(self) -> None:
        ledger = comm.ledger()
        if ledger is None:
            return
        if self._ledger_files is not None:
            self._ledger_files.write(ledger)
        else:  # nobody keeps it
            ledger.clear()

    def _restore(self, checkpoint: Checkpoint) -> None:
        restore(self.setup, checkpoint)
        state = checkpoint.state
        comm.begin_step(state["step"])
        comm.check_until(state["step"] + CHECKED_STEPS)
        self.state.step, self.state.epoch = state["step"], state["epoch"]
        self.state.tokens_seen = state["tokens_seen"]
        if state.get("stopped") and state["total_steps"] == self.setup.total_steps:
            self._wants_stop = state["stopped"]
            self._callback_wants_stop = self._stopped_by_callback = True

    def _request_stop(self, reason: str) -> None:
        self._wants_stop = self._wants_stop or reason

    def _agree_on_stop(self) -> None:
        """What this rank wants becomes what all do; only here, so that all leave the loop after the same step.

        A checkpoint that every rank has written by now is published.
        """
        self.stop_reason, self._stopped_by_callback, written = stop_reason(
            self._wants_stop,
            by_callback=self._callback_wants_stop,
            writing=self._saver is not None and self._saver.writing,
        )
        if written and self._saver is not None:
            self._saver.finish()  # ★

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
                self._callback_wants_stop = True


def _compiled(
    function: Callable[[Transformer, Batch], LossOutput], config: RunConfig
) -> Callable[[Any, Batch], LossOutput]:
    """Model and loss as one graph, of fixed shapes, if ``train.compile`` asks for it."""
    if not config.train.compile:
        return function
    limits: Any = torch._dynamo.config  # zero3 and fsdp2 cut at each layer: a graph a layer, with gradients and without
    limits.recompile_limit = max(limits.recompile_limit, 4 * config.model.num_hidden_layers)
    return torch.compile(function, dynamic=False)


def _step_record(info: StepInfo) -> dict[str, Any]:
    router = {} if info.router is None else {f"router_{key}": value for key, value in asdict(info.router).items()}
    return {
        "event": "step", "step": info.step, "epoch": info.epoch, "tokens": info.tokens, "loss": info.loss, "lr": info.lr,
        "grad_norm": info.grad_norm, "time": time.time(), "seconds": info.seconds, "tokens_per_s": info.tokens_per_s,
        "supervised": info.supervised, **(info.counted or {}), **info.metrics, **router,
    }  # fmt: skip


def _documents(batches: list[Batch]) -> list[int]:
    return sorted({int(i) for batch in batches for i in batch.document_ids.unique() if i >= 0})


def _listed(ids: list[int], limit: int = 20) -> str:
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
