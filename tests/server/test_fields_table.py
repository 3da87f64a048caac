"""docs/serving.md says of each field what happens to it: every row is sent, and it happens."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vendor_clients import newest

from pellucid.server import anthropic, openai
from pellucid.server.errors import ApiError
from pellucid.server.fields import ignored_fields

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "serving.md"

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]


class Api(NamedTuple):
    """A route: how it reads, the least it takes, what it says it knows, and what a field needs beside it."""

    parse: Callable[[dict[str, Any]], Any]
    least: dict[str, Any]
    supported: set[str]
    ignored: set[str]
    refused: set[str]
    beside: dict[str, Any]


APIS = {
    "/v1/chat/completions": Api(
        openai.parse_chat,
        {"model": "m", "messages": HELLO},
        openai.CHAT_SUPPORTED,
        openai.CHAT_IGNORED,
        set(openai.CHAT_REFUSED),
        {"logprobs": True, "tools": TOOLS, "stream": True},
    ),
    "/v1/completions": Api(
        openai.parse_completion,
        {"model": "m", "prompt": "hello"},
        openai.COMPLETION_SUPPORTED,
        openai.COMPLETION_IGNORED,
        set(openai.COMPLETION_REFUSED),
        {"n": 2, "stream": True},
    ),
    "/v1/embeddings": Api(
        openai.parse_embeddings,
        {"model": "m", "input": "hello"},
        openai.EMBEDDING_SUPPORTED,
        openai.EMBEDDING_IGNORED,
        set(),
        {},
    ),
    "/v1/messages": Api(
        anthropic.parse_messages,
        {"model": "m", "messages": HELLO, "max_tokens": 3},
        anthropic.MESSAGES_SUPPORTED,
        anthropic.MESSAGES_IGNORED,
        set(anthropic.MESSAGES_REFUSED),
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ),
}


class Row(NamedTuple):
    route: str
    field: str
    here: str
    beside: str | None
    """Another field that the example needs."""
    example: Any


def rows() -> list[Row]:
    found, route = [], ""
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            route = line.strip("# ")
        elif route in APIS and (match := re.match(r"\| `(\w+)` \| (\w+) \| .*\| (?:with `(\w+)`: )?`(.*)` \|$", line)):
            found.append(Row(route, match[1], match[2], match[3], json.loads(match[4])))
        elif route in APIS and line.startswith("| `"):
            raise AssertionError(f"this row cannot be read: {line}")
    return found


ROWS = rows()
NO_EFFECT_ALONE = {"modalities", "best_of"}
"""Supported as the one value that says what is so anyway; another is refused, below."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.route}:{row.field}")
def test_what_the_table_says_of_a_field_is_what_happens(row: Row) -> None:
    api = APIS[row.route]
    base = api.least | ({row.beside: api.beside[row.beside]} if row.beside else {})
    sent = base | {row.field: row.example}
    if row.here == "refused":
        with pytest.raises(ApiError) as caught:
            api.parse(sent)
        assert (caught.value.status, caught.value.param) == (400, row.field)
        assert row.field in caught.value.message
    elif row.here == "ignored" or row.field in NO_EFFECT_ALONE:
        assert api.parse(sent) == api.parse(base)
    else:
        assert api.parse(sent) != api.parse(base)
    assert ignored_fields(sent, api.supported | api.ignored | api.refused) == []
    if row.field not in api.least:
        assert api.parse(base | {row.field: None}) == api.parse(base)


@pytest.mark.parametrize("route", APIS)
def test_the_table_has_every_field_once_and_in_its_place(route: str) -> None:
    api, listed = APIS[route], [row for row in ROWS if row.route == route]
    names = [row.field for row in listed]
    assert len(names) == len(set(names))
    for here, known in (("supported", api.supported), ("ignored", api.ignored), ("refused", api.refused)):
        assert {row.field for row in listed if row.here == here} == known


@pytest.mark.parametrize(
    ("route", "field", "value"), [("/v1/chat/completions", "modalities", ["audio"]), ("/v1/completions", "best_of", 3)]
)
def test_values_that_ask_for_something_else_are_refused(route: str, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        APIS[route].parse(APIS[route].least | {field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("route", APIS)
def test_unknown_fields_change_nothing_and_are_named(route: str) -> None:
    api = APIS[route]
    sent = api.least | {"brand_new": {"a": [1]}, "logit_bais": {}}
    assert api.parse(sent) == api.parse(api.least)
    assert ignored_fields(sent, api.supported | api.ignored | api.refused) == ["brand_new", "logit_bais"]


@pytest.mark.parametrize(
    ("vendor", "module", "routes"),
    [
        ("openai", "types/chat/completion_create_params.py", ["/v1/chat/completions"]),
        ("openai", "types/completion_create_params.py", ["/v1/completions"]),
        ("openai", "types/embedding_create_params.py", ["/v1/embeddings"]),
        ("anthropic", "types/message_create_params.py", ["/v1/messages"]),
        ("anthropic", "types/message_count_tokens_params.py", ["/v1/messages"]),
    ],
)
def test_every_field_that_the_vendors_client_sends_stands_in_the_table(
    vendor: str, module: str, routes: list[str]
) -> None:
    source = (newest(vendor) / vendor / module).read_text(encoding="utf-8")
    bases = [
        part
        for part in re.split(r"^class ", source, flags=re.M)
        if re.match(r"\w*CreateParams\w*|MessageCount\w*", part)
    ]
    sent = {name for part in bases for name in re.findall(r"^    (\w+): ", part, flags=re.M)}
    assert len(sent) >= 5
    assert sent - {"betas"} <= {row.field for row in ROWS if row.route in routes}
