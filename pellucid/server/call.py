"""One request from its first byte to the last of its answer: who asks, how long it may take, and who still listens."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pellucid.errors import PellucidError
from pellucid.server import sse
from pellucid.server.auth import SALT
from pellucid.server.errors import ApiError, as_api_error, unavailable
from pellucid.server.fields import decode_body, ignored_fields
from pellucid.server.limits import ClientLeft, read_body
from pellucid.server.responses import LEFT, REQUEST_ID, dialect_of, error_response, json_response
from pellucid.server.serving import Service

logger = logging.getLogger("pellucid.server")

T = TypeVar("T")
SMALL_BODY = 16_384
"""Bytes of JSON that are read in the event loop; more would keep others waiting."""
LAST_WORDS_S = 2.0
"""For telling an error to a client that may not be reading."""
MAX_NOTED = 200
"""Names of ignored fields that the log tells, each once."""


class Call:
    """A request with a body.

    Args:
        field: where its prompt is, for errors about that.
    """

    def __init__(self, service: Service, field: str, scope: Scope, receive: Receive, send: Send) -> None:
        self.service, self.field, self.scope, self.receive, self._send = service, field, scope, receive, send
        self.id: str = scope[REQUEST_ID]
        self.dialect = dialect_of(scope)
        self._tell: Callable[[ApiError], bytes] | None = None
        """How errors are told once the status has been sent."""
        self._keeping: asyncio.Task[None] | None = None
        self._sent = 0.0
        """When the stream last told something, in the event loop's time."""
        self._body_read = asyncio.Event()
        self.size = 0
        """Bytes of its body."""

    @property
    def owner(self) -> str:
        """Of the key that it came with."""
        name: str = self.scope[SALT]
        return name

    # -- in -------------------------------------------------------------------------------------------------

    async def body(self, known: Iterable[str]) -> dict[str, Any]:
        """The JSON object that was sent; fields that nobody knows are noted.

        Raises:
            ApiError: it is too large or no JSON object.
            ClientLeft: the client went away meanwhile.
        """
        service, limit = self.service, int(self.service.config.max_body_mb * 1e6)
        data = await read_body(self.receive, Headers(scope=self.scope), limit)
        self.size = len(data)
        self._body_read.set()
        body = await self.off_loop(lambda: decode_body(data, max_bytes=limit))
        if service.config.log_prompts:
            logger.info("%s: %s", self.id, json.dumps(body, ensure_ascii=True))
        for name in ignored_fields(body, set(known)):
            if name not in service.noted and len(service.noted) < MAX_NOTED:
                service.noted.add(name)
                logger.info("%s: the field %r is not known and is ignored", self.id, name[:64])
        return body

    async def off_loop(self, work: Callable[[], T]) -> T:
        """What ``work`` on the body gives, in a thread where that is long."""
        return work() if self.size <= SMALL_BODY else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What ``work`` gives; long bodies share a few threads, so that short ones need not wait for them."""
        threads = self.service.long_bodies if self.size > SMALL_BODY else None
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    # -- out ------------------------------------------------------------------------------------------------

    async def send_json(self, body: Mapping[str, Any]) -> None:
        """The whole answer."""
        await json_response(body)(self.scope, self.receive, self._send)

    async def start_stream(self, tell: Callable[[ApiError], bytes]) -> None:
        """From now on the status is 200, and ``tell`` makes events of errors. While nothing is sent comments keep it alive."""
        headers = [(name.lower().encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._tell, self._sent = tell, asyncio.get_running_loop().time()
        self._keeping = asyncio.create_task(self._keep_alive(self.service.config.keep_alive_s))

    async def write(self, data: bytes) -> None:
        """Whole events."""
        if data:
            self._sent = asyncio.get_running_loop().time()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, last: bytes) -> None:
        """Its last events."""
        self._stop_keeping()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _keep_alive(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent + seconds - loop.time()))
            if loop.time() - self._sent >= seconds:
                await self.write(sse.KEEP_ALIVE)

    def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    # -- the whole ------------------------------------------------------------------------------------------

    async def run(self, answer: Callable[["Call"], Awaitable[None]]) -> None:
        """Answer, within the server's time and only as long as the client is there; all that was held for it is given back."""
        work, gone = asyncio.create_task(self._timed(answer)), asyncio.create_task(self._gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self.scope[LEFT] = True
        except ClientLeft:
            self.scope[LEFT] = True
        finally:
            self._stop_keeping()
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _gone(self) -> None:
        """Returns when the client leaves. Until its body has been read, reading that tells."""
        await self._body_read.wait()
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _timed(self, answer: Callable[["Call"], Awaitable[None]]) -> None:
        config = self.service.config
        try:
            async with asyncio.timeout(config.request_timeout_s) as limit:
                with self.service.answering(limit):
                    await answer(self)
        except TimeoutError:
            await self._fail(self._out_of_time())
        except ApiError as error:
            await self._fail(error)
        except PellucidError as error:
            await self._fail(as_api_error(error, self.dialect, param=self.field))
        except (ClientLeft, asyncio.CancelledError):
            raise
        except Exception as error:
            logger.exception("%s: failed", self.id)
            await self._fail(as_api_error(error, self.dialect))

    def _out_of_time(self) -> ApiError:
        config = self.service.config
        if self.service.draining:
            return unavailable("the server is shutting down and ended this answer; ask again when it is back", 5)
        return ApiError(
            504, f"the answer took longer than {config.request_timeout_s:g} seconds, the most that this server allows; ask for "
            "fewer tokens", type="server_error", code="timeout", headers={"x-should-retry": "false"},
        )  # fmt: skip

    async def _fail(self, error: ApiError) -> None:
        async with asyncio.timeout(LAST_WORDS_S):  # a client that does not read must not hold us
            if self._tell is None:
                await error_response(error, self.scope)(self.scope, self.receive, self._send)
            else:
                await self.end_stream(self._tell(error))
