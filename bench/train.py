"""How fast is a training step, beside transformers' Trainer, litgpt's loop and the shortest loop over our own model?

    python bench/train.py [--dtype bfloat16|float32] [--rounds 7] [--steps N] [--threads 2] [--only NAME ...]

The configuration `small`: vocabulary 8192, width 384, 6 layers, 6 query and 2 key/value heads of 64, feed-forward 1024,
tied head, 16 rows of 256 random tokens, AdamW (3e-4, 0.9, 0.95, decay 0.1), clipped to 1.0. Every contender is a process
of its own that lives for the whole run (`bench/contenders/training.py`), so that allocators and compiled code do not
mix. They take turns of some steps, one after another, each round in another order; a ratio is the median of the ratios
within rounds, which a machine that slows down for a while does not bend. Without --steps a turn is as many steps as
the fastest contender does in 4 seconds.

Peers that are not installed are skipped by name: `pip install -e '.[bench]'` brings what transformers' Trainer needs;
litgpt wants packages that we do not, so `pip install --no-deps litgpt lightning lightning-utilities torchmetrics
jsonargparse`. Both types take about 25 minutes where bfloat16 is slow, 10 where it is fast.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import BATCH, CONTEXT, write_tokens
from machine import machine_line
from racer import Racer

from pellucid.cli import allocator
from pellucid.train.precision import bf16_is_fast

TOKENS = BATCH * CONTEXT
WINDOWS = 4096
TURN_S = 4.0
WARM_STEPS = 3


@dataclass(frozen=True)
class Entry:
    """What runs: a contender of ``contenders/training.py``, compiled or not, with which allocator."""

    name: str
    contender: str
    compile: bool = False
    our_allocator: bool = False
    """Started as the command line starts itself: with jemalloc or tcmalloc where one is installed, else glibc told to keep
    its memory."""
    needs: tuple[str, ...] = ()


ENTRIES = (
    Entry("pellucid", "pellucid", our_allocator=True),
    Entry("pellucid compiled", "pellucid", compile=True, our_allocator=True),
    Entry("pellucid, system malloc", "pellucid"),
    Entry("bare loop, our model", "bare", our_allocator=True),
    Entry("bare loop compiled", "bare", compile=True, our_allocator=True),
    Entry("transformers Trainer", "transformers", needs=("transformers", "accelerate")),
    Entry("transformers compiled", "transformers", compile=True, needs=("transformers", "accelerate")),
    Entry("litgpt loop", "litgpt", needs=("litgpt", "lightning")),
    Entry("litgpt compiled", "litgpt", compile=True, needs=("litgpt", "lightning")),
)
ASKED = (
    ("pellucid", "transformers Trainer", 1.15),
    ("pellucid compiled", "transformers Trainer", 1.40),
    ("pellucid compiled", "transformers compiled", 1.15),
    ("pellucid", "litgpt loop", 1.00),
    ("pellucid compiled", "litgpt compiled", 1.00),
    ("pellucid", "bare loop, our model", 0.95),
    ("pellucid compiled", "bare loop compiled", 0.95),
    ("pellucid", "pellucid, system malloc", None),
)
"""Ratios of speed, and the least that was asked for where bfloat16 is fast."""


class TrainingRacer(Racer):
    """A running contender and its turns."""

    def __init__(self, entry: Entry, dtype: str, threads: int, data: Path, scratch: Path) -> None:
        scratch.mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if entry.our_allocator:
            environment |= allocator.settings()
        words = [entry.contender, "--dtype", dtype, "--threads", threads, "--data", data, "--scratch", scratch]
        words += ["--compile"] if entry.compile else []
        self.entry, self.turns = entry, list[dict[str, Any]]()
        super().__init__(entry.name, "training.py", words, environment)

    def turn(self, steps: int) -> dict[str, Any]:
        """Run ``steps`` steps."""
        answer: dict[str, Any] = self.ask(steps)
        return answer | {"steps": steps}

    def speeds(self) -> list[float]:
        """Tokens a second, turn by turn."""
        return [turn["steps"] * TOKENS / turn["seconds"] for turn in self.turns]


def race(entries: list[Entry], dtype: str, options: argparse.Namespace) -> dict[str, TrainingRacer]:
    """All rounds of one number type; the contenders, stopped, with their turns."""
    racers: list[TrainingRacer] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = write_tokens(folder / "data", np.array([WINDOWS * CONTEXT + 1]))  # one document: rows are not packed
        try:
            fastest = float("inf")
            for number, entry in enumerate(entries):
                print(f"  starting {entry.name} ...", file=sys.stderr, flush=True)
                racers.append(TrainingRacer(entry, dtype, options.threads, data, folder / f"{number}"))
                racers[-1].turn(1)  # compiles
                fastest = min(fastest, racers[-1].turn(WARM_STEPS)["seconds"] / WARM_STEPS)
            steps = options.steps or max(1, round(TURN_S / fastest))
            for round_ in range(options.rounds):
                print(f"  round {round_ + 1} of {options.rounds}, turns of {steps}", file=sys.stderr, flush=True)
                shift = round_ % len(racers)
                for racer in racers[shift:] + racers[:shift]:
                    racer.turns.append(racer.turn(steps))
        finally:
            for racer in racers:
                racer.stop()
    return {racer.entry.name: racer for racer in racers}


def report(racers: dict[str, TrainingRacer], dtype: str, options: argparse.Namespace) -> None:
    """Two tables, as bench/RESULTS.md has them."""
    steps = next(iter(racers.values())).turns[0]["steps"]
    print(f"\n`small`, {dtype}, {options.threads} threads, {options.rounds} rounds of {steps} steps\n")
    print("| contender | tokens/s, median (range) | minor faults a step | loader's share | loss |")
    print("|---|---|---|---|---|")
    for name, racer in racers.items():
        speeds, turns = racer.speeds(), racer.turns
        faults = statistics.median(turn["faults"] / turn["steps"] for turn in turns)
        share = statistics.median(turn["loader_seconds"] / turn["seconds"] for turn in turns)
        loader = f"{100 * share:.2f} %" if racer.entry.contender == "pellucid" else ""
        print(
            f"| {name} | {statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f}) "
            f"| {faults:,.0f} | {loader} | {turns[-1]['loss']:.3f} |"
        )
    judged = dtype == "bfloat16" and bf16_is_fast(torch.device("cpu"))
    print("\n| ratio | median of rounds (range) | asked of bfloat16 where it is fast |")
    print("|---|---|---|")
    for ours, theirs, least in ASKED:
        if ours in racers and theirs in racers:
            pairs = zip(racers[ours].speeds(), racers[theirs].speeds(), strict=True)
            ratios = [a / b for a, b in pairs]
            middle = statistics.median(ratios)
            verdict = "" if least is None else f"{least:.2f}"
            if least is not None and judged:
                verdict += ": met" if middle >= least else ": missed"
            print(f"| {ours} / {theirs} | {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {verdict} |")


def available(only: list[str]) -> list[Entry]:
    """The contenders that can run here; says which cannot."""
    chosen = []
    for entry in ENTRIES:
        missing = [name for name in entry.needs if find_spec(name) is None]
        if entry.compile and shutil.which(os.environ.get("CXX", "g++")) is None:
            missing.append("a C++ compiler")
        if only and entry.name not in only:
            continue
        if missing:
            print(f"skipped: {entry.name}, for want of {', '.join(missing)}")
        else:
            chosen.append(entry)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: both")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", choices=[e.name for e in ENTRIES], help="contenders by name"
    )
    options = parser.parse_args()
    entries = available(options.only)
    print(machine_line(options.threads))
    print(f"allocator of ours: {allocator.settings()[allocator.MARK]}; `{' '.join(['python', *sys.argv])}`")
    if not bf16_is_fast(torch.device("cpu")):
        print('bfloat16 is not fast on this machine: `train.dtype = "auto"` is float32 here')
    for dtype in [options.dtype] if options.dtype else ["float32", "bfloat16"]:
        report(race(entries, dtype, options), dtype, options)


if __name__ == "__main__":
    main()
