"""The disk side of a run: snapshots of finished steps, their way back, and the final model."""

import hashlib
from pathlib import Path
from typing import Any

from pellucid.checkpoint import files
from pellucid.checkpoint.model_folder import load_weights, model_files, save_model, weights_of
from pellucid.checkpoint.store import CheckpointStore, Snapshot, load_newest
from pellucid.config import to_toml
from pellucid.train.run_folder import RunFolder
from pellucid.train.setup import Setup
from pellucid.train.state import TrainState, clone_all, load_optimizer_tensors, optimizer_tensors, restore_rng
from pellucid.version import __version__


class RunWriter:
    """Writes a run's folder: configuration, log, checkpoints and the final model."""

    def __init__(self, setup: Setup, *, resume: bool) -> None:
        self.setup = setup
        train = setup.config.train
        self.folder = RunFolder(train.out, resume=resume)
        try:
            self.folder.check_unchanged(setup.config)
            self.store = CheckpointStore(
                self.folder.checkpoints, keep_last=train.keep_last, keep_every=train.keep_every
            )
        except BaseException:
            self.folder.close()
            raise
        self.last_saved: int | None = None
        self.stopped_by_callback: str | None = None
        """Why a callback ended the run; it stays ended when resumed."""

    def load_newest(self) -> Snapshot | None:
        """The newest undamaged checkpoint of this run."""
        return load_newest(self.folder.checkpoints)

    def begin(self, step: int) -> None:
        """Ready to log the step after ``step``."""
        self.folder.write_config(self.setup.config)
        self.folder.open_log(step)
        self.last_saved = step if step else None
        final = self.folder.path / "model"
        if final.exists() and step < self.setup.total_steps and not self.stopped_by_callback:
            files.remove(final)  # it is of fewer steps; until this run ends, the newest checkpoint is the model

    def save(self, state: TrainState) -> None:
        """Take a copy of everything and write it, in the background if ``train.async_save``."""
        self.folder.log({"event": "save", "step": state.step, "path": f"checkpoints/step_{state.step:08d}"})
        self.folder.sync_log()
        self.store.save(self._snapshot(state), background=self.setup.config.train.async_save)
        self.last_saved = state.step

    def take_published(self) -> list[Path]:
        """Checkpoints that became complete since the last call."""
        taken, self.store.published = self.store.published, []
        return taken

    def write_model(self, state: TrainState) -> None:
        """The final weights as ``model/``."""
        path = self.folder.path / "model"
        save_model(path, self.setup.model, self.setup.tokenizer, self._facts(state))

    def close(self) -> None:
        """Wait for a background save and give the folder up."""
        try:
            self.store.wait()
        finally:
            self.folder.close()

    def _snapshot(self, state: TrainState) -> Snapshot:
        setup = self.setup
        scaler = setup.executor.scaler
        return Snapshot(
            step=state.step,
            model=clone_all(weights_of(setup.model)),
            optimizer=clone_all(optimizer_tensors(setup.model, setup.optimizer)),
            rng=clone_all(state.rng),
            state={
                "step": state.step,
                "total_steps": setup.total_steps,
                "epoch": state.epoch,
                "samples": state.cursor["samples"],
                "cursor": state.cursor,
                "tokens_seen": state.tokens_seen,
                "schedule": {"name": setup.config.optim.schedule.name, "lr": setup.optimizer.param_groups[0]["lr"]},
                "scaler": scaler.state_dict() if scaler is not None else None,
                "world_size": 1,
                "mode": setup.config.parallel.mode,
                "stopped": self.stopped_by_callback,
                "config_sha256": hashlib.sha256(to_toml(setup.config).encode()).hexdigest(),
                "code_version": __version__,
            },
            model_files=model_files(setup.model, setup.tokenizer, self._facts(state)),
            extra={c.name: value for c in setup.callbacks if c.name and (value := c.state_dict())},
        )

    def _facts(self, state: TrainState) -> dict[str, Any]:
        facts: dict[str, Any] = {"optimizer steps": f"{state.step:,}", "tokens seen": f"{state.tokens_seen:,}"}
        if self.setup.data is not None:
            sources = self.setup.data.index.sources
            facts["data"] = "; ".join(f"{source['name']} ({source['licence']})" for source in sources)
        return facts


def restore(setup: Setup, snapshot: Snapshot) -> None:
    """Put a checkpoint's weights, moments, cursor, generators and callback state into a run.

    Raises:
        CheckpointError: it belongs to another model or other data; names the first thing that does not fit.
    """
    source = Path(setup.config.train.out) / "checkpoints" / f"step_{snapshot.step:08d}"
    load_weights(setup.model, snapshot.model, source=source)
    load_optimizer_tensors(setup.model, setup.optimizer, snapshot.optimizer)
    setup.loader.load_state_dict(snapshot.state["cursor"])
    if setup.executor.scaler is not None and snapshot.state["scaler"] is not None:
        setup.executor.scaler.load_state_dict(snapshot.state["scaler"])
    for callback in setup.callbacks:
        if callback.name in snapshot.extra:
            callback.load_state_dict(snapshot.extra[callback.name])
    restore_rng(snapshot.rng)
