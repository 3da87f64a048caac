"""What goes wrong, once, and how each protocol says it.

`ApiError` is neutral: its ``type``, ``code`` and ``param`` are OpenAI's words, from which, with the status, those of
Anthropic follow. Whatever else a request raises becomes one in `as_api_error`; the two body functions are the only places
that know a shape.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pellucid.errors import RequestError
from pellucid.inference.engine import EngineError
from pellucid.inference.scheduler import QueueFullError

Dialect = Literal["openai", "anthropic"]

MAX_RETRY_AFTER_S = 120
"""The longest wait that is asked for: openai 3.x gives up where it is told to wait longer."""


class ContextLengthError(RequestError):
    """The prompt fills the model's window, or more.

    Attributes:
        num_prompt: its tokens.
        window: the most tokens that prompt and answer may have together.
    """

    def __init__(self, num_prompt: int, window: int) -> None:
        super().__init__(
            f"prompt has {num_prompt:,} tokens and the model's window is {window:,}, which leaves no room for an answer; "
            "shorten it"
        )
        self.num_prompt, self.window = num_prompt, window


class ApiError(RequestError):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message: for a person; names the field, the value and the way out.
        type, code, param: as OpenAI's error object has them; ``param`` is a path like ``messages[0].content``.
        headers: to be sent with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.headers = dict(headers or {})


def invalid(message: str, code: str | None = None, param: str | None = None) -> ApiError:
    """A mistake in the body: 400."""
    return ApiError(400, message, code=code, param=param)


def too_large(limit: int) -> ApiError:
    """A body of more than ``limit`` bytes: 413."""
    return ApiError(413, f"the body is larger than {limit:,} bytes, the most that this server reads; send less")


def unauthorized(*, key_given: bool) -> ApiError:
    """No key, or none that is known: 401."""
    how = "send it as Authorization: Bearer KEY, or as x-api-key: KEY"
    message = f"this API key is not known here; {how}" if key_given else f"an API key is needed; {how}"
    return ApiError(401, message, code="invalid_api_key" if key_given else None, headers={"WWW-Authenticate": "Bearer"})


def unknown_model(name: str, served: list[str]) -> ApiError:
    """A model that is not served: 404."""
    return ApiError(
        404,
        f"model {name[:200]!r} is not served here; served: {', '.join(served)}",
        code="model_not_found",
        param="model",
    )


def unknown_route(path: str) -> ApiError:
    """404."""
    return ApiError(404, f"there is nothing at {path[:200]!r}; /openapi.json lists the routes")


def wrong_method(method: str, path: str, allowed: list[str]) -> ApiError:
    """405, with the methods that the route has."""
    message = f"{path[:200]!r} does not take {method[:20]}; it takes {', '.join(allowed)}"
    return ApiError(405, message, headers={"Allow": ", ".join(allowed)})


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    """The queue is full, or one client asks too much: 429."""
    return ApiError(
        429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=_retry_after(retry_after_s)
    )


def unavailable(message: str, retry_after_s: float) -> ApiError:
    """The server is loading or draining: 503, and 529 in Anthropic's dialect."""
    return ApiError(503, message, type="server_error", headers=_retry_after(retry_after_s))


def server_fault(message: str) -> ApiError:
    """Our own fault: 500, which clients are told not to try again."""
    return ApiError(500, message, type="server_error", headers={"x-should-retry": "false"})


def _retry_after(seconds: float) -> dict[str, str]:
    """Whole seconds, rounded up, in [1, MAX_RETRY_AFTER_S]."""
    return {"Retry-After": str(max(1, min(MAX_RETRY_AFTER_S, -int(-seconds // 1))))}


def as_api_error(
    error: BaseException, dialect: Dialect, *, param: str = "messages", retry_after_s: float = 1
) -> ApiError:
    """The answer to any exception of a request.

    Args:
        param: the field that holds the prompt, where the error is about that: ``messages``, ``prompt`` or ``input``.
        retry_after_s: after how long a full queue may have room.

    An exception that is none of `PellucidError` is told as a fault without its words, which may hold paths or text of others.
    """
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return invalid(_too_long(error, dialect, param), "context_length_exceeded", param)
        case QueueFullError():
            return rate_limited(str(error), retry_after_s)
        case RequestError():
            message = str(error)
            named = (field for start, field in _FIELDS.items() if message.startswith(start))
            return invalid(message, "invalid_value", next(named, param))
        case EngineError():
            return server_fault("the engine has failed and takes no request any more; restart the server")
    return server_fault("the server failed at this request; its log has the reason under the request's id")


_FIELDS = {
    "logit_bias ": "logit_bias",
    "stop_ids ": "stop_token_ids",
    "response_format ": "response_format",
    "json_object ": "response_format",
    "json_schema ": "response_format",
    "regex ": "response_format",
    "lark ": "response_format",
    "constraint ": "response_format",
    "tools ": "tools",
    "tool_choice ": "tool_choice",
    "the chat template's variable ": "chat_template_kwargs",
}
"""What messages about other fields than the prompt begin with, and the client's word for each field."""


def _too_long(error: ContextLengthError, dialect: Dialect, param: str) -> str:
    """In words that clients look for."""
    if dialect == "anthropic":
        return f"prompt is too long: {error.num_prompt} tokens > {error.window} maximum"
    return (
        f"This model's maximum context length is {error.window} tokens and {param} holds {error.num_prompt}, which leaves "
        "no room for an answer; shorten it."
    )


def openai_error_body(error: ApiError) -> dict[str, Any]:
    """All four keys, always: the client reads each."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": anthropic_error_type(error), "message": error.message},
        "request_id": request_id,
    }


def anthropic_error_type(error: ApiError) -> str:
    return _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def status_in(error: ApiError, dialect: Dialect) -> int:
    """The status to send: what OpenAI calls 503 Anthropic's clients know as 529."""
    return 529 if dialect == "anthropic" and error.status == 503 else error.status
