"""What each path does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pellucid.server.answering import answer, count_tokens
from pellucid.server.call import Call
from pellucid.server.debug import step_lines
from pellucid.server.errors import invalid, server_fault, unknown_route
from pellucid.server.forms import CHAT, COMPLETION, COUNT, MESSAGES
from pellucid.server.metrics import CONTENT_TYPE
from pellucid.server.openai import EMBEDDING_FIELDS, parse_embeddings
from pellucid.server.openai_lists import ModelEntry, embeddings_body, model_body, models_body
from pellucid.server.openapi import openapi
from pellucid.server.responses import json_response
from pellucid.server.serving import Embedder, Model, Service

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}


def make_routes(service: Service) -> list[Route]:
    """All of them. Every path but /health, /ready and / needs a key, which `KeyCheck` sees to."""

    def get(path: str, answer: Callable[[Request], Any]) -> Route:
        return Route(path, answer, methods=["GET"])

    def post(path: str, endpoint: "Post") -> Route:
        return Route(path, endpoint, methods=["POST"])

    look = Look(service)
    return [
        post("/v1/chat/completions", Post(service, "messages", lambda call: answer(call, CHAT))),
        post("/v1/completions", Post(service, "prompt", lambda call: answer(call, COMPLETION))),
        post("/v1/messages", Post(service, "messages", lambda call: answer(call, MESSAGES))),
        post("/v1/messages/count_tokens", Post(service, "messages", lambda call: count_tokens(call, COUNT))),
        post("/v1/embeddings", Post(service, "input", embed)),
        get("/v1/models", look.models),
        get("/v1/models/{id:path}", look.model),
        get("/health", look.health),
        get("/ready", look.ready),
        get("/metrics", look.metrics),
        get("/openapi.json", look.openapi),
        get("/debug/state", look.state),
        get("/debug/steps", look.steps),
        get("/", look.page),
    ]


class Post:
    """ASGI: a route with a body.

    Args:
        field: where its prompt is, for errors about that.
    """

    def __init__(self, service: Service, field: str, answer: Callable[[Call], Any]) -> None:
        self.service, self.field, self.answer = service, field, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        await Call(self.service, self.field, scope, receive, send).run(self.answer)


async def embed(call: Call) -> None:
    """/v1/embeddings."""
    service = call.service
    body = await call.body(EMBEDDING_FIELDS)
    request = parse_embeddings(body)
    embedder = service.embedder(request.model)
    with embedder.places.hold(1):
        ids = await call.in_thread(lambda: embedder.ids(request.inputs))
        vectors = await embedder.vectors(ids, request.dimensions)
    if not vectors.isfinite().all():
        raise server_fault("a vector is not finite: the weights are damaged or their dtype is too narrow")
    num_tokens = sum(map(len, ids))
    service.metrics.embedded.labels(embedder.name).inc(num_tokens)
    told = embeddings_body(request, vectors.numpy(), num_tokens)
    await call.send_json(told | {"model": embedder.name})


class Look:
    """Routes that only tell."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def health(self, request: Request) -> Response:
        """200 while every engine can work; the process is alive in any case, since it answers."""
        problems = self.service.problems()
        return json_response(
            {"status": "failed" if problems else "ok", "problems": list(problems)}, 503 if problems else 200
        )

    async def ready(self, request: Request) -> Response:
        """200 while requests are taken."""
        service = self.service
        state = "draining" if service.draining else "ready" if service.ready and not service.problems() else "not ready"
        return json_response({"status": state}, 200 if state == "ready" else 503)

    async def models(self, request: Request) -> Response:
        """Those that write, then those that embed."""
        return json_response(models_body([_entry(model) for model in self._all().values()]))

    async def model(self, request: Request) -> Response:
        """One of them; "default" is the first."""
        name, service = request.path_params["id"], self.service
        found = self._all().get(name)
        if found is None:
            found = service.model(name) if service.models else service.embedder(name)
        return json_response(model_body(_entry(found)))

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text."""
        return Response(self.service.metrics.text(), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        """What stands here, for machines."""
        return json_response(openapi())

    async def state(self, request: Request) -> Response:
        """What engines hold and do. Waits for a step to end."""
        states = await asyncio.gather(*(model.state() for model in self.service.models.values()))
        return json_response({"models": dict(zip(self.service.models, states, strict=True))})

    async def steps(self, request: Request) -> Response:
        """The last steps of a model, after number ``since``."""
        query, service = request.query_params, self.service
        since = query.get("since", "0")
        if not (since.isascii() and since.isdigit() and len(since) < 16):
            raise invalid(f"since must be the number of a step, got {since[:40]!r}", "invalid_value", "since")
        model = service.model(query.get("model", "default"))
        return json_response({"model": model.name, "steps": step_lines(model.steps.records, int(since))})

    async def page(self, request: Request) -> Response:
        """To chat on, where it is installed."""
        if not PAGE.is_file():
            raise unknown_route("/")
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    def _all(self) -> dict[str, Model | Embedder]:
        return {**self.service.models, **self.service.embedders}


def _entry(model: Model | Embedder) -> ModelEntry:
    return ModelEntry(model.name, model.created, model.window)
