"""`pellucid embed`."""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import Progress, notice, print_json
from pellucid.cli.records import Key, OutFile, Record, read_records, refuse_input
from pellucid.errors import ConfigError, PellucidError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from pellucid.checkpoint.encoder_folder import LoadedEncoder

WINDOW = 32
"""Batches whose texts are sorted by length together; their results are written when all are done."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "embed",
        help="vectors of texts",
        description='The vector of each record of a JSONL file: {"id"?, "text"} gives {"id", "embedding", "tokens"}. '
        "MODEL is an encoder: a BERT-type folder of transformers or sentence-transformers, or one of our own kind.",
    )
    parser.add_argument("model", metavar="MODEL", help="an encoder's folder")
    parser.add_argument("--input", required=True, metavar="FILE.jsonl", help="a record a line")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="where a record has its text (default text)")
    parser.add_argument(
        "--out",
        metavar="OUT.jsonl",
        help="one line for each record, in input order; lines already there are kept and skipped (default: stdout)",
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="texts that run together (default 32)")
    parser.add_argument(
        "--truncate", action="store_true", help="cut texts that are too long; without it they are refused"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, ...; auto: cuda where there is one, else cpu")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights; auto: as stored",
    )
    parser.add_argument("--json", action="store_true", help="the summary as one object on stdout; needs --out")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Job:
    """A checked text."""

    id: str | int
    tokens: list[int]
    location: str
    """Where it was asked for, for messages."""


def run(args: argparse.Namespace) -> int:
    """Embed; 1 if a vector is not finite, which then has no line."""
    from pellucid.checkpoint.encoder_folder import load_encoder

    if args.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.json and args.out is None:
        raise ConfigError("--json prints a summary on stdout, where the vectors go without --out; give --out OUT.jsonl")
    if args.out is not None:
        refuse_input(Path(args.out), Path(args.input), "--input")
    records = read_records(Path(args.input))
    loaded = load_encoder(args.model, device=args.device, dtype=args.dtype)
    jobs = [make_job(loaded, record, args.text_key, truncate=args.truncate) for record in records]
    return embed(args, loaded, jobs)


def make_job(loaded: "LoadedEncoder", record: Record, key: str, *, truncate: bool) -> Job:
    """Encode and check one record; `RequestError` names its line."""
    text = record.table.get(key)
    if not isinstance(text, str):
        has = f"got {text!r}" if key in record.table else f"the record has {', '.join(record.table) or 'no key'}"
        raise RequestError(f'{record.location}: "{key}" must be text, {has}; --text-key names another key')
    try:
        return Job(record.id, loaded.encode(text, truncate=truncate), record.location)
    except PellucidError as error:
        raise RequestError(f"{record.location}: {error}") from error


def embed(args: argparse.Namespace, loaded: "LoadedEncoder", jobs: list[Job]) -> int:
    """A line for each job, in OUT.jsonl or on stdout."""
    keys = [(job.id, 0) for job in jobs]
    lengths = {job.id: len(job.tokens) for job in jobs}

    def stale(key: Key, record: dict[str, Any]) -> str | None:
        told, now = record["tokens"], lengths[key[0]]
        return None if told == now else f"is the vector of a text of {told} tokens, and the text has {now} now"

    out = OutFile(Path(args.out), keys, ("embedding", "tokens"), stale) if args.out is not None else None
    todo = [job for job in jobs if out is None or (job.id, 0) not in out]
    if len(todo) < len(jobs):
        notice(f"{args.out}: {len(jobs) - len(todo):,} of {len(jobs):,} results are there already")
    done = failures = tokens = 0
    start = time.monotonic()
    with Progress("embed", len(todo), quiet=args.quiet) as bar:
        for job, vector in vectors(loaded, todo, args.batch_size):
            values = [float(str(x)) for x in vector.numpy()]  # the shortest text of a float32
            done, tokens = done + 1, tokens + len(job.tokens)
            if not all(map(math.isfinite, values)):
                failures += 1
                notice(
                    f"pellucid: {job.location}: the vector is not finite; the weights are damaged, or try --dtype float32"
                )
                continue
            record: dict[str, Any] = {"id": job.id, "embedding": values, "tokens": len(job.tokens)}
            print_json(record) if out is None else out.add((job.id, 0), record)
            bar.update(done, f"{done:,} of {len(todo):,}, {tokens / (time.monotonic() - start):,.0f} tokens/s")
    if out is not None:
        out.finish()
    summary = {"results": done - failures, "kept": len(jobs) - len(todo), "failed": failures, "tokens": tokens}
    if args.json:
        print_json({"out": args.out} | summary | {"seconds": round(time.monotonic() - start, 3)})
    else:
        notice(", ".join(f"{value:,} {name}" for name, value in summary.items()))
    return 1 if failures else 0


def vectors(loaded: "LoadedEncoder", jobs: list[Job], batch_size: int) -> Iterator[tuple[Job, "Tensor"]]:
    """The vector of each job, in order."""
    for start in range(0, len(jobs), WINDOW * batch_size):
        window = jobs[start : start + WINDOW * batch_size]
        found = loaded.encoder.embed_ids([job.tokens for job in window], batch_size=batch_size)
        yield from zip(window, found, strict=True)
