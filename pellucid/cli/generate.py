"""`pellucid generate`."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import Progress, notice, print_json
from pellucid.cli.records import Key, OutFile, read_records, refuse_input
from pellucid.cli.sampling import (
    add_engine_flags,
    add_model_flags,
    add_sampling_flags,
    engine_options,
    load,
    sampling_params,
)
from pellucid.errors import ConfigError, PellucidError, RequestError

if TYPE_CHECKING:
    from pellucid.checkpoint.model_folder import Loaded
    from pellucid.inference import Result, SamplingParams

RECORD = ("id", "prompt", "messages", "ids", "params")
"""Keys of a request; any other is the caller's own."""
RESULT = ("text", "ids", "finish_reason", "usage")
"""Keys that every result has behind its id."""
MAX_BATCH = 65_536


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue one prompt, or each record of a JSONL file: "
        '{"id"?, "prompt" | "messages" | "ids", "params"?} gives {"id", "text", "ids", "finish_reason", "logprobs"?, "usage"}. '
        "A record may have keys of your own besides; they are not copied.",
    )
    add_model_flags(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="print its continuation")
    source.add_argument("--prompts", metavar="IN.jsonl", help="continue every record")
    parser.add_argument(
        "--out",
        metavar="OUT.jsonl",
        help="one line for each sample, in input order; lines already there are kept and skipped",
    )
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.add_argument("--num-samples", type=int, metavar="N", help="samples of each prompt, up to 1024 (default 1)")
    parser.add_argument("--logprobs", action="store_true", help="with the log-probability of each token, in nats")
    parser.add_argument("--batch-size", type=int, default=16, help="samples that run together (default 16)")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run, allocator="inference")


def run(args: argparse.Namespace) -> int:
    """Continue; 1 if a request failed on its way."""
    from pellucid.inference.request import MAX_SAMPLES

    for flag, value, high in (
        ("batch-size", args.batch_size, MAX_BATCH),
        ("num-samples", args.num_samples, MAX_SAMPLES),
    ):
        if value is not None and not 1 <= value <= high:
            raise ConfigError(f"--{flag} must be in [1, {high}], got {value}")
    if args.out is not None and args.prompts is None:
        raise ConfigError("--out goes with --prompts IN.jsonl; a single --prompt is printed")
    params = sampling_params(args)
    if args.prompts is None:
        loaded = load(args)
        return run_prompt(args, loaded, make_job(loaded, 0, {"prompt": args.prompt}, params, "--prompt"))
    if args.out is not None:
        refuse_input(Path(args.out), Path(args.prompts), "--prompts")
    records = read_records(Path(args.prompts))
    loaded = load(args)
    jobs = [make_job(loaded, r.id, r.table, params, r.location) for r in records]
    return run_prompts(args, loaded, jobs)


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request."""

    id: str | int
    tokens: list[int]
    params: "SamplingParams"
    location: str
    """Where it was asked for, for messages."""


def make_job(loaded: "Loaded", id_: str | int, table: dict[str, Any], params: "SamplingParams", location: str) -> Job:
    """Encode and check one record; `RequestError` names ``location``."""
    from pellucid.inference import Request, check_request, update_params
    from pellucid.text import with_stop_ids

    try:
        check_keys(table)
        own = table.get("params", {})
        if not isinstance(own, dict):
            raise RequestError(f'"params" must be an object, got {own!r}')
        params = update_params(params, own)
        if loaded.tokenizer is not None:
            params = with_stop_ids(params, loaded.tokenizer)
        tokens = encode_record(loaded, table)
        check_request(Request(str(id_), tuple(tokens), params), loaded.config)
    except PellucidError as error:
        raise RequestError(f"{location}: {error}") from error
    return Job(id_, tokens, params, location)


def check_keys(table: dict[str, Any]) -> None:
    """`RequestError` for a key that is nearly one of `RECORD`, or names a sampling parameter and would do nothing."""
    from pellucid.inference import SamplingParams

    parameters = [f.name for f in fields(SamplingParams)]
    # near means nearer than "idx" is to "id", "prompt_id" to "prompt" or "num_tokens" to "min_tokens"
    near = [name for name in (*RECORD, *parameters) if len(name) > 5]
    for key in table:
        if key in RECORD:
            continue
        if key in parameters:
            raise RequestError(f'"{key}" is a sampling parameter; put it in "params"')
        low = key.lower()
        for close in [low] if low in RECORD else get_close_matches(low, near, n=1, cutoff=0.82):
            where = ', in "params"' if close in parameters else ""
            raise RequestError(
                f'unknown key "{key}"; did you mean "{close}"{where}? A key of your own needs another name'
            )


def encode_record(loaded: "Loaded", table: dict[str, Any]) -> list[int]:
    """The ids of a record's "prompt", "messages" or "ids"."""
    from pellucid.text import encode_prompt

    given = [key for key in ("prompt", "messages", "ids") if key in table]
    if len(given) != 1:
        raise RequestError(f'give one of "prompt", "messages" and "ids"; the record has {", ".join(table) or "no key"}')
    value = table[given[0]]
    if given == ["ids"]:
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise RequestError('"ids" must be a list of token ids')
        return value
    if loaded.tokenizer is None:
        raise RequestError(
            f'the model has no tokenizer.json, which "{given[0]}" needs; put its tokenizer there or give "ids"'
        )
    if given == ["messages"]:
        if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
            raise RequestError('"messages" must be a list of objects with "role" and "content"')
        return loaded.tokenizer.encode_chat(value)
    if not isinstance(value, str):
        raise RequestError(f'"prompt" must be text, got {value!r}')
    return encode_prompt(loaded.tokenizer, value)


def run_prompt(args: argparse.Namespace, loaded: "Loaded", job: Job) -> int:
    """One prompt: its text on stdout, or one object. `PellucidError` if it failed."""
    records = []
    for _, sample, result in finished(loaded, [job], args):
        if result.finish_reason == "error":
            raise PellucidError(failure(job, result))
        records.append(record_of(loaded, job, sample, result, logprobs=args.logprobs))
    if args.json:
        print_json({"results": records})
        return 0
    for number, record in enumerate(records, start=1):
        if len(records) > 1:
            print(f"--- sample {number} of {len(records)}")
        print(record["text"])
        if args.logprobs:
            print("\n".join(f"{i:>8} {x:10.4f}" for i, x in zip(record["ids"], record["logprobs"], strict=True)))
    return 0


def run_prompts(args: argparse.Namespace, loaded: "Loaded", jobs: list[Job]) -> int:
    """Every record: a line each, in OUT.jsonl or on stdout. 1 if one of them failed; it then has no line."""
    keys = [(job.id, sample) for job in jobs for sample in range(job.params.n)]
    lengths = {job.id: len(job.tokens) for job in jobs}

    def stale_line(key: Key, record: dict[str, Any]) -> str | None:
        return stale(record, lengths[key[0]], logprobs=args.logprobs)

    out = OutFile(Path(args.out), keys, RESULT, stale_line) if args.out is not None else None
    missing = {key for key in keys if out is None or key not in out}
    todo = [job for job in jobs if any((job.id, sample) in missing for sample in range(job.params.n))]
    if len(missing) < len(keys):
        notice(f"{args.out}: {len(keys) - len(missing):,} of {len(keys):,} results are there already")
    done = failures = tokens = 0
    start = time.monotonic()
    with Progress("generate", len(missing), quiet=args.quiet) as bar:
        for job, sample, result in finished(loaded, todo, args):
            if (job.id, sample) not in missing:
                continue
            if result.finish_reason == "error":
                failures += 1
                notice(f"pellucid: {failure(job, result)}")
            else:
                record = record_of(loaded, job, sample, result, logprobs=args.logprobs)
                print_json(record) if out is None else out.add((job.id, sample), record)
            done, tokens = done + 1, tokens + len(result.ids)
            bar.update(done, f"{done:,} of {len(missing):,}, {tokens / (time.monotonic() - start):,.0f} tokens/s")
    if out is not None:
        out.finish()
    summary = {"results": done - failures, "kept": len(keys) - len(missing), "failed": failures, "tokens": tokens}
    if args.json and out is not None:
        print_json({"out": args.out} | summary | {"seconds": round(time.monotonic() - start, 3)})
    else:
        notice(", ".join(f"{value:,} {name}" for name, value in summary.items()))
    return 1 if failures else 0


def stale(record: dict[str, Any], prompt_tokens: int, *, logprobs: bool) -> str | None:
    """Why a kept line is no result of this prompt under these flags; None where it can be."""
    usage = record["usage"]
    told = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if told != prompt_tokens:
        return f"is the answer to a prompt of {told} tokens, and the prompt has {prompt_tokens} now"
    if logprobs and "logprobs" not in record:
        return "has no logprobs, which --logprobs asks for"
    return None


def finished(loaded: "Loaded", jobs: list[Job], args: argparse.Namespace) -> Iterator[tuple[Job, int, "Result"]]:
    """The numbered samples of each job, in order, as they are done."""
    from pellucid.inference import Request, engine_for

    if not jobs:
        return
    requests = [Request(str(i), tuple(job.tokens), job.params) for i, job in enumerate(jobs)]
    engine = engine_for(loaded.model, requests, args.batch_size, **engine_options(args))
    for job, results in zip(jobs, engine.results(requests), strict=True):
        yield from ((job, sample, result) for sample, result in enumerate(results))


def record_of(loaded: "Loaded", job: Job, sample: int, result: "Result", *, logprobs: bool) -> dict[str, Any]:
    """A result as it is written; "sample" only where there are several."""
    from pellucid.text import decode

    record: dict[str, Any] = {"id": job.id}
    if job.params.n > 1:
        record["sample"] = sample
    record["text"] = decode(loaded.tokenizer, result.ids) if loaded.tokenizer is not None else None
    record |= {"ids": result.ids, "finish_reason": result.finish_reason}
    if logprobs:
        record["logprobs"] = result.logprobs
    prompt, completion = len(job.tokens), len(result.ids)
    return record | {
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    }


def failure(job: Job, result: "Result") -> str:
    """What to say about a request that ended with an error."""
    from pellucid.text import failed

    return failed(job.location, len(result.ids), result.error)
