"""`pellucid doctor`."""

import argparse
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.cli import allocator
from pellucid.cli.output import notice, print_json
from pellucid.version import __version__

EXTRAS = {
    "formats": ("h5py", "pyarrow", "zstandard", "gguf"),
    "test": ("pytest", "hypothesis", "transformers"),
    "check": ("ruff", "mypy"),
}
CPU_FLAGS = {
    "avx2": "avx2",
    "avx512": "avx512f",
    "avx512_bf16": "avx512_bf16",
    "avx512_vnni": "avx512_vnni",
    "amx_bf16": "amx_bf16",
}
CORE = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "jinja2", "rich")
LOW_DISK_GB = 5.0


class Finding(NamedTuple):
    """One thing looked at: its value for --json, and what to do where something is better done."""

    value: Any
    advice: str = ""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="look at this machine",
        description="What Pellucid finds here: versions, processor, memory allocator, compiler, extras, disk. "
        "Takes a few seconds, of which the matrix products are the most; some ten more where kernels are not compiled yet.",
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look and print; 1 where a required library is missing."""
    findings = versions() | processor() | arithmetic() | tools() | space()
    missing = [name for name in CORE if findings[name].value is None]
    if args.json:
        advice = [f"{name}: {f.advice}" for name, f in findings.items() if f.advice]
        print_json({name: f.value for name, f in findings.items()} | {"advice": advice})
    else:
        width = max(map(len, findings))
        for name, finding in findings.items():
            hint = f"   <- {finding.advice}" if finding.advice else ""
            print(f"{name:<{width}}  {show(finding.value)}{hint}")
    if missing:
        notice(f"pellucid: required libraries are missing: {', '.join(missing)}; pip install pellucid")
    return 1 if missing else 0


def versions() -> dict[str, Finding]:
    """Python, Pellucid, the libraries it needs, and its extras."""
    found = {
        "pellucid": Finding(__version__),
        "python": Finding(platform.python_version()),
        "platform": Finding(platform.platform()),
    }
    for name in CORE:
        try:
            found[name] = Finding(version(name))
        except PackageNotFoundError:
            found[name] = Finding(None, "required: pip install pellucid")
    for extra, modules in EXTRAS.items():
        absent = [module for module in modules if find_spec(module) is None]
        advice = f'lacks {", ".join(absent)}: pip install "pellucid[{extra}]"' if absent else ""
        found[f"extra_{extra}"] = Finding(not absent, advice)
    return found


def processor() -> dict[str, Finding]:
    """Cores, threads, memory, instruction sets and accelerators."""
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    more = (
        f"more threads than the {usable} cores slow it down; set OMP_NUM_THREADS={usable}" if threads > usable else ""
    )
    flags = cpu_flags()
    return {
        "cores": Finding(usable),
        "torch_threads": Finding(threads, more),
        "memory_gb": Finding(memory_gb()),
        "cpu_features": Finding({name: flag in flags for name, flag in CPU_FLAGS.items()} if flags else None),
        "cuda": Finding(torch.cuda.get_device_name(0) if torch.cuda.is_available() else None),
        "mps": Finding(torch.backends.mps.is_available()),
    }


def arithmetic() -> dict[str, Finding]:
    """Measured speed of matrix products, which decides what ``train.dtype = "auto"`` is on the CPU."""
    import torch

    from pellucid.train.precision import bf16_is_fast, matmul_gflops

    fast = bf16_is_fast(torch.device("cpu"))
    return {
        "float32_gflops": Finding(round(matmul_gflops(torch.float32), 1)),
        "bfloat16_gflops": Finding(round(matmul_gflops(torch.bfloat16), 1)),
        "train_dtype_auto": Finding("bfloat16" if fast else "float32"),
    }


def tools() -> dict[str, Finding]:
    """What makes it faster where it is there: a C++ compiler, kernels made by it, another memory allocator."""
    from pellucid import kernels

    compiler = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name and (path := shutil.which(name))),
        None,
    )
    library = allocator.find()
    return {
        "compiler": Finding(
            compiler, "" if compiler else "train.compile needs a C++ compiler on CPU: install g++ or clang"
        ),
        "kernels": Finding(
            kernels.available(),
            "" if kernels.available() else f"--weights int8, int4 and --fast are slower: {kernels.missing()}",
        ),
        "allocator_installed": Finding(
            str(library) if library else None,
            ""
            if library or sys.platform != "linux"
            else "train and demo tell glibc to keep its memory; libjemalloc2 does too",
        ),
        "allocator_loaded": Finding(allocator.preloaded()),
    }


def space() -> dict[str, Finding]:
    """Free space where runs and temporary files go."""
    found = {}
    for name, folder in (("disk_free_gb", Path.cwd()), ("tmp_free_gb", Path(os.environ.get("TMPDIR", "/tmp")))):
        try:
            free = round(shutil.disk_usage(folder).free / 1e9, 1)
        except OSError:
            found[name] = Finding(None, f"{folder} cannot be looked at")
            continue
        found[name] = Finding(free, f"little room in {folder}" if free < LOW_DISK_GB else "")
    return found


def cpu_flags() -> set[str]:
    """What the kernel says of the first processor; nothing where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return set(line.partition(":")[2].split())


def memory_gb() -> float | None:
    """Physical memory."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        return None


def show(value: Any) -> str:
    """One value for a person."""
    if isinstance(value, dict):
        return ", ".join(name for name, there in value.items() if there) or "none of " + ", ".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
