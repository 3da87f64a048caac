"""How much of the server one request may take: bytes of its body, places in the queue, time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import Receive

from pellucid.server.errors import ApiError, invalid, rate_limited, too_large

BODY_TIMEOUT_S = 30.0
"""The longest that a client may take to send its body."""
FORGETTING = 0.9
"""What an older answer's length still counts for, when one more has ended."""


class ClientLeft(Exception):
    """Nobody is there any more to hear the answer."""


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The body of a request.

    Raises:
        ApiError: more than ``limit`` bytes (413, without reading on), or it does not come.
        ClientLeft: the client went away meanwhile.
    """
    announced = headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise _closing(too_large(limit))
    chunks: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise _closing(too_large(limit))
                more = message.get("more_body", False)
    except TimeoutError:
        raise _closing(invalid(f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds; send it again")) from None
    return b"".join(chunks)


def _closing(error: ApiError) -> ApiError:
    """What is left of the body is not read: the connection is of no further use."""
    error.headers["connection"] = "close"
    return error


class Places:
    """The sequences of one model that run or wait: so many, and no more.

    Args:
        limit: places.
        tokens_per_s: how fast the engine draws now; 0: not known.
    """

    def __init__(self, limit: int, tokens_per_s: Callable[[], float]) -> None:
        self.limit, self.taken, self.refused = limit, 0, 0
        self.mean_tokens = 0.0
        """Of the answers that have ended, the latest counting most."""
        self._tokens_per_s = tokens_per_s

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Places for the samples of one request, until it ends; one that wants more than there are gets all, alone.

        Raises:
            ApiError: 429, with the seconds after which there may be room.
        """
        count = min(count, self.limit)
        if self.taken + count > self.limit:
            self.refused += 1
            seconds = self.seconds_until_free(count)
            raise rate_limited(
                f"{self.taken} of {self.limit} places of this model are taken and the request needs {count}; try again "
                f"in about {max(1, round(seconds))} s",
                seconds,
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    def seconds_until_free(self, count: int) -> float:
        """About when ``count`` more sequences have room: so many of those that are there must draw their answers first."""
        speed = self._tokens_per_s()
        ends = max(1, self.taken + count - self.limit)
        return ends * self.mean_tokens / speed if speed > 0 else 1.0

    def ended(self, tokens: int) -> None:
        """A sequence has ended by itself."""
        self.mean_tokens = FORGETTING * self.mean_tokens + (1 - FORGETTING) * tokens if self.mean_tokens else tokens
