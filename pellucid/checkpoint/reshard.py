"""Tensors of a checkpoint, read in any ranges from one file or from the parts that many ranks wrote.

A part file is safetensors whose tensors are flat slices. Its metadata has, under ``"slices"``, the whole shape and the
first element of each: ``{"w/exp_avg": {"shape": [4, 3], "start": 6}}``. In a file without it every tensor is whole.
Nothing is mapped: what is resident is what was asked for.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pellucid.checkpoint import files
from pellucid.errors import CheckpointError
from pellucid.parallel.parts import Part

OPTIMIZER = "optimizer.safetensors"
PART = re.compile(r"optimizer-(\d{5})-of-(\d{5})\.safetensors")


def part_name(rank: int, num_ranks: int) -> str:
    """The file of a rank's part of the optimizer's state."""
    return f"optimizer-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def write_parts(path: Path, parts: Iterable[Part], *, whole: bool) -> files.Written:
    """Create ``path`` from parts of tensors, at most one of each.

    Args:
        whole: each part is a whole tensor, and the file is one that anything reads; else tensors are flat slices.
    """
    ordered = sorted(parts, key=lambda part: -part.tensor.dtype.itemsize)
    if whole:
        tensors = {part.name: part.tensor.view(part.shape) for part in ordered}
        assert len(tensors) == len(ordered), "a tensor comes twice"
        return files.write_tensors(path, tensors)
    slices = {part.name: {"shape": list(part.shape), "start": part.start} for part in ordered}
    assert len(slices) == len(ordered), "a tensor comes twice"
    flat = {part.name: part.tensor.detach().reshape(-1) for part in ordered}
    return files.write_tensors(path, flat, {"slices": json.dumps(slices, separators=(",", ":"))})


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where elements ``[start, stop)`` of a tensor are."""

    start: int
    stop: int
    path: Path
    offset: int
    """Bytes, of the first of them in the file."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype


class SavedFiles:
    """`SavedTensors` in safetensors files, whole or in slices. The files are opened anew for each read.

    Args:
        paths: together they must hold every element of each tensor exactly once.
        without_state: as `SavedTensors` has it.

    Raises:
        CheckpointError: a file is missing or no safetensors, or slices overlap, leave a gap or disagree about the whole;
            names the tensor and the files. Headers alone are read.
    """

    def __init__(self, paths: Sequence[Path], *, without_state: Collection[str] = ()) -> None:
        self.without_state = without_state
        self._slices: dict[str, list[_Slice]] = {}
        for path in paths:
            for name, piece in _read_header(path).items():
                self._slices.setdefault(name, []).append(piece)
        for name, slices in self._slices.items():
            slices.sort(key=lambda piece: (piece.start, piece.stop))
            _check_cover(name, slices)

    def keys(self) -> Collection[str]:
        """Names of the tensors."""
        return self._slices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._slices[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        return self._slices[name][0].dtype

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``[start, stop)``, ``[stop - start]``, in new memory; no more than their bytes are read."""
        slices = self._slices[name]
        stop = slices[-1].stop if stop is None else stop
        tensor = torch.empty(max(0, stop - start), dtype=slices[0].dtype)
        for piece in slices:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                _read_into(tensor[first - start : last - start], piece, first - piece.start)
        return tensor


def open_optimizer(folder: Path, without_state: Collection[str] = ()) -> SavedFiles:
    """The optimizer's state in a checkpoint folder, written by one rank or by many.

    Raises:
        CheckpointError: it is missing or not all there; names the first bad file or tensor.
    """
    if (folder / OPTIMIZER).is_file():
        return SavedFiles([folder / OPTIMIZER], without_state=without_state)
    found = [match for path in folder.glob("optimizer-*") if (match := PART.fullmatch(path.name))]
    if not found:
        raise CheckpointError(f"{folder / OPTIMIZER} is missing; the checkpoint has no optimizer state")
    num_ranks = max(int(match[2]) for match in found)
    paths = [folder / part_name(rank, num_ranks) for rank in range(num_ranks)]
    return SavedFiles(paths, without_state=without_state)


def _read_header(path: Path) -> dict[str, _Slice]:
    """The slices in a file, by name."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= size - 8:
                raise CheckpointError(f"{path} is no safetensors file, or was cut")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        return _slices(path, header, json.loads(metadata.get("slices", "{}")), begin=8 + length, size=size)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error!r}") from error


def _slices(
    path: Path, header: Mapping[str, Any], metadata: Mapping[str, Any], *, begin: int, size: int
) -> dict[str, _Slice]:
    slices: dict[str, _Slice] = {}
    for name, entry in header.items():
        if entry["dtype"] not in files.DTYPES:
            raise CheckpointError(f"{path}: {name} is of a type that is not known here: {entry['dtype']}")
        dtype, local = files.DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        first, last = entry["data_offsets"]
        if not 0 <= first <= last <= size - begin or last - first != local.numel() * dtype.itemsize:
            raise CheckpointError(f"{path}: {name} does not fit the file, which is damaged or was cut")
        said = metadata.get(name, {"shape": entry["shape"], "start": 0})
        start, shape = int(said["start"]), tuple(map(int, said["shape"]))
        slices[name] = _Slice(start, start + local.numel(), path, begin + first, shape, dtype)
    return slices


def _check_cover(name: str, slices: list[_Slice]) -> None:
    """Every element exactly once. Slices are sorted by their start."""
    first, end = slices[0], 0
    for i, piece in enumerate(slices):
        if (piece.shape, piece.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{name} is {first.dtype} {first.shape} in {first.path} and {piece.dtype} {piece.shape} in {piece.path}; "
                "they are of different checkpoints"
            )
        if piece.start < end:
            raise CheckpointError(
                f"{name}: elements [{piece.start}, {min(end, piece.stop)}) are in {slices[i - 1].path} and in {piece.path}"
            )
        if piece.start > end:
            raise CheckpointError(f"{name}: elements [{end}, {piece.start}) are in no file of {piece.path.parent}")
        end = piece.stop
    numel = torch.Size(first.shape).numel()
    if end < numel:
        raise CheckpointError(f"{name}: elements [{end}, {numel}) are in no file of {first.path.parent}")
    if end > numel:
        raise CheckpointError(f"{name} has {numel} elements, and {slices[-1].path} one after element {end - 1}")


def _read_into(target: Tensor, piece: _Slice, skip: int) -> None:
    """Fill ``target``, which is contiguous, from element ``skip`` of a slice on."""
    left = target.view(torch.uint8).numpy().data
    try:
        with open(piece.path, "rb", buffering=0) as file:
            file.seek(piece.offset + skip * piece.dtype.itemsize)
            while left:
                count = file.readinto(left)
                if not count:
                    raise CheckpointError(f"{piece.path} ends too early; the file is damaged")
                left = left[count:]
    except OSError as error:
        raise CheckpointError(f"{piece.path} cannot be read: {error.strerror or error}") from error
