"""The HTTP application: which path does what, and what every request passes through.

Observe      a request id, the log line, numbers; an exception of ours becomes a plain 500
HostCheck    the Host and Origin headers
CORS         only where origins are allowed
KeyCheck     every path but three needs a key, whether it exists or not
routes
"""

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pellucid.server.auth import HostCheck, KeyCheck
from pellucid.server.errors import ApiError, server_fault, unknown_route, wrong_method
from pellucid.server.metrics import Metrics
from pellucid.server.responses import LEFT, REQUEST_ID, error_response, send_error
from pellucid.server.routes import make_routes
from pellucid.server.serving import Service

logger = logging.getLogger("pellucid.server")

_CLIENT_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def make_app(service: Service) -> ASGIApp:
    """The application of a service; its lifespan ends the service's engines."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.close()

    routes = make_routes(service)
    paths = [route.path for route in routes]
    middleware = [Middleware(Observe, service.metrics, paths), Middleware(HostCheck, service.config)]
    if service.config.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=service.config.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"], max_age=600,
            )
        )  # fmt: skip
    middleware.append(Middleware(KeyCheck, service.keys))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # clients do not repeat a POST elsewhere
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    if error.status_code == 405 and allowed is not None:
        found = wrong_method(request.method, request.url.path, sorted(allowed.split(", ")))
    elif error.status_code == 404:
        found = unknown_route(request.url.path)
    else:
        found = ApiError(error.status_code, str(error.detail))
    return error_response(found, request.scope)


class Observe:
    """ASGI: what is done for, and told of, every request. The outermost, so that it sees every answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Sequence[str]) -> None:
        self.app, self.metrics = app, metrics
        self.paths = [path for path in paths if "{" not in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _CLIENT_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        scope[REQUEST_ID] = request_id
        began, status = time.monotonic(), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
                headers.setdefault("cache-control", "no-store")
            await send(message)

        try:
            await self.app(scope, receive, send_on)
        except Exception:
            logger.exception("%s: %s failed", request_id, self._route(scope["path"]))
            if not status:
                await send_error(
                    server_fault("the server failed at this request; its log has the reason under the request's id"),
                    scope, receive, send_on,
                )  # fmt: skip
        finally:
            self._count(scope, status, time.monotonic() - began, request_id)
        return None

    def _count(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = self._route(scope["path"])
        if scope.get(LEFT):
            status = 499  # nobody has heard it
            self.metrics.left.inc()
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.request_seconds.labels(route).observe(seconds)
        logger.info("%s: %s %s %d in %.3f s", request_id, scope["method"], route, status, seconds)

    def _route(self, path: str) -> str:
        """Of few names, whatever clients make up."""
        if path in self.paths:
            return path
        return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
