"""LoRA adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

A checkpoint of a run that trains an adapter has the first file too, and the adapter's weights beside the base's.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pellucid.checkpoint import files
from pellucid.checkpoint.files import Shapes
from pellucid.checkpoint.reshard import SavedFiles
from pellucid.config import LoraConfig
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model.lora import A, B, add_lora, is_adapter_weight, lora_of, merged_weight, scaling_of
from pellucid.parallel.parts import refuse

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Before the name that a parameter has in the model, in PEFT's files."""

_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "base_model_name_or_path"}
_HARMLESS = {
    "peft_version", "task_type", "inference_mode", "auto_mapping", "revision", "init_lora_weights", "megatron_core",
    "qalora_group_size", "layers_to_transform", "layers_pattern", "exclude_modules", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Keys that say nothing about the computation beyond what the names of the weights say."""
_PLAIN_STARTS = ("gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base as it is."""


class Adapter(NamedTuple):
    """An adapter on disk. Weights are read when they are asked for."""

    folder: Path
    config: LoraConfig
    """Its targets are the full names of the layers that it is on."""
    base: str | None
    """As its file names it: a folder, or a name on a hub."""
    weights: SavedFiles
    prefix: str
    """Of the names in ``weights``."""

    def read(self, name: str) -> Tensor:
        """An adapter's weight by the name it has in the model."""
        return self.weights.read(self.prefix + name).view(self.weights.shape(self.prefix + name))


def holds_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter, or a checkpoint with one."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter alone: its base is elsewhere."""
    return holds_adapter(folder) and (folder / ADAPTER).is_file()


def open_adapter(folder: Path, weights: SavedFiles | None = None) -> Adapter:
    """The adapter in a folder.

    Args:
        weights: of a checkpoint, where the base's are too; None for a folder as PEFT writes it.

    Raises:
        CheckpointError: a file is missing or damaged, weights are missing or do not belong together, or the configuration
            says something that changes the computation and is not supported here; names it.
    """
    table = _read_table(folder / ADAPTER_CONFIG)
    _refuse_unsupported(table, folder / ADAPTER_CONFIG)
    saved, prefix = (SavedFiles([folder / ADAPTER]), PREFIX) if weights is None else (weights, "")
    names = [name for name in saved.keys() if weights is None or is_adapter_weight(name)]  # noqa: SIM118
    layers = list(dict.fromkeys(name.removeprefix(prefix).removesuffix(A).removesuffix(B) for name in names))
    try:
        config = LoraConfig(
            r=table["r"], alpha=float(table["lora_alpha"]), dropout=float(table.get("lora_dropout") or 0.0),
            targets=tuple(layers), use_rslora=bool(table.get("use_rslora")),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: r, lora_alpha or lora_dropout is no number: {error!r}"
        ) from None
    except ConfigError as error:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG}: {error}") from None
    bad = [name for name in names if not (name.startswith(prefix) and is_adapter_weight(name))]
    expected = [prefix + layer + end for layer in layers for end in (A, B)]
    problems = [f"unexpected {name}" for name in bad]
    problems += [f"missing {name}" for name in expected if name not in saved.keys() and not bad]  # noqa: SIM118
    refuse(problems, f"{folder}: weights of the adapter do not belong together")
    return Adapter(folder, config, table.get("base_model_name_or_path"), saved, prefix)


def apply_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Put a saved adapter on its base, in the base's type; the base is frozen.

    Raises:
        CheckpointError: the base has no such layers, or of other shapes; names them.
        ConfigError: the model has an adapter already.
    """
    check_adapter(adapter, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    add_lora(model, adapter.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_weight(name):
                parameter.copy_(adapter.read(name))


def check_adapter(adapter: Adapter, base: Mapping[str, tuple[int, ...]]) -> None:
    """`CheckpointError` naming layers that a base of these shapes does not have, or has in other sizes."""
    problems, r = [], adapter.config.r
    for layer in adapter.config.targets:
        shape = base.get(f"{layer}.weight")
        if shape is None or len(shape) != 2:
            problems.append(f"its base has no linear layer {layer}")
            continue
        for end, expected in ((A, (r, shape[1])), (B, (shape[0], r))):
            found = adapter.weights.shape(adapter.prefix + layer + end)
            if found != expected:
                problems.append(f"{layer}{end} has shape {found}, its base and r = {r} need {expected}")
    refuse(problems, f"{adapter.folder}: the adapter does not fit its base")


def find_base(adapter: Adapter, base: str | Path | None = None) -> Path:
    """The folder of an adapter's base: ``base``, or what its file names, from here or from the adapter's folder.

    Raises:
        CheckpointError: it is not on this machine.
    """
    if base is not None:
        return Path(base)
    way_out = f"give it as load_model(..., base=FOLDER), or write its folder into {adapter.folder / ADAPTER_CONFIG}"
    if not adapter.base:
        raise CheckpointError(f"{adapter.folder} is an adapter that does not name its base; {way_out}")
    for folder in (Path(adapter.base), adapter.folder / adapter.base):
        if folder.is_dir():
            return folder
    raise CheckpointError(f"{adapter.folder} is an adapter of {adapter.base!r}, which is no folder here; {way_out}")


def save_adapter(path: str | Path, model: nn.Module, *, base: str | None = None) -> None:
    """Write a model's adapter as a folder that `load_model` and PEFT open; an earlier adapter there is replaced at once.

    Args:
        base: where its base is; None leaves that to whoever loads it.

    Raises:
        ConfigError: the model has no adapter, or ``path`` is something else.
        StorageError: it could not be written; what was there is untouched.
    """
    config = lora_of(model)
    if config is None:
        raise ConfigError("the model has no adapter to save; use save_model")
    tensors = {name: p.detach() for name, p in model.named_parameters() if is_adapter_weight(name)}
    write_adapter(path, config, tensors, base=base)


def write_adapter(
    path: str | Path, config: LoraConfig, tensors: Mapping[str, Tensor], *, base: str | None = None
) -> None:
    """`save_adapter` of weights by the names they have in the model; ``config.targets`` are names of layers."""
    final = Path(path)
    files.refuse_foreign(final, (ADAPTER_CONFIG, ADAPTER, "README.md"), "adapter")
    contents = {ADAPTER_CONFIG: adapter_json(config, base)}
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # as files want them
    shapes = {PREFIX + name: (tuple(tensors[name].shape), tensors[name].dtype) for name in names}
    files.write_folder(final, contents, ADAPTER, shapes, ((PREFIX + name, tensors[name]) for name in names))


def adapter_json(config: LoraConfig, base: str | None) -> bytes:
    """PEFT's adapter_config.json of an adapter on the layers ``config.targets``."""
    table = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "target_modules": list(config.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


class MergedFiles(SavedFiles):
    """Weights of a base on disk, to which an adapter is added as they are read; the adapter's are not among them."""

    def __init__(self, paths: Sequence[Path], adapter: Adapter) -> None:
        super().__init__(paths)
        self._slices = {name: slices for name, slices in self._slices.items() if not is_adapter_weight(name)}
        check_adapter(adapter, {name: self.shape(name) for name in self.keys()})
        self._adapter = adapter
        self._layers = {f"{layer}.weight": layer for layer in adapter.config.targets}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """As `SavedFiles.read`; of what is added only the rows that hold these elements are computed."""
        flat = super().read(name, start, stop)
        if name not in self._layers or not len(flat):
            return flat
        width, layer = self.shape(name)[1], self._layers[name]
        first, last = start // width, math.ceil((start + len(flat)) / width)
        rows = torch.zeros((last - first) * width, dtype=flat.dtype)
        inside = slice(start - first * width, start - first * width + len(flat))
        rows[inside] = flat
        a, b = self._adapter.read(layer + A), self._adapter.read(layer + B)[first:last]
        merged = merged_weight(rows.view(-1, width), a, b, scaling_of(self._adapter.config))
        return merged.view(-1)[inside].clone()


def split_weights(shapes: Shapes, weights: Iterable[tuple[str, Tensor | None]]) -> tuple[Shapes, dict[str, Tensor]]:
    """Of whole weights that come one at a time, the shapes of the base's and copies of the adapter's."""
    copies = {name: t.detach().to("cpu", copy=True) for name, t in weights if t is not None and is_adapter_weight(name)}
    return {name: shape for name, shape in shapes.items() if not is_adapter_weight(name)}, copies


def merged(
    weights: Iterable[tuple[str, Tensor | None]], adapters: Mapping[str, Tensor], config: LoraConfig
) -> Iterable[tuple[str, Tensor | None]]:
    """Whole weights one at a time, the adapter's left out and added to those that it belongs to."""
    for name, tensor in weights:
        layer = name.removesuffix(".weight")
        if is_adapter_weight(name):
            continue
        if tensor is not None and layer + A in adapters:
            a, b = (adapters[layer + end].to(tensor.device) for end in (A, B))
            tensor = merged_weight(tensor, a, b, scaling_of(config))
        yield name, tensor


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return table


def _refuse_unsupported(table: dict[str, Any], path: Path) -> None:
    """A key that is off (null, false, empty, "none") may be any; one that is set must be known."""
    if table.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {table.get('peft_type')!r}; only LORA adapters can be read")
    start = table.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _PLAIN_STARTS):
        raise CheckpointError(
            f"{path}: init_lora_weights is {start!r}, which changes the base's weights too; convert the adapter to a plain "
            "one with peft (path_initial_model_for_weight_conversion)"
        )
    for key, value in table.items():
        if key not in _READ | _HARMLESS and value not in (None, False, "", "none", [], {}):
            raise CheckpointError(
                f"{path}: {key} is {value!r}, which changes the computation and is not supported; only plain LoRA is"
            )
