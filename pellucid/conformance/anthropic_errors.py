"""Anthropic, what is refused, and the routes as bytes."""

import json
from functools import partial
from typing import Any

from pellucid.conformance.anthropic_stream import check_order
from pellucid.conformance.case import Failed, Skipped, case, same, shorten, true
from pellucid.conformance.session import Session, user
from pellucid.conformance.wire import Answer, Wire

ABSENT = object()
TOOL = {"name": "a", "input_schema": {"type": "object"}}
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("max_tokens missing", MESSAGES, {"max_tokens": ABSENT}),
    ("messages missing", MESSAGES, {"messages": ABSENT}),
    ("model missing", MESSAGES, {"model": ABSENT}),
    ("messages empty", MESSAGES, {"messages": []}),
    ("messages a text", MESSAGES, {"messages": "hello"}),
    ("content a number", MESSAGES, {"messages": [{"role": "user", "content": 5}]}),
    ("unknown role", MESSAGES, {"messages": [{"role": "wizard", "content": "x"}]}),
    ("unknown block", MESSAGES, {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}),
    ("max_tokens 0", MESSAGES, {"max_tokens": 0}),
    ("temperature a text", MESSAGES, {"temperature": "hot"}),
    ("empty stop sequence", MESSAGES, {"stop_sequences": [""]}),
    ("unknown tool_choice", MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "perhaps"}}),
    ("count_tokens without messages", COUNT, {"messages": ABSENT, "max_tokens": ABSENT}),
]  # fmt: skip
"""What is wrong, the route, and changes of a good body."""


def told(refusal: Any, kind: str) -> None:
    """A refusal's body as Anthropic's routes tell it, with its kind."""
    body = refusal.body
    true(isinstance(body, dict) and isinstance(body.get("error"), dict), f"an error body, got {shorten(body)}")
    same((body.get("type"), body["error"].get("type")), ("error", kind), "type of the body and of its error")
    true(body["error"].get("message"), "the error has a message")


def refuse(s: Session, path: str, changes: dict[str, Any]) -> None:
    body = {"model": s.model, "messages": [user("hi")], "max_tokens": 4} | changes
    body = {name: value for name, value in body.items() if value is not ABSENT}
    told(s.refused(lambda: s.post(path, body), 400, "BadRequestError"), "invalid_request_error")


for what, path, changes in REFUSED:
    case("anthropic", f"refused: {what}")(partial(refuse, path=path, changes=changes))


@case("anthropic", "refused: unknown model")
def unknown_model(s: Session) -> None:
    told(s.refused(lambda: s.chat(model="no-such-model"), 404, "NotFoundError"), "not_found_error")
    count = s.client.messages.count_tokens
    told(s.refused(lambda: count(model="no-such-model", messages=[user("x")]), 404, "NotFoundError"), "not_found_error")


@case("anthropic", "refused: a prompt longer than the window")
def too_long(s: Session) -> None:
    if s.target.window is None:
        raise Skipped("the list of models tells no window (max_model_len)")
    call = lambda: s.chat(messages=[user("a " * (s.target.window or 0))], max_tokens=1)  # noqa: E731
    refusal = s.refused(call, 400, "BadRequestError")
    told(refusal, "invalid_request_error")
    said = refusal.body["error"]["message"]
    true(
        "prompt is too long" in said and str(s.target.window) in said.replace(",", ""),
        f"prompt is too long, and the window: {said}",
    )


@case("anthropic", "refused: wrong key")
def wrong_key(s: Session) -> None:
    if not s.target.guarded:
        raise Skipped("the server asks for no key")
    client = s.connect(key="wrong-key")
    call = lambda: client.messages.create(**s.request())  # noqa: E731
    told(s.refused(call, 401, "AuthenticationError"), "authentication_error")


@case("anthropic", "refused: not tried again")
def not_retried(s: Session) -> None:
    client = s.connect(retries=2)
    wrong: dict[int, dict[str, Any]] = {400: {"messages": []}, 404: {"model": "no-such-model"}}
    for status, changes in wrong.items():
        s.responses.clear()
        try:
            client.messages.create(**s.request(**changes))
        except s.sdk.APIStatusError:
            same([found for found, _ in s.responses], [status], "statuses of all attempts")
        else:
            raise Failed(f"expected a refusal with {status}")


@case("anthropic", "refused: request id")
def request_id(s: Session) -> None:
    refusal = s.refused(lambda: s.chat(messages=[]), 400, "BadRequestError")
    true(refusal.request_id, "a refusal has a request id")
    same(refusal.body.get("request_id"), refusal.request_id, "request_id in the body, against the header")


def check_refusal(answer: Answer, status: int, kind: str) -> None:
    """An error on Anthropic's routes, as bytes."""
    same(answer.status, status, f"status ({shorten(answer.body)})")
    body = answer.json()
    true(isinstance(body, dict) and isinstance(body.get("error"), dict), f"an error body, got {shorten(body)}")
    same((body.get("type"), body["error"].get("type")), ("error", kind), "type of the body and of its error")


@case("anthropic", "body: broken", raw=True)
def broken(w: Wire) -> None:
    for route in (MESSAGES, COUNT):
        for data in (b"{", b"[1]", b"", b'{"model": "\xff"}', b'{"max_tokens": NaN}'):
            check_refusal(w.post(route, data, w.api_key), 400, "invalid_request_error")


@case("anthropic", "key: none", raw=True)
def no_key(w: Wire) -> None:
    if not w.target.guarded:
        raise Skipped("the server asks for no key")
    for route in (MESSAGES, COUNT):
        check_refusal(w.post(route, {}, headers={}), 401, "authentication_error")


@case("anthropic", "key: as Bearer or as x-api-key", raw=True)
def both_keys(w: Wire) -> None:
    if not w.target.guarded:
        raise Skipped("the server asks for no key")
    body = {"model": w.target.model, "messages": [user("hi")]}
    counts = [w.post(COUNT, body, headers).json().get("input_tokens") for headers in (w.api_key, w.bearer)]
    true(counts[0] and counts[0] == counts[1], f"both forms of the key are taken, got {counts}")


@case("anthropic", "stream: headers and framing", raw=True)
def framing(w: Wire) -> None:
    body = {"model": w.target.model, "messages": [user("Say hello.")], "max_tokens": 6, "stream": True}
    for version in ("2023-06-01", "2026-10-21"):
        headers = w.api_key | {"anthropic-version": version, "Accept": "application/json", "Accept-Encoding": "gzip"}
        answer = w.post(MESSAGES + "?beta=true", body, headers)
        same(answer.status, 200, f"status ({shorten(answer.body)})")
        same(answer.headers.get("content-type", "").partition(";")[0], "text/event-stream", "Content-Type")
        same(answer.headers.get("content-encoding"), None, "Content-Encoding: a packed stream comes late")
        events = [(event, json.loads(data)) for event, data in answer.events() if event != "ping" and data != "[DONE]"]
        same([event for event, _ in events], [data["type"] for _, data in events], "event names, against the types")
        check_order([data["type"] for _, data in events], [data.get("index") for _, data in events])
        true("stop_sequence" in events[-2][1]["delta"], "message_delta has stop_sequence, also where it is null")


@case("anthropic", "stream: a refusal is no stream", raw=True)
def refused_stream(w: Wire) -> None:
    body = {"model": w.target.model, "messages": [], "max_tokens": 6, "stream": True}
    check_refusal(w.post(MESSAGES, body, w.api_key), 400, "invalid_request_error")


@case("anthropic", "headers: request ids", raw=True)
def request_ids(w: Wire) -> None:
    body = {"model": w.target.model, "messages": [user("hi")], "max_tokens": 1}
    ids = [w.post(MESSAGES, data, w.api_key).headers.get("request-id") for data in (body, b"{")]
    true(all(ids) and ids[0] != ids[1], f"request-id differs and is on each answer, got {ids}")
