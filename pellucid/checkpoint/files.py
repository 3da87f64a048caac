"""Durable file operations: everything that a save does to the disk goes through these few functions.

A folder is written aside under a name with ``.tmp-``, each file synced, and published by one rename. What writes a file
says its size and hash, so that nothing is read again for the manifest.
"""

import ctypes
import fnmatch
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.errors import ConfigError, StorageError, TrainingError

before_operation: Callable[[str, Path], None] | None = None
after_operation: Callable[[str, Path], None] | None = None
"""Called around each operation with its name ("make", "write", "fsync", "rename", "remove") and path; tests kill here."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Types as safetensors names them."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2(2)."""

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Written(NamedTuple):
    """A file as the manifest knows it."""

    bytes: int
    sha256: str


def make_folder(folder: Path) -> None:
    """A new folder, and those above it."""
    _operate("make", folder, lambda: folder.mkdir(parents=True))


def write_bytes(path: Path, data: bytes) -> Written:
    """Create ``path`` with ``data`` and sync it."""
    return _write(path, [data])


def write_json(path: Path, value: Any) -> Written:
    """Create ``path`` with ``value`` as indented JSON and sync it."""
    return write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """Create ``path`` as safetensors and sync it."""
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    in_order = sorted(shapes, key=lambda name: -shapes[name][1].itemsize)
    return stream_tensors(
        path, {name: shapes[name] for name in in_order}, ((name, tensors[name]) for name in in_order), metadata
    )


def stream_weights(path: Path, shapes: Shapes, weights: Iterable[tuple[str, Tensor | None]]) -> Written:
    """`stream_tensors` of weights, which have to be finite.

    Raises:
        TrainingError: a weight is not; names it.
    """
    return stream_tensors(path, shapes, _finite(weights))


def _finite(weights: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        assert weight is not None, name
        _refuse_non_finite(name, weight)
        yield name, weight
        del weight  # before the next one is made


def _refuse_non_finite(name: str, weight: Tensor) -> None:
    if weight.numel() and weight.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        least, most = weight.detach().aminmax()  # which needs no memory, and keeps a NaN
        if not math.isfinite(least) or not math.isfinite(most):
            raise TrainingError(
                f"{name} is not finite in {str(weight.dtype).removeprefix('torch.')} and is not saved; what was saved before "
                "is untouched. In a run, lower optim.lr; elsewhere look at the model with `pellucid inspect`, or take a type "
                "that holds larger numbers"
            )


def stream_tensors(
    path: Path, shapes: Shapes, tensors: Iterable[tuple[str, Tensor | None]], metadata: Mapping[str, str] | None = None
) -> Written:
    """Create ``path`` as safetensors, one tensor after the other, and sync it: one tensor is in memory at a time.

    Args:
        shapes: what will come, in that order, wide types first: so each tensor begins at a multiple of its element size,
            and the file can be mapped.
        metadata: beside ``{"format": "pt"}``, which transformers wants to see.
    """
    return _write(path, _safetensors(shapes, tensors, metadata or {}))


def _safetensors(
    shapes: Shapes, tensors: Iterable[tuple[str, Tensor | None]], metadata: Mapping[str, str]
) -> Iterable[Any]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset, widest = 0, 8
    for name, (shape, dtype) in shapes.items():
        assert dtype.itemsize <= widest, f"{name}: wide types come first"
        widest = dtype.itemsize
        stop = offset + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    expected = iter(shapes.items())
    for name, tensor in tensors:
        assert tensor is not None and next(expected) == (name, (tuple(tensor.shape), tensor.dtype)), name
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data
        del tensor, flat  # before the next one is made
    assert next(expected, None) is None, "a tensor is missing"


def refuse_foreign(final: Path, ours: Collection[str], what: str) -> None:
    """`ConfigError` unless a folder may be replaced: it is not there, or everything in it has a name of ``ours``.

    Args:
        ours: names, and patterns as `fnmatch` has them.
        what: the kind of folder, for the message.
    """
    if not final.exists():
        return
    if not final.is_dir():
        raise ConfigError(f"{final} is a file; give the folder of {what} another name")
    foreign = sorted(
        path.name for path in final.iterdir() if not any(fnmatch.fnmatchcase(path.name, name) for name in ours)
    )
    if foreign:
        raise ConfigError(f"{final} exists and is no {what}: it has {foreign[0]}; give another path or move that away")


def write_folder(
    final: Path, contents: Mapping[str, bytes], name: str, shapes: Shapes, tensors: Iterable[tuple[str, Tensor | None]]
) -> None:
    """Write a folder of ``contents`` and one safetensors file ``name``, as `stream_weights` has it, aside, and publish it.

    A folder that is there is replaced, and leftovers of killed processes that wrote it are removed.
    """
    temporary = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    if temporary.exists():
        remove(temporary)
    try:
        make_folder(temporary)
        for file, data in contents.items():
            if not (temporary / file).parent.exists():
                make_folder((temporary / file).parent)
            write_bytes(temporary / file, data)
        stream_weights(temporary / name, shapes, tensors)
        publish(temporary, final)
        for leftover in [path for path in final.parent.iterdir() if path.name.startswith(f"{final.name}.tmp-")]:
            remove(leftover)  # with a new folder in place nobody needs it
    finally:
        if temporary.exists():
            remove(temporary)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished folder its name. A folder that has the name already is replaced; on Linux there is one at any moment."""
    sync(temporary)
    if not final.exists():
        _operate("rename", temporary, lambda: os.rename(temporary, final))
        sync(final.parent)
        return
    old = temporary
    if not _swapped(temporary, final):
        old = final.with_name(f"{final.name}.tmp-old-{os.getpid()}")
        _operate("rename", final, lambda: os.rename(final, old))
        _operate("rename", temporary, lambda: os.rename(temporary, final))
    sync(final.parent)
    remove(old)


def _swapped(one: Path, other: Path) -> bool:
    """Let two folders exchange their names at once; False where the system or the file system does not know how."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if exchange is None:
        return False
    done = False

    def swap() -> None:
        nonlocal done
        done = exchange(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0

    _operate("rename", one, swap)
    return done


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


def _write(path: Path, pieces: Iterable[Any]) -> Written:
    hashed, size = hashlib.sha256(), 0

    def write() -> None:
        nonlocal size
        with open(path, "wb") as file:
            for piece in pieces:
                hashed.update(piece)
                size += len(piece)
                file.write(piece)
                del piece

    _operate("write", path, write)
    sync(path)
    return Written(size, hashed.hexdigest())


def _operate(name: str, path: Path, operation: Callable[[], None]) -> None:
    if before_operation is not None:
        before_operation(name, path)
    try:
        operation()
    except OSError as error:
        raise StorageError(f"cannot {name} {path}: {error.strerror or error}") from error
    if after_operation is not None:
        after_operation(name, path)
