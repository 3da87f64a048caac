"""What tests of several rooms share: small data, small models, forked processes with a wall limit."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.config import RunConfig, run_config
from pellucid.data.batches import Windows

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


class MemorySplit:
    """A split held in memory, with documents of the given lengths."""

    def __init__(self, lengths: list[int], vocab_size: int = 61, seed: int = 0) -> None:
        self.ends = np.cumsum(lengths)
        self.num_tokens = int(self.ends[-1])
        self.num_documents = len(lengths)
        self.tokens = np.random.default_rng(seed).integers(0, vocab_size, self.num_tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.tokens[start:stop].astype(np.int64)

    def document_spans(self, start: int, stop: int) -> tuple[int, np.ndarray]:
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop, side="left"))
        return first, self.ends[first : last + 1]


def random_lengths(num: int, seed: int = 1, low: int = 3, high: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, num).tolist()


def windows(num_documents: int = 30, context: int = 16, seed: int = 0, **kwargs: Any) -> Windows:
    return Windows(MemorySplit(random_lengths(num_documents), seed=seed), context, **kwargs)  # type: ignore[arg-type]


def tiny_config(out: Path | str = "", **changes: Any) -> RunConfig:
    """A run of 12 steps on a model of a few thousand parameters; ``changes`` are dotted with ``__`` for a dot."""
    table: dict[str, Any] = {
        "model": dict(TINY),
        "train": {
            "out": str(out), "steps": 12, "global_batch": 4, "micro_batch": 2, "save_every": 4, "val_every": 4,
            "dtype": "float32", "device": "cpu", "seed": 3,
        },
        "optim": {"lr": 1e-2, "warmup_steps": 2},
    }  # fmt: skip
    for key, value in changes.items():
        *parents, last = key.split("__")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return run_config(table)


def fork(function: Callable[[], Any], *, timeout: float = 60.0) -> int:
    """Run ``function`` in a forked child. Returns its exit status: 0, 1 after a traceback, or minus a signal.

    Forking keeps the imports, so that a case costs a fraction of a second. The child is killed after ``timeout``.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return wait(pid, timeout)


def wait(pid: int, timeout: float) -> int:
    """The exit status of a child, killed after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {timeout} s")
