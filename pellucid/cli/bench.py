"""`pellucid bench serve`."""

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pellucid.cli.output import Progress, notice, print_json
from pellucid.cli.sampling import add_engine_flags, add_model_flags, engine_options, load
from pellucid.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from pellucid.config import ModelConfig
    from pellucid.evaluate.roofline import Roofline
    from pellucid.evaluate.serving import Limits, Report, Run, Spread
    from pellucid.evaluate.workload import Workload
    from pellucid.inference import Engine

OPEN_LOOP_RUNNING = 64
"""Sequences that run together where requests arrive by themselves: the engine's default."""
OPEN_LOOP_WARM = 4


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        help="measure how a model is served",
        description="Send random requests to the engine, straight, without a server, and print latencies, throughput, goodput, "
        "and what was reached of what this machine's memory allows. docs/engine.md defines every figure.",
    )
    parser.add_argument("what", choices=["serve"], help="what to measure")
    add_model_flags(parser)
    add_load_flags(parser)
    add_engine_flags(parser)
    parser.add_argument(
        "--kv-gb", type=float, default=1.0, metavar="GB", help="for keys and values, 10^9 bytes (default 1)"
    )
    for name, what in (("ttft", "until its first token"), ("tpot", "a token after that"), ("e2el", "in all")):
        parser.add_argument(
            f"--{name}-limit", type=float, metavar="S", help=f"a good request took at most S seconds {what}"
        )
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run, allocator="inference")


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """What is sent, and when."""
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="to send, up to 100000 (default 64)")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, metavar="C", help="closed loop: C requests at a time (default 8)")
    loop.add_argument(
        "--rate", type=float, metavar="R", help="open loop: R requests arrive a second, at least 0.001, at random"
    )
    lengths = {"prompt": ("128", "tokens of a prompt"), "max": ("64", "tokens of an answer")}
    for name, (default, what) in lengths.items():
        parser.add_argument(
            f"--{name}-tokens",
            type=length_range,
            default=default,
            metavar="N | N:M",
            help=f"{what} (default {default})",
        )
    parser.add_argument(
        "--shared-prefix", type=int, default=0, metavar="TOKENS", help="prompts of a group begin with so many alike"
    )
    parser.add_argument("--groups", type=int, default=1, metavar="G", help="of requests that begin alike (default 1)")
    parser.add_argument(
        "--warm-up",
        type=int,
        metavar="N",
        help="requests before, not measured (default: as many as run together, or 4)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and arrivals (default 0)")


def length_range(text: str) -> tuple[int, int]:
    """ "128" or "64:512"."""
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a length such as 128 or a range such as 64:512, got {text!r}"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Serve the load and print its figures; 1 if a request failed."""
    import torch

    from pellucid.evaluate.roofline import read_bandwidth, roofline
    from pellucid.evaluate.serving import Limits, peak_rss_bytes, report
    from pellucid.evaluate.workload import MAX_REQUESTS, Workload
    from pellucid.inference import Engine

    concurrency = 8 if args.concurrency is None and args.rate is None else args.concurrency
    workload = Workload(
        requests=args.requests, concurrency=concurrency, rate=args.rate, prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens, shared_prefix=args.shared_prefix, groups=args.groups, seed=args.seed,
    )  # fmt: skip
    limits = Limits(ttft_s=args.ttft_limit, tpot_s=args.tpot_limit, e2el_s=args.e2el_limit)
    warm = args.warm_up if args.warm_up is not None else min(args.requests, concurrency or OPEN_LOOP_WARM)
    if not 0 <= warm <= MAX_REQUESTS:
        raise ConfigError(f"--warm-up must be in [0, {MAX_REQUESTS}], got {warm}")
    model = load(args).model
    check_prompts(workload, model.config)
    engine = Engine(
        model, kv_gb=args.kv_gb, max_running=concurrency or OPEN_LOOP_RUNNING, max_waiting=args.requests + warm,
        **engine_options(args),
    )  # fmt: skip
    measured = serve(engine, workload, warm, quiet=args.quiet)
    figures, peak = report(measured, limits), peak_rss_bytes()  # before the buffer whose reading is timed
    reading = {threads: read_bandwidth(threads) for threads in sorted({1, torch.get_num_threads()})}
    bound = roofline(model, measured.decode, reading)
    for one in measured.served:
        if one.error is not None:
            notice(f"pellucid: request {one.request.id} failed: {one.error}")
    if args.json:
        settings = {
            "model": args.model,
            "weights": args.weights,
            "exact": engine.exact,
            "page_tokens": engine.pool.block_size,
        }
        parts = {"load": asdict(workload), "limits": asdict(limits), "roofline": bound and asdict(bound)}
        print_json(settings | asdict(figures) | {"peak_rss_bytes": peak} | parts)
    else:
        shown = lines(figures, limits, peak, engine.pool.block_size) + roofline_lines(bound)
        print("\n".join(f"{name:<20} {text}" for name, text in shown))
    return 1 if figures.failed else 0


def check_prompts(workload: "Workload", config: "ModelConfig") -> None:
    """`RequestError` for prompts without room in the window, before so many tokens are drawn."""
    from pellucid.inference import window_of

    longest, window = workload.shared_prefix + workload.prompt_tokens[1], window_of(config)
    if longest >= window:
        raise RequestError(
            f"a prompt has up to {longest:,} tokens and the model's window is {window:,}; lower --prompt-tokens or "
            "--shared-prefix"
        )


def serve(engine: "Engine", workload: "Workload", warm: int, *, quiet: bool) -> "Run":
    """Check that every request can run, warm up, and serve the load."""
    from pellucid.evaluate.serving import drive

    vocabulary = engine.model.config.vocab_size
    requests = workload.make_requests(vocabulary)
    for request in requests:
        wanted, granted = request.params.max_tokens, engine.check(request)
        if granted < wanted:
            raise RequestError(
                f"a request of {len(request.tokens):,} tokens ends after {granted:,} of {wanted:,} tokens, where the model's "
                "window ends; lower --prompt-tokens, --shared-prefix or --max-tokens"
            )
    if warm:  # as many at a time as will run together, so that what is made for each batch size is made
        before = replace(workload, requests=warm, concurrency=warm, rate=None, seed=workload.seed + 1)
        drive(engine, before.make_requests(vocabulary, salt="warm-up"), concurrency=workload.concurrency or warm)
        engine.pool.forget()
    with Progress("bench", len(requests), quiet=quiet) as bar:
        return drive(
            engine, requests, concurrency=workload.concurrency, arrivals=workload.arrivals(),
            progress=lambda ended: bar.update(ended, f"{ended:,} of {len(requests):,} requests"),
        )  # fmt: skip


def lines(figures: "Report", limits: "Limits", peak: int, page_tokens: int) -> list[tuple[str, str]]:
    """Label and text of each line of the table."""
    f = figures
    found = [
        ("requests", f"{f.completed:,} completed, {f.failed:,} failed, {f.seconds:.2f} s"),
        ("tokens", f"{f.prompt_tokens:,} of prompts, {f.output_tokens:,} of answers"),
        *((name, spread_text(spread)) for name, spread in (
            ("TTFT, ms", f.ttft_s), ("TPOT, ms", f.tpot_s), ("ITL, ms", f.itl_s), ("E2EL, ms", f.e2el_s))),
        ("output", f"{f.output_tokens_per_s:,.1f} tokens/s, {f.requests_per_s:,.2f} requests/s"),
    ]  # fmt: skip
    given = [
        f"{name.removesuffix('_s').upper()} {value:g} s" for name, value in asdict(limits).items() if value is not None
    ]
    if given:
        found.append(("goodput", f"{f.goodput_requests_per_s:,.2f} requests/s within {', '.join(given)}"))
    known = f.reused_tokens + f.prefilled_tokens
    share = f.reused_tokens / known if known else 0.0
    found.append(("prompts", f"{f.prefilled_tokens:,} tokens computed, {f.reused_tokens:,} reused ({share:.0%})"))
    if f.drafted_tokens:
        found.append(("guesses", f"{f.accepted_tokens:,} of {f.drafted_tokens:,} right"))
    return [
        *found,
        ("steps", f"{f.steps:,}, {f.preemptions:,} pre-emptions, {f.evictions:,} evictions"),
        ("pages", f"{f.pages:,} of {page_tokens} tokens, {f.pages_held_most:,} held at most, {f.pages_cached:,} cached at the end"),
        ("memory", f"{peak / 2**20:,.0f} MiB resident at most"),
    ]  # fmt: skip


def spread_text(spread: "Spread | None") -> str:
    """Milliseconds."""
    if spread is None:
        return "unknown"
    return "  ".join(f"{name} {value * 1e3:,.1f}" for name, value in asdict(spread).items())


def roofline_lines(bound: "Roofline | None") -> list[tuple[str, str]]:
    """What steps that only decoded read, and could have done."""
    if bound is None:
        return [("roofline", "unknown: every step read a prompt")]
    reading = ", ".join(
        f"{speed:.1f} GB/s with {threads} thread{'s' if threads > 1 else ''}"
        for threads, speed in bound.read_gb_per_s.items()
    )
    return [
        ("a decode step", f"{bound.mean_batch:.1f} sequences of {bound.mean_context:,.0f} tokens"),
        ("it reads", f"{bound.weight_bytes_per_step / 1e6:,.1f} MB of weights, {bound.kv_bytes_per_sequence / 1e6:,.2f} MB of "
         f"keys and values a sequence: {bound.bytes_per_token / 1e6:,.2f} MB a token"),
        ("memory gives", reading),
        ("so at most", f"{bound.bound_tokens_per_s:,.1f} tokens/s; reached {bound.tokens_per_s:,.1f}, MBU {bound.share:.0%}"),
    ]  # fmt: skip
