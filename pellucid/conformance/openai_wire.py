"""OpenAI's routes as bytes: headers, framing, and bodies that no client sends."""

import http.client
import json
from functools import partial
from typing import Any

from pellucid.conformance.case import Failed, Skipped, case, same, shorten, true
from pellucid.conformance.wire import Answer, Wire

CHAT = "/v1/chat/completions"
GUARDED = [
    ("POST", CHAT), ("POST", "/v1/completions"), ("POST", "/v1/embeddings"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("GET", "/v1/models"), ("GET", "/v1/models/x"),
]  # fmt: skip


def body(w: Wire, **changes: Any) -> dict[str, Any]:
    """A small greedy chat."""
    messages = [{"role": "user", "content": "Say hello."}]
    return {"model": w.target.model, "messages": messages, "max_tokens": 6, "temperature": 0} | changes


def check_refusal(answer: Answer, status: int, **wanted: Any) -> dict[str, Any]:
    """An error as OpenAI's routes tell it."""
    same(answer.status, status, f"status ({shorten(answer.body)})")
    true(
        answer.headers.get("content-type", "").startswith("application/json"),
        f"JSON, got {answer.headers.get('content-type')!r}",
    )
    error = answer.json().get("error")
    true(isinstance(error, dict), f'an object {{"error": {{...}}}}, got {shorten(answer.body)}')
    true(isinstance(error.get("message"), str) and error["message"], "the error has a message")
    same(sorted({"message", "type", "param", "code"} - set(error)), [], "keys that the error lacks")
    same({name: error[name] for name in wanted}, wanted, "what the error says")
    found: dict[str, Any] = error
    return found


BROKEN = {
    "no JSON": b"{",
    "an array": b"[1, 2]",
    "a text": b'"hello"',
    "nothing": b"",
    "bad UTF-8": b'{"model": "\xff\xfe", "messages": []}',
}


def broken(w: Wire, data: bytes) -> None:
    check_refusal(w.post(CHAT, data), 400, type="invalid_request_error")


for what, data in BROKEN.items():
    case("openai", f"body: {what}", raw=True)(partial(broken, data=data))


@case("openai", "body: NaN and Infinity", raw=True)
def not_a_number(w: Wire) -> None:
    for word in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        data = json.dumps(body(w)).encode().replace(b'"temperature": 0', b'"temperature": ' + word)
        check_refusal(w.post(CHAT, data), 400, type="invalid_request_error")


@case("openai", "body: too large", raw=True)
def too_large(w: Wire) -> None:
    connection = w.connect()
    connection.timeout = 20
    try:
        connection.putrequest("POST", w.path(CHAT))
        for name, value in (w.bearer | {"Content-Type": "application/json", "Content-Length": str(10**12)}).items():
            connection.putheader(name, value)
        connection.endheaders(b"{")
        same(connection.getresponse().status, 413, "status for a body that is announced with 1 TB")
    except TimeoutError:
        raise Failed("no answer within 20 s to a body announced with 1 TB; expected 413 at once") from None
    except (http.client.HTTPException, ConnectionError) as error:
        raise Failed(f"no answer to a body announced with 1 TB, expected 413: {error!r}") from None
    finally:
        connection.close()


@case("openai", "route: unknown, wrong method", raw=True)
def unknown_route(w: Wire) -> None:
    check_refusal(w.post("/v1/no/such/route", body(w)), 404)
    check_refusal(w.send("GET", CHAT, None, w.bearer), 405)


@case("openai", "key: none", raw=True)
def no_key(w: Wire) -> None:
    if not w.target.guarded:
        raise Skipped("the server asks for no key")
    for method, path in GUARDED:
        answer = w.send(method, path, b"{}" if method == "POST" else None, {"Content-Type": "application/json"})
        same(answer.status, 401, f"status of {method} {path} without a key")
        same(answer.headers.get("www-authenticate", "").split(" ")[0], "Bearer", "WWW-Authenticate")
    check_refusal(w.post(CHAT, body(w), headers={}), 401, type="invalid_request_error")


@case("openai", "key: as Bearer or as x-api-key", raw=True)
def both_keys(w: Wire) -> None:
    if not w.target.guarded:
        raise Skipped("the server asks for no key")
    for headers in (w.bearer, w.api_key):
        same(w.post(CHAT, body(w), headers).status, 200, f"status with {next(iter(headers))}")
        same(w.get("/v1/models", headers).status, 200, f"status with {next(iter(headers))}")


@case("openai", "stream: headers and framing", raw=True)
def framing(w: Wire) -> None:
    headers = w.bearer | {"Accept": "application/json", "Accept-Encoding": "gzip"}  # as the clients send it
    answer = w.post(CHAT, body(w, stream=True), headers)
    same(answer.status, 200, f"status ({shorten(answer.body)})")
    same(answer.headers.get("content-type", "").partition(";")[0], "text/event-stream", "Content-Type")
    same(answer.headers.get("content-encoding"), None, "Content-Encoding: a packed stream comes late")
    true("no-cache" in answer.headers.get("cache-control", ""), "Cache-Control: no-cache")
    events = answer.events()
    same({event for event, _ in events}, {None}, "event names: OpenAI's streams have none")
    same(events[-1][1], "[DONE]", "the last event")
    chunks = [json.loads(data) for _, data in events[:-1]]
    true(
        all(chunk.get("choices") and not chunk.get("usage") for chunk in chunks),
        "each chunk has a choice, and no usage unless asked",
    )
    roles = [c["delta"]["role"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("role")]
    same(roles, ["assistant"], "roles: told once")


@case("openai", "stream: usage null before the last chunk", raw=True)
def null_usage(w: Wire) -> None:
    events = w.post(CHAT, body(w, stream=True, stream_options={"include_usage": True})).events()
    chunks = [json.loads(data) for _, data in events[:-1]]
    true(all("usage" in chunk for chunk in chunks), "each chunk has usage, null but for the last")
    same(
        [chunk["usage"] is None for chunk in chunks], [True] * (len(chunks) - 1) + [False], "chunks whose usage is null"
    )


@case("openai", "stream: a refusal is no stream", raw=True)
def refused_stream(w: Wire) -> None:
    check_refusal(w.post(CHAT, body(w, stream=True, temperature=9)), 400, param="temperature")
    check_refusal(w.post(CHAT, body(w, stream=True, model="no-such-model")), 404, code="model_not_found")


@case("openai", "headers: request ids", raw=True)
def request_ids(w: Wire) -> None:
    found = [w.post(CHAT, body(w)).headers, w.post(CHAT, b"{").headers, w.get("/v1/models").headers]
    ids = [headers.get("x-request-id") for headers in found]
    true(all(ids) and len(set(ids)) == 3, f"x-request-id differs and is on each answer, got {ids}")


@case("openai", "models: one object for both vendors", raw=True)
def merged_models(w: Wire) -> None:
    listed = w.get("/v1/models").json()
    same((listed.get("object"), listed.get("has_more")), ("list", False), "object and has_more")
    wanted = {"id", "object", "created", "owned_by", "type", "display_name", "created_at", "max_model_len"}
    for model in listed["data"]:
        same(sorted(wanted - set(model)), [], f"keys that {model.get('id')!r} lacks")
    ids = [model["id"] for model in listed["data"]]
    same((listed.get("first_id"), listed.get("last_id")), (ids[0], ids[-1]), "first_id and last_id")
