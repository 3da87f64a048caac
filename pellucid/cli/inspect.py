"""`pellucid inspect`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pellucid.cli.output import print_json
from pellucid.errors import CheckpointError

Facts = dict[str, Any]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "inspect",
        help="say what a folder is and whether it is whole",
        description="Recognise prepared data, a model, a checkpoint or a run, print what is in it, and read every file: "
        "sizes, hashes, tensors. Exit code 2 names the first damaged file.",
    )
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Recognise, verify, print."""
    path = Path(args.path)
    kind, look = recognise(path)
    facts = {"kind": kind, "path": str(path)} | look(path)
    if args.json:
        print_json(facts)
    else:
        print("\n".join(lines_of(facts)))
    return 0


def recognise(path: Path) -> tuple[str, Callable[[Path], Facts]]:
    """What a folder is, by the file that only such a folder has; `CheckpointError` for anything else."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if (path / "index.json").is_file():
        return "data", data_facts
    if (path / "manifest.json").is_file() or (path / "optimizer.safetensors").is_file():
        return "checkpoint", checkpoint_facts
    if (path / "config.toml").is_file():
        return "run", run_facts
    if (path / "config.json").is_file():
        return "model", model_facts
    raise CheckpointError(
        f"{path} is nothing that Pellucid knows: no index.json (data), manifest.json (checkpoint), config.toml (run) "
        "or config.json (model) in it"
    )


def data_facts(path: Path) -> Facts:
    """Prepared data, every shard hashed and every id checked."""
    from pellucid.data.shards import TokenData

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


def model_facts(path: Path) -> Facts:
    """A model, loaded as it would be to run it: every tensor present, of the right shape, and finite."""
    from pellucid.checkpoint.model_folder import load_model

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
    if tokenizer is not None:
        from pellucid.text import check_tokenizer

        check_tokenizer(tokenizer, loaded.config)
        template = "with" if tokenizer.chat_template is not None else "without"
        facts["tokenizer"] = f"{tokenizer.vocab_size:,} ids, {template} a chat template, sha256 {tokenizer.sha256}"
    return facts | {"verified": "names and shapes of all tensors, finite values"}


def checkpoint_facts(path: Path) -> Facts:
    """A checkpoint: every file against the manifest, then the model in it."""
    from pellucid.checkpoint import store

    manifest = store.verify(path)
    state = json.loads((path / "state.json").read_text(encoding="utf-8")) if (path / "state.json").is_file() else {}
    known = {key: state[key] for key in ("epoch", "tokens_seen", "world_size", "mode", "code_version") if key in state}
    size = sum(file["bytes"] for file in manifest["files"].values())
    facts = {"step": manifest["step"], "files": len(manifest["files"]), "bytes": size} | known | model_facts(path)
    return facts | {"verified": "sizes and hashes of all files, " + facts["verified"]}


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
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise CheckpointError(f"{path}:{number} is damaged: not a line of a run's log") from None
        if event == "step":
            steps, last = steps + 1, record
        elif event == "validation":
            validation = record
    return steps, last, validation


def set_values(config: Any) -> Facts:
    """A model's configuration without what is off or empty."""
    from pellucid.config import to_table

    return {key: value for key, value in to_table(config).items() if value not in (None, False, 0)}


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
