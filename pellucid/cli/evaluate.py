"""`pellucid eval`."""

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import Progress, notice, print_json
from pellucid.cli.sampling import add_model_flags, load
from pellucid.errors import ConfigError, DataError, RequestError

if TYPE_CHECKING:
    from pellucid.checkpoint.model_folder import Loaded
    from pellucid.config import RunConfig
    from pellucid.data.shards import Split
    from pellucid.evaluate import Score, Task

METRICS = ("acc", "acc_norm", "exact_match")
"""Of tasks, in the order of the table's columns."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "eval",
        help="score a model on held-out text and on tasks",
        description="Perplexity: exp of the summed loss over the number of predicted tokens, each token once. "
        "Tasks: the share of choices (acc, acc_norm) or answers (exact_match) that are right.",
    )
    add_model_flags(parser)
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="a folder made by `pellucid prepare`, or text: a file, a folder, a glob; without it and without --tasks the "
        "data of the run",
    )
    parser.add_argument("--split", help="of prepared data (default val)")
    parser.add_argument("--text-key", help="of records in JSONL (default text)")
    parser.add_argument(
        "--stride", type=int, help="tokens from window to window; shorter looks back further (default: a window)"
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        action="extend",
        default=[],
        metavar="TASK",
        help='a .jsonl file, one {"prompt", "choices", "answer": index} or {"prompt" | "messages", "answer": text} a line; '
        "or a registered task, NAME or NAME,option=value: arithmetic",
    )
    parser.add_argument(
        "--shots", type=int, metavar="N", help="worked examples before each prompt of a task (default 0)"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer to a task, at most (default 64)")
    parser.add_argument(
        "--plugins",
        nargs="+",
        action="extend",
        default=[],
        metavar="MODULE",
        help="import these first: they register tasks of your own",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="windows a forward (default 8); of tasks, sequences that run together (default 16)",
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score and print."""
    scores_data = args.data is not None or not args.tasks
    check_flags(args, scores_data=scores_data)
    config = run_config_of(args.model)  # whose plugins may register tasks
    tasks = open_wanted_tasks(args) if args.tasks else []
    loaded = load(args)
    scores: dict[str, Any] = {}
    if scores_data:
        scores |= asdict(score_data(loaded, config, args))
    if tasks:
        scores["tasks"] = score_tasks(loaded, tasks, args)
    if args.json:
        print_json(scores)
    else:
        print_scores(scores)
    return 0


def check_flags(args: argparse.Namespace, *, scores_data: bool) -> None:
    """`ConfigError` for a value out of range, or a flag of what is not scored."""
    for flag, least in (("batch_size", 1), ("stride", 0), ("max_tokens", 1), ("shots", 0)):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least {least}, got {value}")
    for flag in ("split", "text_key", "stride"):
        if getattr(args, flag) is not None and not scores_data:
            raise ConfigError(
                f"--{flag.replace('_', '-')} is about data, and only tasks are scored; give --data as well"
            )
    for flag in ("shots", "max_tokens"):
        if getattr(args, flag) is not None and not args.tasks:
            raise ConfigError(f"--{flag.replace('_', '-')} is about tasks; name some with --tasks, or leave it out")


def open_wanted_tasks(args: argparse.Namespace) -> "list[Task]":
    """What --tasks names, with --shots; errors as in `open_tasks` and `with_shots`."""
    from pellucid.evaluate import open_tasks, with_shots
    from pellucid.registry import load_plugins

    load_plugins(tuple(args.plugins))
    tasks = [with_shots(task, args.shots or 0) for task in open_tasks(args.tasks)]
    if args.max_tokens is not None and not any(task.generates for task in tasks):
        raise ConfigError("--max-tokens is of answers in words, and these tasks are all multiple choice; leave it out")
    return tasks


def score_data(loaded: "Loaded", config: "RunConfig | None", args: argparse.Namespace) -> "Score":
    """The score of --data, or of the data of the run."""
    from pellucid.data.batches import Windows
    from pellucid.evaluate import evaluate

    path = args.data or (config.data.path if config is not None else "")
    if not path:
        raise RequestError(f"{args.model} records no training data; name some with --data")
    context = loaded.config.max_position_embeddings
    if config is not None and config.data.context:
        context = config.data.context
    with ExitStack() as stack:
        split = open_split(loaded, path, args, stack)
        windows = Windows(split, context, args.stride or 0, score_once=True)
        with Progress("eval", len(windows), quiet=args.quiet) as bar:
            return evaluate(
                loaded.model, windows, batch_size=args.batch_size or 8, tokenizer=loaded.tokenizer,
                progress=lambda done, total: bar.update(done, f"window {done:,} of {total:,}"),
            )  # fmt: skip


def score_tasks(loaded: "Loaded", tasks: "list[Task]", args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The scores of each task by its name."""
    from pellucid.evaluate import evaluate_task

    if loaded.tokenizer is None:
        raise RequestError(f"{args.model} has no tokenizer.json, which tasks need; put the model's tokenizer there")
    given = {"max_tokens": args.max_tokens, "batch_size": args.batch_size}
    options = {name: value for name, value in given.items() if value is not None}
    scores = {}
    for task in tasks:
        with Progress(task.name, len(task.examples), quiet=args.quiet) as bar:

            def show(done: int, total: int, bar: Progress = bar) -> None:
                bar.update(done, f"example {done:,} of {total:,}")

            scores[task.name] = evaluate_task(loaded.model, loaded.tokenizer, task, progress=show, **options)
    return scores


def print_scores(scores: dict[str, Any]) -> None:
    """A line a figure of the data, and a table of the tasks."""
    tasks = scores.pop("tasks", {})
    for name, value in scores.items():
        shown = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
        print(f"{name:<14} {shown}")
    if tasks:
        from pellucid.report.terminal import print_table

        metrics = [name for name in METRICS if any(name in score for score in tasks.values())]
        rows = [[task, *(score.get(name) for name in metrics), score["n"]] for task, score in tasks.items()]
        print_table(["task", *metrics, "n"], rows)


def open_split(loaded: "Loaded", path: str, args: argparse.Namespace, stack: ExitStack) -> "Split":
    """Prepared data as it is, or text encoded for as long as ``stack`` is open."""
    from pellucid.data.shards import TokenData
    from pellucid.evaluate import text_split

    if not (Path(path) / "index.json").is_file():
        if loaded.tokenizer is None:
            raise RequestError(f"{args.model} has no tokenizer.json to encode {path} with; give prepared data")
        if args.split is not None:
            raise ConfigError(f"--split {args.split} is of prepared data, and {path} has no index.json; leave it out")
        if args.text_key is not None and not _has_keys(path):
            raise ConfigError(f"--text-key {args.text_key} is of records, and {path} has no file of them; leave it out")
        return stack.enter_context(text_split(path, loaded.tokenizer, text_key=args.text_key or "text"))
    if args.text_key is not None:
        raise ConfigError(f"--text-key {args.text_key} is of text, and {path} is prepared data; leave it out")
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
    split = args.split or "val"
    notice(f"scoring the {split} split of {path}")
    return data.split(split)


def _has_keys(path: str) -> bool:
    """Whether text is taken out of records; errors as in `open_source`."""
    from pellucid.data.sources import Files, open_source

    source = open_source(path)
    return isinstance(source, Files) and bool(source.with_keys)


def run_config_of(model: str) -> "RunConfig | None":
    """The configuration of the run that a model, a checkpoint or a run folder belongs to, if it is in one."""
    from pellucid.config import load_config

    folder = Path(model).absolute()
    for run_folder in [folder] if _is_run(folder) else list(folder.parents)[:2]:
        if _is_run(run_folder) and (run_folder / "config.toml").is_file():
            return load_config(run_folder / "config.toml")
    return None


def _is_run(folder: Path) -> bool:
    """Whether a config.toml in there is ours: it stands beside what a run saves."""
    return (folder / "checkpoints").is_dir() or (folder / "model").is_dir()
