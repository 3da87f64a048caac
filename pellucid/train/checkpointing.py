"""How every rank takes part in a save: what it writes, what all have to say, and when a checkpoint is there."""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pellucid.checkpoint import files
from pellucid.checkpoint.adapter import ADAPTER_CONFIG, adapter_json, merged, split_weights, write_adapter
from pellucid.checkpoint.files import Shapes, Written
from pellucid.checkpoint.model_folder import model_files, write_model
from pellucid.checkpoint.reshard import OPTIMIZER, part_name, write_parts
from pellucid.checkpoint.store import RNG, STATE, WEIGHTS, Write, extra_files, write_files, writing_bytes
from pellucid.config import to_toml
from pellucid.model.lora import is_adapter_weight, lora_of
from pellucid.parallel import comm
from pellucid.train.ema import EMA_ADAPTER, EMA_MODEL, EMA_WEIGHTS
from pellucid.train.ranks import gather_rng, on_every_rank, on_first_rank
from pellucid.train.saving import ADAPTER_FOLDER, RunWriter
from pellucid.train.setup import Setup
from pellucid.train.state import TrainState, clone_all
from pellucid.version import __version__


@dataclass(slots=True)
class Save:
    """One checkpoint under way, as one rank sees it."""

    step: int
    folder: Path
    state: dict[str, Any]
    """For state.json; the first rank's."""
    written: dict[str, Written] = field(default_factory=dict)
    with_state: list[str] = field(default_factory=list)
    """Parameters whose optimizer state begins in this rank's part."""
    error: Exception | None = None
    thread: threading.Thread | None = None
    complete: bool = False
    """Whether all that this rank writes is written, or in the hands of its thread."""

    def attempt(self, function: Callable[[], None]) -> None:
        """Call ``function`` and keep what it raises for `report`; after one failure nothing is tried any more."""
        if self.error is not None:
            return
        try:
            function()
        except Exception as error:
            self.error = error

    def write(self, writes: Mapping[str, Write]) -> None:
        """`attempt` to write files."""
        self.attempt(lambda: self.written.update(write_files(self.folder, writes)))

    def write_rest(self, writes: Mapping[str, Write], *, background: bool) -> None:
        """`write` the last files; in a thread, that one alone keeps the copies of tensors that ``writes`` hold."""
        if background:
            self.thread = threading.Thread(target=self.write, args=(writes,), name="checkpoint")
            self.thread.start()
        else:
            self.write(writes)
        self.complete = True

    @property
    def writing(self) -> bool:
        """Whether this rank has not written all of its part yet."""
        return self.thread is not None and self.thread.is_alive()

    def report(self) -> dict[str, Any]:
        """What this rank wrote, once all of it is on disk; raises what prevented it."""
        if self.thread is not None:
            self.thread.join()
        if self.error is not None:
            raise self.error
        return {"files": self.written, "with_state": self.with_state}


class Saver:
    """Checkpoints of a run, as every rank takes part in them. `save` and `finish` are collective.

    Each rank writes what it holds of the optimizer's state; the first one also everything that there is once. A checkpoint
    exists when all have said that their files are on disk and the first rank has given the folder its name.

    Args:
        writer: of the first rank; None elsewhere.
    """

    def __init__(self, setup: Setup, writer: RunWriter | None) -> None:
        self.setup, self.writer = setup, writer
        self._save: Save | None = None

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing its part of a checkpoint."""
        return self._save is not None and self._save.writing

    def save(self, state: TrainState, *, stopped: str | None) -> None:
        """A checkpoint of the finished step; with ``train.async_save`` of copies, written in the background.

        Args:
            stopped: why a callback ended the run after this step, if one did.

        Raises:
            StorageError: it could not be written, or an earlier one in the background; complete ones are untouched.
            RankError: the same, on the ranks that could.
        """
        self.finish()
        background = self.setup.config.train.async_save
        state.rng = gather_rng(state.rng)
        folder = on_every_rank(
            lambda: str(self.writer.begin_save(state.step)) if self.writer else None, tag="save/folder"
        )[0]
        save = self._save = Save(state.step, Path(folder), self._state(state, stopped))
        writes = self._write_weights(save, WEIGHTS, None, copy=background)
        if self.setup.ema is not None:
            writes |= self._write_weights(save, EMA_WEIGHTS, self.setup.ema.held, copy=background)
        save.attempt(lambda: writes.update(self._other_files(save, state, copy=background)))
        save.write_rest(writes, background=background)
        if not background:
            self.finish()

    def finish(self) -> None:
        """Wait until all ranks have written a checkpoint under way, and publish it; nothing, if there is none.

        Raises:
            StorageError, RankError: as `save`; nothing is published and what was written is removed.
        """
        save, self._save = self._save, None
        if save is None:
            return
        try:
            reports = on_every_rank(save.report, tag="save/parts")
        except Exception:
            self._keep_or_discard(save)
            raise
        on_first_rank(lambda: self._publish(save, reports), tag="save")

    def finish_before_error(self) -> None:
        """`finish`, where all ranks are about to raise the same error; what fails here is only said on stderr. Collective."""
        save = self._save
        try:
            self.finish()
        except Exception as error:
            if save is not None:
                self._say_lost(save, error)

    def _keep_or_discard(self, save: Save) -> None:
        """Without the others: publish a checkpoint of which the first rank wrote everything, remove any other."""
        if self.writer is None:
            return
        if self.setup.executor.shards_state or not save.complete or save.error is not None:
            self.writer.store.discard(save.folder)
            return
        try:
            self._publish(save, [save.report()])
        except Exception as error:
            self._say_lost(save, error)

    def _say_lost(self, save: Save, error: Exception) -> None:
        if self.writer is not None:
            print(f"pellucid: the checkpoint of step {save.step} was not saved: {error}", file=sys.stderr)

    def write_model(self, state: TrainState) -> None:
        """The final weights as ``model/``, with an adapter also ``adapter/``, and averages of both as ``*_ema/``.

        Collective, as the weights may be.
        """
        self._write_model(state, "model", ADAPTER_FOLDER, None, {})
        if self.setup.ema is not None:
            facts = {"weights": f"moving average, decay {self.setup.ema.decay:g} a step"}
            self._write_model(state, EMA_MODEL, EMA_ADAPTER, self.setup.ema.whole(), facts)

    def _write_model(
        self, state: TrainState, name: str, adapter: str, of: Mapping[str, Tensor] | None, facts: Mapping[str, str]
    ) -> None:
        executor = self.setup.executor
        shapes: Shapes = executor.weight_shapes()
        adapters: dict[str, Tensor] = {}
        lora = lora_of(self.setup.model)
        if lora is not None:
            shapes, adapters = split_weights(shapes, executor.weights(of))
        weights = executor.weights(of)
        try:
            if self.writer is not None and lora is not None:
                write_adapter(self.writer.folder.path / adapter, lora, adapters, base=self._base())
            if self.writer is not None:
                whole = merged(weights, adapters, lora) if lora is not None else weights
                write_model(self.writer.folder.path / name, self._model_files(state, facts), shapes, whole)
        finally:
            for _ in weights:  # others may be in the middle of a gather
                pass

    def close(self) -> None:
        """End, after an error too: wait for this rank's thread, and keep what it wrote if nobody else had a part in it."""
        save, self._save = self._save, None
        try:
            if save is not None and save.thread is not None:
                save.thread.join()
            if save is not None:
                self._keep_or_discard(save)
            if save is not None and save.error is not None:
                self._say_lost(save, save.error)
        finally:
            if self.writer is not None:
                self.writer.close()

    # -- the files of a checkpoint ---------------------------------------------------------------------------

    def _write_weights(
        self, save: Save, file: str, of: Mapping[str, Tensor] | None, *, copy: bool
    ) -> dict[str, Write]:  # fmt: skip
        """Write the weights, one at a time; or, where nobody else is needed for them, what will write copies of them.

        Goes through all weights on every rank whatever happens on this one: the others may be in the middle of a gather.

        Args:
            of: as `Executor.weights` has it.
        """
        executor, writes, copies = self.setup.executor, dict[str, Write](), dict[str, Tensor]()
        shapes, weights = executor.weight_shapes(), executor.weights(of)
        if of is not None:
            shapes = {name: shape for name, shape in shapes.items() if name in of}

        def stream(tensors: Iterator[tuple[str, Tensor | None]]) -> Write:
            return lambda path: files.stream_weights(path, shapes, tensors)

        if self.writer is not None and copy and not executor.shards_weights:
            save.attempt(lambda: copies.update((name, _copy(weight)) for name, weight in weights))
            writes[file] = stream(_one_by_one(copies))
        elif self.writer is not None:
            save.write({file: stream(weights)})
        for _ in weights:
            pass
        return writes

    def _other_files(self, save: Save, state: TrainState, *, copy: bool) -> dict[str, Write]:
        """The rest of what this rank writes."""
        executor, writes = self.setup.executor, dict[str, Write]()
        if executor.shards_state or self.writer is not None:
            parts = list(executor.optimizer_parts())
            save.with_state = sorted({part.name.rpartition("/")[0] for part in parts if part.start == 0})
            if copy:
                parts = [replace(part, tensor=_copy(part.tensor)) for part in parts]
            name = part_name(comm.rank(), comm.world_size()) if executor.shards_state else OPTIMIZER
            writes[name] = lambda path: write_parts(path, parts, whole=not executor.shards_state)
        if self.writer is not None:
            rng = clone_all(state.rng)
            writes |= {name: writing_bytes(data) for name, data in self._model_files(state).items()}
            lora = lora_of(self.setup.model)
            if lora is not None:
                writes[ADAPTER_CONFIG] = writing_bytes(adapter_json(lora, self._base()))
            writes[RNG] = lambda path: files.write_tensors(path, rng)
            callbacks = self.setup.callbacks
            writes |= extra_files({c.name: value for c in callbacks if c.name and (value := c.state_dict())})
        return writes

    def _publish(self, save: Save, reports: list[dict[str, Any]]) -> None:
        """The first rank's last part: state.json and the manifest, and the folder's name."""
        assert self.writer is not None
        listed = {name: Written(*facts) for report in reports for name, facts in report["files"].items()}
        with_state = {name for report in reports for name in report["with_state"]}
        without = [name for name in self.setup.executor.optimized if name not in with_state] if with_state else []
        state = save.state | {"without_state": without}
        try:
            listed[STATE] = files.write_json(save.folder / STATE, state)
        except Exception:
            self.writer.store.discard(save.folder)
            raise
        self.writer.store.publish(save.folder, save.step, listed)

    def _state(self, state: TrainState, stopped: str | None) -> dict[str, Any]:
        setup = self.setup
        scaler = setup.executor.scaler
        return {
            "step": state.step,
            "total_steps": setup.total_steps,
            "epoch": state.epoch,
            "samples": state.cursor["samples"],
            "cursor": state.cursor,
            "tokens_seen": state.tokens_seen,
            "schedule": {"name": setup.config.optim.schedule.name, "lr": setup.optimizer.param_groups[0]["lr"]},
            "scaler": scaler.state_dict() if scaler is not None else None,
            "world_size": comm.world_size(),
            "mode": setup.config.parallel.mode,
            "stopped": stopped,
            "config_sha256": hashlib.sha256(to_toml(setup.config).encode()).hexdigest(),
            "code_version": __version__,
        }

    def _base(self) -> str | None:
        """What an adapter of this run is on, wherever its folder is read from."""
        init = self.setup.config.train.init
        return str(Path(init).resolve()) if init else None

    def _model_files(self, state: TrainState, more: Mapping[str, str] | None = None) -> dict[str, bytes]:
        """Every file of the model folder but its weights, with ``more`` rows for the model card."""
        setup = self.setup
        facts: dict[str, Any] = {"optimizer steps": f"{state.step:,}", "tokens seen": f"{state.tokens_seen:,}"}
        if setup.data is not None:
            sources = setup.data.index.sources
            facts["data"] = "; ".join(f"{source['name']} ({source['licence']})" for source in sources)
        facts |= more or {}
        shapes = {name: kind for name, kind in setup.executor.weight_shapes().items() if not is_adapter_weight(name)}
        return model_files(setup.model.config, shapes, setup.tokenizer, facts)


def _copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the first rank gets every weight"
    return tensor.detach().to("cpu", copy=True)


def _one_by_one(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each is forgotten when the next one is asked for."""
    for name in list(tensors):
        yield name, tensors.pop(name)
