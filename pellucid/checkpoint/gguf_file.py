"""The GGUF container: a header of typed keys, a table of tensors, then their bytes. Nothing here knows a model.

Every length in the file is checked against what is left of it before anything is allocated, so that a cut or hostile
file ends in a message. Versions 2 and 3, little-endian. Source: the GGUF specification of the ggml project.
"""

import math
import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pellucid.errors import CheckpointError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
"""As ggml has it."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type -> how `struct` writes it."""
_FLOAT32, _STRING, _ARRAY = 6, 8, 9

BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Tensor type -> name, elements of a block, bytes of a block. Blocks never cross rows."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is, and how its elements are written."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as torch has it: the file's order reversed."""
    type: str
    start: int
    """Bytes, from the start of the file."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Of one row, the last dimension."""
        return self.num_bytes // max(1, math.prod(self.shape[:-1]))


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's header."""

    path: Path
    version: int
    metadata: dict[str, Any]
    """Numbers, truth values, strings, and lists of one of these. A 32-bit float is the shortest decimal that gives it."""
    tensors: dict[str, GgufTensor]

    def read(self, tensor: GgufTensor) -> bytearray:
        """All bytes of a tensor, in new memory."""
        data = bytearray(tensor.num_bytes)
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(tensor.start)
                view = memoryview(data)
                while len(view):
                    count = file.readinto(view)
                    if not count:
                        raise CheckpointError(f"{self.path} became shorter while it was read, at {tensor.name}")
                    view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path}: {tensor.name} cannot be read: {error.strerror or error}") from error
        return data


def open_gguf(path: str | Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        CheckpointError: there is no such file, it is none, it is cut, or what it says contradicts itself; names the key or
            the tensor.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: " + ("is a folder, no GGUF file" if path.is_dir() else "no such file"))
    try:
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
            with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                return _Header(path, data).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Header:
    """A cursor that never leaves the file."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path, self.data, self.at = path, data, 4
        self.where = "the header"

    def read(self) -> GgufFile:
        version = self._number("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian; only little-endian files are read" if swapped in (2, 3) else "only 2 and 3 are read"
            self._fail(f"is GGUF version {version}: {kind}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        self._room(num_keys * 13 + num_tensors * 24)  # the least that each takes
        metadata: dict[str, Any] = {}
        for i in range(num_keys):
            self.where = f"key {i + 1} of {num_keys}"
            key = self._string()
            if key in metadata:
                self._fail(f"has the key {key} twice")
            self.where = f"the value of {key}"
            metadata[key] = self._value(self._number("I"))
        entries = [self._entry(i, num_tensors) for i in range(num_tensors)]
        tensors = self._place(entries, self._alignment(metadata))
        return GgufFile(self.path, version, metadata, tensors)

    def _entry(self, i: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, row-major shape, type and offset of a tensor."""
        self.where = f"the entry of tensor {i + 1} of {count}"
        name = self._string()
        self.where = f"the entry of tensor {name}"
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._fail(f"says that {name} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        if not all(shape):
            self._fail(f"says that {name} has shape {shape}; every dimension must be at least 1")
        return name, shape, self._number("I"), self._number("Q")

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GgufTensor]:
        start_of_data = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                self._fail(f"has the tensor {name} twice")
            if kind not in BLOCKS:
                self._fail(
                    f"has {name} in tensor type {kind}, which is unknown; requantise it to one that llama.cpp documents"
                )
            type_name, elements, size = BLOCKS[kind]
            if shape[-1] % elements:
                self._fail(f"has {name} in {type_name} with rows of {shape[-1]} elements, no multiple of {elements}")
            num_bytes = math.prod(shape) // elements * size
            start = start_of_data + offset
            if start + num_bytes > len(self.data):
                self._fail(
                    f"is cut: {name} ends at byte {start + num_bytes:,}, the file at {len(self.data):,}; copy or download it again"
                )
            tensors[name] = GgufTensor(name, shape, type_name, start, num_bytes)
        end, before = start_of_data, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                self._fail(f"has {tensor.name} in bytes that belong to {before}")
            end, before = tensor.start + tensor.num_bytes, tensor.name
        return tensors

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            self._fail(f"has general.alignment {value!r}; it must be a power of two")
        return value

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            self._fail(f"has a value of type {kind} at {self.where}, which is unknown")
        value = self._number(_SCALARS[kind])
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._room(8 * count)
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            self._fail(f"has a list of values of type {kind} at {self.where}; numbers and strings are read")
        layout = struct.Struct(f"<{_SCALARS[kind]}")
        self._room(layout.size * count)
        values = [value for (value,) in layout.iter_unpack(self.data[self.at : self.at + layout.size * count])]
        self.at += layout.size * count
        return values

    def _string(self) -> str:
        size = self._number("Q")
        self._room(size)
        self.at += size
        try:
            return self.data[self.at - size : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"has text that is not UTF-8 at {self.where}: {error.reason}")

    def _number(self, letter: str) -> Any:
        layout = _LAYOUTS[letter]
        self._room(layout.size)
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def _room(self, size: int) -> None:
        if self.at + size > len(self.data):
            self._fail(f"is cut: it ends inside {self.where}; copy or download it again")

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path} {what}")


_LAYOUTS = {letter: struct.Struct(f"<{letter}") for letter in _SCALARS.values()}
