"""The side of `launch` that runs in each rank's process, and what it says at its end."""

import copyreg
import ctypes
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

import torch

from pellucid.errors import PellucidError, RankError
from pellucid.parallel.world import process_group

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

_ECHO = re.compile(
    "connection (was )?(closed|reset|refused|aborted)|broken pipe|got 0 bytes|remote process exited|socket closed", re.I
)
"""In the message of a rank that failed because another one was gone."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank is told."""

    number: int
    environment: dict[str, str]
    threads: int | None
    """To compute with; None leaves it to the environment."""
    backend: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank has no result."""

    time: float
    """By the monotonic clock, which all processes of a machine share."""
    error: str
    """The name of the exception's class, of the signal, or the exit status."""
    message: str
    traceback: str = ""
    exit_code: int = 1
    is_exception: bool = True
    is_echo: bool = False
    """Whether it failed only because another rank had."""

    @classmethod
    def of_exception(cls, error: BaseException, rank: int, now: float) -> "Failure":
        """From an exception that reached `run_rank`, whose own frame is left out."""
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        blamed = error.rank if isinstance(error, RankError) else None
        return cls(
            time=now,
            error=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(type(error), error, frames)),
            exit_code=error.exit_code if isinstance(error, PellucidError) else 1,
            is_echo=blamed != rank if blamed is not None else bool(_ECHO.search(str(error))),
        )

    @classmethod
    def of_exit(cls, status: int) -> "Failure":
        """From the end of a process that said nothing."""
        if status >= 0:
            error = f"exit status {status}"
            return cls(time.monotonic(), error, f"ended with {error} and without a result", is_exception=False)
        error = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        hint = "; the kernel does that when memory runs out" if error == "SIGKILL" else ""
        return cls(time.monotonic(), error, f"was killed by {error}{hint}", is_exception=False)

    @property
    def is_interruption(self) -> bool:
        """Whether a request to stop explains it."""
        return self.error in ("KeyboardInterrupt", "SIGTERM", "SIGINT", "SIGKILL")

    def to_error(self, rank: int) -> RankError:
        """What `launch` raises for it. A mistake in the configuration is every rank's, so its message stands alone."""
        if not self.is_exception:
            message = f"rank {rank} {self.message}"
        elif self.exit_code == 2:
            message = self.message
        else:
            message = f"rank {rank} failed: {self.error}: {self.message}".removesuffix(": ")
        error = RankError(message, rank=rank, traceback=self.traceback, error=self.error, exit_code=self.exit_code)
        if self.traceback:
            error.add_note(f"On rank {rank}:\n{self.traceback}")
        return error

    def to_bytes(self) -> bytes:
        """For the way home."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Failure":
        """What `to_bytes` made."""
        return cls(**json.loads(data))


def by_value(value: Any) -> bytes:
    """``value`` as bytes that any process can read at any time.

    Left to itself torch sends the address of a tensor's memory, which ranks would share, and which goes away with the
    process that had it.
    """
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table
    pickler.dump(value)
    return buffer.getvalue()


def run_rank(start: Start, call: Call | bytes, listener: socket.socket, connection: Connection) -> None:
    """The whole life of a rank: ``b"R"`` and its result, or ``b"E"`` and its `Failure`, go into ``connection``."""
    _settle_in(start)
    if start.number > 0:
        listener.close()
    try:
        fn, args = ForkingPickler.loads(call) if isinstance(call, bytes) else call
        with process_group(start.backend, start.timeout_s, listener=listener if start.number == 0 else None):
            result = fn(*args)
    except BaseException as error:
        _fail(Failure.of_exception(error, start.number, time.monotonic()), connection)
    try:
        message = b"R" + by_value(result)
    except Exception as error:
        kind = type(result).__name__
        _fail(
            Failure(
                time.monotonic(),
                type(error).__name__,
                f"its result, of type {kind}, cannot be sent ({error}); return numbers, text, tensors or containers of them",
                traceback="".join(traceback.format_exception(error)),
            ),
            connection,
        )
    connection.send_bytes(message)


def _fail(failure: Failure, connection: Connection) -> NoReturn:
    """Say it and end at once: nothing on the way out may wait for ranks that wait for this one."""
    connection.send_bytes(b"E" + failure.to_bytes())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _settle_in(start: Start) -> None:
    """Signals, environment and threads of a rank, whatever it was copied from."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _die_with_launcher()
    os.environ.clear()
    os.environ.update(start.environment, RANK=str(start.number), LOCAL_RANK=str(start.number))
    if start.threads is not None:
        torch.set_num_threads(start.threads)


def _die_with_launcher() -> None:
    """End when the launcher does, even if it is killed.

    The kernel's own means acts on the parent, which a fork server stands in for; the pipe acts on the launcher, but
    copies of its other end may lie in forked processes. So both.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    threading.Thread(target=watch, name="launcher's end", daemon=True).start()


def release_openmp() -> bool:
    """Make it safe to compute with several threads after a fork; False if that cannot be done.

    GNU's OpenMP keeps its threads between parallel regions and believes in them after a fork, where they are gone: the
    first parallel region of the child would wait for ever. Pausing the runtime ends them; they come back when needed.
    Other OpenMP libraries and OpenBLAS look after themselves.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return True
    lines = [line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines() if "libgomp" in line]
    pause_hard = 2
    try:
        return all(ctypes.CDLL(path).omp_pause_resource_all(pause_hard) == 0 for path in {line[5] for line in lines})
    except (OSError, AttributeError):
        return False
