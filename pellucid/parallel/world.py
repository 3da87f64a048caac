"""Where this process runs: which rank of how many, on which device, and the process group that joins them."""

import functools
import json
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from pellucid.errors import ConfigError, PellucidError, RankError
from pellucid.parallel import comm

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and `launch` too."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class World:
    """The place of this process among the ranks."""

    rank: int
    size: int
    local_rank: int
    """The number among the ranks of this machine."""
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None where there is one process.

        Looked up, not kept: a group that somebody keeps goes on running threads after its end, and one of them that
        asks for the interpreter while that shuts down aborts the process.
        """
        return dist.group.WORLD if _is_started() else None

    @classmethod
    def current(cls, device: str = "auto") -> "World":
        """This process as torch.distributed knows it; rank 0 of 1 without a process group.

        Args:
            device: "auto" is a cuda device if the group can move its tensors, else cpu; "cuda" is the one of
                this rank, cuda:LOCAL_RANK.

        Raises:
            ConfigError: no such device here.
        """
        if not _is_started():
            return cls(0, 1, 0, resolve_device(device))
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"
        place = resolve_device(f"cuda:{local_rank}" if device == "cuda" else device)
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, place)


def resolve_device(name: str) -> torch.device:
    """A device by name, for one process; "auto" is cuda where there is one, else cpu.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def get_rank() -> int:
    """This rank's number; 0 without a process group."""
    return comm.rank()


def get_world_size() -> int:
    """How many ranks there are; 1 without a process group."""
    return comm.world_size()


def get_current_device() -> torch.device:
    """The device that this rank computes on."""
    return World.current().device


def only_on_rank(rank: int, sync: bool = False) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Decorator: the function runs on one rank and returns None on the others.

    Args:
        sync: every rank must call it, and none goes on before it has run. If it raises an `Exception`, all raise:
            the others a `RankError` that tells what happened there. Its result stays on its rank.

    Raises:
        ConfigError: when called, there is no such rank.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
            size = get_world_size()
            if not 0 <= rank < size:
                raise ConfigError(f"only_on_rank({rank}): there is no such rank; they are 0 to {size - 1}")
            if not sync:
                return function(*args, **kwargs) if get_rank() == rank else None
            result, failure = None, None
            if get_rank() == rank:
                try:
                    result = function(*args, **kwargs)
                except Exception as error:
                    failure = error
            # one exchange both waits and tells how it went, so that nobody waits for a rank that has raised
            said = comm.all_gather_bytes(_describe(failure), tag="only_on_rank")[rank]
            if failure is not None:
                raise failure
            if said:
                raise _error_of(rank, said)
            return result

        return run

    return decorate


def _describe(error: Exception | None) -> bytes:
    """An error for the other ranks; empty where there is none."""
    if error is None:
        return b""
    told = {
        "message": f"{type(error).__name__}: {error}",
        "error": type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
        "exit_code": error.exit_code if isinstance(error, PellucidError) else 1,
    }
    return json.dumps(told).encode()


def _error_of(rank: int, said: bytes) -> RankError:
    told = json.loads(said)
    return RankError(f"rank {rank} failed: {told.pop('message')}", rank=rank, **told)


# -- the process group --------------------------------------------------------------------------------------


def in_environment() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return "RANK" in os.environ or (os.environ.get("WORLD_SIZE") or "1") != "1"


def is_restart() -> bool:
    """Whether torchrun started the ranks again after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def store() -> "Store | None":
    """The key-value store that the ranks share, or None without a process group."""
    return dist.distributed_c10d._get_default_store() if _is_started() else None


@contextmanager
def process_group(
    backend: str = "auto", timeout_s: float = 1800.0, *, listener: socket.socket | None = None
) -> Iterator[World]:
    """The process group that torchrun's environment describes, for the time of a ``with`` block.

    Without that environment, or inside a group, nothing is started. When the block raises, nothing is sent and
    nothing is waited for: other ranks may be gone, and the end of the process closes what is open.

    Args:
        backend: "gloo" or "nccl"; "auto" is nccl where every rank of this machine has a cuda device, else gloo.
        timeout_s: after which a collective that a rank never joined is an error.
        listener: rank 0 only: a socket that already listens at MASTER_ADDR:MASTER_PORT, given away.

    Raises:
        ConfigError: the environment is incomplete or contradicts itself, or the backend cannot be used.
    """
    place = None if _is_started() else _read_environment()
    if place is None:
        yield World.current()
        return
    backend = _choose_backend(backend, place)
    timeout = timedelta(seconds=timeout_s)
    shared, is_host = _open_store(place, timeout, listener)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=shared, rank=place.rank, world_size=place.size, timeout=timeout, device_id=device
    )
    yield World.current()
    # others may still read the store, so the rank that hosts it leaves last
    shared.set(f"left/{place.rank}", "")
    if is_host:
        shared.wait([f"left/{rank}" for rank in range(place.size)], timeout)
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class _Place:
    rank: int
    local_rank: int
    size: int
    address: str
    port: int


def _read_environment() -> _Place | None:
    """What torchrun says; None where it says nothing."""
    if not in_environment():
        return None
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        there = [name for name in VARIABLES if os.environ.get(name)]
        raise ConfigError(
            f"the environment has {', '.join(there)} but not {', '.join(missing)}; "
            "start ranks with torchrun or --nproc, or unset them"
        )
    rank, local_rank, size, port = (_number(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {size} in the environment; ranks count from 0")
    return _Place(rank, local_rank, size, os.environ["MASTER_ADDR"], port)


def _number(name: str) -> int:
    text = os.environ[name]
    most = 2**16 - 1 if name == "MASTER_PORT" else 2**31 - 1
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= most):
        raise ConfigError(f"{name} is {text!r} in the environment; it must be a number from 0 to {most}")
    return int(text)


def _choose_backend(backend: str, place: _Place) -> str:
    if backend not in ("auto", "gloo", "nccl"):
        raise ConfigError(f"backend {backend!r} is unknown; known: auto, gloo, nccl")
    if backend == "gloo":
        return backend
    devices = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    # the number of ranks here, which is the same for all of them, so that they choose alike
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", place.local_rank + 1))
    if backend == "nccl" and devices < needed:
        raise ConfigError(
            f"parallel.backend is nccl, for which {needed} ranks need a cuda device each; {devices} are here"
        )
    return "nccl" if devices >= needed else "gloo"


def _open_store(place: _Place, timeout: timedelta, listener: socket.socket | None) -> tuple["Store", bool]:
    """The store at MASTER_ADDR:MASTER_PORT, and whether this process hosts it."""
    is_host = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun hosts it
    descriptor = None if listener is None else listener.detach()
    try:
        tcp = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not marked so
            place.address,
            place.port,
            place.size,
            is_host,
            timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RankError(
            f"rank {place.rank} cannot reach MASTER_ADDR:MASTER_PORT {place.address}:{place.port}: {reason}",
            rank=place.rank,
        ) from error
    # a store that outlives a restart still holds what the ranks before it wrote
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"pellucid/{restart}", tcp), is_host  # type: ignore[attr-defined]


def _is_started() -> bool:
    return dist.is_available() and dist.is_initialized()
