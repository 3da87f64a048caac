"""Anthropic's bodies in: messages, and the count of their tokens. Answers go out through `anthropic_encode`.

What each field does stands in docs/serving.md; a test reads its table and drives these functions.
"""

import json
from collections.abc import Mapping
from typing import Any

from pellucid.inference.request import SamplingParams
from pellucid.server.anthropic_messages import read_history, read_tool_choice, read_tools
from pellucid.server.fields import Fields
from pellucid.server.generation import Generation, Grammar
from pellucid.server.openai_sampling import read_stops

MESSAGES_SUPPORTED = {
    "model", "messages", "max_tokens", "system", "stop_sequences", "stream", "temperature", "top_p", "top_k",
    "tools", "tool_choice", "thinking", "output_config", "output_format",
}  # fmt: skip
MESSAGES_IGNORED = {
    "metadata", "cache_control", "container", "service_tier", "diagnostics", "inference_geo", "speed",
    "user_profile_id", "workspace_id", "context_management", "betas",
}  # fmt: skip
"""They change nothing here, and are no mistake."""
MESSAGES_REFUSED = {"mcp_servers": "this server calls no other; give tools and call them yourself"}
"""To ignore these would give another answer than was asked for."""
MESSAGES_FIELDS = MESSAGES_SUPPORTED | MESSAGES_IGNORED | MESSAGES_REFUSED.keys()

_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def parse_messages(body: Mapping[str, Any]) -> Generation:
    """A body of /v1/messages.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(body)
    fields.require("model", "max_tokens", "messages")
    return _generation(fields, fields.whole("max_tokens", 1, 1), limit_given=True)


def parse_count_tokens(body: Mapping[str, Any]) -> Generation:
    """A body of /v1/messages/count_tokens, which needs no ``max_tokens``: its prompt is that of the same messages.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(body)
    fields.require("model", "messages")
    return _generation(fields, 1, limit_given=False)


def _generation(fields: Fields, max_tokens: int, *, limit_given: bool) -> Generation:
    for name, why in MESSAGES_REFUSED.items():
        fields.refuse(name, why)
    tools = read_tools(fields)
    return Generation(
        model=fields.text("model", "", empty=False),
        messages=read_history(fields),
        params=SamplingParams(
            temperature=fields.number("temperature", 1.0, 0, 2),
            top_p=fields.number("top_p", 1.0, 0, 1),
            top_k=max(0, fields.whole("top_k", 0, -1)),
            max_tokens=max_tokens,
        ),
        stop=read_stops(fields.array("stop_sequences"), "stop_sequences"),
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        grammar=_grammar(fields),
        template_options=_template_options(fields),
        stream=fields.flag("stream"),
        limit_given=limit_given,
    )


def _grammar(fields: Fields) -> Grammar | None:
    """``output_config.format``, or ``output_format`` as it was called before."""
    config = fields.object("output_config")
    form = (config.object("format") if config is not None else None) or fields.object("output_format")
    if form is None:
        return None
    form.require("type")
    form.choice("type", None, ("json_schema",))
    form.require("schema")
    return Grammar("json_schema", json.dumps(form.table("schema")))


def _template_options(fields: Fields) -> dict[str, Any]:
    """Whether to think, and how hard, for templates that ask; the budget of tokens has no effect."""
    options: dict[str, Any] = {}
    thinking, config = fields.object("thinking"), fields.object("output_config")
    if thinking is not None:
        thinking.require("type")
        kind = thinking.choice("type", None, ("enabled", "adaptive", "disabled"))
        thinking.whole("budget_tokens", None, 1)
        options["enable_thinking"] = kind != "disabled"
    if config is not None and (effort := config.choice("effort", None, _EFFORTS)) is not None:
        options["reasoning_effort"] = effort
    return options
