"""Compiles kernels.cpp for this processor, keeps what came out, and loads it.

The library is linked with the OpenMP runtime that torch has loaded: with a second one, the threads of each would keep the
other's from the cores.
"""

import ctypes
import functools
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fopenmp", "-fPIC")
SWITCH = "PELLUCID_KERNELS"
"""Environment variable; "off": do without."""
LIMIT_S = 300.0
"""For compiling; it takes 4 to 15 seconds."""
RUNTIMES = ("libgomp", "libiomp5", "libomp")


class _Unavailable(Exception):
    """Why there are no kernels, in words."""


def available() -> bool:
    """Whether kernels can be used; compiles them when it is first asked on a machine."""
    return _loaded()[0] is not None


def missing() -> str | None:
    """Why they cannot be used; None where they can."""
    return _loaded()[1]


def library() -> ctypes.CDLL:
    """The loaded library; only where `available`."""
    found = _loaded()[0]
    assert found is not None, "ask available() first"
    return found


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        found = ctypes.CDLL(str(_built()))
    except (_Unavailable, OSError) as error:
        logger.info("kernels of our own are not used: %s", error)
        return None, str(error)
    found.pellucid_linear.restype = found.pellucid_decode.restype = None
    found.pellucid_linear.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    found.pellucid_decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found.pellucid_pairs.restype = ctypes.c_int64
    return found, None


def _built() -> Path:
    """The library's file, compiled if it was not there."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        raise _Unavailable(f"{SWITCH} is {os.environ[SWITCH]}")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise _Unavailable(f"there is no C++ compiler {compiler[0]!r}; install g++, or name one in CXX")
    runtime = _openmp_runtime()
    version = _run([*compiler, "--version"])
    named = [SOURCE.read_text(encoding="utf-8"), *compiler, *FLAGS, version, str(runtime), _processor()]
    key = hashlib.sha256("\0".join(named).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pellucid" / "kernels"
    path = folder / f"{key}.so"
    if path.exists():
        return path
    logger.info("compiling kernels for this processor, once, into %s", path)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            object_, made = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
            _run([*compiler, *FLAGS, "-c", str(SOURCE), "-o", str(object_)])
            # without -fopenmp, which would name the compiler's own runtime
            _run([*compiler, "-shared", str(object_), str(runtime), "-o", str(made)])
            os.replace(made, path)  # whole or not at all, whoever compiles beside us
    except OSError as error:
        raise _Unavailable(f"{folder} cannot be written: {error}; set XDG_CACHE_HOME") from error
    return path


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unavailable(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise _Unavailable(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _openmp_runtime() -> Path:
    """The one that torch computes with."""
    torch.get_num_threads()  # torch is there
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError as error:
        raise _Unavailable("only Linux tells which OpenMP runtime torch has loaded") from error
    for path in dict.fromkeys(re.findall(r"(/\S+)$", maps, re.MULTILINE)):
        if Path(path).name.startswith(RUNTIMES):
            return Path(path)
    raise _Unavailable("torch has loaded no OpenMP runtime")


def _processor() -> str:
    """What -march=native looks at."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"^(?:flags|Features|model name|cpu family|model)\s*:.*$", text, re.MULTILINE)
    return "\n".join(sorted(set(found)))
