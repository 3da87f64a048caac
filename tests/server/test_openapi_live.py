"""Requests that the server's own description makes up: no answer is a fault of ours, and each is one that it describes."""

import collections

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from live_server import idle, live, until
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pellucid.server.routes import make_routes

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with live(any_model=True, window=96, max_choices=2) as found:
        yield found


def operations(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return [operation.ok() for operation in schema.get_all_operations()]


def send_made_up_requests(server, mode, examples):
    """The statuses of each operation's answers."""
    seen = collections.defaultdict(collections.Counter)
    for operation in operations(server):
        if mode is GenerationMode.NEGATIVE and not operation.label.startswith("POST"):
            continue  # without anything that could be wrong
        given_case = given(case=operation.as_strategy(generation_mode=mode))
        given_case(
            settings(
                max_examples=examples, database=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,)
            )(
                lambda case: seen[case.operation.label].update(
                    [case.call_and_validate(timeout=60, checks=CHECKS).status_code]
                )
            )
        )()
    until(lambda: idle(server.engine))
    assert server.get("/health")[0] == 200 and server.model.places.taken == 0
    return seen


def test_the_description_has_exactly_the_routes_that_there_are(server):
    described = {
        (method.upper(), path) for path, item in server.get("/openapi.json")[2]["paths"].items() for method in item
    }
    routes = make_routes(server.service)
    assert described == {(m, r.path.replace(":path", "")) for r in routes for m in r.methods - {"HEAD"}}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_requests_made_from_the_description_get_answers_that_it_describes(server, mode):
    posts = {label: seen for label, seen in send_made_up_requests(server, mode, 6).items() if label.startswith("POST")}
    assert len(posts) == 5
    wanted = 200 if mode is GenerationMode.POSITIVE else 400
    assert sum(seen[wanted] > 0 for seen in posts.values()) >= 4, posts


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_many_more_of_them(server, mode):
    send_made_up_requests(server, mode, 150)
