"""Conversations and tools in OpenAI's form, to the chat template's."""

import re
from collections.abc import Mapping
from typing import Any

from pellucid.server.errors import ApiError
from pellucid.server.fields import Fields, invalid_value, object_in_text, shown, wrong_type
from pellucid.server.generation import Tool, ToolChoice

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(body: Fields) -> tuple[Mapping[str, Any], ...]:
    """``messages``: developer is system, function is tool; text parts are joined by a line break.

    Raises:
        ApiError: an unknown role, a part that is not text, tool arguments that are no JSON object as text.
    """
    messages: list[Mapping[str, Any]] = []
    called: dict[str, str] = {}  # the id of each call so far: its function
    for fields in body.objects("messages", empty=False):
        fields.require("role")
        role = fields.choice("role", None, _ROLES)
        if role == "assistant":
            message = _assistant(fields)
            called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        elif role in ("tool", "function"):
            message = _tool_result(fields, called)
        else:
            message = {"role": "user" if role == "user" else "system", "content": _content(fields, required=True)}
            if name := fields.text("name", None):
                message["name"] = name
        messages.append(message)
    return tuple(messages)


def _content(fields: Fields, *, required: bool) -> str:
    """Text, or the text of parts."""
    value = fields.raw("content")
    if value is None:
        if required:
            fields.require("content")
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise wrong_type(fields.path("content"), "a string or an array of parts", value)
    return "\n".join(_part(part) for part in fields.objects("content"))


def _part(part: Fields) -> str:
    part.require("type")
    kind = part.text("type", "")
    if kind not in ("text", "refusal"):
        raise invalid_value(part.path("type"), f"{shown(kind)} is not supported; this server reads text parts only")
    part.require(kind)
    return part.text(kind, "")


def _assistant(fields: Fields) -> dict[str, Any]:
    calls = [_call(call) for call in fields.objects("tool_calls")]
    if (legacy := fields.object("function_call")) is not None:
        calls.append(_call_of("", legacy))
    reasoning = fields.text("reasoning_content", None) or fields.text("reasoning", None)
    refusal = fields.text("refusal", None)
    content = _content(fields, required=not (calls or reasoning or refusal)) or refusal or ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: Fields) -> dict[str, Any]:
    call.choice("type", "function", ("function",))
    call.require("function")
    function = call.object("function")
    assert function is not None
    return _call_of(call.text("id", ""), function)


def _call_of(id_: str, function: Fields) -> dict[str, Any]:
    function.require("name")
    arguments = object_in_text(function.text("arguments", ""), function.path("arguments"))
    return {"id": id_, "type": "function", "function": {"name": function.text("name", ""), "arguments": arguments}}


def _tool_result(fields: Fields, called: Mapping[str, str]) -> dict[str, Any]:
    """``name`` is that of the call which the result answers, where the client does not say it."""
    id_ = fields.text("tool_call_id", "")
    message: dict[str, Any] = {"role": "tool", "content": _content(fields, required=True)}
    if id_:
        message["tool_call_id"] = id_
    if name := fields.text("name", None) or called.get(id_):
        message["name"] = name
    return message


def read_tools(body: Fields) -> tuple[Tool, ...]:
    """``tools``: functions only, each name once."""
    tools = []
    for entry in body.objects("tools"):
        entry.choice("type", "function", ("function",))
        entry.require("function")
        function = entry.object("function")
        assert function is not None
        function.require("name")
        tools.append(
            Tool(tool_name(function), function.text("description", ""), function.table("parameters")),
        )
    check_unique(tools, "tools")
    return tuple(tools)


def tool_name(fields: Fields) -> str:
    name = fields.text("name", "")
    if not _TOOL_NAME.fullmatch(name):
        raise invalid_value(
            fields.path("name"), f"must be 1 to 128 letters, digits, dots, dashes or underscores, got {shown(name)}"
        )
    return name


def check_unique(tools: list[Tool], path: str) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise invalid_value(path, f"has two tools named {tool.name}; give each a name of its own")
        seen.add(tool.name)


def read_tool_choice(body: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """``tool_choice`` and ``parallel_tool_calls``."""
    parallel = body.flag("parallel_tool_calls", True)
    value, path = body.raw("tool_choice"), body.path("tool_choice")
    if value is None:
        return ToolChoice(parallel=parallel)
    if isinstance(value, str):
        kind = body.choice("tool_choice", None, ("auto", "none", "required"))
        if kind == "required":
            needs_tools(tools, path)
            return ToolChoice("required", parallel=parallel)
        return ToolChoice("none" if kind == "none" else "auto", parallel=parallel)
    if not isinstance(value, Mapping):
        raise wrong_type(path, "a string or an object", value)
    fields = Fields(value, path)
    fields.require("type")
    fields.choice("type", None, ("function",))
    fields.require("function")
    function = fields.object("function")
    assert function is not None
    function.require("name")
    return ToolChoice("named", named_tool(function, tools), parallel)


def named_tool(fields: Fields, tools: tuple[Tool, ...]) -> str:
    """The ``name`` in a tool choice, which must be one of ``tools``."""
    needs_tools(tools, fields.path("name"))
    name = fields.text("name", "")
    if name not in {tool.name for tool in tools}:
        raise _not_a_tool(fields.path("name"), name, tools)
    return name


def needs_tools(tools: tuple[Tool, ...], path: str) -> None:
    if not tools:
        raise invalid_value(path, "wants a tool to be called and tools lists none")


def _not_a_tool(path: str, name: str, tools: tuple[Tool, ...]) -> ApiError:
    known = ", ".join(tool.name for tool in tools[:20])
    return invalid_value(path, f"{shown(name)} is not one of tools: {known}")
