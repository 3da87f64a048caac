"""The disk side of a run: checkpoints of finished steps, their way back, and the final model."""

import json
from pathlib import Path

from pellucid.checkpoint import files
from pellucid.checkpoint.reshard import SavedFiles
from pellucid.checkpoint.store import Checkpoint, CheckpointStore, newest_undamaged, open_checkpoint
from pellucid.errors import CheckpointError
from pellucid.parallel import comm
from pellucid.parallel.plan import modes
from pellucid.train.ema import EMA_ADAPTER, EMA_MODEL, EMA_WEIGHTS
from pellucid.train.ranks import on_every_rank, rng_of_rank
from pellucid.train.run_folder import RunFolder, replace_text
from pellucid.train.setup import Setup, plan_mode
from pellucid.train.state import restore_rng, seed_everything

ADAPTER_FOLDER = "adapter"
"""Of a run that trained an adapter: that alone, in PEFT's format, beside the merged ``model/``."""
FINALS = (ADAPTER_FOLDER, "model", EMA_ADAPTER, EMA_MODEL)
"""What a finished run has and an unfinished one has not."""


class RunWriter:
    """Writes a run's folder: configuration and log, and decides about its checkpoints. The first rank's alone."""

    def __init__(self, setup: Setup, *, resume: bool) -> None:
        self.setup = setup
        train = setup.config.train
        self.folder = RunFolder(train.out, resume=resume)
        try:
            self.folder.check_unchanged(setup.config)
            self.store = CheckpointStore(
                self.folder.checkpoints, keep_last=train.keep_last, keep_every=train.keep_every
            )
            for name in FINALS:
                for leftover in self.folder.path.glob(f"{name}.tmp-*"):  # of a process killed while it wrote it
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
        finals = [path for name in FINALS if (path := self.folder.path / name).exists()]
        for final in finals if step < self.setup.total_steps and not ended else []:
            files.remove(final)  # it is of fewer steps; until this run ends, the newest checkpoint is the model

    def begin_save(self, step: int) -> Path:
        """Log that ``step`` is saved; returns the folder that ranks write into."""
        self.folder.log({"event": "save", "step": step, "path": f"checkpoints/step_{step:08d}"})
        self.folder.sync_log()
        return self.store.begin(step)

    def take_published(self) -> list[Path]:
        """Checkpoints that became complete since the last call."""
        taken, self.store.published = self.store.published, []
        return taken

    def close(self) -> None:
        """Give the folder up."""
        self.folder.close()


def newest_everywhere(setup: Setup) -> Checkpoint | None:
    """The newest undamaged checkpoint of this run, open on every rank; the first rank finds and verifies it."""
    root = Path(setup.config.train.out) / "checkpoints"

    def find() -> str | None:
        found = newest_undamaged(root) if comm.rank() == 0 else None
        return found.name if found is not None else None

    name = on_every_rank(find, tag="init/resume")[0]
    return open_checkpoint(root / name, hashes=False) if name is not None else None


def write_plan(setup: Setup, folder: Path) -> None:
    """What a step should send, beside the ledger of what it sends; nothing for modes that cannot be planned."""
    mode, executor = setup.config.parallel.mode, setup.executor
    if mode not in modes():
        return
    size, micro_batches = comm.world_size(), executor.grad_accum_steps
    predicted = plan_mode(
        setup.config, executor.infos, mode, world_size=size, micro_batches=micro_batches, strategy=setup.strategy
    )
    replace_text(folder / "plan.json", json.dumps(predicted.to_json()) + "\n")


def restore(setup: Setup, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights, moments, cursor, generators and callback state into a run; ranks read what they hold.

    Raises:
        CheckpointError: it belongs to another model or other data; names the first thing that does not fit.
    """
    state, executor = checkpoint.state, setup.executor
    try:
        executor.load_weights(checkpoint.model)
        executor.load_optimizer_state(checkpoint.optimizer)
        if setup.ema is not None:
            setup.ema.load(SavedFiles([checkpoint.path / EMA_WEIGHTS]))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    setup.loader.load_state_dict(state["cursor"])
    if executor.scaler is not None and state["scaler"] is not None:
        executor.scaler.load_state_dict(state["scaler"])
    for callback in setup.callbacks:
        if callback.name in checkpoint.extra:
            callback.load_state_dict(checkpoint.extra[callback.name])
    mine = rng_of_rank(checkpoint.rng, comm.rank())
    if mine is not None:
        restore_rng(mine)
    else:  # a rank that the run did not have: a stream of its own, the same whenever this step is resumed
        seed_everything(setup.config.train.seed + checkpoint.step, rank=comm.rank())
