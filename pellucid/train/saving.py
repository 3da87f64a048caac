"""The disk side of a run: snapshots of finished steps, their way back, and the final model."""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from pellucid.checkpoint import files
from pellucid.checkpoint.model_folder import load_weights, model_files, save_model, weights_of
from pellucid.checkpoint.store import CheckpointStore, Snapshot, load_checkpoint, load_newest
from pellucid.config import to_toml
from pellucid.parallel import comm
from pellucid.parallel.plan import modes
from pellucid.train.ranks import of_first_rank, on_first_rank, rng_of_rank
from pellucid.train.run_folder import RunFolder, replace_text
from pellucid.train.setup import Setup, plan_mode
from pellucid.train.state import TrainState, clone_all, restore_rng, seed_everything
from pellucid.version import __version__


class RunWriter:
    """Writes a run's folder: configuration, log, checkpoints and the final model. The first rank's alone."""

    def __init__(self, setup: Setup, *, resume: bool) -> None:
        self.setup = setup
        train = setup.config.train
        self.folder = RunFolder(train.out, resume=resume)
        try:
            self.folder.check_unchanged(setup.config)
            self.store = CheckpointStore(
                self.folder.checkpoints, keep_last=train.keep_last, keep_every=train.keep_every
            )
            for leftover in self.folder.path.glob("model.tmp-*"):  # of a process killed while it wrote the final model
                files.remove(leftover)
        except BaseException:
            self.folder.close()
            raise

    def begin(self, step: int, *, ended: bool) -> None:
        """Ready to log the step after ``step``.

        Args:
            ended: a callback ended the run there; it stays ended.
        """
        self.folder.write_config(self.setup.config)
        self.folder.open_log(step)
        final = self.folder.path / "model"
        if final.exists() and step < self.setup.total_steps and not ended:
            files.remove(final)  # it is of fewer steps; until this run ends, the newest checkpoint is the model

    def save(self, state: TrainState, optimizer: dict[str, Tensor], *, stopped: str | None) -> None:
        """Take a copy of everything and write it, in the background if ``train.async_save``.

        Args:
            optimizer: its state, whole.
            stopped: why a callback ended the run after this step, if one did.
        """
        self.folder.log({"event": "save", "step": state.step, "path": f"checkpoints/step_{state.step:08d}"})
        self.folder.sync_log()
        snapshot = self._snapshot(state, optimizer, stopped)
        self.store.save(snapshot, background=self.setup.config.train.async_save)

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

    def _snapshot(self, state: TrainState, optimizer: dict[str, Tensor], stopped: str | None) -> Snapshot:
        setup = self.setup
        scaler = setup.executor.scaler
        return Snapshot(
            step=state.step,
            model=clone_all(weights_of(setup.model)),
            optimizer=optimizer if setup.executor.gathers_state else clone_all(optimizer),
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
                "world_size": comm.world_size(),
                "mode": setup.config.parallel.mode,
                "stopped": stopped,
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


def load_newest_everywhere(setup: Setup) -> Snapshot | None:
    """The newest undamaged checkpoint of this run, read by every rank; which one it is, the first rank says."""
    root = Path(setup.config.train.out) / "checkpoints"
    found = on_first_rank(lambda: load_newest(root), tag="init/resume")
    step = int(of_first_rank(str(found.step if found is not None else -1), tag="init/step"))
    if step < 0:
        return None
    return found if found is not None else load_checkpoint(root / f"step_{step:08d}")


def write_plan(setup: Setup, folder: Path) -> None:
    """What a step should send, beside the ledger of what it sends; nothing for modes that cannot be planned."""
    mode, executor = setup.config.parallel.mode, setup.executor
    if mode not in modes():
        return
    size, micro_batches = comm.world_size(), executor.grad_accum_steps
    predicted = plan_mode(setup.config, executor.infos, mode, world_size=size, micro_batches=micro_batches)
    replace_text(folder / "plan.json", json.dumps(predicted.to_json()) + "\n")


def restore(setup: Setup, snapshot: Snapshot) -> None:
    """Put a checkpoint's weights, moments, cursor, generators and callback state into a run.

    Raises:
        CheckpointError: it belongs to another model or other data; names the first thing that does not fit.
    """
    source = Path(setup.config.train.out) / "checkpoints" / f"step_{snapshot.step:08d}"
    load_weights(setup.model, snapshot.model, source=source)
    setup.executor.load_optimizer_state(snapshot.optimizer)
    setup.loader.load_state_dict(snapshot.state["cursor"])
    if setup.executor.scaler is not None and snapshot.state["scaler"] is not None:
        setup.executor.scaler.load_state_dict(snapshot.state["scaler"])
    for callback in setup.callbacks:
        if callback.name in snapshot.extra:
            callback.load_state_dict(snapshot.extra[callback.name])
    mine = rng_of_rank(snapshot.rng, comm.rank())
    if mine is not None:
        restore_rng(mine)
    else:  # a rank that the run did not have: a stream of its own, the same whenever this step is resumed
        seed_everything(setup.config.train.seed + snapshot.step, rank=comm.rank())
