"""OpenAI, what is refused: the exception that the client raises, and its type, code and param."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pellucid.conformance.case import Failed, Skipped, case, same, true
from pellucid.conformance.session import Session, user

ABSENT = object()
CHAT, COMPLETIONS = "/chat/completions", "/completions"

REFUSED: list[tuple[str, str, dict[str, Any], str | None, str | None]] = [
    ("messages missing", CHAT, {"messages": ABSENT}, "missing_required_parameter", "messages"),
    ("model missing", CHAT, {"model": ABSENT}, "missing_required_parameter", "model"),
    ("prompt missing", COMPLETIONS, {}, "missing_required_parameter", "prompt"),
    ("messages empty", CHAT, {"messages": []}, "empty_array", "messages"),
    ("messages a text", CHAT, {"messages": "hello"}, "invalid_type", "messages"),
    ("content a number", CHAT, {"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
    ("temperature a text", CHAT, {"temperature": "hot"}, "invalid_type", "temperature"),
    ("unknown role", CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ("unknown tool_choice", CHAT, {"tool_choice": "perhaps"}, "invalid_value", "tool_choice"),
    ("empty stop", CHAT, {"stop": ""}, "invalid_value", "stop"),
    ("max_tokens 0", CHAT, {"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    ("max_tokens -1", CHAT, {"max_tokens": -1}, "integer_below_min_value", "max_tokens"),
    ("n 0", CHAT, {"n": 0}, "integer_below_min_value", "n"),
    ("temperature 9", CHAT, {"temperature": 9}, "decimal_above_max_value", "temperature"),
    ("temperature -1", CHAT, {"temperature": -1}, "decimal_below_min_value", "temperature"),
    ("top_p 2", CHAT, {"top_p": 2}, "decimal_above_max_value", "top_p"),
    ("presence_penalty 5", CHAT, {"presence_penalty": 5}, "decimal_above_max_value", "presence_penalty"),
    ("frequency_penalty -5", CHAT, {"frequency_penalty": -5}, "decimal_below_min_value", "frequency_penalty"),
    ("logit_bias outside", CHAT, {"logit_bias": {"999999999": 1}}, "invalid_value", "logit_bias"),
]
"""What is wrong, the route, changes of a good body, and the code and param that name it."""


def refuse(s: Session, path: str, changes: dict[str, Any], code: str | None, param: str | None) -> None:
    """The body is refused once and for all, with a name for what is wrong."""
    body = {"model": s.model, "max_tokens": 4} | ({"messages": [user("hi")]} if path == CHAT else {}) | changes
    body = {name: value for name, value in body.items() if value is not ABSENT}
    refusal = s.refused(lambda: s.post(path, body), 400, "BadRequestError")
    same((refusal.type, refusal.code, refusal.param), ("invalid_request_error", code, param), "type, code and param")


for what, path, changes, code, param in REFUSED:
    case("openai", f"refused: {what}")(partial(refuse, path=path, changes=changes, code=code, param=param))


@case("openai", "refused: a part that is not text")
def image_part(s: Session) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    try:
        answer = s.chat(messages=[{"role": "user", "content": [part]}])
    except s.sdk.BadRequestError as refusal:
        true("image_url" in str(refusal), f"the message names the part: {refusal}")
        return
    same(answer.choices[0].message.role, "assistant", "role of an answer about an image")


@case("openai", "refused: unknown model")
def unknown_model(s: Session) -> None:
    refusal = s.refused(lambda: s.chat(model="no-such-model"), 404, "NotFoundError")
    same(
        (refusal.type, refusal.code, refusal.param),
        ("invalid_request_error", "model_not_found", "model"),
        "type, code, param",
    )


@case("openai", "refused: a prompt longer than the window")
def too_long(s: Session) -> None:
    words = (s.target.window or 300_000) + 8

    def call() -> Any:
        return s.chat(messages=[user("a " * words)], max_tokens=1)

    if s.target.window is None:
        try:
            call()
        except s.sdk.APIStatusError:
            pass
        else:
            raise Skipped(f"the list of models tells no window (max_model_len), and {words:,} words are not too many")
    refusal = s.refused(call, 400, "BadRequestError")
    same((refusal.type, refusal.code), ("invalid_request_error", "context_length_exceeded"), "type and code")
    same(refusal.param, "messages", "param")
    if s.target.window is not None:
        said = refusal.message.replace(",", "")
        true(str(s.target.window) in said, f"the message names the window of {s.target.window}: {refusal.message}")


@case("openai", "refused: wrong key")
def wrong_key(s: Session) -> None:
    if not s.target.guarded:
        raise Skipped("the server asks for no key")
    client = s.connect(key="wrong-key")
    refusal = s.refused(lambda: client.chat.completions.create(**s.request()), 401, "AuthenticationError")
    same((refusal.type, refusal.code), ("invalid_request_error", "invalid_api_key"), "type and code")
    s.refused(lambda: list(client.models.list()), 401, "AuthenticationError")


@case("openai", "refused: not tried again")
def not_retried(s: Session) -> None:
    client = s.connect(retries=2)
    calls: dict[int, Callable[[], Any]] = {
        400: lambda: client.chat.completions.create(**s.request(temperature=9)),
        404: lambda: client.chat.completions.create(**s.request(model="no-such-model")),
    }
    for status, call in calls.items():
        s.responses.clear()
        try:
            call()
        except s.sdk.APIStatusError:
            same([found for found, _ in s.responses], [status], "statuses of all attempts")
        else:
            raise Failed(f"expected a refusal with {status}")


@case("openai", "refused: request id")
def request_id(s: Session) -> None:
    first, second = (s.refused(lambda: s.chat(temperature=9), 400, "BadRequestError").request_id for _ in range(2))
    true(
        first and second and first != second, f"each refusal has a request id of its own, got {first!r} and {second!r}"
    )
