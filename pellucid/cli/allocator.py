"""A memory allocator that keeps what it has mapped.

glibc as it comes maps and unmaps every large tensor at each step: hundreds of thousands of page faults. jemalloc and
tcmalloc keep the pages, and so does glibc when told to by its environment; training on CPU is 1.1 to 1.4 times as fast
then. All of it must be settled before the process starts, hence the re-execution, which happens once.
"""

import os
import sys
from pathlib import Path

LIBRARIES = ("libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
JEMALLOC_SETTINGS = "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"
GLIBC_SETTINGS = {
    # no MALLOC_ARENA_MAX: with one arena for all threads a step took 1.2 times as long
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 44),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Never map a block of its own, never give memory back: where neither library is installed."""
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Of glibc's tunables: ask for pages of 2 MiB. Weights are read faster; training, which writes, is slower."""
MARK = "PELLUCID_ALLOCATOR"
"""Set in the environment once the choice is made; "none" there beforehand leaves everything as it is."""


def find() -> Path | None:
    """The preferred allocator that is installed, or None."""
    if not sys.platform.startswith("linux"):
        return None
    return next((path for name in LIBRARIES for folder in FOLDERS if (path := Path(folder, name)).exists()), None)


def preloaded() -> str | None:
    """The name of the allocator that this process was started with, or None for the system's."""
    names = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return next((Path(name).name for name in names if "jemalloc" in name or "tcmalloc" in name), None)


def environment(library: Path) -> dict[str, str]:
    """What to add to the environment of a process that is to start with ``library`` loaded."""
    added = {MARK: library.name, "LD_PRELOAD": f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()}
    return added if "MALLOC_CONF" in os.environ else added | {"MALLOC_CONF": JEMALLOC_SETTINGS}


def settings(*, huge_pages: bool = False) -> dict[str, str]:
    """What to add to the environment of a process that is to keep its memory, with what is installed here.

    Args:
        huge_pages: for one that reads its weights over and over; acts where glibc is the allocator.
    """
    library = find()
    if library is not None:
        return environment(library)
    tunables = [*filter(None, [os.environ.get("GLIBC_TUNABLES")]), HUGE_PAGES]
    return GLIBC_SETTINGS | {MARK: "glibc"} | ({"GLIBC_TUNABLES": ":".join(tunables)} if huge_pages else {})


def keep_memory(*, huge_pages: bool = False) -> None:
    """Start this command again with an allocator that keeps its memory, on Linux and if torch is not imported yet."""
    if not sys.platform.startswith("linux") or preloaded() or MARK in os.environ or "torch" in sys.modules:
        return
    added = settings(huge_pages=huge_pages)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "pellucid", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | added)
