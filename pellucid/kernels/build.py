"""Compiles the kernels for this processor, keeps what came out, and loads it.

The library is linked with the OpenMP runtime that torch has loaded: with a second one, the threads of each would keep the
other's from the cores.
"""

import ctypes
import fcntl
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
from torch.utils._python_dispatch import _disable_current_modes

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "attention.cpp", "experts.cpp"))
HEADER = Path(__file__).with_name("lanes.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fopenmp", "-fPIC")
SWITCH = "PELLUCID_KERNELS"
"""Environment variable; "off": do without."""
LIMIT_S = 300.0
"""For compiling; it takes 4 to 15 seconds."""
RUNTIMES = r"(?:libgomp|libiomp5|libomp)[.-]"


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
        path = _built()
        try:
            found = load(path)
        except OSError:  # damaged
            path.unlink(missing_ok=True)
            found = load(_built())
        from pellucid.kernels import attention, experts, linear  # which themselves call what this loads

        with _disable_current_modes():  # the first who asks may be tracing shapes
            wrong = linear.disagreement(found) or attention.disagreement(found) or experts.disagreement(found)
        if wrong is not None:
            raise _Unavailable(f"{path} computes wrongly here: {wrong}; please report it")
    except (_Unavailable, OSError) as error:
        if _is_switched_off():
            logger.info("kernels of our own are not used: %s", error)
        else:
            logger.warning(
                "kernels of our own are not used; int8, int4, --fast and attention in float32 take longer: %s", error
            )
        return None, str(error)
    return found, None


def load(path: Path) -> ctypes.CDLL:
    """A compiled library, its functions declared."""
    found = ctypes.CDLL(str(path))
    for of_rows in (found.pellucid_linear, found.pellucid_linear_bfloat16):
        of_rows.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    found.pellucid_attend.argtypes = [ctypes.c_void_p]
    found.pellucid_decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found.pellucid_experts_forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found.pellucid_experts_backward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found.pellucid_pairs.restype = ctypes.c_int64
    return found


def check(status: int) -> None:
    """`MemoryError` where a function of the library found none."""
    if status:
        raise MemoryError("a kernel found no memory for its activations; run fewer tokens a step")


def _is_switched_off() -> bool:
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false")


def _built() -> Path:
    """The library's file, compiled if it was not there."""
    if _is_switched_off():
        raise _Unavailable(f"{SWITCH} is {os.environ[SWITCH]}")
    try:
        compiler = shlex.split(os.environ.get("CXX") or "c++")
    except ValueError as error:
        raise _Unavailable(f"CXX is {os.environ['CXX']!r}: {error}") from error
    if shutil.which(compiler[0]) is None:
        raise _Unavailable(f"there is no C++ compiler {compiler[0]!r}; install g++, or name one in CXX")
    runtime = _openmp_runtime()
    version = _run([*compiler, "--version"])
    sources = [path.read_text(encoding="utf-8") for path in (HEADER, *SOURCES)]
    named = [*sources, *compiler, *FLAGS, version, str(runtime), _processor()]
    key = hashlib.sha256("\0".join(named).encode()).hexdigest()[:32]
    path = _folder() / f"{key}.so"
    if path.exists():
        return path
    try:
        with open(path.parent / "lock", "wb") as lock, tempfile.TemporaryDirectory() as scratch:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of many ranks one compiles, and the others wait for it
            if path.exists():
                return path
            logger.warning("compiling kernels for this processor, once, some ten seconds, into %s", path)
            objects, made = [], Path(scratch) / "kernels.so"
            for source in SOURCES:
                objects.append(str(Path(scratch) / f"{source.stem}.o"))
                _run([*compiler, *FLAGS, "-c", str(source), "-o", objects[-1]])
            # without -fopenmp, which would name the compiler's own runtime
            _run([*compiler, "-shared", *objects, str(runtime), "-o", str(made)])
            whole = path.with_suffix(".new")  # one name, since who has the lock is alone: nothing piles up
            with open(whole, "wb") as file:
                file.write(made.read_bytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(whole, path)
    except OSError as error:
        raise _Unavailable(f"{path.parent} cannot be written: {error}; set XDG_CACHE_HOME") from error
    return path


def _folder() -> Path:
    """Where libraries are kept, made if it is not there: ours alone, since what lies there is run."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pellucid" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError) as error:  # there may be no home
        raise _Unavailable(f"the folder for kernels cannot be made: {error}; set XDG_CACHE_HOME") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise _Unavailable(
            f"{folder} is another's, or others may write there; set XDG_CACHE_HOME to a folder of your own"
        )
    return folder


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unavailable(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise _Unavailable(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _openmp_runtime() -> Path:
    """Torch's, which is loaded by now; one beside torch itself before any other."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise _Unavailable("only Linux tells which OpenMP runtime torch has loaded") from error
    paths = [Path(path) for path in dict.fromkeys(re.findall(r"^(?:\S+\s+){5}(/.*)$", maps, re.MULTILINE))]
    found = [path for path in paths if re.match(RUNTIMES, path.name)]
    if not found:
        raise _Unavailable("torch has loaded no OpenMP runtime")
    home = Path(torch.__file__).parent
    return next((path for path in found if path.is_relative_to(home)), found[0])


def _processor() -> str:
    """What -march=native looks at."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"^(?:flags|Features|model name|cpu family|model)\s*:.*$", text, re.MULTILINE)
    return "\n".join(sorted(set(found)))
