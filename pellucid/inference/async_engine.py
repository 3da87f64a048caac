"""An asyncio front for the engine: steps run in one thread of their own, everything else in the event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pellucid.inference.engine import Engine, EngineError
from pellucid.inference.records import EngineStats
from pellucid.inference.request import Request, TokenEvent

_Queue = asyncio.Queue[TokenEvent | BaseException | None]
"""Of one stream: its events, or what went wrong, or None where it was cancelled."""


class AsyncEngine:
    """Many streams over one `Engine`, which nobody else may use meanwhile.

    Requests are taken, and cancelled, between two steps. All methods belong to one event loop; another may follow when it
    has ended.
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

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """The tokens of a request as they are drawn, of several samples in turn. Leaving the iterator cancels it.

        Where the engine gives up meanwhile its samples end with "error".

        Raises:
            RequestError, QueueFullError, EngineError: as `Engine.submit`; EngineError also after `close`.
        """
        queue: _Queue = asyncio.Queue()
        left = 0  # samples that the engine works on

        def submit() -> None:
            nonlocal left
            self.engine.submit(request)
            self._queues[request.id], left = queue, request.params.n

        try:
            await self._between_steps(submit)
            while left:
                event = await queue.get()
                if not isinstance(event, TokenEvent):
                    left = 0
                    if event is not None:
                        raise event
                    return
                left -= event.finish_reason is not None
                yield event
        finally:
            if self._queues.get(request.id) is queue:  # not those of a later request of that name
                del self._queues[request.id]
                if left:
                    self._leave(request.id)

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream ends without further events. False where it is unknown or has ended."""

        def cancel() -> bool:
            found = self.engine.cancel(request_id)
            if found and (queue := self._queues.pop(request_id, None)) is not None:
                queue.put_nowait(None)
            return found

        found: bool = await self._between_steps(cancel)
        return found

    async def stats(self) -> EngineStats:
        """Between two steps."""
        stats: EngineStats = await self._between_steps(self.engine.stats)
        return stats

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
        for request_id, queue in queues.items():
            self.engine.cancel(request_id)
            queue.put_nowait(error)

    async def _between_steps(self, call: Callable[[], Any]) -> Any:
        return await self._soon(call)

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
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                self._make_calls()
            if not self.engine.has_work:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                events = await loop.run_in_executor(self._thread, self._step)
            except Exception as error:  # of the engine's own: nobody may wait forever
                self._end_all(error)
                continue
            for event in events:
                if event.request_id in self._queues:
                    self._queues[event.request_id].put_nowait(event)
            await asyncio.sleep(0)

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
