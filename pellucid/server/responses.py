"""Answers that are no stream: JSON, and errors in the words of whoever asked."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pellucid.server.errors import ApiError, Dialect, anthropic_error_body, openai_error_body, status_in

REQUEST_ID = "pellucid_request_id"
"""In a request's scope: what the answer's headers and the log call it."""
LEFT = "pellucid_left"
"""In a request's scope, where its client went away before the answer ended."""


def dialect_of(scope: Scope) -> Dialect:
    """Whose words a path speaks; what both vendors ask goes by the header that one of them always sends."""
    path: str = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    shared = path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"])
    return "anthropic" if shared else "openai"


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Compact, UTF-8."""
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(data, status, headers, media_type="application/json")


def error_response(error: ApiError, scope: Scope) -> Response:
    """An error in the dialect of the route."""
    dialect = dialect_of(scope)
    if dialect == "anthropic":
        body = anthropic_error_body(error, scope.get(REQUEST_ID, ""))
    else:
        body = openai_error_body(error)
    return json_response(body, status_in(error, dialect), error.headers)


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error."""
    await error_response(error, scope)(scope, receive, send)
