"""How fast is a data parallel step, beside torch's own engines, and what does a rank hold?

    python bench/parallel.py [--rounds 9] [--steps 3] [--only NAME ...]

The configuration `small`, 2 gloo ranks of 1 thread each, 2 rows of 256 random tokens a rank, float32, AdamW, clipped to
1.0, 48 MiB of gradients, every collective recorded on our side. Each contender is a pair of processes that lives for the
whole run and computes on the same model class; they take turns of some steps, each round in another order, and a ratio is
the median of the ratios within rounds. Peak memory is the largest resident size of a pair's first rank.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import machine_line
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from pellucid.cli import allocator
from pellucid.config import PRESETS, run_config
from pellucid.model import Transformer
from pellucid.optim import AdamWOptions, build_adamw
from pellucid.parallel import ShardedOptimizer, comm, create_executor
from pellucid.parallel.layout import parameter_infos
from pellucid.parallel.ledger import CommEvent, CommLedger, LedgerFiles, Span
from pellucid.parallel.plan import plan
from pellucid.train.losses import cross_entropy_sum

RANKS, ROWS, CONTEXT, VOCAB = 2, 2, 256, 8192
BUCKET_SIZE_MB = 2.0
CONTENDERS = (
    "none", "ddp", "ddp, not recorded", "zero1", "ddp + ShardedOptimizer", "torch DDP", "torch DDP, views", "torch DDP, views, static",
    "torch DDP + ZeRO", "zero2", "zero3", "zero3, kept gathered", "fsdp2", "FSDP2", "FSDP2, kept gathered",
)  # fmt: skip
ZERO3 = ("zero3", "zero3, kept gathered")
TORCH_FSDP = ("FSDP2", "FSDP2, kept gathered")
TORCH_DDP = ("torch DDP", "torch DDP, views", "torch DDP, views, static")
Step = Callable[[torch.Tensor, torch.Tensor], None]
Built = tuple[Step, Any, nn.Module, list[torch.Tensor]]
"""A step, the optimizer, the model, and what holds gradients on our side."""


def build_model() -> Transformer:
    """`small`, the same weights everywhere."""
    config = run_config({"model": PRESETS["small"] | {"vocab_size": VOCAB}}).model
    return Transformer(config, generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed over the rows of a rank, divided by the tokens of all ranks."""
    logits = model(tokens).logits
    return cross_entropy_sum(logits, targets, torch.ones_like(targets, dtype=torch.bool)) / (RANKS * targets.numel())


def ours(mode: str, **options: Any) -> Built:
    """A step through one of our executors; buckets are those of configs/small.toml."""
    model = build_model()
    optimizer = build_adamw(model, 3e-4, AdamWOptions())
    if mode not in ("zero3", "fsdp2"):
        options["bucket_size_mb"] = BUCKET_SIZE_MB
    executor: Any = create_executor(mode, average=False, **options)
    wrapped, *_ = executor.prepare(model, optimizer)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        with executor.accumulate(wrapped, last=True):
            executor.backward(loss_of(wrapped, tokens, targets))
        executor.finish_grads()
        executor.clip_grad_norm_(1.0)
        executor.step()

    if mode in ("zero3", "fsdp2"):
        gradients = [
            row.weight for row in executor.rows
        ]  # a gradient is there from backward to step, as large as these
        gradients = (
            [b.flat for b in executor.fsdp.buckets] + [w for w in gradients if w.ndim > 1]
            if mode == "zero3"
            else gradients
        )
    else:
        buckets = executor.ddp.buckets if mode == "ddp" else executor.buckets
        gradients = [bucket.shard if mode == "zero2" else bucket.flat for bucket in buckets]
    return step, optimizer, model, gradients


def alone() -> Built:
    """No communication at all: what a step cannot be faster than."""
    model = build_model()
    optimizer = build_adamw(model, 3e-4, AdamWOptions())
    return _plain_step(model, optimizer), optimizer, model, []


def sharded() -> Built:
    """Our DDP and our ShardedOptimizer in a loop of one's own."""
    from pellucid.parallel import DDP

    model = build_model()
    wrapped = DDP(model, BUCKET_SIZE_MB, average=False)
    optimizer = ShardedOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    return (
        _plain_step(wrapped, optimizer, wrapped.finish_gradient_sync),
        optimizer,
        model,
        [b.flat for b in wrapped.buckets],
    )


def theirs(zero: bool = False, **options: Any) -> Built:
    """torch's engines. Losses are scaled so that their average is our sum."""
    model = build_model()
    wrapped = DistributedDataParallel(model, **options)
    settings: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = build_adamw(model, 3e-4, AdamWOptions())
    return _plain_step(wrapped, optimizer), optimizer, model, []


def fully_sharded(reshard: bool) -> Built:
    """torch's fully_shard as its documentation has it: each layer, then the model; gradients are averaged."""
    from torch.distributed.fsdp import fully_shard

    model = build_model()
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return _plain_step(model, optimizer := build_adamw(model, 3e-4, AdamWOptions())), optimizer, model, []


def _plain_step(model: nn.Module, optimizer: Any, finish: Callable[[], None] | None = None) -> Step:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        loss_of(model, tokens, targets).backward()
        if finish is not None:
            finish()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def build(name: str) -> Built:
    """A contender by name."""
    makers: dict[str, Callable[[], Built]] = {
        "none": alone,
        "ddp": lambda: ours("ddp"),
        "ddp, not recorded": lambda: ours("ddp"),
        "zero1": lambda: ours("zero1"),
        "ddp + ShardedOptimizer": sharded,
        "torch DDP": theirs,
        "torch DDP, views": lambda: theirs(gradient_as_bucket_view=True),
        "torch DDP, views, static": lambda: theirs(gradient_as_bucket_view=True, static_graph=True),
        "torch DDP + ZeRO": lambda: theirs(zero=True, gradient_as_bucket_view=True),
        "zero2": lambda: ours("zero2"),
        "zero3": lambda: ours("zero3"),
        "zero3, kept gathered": lambda: ours("zero3", reshard_after_forward=False),
        "fsdp2": lambda: ours("fsdp2"),
        "FSDP2": lambda: fully_sharded(True),
        "FSDP2, kept gathered": lambda: fully_sharded(False),
    }
    return makers[name]()


# -- one rank of a contender --------------------------------------------------------------------------------


def serve(name: str, rank: int, store: str) -> None:
    """Steps on request: a number of them on each line of stdin, seconds a step on stdout."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    comm.use(ledger=None if name == "ddp, not recorded" else CommLedger())
    step, optimizer, model, gradients = build(name)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=generator)
    tokens, targets = ids[:, :-1], ids[:, 1:].contiguous()
    for _ in range(3):
        step(tokens, targets)
    print(json.dumps({"held": held_bytes(optimizer, model, gradients)}), flush=True)
    for line in sys.stdin:
        if (ledger := comm.ledger()) is not None:
            ledger.clear()
        begin = time.perf_counter()
        for number in range(int(line)):
            comm.begin_step(number + 1)
            step(tokens, targets)
        seconds = (time.perf_counter() - begin) / int(line)
        print(json.dumps({"seconds": seconds, "peak": peak_resident()}), flush=True)


def held_bytes(optimizer: Any, model: nn.Module, gradients: list[torch.Tensor]) -> dict[str, int]:
    """Bytes of weights, gradients (ours) and moments in this process."""
    inner = getattr(optimizer, "inner", None) or getattr(optimizer, "optim", optimizer)
    moments = sum(local(v).nbytes for s in inner.state.values() for v in s.values() if torch.is_tensor(v) and v.ndim)
    return {
        "weights": sum(local(p).nbytes for p in model.parameters()),
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "moments": moments,
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a ``DTensor`` is here."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def peak_resident() -> int:
    """Largest resident size so far, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        table = dict(line.split(":", 1) for line in file)
    return int(table["VmHWM"].split()[0]) * 1024


# -- the race -----------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two processes of one contender."""

    name: str
    processes: list[subprocess.Popen[str]]
    held: dict[str, int] = field(default_factory=dict)
    peak: int = 0

    def turn(self, steps: int) -> float:
        """Seconds a step, of the slower rank."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [self.read(process) for process in self.processes]
        self.peak = answers[0]["peak"]
        return max(answer["seconds"] for answer in answers)

    @staticmethod
    def read(process: "subprocess.Popen[str]") -> dict[str, Any]:
        """The next line of a rank."""
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a rank ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(name: str, folder: Path) -> Pair:
    """The ranks of a contender, ready to step."""
    environment = os.environ | allocator.settings() | {"OMP_NUM_THREADS": "1"}
    store = folder / name.replace(" ", "_").replace(",", "")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--rank", str(rank), "--store", str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    pair = Pair(name, processes)
    first, *_ = [Pair.read(process) for process in processes]
    pair.held = first["held"]
    return pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.rank, args.store)
        return
    print(machine_line(1))
    times: dict[str, list[float]] = {name: [] for name in args.only}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pairs = [start(name, folder) for name in args.only]
        for pair in pairs:
            for process in pair.processes:
                stack.callback(process.kill)
        for pair in pairs:
            pair.turn(1)
        for number in range(args.rounds):
            order = list(pairs)
            random.Random(number).shuffle(order)
            for pair in order:
                times[pair.name].append(pair.turn(args.steps))
    report(times, pairs)


def report(times: dict[str, list[float]], pairs: list[Pair]) -> None:
    """Tables of speed and memory."""
    infos = parameter_infos(build_model())
    planned = {
        mode: plan(infos, mode=mode, world_size=RANKS, bucket_size_mb=BUCKET_SIZE_MB)
        for mode in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    }
    print(f"\n`small`, {RANKS} gloo ranks, 1 thread each, {ROWS} x {CONTEXT} tokens a rank, float32\n")
    print("| contender | ms a step, median (range) | moments a rank, MiB | peak resident, MiB |\n|---|---|---|---|")
    for pair in pairs:
        ms = [1e3 * t for t in times[pair.name]]
        print(
            f"| {pair.name} | {statistics.median(ms):.0f} ({min(ms):.0f} to {max(ms):.0f}) "
            f"| {pair.held['moments'] / 2**20:.1f} | {pair.peak / 2**20:.0f} |"
        )
    fastest = min((n for n in TORCH_DDP if n in times), key=lambda n: statistics.median(times[n]), default=None)
    print("\n| ratio of times | median of rounds (range) | asked |\n|---|---|---|")
    compare(times, "ddp", fastest, "at most 1.03")
    compare(times, "zero1", "torch DDP + ZeRO", "at most 1.00")
    compare(times, "ddp + ShardedOptimizer", "torch DDP + ZeRO", "")
    compare(times, "zero2", "torch DDP + ZeRO", "at most 1.00")
    best = min((n for n in TORCH_FSDP if n in times), key=lambda n: statistics.median(times[n]), default=None)
    compare(times, "zero3", "FSDP2", "")
    compare(times, "zero3, kept gathered", "FSDP2, kept gathered", "")
    fastest = min((n for n in ZERO3 if n in times), key=lambda n: statistics.median(times[n]), default="zero3")
    compare(times, fastest, best, "at most 0.95")
    compare(times, "fsdp2", best, "")
    compare(times, "ddp", "none", "")
    compare(times, "ddp", "ddp, not recorded", "at most 1.01")
    if "ddp" in times:
        cost = recording_seconds()
        share = cost / statistics.median(times["ddp"])
        print(
            f"\nmaking and writing the ledger of a step: {1e3 * cost:.2f} ms, {share:.2%} of ddp's step (asked: under 1 %)"
        )
    by_name = {pair.name: pair for pair in pairs}
    print("\n| weights + gradients + moments of rank 0 | held, MiB | planned, MiB |\n|---|---|---|")
    for mode, expected in planned.items():
        if mode in by_name:
            held = by_name[mode].held
            total = sum(held.values())
            promised = expected.weights_bytes + expected.gradients_bytes + expected.optimizer_bytes
            print(f"| {mode} | {total / 2**20:.2f} | {promised / 2**20:.2f} |")


def recording_seconds(steps: int = 300) -> float:
    """What the ledger of one step of `ddp` costs: making its lines and writing them."""
    infos = parameter_infos(build_model())
    tags = [
        (bucket.tag, [info.name for info in bucket.parameters])
        for bucket in plan(infos, mode="ddp", world_size=2, bucket_size_mb=BUCKET_SIZE_MB).buckets
    ]
    tags += [(tag, []) for tag in ("tokens", "used", "loss", "stop")]
    with tempfile.TemporaryDirectory() as folder:
        files, ledger = LedgerFiles(Path(folder), 0, after=0), CommLedger()
        begin = time.perf_counter()
        for step in range(steps):
            for tag, owner in tags:
                ledger.events.append(
                    CommEvent(
                        step, 0, "all_reduce", tag, "world", "float32", 1, 4, 4, tuple(owner), "backward", 0.1, 0.2, 0.3
                    )
                )
            ledger.spans += [Span(step, 0, phase, 0.1, 0.2) for phase in ("forward", "backward", "optimizer")]
            files.write(ledger)
        seconds = (time.perf_counter() - begin) / steps
        files.close()
    return seconds


def compare(times: dict[str, list[float]], ours: str, theirs: str | None, asked: str) -> None:
    """One line of the table of ratios."""
    if theirs is None or ours not in times or theirs not in times:
        return
    ratios = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
    print(f"| {ours} / {theirs} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) | {asked} |")


if __name__ == "__main__":
    main()
