"""/openapi.json says what is so: bodies that it allows are read, answers that are sent fit it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from answer_pieces import ANSWERS, USAGE, content, end, token
from test_fields_table import APIS, ROWS

from pellucid.server.anthropic_encode import count_body, message_body
from pellucid.server.errors import (
    ApiError,
    anthropic_error_body,
    openai_error_body,
    rate_limited,
    server_fault,
    unauthorized,
    unavailable,
)
from pellucid.server.openai import EmbeddingRequest
from pellucid.server.openai_completions import Echo, completion_body
from pellucid.server.openai_encode import Answer, chat_body
from pellucid.server.openai_lists import ModelEntry, embeddings_body, model_body, models_body
from pellucid.server.openapi import openapi

DOCUMENT = openapi()
SCHEMAS = DOCUMENT["components"]["schemas"]


def check(name: str, value: Any) -> None:
    """Raises where a value does not fit a schema of the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema_rs.Draft202012Validator(schema).validate(json.loads(json.dumps(value)))


def fits(name: str, value: Any) -> bool:
    try:
        check(name, value)
    except jsonschema_rs.ValidationError:
        return False
    return True


def schema_of(route: str) -> str:
    body = DOCUMENT["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return str(body.rpartition("/")[2])


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    names = [reference.removeprefix("#/components/schemas/") for reference in references(DOCUMENT)]
    assert names and set(names) == set(SCHEMAS), "all are used, and all exist"
    for schema in SCHEMAS.values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.route}:{row.field}")
def test_the_schema_allows_what_the_table_shows_and_not_what_is_refused(row: Any) -> None:
    api = APIS[row.route]
    base = api.least | ({row.beside: api.beside[row.beside]} if row.beside else {})
    assert fits(schema_of(row.route), base)
    assert fits(schema_of(row.route), base | {row.field: row.example}) == (row.here != "refused")
    if row.field not in api.least:
        assert fits(schema_of(row.route), base | {row.field: None})


@pytest.mark.parametrize("route", APIS)
def test_the_schema_has_the_fields_of_the_table(route: str) -> None:
    assert set(SCHEMAS[schema_of(route)]["properties"]) == {row.field for row in ROWS if row.route == route}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("/v1/chat/completions", {"max_tokens": 0}),
    ("/v1/chat/completions", {"temperature": 2.1}),
    ("/v1/chat/completions", {"stop": [""]}),
    ("/v1/chat/completions", {"n": 0}),
    ("/v1/chat/completions", {"logit_bias": {"x": 1}}),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [1, "a"]}),
    ("/v1/completions", {"logprobs": 21}),
    ("/v1/embeddings", {"input": ""}),
    ("/v1/embeddings", {"encoding_format": "int8"}),
    ("/v1/messages", {"max_tokens": 0}),
    ("/v1/messages", {"messages": [{"role": "user", "content": []}]}),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}),
    ("/v1/messages", {"thinking": {"type": "hard"}}),
    ("/v1/messages", {"stop_sequences": [""]}),
]


@pytest.mark.parametrize(("route", "fields"), WRONG)
def test_schema_and_reader_refuse_the_same(route: str, fields: dict[str, Any]) -> None:
    body = APIS[route].least | fields
    assert not fits(schema_of(route), body)
    with pytest.raises(ApiError):
        APIS[route].parse(body)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_fit(name: str) -> None:
    answer = Answer(id="x", model="m", created=1, logprobs=True, top_logprobs=1)
    check("ChatAnswer", chat_body(answer, ANSWERS[name], USAGE))
    check("Message", message_body("msg_1", "m", ANSWERS[name], USAGE))


def test_other_answers_fit() -> None:
    answer = Answer(id="x", model="m", created=1, logprobs=True, top_logprobs=1)
    echo = Echo("Ab", (token("A"), token("b")))
    check("CompletionAnswer", completion_body(answer, content("a") + end("stop_string", 3), USAGE, [echo]))
    for encoding in ("float", "base64"):
        check("EmbeddingAnswer", embeddings_body(EmbeddingRequest("m", ("a",), encoding), [[0.5, 1.0]], 1))
    entry = ModelEntry("a", 1, 2)
    check("Model", model_body(entry))
    check("ModelList", models_body([entry]))
    check("ModelList", models_body([]))
    check("TokenCount", count_body(3))
    assert not fits("Message", message_body("msg_1", "m", end(), USAGE) | {"stop_reason": "stop"})


@pytest.mark.parametrize(
    "error",
    [unauthorized(key_given=True), rate_limited("x", 1), server_fault("x"), unavailable("x", 1)],
    ids=lambda error: str(error.status),
)
def test_errors_fit(error: ApiError) -> None:
    check("OpenAIError", openai_error_body(error))
    check("AnthropicError", anthropic_error_body(error, "req_1"))


def test_every_route_that_makes_an_answer_tells_its_errors_in_its_own_words() -> None:
    for path, route in DOCUMENT["paths"].items():
        for operation in route.values():
            shapes = {
                answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                for status, answer in operation["responses"].items()
                if (int(status) >= 400 and status != "503") or (status == "503" and "v1" in path)
            }
            expected = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
            assert shapes == {expected}, path
            if "post" in route:
                assert {"400", "401", "404", "413", "429", "500"} <= set(operation["responses"])
                busy = "529" if expected == "AnthropicError" else "503"
                assert {"503", "529"} & set(operation["responses"]) == {busy}


def test_the_document_has_the_routes_of_the_application() -> None:
    routes = pytest.importorskip("pellucid.server.routes")
    served = {
        (re.sub(r":\w+", "", route.path), method.lower())
        for route in routes.make_routes(object())
        for method in route.methods or {"POST"}
        if method != "HEAD"
    }
    assert served == {(path, method) for path, route in DOCUMENT["paths"].items() for method in route}
