"""Model folders: config.json, model.safetensors, the tokenizer, generation_config.json and a model card."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pellucid.checkpoint import files
from pellucid.checkpoint.huggingface import from_hf_config, to_hf_config
from pellucid.checkpoint.store import newest_complete
from pellucid.config import ModelConfig
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model import Transformer
from pellucid.parallel.world import resolve_device
from pellucid.tokenizer import Tokenizer
from pellucid.version import __version__

WEIGHTS = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"


class Loaded(NamedTuple):
    """A model ready for use, in evaluation mode."""

    model: Transformer
    tokenizer: Tokenizer | None
    """None where the folder has no tokenizer.json."""
    config: ModelConfig


def find_model(path: str | Path) -> Path:
    """The model folder that ``path`` means: itself, or a run's ``model/``, else its newest checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(path)
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such model, checkpoint or run")
    if (folder / "config.json").is_file():
        return folder
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    newest = newest_complete(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(
            f"{folder} holds no config.json, no model/ and no complete checkpoint; give a model or a run folder"
        )
    return newest


def load_model(path: str | Path, *, device: str = "auto", dtype: str = "auto") -> Loaded:
    """Load a model folder, a checkpoint or a run.

    Args:
        device: "auto" is cuda where there is one, else cpu.
        dtype: of the weights: "float32", "bfloat16", "float16", or "auto" as stored.

    Raises:
        CheckpointError: the folder, its config or a weight file is missing, damaged or of another shape;
            missing, extra and misshaped tensors are named.
        ConfigError: an unknown device or dtype.
    """
    folder = find_model(path)
    config = read_config(folder)
    target = resolve_device(device)
    model = Transformer(config, device="meta")
    weights = read_weights(folder)
    wanted = _dtype(dtype)
    tensors = {name: tensor.to(target, wanted) for name, tensor in weights.items()}
    load_weights(model, tensors, source=folder, assign=True)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return Loaded(model.to(target).eval(), tokenizer, config)


def save_model(
    path: str | Path, model: Transformer, tokenizer: Tokenizer | None = None, facts: dict[str, Any] | None = None
) -> None:
    """Write a model folder that `load_model` and transformers open; an earlier model there is replaced at once.

    Args:
        facts: rows for the model card.

    Raises:
        ConfigError: ``path`` is a file, or a folder with something else in it.
        StorageError: it could not be written; what was there is untouched.
    """
    final = Path(path)
    if final.exists() and not (final.is_dir() and ((final / "config.json").is_file() or not any(final.iterdir()))):
        raise ConfigError(f"{final} exists and is no model folder; give another path or remove it")
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    if temporary.exists():
        files.remove(temporary)
    temporary.mkdir()
    try:
        for name, data in model_files(model, tokenizer, facts).items():
            files.write_bytes(temporary / name, data)
        files.write_tensors(temporary / WEIGHTS, weights_of(model))
        files.publish(temporary, final)
    finally:
        if temporary.exists():
            files.remove(temporary)


def weights_of(model: Transformer) -> dict[str, Tensor]:
    """The parameters by their bare names; tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def model_files(
    model: Transformer, tokenizer: Tokenizer | None, facts: dict[str, Any] | None = None
) -> dict[str, bytes]:
    """Every file of a model folder but the weights.

    Args:
        facts: rows for the model card.
    """
    dtype = next(model.parameters()).dtype
    ids: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    if tokenizer is not None:
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        stop = list(tokenizer.stop_ids)
        generation = ids | {"eos_token_id": stop if len(stop) > 1 else tokenizer.eos_id}
        contents["generation_config.json"] = _json(generation)
        contents |= tokenizer.files(model_max_length=model.config.max_position_embeddings)
    contents["config.json"] = _json(to_hf_config(model.config, dtype=str(dtype).removeprefix("torch."), **ids))
    contents["README.md"] = _card(model, facts or {}).encode()
    return contents


def read_config(folder: Path) -> ModelConfig:
    """The model's configuration in a folder's config.json."""
    path = folder / "config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; this is no model folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return from_hf_config(table)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's ``model.safetensors``, or of the files that its index lists."""
    index = folder / SHARD_INDEX
    if (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    elif index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    else:
        raise CheckpointError(f"{folder} has a config.json but no {WEIGHTS}; the model has no weights")
    tensors: dict[str, Tensor] = {}
    for name in names:
        file = folder / name
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[key] = opened.get_tensor(key)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing, though {SHARD_INDEX} lists it") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    return tensors


def load_weights(model: Transformer, tensors: dict[str, Tensor], *, source: Path, assign: bool = False) -> None:
    """Put ``tensors`` into ``model``, strictly, by name; a stored copy of a tied head must equal the embedding.

    Raises:
        CheckpointError: tensors are missing, extra or of another shape; names them.
    """
    expected = dict(model.named_parameters())
    tensors = dict(tensors)
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if "lm_head.weight" not in expected and head is not None and embedding is not None:
        if not torch.equal(head, embedding):
            raise CheckpointError(
                f"{source}: tie_word_embeddings is true, but lm_head.weight differs from the embedding"
            )
        del tensors["lm_head.weight"]
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, the config says {tuple(parameter.shape)}"
        for name, parameter in expected.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{source}: weights do not fit config.json: {'; '.join(problems[:5])}{more}")
    model.load_state_dict(tensors, strict=False, assign=assign)


def _card(model: Transformer, facts: dict[str, Any]) -> str:
    c = model.config
    rows = {
        "parameters": f"{model.num_parameters():,}",
        "layers × hidden": f"{c.num_hidden_layers} × {c.hidden_size}",
        "heads (query / key-value)": f"{c.num_attention_heads} / {c.num_key_value_heads}",
        "vocabulary": f"{c.vocab_size:,}",
        "window": f"{c.max_position_embeddings:,} tokens",
    } | facts
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    head = f"---\nlibrary_name: pellucid\n---\n\n# Model card\n\nTrained with pellucid {__version__}."
    return f"{head}\n\n| | |\n|---|---|\n{table}\n"


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _dtype(name: str) -> torch.dtype | None:
    known = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"dtype {name!r} is unknown; known: {', '.join(known)}")
    return known[name]
