"""`pellucid eval`."""

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.cli.output import Progress, notice, print_json
from pellucid.cli.sampling import add_model_flags, load
from pellucid.errors import ConfigError, DataError, RequestError

if TYPE_CHECKING:
    from pellucid.checkpoint.model_folder import Loaded
    from pellucid.config import RunConfig
    from pellucid.data.shards import Split


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "eval",
        help="score a model on held-out text",
        description="Perplexity: exp of the summed loss over the number of predicted tokens, each token once.",
    )
    add_model_flags(parser)
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="a folder made by `pellucid prepare`, or text: a file, a folder, a glob; without it the data of the run",
    )
    parser.add_argument("--split", default="val", help="of prepared data (default val)")
    parser.add_argument("--text-key", default="text", help="of records in JSONL (default text)")
    parser.add_argument(
        "--stride",
        type=int,
        default=0,
        help="tokens from window to window; shorter looks back further (default: a window)",
    )
    parser.add_argument("--batch-size", type=int, default=8, help="windows a forward (default 8)")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score and print."""
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.stride < 0:
        raise ConfigError(f"--stride must not be negative, got {args.stride}")
    loaded = load(args)
    config = run_config_of(args.model)
    path = args.data or (config.data.path if config is not None else "")
    if not path:
        raise RequestError(f"{args.model} records no training data; name some with --data")
    from pellucid.data.batches import Windows
    from pellucid.evaluate import evaluate

    context = loaded.config.max_position_embeddings
    if config is not None and config.data.context:
        context = config.data.context
    with ExitStack() as stack:
        split = open_split(loaded, path, args, stack)
        windows = Windows(split, context, args.stride, score_once=True)
        with Progress("eval", len(windows), quiet=args.quiet) as bar:
            score = evaluate(
                loaded.model, windows, batch_size=args.batch_size, tokenizer=loaded.tokenizer,
                progress=lambda done, total: bar.update(done, f"window {done:,} of {total:,}"),
            )  # fmt: skip
    if args.json:
        print_json(asdict(score))
        return 0
    for name, value in asdict(score).items():
        shown = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        print(f"{name:<14} {shown}")
    return 0


def open_split(loaded: "Loaded", path: str, args: argparse.Namespace, stack: ExitStack) -> "Split":
    """Prepared data as it is, or text encoded for as long as ``stack`` is open."""
    from pellucid.data.shards import TokenData
    from pellucid.evaluate import text_split

    if not (Path(path) / "index.json").is_file():
        if loaded.tokenizer is None:
            raise RequestError(f"{args.model} has no tokenizer.json to encode {path} with; give prepared data")
        return stack.enter_context(text_split(path, loaded.tokenizer, text_key=args.text_key))
    data = TokenData.open(path)
    if data.vocab_size > loaded.config.vocab_size:
        raise DataError(
            f"{path} was prepared with a tokenizer of {data.vocab_size:,} ids and the model knows "
            f"{loaded.config.vocab_size:,}; prepare it with --tokenizer {args.model}"
        )
    if loaded.tokenizer is not None and data.tokenizer_sha256 != loaded.tokenizer.sha256:
        raise DataError(
            f"{path} was prepared with another tokenizer than the model's, so its ids mean something else; "
            f"prepare it with --tokenizer {args.model}"
        )
    notice(f"scoring the {args.split} split of {path}")
    return data.split(args.split)


def run_config_of(model: str) -> "RunConfig | None":
    """The configuration of the run that a model, a checkpoint or a run folder belongs to, if it is in one."""
    from pellucid.config import load_config

    folder = Path(model).absolute()
    runs = (
        [folder]
        if (folder / "checkpoints").is_dir() or (folder / "model").is_dir()
        else [folder.parent, folder.parents[1]]
    )
    for run_folder in runs:
        if (run_folder / "config.toml").is_file():
            return load_config(run_folder / "config.toml")
    return None
