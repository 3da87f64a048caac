"""Rewards in processes of their own: one that hangs, dies or prints does no harm to training."""

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pellucid.errors import ConfigError, TrainingError

START_SECONDS = 120.0
"""What a worker may take to import its rewards."""


GRACE_SECONDS = 0.2
"""From the end of a worker's output to that of the worker."""
TOLD_AHEAD = 16
"""Completions that a worker is asked about at once: it waits for nobody among them, and others find work where it is slow."""
TOLD_BYTES = 2**15
"""Of what a worker is told ahead: a pipe holds twice that, so that telling a worker that hangs ends."""


class Judged(NamedTuple):
    """A completion that rewards are asked about."""

    prompt: str
    completion: str
    record: dict[str, Any]


class RewardPool:
    """Asks worker processes what completions are worth.

    Args:
        rewards: names, as `find_reward` has them.
        plugins: modules that workers import first.
        timeout_s: seconds one reward may take over one completion; the worker is then killed.
        workers: processes.

    Raises:
        ConfigError: a worker cannot find a reward; says what it met.
    """

    def __init__(self, rewards: Sequence[str], *, plugins: Sequence[str], timeout_s: float, workers: int) -> None:
        self.rewards, self.plugins, self.timeout_s = list(rewards), list(plugins), timeout_s
        self.num_workers = workers
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rewards")
        self._workers: list[_Worker] = []
        self._closing = False
        try:
            for _ in range(workers):
                self._workers.append(_Worker(self))
            for worker in self._workers:
                worker.greet()
                self._free.put(worker)
        except BaseException:
            self.close()
            raise

    def score(self, items: Sequence[Judged]) -> list[list[float]]:
        """The worth of each item by each reward, in order.

        Raises:
            TrainingError: a reward raised, hung, died or returned no finite number; names it and the completion.
        """
        width = len(self.rewards)
        asked = [_Question(item, reward) for item in items for reward in range(width)]
        parts = _parts(asked, min(TOLD_AHEAD, -(-len(asked) // self.num_workers)))
        values = [value for part in self._threads.map(self._ask, parts) for value in part]
        return [values[i * width : (i + 1) * width] for i in range(len(items))]

    def close(self) -> None:
        """End the workers, one that judges at once; a second time nothing."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            if worker.busy:  # interrupted: nobody wants to know any more
                worker.process.kill()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            assert worker.process.stdin is not None
            with contextlib.suppress(OSError):
                worker.process.stdin.close()  # an idle one goes by itself then
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _ask(self, asked: Sequence["_Question"]) -> list[float]:
        """The worth of some completions, each by one reward, from one worker."""
        worker = self._free.get()
        values: list[float] = []
        said: dict[str, Any] | None = None
        status = None
        try:
            for said in worker.ask([question.line for question in asked]):
                if said is None or "value" not in said:
                    break
                values.append(float(said["value"]))
        finally:
            if len(values) < len(asked):  # what it was to say of the others would be taken for later replies
                status = worker.end()
                self._workers.remove(worker)
                if not self._closing:
                    worker = _Worker(self)
                    self._workers.append(worker)
                    worker.greet()
            self._free.put(worker)
        if len(values) == len(asked):
            return values
        item, reward = asked[len(values)].item, asked[len(values)].reward
        late = f"did not return within {self.timeout_s:g} s"
        died = late if status in (None, -signal.SIGALRM) else f"ended its process, with status {status}"
        what = said["error"] if said is not None else died
        raise TrainingError(
            f"reward {self.rewards[reward]} {what}; it was asked about the completion {_short(item.completion)} of the prompt "
            f"{_short(item.prompt)}. Mend the reward, or raise strategy.reward_timeout_s where it needs longer"
        )


class _Question:
    """What one reward is asked about one completion."""

    def __init__(self, item: Judged, reward: int) -> None:
        self.item, self.reward = item, reward
        self.line = _line({"reward": reward, **item._asdict()})


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parts(asked: Sequence[_Question], size: int) -> list[list[_Question]]:
    """In order, ``size`` at most in each, and no more than `TOLD_BYTES` where there are several."""
    parts: list[list[_Question]] = []
    told = 0
    for question in asked:
        if not parts or len(parts[-1]) == size or told + len(question.line) > TOLD_BYTES:
            parts.append([])
            told = 0
        parts[-1].append(question)
        told += len(question.line)
    return parts


class _Worker:
    """One process, asked by one thread at a time."""

    def __init__(self, pool: RewardPool) -> None:
        self.pool = pool
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pellucid.train.reward_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        self._rest = b""
        self.busy = False
        """Somebody waits for its reply."""

    def greet(self) -> None:
        pool = self.pool
        first = {"path": sys.path, "plugins": pool.plugins, "rewards": pool.rewards, "timeout_s": pool.timeout_s}
        (said,) = self.ask([_line(first)], START_SECONDS)
        if said is None or "error" in said:
            what = said["error"] if said is not None else "the process ended before it had imported them"
            raise ConfigError(f"strategy.rewards {', '.join(pool.rewards)} cannot be used: {what}")

    def ask(self, lines: Sequence[bytes], timeout_s: float | None = None) -> Iterator[dict[str, Any] | None]:
        """The reply to each line; None, and nothing more, where there is none in time after the one before."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timeout_s = timeout_s or self.pool.timeout_s + 1.0  # the worker's own alarm comes first
        self.busy = True
        try:
            self.process.stdin.write(b"".join(lines))
            self.process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                for _ in lines:
                    end = time.monotonic() + timeout_s
                    while b"\n" not in self._rest:
                        ready = selector.select(max(0.0, end - time.monotonic()))
                        data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
                        if not data:
                            yield None
                            return
                        self._rest += data
                    line, _, self._rest = self._rest.partition(b"\n")
                    yield json.loads(line)
        except OSError:
            yield None
        finally:
            self.busy = False

    def end(self) -> int | None:
        """Its exit status; None where it had to be killed."""
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(GRACE_SECONDS)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what a dead process was still to get
                    pipe.close()
        return status


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
