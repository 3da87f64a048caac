"""OpenAI, tools and structured answers. The schemas leave so little freedom that any model comes to an end."""

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from pellucid.conformance.case import Failed, case, same, shorten, true
from pellucid.conformance.openai_stream import chunks_of
from pellucid.conformance.session import Session, user

LIMIT = 512
SEEDS = range(1, 7)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"type": "string", "enum": ["a", "b"]}, "far": {"type": "boolean"}},
    "required": ["to", "far"],
    "additionalProperties": False,
}
NAMES = ("left", "right")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Go {name}.", "parameters": SCHEMA}} for name in NAMES
]  # fmt: skip
ASKED = [user("Where to?")]


def completed(ask: Callable[[int], Any], ended: Callable[[Any], bool]) -> Any:
    """The first answer, over several seeds, that was not cut by its limit: a random model may dawdle in white space."""
    answer: Any = None
    for seed in SEEDS:
        answer = ask(seed)
        if ended(answer):
            return answer
    raise Failed(f"each of {len(SEEDS)} answers was cut after {LIMIT} tokens; the last: {shorten(answer)}")


def ask_tools(s: Session, **changes: Any) -> Any:
    """An answer with tools that came to an end."""

    def ask(seed: int) -> Any:
        return s.chat(
            **({"messages": ASKED, "tools": TOOLS, "max_tokens": LIMIT, "temperature": 1, "seed": seed} | changes)
        )

    return completed(ask, lambda answer: answer.choices[0].finish_reason != "length")


def check_arguments(text: str) -> None:
    """A complete JSON object that obeys the schema."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Failed(f"arguments are not complete JSON: {text!r}") from None
    true(isinstance(value, dict), f"arguments are an object, got {text!r}")
    same(sorted(value), ["far", "to"], "names of the arguments")
    true(
        value["to"] in ("a", "b") and isinstance(value["far"], bool),
        f"arguments obey the schema: {text}",
    )


def check_calls(message: Any, names: tuple[str, ...]) -> Any:
    """The calls of a message that must have some."""
    calls = message.tool_calls
    true(calls, f"there is a tool call; content is {shorten(message.content)}")
    same(message.content or None, None, "content beside tool calls that were required")
    for call in calls:
        true(call.id, "a call has an id")
        same(call.type, "function", "type of a call")
        true(call.function.name in names, f"{call.function.name!r} is one of {names}")
        check_arguments(call.function.arguments)
    same(len({call.id for call in calls}), len(calls), "number of different ids")
    return calls


@case("openai", "tools: required", feature="tools")
def required(s: Session) -> None:
    answer = ask_tools(s, tool_choice="required")
    check_calls(answer.choices[0].message, NAMES)
    same(answer.choices[0].finish_reason, "tool_calls", "finish_reason")


@case("openai", "tools: named, one call", feature="tools")
def named(s: Session) -> None:
    choice = {"type": "function", "function": {"name": "right"}}
    answer = ask_tools(s, tool_choice=choice, parallel_tool_calls=False).choices[0]
    calls = check_calls(answer.message, ("right",))
    same(len(calls), 1, "number of calls with parallel_tool_calls false")
    # the vendor says "stop" after a named tool, most servers "tool_calls"
    true(answer.finish_reason in ("tool_calls", "stop"), f"finish_reason {answer.finish_reason!r}")


@case("openai", "tools: auto and none", feature="tools")
def free(s: Session) -> None:
    answer = s.chat(messages=ASKED, tools=TOOLS, tool_choice="auto").choices[0]
    calls = answer.message.tool_calls or []
    true(calls or isinstance(answer.message.content, str), "an answer of text or of calls")
    same(
        answer.finish_reason == "tool_calls",
        bool(calls) and answer.finish_reason != "length",
        "tool_calls as the reason",
    )
    none = s.chat(messages=ASKED, tools=TOOLS, tool_choice="none").choices[0]
    same(none.message.tool_calls or [], [], "tool calls with tool_choice none")


@case("openai", "tools: streamed", feature="tools")
def streamed(s: Session) -> None:
    def ask(seed: int) -> Any:
        return chunks_of(
            s, messages=ASKED, tools=TOOLS, tool_choice="required", max_tokens=LIMIT, temperature=1, seed=seed,
        )  # fmt: skip

    def reason(chunks: Any) -> Any:
        return [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1]

    chunks = completed(ask, lambda chunks: reason(chunks) != "length")
    same(reason(chunks), "tool_calls", "finish_reason")
    calls: dict[int, dict[str, str]] = {}
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        for call in delta.tool_calls or []:
            if call.index not in calls:
                same(call.index, len(calls), "index of a new call")
                true(
                    call.id and call.type == "function" and call.function.name in NAMES,
                    f"a call begins with id, type, name: {call}",
                )
                calls[call.index] = {
                    "id": call.id,
                    "name": call.function.name,
                    "arguments": call.function.arguments or "",
                }
            else:
                same((call.id, call.function.name), (None, None), "id and name of a later delta: they are told once")
                same(call.index, len(calls) - 1, "index of a fragment: calls follow one another")
                calls[call.index]["arguments"] += call.function.arguments or ""
    true(calls, "there is a tool call")
    for call in calls.values():
        check_arguments(call["arguments"])


@case("openai", "tools: .stream() helper, strict", feature="tools")
def helper(s: Session) -> None:
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]  # type: ignore[operator]

    def ask(seed: int) -> Any:
        request = s.request(
            messages=ASKED, tools=strict, tool_choice="required", max_tokens=LIMIT, temperature=1, seed=seed
        )
        try:
            with s.client.chat.completions.stream(**request) as events:
                told = "".join(e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta")
                return told, events.get_final_completion().choices[0].message
        except s.sdk.LengthFinishReasonError:
            return None

    told, message = completed(ask, lambda found: found is not None)
    calls = check_calls(message, NAMES)
    same(told, "".join(call.function.arguments for call in calls), "the fragments, put together")
    for call in calls:
        same(call.function.parsed_arguments, json.loads(call.function.arguments), "arguments as the client parsed them")


@case("openai", "tools: result goes back", feature="tools")
def round_trip(s: Session) -> None:
    calls = check_calls(ask_tools(s, tool_choice="required").choices[0].message, NAMES)
    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in calls]}
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"seen": 21, "said": "naïve"}'} for call in calls]
    before = s.chat(messages=ASKED, tools=TOOLS, tool_choice="none")
    after = s.chat(messages=[*ASKED, said, *results], tools=TOOLS, tool_choice="none")
    true(after.usage.prompt_tokens > before.usage.prompt_tokens, "call and result are part of the prompt")
    true(isinstance(s.told(after), str), "an answer of text")


@case("openai", "tools: no arguments", feature="tools")
def no_arguments(s: Session) -> None:
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "ping", "parameters": empty}}
    message = ask_tools(s, tools=[tool], tool_choice="required").choices[0].message
    true(message.tool_calls, f"there is a tool call; content is {shorten(message.content)}")
    for call in message.tool_calls:
        same(json.loads(call.function.arguments), {}, "arguments of a tool without any")


def json_answer(s: Session, response_format: Any) -> Any:
    """The value of an answer in JSON that came to an end."""

    def ask(seed: int) -> Any:
        return s.chat(messages=ASKED, response_format=response_format, max_tokens=LIMIT, temperature=1, seed=seed)

    answer = completed(ask, lambda answer: answer.choices[0].finish_reason == "stop")
    try:
        return json.loads(answer.choices[0].message.content)
    except (ValueError, RecursionError):
        raise Failed(f"not JSON, though it ended with stop: {answer.choices[0].message.content!r}") from None


@case("openai", "response_format: json_object", feature="response_format")
def json_object(s: Session) -> None:
    # An object may go on for ever: a cut answer tells nothing but that it begins as one.
    answer = s.chat(messages=ASKED, response_format={"type": "json_object"}, max_tokens=LIMIT, temperature=1).choices[0]
    true(answer.message.content.lstrip().startswith("{"), f"an object, got {shorten(answer.message.content)}")
    if answer.finish_reason == "stop":
        true(isinstance(json.loads(answer.message.content), dict), "an answer that ended is an object")


@case("openai", "response_format: json_schema", feature="response_format")
def json_schema(s: Session) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "step", "schema": SCHEMA, "strict": True}}
    check_arguments(json.dumps(json_answer(s, format_)))


@case("openai", "response_format: .parse()", feature="response_format")
def parse(s: Session) -> None:
    step = import_module("pydantic").create_model("Step", to=(Literal["a", "b"], ...), far=(bool, ...))

    def ask(seed: int) -> Any:
        request = s.request(messages=ASKED, response_format=step, max_tokens=LIMIT, temperature=1, seed=seed)
        try:
            return s.client.chat.completions.parse(**request).choices[0].message.parsed
        except s.sdk.LengthFinishReasonError:
            return None

    found = completed(ask, lambda found: found is not None)
    true(isinstance(found, step), f"a parsed Step, got {found!r}")
