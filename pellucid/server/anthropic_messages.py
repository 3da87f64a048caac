"""Conversations and tools in Anthropic's form, to the chat template's."""

from collections.abc import Mapping
from typing import Any

from pellucid.server.fields import Fields, invalid_value, shown, wrong_type
from pellucid.server.generation import Tool, ToolChoice
from pellucid.server.openai_messages import check_unique, named_tool, needs_tools, tool_name

_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use", "thinking", "redacted_thinking")}


def read_history(body: Fields) -> tuple[Mapping[str, Any], ...]:
    """``system`` and ``messages``: neighbours of one role become one message, system messages among them join the first.

    Texts that are joined are parted by a line break. The results of tools come before the text of their turn, each as a
    message of role tool; one that is an error begins with "Error: ".

    Raises:
        ApiError: an unknown role, a block that is not text, tool_use, tool_result or thinking, or not of its role.
    """
    system = [block.text("text", "") for block in _blocks(body, "system", ("text",))]
    turns: list[tuple[str, list[Fields]]] = []
    for fields in body.objects("messages", empty=False):
        fields.require("role", "content")
        role = fields.choice("role", "user", ("user", "assistant", "system"))
        blocks = _blocks(fields, "content", _BLOCKS.get(role, ("text",)))
        if role == "system":
            system += [block.text("text", "") for block in blocks]
        elif role == "user" and not blocks:
            fields.array("content", empty=False)
        elif turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        elif blocks:  # an answer without a word is none
            turns.append((role, blocks))
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": "\n".join(system)}] if any(system) else []
    called: dict[str, str] = {}  # the id of each call so far: its tool
    for role, blocks in turns:
        if role == "user":
            messages += _user(blocks, called)
        else:
            messages.append(_assistant(blocks, called))
    return tuple(messages)


def _blocks(fields: Fields, name: str, kinds: tuple[str, ...]) -> list[Fields]:
    """The blocks of a content; a string is one of text. Each has what its type needs."""
    value = fields.raw(name)
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, fields.path(name))]
    if value is not None and not isinstance(value, list | tuple):
        raise wrong_type(fields.path(name), "a string or an array of blocks", value)
    blocks = fields.objects(name)
    for block in blocks:
        block.require("type")
        kind = block.text("type", "")
        if kind not in kinds:
            raise invalid_value(block.path("type"), f"{shown(kind)} is not supported here; it takes {', '.join(kinds)}")
        block.require(*_NEEDED[kind])
    return blocks


_NEEDED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}


def _texts(blocks: list[Fields], kind: str) -> str:
    return "\n".join(block.text(kind, "") for block in blocks if block.raw("type") == kind)


def _user(blocks: list[Fields], called: Mapping[str, str]) -> list[dict[str, Any]]:
    messages = [_result(block, called) for block in blocks if block.raw("type") == "tool_result"]
    if any(block.raw("type") == "text" for block in blocks):
        messages.append({"role": "user", "content": _texts(blocks, "text")})
    return messages


def _result(block: Fields, called: Mapping[str, str]) -> dict[str, Any]:
    id_ = block.text("tool_use_id", "")
    content = _texts(_blocks(block, "content", ("text",)), "text")
    if block.flag("is_error"):
        content = f"Error: {content}"
    message = {"role": "tool", "tool_call_id": id_, "content": content}
    return message | ({"name": called[id_]} if id_ in called else {})


def _assistant(blocks: list[Fields], called: dict[str, str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _texts(blocks, "text")}
    if reasoning := _texts(blocks, "thinking"):
        message["reasoning_content"] = reasoning
    calls = []
    for block in blocks:
        if block.raw("type") == "tool_use":
            id_, name = block.text("id", ""), block.text("name", "")
            called[id_] = name
            calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": block.table("input")}})
    return message | ({"tool_calls": calls} if calls else {})


def read_tools(body: Fields) -> tuple[Tool, ...]:
    """``tools`` of the client's own; those that Anthropic runs are refused by their type."""
    tools = []
    for entry in body.objects("tools"):
        entry.choice("type", "custom", ("custom",))
        entry.require("name", "input_schema")
        tools.append(Tool(tool_name(entry), entry.text("description", ""), entry.table("input_schema")))
    check_unique(tools, "tools")
    return tuple(tools)


def read_tool_choice(body: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    fields = body.object("tool_choice")
    if fields is None:
        return ToolChoice()
    fields.require("type")
    kind = fields.choice("type", "auto", ("auto", "any", "tool", "none"))
    parallel = not fields.flag("disable_parallel_tool_use")
    if kind == "tool":
        fields.require("name")
        return ToolChoice("named", named_tool(fields, tools), parallel)
    if kind == "any":
        needs_tools(tools, fields.path("type"))
        return ToolChoice("required", parallel=parallel)
    return ToolChoice("none" if kind == "none" else "auto", parallel=parallel)
