"""What share of a training step does loading its data take?

    python bench/data.py [--steps 8] [--documents 300] [--dtype auto] [--threads 2]

Writes random tokens to shards as `pellucid prepare` does, in documents of 1 to 2 * --documents tokens, and looks at the
loader in two ways, for `small` (16 rows of 256 tokens): alone, one call after another; and inside the real Trainer,
where caches are cold from the step between two calls and the share is that of the whole step. Asked: under 1 %.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from machine import machine_line

from pellucid.config import run_config
from pellucid.data.batches import Loader, Windows
from pellucid.data.index import write_index
from pellucid.data.shards import ShardWriter, TokenData, dtype_for
from pellucid.train import Callback, Trainer
from pellucid.train.callbacks import StepInfo

VOCAB, CONTEXT, BATCH = 8192, 256, 16
WARM_STEPS = 2


def write_tokens(folder: Path, lengths: npt.NDArray[np.int64]) -> Path:
    """Documents of these lengths, random tokens, as a DATA folder without a tokenizer."""
    folder.mkdir()
    writer = ShardWriter(folder, "train", dtype_for(VOCAB), 1 << 20)
    writer.add_many(np.random.default_rng(0).integers(0, VOCAB, int(lengths.sum())), lengths)
    splits = {"train": writer.finish()}
    write_index(folder, dtype=dtype_for(VOCAB), vocab_size=VOCAB, tokenizer_sha256="0" * 64, splits=splits, sources=[])
    return folder


def timed(function: Callable[[], Any], seconds: list[float]) -> Callable[[], Any]:
    """``function``, which adds its time to ``seconds`` at each call."""

    def call() -> Any:
        begin = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - begin)
        return result

    return call


def alone(windows: Windows, calls: int = 300) -> list[float]:
    """Seconds of each `Loader.next_window`."""
    loader = Loader(windows, global_batch=BATCH, micro_batch=BATCH, seed=0)
    seconds: list[float] = []
    call = timed(loader.next_window, seconds)
    for _ in range(calls):
        call()
    return seconds


def in_training(windows: Windows, steps: int, dtype: str) -> tuple[list[float], list[float]]:
    """Seconds of the loader and of the whole step, step by step, after a few to warm up."""
    whole: list[float] = []

    class Note(Callback):
        def on_optimizer_step(self, trainer: Trainer, info: StepInfo) -> None:
            whole.append(info.seconds)
            print(f"  step {info.step} of {info.total_steps}: {info.seconds:.2f} s", file=sys.stderr)

    config = run_config(
        {
            "model": {"preset": "small", "vocab_size": VOCAB},
            "train": {
                "steps": steps + WARM_STEPS, "global_batch": BATCH, "micro_batch": BATCH, "dtype": dtype,
                "device": "cpu", "save_every": 0, "val_every": 0,
            },
        }
    )  # fmt: skip
    trainer = Trainer(config, callbacks=[Note()], train_data=windows)
    loading: list[float] = []
    trainer.setup.loader.next_window = timed(trainer.setup.loader.next_window, loading)  # type: ignore[method-assign]
    trainer.train()
    return loading[WARM_STEPS:], whole[WARM_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="training steps that are measured")
    parser.add_argument("--documents", type=int, default=300, help="mean tokens of a document")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="tokens of the data")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine_line(options.threads))
    with tempfile.TemporaryDirectory() as folder:
        lengths = np.random.default_rng(1).integers(1, 2 * options.documents, options.tokens // options.documents)
        data = write_tokens(Path(folder, "data"), lengths)
        windows = Windows(TokenData.open(data).split("train"), CONTEXT)
        calls = alone(windows)
        loading, whole = in_training(windows, options.steps, options.dtype)
    report(calls, loading, whole, options.documents)


def report(calls: list[float], loading: list[float], whole: list[float], document: int) -> None:
    """The table of bench/RESULTS.md."""
    alone_ms, inside_ms = [1e3 * value for value in calls], [1e3 * value for value in loading]
    speed = BATCH * CONTEXT / statistics.median(calls) / 1e6
    shares = [100 * a / b for a, b in zip(loading, whole, strict=True)]
    verdict = "met" if statistics.median(shares) < 1 else "missed"
    step = statistics.median(whole)
    print(f"\n{BATCH} rows of {CONTEXT} tokens, documents of {document} tokens on average, {len(whole)} steps\n")
    print("| what | median (range) |")
    print("|---|---|")
    print(f"| loader alone | {spread(alone_ms, 2)} ms, {speed:.1f} M tokens/s |")
    print(f"| loader in a training step of {step:.2f} s | {spread(inside_ms, 2)} ms |")
    print(f"| its share, asked: under 1 % | {spread(shares, 3)} %: {verdict} |")


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
