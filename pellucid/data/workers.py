"""Worker processes that answer requests, in order: a Python of their own each, which ends when its pipe does.

A worker imports what answering needs and nothing heavier; it reads requests from its standard input and ends when that
closes, so that none outlives its parent, however the parent dies. Frames on the pipes are two sizes, a JSON header and raw
bytes; nothing is pickled.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from pellucid.errors import PellucidError

Frame: TypeAlias = tuple[dict[str, Any], bytes]
"""A header and a body."""
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_SIZES = struct.Struct("<QQ")
_Given = TypeVar("_Given")


class Workers:
    """Worker processes, each served by a thread that hands it one request after another.

    Args:
        boot: the program of a worker, which gets ``arguments`` and answers with `answer_requests`. Its path has this package
            appended, not put first: beside an installed package lie others that may shadow the standard library.
        count: processes.
    """

    def __init__(self, boot: str, arguments: list[str], count: int) -> None:
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-c", boot, PACKAGE_ROOT, *arguments]
        pipe = subprocess.PIPE
        for _ in range(count):
            # a session of its own: Ctrl-C is for the parent, workers end with their pipe
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
            self._processes.append(process)
            self._free.put(process)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="pellucid-worker")

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was still buffered has nobody to read it
                    if pipe:
                        pipe.close()

    def in_order(self, requests: Iterable[tuple[_Given, Frame]]) -> Iterator[tuple[_Given, Frame]]:
        """What was given along with each request, and its answer. At most two requests a worker are in flight.

        Raises:
            PellucidError: a worker process died.
        """
        source = iter(requests)
        pending: deque[tuple[_Given, Future[Frame]]] = deque()
        while True:
            room = max(2 * len(self._processes) - len(pending), 0)
            pending.extend(
                (given, self._threads.submit(self._ask, frame)) for given, frame in itertools.islice(source, room)
            )
            if not pending:
                return
            given, answer = pending.popleft()
            yield given, answer.result()

    def _ask(self, frame: Frame) -> Frame:
        process = self._free.get()
        assert process.stdin and process.stdout
        try:
            _send(process.stdin, frame)
            return _receive(process.stdout)
        except (OSError, EOFError, ValueError) as error:
            raise PellucidError(_obituary(process)) from error
        finally:
            self._free.put(process)


def _obituary(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        return "an encoding worker closed its pipe; nothing was written"
    how = f"exit status {code}"
    if code < 0:
        how = f"signal {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", perhaps for lack of memory: fewer --workers need less"
    return f"an encoding worker died ({how}); nothing was written"


def answer_requests(answer: Callable[[dict[str, Any], bytes], Frame]) -> None:
    """A worker's whole life: answer what comes in on standard input until it closes."""
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get into the results
    while True:
        try:
            request = _receive(incoming)
        except EOFError:
            return
        try:
            _send(outgoing, answer(*request))
        except BrokenPipeError:
            os._exit(0)  # the parent is gone


def _send(pipe: IO[bytes], frame: Frame) -> None:
    head, body = json.dumps(frame[0]).encode(), frame[1]
    pipe.write(_SIZES.pack(len(head), len(body)) + head)
    pipe.write(body)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    head_size, body_size = _SIZES.unpack(_exactly(pipe, _SIZES.size))
    return json.loads(_exactly(pipe, head_size)), _exactly(pipe, body_size)


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) != size:
        raise EOFError
    return data
