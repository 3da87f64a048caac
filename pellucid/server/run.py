"""A service behind a socket: from the first byte to the last answer after a signal."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from pellucid.errors import ConfigError
from pellucid.server.app import make_app
from pellucid.server.serving import Service

FLUSH_S = 1.0
"""For the last words of streams that are ended."""
KEEP_OPEN_S = 65
"""A connection without a request is closed after so many seconds; longer than clients keep one for reuse."""
INTERRUPTED = 130
"""Exit code after a second signal."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address that does not listen yet, so that a port in use is told before models are loaded.

    Raises:
        ConfigError: the address is in use, not this machine's, or unknown.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {host!r} is no address: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """``http://HOST:PORT``."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until it is told to end.

    The first signal, or `end`, takes nothing new and lets answers finish for ``drain_seconds``; then streams get an error
    event. A second one ends them at once.

    Args:
        listening: called with the address as soon as requests are answered.
    """

    def __init__(self, service: Service, bound: socket.socket, listening: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service), log_config=None, access_log=False, server_header=False, proxy_headers=False, ws="none",
                lifespan="on", timeout_keep_alive=KEEP_OPEN_S, timeout_graceful_shutdown=int(FLUSH_S),
            )
        )  # fmt: skip
        self.service, self.bound, self._listening = service, bound, listening
        self.code = 0
        """Of the process's exit."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = 0
        self._hurry = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None

    def serve_until_ended(self) -> int:
        """Blocks; the exit code."""
        self.run(sockets=[self.bound])
        return self.code

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if not self.should_exit:
            self.service.ready = True
            self._listening(address_of(self.bound))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: uvicorn's own would stop listening at once."""
        self.end()
        # a step of a large model can outlast every promise; the process ends all the same
        seconds = 0.0 if self._ended > 1 else self.service.config.drain_seconds
        last = threading.Timer(seconds + FLUSH_S + 0.8, lambda: os._exit(self.code))
        last.daemon = True
        last.start()

    def end(self) -> None:
        """From any thread; twice to hurry."""
        self._ended += 1
        if self._ended > 1:
            self.code = INTERRUPTED
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._end_soon)

    def _end_soon(self) -> None:
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._finish())
        else:
            self._hurry.set()

    async def _finish(self) -> None:
        service = self.service
        service.draining = True
        try:
            async with asyncio.timeout(service.config.drain_seconds):
                while service.num_open and not self._hurry.is_set():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        if service.num_open:
            service.end_all()
            await asyncio.sleep(0.1)
        self.should_exit = True
