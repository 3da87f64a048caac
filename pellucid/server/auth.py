"""Who may ask: keys on every route but three, and which names and web pages a server answers to."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pellucid.errors import ConfigError
from pellucid.serve_config import ServeConfig, is_loopback
from pellucid.server.errors import ApiError, unauthorized
from pellucid.server.responses import send_error

KEY_VARIABLE = "PELLUCID_API_KEY"
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
"""What needs no key, to be read only; every other path does, known or not."""
MIN_KEY_LENGTH = 8
SALT = "pellucid_salt"
"""In a request's scope: what its cached prefixes are kept apart by."""


class Keys:
    """The keys of a server; none: everybody may ask."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in dict.fromkeys(keys)]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def owner(self, headers: Headers) -> str | None:
        """A name for the caller's key that does not tell it; None where it is missing or wrong; "" without keys."""
        if not self._keys:
            return ""
        given = [key.encode("utf-8", "surrogatepass") for key in presented(headers)]
        # every key is compared with every other, so that the time taken says nothing
        right = [key for key in self._keys for other in given if hmac.compare_digest(key, other)]
        return hashlib.sha256(right[0]).hexdigest()[:16] if right else None


def presented(headers: Headers) -> list[str]:
    """The keys in ``Authorization: Bearer K`` and ``x-api-key: K``: clients of either vendor send either."""
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    given = [headers.get("x-api-key", "").strip(), key.strip() if scheme.lower() == "bearer" else ""]
    return [key for key in given if key]


def load_keys(config: ServeConfig) -> Keys:
    """The keys of the file and the environment.

    Raises:
        ConfigError: the file cannot be read or has no key, a key is short or not ASCII, or there is none and others than
            this machine can reach the address.
    """
    keys: list[str] = []
    if config.api_key_file is not None:
        keys = _read_keys(Path(config.api_key_file))
    if environment := os.environ.get(KEY_VARIABLE, "").strip():
        keys.append(environment)
    for key in keys:
        if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"an API key of {len(key)} characters cannot be used; give {MIN_KEY_LENGTH} or more, ASCII without spaces"
            )
    if not keys and not config.is_local and not config.allow_anonymous:
        raise ConfigError(
            f"host {config.host} can be reached from other machines, and there is no API key; give --api-key-file FILE or "
            f"{KEY_VARIABLE}, or --allow-anonymous to let everybody in"
        )
    return Keys(keys)


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error}") from error
    keys = [key for line in lines if (key := line.partition("#")[0].strip())]
    if not keys:
        raise ConfigError(f"api_key_file {path} holds no key; write one a line, or leave the file out")
    return keys


class KeyCheck:
    """ASGI: lets requests with a key pass, and those to `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        owner = self.keys.owner(headers)
        if owner is None and not (scope["path"] in OPEN_PATHS and scope.get("method") in ("GET", "HEAD")):
            error = unauthorized(key_given=bool(presented(headers)))
            return await send_error(error, scope, receive, send)
        scope[SALT] = owner or ""
        return await self.app(scope, receive, send)


class HostCheck:
    """ASGI: a web page must not use a server through its reader's browser.

    On a loopback address the Host header must name this machine, since a page can point a name of its own there (DNS
    rebinding). Everywhere a page's Origin must be the server's own or one that is allowed: a browser sends simple
    requests without asking first.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self.app = app
        self.any_host = not config.is_local
        self.hosts = {name.lower() for name in config.allowed_hosts}
        self.origins = set(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = host_name(host)
        if not (self.any_host or is_loopback(name) or name in self.hosts):
            message = f"this server does not answer to the host {name!r}; start it with --allow-host {name or 'NAME'}"
            return await send_error(ApiError(403, message), scope, receive, send)
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host and not {origin, "*"} & self.origins:
            message = f"pages of {origin!r} may not use this server; start it with --cors-origin to let them"
            return await send_error(ApiError(403, message), scope, receive, send)
        return await self.app(scope, receive, send)


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
