"""Durable file operations: everything that a save does to the disk goes through these few functions.

A folder is written aside under a name with ``.tmp-``, each file synced, and published by one rename.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pellucid.errors import StorageError

before_operation: Callable[[str, Path], None] | None = None
after_operation: Callable[[str, Path], None] | None = None
"""Called around each operation with its name ("write", "fsync", "rename", "remove") and path; tests kill here."""


def make_folder(folder: Path) -> None:
    """A new folder, and those above it."""
    _operate("make", folder, lambda: folder.mkdir(parents=True))


def write_bytes(path: Path, data: bytes) -> None:
    """Create ``path`` with ``data`` and sync it."""

    def write() -> None:
        with open(path, "wb") as file:
            file.write(data)

    _operate("write", path, write)
    sync(path)


def write_json(path: Path, value: Any) -> None:
    """Create ``path`` with ``value`` as indented JSON and sync it."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Create ``path`` as safetensors and sync it. Tensors must not share memory."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _operate("write", path, lambda: save_file(contiguous, path, metadata={"format": "pt"}))
    sync(path)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished folder its name. A folder that has the name already is replaced."""
    sync(temporary)
    old: Path | None = None
    if final.exists():
        old = final.with_name(f"{final.name}.tmp-old-{os.getpid()}")
        _operate("rename", final, lambda: os.rename(final, old))
    _operate("rename", temporary, lambda: os.rename(temporary, final))
    sync(final.parent)
    if old is not None:
        remove(old)


def remove(folder: Path) -> None:
    """Delete a folder, its manifest first, so that a half-deleted one never looks complete."""

    def delete() -> None:
        (folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(folder)

    _operate("remove", folder, delete)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Until a file, or the names in a folder, are on disk."""

    def fsync() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    _operate("fsync", path, fsync)


def _operate(name: str, path: Path, operation: Callable[[], None]) -> None:
    if before_operation is not None:
        before_operation(name, path)
    try:
        operation()
    except OSError as error:
        raise StorageError(f"cannot {name} {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise StorageError(f"cannot {name} {path}: {error}") from error
    if after_operation is not None:
        after_operation(name, path)
