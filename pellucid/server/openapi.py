"""The description of the server's routes that /openapi.json gives: OpenAPI 3.1."""

from typing import Any

from pellucid.server.openapi_answers import ANSWERS
from pellucid.server.openapi_schemas import REQUESTS, Schema, ref
from pellucid.version import __version__

ERRORS = {
    400: "the request is wrong; the message names the field, the value and the way out",
    401: "the key is missing or unknown",
    403: "this host or web page may not ask",
    404: "there is no such model",
    413: "the body is too large",
    429: "the queue is full; Retry-After says when to ask again",
    500: "the server's own fault",
    503: "the server is loading or closing; Retry-After says when to ask again",
    504: "the answer took longer than the server allows",
}
_RETRY = {"Retry-After": {"description": "seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_JSON, _EVENTS = "application/json", "text/event-stream"


def openapi() -> dict[str, Any]:
    """The whole document, made anew."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pellucid",
            "version": __version__,
            "description": "OpenAI's and Anthropic's protocols over Pellucid's engine. docs/serving.md says what each field does.",
        },
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": _paths(),
        "components": {
            "schemas": REQUESTS | ANSWERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _paths() -> dict[str, Any]:
    return {
        "/v1/chat/completions": _post("chat", "Answer a conversation", "ChatRequest", "ChatAnswer", stream=True),
        "/v1/completions": _post("complete", "Continue texts", "CompletionRequest", "CompletionAnswer", stream=True),
        "/v1/embeddings": _post("embed", "Embed texts", "EmbeddingRequest", "EmbeddingAnswer"),
        "/v1/messages": _post(
            "message", "Answer a conversation, as Anthropic does", "MessagesRequest", "Message", stream=True, anthropic=True
        ),
        "/v1/messages/count_tokens": _post(
            "count_tokens", "Count a conversation's tokens", "CountTokensRequest", "TokenCount", anthropic=True
        ),
        "/v1/models": _get("models", "List the models", "ModelList", "400 401 403"),
        "/v1/models/{id}": _get("model", "One model", "Model", "400 401 403 404", {"id": ("path", {"type": "string", "minLength": 1})}),
        "/health": _get("health", "Whether the engines work", "Health", "403", public=True, other={503: "Health"}),
        "/ready": _get("ready", "Whether requests are taken", "Ready", "403", public=True, other={503: "Ready"}),
        "/metrics": _plain("metrics", "Numbers for Prometheus", "text/plain", "401 403"),
        "/openapi.json": _get("openapi", "This document", None, "401 403"),
        "/debug/state": _get("state", "What engines hold and do", "State", "401 403"),
        "/debug/steps": _get(
            "steps", "The engine's last steps", "Steps", "400 401 403 404",
            {
                "model": ("query", {"type": "string", "minLength": 1}),
                "since": ("query", {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}),
            },
        ),
        "/": _plain("page", "A page to chat on", "text/html", "403 404", public=True),
    }  # fmt: skip


def _post(id_: str, summary: str, body: str, answer: str, *, stream: bool = False, anthropic: bool = False) -> Schema:
    content: Schema = {_JSON: {"schema": ref(answer)}}
    if stream:
        content[_EVENTS] = {}  # OpenAPI 3.1 has no word for what stands in an event
    codes = "400 401 403 404 413 429 500 503 504"
    return {
        "post": {
            "operationId": id_,
            "summary": summary,
            "requestBody": {"required": True, "content": {_JSON: {"schema": ref(body)}}},
            "responses": {"200": {"description": "the answer", "content": content}, **_errors(codes, anthropic)},
        }
    }


def _get(
    id_: str,
    summary: str,
    answer: str | None,
    codes: str,
    parameters: dict[str, tuple[str, Schema]] | None = None,
    *,
    public: bool = False,
    other: dict[int, str] | None = None,
) -> Schema:
    """A route that tells ``answer``; ``other``: what further statuses tell."""
    told = {200: answer, **(other or {})}
    responses: Schema = {
        str(code): {
            "description": ERRORS.get(code, "the answer"),
            "content": {_JSON: {"schema": ref(name) if name else {}}},
        }
        for code, name in told.items()
    }
    operation: Schema = {"operationId": id_, "summary": summary, "responses": responses | _errors(codes, False)}
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": schema}
            for name, (place, schema) in parameters.items()
        ]
    return {"get": operation | ({"security": []} if public else {})}


def _plain(id_: str, summary: str, media_type: str, codes: str, *, public: bool = False) -> Schema:
    """A route that tells text."""
    route = _get(id_, summary, None, codes, public=public)
    route["get"]["responses"]["200"]["content"] = {media_type: {"schema": {"type": "string"}}}
    return route


def _errors(codes: str, anthropic: bool) -> dict[str, Schema]:
    """Of Anthropic's routes 503 is 529."""
    body = {_JSON: {"schema": ref("AnthropicError" if anthropic else "OpenAIError")}}
    found = {}
    for code in map(int, codes.split()):
        status = 529 if anthropic and code == 503 else code
        answer: Schema = {"description": ERRORS[code], "content": body}
        if code in (429, 503):
            answer["headers"] = _RETRY
        found[str(status)] = answer
    return found
