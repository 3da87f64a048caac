"""Anthropic's protocol: bodies in, bytes out, and what Anthropic's own client makes of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from answer_pieces import ANSWERS, USAGE, call, conforming_events, content, end, reasoning
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vendor_clients import Case, ask, generations, newest

from pellucid.server import anthropic, sse
from pellucid.server.anthropic import parse_count_tokens, parse_messages
from pellucid.server.anthropic_encode import MessageStream, count_body, message_body
from pellucid.server.errors import ApiError, unavailable
from pellucid.server.generation import Generation, Piece, Tool, ToolChoice, Usage

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {"name": "get", "description": "Gets.", "input_schema": {"type": "object"}},
    {"type": "custom", "name": "put", "input_schema": {"type": "object"}},
]


def read(**fields: Any) -> Generation:
    return parse_messages({"model": "m", "max_tokens": 9, "messages": HELLO} | fields)


def history(*given: Any, **fields: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in read(messages=list(given), **fields).messages or ()]


def refused(code: str, param: str, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, param)
    return error


# -- in ---------------------------------------------------------------------------------------------------------


def test_a_limit_is_needed_and_is_at_least_one() -> None:
    assert read(max_tokens=1).params.max_tokens == 1 and read().limit_given
    refused("integer_below_min_value", "max_tokens", max_tokens=0)
    refused("missing_required_parameter", "max_tokens", max_tokens=None)


def test_sampling_fields_that_newer_clients_send_as_extras_are_taken() -> None:
    params = read(temperature=0, top_p=0, top_k=3).params
    assert (params.temperature, params.top_p, params.top_k) == (0, 0, 3)
    assert read(temperature=2).params.temperature == 2
    refused("decimal_above_max_value", "temperature", temperature=2.01)


def test_the_system_prompt_is_text_or_blocks() -> None:
    assert history(*HELLO, system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert history(*HELLO, system=blocks)[0] == {"role": "system", "content": "a\nb"}
    assert history(*HELLO, system=[]) == history(*HELLO, system="") == HELLO
    refused("invalid_value", "system[0].type", system=[{"type": "image"}])
    refused("invalid_type", "system", system=5)


def test_system_messages_among_the_others_join_the_first() -> None:
    told = history(
        {"role": "user", "content": "a"},
        {"role": "system", "content": "Now be loud."},
        {"role": "user", "content": "b"},
        system="Be brief.",
    )
    assert told == [
        {"role": "system", "content": "Be brief.\nNow be loud."},
        {"role": "user", "content": "a\nb"},
    ]


def test_neighbours_of_one_role_become_one_message() -> None:
    told = history(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": []},
        {"role": "user", "content": "e"},
    )
    assert told == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm"},
        {"role": "user", "content": "d\ne"},
    ]


def test_tools_that_were_used_and_their_results_become_the_templates() -> None:
    told = history(
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "get", "input": {"a": [1, {"b": None}]}},
                {"type": "tool_use", "id": "t2", "name": "put", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And now?"},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
                {"type": "tool_result", "tool_use_id": "t3"},
            ],
        },
    )
    assert told == [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "get", "arguments": {"a": [1, {"b": None}]}}},
                {"id": "t2", "type": "function", "function": {"name": "put", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no", "name": "put"},
        {"role": "tool", "tool_call_id": "t1", "content": "7", "name": "get"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"content": "x"}, "missing_required_parameter", "messages[0].role"),
        ({"role": "user"}, "missing_required_parameter", "messages[0].content"),
        ({"role": "tool", "content": "x"}, "invalid_value", "messages[0].role"),
        ({"role": "user", "content": []}, "empty_array", "messages[0].content"),
        ({"role": "user", "content": 3}, "invalid_type", "messages[0].content"),
        ({"role": "user", "content": [{"type": "image"}]}, "invalid_value", "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "tool_use"}]}, "invalid_value", "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "tool_result"}]}, "invalid_value", "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "tool_result", "content": "x"}]},
            "missing_required_parameter",
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "{}"}]},
            "invalid_type",
            "messages[0].content[0].input",
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]},
            "invalid_value",
            "messages[0].content[0].content[0].type",
        ),
    ],
)
def test_a_wrong_message_is_named_by_its_path(message: Any, code: str, param: str) -> None:
    refused(code, param, messages=[message])


def test_tools_and_how_to_choose_among_them() -> None:
    assert read(tools=TOOLS).tools == (Tool("get", "Gets.", {"type": "object"}), Tool("put", "", {"type": "object"}))
    assert read(tools=TOOLS).tool_choice == ToolChoice("auto")
    for given_, meant in (
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", None, False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "put"}, ToolChoice("named", "put")),
        ({"type": "none"}, ToolChoice("none")),
    ):
        assert read(tools=TOOLS, tool_choice=given_).tool_choice == meant
    refused("invalid_value", "tool_choice.name", tools=TOOLS, tool_choice={"type": "tool", "name": "x"})
    refused("invalid_value", "tool_choice.type", tool_choice={"type": "any"})
    refused("invalid_value", "tools[0].type", tools=[{"type": "web_search_20250305", "name": "web_search"}])
    refused("missing_required_parameter", "tools[0].input_schema", tools=[{"name": "x"}])


def test_thinking_and_effort_reach_the_template() -> None:
    assert read(thinking={"type": "enabled", "budget_tokens": 1024}).template_options == {"enable_thinking": True}
    assert read(thinking={"type": "adaptive"}).template_options == {"enable_thinking": True}
    assert read(thinking={"type": "disabled"}).template_options == {"enable_thinking": False}
    assert read(output_config={"effort": "low"}).template_options == {"reasoning_effort": "low"}
    assert read().template_options == {}
    refused("invalid_value", "thinking.type", thinking={"type": "hard"})


def test_a_schema_for_the_answer_has_two_names() -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "title": "é"}}
    newer, older = read(output_config={"format": form}).grammar, read(output_format=form).grammar
    assert newer == older and newer is not None
    assert newer.kind == "json_schema" and json.loads(newer.text or "") == form["schema"]
    refused(
        "missing_required_parameter", "output_config.format.schema", output_config={"format": {"type": "json_schema"}}
    )


def test_stop_sequences_are_never_empty() -> None:
    assert read(stop_sequences=["a", "b"]).stop == ("a", "b")
    refused("invalid_value", "stop_sequences", stop_sequences=[""])


def test_counting_reads_the_same_prompt_and_needs_no_limit() -> None:
    fields = {"system": "s", "tools": TOOLS, "tool_choice": {"type": "any"}, "thinking": {"type": "disabled"}}
    counted, asked = parse_count_tokens({"model": "m", "messages": HELLO} | fields), read(**fields)
    for name in ("model", "messages", "tools", "tool_choice", "template_options", "grammar"):
        assert getattr(counted, name) == getattr(asked, name)
    assert count_body(12) == {"input_tokens": 12}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)
KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking", "x")
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={"text": JSON, "id": JSON, "name": JSON, "input": JSON, "tool_use_id": JSON, "content": JSON},
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "max_tokens": st.integers(-1, 3),
        "messages": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(["user", "assistant", "system"]),
                    "content": st.lists(BLOCK, max_size=2) | JSON,
                }
            ),
            max_size=3,
        ),
    },
    optional=dict.fromkeys(sorted(anthropic.MESSAGES_FIELDS - {"model", "max_tokens", "messages"}), JSON),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES)
def test_no_body_raises_anything_but_a_request_error(body: dict[str, Any]) -> None:
    for parse in (parse_messages, parse_count_tokens):
        try:
            parsed = parse(body)
        except ApiError as error:
            assert error.status == 400 and error.code
        else:
            assert parsed.model == "m" and parsed.messages is not None


# -- out --------------------------------------------------------------------------------------------------------


def stream_of(pieces: Sequence[Piece], usage: Usage = USAGE) -> bytes:
    stream = MessageStream("msg_1", "m", "req_1")
    return stream.open(Usage(usage.prompt, 0, usage.cached)) + b"".join(map(stream.piece, pieces)) + stream.close(usage)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event, whose name must be its type: clients drop others."""
    events = [(name, json.loads(data)) for name, data in conforming_events([stream])]
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


def test_bytes_of_a_message_stream() -> None:
    """Golden: written by hand from the wire's description."""
    usage = '"input_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":4,"output_tokens":'
    expected = (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message",'
        '"role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,'
        f'"usage":{{{usage}0}}}}}}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"Hé\\n"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
        f'"stop_sequence":null}},"usage":{{{usage}7}}}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )
    assert stream_of(content("Hé\n") + end()).decode() == expected


def check_order(events: list[dict[str, Any]]) -> None:
    """message_start, blocks one after the other, message_delta, message_stop."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_, started = None, 0
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_ is None and event["index"] == started
                open_, started = event["index"], started + 1
            case "content_block_delta":
                assert event["index"] == open_
            case "content_block_stop":
                assert event["index"] == open_
                open_ = None
            case other:
                raise AssertionError(other)
    assert open_ is None


def accumulate(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client adds it up: an independent account of what the events say."""
    message: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events[1:]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            kind = delta["type"]
            if kind == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            elif kind == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                name = kind.removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_is_in_order_and_adds_up_to_the_body(name: str) -> None:
    events = events_of(stream_of(ANSWERS[name]))
    check_order(events)
    assert accumulate(events) == message_body("msg_1", "m", ANSWERS[name], USAGE)


def test_a_message_has_what_clients_read() -> None:
    assert message_body("msg_1", "m", ANSWERS["all"], USAGE) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "why", "signature": ""},
            {"type": "text", "text": "So"},
            {"type": "tool_use", "id": "toolu_0x", "name": "get", "input": {"q": None}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
        },
    }


@pytest.mark.parametrize(
    ("ending", "reason", "sequence"),
    [
        (end("stop"), "end_turn", None),
        (end("stop_string", "END"), "stop_sequence", "END"),
        (end("stop_string", 5), "stop_sequence", None),
        (end("length"), "max_tokens", None),
        (end("context"), "model_context_window_exceeded", None),
        (end("tool_calls"), "tool_use", None),
    ],
)
def test_why_it_ended(ending: list[Piece], reason: str, sequence: str | None) -> None:
    body = message_body("msg_1", "m", content("a") + ending, USAGE)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    delta = events_of(stream_of(content("a") + ending))[-2]
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_no_empty_block_stands_before_a_tool() -> None:
    pieces = [Piece(0, "content", ""), Piece(0, "reasoning", ""), *call(0, "get", "{}"), *end("tool_calls")]
    assert [block["type"] for block in message_body("msg_1", "m", pieces, USAGE)["content"]] == ["tool_use"]
    starts = [e["content_block"]["type"] for e in events_of(stream_of(pieces)) if e["type"] == "content_block_start"]
    assert starts == ["tool_use"]


def test_a_thought_is_signed_once_at_its_end() -> None:
    deltas = [
        event["delta"]["type"]
        for event in events_of(stream_of(reasoning("a", "b") + content("c") + end()))
        if event["type"] == "content_block_delta"
    ]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]


def test_a_tool_without_arguments_and_one_that_was_cut_have_an_object() -> None:
    for pieces, reason in (
        (call(0, "get") + end("tool_calls"), "tool_use"),
        (call(0, "f", '{"a') + end("length"), "max_tokens"),
    ):
        body = message_body("msg_1", "m", pieces, USAGE)
        assert body["content"][0]["input"] == {} and body["stop_reason"] == reason


def test_cached_tokens_are_told_apart_and_all_of_them_are_the_prompt() -> None:
    for cached in (0, 4, 11):
        usage = message_body("msg_1", "m", end(), Usage(11, 1, cached))["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 11
        assert usage["cache_read_input_tokens"] == cached


@pytest.mark.parametrize(
    ("reason", "type_", "status"), [("error", "api_error", 500), ("cancelled", "overloaded_error", 503)]
)
def test_an_abnormal_end_is_an_error_in_every_form(reason: Any, type_: str, status: int) -> None:
    pieces = content("a") + end(reason, error="not finite")
    with pytest.raises(ApiError) as caught:
        message_body("msg_1", "m", pieces, USAGE)
    assert caught.value.status == status
    events = events_of(stream_of(pieces))
    assert events[-1] == {"type": "error", "error": {"type": type_, "message": "not finite"}, "request_id": "req_1"}
    assert [event["type"] for event in events].count("error") == 1
    assert not {"message_delta", "message_stop"} & {event["type"] for event in events}


def test_nothing_follows_an_error_and_a_missing_end_is_one() -> None:
    stream = MessageStream("msg_1", "m", "req_1")
    stream.open(USAGE)
    assert stream.fail(unavailable("closing", 1)).startswith(b"event: error\n")
    assert stream.piece(content("late")[0]) == stream.close(USAGE) == stream.fail(unavailable("again", 1)) == b""
    broken = MessageStream("msg_1", "m", "req_1")
    broken.piece(content("a")[0])
    assert broken.close(USAGE).startswith(b"event: error\n")
    with pytest.raises(ApiError):
        message_body("msg_1", "m", content("a"), USAGE)


# -- Anthropic's own client -------------------------------------------------------------------------------------


def test_anthropics_client_reads_every_answer_as_it_was_meant() -> None:
    check_client(newest("anthropic"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", generations("anthropic"), ids=lambda folder: folder.name)
def test_every_generation_of_the_client_does(folder: Path) -> None:
    check_client(folder)


def without_nulls(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if value is not None}


def check_client(folder: Path) -> None:
    names = list(ANSWERS)
    bodies = {name: message_body("msg_1", "m", ANSWERS[name], USAGE) for name in names}
    failing = stream_of(content("a") + end("cancelled", error="closing"))
    cases = [Case.of_json("message", bodies[name]) for name in names]
    cases += [Case.of_stream("message stream", stream_of(ANSWERS[name])) for name in names]
    cases += [Case.of_stream("message helper", sse.KEEP_ALIVE + stream_of(ANSWERS[name]), 1) for name in names]
    cases += [
        Case.of_json("count", count_body(12)),
        Case.of_stream("message stream", failing),
        Case.of_stream("message helper", failing),
    ]
    results = iter(ask(folder, cases))
    for name in names:
        assert next(results) == bodies[name]
    for name in names:
        assert next(results) == events_of(stream_of(ANSWERS[name]))
    for name in names:
        final = next(results)
        blocks = [without_nulls(block) for block in final["content"]]  # the oldest adds "citations": null to texts
        assert blocks == bodies[name]["content"], name
        for key in ("id", "model", "role", "stop_reason", "stop_sequence"):
            assert final[key] == bodies[name][key]
        assert final["usage"] == bodies[name]["usage"]
    assert next(results) == {"input_tokens": 12}
    for raised in results:
        assert raised["body"]["error"] == {"type": "overloaded_error", "message": "closing"}
