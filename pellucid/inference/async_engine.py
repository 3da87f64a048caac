"""An asyncio front for the engine: steps run in one thread of their own, everything else in the event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pellucid.inference.engine import MAX_FAILURES, Engine, EngineError
from pellucid.inference.records import EngineStats
from pellucid.inference.request import Request, TokenEvent
from pellucid.inference.threads import end_team

T = TypeVar("T")
_Queue = asyncio.Queue[list[TokenEvent] | tuple[str, int | None] | BaseException | None]
"""Of one reader: the events of a step, a request or one of its samples that was cancelled, what went wrong, or None at the end."""


class AsyncEngine:
    """Many streams over one `Engine`, which nobody else may use meanwhile.

    Requests are taken, and cancelled, between two steps; a reader wakes up once a step. All methods belong to one event
    loop; another may follow when it has ended.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._queues: dict[str, _Queue] = {}
        self._calls: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pellucid-engine")
        self._lock = threading.Lock()
        """A loop that ends may leave its last step running."""
        self._closed = False
        self._raised = 0
        """Steps, one after the other, that raised."""

    @property
    def problem(self) -> str | None:
        """Why no request can be answered any more; None: all is well."""
        if self._closed:
            return "the engine has been closed"
        return None if self.engine.broken is None else f"the engine has given up: {self.engine.broken}"

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """The tokens of a request as they are drawn, of several samples in turn. Leaving the iterator cancels it.

        Where the engine gives up meanwhile its samples end with "error".

        Raises:
            RequestError, QueueFullError, EngineError: as `Engine.submit`; EngineError also after `close`.
        """
        async with self.running([request]) as batches:
            async for events in batches:
                for event in events:
                    yield event

    @asynccontextmanager
    async def running(self, requests: Sequence[Request]) -> AsyncIterator[AsyncIterator[list[TokenEvent]]]:
        """Take requests, all or none; inside, an iterator gives what each step drew for them. Leaving cancels what is left.

        Raises:
            RequestError, QueueFullError, EngineError: as `Engine.submit`, on entering; EngineError also after `close`.
        """
        queue: _Queue = asyncio.Queue()
        left: dict[str, int] = {}  # samples that the engine works on

        def submit() -> None:
            try:
                for request in requests:
                    self.engine.submit(request)
                    self._queues[request.id], left[request.id] = queue, request.params.n
            except Exception:
                self._drop(left, queue)
                left.clear()
                raise

        try:
            await self.between_steps(submit)
            yield self._batches(queue, left)
        finally:
            mine = [name for name in left if self._queues.get(name) is queue]
            for name in mine:  # not those of a later request of that name
                del self._queues[name]
                if left[name]:
                    self._leave(name)

    async def _batches(self, queue: _Queue, left: dict[str, int]) -> AsyncIterator[list[TokenEvent]]:
        while any(left.values()):
            found = await queue.get()
            if isinstance(found, tuple):
                name, sample = found
                left[name] = 0 if sample is None else left[name] - 1
            elif isinstance(found, list):
                for event in found:
                    left[event.request_id] -= event.finish_reason is not None
                yield found
            else:
                left.clear()
                if found is not None:
                    raise found

    def _drop(self, names: dict[str, int], queue: _Queue) -> None:
        """Forget requests that were just submitted: one of their company is refused."""
        for name in names:
            self.engine.cancel(name)
            del self._queues[name]

    async def cancel(self, request_id: str, sample: int | None = None) -> bool:
        """End a request, or one of its samples, as `Engine.cancel`; no further events come of it."""
        return await self.cancel_soon(request_id, sample)

    def cancel_soon(self, request_id: str, sample: int | None = None) -> "asyncio.Future[bool]":
        """As `cancel`, when the step that runs has ended; nobody needs to wait for it."""

        def cancel() -> bool:
            found = self.engine.cancel(request_id, sample)
            if found and (queue := self._queues.get(request_id)) is not None:
                queue.put_nowait((request_id, sample))
                if sample is None:
                    del self._queues[request_id]
            return found

        return self._soon(cancel)

    async def stats(self) -> EngineStats:
        """Between two steps."""
        return await self.between_steps(self.engine.stats)

    async def close(self) -> None:
        """End all requests and the thread; streams end without further events, and nothing is taken any more."""
        self._closed = True
        if self._task is not None and not self._task.get_loop().is_closed():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)  # waits for the step that runs
        calls, self._calls = self._calls, []
        for _, future in calls:
            if not future.done():
                future.set_exception(EngineError("the engine has been closed"))
        self._end_all(None)

    def _leave(self, request_id: str) -> None:
        if self._task is not None and not self._task.done():
            self._soon(lambda: self.engine.cancel(request_id))
        else:  # the event loop is ending
            with self._lock:
                self.engine.cancel(request_id)

    def _end_all(self, error: BaseException | None) -> None:
        queues, self._queues = self._queues, {}
        for request_id in queues:
            self.engine.cancel(request_id)
        for queue in dict.fromkeys(queues.values()):
            queue.put_nowait(error)

    async def between_steps(self, call: Callable[[], T]) -> T:
        """What ``call`` gives while no step runs; EngineError after `close`."""
        outcome: T = await self._soon(call)
        return outcome

    def _soon(self, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        """The outcome of a call that the loop of steps makes while no step runs."""
        loop = asyncio.get_running_loop()
        if self._closed:
            raise EngineError("the engine has been closed")
        future: asyncio.Future[Any] = loop.create_future()
        self._calls.append((call, future))
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self._wake = asyncio.Event()
            self._task = loop.create_task(self._run())
        elif self._task.get_loop() is not loop:
            raise RuntimeError("this AsyncEngine belongs to another event loop, which still runs")
        self._wake.set()
        return future

    async def _run(self) -> None:
        loop, resting = asyncio.get_running_loop(), True
        while True:
            with self._lock:
                self._make_calls()
            if not self.engine.has_work:
                resting = True
                self._wake.clear()
                await self._wake.wait()
                continue
            if resting:
                end_team()  # this thread has perhaps loaded the model, or done other work of the kind
                resting = False
            try:
                events = await loop.run_in_executor(self._thread, self._step)
            except Exception as error:  # of the engine's own: nobody may wait forever
                self._raised += 1
                if self._raised >= MAX_FAILURES:
                    self.engine.broken = error
                self._end_all(error)
                continue
            self._raised = 0
            self._tell(events)
            await asyncio.sleep(0)

    def _tell(self, events: list[TokenEvent]) -> None:
        """One batch for each reader."""
        batches: dict[_Queue, list[TokenEvent]] = {}
        for event in events:
            if (queue := self._queues.get(event.request_id)) is not None:
                batches.setdefault(queue, []).append(event)
        for queue, batch in batches.items():
            queue.put_nowait(batch)

    def _step(self) -> list[TokenEvent]:
        with self._lock:
            return self.engine.step()

    def _make_calls(self) -> None:
        calls, self._calls = self._calls, []
        for call, future in calls:
            if future.cancelled():  # before it was made: nothing has happened
                continue
            try:
                outcome = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(outcome)
