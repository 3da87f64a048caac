"""The threads that torch's operators compute with, where several threads of a program call operators.

OpenMP keeps a team of workers for each thread that has ever computed something large. Once all teams together have more threads
than there are processors, a worker no longer waits awake for the next operator but sleeps, and to wake it takes longer than most
operators of a decode step: measured with two processors, a step of SmolLM2-135M then takes 1.4 times as long.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

_SOFT = 1
"""``omp_pause_soft``: nothing but threads is given up (OpenMP 5.0, section 3.2.44)."""


def end_team() -> None:
    """End the workers of the calling thread, which computes nothing for a while; they come back with its next large operator.

    Does nothing where torch's OpenMP has no such call.
    """
    if pause := _pause():
        pause(_SOFT)


@cache
def _pause() -> "ctypes._NamedFuncPointer | None":
    found = sorted(
        (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
    )  # a symbol is looked up in what it needs, too
    try:
        return ctypes.CDLL(str(found[0])).omp_pause_resource_all if found else None
    except (OSError, AttributeError):
        return None
