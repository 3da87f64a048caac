"""Each error, row by row, in both vendors' words, and as their own clients raise it."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from vendor_clients import Case, ask, newest

from pellucid.errors import ConfigError, RequestError
from pellucid.inference.engine import EngineError
from pellucid.inference.scheduler import QueueFullError
from pellucid.server.anthropic import parse_messages
from pellucid.server.errors import (
    ApiError,
    ContextLengthError,
    anthropic_error_body,
    as_api_error,
    openai_error_body,
    rate_limited,
    server_fault,
    status_in,
    too_large,
    unauthorized,
    unavailable,
    unknown_model,
    unknown_route,
    wrong_method,
)
from pellucid.server.fields import decode_body
from pellucid.server.openai import parse_chat, parse_completion

INVALID = "invalid_request_error"


@dataclass(frozen=True)
class Row:
    """A situation, OpenAI's answer to it, and Anthropic's."""

    cause: Any
    """An exception, or a body of /v1/chat/completions."""
    status: int
    type: str
    code: str | None
    param: str | None
    anthropic: str
    anthropic_status: int | None = None
    headers: tuple[str, ...] = ()


def chat(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return {name: value for name, value in body.items() if value is not ...}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "hi"} | fields])


ROWS = {
    "not JSON": Row(b"{", 400, INVALID, None, None, INVALID),
    "not an object": Row(b"[1]", 400, INVALID, None, None, INVALID),
    "not UTF-8": Row(b'{"a": "\xff"}', 400, INVALID, None, None, INVALID),
    "no messages": Row(chat(messages=...), 400, INVALID, "missing_required_parameter", "messages", INVALID),
    "no model": Row(chat(model=...), 400, INVALID, "missing_required_parameter", "model", INVALID),
    "null model": Row(chat(model=None), 400, INVALID, "missing_required_parameter", "model", INVALID),
    "empty messages": Row(chat(messages=[]), 400, INVALID, "empty_array", "messages", INVALID),
    "content is a number": Row(message(content=3), 400, INVALID, "invalid_type", "messages[0].content", INVALID),
    "unknown role": Row(message(role="robot"), 400, INVALID, "invalid_value", "messages[0].role", INVALID),
    "tool_choice": Row(chat(tool_choice="some"), 400, INVALID, "invalid_value", "tool_choice", INVALID),
    "empty stop": Row(chat(stop=["a", ""]), 400, INVALID, "invalid_value", "stop", INVALID),
    "max_tokens 0": Row(chat(max_tokens=0), 400, INVALID, "integer_below_min_value", "max_tokens", INVALID),
    "max_tokens -1": Row(chat(max_tokens=-1), 400, INVALID, "integer_below_min_value", "max_tokens", INVALID),
    "n 0": Row(chat(n=0), 400, INVALID, "integer_below_min_value", "n", INVALID),
    "hot": Row(chat(temperature=9), 400, INVALID, "decimal_above_max_value", "temperature", INVALID),
    "cold": Row(chat(temperature=-1), 400, INVALID, "decimal_below_min_value", "temperature", INVALID),
    "top_p": Row(chat(top_p=1.01), 400, INVALID, "decimal_above_max_value", "top_p", INVALID),
    "penalty": Row(chat(presence_penalty=-2.5), 400, INVALID, "decimal_below_min_value", "presence_penalty", INVALID),
    "NaN": Row(b'{"top_p": NaN}', 400, INVALID, "decimal_above_max_value", "top_p", INVALID),
    "Infinity": Row(b'{"top_p": Infinity}', 400, INVALID, "decimal_above_max_value", "top_p", INVALID),
    "-Infinity": Row(b'{"a": [{"b": -1e999}]}', 400, INVALID, "decimal_below_min_value", "a[0].b", INVALID),
    "bias outside": Row(
        RequestError("logit_bias holds the token id 999 and the vocabulary has 9 ids; give ids from 0 to 8"),
        400, INVALID, "invalid_value", "logit_bias", INVALID,
    ),
    "stop id outside": Row(
        RequestError("stop_ids holds the token id 999 and the vocabulary has 9 ids; give ids from 0 to 8"),
        400, INVALID, "invalid_value", "stop_token_ids", INVALID,
    ),
    "impossible schema": Row(
        RequestError("json_schema cannot be used: nothing satisfies it"), 400, INVALID, "invalid_value", "response_format", INVALID
    ),
    "too long": Row(ContextLengthError(4210, 2048), 400, INVALID, "context_length_exceeded", "messages", INVALID),
    "the template refuses": Row(
        RequestError("roles must alternate"), 400, INVALID, "invalid_value", "messages", INVALID
    ),
    "unknown model": Row(
        unknown_model("gpt", ["a", "b"]), 404, INVALID, "model_not_found", "model", "not_found_error"
    ),
    "no key": Row(
        unauthorized(key_given=False), 401, INVALID, None, None, "authentication_error", headers=("WWW-Authenticate",)
    ),
    "wrong key": Row(
        unauthorized(key_given=True), 401, INVALID, "invalid_api_key", None, "authentication_error",
        headers=("WWW-Authenticate",),
    ),
    "too large": Row(too_large(10), 413, INVALID, None, None, "request_too_large"),
    "queue full": Row(
        QueueFullError("64 requests wait"), 429, "rate_limit_error", "rate_limit_exceeded", None, "rate_limit_error",
        headers=("Retry-After",),
    ),
    "too often": Row(
        rate_limited("slower", 2.5), 429, "rate_limit_error", "rate_limit_exceeded", None, "rate_limit_error",
        headers=("Retry-After",),
    ),
    "draining": Row(
        unavailable("closing", 5), 503, "server_error", None, None, "overloaded_error", 529, headers=("Retry-After",)
    ),
    "engine": Row(EngineError("x"), 500, "server_error", None, None, "api_error", headers=("x-should-retry",)),
    "a bug": Row(KeyError("secret"), 500, "server_error", None, None, "api_error", headers=("x-should-retry",)),
    "our fault": Row(ConfigError("secret"), 500, "server_error", None, None, "api_error", headers=("x-should-retry",)),
    "no route": Row(unknown_route("/v2"), 404, INVALID, None, None, "not_found_error"),
    "method": Row(wrong_method("PUT", "/v1/models", ["GET"]), 405, INVALID, None, None, INVALID, headers=("Allow",)),
}  # fmt: skip


def error_of(row: Row, dialect: Any = "openai") -> ApiError:
    cause = row.cause
    if not isinstance(cause, BaseException):
        with pytest.raises(ApiError) as caught:
            parse_chat(decode_body(cause if isinstance(cause, bytes) else json.dumps(cause).encode()))
        cause = caught.value
    return as_api_error(cause, dialect)


@pytest.mark.parametrize("name", ROWS)
def test_openai_error_has_its_status_type_code_and_param(name: str) -> None:
    row, error = ROWS[name], error_of(ROWS[name])
    inner = openai_error_body(error)["error"]
    assert (error.status, inner["type"], inner["code"], inner["param"]) == (row.status, row.type, row.code, row.param)
    assert set(inner) == {"message", "type", "code", "param"} and inner["message"]
    assert status_in(error, "openai") == row.status
    for header in row.headers:
        assert header in error.headers


@pytest.mark.parametrize("name", ROWS)
def test_anthropic_error_has_its_status_and_type(name: str) -> None:
    row, error = ROWS[name], error_of(ROWS[name], "anthropic")
    body = anthropic_error_body(error, "req_1")
    assert body["type"] == "error" and body["request_id"] == "req_1"
    assert body["error"] == {"type": row.anthropic, "message": error.message}
    assert status_in(error, "anthropic") == (row.anthropic_status or row.status)


def test_both_numbers_of_a_prompt_that_is_too_long_are_told_in_the_words_that_clients_look_for() -> None:
    error = ContextLengthError(4210, 2048)
    assert (error.num_prompt, error.window) == (4210, 2048)
    assert "4,210" in str(error) and "2,048" in str(error)
    openai, anthropic = as_api_error(error, "openai", param="prompt"), as_api_error(error, "anthropic")
    assert "maximum context length is 2048 tokens" in openai.message and "4210" in openai.message
    assert openai.param == "prompt"
    assert anthropic.message == "prompt is too long: 4210 tokens > 2048 maximum"


def test_a_fault_of_ours_is_told_without_its_words() -> None:
    for error in (KeyError("/home/somebody/secret"), ConfigError("/home/somebody/secret"), EngineError("/home/x")):
        assert "/home" not in as_api_error(error, "openai").message


def test_the_templates_own_words_are_told() -> None:
    error = as_api_error(RequestError("After the optional system message, roles must alternate"), "anthropic")
    assert "roles must alternate" in error.message


@pytest.mark.parametrize(("seconds", "told"), [(0, "1"), (0.2, "1"), (2.1, "3"), (30, "30"), (1e9, "120")])
def test_clients_are_asked_to_wait_whole_seconds_and_never_so_long_that_they_give_up(seconds: float, told: str) -> None:
    assert rate_limited("x", seconds).headers["Retry-After"] == told
    full = as_api_error(QueueFullError("x"), "openai", retry_after_s=seconds)
    assert full.headers["Retry-After"] == told


def test_an_api_error_stays_what_it_is() -> None:
    error = server_fault("x")
    assert as_api_error(error, "openai") is error


def test_the_other_routes_name_the_same_things() -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion({"model": "m"})
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "prompt")
    with pytest.raises(ApiError) as caught:
        parse_messages({"model": "m", "messages": []})
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "max_tokens")
    with pytest.raises(ApiError) as caught:
        parse_messages({"model": "m", "messages": [], "max_tokens": 1})
    assert (caught.value.code, caught.value.param) == ("empty_array", "messages")


CLASSES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "APIStatusError",
    413: "APIStatusError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "InternalServerError",
}
ANTHROPIC_CLASSES = CLASSES | {413: "ContentTooLargeError", 529: "OverloadedError"}


def test_openais_client_raises_the_class_and_reads_code_type_and_param() -> None:
    errors = {name: error_of(row) for name, row in ROWS.items()}
    cases = [Case.of_json("chat", openai_error_body(error), error.status, error.headers) for error in errors.values()]
    for name, raised in zip(errors, ask(newest("openai"), cases), strict=True):
        row = ROWS[name]
        assert raised["raised"] == CLASSES[row.status], name
        assert (raised["code"], raised["param"], raised["type"]) == (row.code, row.param, row.type), name


def test_anthropics_client_raises_the_class_and_reads_the_type() -> None:
    errors = {name: error_of(row, "anthropic") for name, row in ROWS.items()}
    cases = [
        Case.of_json("message", anthropic_error_body(error, "req_9"), status_in(error, "anthropic"), error.headers)
        for error in errors.values()
    ]
    for name, raised in zip(errors, ask(newest("anthropic"), cases), strict=True):
        row, error = ROWS[name], errors[name]
        assert raised["raised"] == ANTHROPIC_CLASSES[row.anthropic_status or row.status], name
        assert raised["body"]["error"] == {"type": row.anthropic, "message": error.message}, name
