"""A model folder, checkpoint or run -> a GGUF file of the llama architecture, one tensor in memory at a time."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.checkpoint import files
from pellucid.checkpoint.gguf import ARCHITECTURE, ROPE_FACTORS, rotary_rows, tensor_name, write_config
from pellucid.checkpoint.gguf_import import CONVERTED, require_gguf
from pellucid.checkpoint.model_folder import SavedModel, open_model, read_as
from pellucid.errors import CheckpointError, ConfigError, StorageError
from pellucid.tokenizer.gguf_write import to_gguf

KINDS = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0"}
"""What ``--type`` may say -> the type of the matrices. Vectors are always F32; a matrix whose rows no whole number of
Q8_0 blocks fills is F16, as in llama.cpp."""
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}
_BLOCK = 32


def export_gguf(source: str | Path, out: str | Path, *, kind: str) -> Path:
    """Write the model of a checkpoint, a run or a model folder as a GGUF file, its tokenizer included.

    Args:
        out: the file; it must not exist.
        kind: "f32", "f16" or "q8_0".

    Returns:
        The folder that was read.

    Raises:
        ConfigError: the architecture has no place for a field of the model (named), ``out`` exists, an unknown kind, or the
            package `gguf` is not installed.
        CheckpointError: the model is missing, damaged or of another shape, or a weight does not fit the kind.
        DataError: a GGUF file has no place for its tokenizer.
        StorageError: it could not be written; nothing of it is left.
    """
    out = Path(out)
    if kind not in KINDS:
        raise ConfigError(f"type {kind!r} is unknown; known: {', '.join(KINDS)}")
    if out.exists():
        raise ConfigError(f"{out} exists; give another --out or remove it")
    gguf, model = require_gguf("a GGUF file"), open_model(source)
    metadata, factors = write_config(model.config)
    metadata |= {"general.name": model.folder.resolve().name, "general.file_type": _FILE_TYPES[kind]}
    metadata |= {"general.type": "model"} | ({"general.quantization_version": 2} if kind == "q8_0" else {})
    metadata |= _tokenizer_keys(model)
    temporary = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(gguf, temporary, metadata, model, factors, kind)
        files.sync(temporary)
        os.rename(temporary, out)
        files.sync(out.parent)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return model.folder


def _tokenizer_keys(model: SavedModel) -> dict[str, Any]:
    rows, tokenizer = model.config.vocab_size, model.tokenizer
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{model.folder}: the tokenizer has {tokenizer.vocab_size:,} ids and the model's embedding {rows:,} rows"
        )
    return to_gguf(tokenizer, rows=rows)


def _write(
    gguf: Any, path: Path, metadata: dict[str, Any], model: SavedModel, factors: Tensor | None, kind: str
) -> None:
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    try:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        for key, value in metadata.items():
            if key != "general.architecture":  # the writer's own
                add.get(type(value), writer.add_array)(key, value)
        encoders = {name: _encoder(gguf, shape, kind) for name, (shape, _) in model.shapes.items()}
        for name, (shape, _) in model.shapes.items():
            row = encoders[name](torch.zeros(1, shape[-1]), name)
            bytes_shape = (*shape[:-1], row.shape[-1])
            size = row.nbytes * int(np.prod(shape[:-1]))
            type_ = gguf.GGMLQuantizationType.Q8_0 if row.dtype == np.uint8 else None
            writer.add_tensor_info(tensor_name(name), bytes_shape, row.dtype, size, type_)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, np.dtype(np.float32), factors.numel() * 4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in model.shapes:
            writer.write_tensor_data(_encoded(model, name, encoders[name]))
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
    finally:
        writer.close()


Encoder = Callable[[Tensor, str], "np.ndarray[Any, Any]"]
"""Rows ``[n, row]`` float32 and the name of their tensor -> the same rows as the file has them, ``[n, bytes or elements]``."""


def _encoder(gguf: Any, shape: tuple[int, ...], kind: str) -> Encoder:
    if len(shape) == 1 or kind == "f32":
        return lambda rows, name: rows.numpy()
    if kind == "q8_0" and shape[-1] % _BLOCK == 0:
        return lambda rows, name: gguf.quants.quantize(_checked(rows, name, "q8_0"), gguf.GGMLQuantizationType.Q8_0)
    return lambda rows, name: _checked(rows.half(), name, "f16")


def _checked(rows: Tensor, name: str, kind: str) -> "np.ndarray[Any, Any]":
    if not bool(rows.isfinite().all()):
        raise CheckpointError(
            f"{name} holds values that {kind} cannot hold; give --type f32 or look for what went wrong"
        )
    return rows.numpy()


def _encoded(model: SavedModel, name: str, encode: Encoder) -> "np.ndarray[Any, Any]":
    """A tensor as the file has it: rows permuted, encoded a piece at a time."""
    shape, _ = model.shapes[name]
    weight = read_as(model.weights, name, torch.float32).view(-1, shape[-1])
    order = rotary_rows(name, model.config, to_file=True)
    if order is not None:
        weight = weight.view(len(order), -1)[order].view(-1, shape[-1])
    step = max(1, CONVERTED // shape[-1])
    pieces = [encode(weight[start : start + step], name) for start in range(0, len(weight), step)]
    return np.concatenate(pieces)
