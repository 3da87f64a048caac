"""A GGUF file of the llama architecture -> a model folder, one tensor in memory at a time."""

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pellucid.checkpoint.files import Shapes
from pellucid.checkpoint.gguf import ROPE_FACTORS, read_config, rotary_rows, tensor_name
from pellucid.checkpoint.gguf_file import GgufFile, GgufTensor, open_gguf
from pellucid.checkpoint.model_folder import model_files, write_model
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model import Transformer
from pellucid.model_config import ModelConfig
from pellucid.parallel.parts import refuse, weight_shapes
from pellucid.tokenizer import Tokenizer
from pellucid.tokenizer.gguf import from_gguf

CONVERTED = 2**18
"""Elements that are made at a time."""


class Imported(NamedTuple):
    """What came out of a file."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    """None where the file has none."""
    num_parameters: int
    types: dict[str, int]
    """How many tensors the file has in each type."""


def import_gguf(path: str | Path, out: str | Path, *, dtype: str = "float32") -> Imported:
    """Write the model and the tokenizer of a GGUF file as a model folder.

    Args:
        dtype: of the weights: "float32" or "bfloat16". Quantised weights become what their blocks stand for.

    Raises:
        CheckpointError: the file is missing, damaged, of another architecture or contradicts itself; names the key or tensor.
        DataError: its tokenizer is of a kind that we cannot read, or contradicts itself; names the key.
        ConfigError: ``out`` is in use, an unknown dtype, or the package `gguf` is not installed.
        StorageError: the folder could not be written; nothing of it is left.
    """
    out = Path(out)
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype {dtype!r} is unknown for an import; known: float32, bfloat16")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists; give another --out or remove it")
    file = open_gguf(path)
    origin, reader = str(path), WeightReader(file)
    given = {name: tensor.shape for name, tensor in file.tensors.items()}
    factors = reader.read(ROPE_FACTORS, torch.float32) if ROPE_FACTORS in given else None
    config = read_config(file.metadata, given, factors, origin=origin)
    target = torch.float32 if dtype == "float32" else torch.bfloat16
    shapes: Shapes = {
        name: (shape, target) for name, (shape, _) in weight_shapes(Transformer(config, device="meta")).items()
    }
    _check_tensors(given, shapes, origin)
    tokenizer = from_gguf(file.metadata, origin=origin)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{origin}: tokenizer.ggml.tokens has {tokenizer.vocab_size:,} tokens, and token_embd.weight "
            f"{config.vocab_size:,} rows"
        )
    types = dict(Counter(tensor.type for tensor in file.tensors.values()))
    contents = model_files(config, shapes, tokenizer)
    contents["README.md"] = _card(file, types, dtype).encode()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name in shapes:
            rows = rotary_rows(name, config, to_file=False)
            yield name, reader.read(tensor_name(name), target, rows)

    write_model(out, contents, shapes, weights())
    return Imported(config, tokenizer, sum(torch.Size(shape).numel() for shape, _ in shapes.values()), types)


class WeightReader:
    """The tensors of a GGUF file as torch has them.

    Raises:
        ConfigError: the package `gguf` is not installed.
        CheckpointError: a tensor is of a type that `gguf` cannot dequantise; names both.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file, self.gguf = file, require_gguf("a GGUF file")
        self._types = {type_.name: type_ for type_ in self.gguf.GGMLQuantizationType}
        first: dict[str, GgufTensor] = {}
        for tensor in file.tensors.values():
            first.setdefault(tensor.type, tensor)
        for type_name, tensor in first.items():
            if not self._is_known(type_name):
                raise CheckpointError(
                    f"{file.path}: {tensor.name} is of type {type_name}, which the package gguf cannot dequantise; "
                    "requantise the file to another type"
                )

    def read(self, name: str, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
        """A tensor, its rows in the order ``rows``, dequantised in pieces.

        Raises:
            CheckpointError: it cannot be read, or holds values that are not finite.
        """
        tensor = self.file.tensors[name]
        data = np.frombuffer(self.file.read(tensor), dtype=np.uint8).reshape(-1, tensor.row_bytes)
        if rows is not None and len(tensor.shape) == 1:
            return self._dequantised(data, tensor, dtype).reshape(-1)[rows]
        if rows is not None:
            data = data[rows.numpy()]  # before they grow: no block crosses a row
        return self._dequantised(data, tensor, dtype).reshape(tensor.shape)

    def _dequantised(self, data: "np.ndarray[Any, Any]", tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
        """Rows of bytes as rows of elements."""
        if tensor.type == "F32" and dtype == torch.float32:
            whole = torch.from_numpy(data).view(torch.float32)
            self._refuse_non_finite(whole, tensor.name)
            return whole
        made = torch.empty((len(data), tensor.shape[-1]), dtype=dtype)
        step = max(1, CONVERTED // tensor.shape[-1])
        for start in range(0, len(data), step):
            with np.errstate(invalid="ignore", over="ignore"):  # looked for below, with the tensor's name
                values = self.gguf.quants.dequantize(data[start : start + step], self._types[tensor.type])
            piece = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
            self._refuse_non_finite(piece, tensor.name)
            made[start : start + step] = piece
        return made

    def _is_known(self, type_name: str) -> bool:
        """Whether the package can dequantise a type; it says so only when it is asked to do it."""
        if type_name not in self._types:
            return False
        type_ = self._types[type_name]
        _, size = self.gguf.GGML_QUANT_SIZES[type_]
        try:
            self.gguf.quants.dequantize(np.zeros((1, size), dtype=np.uint8), type_)
        except NotImplementedError:
            return False
        return True

    def _refuse_non_finite(self, values: Tensor, name: str) -> None:
        if not bool(values.isfinite().all()):
            raise CheckpointError(f"{self.file.path}: {name} holds values that are not finite; the file is damaged")


def require_gguf(what: str) -> Any:
    """The package `gguf`; `ConfigError` says how to install it for ``what``."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ConfigError(f'{what} needs gguf: install it with pip install "pellucid[formats]"') from error


def _check_tensors(given: dict[str, tuple[int, ...]], shapes: Shapes, origin: str) -> None:
    """Whether a file has exactly a model's tensors; `CheckpointError` names those that are missing, extra or misshaped."""
    expected = {tensor_name(name): shape for name, (shape, _) in shapes.items()}
    problems = [f"missing {name}" for name in expected if name not in given]
    problems += [f"unexpected {name}" for name in given if name not in expected and name != ROPE_FACTORS]
    problems += [
        f"{name} has shape {given[name]}, the keys of the file say {shape}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    refuse(problems, f"{origin}: its tensors do not fit its keys")


def _card(file: GgufFile, types: dict[str, int], dtype: str) -> str:
    """The model card: what the file says about itself."""
    said = file.metadata
    rows = {
        "file": file.path.name,
        "name": said.get("general.name"),
        "organization": said.get("general.organization"),
        "licence": said.get("general.license"),
        "tensors": ", ".join(f"{count} {name}" for name, count in types.items()),
        "weights here": dtype,
    }
    licence = f"license: {rows['licence']}\n" if isinstance(rows["licence"], str) else ""
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value is not None)
    return f"---\n{licence}---\n\n# Model card\n\nImported from a GGUF file.\n\n| | |\n|---|---|\n{table}\n"
