"""Checkpoints: one folder a step, complete or not there.

A checkpoint is a model folder plus the optimizer's state (``optimizer.safetensors``, or a part from each rank),
``rng.safetensors``, ``state.json``, ``extra/`` and ``manifest.json``, which is written last and holds the size and hash of
every other file. A checkpoint is complete if its manifest is there and the sizes match; the hashes are checked when it is
loaded.
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pellucid.checkpoint import files
from pellucid.checkpoint.files import Written
from pellucid.checkpoint.reshard import SavedFiles, open_optimizer
from pellucid.errors import CheckpointError, PellucidError, StorageError

FORMAT = "pellucid-checkpoint"
FORMAT_VERSION = 1
MANIFEST, STATE, RNG, WEIGHTS, EXTRA = "manifest.json", "state.json", "rng.safetensors", "model.safetensors", "extra"

Write = Callable[[Path], Written]
"""Creates a file of a checkpoint."""


class CheckpointStore:
    """The ``checkpoints/`` folder of a run. One process owns it; leftovers of killed ones are removed on opening.

    A save is `begin`, then `write_files` by every rank that has something to write, then `publish` or `discard`.

    Args:
        keep_last: newest checkpoints to keep; 0 keeps all.
        keep_every: also keep multiples of this step; 0 for none.
    """

    def __init__(self, root: Path, *, keep_last: int = 0, keep_every: int = 0) -> None:
        self.root, self.keep_last, self.keep_every = root, keep_last, keep_every
        self.published: list[Path] = []
        """Checkpoints that are complete on disk and that nobody has taken off this list yet."""
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob("*.tmp-*"):
            files.remove(leftover)

    def begin(self, step: int) -> Path:
        """A new folder for the files of a step's checkpoint, which nobody takes for one yet."""
        folder = self.root / f"step_{step:08d}.tmp-{os.getpid()}"
        if folder.exists():
            files.remove(folder)
        files.make_folder(folder)
        return folder

    def publish(self, folder: Path, step: int, listed: Mapping[str, Written]) -> Path:
        """Make a folder the checkpoint of ``step``, and drop what `keep_last` no longer keeps.

        Args:
            listed: every file in it, by its name relative to the folder.

        Raises:
            StorageError: it could not be done; the folder is removed and earlier checkpoints are untouched.
        """
        final = self.root / f"step_{step:08d}"
        table = {name: {"bytes": listed[name].bytes, "sha256": listed[name].sha256} for name in sorted(listed)}
        manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step, "files": table}
        try:
            files.write_json(folder / MANIFEST, manifest)
            files.publish(folder, final)
        except PellucidError:
            self.discard(folder)
            raise
        self._rotate()
        self.published.append(final)
        return final

    def discard(self, folder: Path) -> None:
        """Remove what will not become a checkpoint; if even that fails, the next opening does it."""
        with suppress(StorageError):
            if folder.exists():
                files.remove(folder)

    def _rotate(self) -> None:
        complete = [path for path in checkpoints(self.root) if is_complete(path)]
        old = complete[: -self.keep_last] if self.keep_last else []
        for path in old:
            if not (self.keep_every and step_of(path) % self.keep_every == 0):
                files.remove(path)


def write_files(folder: Path, writes: Mapping[str, Write]) -> dict[str, Written]:
    """Write files of a checkpoint, each by its name relative to the folder.

    Raises:
        StorageError: one could not be written.
    """
    written: dict[str, Written] = {}
    inner = {(folder / name).parent for name in writes} - {folder}
    for parent in inner:
        files.make_folder(parent)
    for name, write in writes.items():
        written[name] = write(folder / name)
    for parent in inner:
        files.sync(parent)
    return written


def extra_files(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Write]:
    """The files of callbacks' states by name: JSON values, or tensors only; of what they are now, by copy."""
    writes: dict[str, Write] = {}
    for name, value in states.items():
        if value and all(isinstance(v, Tensor) for v in value.values()):
            copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in value.items()}
            writes[f"{EXTRA}/{name}.safetensors"] = _writing_tensors(copies)
        else:
            writes[f"{EXTRA}/{name}.json"] = writing_bytes((json.dumps(value, indent=2) + "\n").encode())
    return writes


def writing_bytes(data: bytes) -> Write:
    """Creates a file with ``data``."""
    return lambda path: files.write_bytes(path, data)


def _writing_tensors(tensors: Mapping[str, Tensor]) -> Write:
    return lambda path: files.write_tensors(path, tensors)


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


def verify(path: Path, *, hashes: bool | Collection[str] = True) -> dict[str, Any]:
    """Check a checkpoint against its manifest, which is returned.

    Args:
        hashes: whether to read every file, or the names of those to read; sizes are compared always.

    Raises:
        CheckpointError: it is incomplete or damaged; names the first bad file.
    """
    manifest = _read_json(path / MANIFEST)
    _check_manifest(path / MANIFEST, manifest)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{file} has {size:,} bytes, its manifest says {expected['bytes']:,}; the file is damaged"
            )
        wanted = hashes if isinstance(hashes, bool) else name in hashes
        if wanted and files.sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file} does not have the hash that its manifest says; the file is damaged")
    return manifest


def _check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """`CheckpointError` that names the key of a manifest which is missing, of a newer format or cannot be right."""
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint manifest (format {manifest.get('format')!r})")

    def whole(key: str, value: Any) -> int:
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{path} is damaged: {key} must be a whole number from 0, got {value!r:.80}")
        return value

    def table(key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} is damaged: {key} must be an object, got {value!r:.80}")
        return value

    version = whole("format_version", manifest.get("format_version"))
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path.parent} has format version {version}, this version of pellucid reads up to {FORMAT_VERSION}; "
            "upgrade pellucid"
        )
    whole("step", manifest.get("step"))
    for name, said in table("files", manifest.get("files")).items():
        whole(f"files[{name!r}].bytes", table(f"files[{name!r}]", said).get("bytes"))
        if not isinstance(said.get("sha256"), str):
            raise CheckpointError(
                f"{path} is damaged: files[{name!r}].sha256 must be a string, got {said.get('sha256')!r:.80}"
            )
    for name in (STATE, RNG, WEIGHTS):
        if name not in manifest["files"]:
            raise CheckpointError(f"{path} is damaged: files does not list {name}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint: tensors stay on disk until they are read."""

    path: Path
    step: int
    state: dict[str, Any]
    """What state.json holds."""
    model: SavedFiles
    optimizer: SavedFiles
    """``"<parameter name>/exp_avg"`` and so on."""
    rng: SavedFiles
    """As `gather_rng` names them."""
    extra: dict[str, dict[str, Any]]
    """State of callbacks by name."""


def open_checkpoint(path: Path, *, hashes: bool = True) -> Checkpoint:
    """A checkpoint, verified.

    Args:
        hashes: False where somebody has compared them already.

    Raises:
        CheckpointError: it is incomplete, damaged or of a newer format; names the first bad file.
    """
    manifest = verify(path, hashes=hashes)
    state = read_state(path)
    extra = {
        file.stem: _read_json(file) if file.suffix == ".json" else _read_tensors(file)
        for file in sorted((path / EXTRA).glob("*"))
    }
    return Checkpoint(
        path=path,
        step=manifest["step"],
        state=state,
        model=SavedFiles([path / WEIGHTS]),
        optimizer=open_optimizer(path, state.get("without_state", ())),
        rng=SavedFiles([path / RNG]),
        extra=extra,
    )


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's state.json."""
    return _read_json(path / STATE)


def newest_undamaged(root: Path) -> Path | None:
    """The newest checkpoint that is complete and undamaged, by its hashes, or None where there is none at all.

    A damaged one is named on stderr and the one before it is taken.

    Raises:
        CheckpointError: there are checkpoints, but every one is damaged.
    """
    first_error: CheckpointError | None = None
    for path in reversed(checkpoints(root)):
        try:
            return open_checkpoint(path).path
        except CheckpointError as error:
            first_error = first_error or error
            print(f"pellucid: skipping checkpoint {path.name}: {error}", file=sys.stderr)
    if first_error is not None and any((path / MANIFEST).exists() for path in checkpoints(root)):
        raise CheckpointError(f"no checkpoint under {root} can be read; the newest: {first_error}")
    return None


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest complete one of a run.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path)
    if (folder / MANIFEST).is_file():
        return folder
    newest = newest_complete(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{folder} is no checkpoint and no run with a complete one; give either")
    return newest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
