"""Start ranks on this machine, a process each, and bring home what they return.

A rank lives as long as it is needed and no longer: when one fails the others are ended, when this process is killed
the ranks are too, and when this process is asked to stop it passes that on and waits.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, TypeVar, get_args

from pellucid.errors import ConfigError, RankError
from pellucid.parallel.rank import Failure, Start, by_value, release_openmp, run_rank
from pellucid.parallel.world import store

T = TypeVar("T")

StartMethod = Literal["spawn", "fork", "forkserver"]

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for the ranks that outlive a failed one, unless `launch` is told otherwise."""
SETTLE_S = 0.2
"""After a first failure, for others that failed before it to be heard of."""
POLL_S = 0.1
"""How late a stop request, or the end of a process whose pipe a stranger holds open, may be noticed."""


def launch(
    fn: Callable[..., T],
    nproc: int,
    *args: Any,
    start_method: StartMethod = "spawn",
    backend: str = "auto",
    timeout_s: float = 1800.0,
    grace_s: float = GRACE_S,
) -> list[T]:
    """Run ``fn(*args)`` on each of ``nproc`` ranks with the process group ready; their results in rank order.

    Each rank has its own copy of ``args``, tensors included, and torchrun's variables in its environment. It computes
    with its share of the cores, unless OMP_NUM_THREADS says otherwise. SIGINT and SIGTERM reach the ranks as one
    SIGTERM, whereupon they may finish; a second one kills them.

    Args:
        start_method: "spawn" and "forkserver" begin with a new interpreter, so ``fn`` must be importable; "fork" copies
            this process as it is, which is quick, but not after cuda was used.
        backend, timeout_s: as `pellucid.parallel.world.process_group` has them.
        grace_s: between SIGTERM and SIGKILL for the ranks that outlive a failed one.

    Raises:
        RankError: a rank raised, ended or was killed; all have ended.
        ConfigError: the arguments are wrong.
        KeyboardInterrupt: the ranks ended unfinished because of a signal to this process.
    """
    if nproc < 1:
        raise ConfigError(f"nproc must be at least 1, got {nproc}")
    if start_method not in get_args(StartMethod):
        raise ConfigError(f"start_method {start_method!r} is unknown; known: {', '.join(get_args(StartMethod))}")
    if start_method == "fork" and store() is not None:
        raise ConfigError('start_method "fork" would copy the process group that this process is in; use "spawn"')
    ranks: list[_Rank] = []
    with _stop_requests() as stops:
        try:
            _start(ranks, fn, nproc, args, start_method, backend, timeout_s)
            _watch(ranks, stops, grace_s)
        finally:
            for rank in ranks:
                rank.end()
    _raise_failure(ranks, interrupted=bool(stops))
    return [_result(rank) for rank in ranks]


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    process: BaseProcess
    connection: Connection
    message: bytes = b""
    """What it said at its end."""
    failure: Failure | None = None
    exit_status: int | None = None

    def update(self) -> None:
        """Hear what it says, and whether it has ended."""
        status = self.process.exitcode  # asked first: what it said before it ended is in the pipe by then
        if not self.message and self.connection.poll():
            try:
                self.message = self.connection.recv_bytes()
            except (EOFError, OSError):  # it ended silently, or in the middle of a word
                if status is None:
                    self.process.join(POLL_S)
            if self.message[:1] == b"E":
                self.failure = Failure.from_bytes(self.message[1:])
        if status is not None and not self.message:
            self.failure = Failure.of_exit(status)
        self.exit_status = status

    def end(self) -> None:
        """Kill it if it still runs, and leave nothing behind."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


# -- the beginning ------------------------------------------------------------------------------------------


def _start(
    ranks: list[_Rank],
    fn: Callable[..., Any],
    nproc: int,
    args: tuple[Any, ...],
    start_method: StartMethod,
    backend: str,
    timeout_s: float,
) -> None:
    """Start the processes, and append each to ``ranks`` as soon as it runs."""
    threads = _threads_each(nproc)
    context: Any = multiprocessing.get_context(start_method)
    call: Any = (fn, args)
    if start_method == "fork":
        if not release_openmp():
            threads = 1
    else:
        call = _packed(fn, args)
        resource_tracker.ensure_running()  # starting it would unblock the signals below
        if start_method == "forkserver":
            context.set_forkserver_preload(["__main__", "pellucid.parallel.rank"])  # one import for all ranks
    # The kernel chooses the port and it stays ours from here on: rank 0 is handed the listening socket. Ranks that
    # connect early wait in its queue. (A file instead of a port costs 7 ms a round of set and wait, this 0.15 ms.)
    with socket.create_server(("127.0.0.1", 0), backlog=max(nproc, 128)) as listener, _blocked_stop_signals():
        environment = _environment(nproc, listener.getsockname()[1])
        for number in range(nproc):
            start = Start(number, environment, threads, backend, timeout_s)
            reader, writer = context.Pipe(duplex=False)
            with writer:
                process = context.Process(target=run_rank, args=(start, call, listener, writer), name=f"rank {number}")
                process.start()
            ranks.append(_Rank(number, process, reader))


def _packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return by_value((fn, args))
    except Exception as error:
        raise ConfigError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be sent to a new process ({error}); "
            'use a function at the top of a module, or start_method="fork"'
        ) from error


def _environment(nproc: int, port: int) -> dict[str, str]:
    """What all ranks find in their environment, whichever way they are started."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    if sys.platform == "linux":
        inherited.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing leaves this machine, whatever its name resolves to
    size = str(nproc)
    return inherited | {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _threads_each(nproc: int) -> int | None:
    """A rank's share of the cores; None leaves the choice to OMP_NUM_THREADS."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // nproc)


@contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    """For the processes started inside: what comes before they are ready waits.

    They keep SIGINT blocked. Ctrl-C in a terminal goes to every process there, and with what is passed on from here
    the ranks would take it for two.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """The SIGINT and SIGTERM that this process receives inside; none are seen from a thread that is not the main one."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the end ------------------------------------------------------------------------------------------------


def _watch(ranks: list[_Rank], stops: list[int], grace_s: float) -> None:
    """Until every rank has ended; what they said is in ``ranks`` then."""
    passed_on = 0
    failed_at = ended_at = float("inf")
    while running := [rank for rank in ranks if rank.exit_status is None]:
        wait([*(rank.process.sentinel for rank in running), *(r.connection for r in running if not r.message)], POLL_S)
        for rank in running:
            rank.update()
        now = time.monotonic()
        if len(stops) > passed_on:
            passed_on = len(stops)
            _signal(running, signal.SIGTERM if passed_on == 1 else signal.SIGKILL)
        if failed_at == float("inf") and any(rank.failure for rank in ranks):
            failed_at = now
        if ended_at == float("inf") and now - failed_at >= SETTLE_S:
            ended_at = now
            _signal(running, signal.SIGTERM)
        if now - ended_at >= grace_s:
            _signal(running, signal.SIGKILL)
    for rank in ranks:  # what happened to ranks after they were ended is no failure of theirs
        if rank.failure is not None and rank.failure.time > ended_at:
            rank.failure = None


def _signal(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.process.exitcode is None and rank.process.pid is not None:
            os.kill(rank.process.pid, number)


def _raise_failure(ranks: list[_Rank], *, interrupted: bool) -> None:
    """Raise for the rank that failed first, and not only because another was gone."""
    failed = [(rank.failure, rank.number) for rank in ranks if rank.failure is not None]
    causes = [(failure, number) for failure, number in failed if not failure.is_echo]
    if interrupted:
        causes = [(failure, number) for failure, number in causes if not failure.is_interruption]
        if not causes and any(rank.message[:1] != b"R" for rank in ranks):
            raise KeyboardInterrupt
    if failed and (causes or not interrupted):
        failure, number = min(causes or failed, key=lambda pair: pair[0].time)
        error = failure.to_error(number)
        error.interrupted = interrupted
        raise error


def _result(rank: _Rank) -> Any:
    try:
        return ForkingPickler.loads(rank.message[1:])
    except Exception as error:
        raise RankError(
            f"the result of rank {rank.number} cannot be read: {error}", rank=rank.number, error=type(error).__name__
        ) from error
