"""HTTP as it is, for what no client would send or show: broken bodies, headers, the bytes of a stream."""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pellucid.conformance.case import Failed, Target, shorten

Auth = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body's value, or `Failed`."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise Failed(f"the body of this {self.status} is not JSON: {shorten(self.body)}") from None

    def events(self) -> list[tuple[str | None, str]]:
        """The (event, data) pairs of a stream, read as the WHATWG says; comments are left out."""
        try:
            text = self.body.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Failed(f"the stream is not UTF-8: {error}") from None
        found: list[tuple[str | None, str]] = []
        event: str | None = None
        data: list[str] = []
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if not line:
                if data:
                    found.append((event, "\n".join(data)))
                event, data = None, []
            elif name == "data":
                data.append(value)
            elif name == "event":
                event = value
        if data or rest:
            raise Failed(f"the stream ends within an event, without its blank line: {shorten([*data, rest])}")
        return found


class Wire:
    """Sends bytes and gives back what came.

    Args:
        target: the server.
        timeout_s: for each read and write.
    """

    def __init__(self, target: Target, timeout_s: float = 120.0) -> None:
        self.target, self.timeout_s = target, timeout_s
        self._address = urlsplit(target.url)

    @property
    def bearer(self) -> Auth:
        """The key as OpenAI's clients send it; nothing where there is none."""
        return {"Authorization": f"Bearer {self.target.key}"} if self.target.key else {}

    @property
    def api_key(self) -> Auth:
        """The key as Anthropic's older clients send it."""
        return {"x-api-key": self.target.key} if self.target.key else {}

    def get(self, path: str, headers: Auth | None = None) -> Answer:
        """GET with the key, or with ``headers`` alone."""
        return self.send("GET", path, None, self.bearer if headers is None else headers)

    def post(self, path: str, body: Any, headers: Auth | None = None) -> Answer:
        """POST a JSON value, or bytes as they are, with the key, or with ``headers`` alone."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = self.bearer if headers is None else headers
        return self.send("POST", path, data, {"Content-Type": "application/json"} | headers)

    def send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        """One request on a connection of its own.

        Raises:
            OSError: no connection, no answer in time, or one cut short.
        """
        connection = self.connect()
        try:
            connection.request(method, self.path(path), body=body, headers=dict(headers))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read())
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()

    def path(self, route: str) -> str:
        """What stands in the request line for a route such as "/v1/models"."""
        return self._address.path + route

    def connect(self) -> http.client.HTTPConnection:
        """A connection to the server, not yet opened."""
        host, port = self._address.hostname or "", self._address.port
        if self._address.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self.timeout_s, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=self.timeout_s)
