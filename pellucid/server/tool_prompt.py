"""Tools told to a model: in the chat template's own words where it has some, else in ours."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from pellucid.server.generation import Tool
from pellucid.server.tools import OURS

Message = Mapping[str, Any]


def definitions(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates read them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def explain(tools: Sequence[Tool], *, parallel: bool) -> str:
    """A system text that lists the tools and asks for calls in the form of `tools.OURS`."""
    listed = "\n".join(json.dumps(entry["function"], ensure_ascii=False) for entry in definitions(tools))
    several = "Several calls may follow each other." if parallel else "Make one call at most, then end your answer."
    example = f'{{"name": "the function to call", "{OURS.arguments}": {{"an argument": "its value"}}}}'
    return (
        "These functions are at your disposal, one JSON object a line, each with the JSON schema of its parameters:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"To call a function, write its name and arguments as a JSON object between two tags:\n"
        f"{OURS.open}\n{example}\n{OURS.close}\n"
        f"{several} The results come in the next message, between <tool_response> and </tool_response>."
    )


def spell_out(messages: Sequence[Message], system_text: str | None) -> list[Message]:
    """A conversation as plain text messages: calls and results in the form of `tools.OURS`.

    Args:
        system_text: put behind the system message, or into one of its own; None: nothing.
    """
    told: list[Message] = []
    for results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        several = list(group)
        told += [_results(several)] if results else map(_spelled, several)
    if system_text is None:
        return told
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{system_text}".lstrip()}, *told[1:]]
    return [{"role": "system", "content": system_text}, *told]


def _spelled(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message.get("content"), *(_call(call["function"]) for call in calls)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, texts))}


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], OURS.arguments: function["arguments"]}
    return f"{OURS.open}\n{json.dumps(call, ensure_ascii=False)}\n{OURS.close}"


def _results(messages: Iterable[Message]) -> Message:
    """One message of several, since many templates want user and assistant to take turns."""
    texts = [f"<tool_response>\n{message.get('content') or ''}\n</tool_response>" for message in messages]
    return {"role": "user", "content": "\n".join(texts)}
