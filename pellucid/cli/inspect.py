"""`pellucid inspect`."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pellucid.cli.output import print_json
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model_config import ModelConfig

Facts = dict[str, Any]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "inspect",
        help="say what a folder is and whether it is whole",
        description="Recognise prepared data, a model, a checkpoint, a run or a GGUF file, print what is in it, and read every file: "
        "sizes, hashes, tensors. Exit code 2 names the first damaged file.",
    )
    parser.add_argument("path", metavar="PATH")
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="of data: also the first N examples, with the tokens that are learnt",
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Recognise, verify, print."""
    path = Path(args.path)
    kind, look = recognise(path)
    if args.show < 0 or (args.show and kind != "data"):
        raise ConfigError(f"--show {args.show}: shows examples of prepared data, 1 or more; {path} is a {kind}")
    facts = {"kind": kind, "path": str(path)} | look(path)
    found = []
    if args.show:
        from pellucid.cli.show_examples import examples, print_examples

        found = examples(path, args.show)
    if args.json:
        print_json(facts | ({"examples": found} if found else {}))
    else:
        print("\n".join(lines_of(facts)))
        if found:
            print_examples(found)
    return 0


def recognise(path: Path) -> tuple[str, Callable[[Path], Facts]]:
    """What a folder is, by the file that only such a folder has; `CheckpointError` for anything else."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.is_file() and path.suffix == ".gguf":
        return "gguf", gguf_facts
    if (path / "index.json").is_file():
        return "data", data_facts
    if (path / "manifest.json").is_file() or any(path.glob("optimizer*.safetensors")):
        return "checkpoint", checkpoint_facts
    if (path / "config.toml").is_file():
        return "run", run_facts
    if (path / "adapter_model.safetensors").is_file():
        return "adapter", adapter_facts
    if (path / "config.json").is_file():
        return "model", model_facts
    raise CheckpointError(
        f"{path} is nothing that Pellucid knows: no index.json (data), manifest.json (checkpoint), config.toml (run), "
        "config.json (model) or adapter_model.safetensors (adapter) in it"
    )


def data_facts(path: Path) -> Facts:
    """Prepared data, every shard hashed and every id checked."""
    from pellucid.data.index import read_index
    from pellucid.data.shards import TokenData

    if read_index(path).kind != "tokens":
        return record_facts(path)
    data = TokenData.open(path)
    data.verify()
    index = data.index
    return {
        "vocab_size": index.vocab_size,
        "dtype": index.dtype,
        "tokenizer_sha256": index.tokenizer_sha256,
        "splits": {
            name: {"tokens": s.tokens, "documents": s.documents, "files": len(s.files)}
            for name, s in index.splits.items()
        },
        "sources": index.sources,
        "verified": "sizes, hashes, ids, document borders, tokenizer",
    }


def record_facts(path: Path) -> Facts:
    """`data_facts` of records for post-training."""
    from pellucid.data.record_files import RecordData

    data = RecordData.open(path)
    data.verify()
    index = data.index
    return {
        "records_for": index.kind,
        **({"rollouts": "answers and rewards are stored"} if index.rollouts else {}),
        "vocab_size": index.vocab_size,
        "dtype": index.dtype,
        "tokenizer_sha256": index.tokenizer_sha256,
        "splits": {
            name: {"records": s.documents, "tokens": s.tokens, "learnt": s.supervised, "longest": s.longest}
            for name, s in index.splits.items()
        },
        "sources": index.sources,
        "verified": "sizes, hashes, ids, borders, marks, tokenizer",
    }


def model_facts(path: Path) -> Facts:
    """A model, loaded as it would be to run it: every tensor present, of the right shape, and finite."""
    from pellucid.checkpoint.encoder_folder import is_encoder
    from pellucid.checkpoint.model_folder import load_model

    if (path / "config.json").is_file() and is_encoder(path):  # an adapter has none
        return encoder_facts(path)
    loaded = load_model(path, device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    dtypes: Facts = {}
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        dtypes[dtype] = dtypes.get(dtype, 0) + parameter.numel()
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"{path}: {name} holds values that are not finite; the weights are damaged")
    facts: Facts = {
        "parameters": model.num_parameters(),
        "without_embedding": model.num_parameters(embedding=False),
        "tensors": sum(1 for _ in model.named_parameters()),
        "parameters_by_dtype": dtypes,
        "config": set_values(loaded.config),
        "tokenizer": "none",
    }
    if loaded.config.is_latent:
        facts["cache"] = cache_in_words(loaded.config)
    if tokenizer is not None:
        from pellucid.text import check_tokenizer

        check_tokenizer(tokenizer, loaded.config)
        template = "with" if tokenizer.chat_template is not None else "without"
        facts["tokenizer"] = f"{tokenizer.vocab_size:,} ids, {template} a chat template, sha256 {tokenizer.sha256}"
    return facts | {"verified": "names and shapes of all tensors, finite values"}


def cache_in_words(config: ModelConfig) -> str:
    """What latent attention caches of a token, and why."""
    from pellucid.model.mla import LatentAttention

    attention = LatentAttention(config, 0, "meta")
    numbers = f"{attention.kv_spec.elements_per_token():,} numbers a token and layer"
    if attention.absorbs:
        return f"latents, {numbers}"
    cause = "qk_norm" if config.qk_norm else "attention_gate"
    return f"expanded keys and values, {numbers}: with model.{cause} latent attention runs expanded"


def adapter_facts(path: Path) -> Facts:
    """An adapter, loaded on its base as it would be to run it."""
    from pellucid.checkpoint.adapter import open_adapter

    adapter = open_adapter(path)
    lora = {"r": adapter.config.r, "alpha": adapter.config.alpha, "use_rslora": adapter.config.use_rslora}
    facts: Facts = {"adapter": lora | {"layers": len(adapter.config.targets), "base": adapter.base}}
    return facts | model_facts(path)


def encoder_facts(path: Path) -> Facts:
    """`model_facts` of an encoder."""
    from pellucid.checkpoint.encoder_folder import load_encoder

    encoder, tokenizer, _ = load_encoder(path, device="cpu")
    for name, parameter in encoder.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"{path}: {name} holds values that are not finite; the weights are damaged")
    facts: Facts = {
        "encoder": type(encoder).__name__,
        "parameters": sum(p.numel() for p in encoder.parameters()),
        "tensors": sum(1 for _ in encoder.parameters()),
        "vectors": {"width": encoder.width, "pooling": encoder.embed.pooling, "normalize": encoder.embed.normalize},
        "max_tokens": encoder.max_tokens,
        "config": set_values(encoder.config),
        "tokenizer": "none" if tokenizer is None else f"{tokenizer.vocab_size:,} ids, sha256 {tokenizer.sha256}",
    }
    return facts | {"verified": "names and shapes of all tensors, finite values"}


def checkpoint_facts(path: Path) -> Facts:
    """A checkpoint: every file against the manifest, then the model in it."""
    from pellucid.checkpoint import store

    manifest, opened = store.verify(path), store.open_checkpoint(path, hashes=False)
    state = opened.state
    known = {key: state[key] for key in ("epoch", "tokens_seen", "world_size", "mode", "code_version") if key in state}
    parts = sum(name.startswith("optimizer") for name in manifest["files"])
    size = sum(file["bytes"] for file in manifest["files"].values())
    facts: Facts = {"step": manifest["step"], "files": len(manifest["files"]), "bytes": size, "optimizer_files": parts}
    facts |= {"optimizer_tensors": len(opened.optimizer.keys())} | known | model_facts(path)
    return facts | {
        "verified": "sizes and hashes of all files, every tensor of the optimizer once, " + facts["verified"]
    }


def gguf_facts(path: Path) -> Facts:
    """A GGUF file, of any architecture: its header, checked against the size of the file."""
    from collections import Counter

    from pellucid.checkpoint.gguf_file import open_gguf

    file = open_gguf(path)
    elements: Counter[str] = Counter()
    for tensor in file.tensors.values():
        elements[tensor.type] += math.prod(tensor.shape)
    short = {key: value for key, value in file.metadata.items() if len(str(value)) <= 80}
    return {
        "version": file.version,
        "tensors": len(file.tensors),
        "parameters": sum(elements.values()),
        "parameters_by_type": dict(elements),
        "metadata": short,
        "long_metadata": sorted(file.metadata.keys() - short.keys()),
        "verified": "keys, names and places of all tensors within the file",
    }


def run_facts(path: Path) -> Facts:
    """A run: its configuration in short, its log, and each of its checkpoints verified."""
    from pellucid.checkpoint import store
    from pellucid.config import load_config

    config = load_config(path / "config.toml")
    steps, last, validation = read_log(path / "metrics.jsonl")
    folders = store.checkpoints(path / "checkpoints")
    for folder in folders:
        store.verify(folder)
    facts: Facts = {
        "model": set_values(config.model),
        "data": config.data.path,
        "strategy": config.strategy.name,
        "optimizer": f"{config.optim.name}, lr {config.optim.lr:g}, {config.optim.schedule.name}",
        "seed": config.train.seed,
        "steps_logged": steps,
        "last_step": last,
        "last_validation": validation,
        "checkpoints": [folder.name for folder in folders],
        "finished_model": "none",
    }
    if (path / "model" / "config.json").is_file():
        facts["finished_model"] = f"{model_facts(path / 'model')['parameters']:,} parameters"
    return facts | {"verified": "configuration, log, every checkpoint's sizes and hashes, the finished model's tensors"}


def read_log(path: Path) -> tuple[int, Facts, Facts]:
    """Of metrics.jsonl: how many steps it has, the last of them, and the last validation; a torn last line is left out."""
    steps, last, validation = 0, {}, {}
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            event = record["event"]
        except (ValueError, RecursionError, KeyError, TypeError):
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise CheckpointError(f"{path}:{number} is damaged: not a line of a run's log") from None
        if event == "step":
            steps, last = steps + 1, record
        elif event == "validation":
            validation = record
    return steps, last, validation


def set_values(config: Any) -> Facts:
    """A model's configuration without what is off, empty, or about experts that it has not."""
    from pellucid.config_tables import to_table

    values = {key: value for key, value in to_table(config).items() if value not in (None, False, 0)}
    if not values.get("n_routed_experts"):
        for key in ("scoring_func", "topk_method", "n_group", "topk_group", "routed_scaling_factor"):
            values.pop(key, None)
    if getattr(config, "attention_out_bias", None) is False:  # differs from attention_bias, which is shown
        values["attention_out_bias"] = False
    return values


def lines_of(facts: Facts, indent: str = "") -> list[str]:
    """Facts as aligned lines; tables are indented below their name."""
    width = max((len(key) for key in facts), default=0)
    lines: list[str] = []
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}", *lines_of(value, indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{indent}{key}")
            for item in value:
                lines.append(f"{indent}  " + ", ".join(f"{k} {show(v)}" for k, v in item.items()))
        else:
            lines.append(f"{indent}{key:<{width}}  {show(value)}")
    return lines


def show(value: Any) -> str:
    """One value for a person."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(show, value)) or "none"
    return str(value) if value not in ({}, None) else "none"
