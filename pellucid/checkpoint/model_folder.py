"""Model folders: config.json, model.safetensors, the tokenizer, generation_config.json and a model card."""

import ctypes
import json
import mmap
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pellucid.checkpoint import files
from pellucid.checkpoint.adapter import (
    ADAPTER_CONFIG,
    MergedFiles,
    apply_adapter,
    find_base,
    holds_adapter,
    is_adapter,
    open_adapter,
    write_adapter,
)
from pellucid.checkpoint.files import Shapes
from pellucid.checkpoint.huggingface import from_hf_config, to_hf_config
from pellucid.checkpoint.huggingface_family import check_layout
from pellucid.checkpoint.huggingface_keys import brief
from pellucid.checkpoint.reshard import SavedFiles
from pellucid.checkpoint.sentence import read_table
from pellucid.checkpoint.store import MANIFEST, WEIGHTS, newest_complete, verify
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model import Transformer
from pellucid.model.lora import A, B, add_lora, lora_of
from pellucid.model.moe import BALANCING_BIAS
from pellucid.model.quantize import check_kind, quantize_, refuse_quantized
from pellucid.model_config import ModelConfig
from pellucid.parallel.parts import check_weights, weight_shapes
from pellucid.parallel.world import resolve_device
from pellucid.tokenizer import Tokenizer
from pellucid.version import __version__

SHARD_INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
MODEL_FILES = (
    "config.json", "generation_config.json", "README.md", "tokenizer.json", "tokenizer_config.json", WEIGHTS, SHARD_INDEX,
    "model-*-of-*.safetensors", "modules.json", "sentence_bert_config.json", "1_Pooling", "2_Normalize",
)  # fmt: skip
"""What a folder may hold that a new model replaces; encoders have the last four."""
CONVERTED = 2**18
"""Elements that are converted at a time."""


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
    if folder.is_file() and folder.suffix == ".gguf":
        raise CheckpointError(
            f"{folder} is a GGUF file; make a model folder of it with `pellucid import {folder} --out MODEL`"
        )
    if (folder / "config.json").is_file() or is_adapter(folder):
        return folder
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    newest = newest_complete(folder / "checkpoints")
    if newest is None:
        raise CheckpointError(
            f"{folder} holds no config.json, no model/ and no complete checkpoint; give a model or a run folder"
        )
    return newest


def load_model(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    base: str | Path | None = None,
    weights: str | None = None,
) -> Loaded:
    """Load a model folder, a checkpoint, a run, or an adapter's folder with its base.

    Args:
        device: "auto" is cuda where there is one, else cpu.
        dtype: of the weights: "float32", "bfloat16", "float16", or "auto" as stored.
        base: the model that an adapter is on; None: the one that the adapter names.
        weights: "bf16", "int8" or "int4" packs those of the linear layers into so many bits (`pellucid.model.quantize`), on
            the CPU, to compute with and not to train; ``dtype`` is that of the others. None: as they are.

    Returns:
        With an adapter that is not merged (`pellucid.model.lora`), where the folder has one.

    Raises:
        CheckpointError: the folder, its config or a weight file is missing, damaged or of another shape;
            missing, extra and misshaped tensors are named. An adapter's base is not there, or does not fit it.
        ConfigError: an unknown device, dtype or ``weights``; ``base`` for what is no adapter; an adapter on an adapter;
            ``weights`` with an adapter, or on another device than the CPU.
    """
    folder, target = find_model(path), resolve_device(device)
    if weights is not None:
        check_kind(weights, target)
        if holds_adapter(folder):
            raise ConfigError(
                f"weights {weights}: {folder} has an adapter that is not merged; "
                f"`pellucid export {folder} --out MODEL` merges it, and MODEL can be loaded so"
            )
    if is_adapter(folder):
        adapter = open_adapter(folder)
        loaded = load_model(find_base(adapter, base), device=device, dtype=dtype)
        apply_adapter(loaded.model, adapter)
        return loaded._replace(model=loaded.model.eval())
    if base is not None:
        raise ConfigError(f"base {base} was given, and {folder} is no adapter; leave it out")
    config = read_config(folder)
    model = Transformer(config, device="meta")
    if holds_adapter(folder):
        add_lora(model, open_adapter(folder, open_weights(folder)).config)
    tensors, wanted = read_weights(folder), dtype_of(dtype)
    check_layout(tensors, folder)
    if weights is None:
        tensors = {name: tensor.to(target, _dtype_in(name, wanted)) for name, tensor in tensors.items()}
    load_weights(model, tensors, source=folder, assign=True)
    del tensors  # each is freed when it is quantised
    if weights is not None:
        quantize_(model, weights, after=_forget)
        model.to(wanted)
        for parameter in model.parameters():  # what is left of the file's mapping would hold all of it
            parameter.data = parameter.data.clone()
    tokenizer = _read_tokenizer(folder, config)
    return Loaded(model.to(target).eval(), tokenizer, config)


def save_model(
    path: str | Path, model: Transformer, tokenizer: Tokenizer | None = None, facts: dict[str, Any] | None = None
) -> None:
    """Write a model folder that `load_model` and transformers open; an earlier model there is replaced at once.

    Args:
        facts: rows for the model card.

    Raises:
        ConfigError: ``path`` is a file, or a folder with something else in it; or the model has an adapter or is quantised.
        StorageError: it could not be written; what was there is untouched.
    """
    refuse_quantized(model, "to be saved")
    if lora_of(model) is not None:
        raise ConfigError(
            "the model has an adapter, which a model folder has no place for; write the adapter alone with save_adapter, or "
            "merge(model) and remove_lora(model) first (pellucid.model.lora)"
        )
    shapes, weights = weight_shapes(model), weights_of(model)
    contents = model_files(model.config, shapes, tokenizer, facts)
    write_model(path, contents, shapes, ((name, weights[name]) for name in shapes))


def write_model(
    path: str | Path, contents: Mapping[str, bytes], shapes: Shapes, weights: Iterable[tuple[str, Tensor | None]]
) -> None:
    """`save_model` for weights that come one at a time, as `files.stream_tensors` has them.

    Args:
        contents: every other file, by name.
    """
    final = Path(path)
    files.refuse_foreign(final, MODEL_FILES, "model folder")
    files.write_folder(final, contents, WEIGHTS, shapes, weights)


class SavedModel(NamedTuple):
    """A model on disk that is whole, as far as headers tell; no weight is in memory. An adapter is merged as it is read."""

    folder: Path
    config: ModelConfig
    weights: SavedFiles
    shapes: Shapes
    """Of the model's parameters, with the types they are saved in."""
    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    """Rows for the model card."""


def open_model(source: str | Path) -> SavedModel:
    """The model of a checkpoint, a run or a model folder, to be read tensor by tensor.

    Raises:
        CheckpointError: it is missing, damaged or of another shape; names the first bad file or tensor.
    """
    folder, facts = find_model(source), {}
    if (folder / MANIFEST).is_file():
        state = verify(folder, hashes=[WEIGHTS, "config.json", "tokenizer.json", ADAPTER_CONFIG])
        facts = {"optimizer steps": f"{state['step']:,}"}
    home = find_model(find_base(open_adapter(folder))) if is_adapter(folder) else folder
    if home != folder and holds_adapter(home):
        raise ConfigError(f"{folder} is an adapter of {home}, which has an adapter itself; export that one first")
    config, saved = read_config(home), open_weights(home)
    check_layout(saved.keys(), home)
    if holds_adapter(folder):
        adapter = open_adapter(folder) if home != folder else open_adapter(folder, saved)
        saved = MergedFiles(weight_files(home), adapter)
    bare = weight_shapes(Transformer(config, device="meta"))
    check_weights(saved, {name: shape for name, (shape, _) in bare.items()}, ignore=_tied_copy(saved, bare, home))
    shapes = {name: (shape, saved.dtype(name)) for name, (shape, _) in bare.items()}
    tokenizer = _read_tokenizer(home, config)
    return SavedModel(folder, config, saved, shapes, tokenizer, facts)


def export_model(source: str | Path, out: str | Path, *, dtype: str = "auto") -> Path:
    """Write the model of a checkpoint, a run or a model folder as a model folder of its own, one tensor at a time.

    An adapter, on its own or in a checkpoint, is merged into its base.

    Args:
        dtype: of the weights, as `load_model` has it.

    Returns:
        The folder that was read.

    Raises:
        CheckpointError: the model is missing, damaged or of another shape; names the first bad file or tensor.
        ConfigError: ``out`` is a file or a folder with something else in it, or an unknown dtype.
        StorageError: it could not be written; what was there is untouched.
    """
    wanted, found = dtype_of(dtype), open_model(source)
    folder, saved = found.folder, found.weights
    if Path(out).resolve() == folder.resolve():
        raise ConfigError(f"{out} is what is read; give another --out")
    types = {name: (shape, _dtype_in(name, wanted) or saved_as) for name, (shape, saved_as) in found.shapes.items()}
    shapes = dict(sorted(types.items(), key=lambda item: -item[1][1].itemsize))
    contents = model_files(found.config, shapes, found.tokenizer, found.facts)
    if (folder / "README.md").is_file() and not is_adapter(folder):
        contents["README.md"] = (folder / "README.md").read_bytes()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, (shape, dtype) in shapes.items():
            yield name, read_as(saved, name, dtype).view(shape)

    write_model(out, contents, shapes, weights())
    return folder


def export_adapter(source: str | Path, out: str | Path) -> Path:
    """Write the adapter of a checkpoint, or of a run's newest one, as a folder of its own that PEFT opens.

    Returns:
        The folder that was read.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: ``out`` is something else than an adapter.
        StorageError: it could not be written; what was there is untouched.
    """
    folder = newest_complete(Path(source) / "checkpoints") or find_model(source)
    if not holds_adapter(folder):
        raise CheckpointError(f"{folder} has no adapter; give an adapter, or a checkpoint of a run with a table [lora]")
    if (folder / MANIFEST).is_file():
        verify(folder, hashes=[WEIGHTS, ADAPTER_CONFIG])
    adapter = open_adapter(folder, None if is_adapter(folder) else open_weights(folder))
    if Path(out).resolve() == folder.resolve():
        raise ConfigError(f"{out} is what is read; give another --out")
    tensors = {name: adapter.read(name) for layer in adapter.config.targets for name in (layer + A, layer + B)}
    write_adapter(out, adapter.config, tensors, base=adapter.base)
    return folder


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by their bare names; tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def model_files(
    config: ModelConfig, shapes: Shapes, tokenizer: Tokenizer | None, facts: dict[str, Any] | None = None
) -> dict[str, bytes]:
    """Every file of a model folder but the weights.

    Args:
        shapes: of the weights, as `weight_shapes` gives them.
        facts: rows for the model card.
    """
    dtype = shapes["model.embed_tokens.weight"][1]  # others may be float32 always
    ids: dict[str, Any] = {}
    contents: dict[str, bytes] = {}
    if tokenizer is not None:
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        stop = list(tokenizer.stop_ids)
        generation = ids | {"eos_token_id": stop if len(stop) > 1 else next(iter(stop), None)}
        contents[GENERATION] = _json(generation)
        contents |= tokenizer.files(model_max_length=config.max_position_embeddings)
    contents["config.json"] = _json(to_hf_config(config, dtype=str(dtype).removeprefix("torch."), **ids))
    contents["README.md"] = _card(config, shapes, facts or {}).encode()
    return contents


def read_config(folder: Path) -> ModelConfig:
    """The model's configuration in a folder's config.json."""
    path = folder / "config.json"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if is_adapter(folder):
            raise CheckpointError(
                f"{folder} is an adapter, not a model; merge it into its base with "
                f"`pellucid export {folder} --out MODEL` and take that"
            ) from None
        raise CheckpointError(f"{path} is missing; this is no model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return from_hf_config(table)


def _read_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a model folder, with the ends that the model's own files name; None where it has none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    end_ids: list[int] = []
    for path in (folder / "config.json", folder / GENERATION):
        value = read_table(path).get("eos_token_id") if path.is_file() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for id_ in ids:
            if not isinstance(id_, int) or isinstance(id_, bool) or not 0 <= id_ < config.vocab_size:
                raise CheckpointError(
                    f"{path}: eos_token_id is {brief(value)}, and {brief(id_)} is none of the {config.vocab_size:,} ids of the "
                    "vocabulary; correct or remove it"
                )
        end_ids += ids
    return Tokenizer.load(folder, end_ids=end_ids)


def _forget(weight: Tensor) -> None:
    """Let a file's pages go that a weight lies in, so that a model is never in memory both whole and packed (on Linux)."""
    page, advise = mmap.PAGESIZE, getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    start, end = -(-weight.data_ptr() // page) * page, (weight.data_ptr() + weight.nbytes) // page * page
    if advise is not None and start < end:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's ``model.safetensors``, or of the files that its index lists."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[key] = opened.get_tensor(key)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing, though {SHARD_INDEX} lists it") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    return tensors


def open_weights(folder: Path) -> SavedFiles:
    """The weights in a folder, of which nothing is read until it is asked for.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
    """
    return SavedFiles(weight_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights: ``model.safetensors``, or those that its index lists."""
    index = folder / SHARD_INDEX
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not index.is_file():
        raise CheckpointError(f"{folder} has a config.json but no {WEIGHTS}; the model has no weights")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, RecursionError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    return [folder / name for name in sorted(names)]


def read_as(saved: SavedFiles, name: str, dtype: torch.dtype) -> Tensor:
    """A flat tensor in another type, converted in pieces so that it is never in memory in both."""
    if saved.dtype(name) == dtype:
        return saved.read(name)
    flat = torch.empty(torch.Size(saved.shape(name)).numel(), dtype=dtype)
    for start in range(0, len(flat), CONVERTED):
        stop = min(start + CONVERTED, len(flat))
        flat[start:stop] = saved.read(name, start, stop)
    return flat


def _tied_copy(saved: SavedFiles, shapes: Shapes, folder: Path) -> list[str]:
    """The stored copy of a tied head, which must equal the embedding; foreign folders may have one."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head in shapes or head not in saved.keys() or embedding not in saved.keys():  # noqa: SIM118 - no mapping
        return []
    if not torch.equal(saved.read(head), saved.read(embedding)):
        raise CheckpointError(f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embedding")
    return [head]


def load_weights(model: nn.Module, tensors: dict[str, Tensor], *, source: Path, assign: bool = False) -> None:
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


def _card(c: ModelConfig, shapes: Shapes, facts: dict[str, Any]) -> str:
    rows = {
        "parameters": f"{sum(torch.Size(shape).numel() for shape, _ in shapes.values()):,}",
        "layers × hidden": f"{c.num_hidden_layers} × {c.hidden_size}",
    }
    if c.is_latent:
        latent = f"{c.kv_lora_rank} + {c.qk_rope_head_dim}"
        rows["heads (latent attention)"] = f"{c.num_attention_heads}, of a latent of {latent}"
    else:
        rows["heads (query / key-value)"] = f"{c.num_attention_heads} / {c.num_key_value_heads}"
    if c.expert_layers:
        shared = f", {c.n_shared_experts} shared" if c.n_shared_experts else ""
        chosen = f"{c.num_experts_per_tok} of {c.n_routed_experts}{shared}"
        rows["experts a token"] = f"{chosen}, in {len(c.expert_layers)} layers"
    rows |= {
        "vocabulary": f"{c.vocab_size:,}",
        "window": f"{c.max_position_embeddings:,} tokens",
        **facts,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    head = f"---\nlibrary_name: pellucid\n---\n\n# Model card\n\nTrained with pellucid {__version__}."
    return f"{head}\n\n| | |\n|---|---|\n{table}\n"


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _dtype_in(name: str, wanted: torch.dtype | None) -> torch.dtype | None:
    """The type of a weight in a model of type ``wanted``; None: as stored."""
    return torch.float32 if wanted is not None and name.endswith(BALANCING_BIAS) else wanted


def dtype_of(name: str) -> torch.dtype | None:
    """A dtype by name, None for "auto"; ConfigError for one that weights cannot have."""
    known = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"dtype {name!r} is unknown; known: {', '.join(known)}")
    return known[name]
