"""What tests of several rooms share: small data, small models, forked processes with a wall limit."""

import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load, load_file, save
from torch.distributed.tensor import DTensor

from pellucid.config import RunConfig, run_config
from pellucid.data.batches import Windows
from pellucid.parallel import Executor, comm
from pellucid.train import Callback
from pellucid.train.ranks import gather_json

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
    return wait(_fork(function), timeout)


def _fork(function: Callable[[], Any]) -> int:
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
    return pid


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


def run_ranks(function: Callable[[], Any], size: int, *, timeout: float = 60.0) -> list[Any]:
    """What ``function`` returns on each of ``size`` forked ranks of a gloo group; must be what JSON can hold.

    A rank that fails ends the test with its traceback on stderr; all are killed after ``timeout``.
    """
    statuses, results = try_ranks(function, size, timeout=timeout)
    assert statuses == [0] * size, f"ranks ended with {statuses}"
    return results


def try_ranks(function: Callable[[], Any], size: int, *, timeout: float = 60.0) -> tuple[list[int], list[Any]]:
    """As `run_ranks`, but a rank may fail: the exit status of each, and the result of each that has one."""
    with tempfile.TemporaryDirectory() as folder:

        def rank(number: int) -> None:
            torch.set_num_threads(1)
            store = dist.FileStore(f"{folder}/store", size)
            dist.init_process_group("gloo", store=store, rank=number, world_size=size)
            result = function()
            Path(folder, f"result{number}").write_text(json.dumps(result), encoding="utf-8")
            dist.barrier()  # no rank goes away while another still talks to it

        pids = [_fork(lambda number=number: rank(number)) for number in range(size)]  # type: ignore[misc]
        end = time.monotonic() + timeout
        statuses = [wait(pid, max(0.1, end - time.monotonic())) for pid in pids]
        files = [Path(folder, f"result{number}") for number in range(size)]
        return statuses, [json.loads(file.read_text(encoding="utf-8")) if file.exists() else None for file in files]


def digest(model: torch.nn.Module) -> str:
    """A hash of all parameters; of what this rank holds of them, where they are sharded."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        held = parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()
        total.update(held.numpy().tobytes())
    return total.hexdigest()


def whole_weights(executor: Any) -> list[Any]:
    """Every whole weight, on every rank, whatever the ranks hold."""
    held = [None if weight is None else weight.tolist() for _, weight in executor.weights()]
    return gather_json(held, tag="test/weights")[0] if executor.shards_weights else held


def outcome_of(out: Path, step: int) -> tuple[Any, ...]:
    """Everything that must not depend on interruptions."""
    last = out / "checkpoints" / f"step_{step:08d}"
    tensors = tensors_of(last)
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for record in log:
        for key in ("time", "seconds", "tokens_per_s"):
            record.pop(key, None)
    state = json.loads((last / "state.json").read_text())
    state.pop("config_sha256")  # covers train.out, which differs here
    extra = json.loads((last / "extra/early_stopping.json").read_text())
    return tensors, log, state, extra


def tensors_of(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Weights, whole optimizer state and generators, each under ("model" | "optimizer" | "rng", name)."""
    tables = {
        "model": load_file(checkpoint / "model.safetensors"),
        "optimizer": load_moments(checkpoint),
        "rng": load_file(checkpoint / "rng.safetensors"),
    }
    return {(name, key): value for name, table in tables.items() for key, value in table.items()}


def load_moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The optimizer's state in a checkpoint, put together from the files of all ranks with safetensors alone."""
    whole: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("optimizer*.safetensors")):
        with safe_open(path, framework="pt") as file:
            slices = json.loads((file.metadata() or {}).get("slices", "{}"))
            for key in file.keys():  # noqa: SIM118 - not a mapping
                values = file.get_tensor(key)
                said = slices.get(key, {"shape": list(values.shape), "start": 0})
                tensor = whole.setdefault(key, torch.zeros(said["shape"], dtype=values.dtype))
                tensor.view(-1)[said["start"] : said["start"] + values.numel()] = values.view(-1)
    return whole


def whole_state(executor: Executor) -> dict[str, torch.Tensor]:
    """The optimizer's state, put together from all ranks' parts, on every rank: each element comes from exactly one."""
    parts = list(executor.optimizer_parts())
    tables = comm.all_gather_bytes(json.dumps([[p.name, p.shape, p.start] for p in parts]).encode(), tag="parts")
    flat = {str(i): part.tensor.detach().reshape(-1).clone() for i, part in enumerate(parts)}
    tensors = comm.all_gather_bytes(save(flat), tag="tensors")
    whole: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for table, data in zip(map(json.loads, tables), map(load, tensors), strict=True):
        for i, (name, shape, start) in enumerate(table):
            values = data[str(i)]
            tensor = whole.setdefault(name, torch.zeros(shape, dtype=values.dtype))
            assert tensor.shape == torch.Size(shape) and tensor.dtype == values.dtype, name
            tensor.view(-1)[start : start + len(values)] = values
            times.setdefault(name, torch.zeros(tensor.numel()))[start : start + len(values)] += 1
    assert all(bool((count == 1).all()) for count in times.values())
    return whole


class Seen(Callback):
    """What a run tells of steps and validations; on rank ``rank`` it is asked to end after step ``stop_at``."""

    def __init__(self, stop_at: int | None = None, rank: int = 0) -> None:
        self.infos: list[Any] = []
        self.validations: list[Any] = []
        self.stop = (stop_at, rank)

    def on_optimizer_step(self, trainer: Any, info: Any) -> None:
        self.infos.append(info)
        if (info.step, comm.rank()) == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation(self, trainer: Any, info: Any) -> None:
        self.validations.append(info)


def recorded(folder: Path, rank: int, step: int) -> dict[tuple[str, str, str], list[int]]:
    """The lines of a step's ledger as a plan has them: (tag, op, dtype) -> [count, payload bytes, wire bytes]."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for line in (folder / f"ledger/rank{rank:05d}.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["step"] == step:
            row = rows.setdefault((event["tag"], event["op"], event["dtype"]), [0, 0, 0])
            for i, value in enumerate((1, event["payload_bytes"], event["wire_bytes"])):
                row[i] += value
    return rows
