"""Anthropic, tools and structured answers."""

import json
from typing import Any

from pellucid.conformance.anthropic_messages import check_message, prompt_tokens
from pellucid.conformance.anthropic_stream import ending, events_of
from pellucid.conformance.case import case, same, true
from pellucid.conformance.openai_tools import LIMIT, NAMES, SCHEMA, check_arguments, completed
from pellucid.conformance.session import SHORT, Session, user

TOOLS = [{"name": name, "description": f"Go {name}.", "input_schema": SCHEMA} for name in NAMES]
ASKED = [user("Where to?")]
FORCED: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": LIMIT}


def ask_tools(s: Session, **changes: Any) -> Any:
    """An answer with tools that came to an end."""

    def ask(seed: int) -> Any:
        return s.chat(**(FORCED | {"extra_body": {"temperature": 1, "seed": seed}} | changes))

    return completed(ask, lambda message: message.stop_reason != "max_tokens")


def check_uses(message: Any, names: tuple[str, ...]) -> list[Any]:
    """The tool_use blocks of a message that must have some, and no empty text before them."""
    true(all(block.text for block in message.content if block.type == "text"), "no text block is empty")
    uses = [block for block in message.content if block.type == "tool_use"]
    true(uses, f"there is a tool_use block, got {message.content}")
    for use in uses:
        true(use.id and use.name in names, f"a tool_use has an id and a name of {names}: {use}")
        check_arguments(json.dumps(use.input))
    same(len({use.id for use in uses}), len(uses), "number of different ids")
    same(message.stop_reason, "tool_use", "stop_reason")
    return uses


@case("anthropic", "tools: any", feature="tools")
def any_tool(s: Session) -> None:
    check_uses(ask_tools(s), NAMES)


@case("anthropic", "tools: named, one call", feature="tools")
def named(s: Session) -> None:
    choice = {"type": "tool", "name": "right", "disable_parallel_tool_use": True}
    same(len(check_uses(ask_tools(s, tool_choice=choice), ("right",))), 1, "number of calls")


@case("anthropic", "tools: auto and none", feature="tools")
def free(s: Session) -> None:
    message = s.chat(messages=ASKED, tools=TOOLS, tool_choice={"type": "auto"})
    uses = [block for block in message.content if block.type == "tool_use"]
    if message.stop_reason != "max_tokens":
        same(message.stop_reason == "tool_use", bool(uses), "tool_use as the reason")
    check_message(s.chat(messages=ASKED, tools=TOOLS, tool_choice={"type": "none"}), SHORT)


@case("anthropic", "tools: streamed", feature="tools")
def streamed(s: Session) -> None:
    def ask(seed: int) -> Any:
        return events_of(s, **FORCED, extra_body={"temperature": 1, "seed": seed})

    events = completed(ask, lambda events: ending(events)[0] != "max_tokens")
    same(ending(events)[0], "tool_use", "stop_reason")
    arguments: dict[int, str] = {}
    for event in events:
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            block = event.content_block
            true(block.id and block.name in NAMES, f"a tool_use begins with id and name: {block}")
            same(block.input, {}, "input of content_block_start")
            arguments[event.index] = ""
        elif event.type == "content_block_delta" and event.index in arguments:
            same(event.delta.type, "input_json_delta", "type of a delta")
            arguments[event.index] += event.delta.partial_json
    true(arguments, "there is a tool_use block")
    for text in arguments.values():
        check_arguments(text)


@case("anthropic", "tools: .stream() helper", feature="tools")
def helper(s: Session) -> None:
    def ask(seed: int) -> Any:
        with s.client.messages.stream(**s.request(**FORCED, extra_body={"temperature": 1, "seed": seed})) as events:
            return s.valid(events.get_final_message())

    check_uses(completed(ask, lambda message: message.stop_reason != "max_tokens"), NAMES)


@case("anthropic", "tools: result goes back", feature="tools")
def round_trip(s: Session) -> None:
    uses = check_uses(ask_tools(s), NAMES)
    said = {"role": "assistant", "content": [use.model_dump(include={"type", "id", "name", "input"}) for use in uses]}
    text = [{"type": "text", "text": "a wall, naïve"}]
    results: list[dict[str, Any]] = [{"type": "tool_result", "tool_use_id": use.id, "content": text} for use in uses]
    failed = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "no such way", "is_error": True} for use in uses
    ]
    none = {"type": "none"}
    before = s.chat(messages=ASKED, tools=TOOLS, tool_choice=none)
    for content in (results, failed, [*results, {"type": "text", "text": "And now?"}]):
        after = s.chat(messages=[*ASKED, said, {"role": "user", "content": content}], tools=TOOLS, tool_choice=none)
        true(prompt_tokens(after.usage) > prompt_tokens(before.usage), "call and result are part of the prompt")
        check_message(after, SHORT)


@case("anthropic", "output_config: json_schema", feature="output_config")
def json_schema(s: Session) -> None:
    format_ = {"format": {"type": "json_schema", "schema": SCHEMA}}

    def ask(seed: int) -> Any:
        extra = {"temperature": 1, "seed": seed, "output_config": format_}
        return s.chat(messages=ASKED, max_tokens=LIMIT, extra_body=extra)

    check_arguments(s.told(completed(ask, lambda message: message.stop_reason == "end_turn")))
