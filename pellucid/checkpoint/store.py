"""Checkpoints: one folder a step, complete or not there.

A checkpoint is a model folder plus ``optimizer.safetensors``, ``rng.safetensors``, ``state.json``, ``extra/`` and
``manifest.json``, which is written last and holds the size and hash of every other file. A checkpoint is complete
if its manifest is there and the sizes match; the hashes are checked when it is loaded.
"""

import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pellucid.checkpoint import files
from pellucid.errors import CheckpointError, PellucidError

FORMAT = "pellucid-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Tensors = dict[str, Tensor]


@dataclass(slots=True)
class Snapshot:
    """The state after a finished step, by copy: nothing in it changes while it is written."""

    step: int
    model: Tensors
    optimizer: Tensors
    """``"<parameter name>/exp_avg"`` and so on."""
    rng: Tensors
    state: dict[str, Any]
    model_files: dict[str, bytes] = field(default_factory=dict)
    """config.json, the tokenizer and the model card, by file name."""
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of callbacks by name: JSON values, or tensors only."""


class CheckpointStore:
    """The ``checkpoints/`` folder of a run. One process writes it; leftovers of killed ones are removed on opening.

    Args:
        keep_last: newest checkpoints to keep; 0 keeps all.
        keep_every: also keep multiples of this step; 0 for none.
    """

    def __init__(self, root: Path, *, keep_last: int = 0, keep_every: int = 0) -> None:
        self.root, self.keep_last, self.keep_every = root, keep_last, keep_every
        self.published: list[Path] = []
        """Checkpoints that are complete on disk and that nobody has taken off this list yet."""
        self._thread: threading.Thread | None = None
        self._error: PellucidError | None = None
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob("*.tmp-*"):
            files.remove(leftover)

    def save(self, snapshot: Snapshot, *, background: bool = False) -> None:
        """Write and publish ``snapshot``, then drop what `keep_last` no longer keeps.

        In the background it returns at once, and an error is raised by the next `save` or `wait`.

        Raises:
            StorageError: it could not be written; earlier checkpoints are untouched.
        """
        self.wait()
        if not background:
            self._write(snapshot)
            return
        self._thread = threading.Thread(target=self._write_in_background, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until a background save is on disk; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write_in_background(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except PellucidError as error:
            self._error = error

    def _write(self, snapshot: Snapshot) -> None:
        final = self.root / f"step_{snapshot.step:08d}"
        temporary = self.root / f"{final.name}.tmp-{os.getpid()}"
        try:
            write_checkpoint(temporary, snapshot)
            files.publish(temporary, final)
        except PellucidError:
            if temporary.exists():
                files.remove(temporary)
            raise
        self._rotate()
        self.published.append(final)

    def _rotate(self) -> None:
        complete = [path for path in checkpoints(self.root) if is_complete(path)]
        old = complete[: -self.keep_last] if self.keep_last else []
        for path in old:
            if not (self.keep_every and step_of(path) % self.keep_every == 0):
                files.remove(path)


def write_checkpoint(folder: Path, snapshot: Snapshot) -> None:
    """All files of a checkpoint into a new folder, the manifest last."""
    files.make_folder(folder)
    for name, data in snapshot.model_files.items():
        files.write_bytes(folder / name, data)
    files.write_tensors(folder / "model.safetensors", snapshot.model)
    files.write_tensors(folder / "optimizer.safetensors", snapshot.optimizer)
    files.write_tensors(folder / "rng.safetensors", snapshot.rng)
    files.write_json(folder / "state.json", snapshot.state)
    if snapshot.extra:
        files.make_folder(folder / "extra")
    for name, value in snapshot.extra.items():
        if value and all(isinstance(v, Tensor) for v in value.values()):
            files.write_tensors(folder / "extra" / f"{name}.safetensors", value)
        else:
            files.write_json(folder / "extra" / f"{name}.json", value)
    listed = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": snapshot.step, "files": listed}
    files.write_json(folder / MANIFEST, manifest)


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint folders under ``root``, complete or not, oldest step first."""
    found = [path for path in root.glob("step_*") if path.name[5:].isdigit()] if root.is_dir() else []
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(path.name[5:])


def is_complete(path: Path) -> bool:
    """Whether the manifest is there and every file has the size it says."""
    try:
        verify(path, hashes=False)
    except CheckpointError:
        return False
    return True


def newest_complete(root: Path) -> Path | None:
    """The complete checkpoint of the highest step."""
    return next((path for path in reversed(checkpoints(root)) if is_complete(path)), None)


def verify(path: Path, *, hashes: bool = True) -> dict[str, Any]:
    """Check a checkpoint against its manifest, which is returned.

    Raises:
        CheckpointError: it is incomplete or damaged; names the first bad file.
    """
    manifest = _read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} is no checkpoint manifest (format {manifest.get('format')!r})")
    if manifest["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {manifest['format_version']}, this version of pellucid reads up to {FORMAT_VERSION}; "
            "upgrade pellucid"
        )
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{file} has {size:,} bytes, its manifest says {expected['bytes']:,}; the file is damaged"
            )
        if hashes and files.sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file} does not have the hash that its manifest says; the file is damaged")
    return manifest


def load_checkpoint(path: Path) -> Snapshot:
    """A checkpoint, verified. ``model_files`` are not read.

    Raises:
        CheckpointError: it is incomplete, damaged or of a newer format; names the first bad file.
    """
    manifest = verify(path)
    extra = {
        file.stem: _read_json(file) if file.suffix == ".json" else _read_tensors(file)
        for file in sorted((path / "extra").glob("*"))
    }
    return Snapshot(
        step=manifest["step"],
        model=_read_tensors(path / "model.safetensors"),
        optimizer=_read_tensors(path / "optimizer.safetensors"),
        rng=_read_tensors(path / "rng.safetensors"),
        state=_read_json(path / "state.json"),
        extra=extra,
    )


def load_newest(root: Path) -> Snapshot | None:
    """The newest checkpoint that is complete and undamaged, or None where there is none at all.

    A damaged one is named on stderr and the one before it is taken.

    Raises:
        CheckpointError: there are checkpoints, but every one is damaged.
    """
    first_error: CheckpointError | None = None
    for path in reversed(checkpoints(root)):
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            first_error = first_error or error
            print(f"pellucid: skipping checkpoint {path.name}: {error}", file=sys.stderr)
    if first_error is not None and any((path / MANIFEST).exists() for path in checkpoints(root)):
        raise CheckpointError(f"no checkpoint under {root} can be read; the newest: {first_error}")
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _read_tensors(path: Path) -> Tensors:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
