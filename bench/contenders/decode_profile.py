"""Where the time of the engine's decode step goes: torch's profiler over some steps, its operators in groups.

An operator's own time counts, without that of those it calls. What no operator takes is Python and dispatch. The profiler slows
a step down, mostly between operators: the table has the step's wall time without it, too.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

import pellucid.inference.engine as engine_module
import pellucid.inference.fused as fused_module
from pellucid.checkpoint.model_folder import load_model
from pellucid.cli.sampling import pack_bfloat16
from pellucid.evaluate.roofline import DecodeSteps, read_bandwidth, roofline
from pellucid.evaluate.serving import drive
from pellucid.evaluate.workload import Workload
from pellucid.inference import Engine
from pellucid.kernels import build
from pellucid.model import Transformer

PROMPT, NEW = 200, 64
STEPS = 24
"""Under the profiler."""
SAMPLING = "pellucid: sampling"
FUSED = "pellucid: one kernel"
"""A forward that no operator of torch takes part in."""
REST = "norms, rotary, elementwise"
GROUPS = {
    FUSED.removeprefix("pellucid: "): (FUSED,),
    "attention": ("scaled_dot_product", "softmax", "flash", "bmm"),
    "linears": ("mm", "linear", "addmm", "matmul", "int4pack", "int8pack", "gemm", "mkldnn"),
    "compiled code": ("compiled", "inductor", "cpp_fused"),
    "cache gather and write": ("index_select", "index_copy", "index_put", "gather", "scatter", "aten::index"),
}
"""Part of an operator's name to its group, the first that fits; the others are `REST`."""


def profile(folder: Path, variants: Mapping[str, Mapping[str, Any]], threads: int, chosen: tuple[str, ...]) -> None:
    """Tables for 1 and 8 sequences, bfloat16 and int4, in each variant of the engine; rows that begin as one ``chosen``."""
    torch.set_num_threads(threads)
    reading = {count: read_bandwidth(count) for count in sorted({1, threads})}
    told = ", ".join(f"{speed:.1f} GB/s with {count}" for count, speed in reading.items())
    names = [*GROUPS, REST, "sampling", "Python and dispatch"]
    print(f"\n## a decode step after prompts of {PROMPT} tokens, ms\n\nmemory gives {told} threads\n")
    print(f"| | sequences | wall | wall, profiled | {' | '.join(names)} | operators | of the roofline |")
    print("|---" * (len(names) + 6) + "|")
    for weights in (None, "int4"):
        for variant, options in variants.items():
            if not f"{weights or 'bf16'} {variant}".startswith(chosen):
                continue
            model = load_model(folder, device="cpu", dtype="bfloat16", weights=weights).model
            pack_bfloat16(model, fast=not options["exact"])  # as the commands do
            for sequences in (1, 8):
                engine = Engine(model, kv_gb=0.5, token_budget=4096, **options)
                decode = measure(engine, sequences)
                bound = roofline(model, decode, reading)
                assert bound is not None
                wall, spent, operators = profiled(model, engine, sequences)
                spent["Python and dispatch"] = wall - sum(spent.values())
                cells = [f"{weights or 'bf16'} {variant}", str(sequences), f"{1e3 * decode.seconds / decode.steps:.2f}"]
                cells += [f"{1e3 * wall:.2f}", *(f"{1e3 * spent.get(name, 0.0):.2f}" for name in names)]
                print(f"| {' | '.join([*cells, f'{operators:,}', f'{bound.share:.0%}'])} |", flush=True)


def measure(engine: Engine, sequences: int) -> DecodeSteps:
    """Without the profiler; the first run warms up."""
    workload = Workload(
        requests=sequences, concurrency=sequences, prompt_tokens=(PROMPT, PROMPT), max_tokens=(NEW, NEW)
    )
    for _ in range(2):
        run = drive(engine, workload.make_requests(engine.model.config.vocab_size), concurrency=sequences)
        engine.pool.forget()
    return run.decode


def profiled(model: Transformer, engine: Engine, sequences: int) -> tuple[float, dict[str, float], int]:
    """Seconds of a step, of each group in it, and operators in it."""
    workload = Workload(
        requests=sequences, concurrency=sequences, prompt_tokens=(PROMPT, PROMPT), max_tokens=(STEPS + 2, STEPS + 2)
    )
    for request in workload.make_requests(model.config.vocab_size):
        engine.submit(request)
    engine.step()  # reads the prompts
    engine.step()
    real = engine_module.sample

    def marked(*args: Any, **options: Any) -> Any:
        with record_function(SAMPLING):
            return real(*args, **options)

    library = build.library() if build.available() else None

    class Marked:
        def pellucid_decode(self, *args: Any) -> Any:
            with record_function(FUSED):
                return library.pellucid_decode(*args)

    engine_module.sample = marked  # type: ignore[assignment]
    fused_module.library = Marked  # type: ignore[assignment]
    try:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found:
            began = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            wall = (time.perf_counter() - began) / STEPS
    finally:
        engine_module.sample, fused_module.library = real, build.library  # type: ignore[attr-defined]
    while engine.has_work:
        engine.step()
    engine.pool.forget()
    spent: dict[str, float] = {}
    operators = [event for event in found.events() if event.name != SAMPLING and not event.is_async]
    for event in operators:
        group = group_of(event)
        spent[group] = spent.get(group, 0.0) + event.self_cpu_time_total / 1e6 / STEPS
    return wall, spent, round(len(operators) / STEPS)


def group_of(event: FunctionEvent) -> str:
    """The group of an operator; everything inside of sampling belongs to that."""
    above = event
    while above.cpu_parent is not None:
        above = above.cpu_parent
        if above.name == SAMPLING:
            return "sampling"
    name = event.name.lower()
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), REST)
