"""OpenAI's protocol: bodies in, bytes out, and what OpenAI's own client makes of them."""

import base64
import json
import math
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answer_pieces import ANSWERS, USAGE, call, chunks_of, conforming_events, content, end, reasoning, token
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vendor_clients import Case, ask, generations, newest

from pellucid.errors import RequestError
from pellucid.server import openai, openai_sampling
from pellucid.server.errors import ApiError, unavailable
from pellucid.server.fields import decode_body
from pellucid.server.generation import Ending, Generation, Grammar, Piece, TokenText, Tool, ToolChoice, Usage
from pellucid.server.openai import EmbeddingRequest, parse_chat, parse_completion, parse_embeddings
from pellucid.server.openai_completions import CompletionStream, Echo, completion_body
from pellucid.server.openai_encode import Answer, ChatStream, chat_body
from pellucid.server.openai_lists import ModelEntry, embeddings_body, model_body, models_body

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get", "description": "Gets.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "put"}},
]


def chat(**fields: Any) -> Generation:
    return parse_chat({"model": "m", "messages": HELLO} | fields)


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(message) for message in chat(messages=list(given)).messages or ()]


def refused(code: str | None, param: str | None, parse: Any, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, code, param)
    return error


# -- in: chat ---------------------------------------------------------------------------------------------------


def test_the_newer_name_of_the_limit_wins_and_none_leaves_the_window() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).params.max_tokens == 7
    assert chat(max_tokens=5, max_completion_tokens=None).params.max_tokens == 5
    assert chat(max_tokens=5).limit_given
    free = chat()
    assert not free.limit_given and free.params.max_tokens == openai.WHOLE_WINDOW


def test_zero_is_never_taken_for_absent() -> None:
    params = chat(temperature=0, top_p=0, seed=0, presence_penalty=0, top_k=0, min_tokens=0).params
    assert (params.temperature, params.top_p, params.seed, params.top_k) == (0, 0, 0, 0)
    assert chat(temperature=0.0).params.greedy and chat(top_p=0).params.greedy


def test_edges_of_ranges_are_in_and_what_is_past_them_is_not() -> None:
    edges: dict[str, tuple[float, float]] = {
        "temperature": (0, 2),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "n": (1, openai.MAX_CHOICES),
        "seed": (-(2**63), 2**64 - 1),
    }
    for name, (low, high) in edges.items():
        kind = "integer" if name in ("n", "seed") else "decimal"
        step = 1 if kind == "integer" else 1e-9
        for value in (low, high):
            chat(**{name: value})
        refused(f"{kind}_below_min_value", name, parse_chat, {"model": "m", "messages": HELLO, name: low - step})
        refused(f"{kind}_above_max_value", name, parse_chat, {"model": "m", "messages": HELLO, name: high + step})


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "n", "seed", "min_tokens"],
)
def test_a_number_of_hundreds_of_digits_is_out_of_range(name: str) -> None:
    for value in (10**400, -(10**400)):
        with pytest.raises(ApiError) as caught:
            chat(**{name: value})
        assert caught.value.status == 400 and caught.value.param == name
    refused(
        "decimal_above_max_value",
        "logit_bias.5",
        parse_chat,
        {"model": "m", "messages": HELLO, "logit_bias": {"5": 10**400}},
    )


def test_a_long_regular_expression_or_grammar_is_refused() -> None:
    for kind in ("regex", "grammar"):
        text = "a" * openai_sampling.MAX_GRAMMAR_LENGTH
        assert chat(response_format={"type": kind, kind: text}).grammar is not None
        body = {"model": "m", "messages": HELLO, "response_format": {"type": kind, kind: text + "a"}}
        refused("string_above_max_length", f"response_format.{kind}", parse_chat, body)


def test_minus_one_and_zero_keep_all_tokens() -> None:
    assert chat(top_k=-1).params == chat(top_k=0).params == chat().params
    refused("integer_below_min_value", "top_k", parse_chat, {"model": "m", "messages": HELLO, "top_k": -2})


def test_every_64_bit_seed_is_one_of_the_engines_and_no_two_are_the_same() -> None:
    given = (-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1)
    seeds = {chat(seed=seed).params.seed for seed in given}
    assert len(seeds) == len(given) and all(seed is not None and 0 <= seed < 2**64 for seed in seeds)
    assert chat().params.seed is None


def test_how_many_choices_may_be_asked_for_is_the_servers_to_say() -> None:
    assert parse_chat({"model": "m", "messages": HELLO, "n": 3}, max_n=3).params.n == 3
    with pytest.raises(ApiError) as caught:
        parse_chat({"model": "m", "messages": HELLO, "n": 4}, max_n=3)
    assert caught.value.code == "integer_above_max_value"


def test_logit_bias_has_ids_as_text() -> None:
    assert chat(logit_bias={"5": -100, "0": 1.5}).params.logit_bias == {5: -100, 0: 1.5}
    for bias in ({"x": 1}, {"-1": 1}, {"٣": 1}, {"": 1}, {"1.0": 1}, {"9" * 30: 1}):
        refused("invalid_value", "logit_bias", parse_chat, {"model": "m", "messages": HELLO, "logit_bias": bias})
    refused(
        "decimal_above_max_value",
        "logit_bias.5",
        parse_chat,
        {"model": "m", "messages": HELLO, "logit_bias": {"5": 101}},
    )
    refused("invalid_type", "logit_bias.5", parse_chat, {"model": "m", "messages": HELLO, "logit_bias": {"5": "1"}})


def test_stops_are_one_or_many() -> None:
    assert chat(stop="x").stop == ("x",)
    assert chat(stop=["a", "b", "c", "d", "e"]).stop == ("a", "b", "c", "d", "e")
    assert chat(stop=[]).stop == chat(stop=None).stop == ()
    refused("invalid_value", "stop", parse_chat, {"model": "m", "messages": HELLO, "stop": ""})
    refused("invalid_type", "stop", parse_chat, {"model": "m", "messages": HELLO, "stop": [1]})
    long, many = "x" * 1001, ["x"] * 65
    refused("string_above_max_length", "stop", parse_chat, {"model": "m", "messages": HELLO, "stop": long})
    refused("array_above_max_length", "stop", parse_chat, {"model": "m", "messages": HELLO, "stop": many})


def test_alternatives_need_logprobs() -> None:
    generation = chat(logprobs=True, top_logprobs=20)
    assert generation.logprobs and generation.params.top_logprobs == 20
    assert not chat().logprobs
    refused("invalid_value", "top_logprobs", parse_chat, {"model": "m", "messages": HELLO, "top_logprobs": 1})


def test_booleans_are_no_numbers_and_numbers_no_booleans() -> None:
    for field, value in (("max_tokens", True), ("temperature", False), ("stream", 1), ("n", 1.5), ("seed", "1")):
        refused("invalid_type", field, parse_chat, {"model": "m", "messages": HELLO, field: value})


def test_a_whole_number_may_be_written_with_a_point() -> None:
    params = chat(max_tokens=7.0, seed=1e3).params
    assert (params.max_tokens, params.seed) == (7, 1000) and type(params.max_tokens) is int


def test_response_formats_become_grammars() -> None:
    assert chat(response_format={"type": "text"}).grammar is None
    assert chat(response_format={"type": "json_object"}).grammar == Grammar("json_object")
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    grammar = chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}).grammar
    assert grammar is not None and grammar.kind == "json_schema" and json.loads(grammar.text or "") == schema
    assert chat(response_format={"type": "regex", "regex": "a+"}).grammar == Grammar("regex", "a+")
    assert chat(response_format={"type": "grammar", "grammar": "start: /a/"}).grammar == Grammar("lark", "start: /a/")
    for form, code, param in (
        ({}, "missing_required_parameter", "response_format.type"),
        ({"type": "xml"}, "invalid_value", "response_format.type"),
        ({"type": "json_schema"}, "missing_required_parameter", "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {}},
            "missing_required_parameter",
            "response_format.json_schema.schema",
        ),
        ("json", "invalid_type", "response_format"),
    ):
        refused(code, param, parse_chat, {"model": "m", "messages": HELLO, "response_format": form})


def test_usage_is_promised_only_for_streams() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage


def test_the_template_is_told_how_hard_to_think() -> None:
    assert chat(reasoning_effort="low").template_options == {"reasoning_effort": "low"}
    assert chat(reasoning_effort="none").template_options == {"reasoning_effort": "none", "enable_thinking": False}
    own = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).template_options
    assert own["enable_thinking"] is True


# -- in: conversations and tools --------------------------------------------------------------------------------


def test_roles_and_parts_become_the_templates() -> None:
    assert messages(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "why"},
        {"role": "user", "content": ""},
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "c", "reasoning_content": "why"},
        {"role": "user", "content": ""},
    ]


def test_calls_and_their_results_become_the_templates() -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a": {"b": [1]}}'}}
    bare = {"id": "c2", "type": "function", "function": {"name": "put", "arguments": ""}}
    assert messages(
        {"role": "assistant", "content": None, "tool_calls": [called, bare]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
        {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{}"}},
        {"role": "function", "name": "old", "content": "8"},
    ) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"a": {"b": [1]}}}},
                {"id": "c2", "type": "function", "function": {"name": "put", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "get"},
        {"role": "tool", "content": "ok", "tool_call_id": "c2", "name": "put"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "", "type": "function", "function": {"name": "old", "arguments": {}}}],
        },
        {"role": "tool", "content": "8", "name": "old"},
    ]


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"content": "x"}, "missing_required_parameter", "messages[0].role"),
        ({"role": "user"}, "missing_required_parameter", "messages[0].content"),
        ({"role": "user", "content": None}, "missing_required_parameter", "messages[0].content"),
        ({"role": "assistant", "content": None}, "missing_required_parameter", "messages[0].content"),
        ({"role": "user", "content": {"a": 1}}, "invalid_type", "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "invalid_type", "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "invalid_value", "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "missing_required_parameter", "messages[0].content[0].text"),
        ({"role": "tool", "tool_call_id": 5, "content": "x"}, "invalid_type", "messages[0].tool_call_id"),
        ("x", "invalid_type", "messages[0]"),
    ],
)
def test_a_wrong_message_is_named_by_its_path(message: Any, code: str, param: str) -> None:
    refused(code, param, parse_chat, {"model": "m", "messages": [message]})


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "nan", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 5000])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(ApiError) as caught:
        messages({"role": "assistant", "tool_calls": calls})
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[0].tool_calls[0].function.arguments")


def test_a_part_that_is_not_text_is_named() -> None:
    error = refused(
        "invalid_value", "messages[0].content[0].type", parse_chat,
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    )  # fmt: skip
    assert "image_url" in error.message


def test_tools_and_how_to_choose_among_them() -> None:
    generation = chat(tools=TOOLS)
    assert generation.tools == (Tool("get", "Gets.", {"type": "object"}), Tool("put"))
    assert generation.tool_choice == ToolChoice("auto")
    named = {"type": "function", "function": {"name": "put"}}
    assert chat(tools=TOOLS, tool_choice=named, parallel_tool_calls=False).tool_choice == ToolChoice(
        "named", "put", False
    )
    assert chat(tools=TOOLS, tool_choice="required").tool_choice.kind == "required"
    assert chat(tool_choice="none").tool_choice.kind == "none"
    assert chat(tools=[]).tools == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": TOOLS + TOOLS[:1]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ],
)
def test_tools_that_cannot_be_meant_are_refused(fields: dict[str, Any], param: str) -> None:
    refused("invalid_value", param, parse_chat, {"model": "m", "messages": HELLO} | fields)


# -- in: completions and embeddings -----------------------------------------------------------------------------


def complete(**fields: Any) -> Generation:
    return parse_completion({"model": "m", "prompt": "hello"} | fields)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([1.0, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert complete(prompt=prompt).prompts == prompts
    assert complete(prompt=prompt).messages is None


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        ([], "empty_array", "prompt"),
        ([[1], []], "empty_array", "prompt[1]"),
        (["a", 1], "invalid_type", "prompt[1]"),
        ([1, "a"], "invalid_type", "prompt[1]"),
        ([[1], "a"], "invalid_type", "prompt[1]"),
        ([[1, 2.5]], "invalid_type", "prompt[0][1]"),
        ([True], "invalid_type", "prompt[0]"),
        ([-1], "invalid_value", "prompt[0]"),
        ([math.nan], "invalid_type", "prompt[0]"),
        ([math.inf], "invalid_type", "prompt[0]"),
        ([2**31], "invalid_value", "prompt[0]"),
        ({}, "invalid_type", "prompt"),
        (["a"] * 2049, "array_above_max_length", "prompt"),
    ],
)
def test_prompts_of_another_form_are_named_by_their_path(prompt: Any, code: str, param: str) -> None:
    refused(code, param, parse_completion, {"model": "m", "prompt": prompt})


def test_prompts_times_choices_are_limited() -> None:
    assert complete(prompt=["a"] * 1024, n=2).params.n == 2
    body = {"model": "m", "prompt": ["a"] * 1025, "n": 2}
    refused("integer_above_max_value", "n", parse_completion, body)


def test_many_tools_are_read_in_little_time() -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(20_000)]
    began = time.process_time()
    assert len(chat(tools=tools).tools) == 20_000
    assert time.process_time() - began < 5  # comparing each with each would take minutes


def test_only_an_echo_may_draw_nothing() -> None:
    generation = complete(max_tokens=0, echo=True, logprobs=3)
    assert generation.params.max_tokens == 0 and generation.echo and generation.logprobs
    assert generation.params.prompt_logprobs == generation.params.top_logprobs == 3
    assert complete(logprobs=0).logprobs and complete(logprobs=0).params.prompt_logprobs is None
    assert complete().params.max_tokens == 16 and not complete().limit_given
    refused("integer_below_min_value", "max_tokens", parse_completion, {"model": "m", "prompt": "x", "max_tokens": 0})


@pytest.mark.parametrize("input_", ["", ["a", ""], [], [[]]])
def test_nothing_cannot_be_embedded(input_: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse_embeddings({"model": "m", "input": input_})
    assert caught.value.status == 400 and (caught.value.param or "").startswith("input")


def test_embeddings_are_numbers_unless_asked_otherwise() -> None:
    assert parse_embeddings({"model": "m", "input": "a"}) == EmbeddingRequest("m", ("a",))
    request = parse_embeddings({"model": "m", "input": [[1], [2]], "encoding_format": "base64", "dimensions": 2})
    assert request == EmbeddingRequest("m", ((1,), (2,)), "base64", 2)
    refused("integer_below_min_value", "dimensions", parse_embeddings, {"model": "m", "input": "a", "dimensions": 0})


# -- in: anything -----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted(openai.CHAT_FIELDS | openai.COMPLETION_FIELDS | openai.EMBEDDING_FIELDS)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "function", "x"])},
    optional={
        "content": JSON | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}), max_size=2),
        "tool_calls": st.lists(st.fixed_dictionaries({"id": JSON, "function": st.fixed_dictionaries({"name": JSON})})),
        "name": JSON,
    },
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m") | JSON, "messages": st.lists(MESSAGE, max_size=3), "prompt": JSON, "input": JSON},
).flatmap(lambda fixed: st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5).map(lambda more: more | fixed))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES)
def test_no_body_raises_anything_but_a_request_error(body: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion, parse_embeddings):
        try:
            parsed = parse(body)
        except ApiError as error:
            assert error.status == 400 and error.code
        else:
            assert parsed.model == body["model"]


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_raise_anything_but_a_request_error(data: bytes) -> None:
    try:
        body = decode_body(data)
    except RequestError as error:
        assert isinstance(error, ApiError) and error.status == 400
    else:
        assert body == json.loads(data)


def test_depth_size_and_halves_of_characters_are_limited() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' * depth + b"1" + b"}" * depth

    assert decode_body(nested(64))
    for depth in (65, 100_000):
        with pytest.raises(ApiError, match="deeper than 64"):
            decode_body(nested(depth))
    assert decode_body(b'{"a": 1}', max_bytes=8) == {"a": 1}
    with pytest.raises(ApiError) as caught:
        decode_body(b'{"a": 12}', max_bytes=8)
    assert caught.value.status == 413
    assert decode_body(rb'{"a": "\ud83d\ude00"}') == {"a": "😀"}
    with pytest.raises(ApiError) as caught:
        decode_body(rb'{"a": [{"b": "\ud83d"}]}')
    assert caught.value.param == "a[0].b"
    with pytest.raises(ApiError, match="surrogate"):
        decode_body(rb'{"\udc00": 1}')
    assert decode_body(b'{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ApiError, match="not JSON"):
        decode_body(b'{"max_tokens": ' + b"9" * 5000 + b"}")


# -- out: chat --------------------------------------------------------------------------------------------------

ANSWER = Answer(id="chatcmpl-1", model="m", created=5, fingerprint="fp")


def stream_of(answer: Answer, pieces: Sequence[Piece]) -> bytes:
    stream = ChatStream(answer)
    return stream.open(USAGE) + b"".join(map(stream.piece, pieces)) + stream.close(USAGE)


def test_bytes_of_a_chat_stream() -> None:
    """Golden: written by hand from the wire's description."""
    head = '"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m","system_fingerprint":"fp"'

    def chunk(delta: str, finish: str = "null") -> str:
        return (
            f'data: {{{head},"choices":[{{"index":0,"finish_reason":{finish},"delta":{delta},"logprobs":null}}]}}\n\n'
        )

    expected = chunk('{"role":"assistant","content":""}') + chunk('{"content":"Hé"}') + chunk('{"content":"\\n"}')
    expected += f'data: {{{head},"choices":[{{"index":0,"finish_reason":"length","delta":{{}},"logprobs":null}}]}}\n\n'
    expected += "data: [DONE]\n\n"
    assert stream_of(ANSWER, content("Hé", "\n") + end("length")).decode() == expected


def accumulate(chunks: list[dict[str, Any]], num_choices: int = 1) -> list[dict[str, Any]]:
    """Choices as a client adds them up: an independent account of what the deltas say."""
    choices: list[dict[str, Any]] = [
        {"index": i, "message": {}, "finish_reason": None, "logprobs": []} for i in range(num_choices)
    ]
    for chunk in chunks:
        for told in chunk["choices"]:
            choice = choices[told["index"]]
            assert choice["finish_reason"] is None, "nothing follows the finish"
            message, delta = choice["message"], told["delta"]
            assert not ("reasoning_content" in delta and "content" in delta)
            for name in ("role", "content", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"id": "", "type": part["type"], "function": {"name": "", "arguments": ""}})
                made, function = calls[part["index"]], part["function"]
                made["id"] += part.get("id", "")
                made["function"]["name"] += function.get("name", "")
                made["function"]["arguments"] += function["arguments"]
            choice["logprobs"] += (told["logprobs"] or {"content": []})["content"]
            choice["finish_reason"] = told["finish_reason"]
            if "stop_reason" in told:
                choice["stop_reason"] = told["stop_reason"]
    return choices


@pytest.mark.parametrize("name", ANSWERS)
def test_a_chat_stream_adds_up_to_the_body(name: str) -> None:
    answer = replace(ANSWER, logprobs=True)
    body = chat_body(answer, ANSWERS[name], USAGE)
    (choice,) = accumulate(chunks_of(stream_of(answer, ANSWERS[name])))
    (whole,) = body["choices"]
    message = {key: value for key, value in whole["message"].items() if key != "refusal"}
    assert choice["message"] | {"content": choice["message"]["content"] or message["content"]} == message
    assert (choice["finish_reason"], choice["logprobs"]) == (whole["finish_reason"], whole["logprobs"]["content"])
    assert choice.get("stop_reason") == whole.get("stop_reason")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("text", "stop"),
        ("stop string", "stop"),
        ("thought", "length"),
        ("window", "length"),
        ("tool", "tool_calls"),
        ("nothing", "stop"),
    ],
)
def test_why_it_ended(name: str, reason: str) -> None:
    body = chat_body(ANSWER, ANSWERS[name], USAGE)
    assert body["choices"][0]["finish_reason"] == reason


def test_a_call_that_the_limit_cut_ends_with_length() -> None:
    body = chat_body(ANSWER, call(0, "get", '{"a":') + end("length"), USAGE)
    assert body["choices"][0]["finish_reason"] == "length"


def test_which_stop_it_was_is_told() -> None:
    assert chat_body(ANSWER, ANSWERS["stop string"], USAGE)["choices"][0]["stop_reason"] == "END"
    assert chat_body(ANSWER, end("stop_string", 42), USAGE)["choices"][0]["stop_reason"] == 42
    assert "stop_reason" not in chat_body(ANSWER, ANSWERS["text"], USAGE)["choices"][0]


def test_a_chat_body_has_what_clients_read() -> None:
    body = chat_body(ANSWER, ANSWERS["all"], USAGE)
    assert body == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "So",
                    "refusal": None,
                    "reasoning_content": "why",
                    "tool_calls": [
                        {"id": "call_0x", "type": "function", "function": {"name": "get", "arguments": '{"q": null}'}}
                    ],
                },
                "finish_reason": "tool_calls",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 11,
            "completion_tokens": 7,
            "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 2},
        },
    }
    assert chat_body(ANSWER, ANSWERS["tool"], USAGE)["choices"][0]["message"]["content"] is None
    assert chat_body(ANSWER, ANSWERS["nothing"], USAGE)["choices"][0]["message"]["content"] == ""


def test_choices_are_introduced_in_order_and_told_apart() -> None:
    answer = replace(ANSWER, num_choices=3)
    pieces = [*content("b", choice=1), *content("a", "a", choice=0), *end(choice=1), *content("c", choice=2)]
    pieces += [*end("length", choice=2), *end(choice=0)]
    chunks = chunks_of(stream_of(answer, pieces))
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert roles == [0, 1, 2], "the role comes once"
    told = accumulate(chunks, 3)
    assert [choice["message"]["content"] for choice in told] == ["aa", "b", "c"]
    assert [choice["finish_reason"] for choice in told] == ["stop", "stop", "length"]
    whole = chat_body(answer, pieces, USAGE)["choices"]
    assert [(c["index"], c["message"]["content"]) for c in whole] == [(0, "aa"), (1, "b"), (2, "c")]


def test_usage_comes_last_and_only_where_it_was_asked_for() -> None:
    plain = chunks_of(stream_of(ANSWER, ANSWERS["text"]))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)
    *chunks, last = chunks_of(stream_of(replace(ANSWER, include_usage=True), ANSWERS["text"]))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == chat_body(ANSWER, ANSWERS["text"], USAGE)["usage"]


def test_tool_deltas_tell_id_and_name_once() -> None:
    chunks = chunks_of(stream_of(ANSWER, ANSWERS["text and tools"]))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert parts[0] == {
        "index": 0,
        "id": "call_0x",
        "type": "function",
        "function": {"name": "get", "arguments": ""},
    }
    assert parts[1] == {"index": 0, "function": {"arguments": "{}"}}
    assert [part["index"] for part in parts] == [0, 0, 1, 1, 1]
    assert json.loads(parts[3]["function"]["arguments"] + parts[4]["function"]["arguments"]) == {"x": "é"}


def test_logprobs_tell_bytes_and_alternatives_and_nothing_that_json_lacks() -> None:
    half = TokenText(7, "\ufffd", b"\xe6\x9d", -0.25, ((7, "\ufffd", b"\xe6\x9d", -0.25), (1, "a", b"a", -2.0)))
    whole = TokenText(8, "\ufffd", b"\xb1", -math.inf, ((9, "b", b"b", -0.1), (8, "\ufffd", b"\xb1", -math.inf)))
    pieces = [Piece(0, "content", "東", (half, whole)), *end()]
    answer = replace(ANSWER, logprobs=True, top_logprobs=1)
    body = chat_body(answer, pieces, USAGE)
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "\ufffd",
            "logprob": -0.25,
            "bytes": [0xE6, 0x9D],
            "top_logprobs": [{"token": "\ufffd", "logprob": -0.25, "bytes": [0xE6, 0x9D]}],
        },
        {
            "token": "\ufffd",
            "logprob": -9999.0,
            "bytes": [0xB1],
            "top_logprobs": [{"token": "b", "logprob": -0.1, "bytes": [98]}],
        },
    ]
    entries = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "東"
    assert chat_body(ANSWER, pieces, USAGE)["choices"][0]["logprobs"] is None


def test_logprobs_come_with_the_text_that_they_are_of() -> None:
    held = [Piece(0, "content", "ab"), Piece(0, "content", "c", (token("ab"), token("c")))]
    last = [Piece(0, "end", tokens=(token(""),), ending=end()[0].ending)]
    chunks = chunks_of(stream_of(replace(ANSWER, logprobs=True), held + last))
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [None if one is None else [entry["token"] for entry in one["content"]] for one in told] == [
        None,
        None,
        ["ab", "c"],
        [""],
    ]
    body = chat_body(replace(ANSWER, logprobs=True), held + last, USAGE)
    assert [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] == ["ab", "c", ""]


@pytest.mark.parametrize(
    ("reason", "status", "type_"), [("error", 500, "server_error"), ("cancelled", 503, "server_error")]
)
def test_an_abnormal_end_is_an_error_in_every_form(reason: Any, status: int, type_: str) -> None:
    pieces = content("a") + end(reason, error="not finite")
    with pytest.raises(ApiError) as caught:
        chat_body(ANSWER, pieces, USAGE)
    assert caught.value.status == status and caught.value.message == "not finite"
    events = conforming_events([stream_of(ANSWER, pieces)])
    assert [data for _, data in events].count("[DONE]") == 0
    last = json.loads(events[-1][1])
    assert last == {"error": {"message": "not finite", "type": type_, "param": None, "code": None}}
    assert sum("error" in json.loads(data) for _, data in events) == 1


def test_nothing_follows_an_error_and_a_missing_end_is_one() -> None:
    stream = ChatStream(ANSWER)
    stream.open(USAGE)
    assert b'"error"' in stream.fail(unavailable("closing", 1))
    assert stream.piece(content("late")[0]) == stream.close(USAGE) == stream.fail(unavailable("again", 1)) == b""
    broken = ChatStream(ANSWER)
    broken.piece(content("a")[0])
    assert b'"error"' in broken.close(USAGE)
    with pytest.raises(ApiError):
        chat_body(ANSWER, content("a"), USAGE)


# -- out: completions -------------------------------------------------------------------------------------------

TEXT = replace(ANSWER, id="cmpl-1", logprobs=True, top_logprobs=2)


def completion_stream(answer: Answer, pieces: Sequence[Piece], echoes: Sequence[Echo] = ()) -> bytes:
    stream = CompletionStream(answer, echoes)
    return stream.open(USAGE) + b"".join(map(stream.piece, pieces)) + stream.close(USAGE)


def join_completions(chunks: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """Choices as a client adds them up."""
    choices: list[dict[str, Any]] = [{"index": i, "text": "", "logprobs": None} for i in range(num_choices)]
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        for told in chunk["choices"]:
            choice = choices[told["index"]]
            choice["text"] += told["text"]
            choice["finish_reason"] = told["finish_reason"]
            if told["logprobs"] is not None:
                if choice["logprobs"] is None:
                    choice["logprobs"] = {name: [] for name in told["logprobs"]}
                for name, values in told["logprobs"].items():
                    choice["logprobs"][name] += values
    return choices


def test_several_prompts_are_told_prompt_by_prompt_with_their_echo() -> None:
    answer = replace(TEXT, num_choices=4, logprobs=False)
    echoes = [Echo("P"), Echo("Q")]
    pieces = [piece for i in (2, 0, 3, 1) for piece in [*content(f"-{i}", choice=i), *end(choice=i)]]
    body = completion_body(answer, pieces, USAGE, echoes)
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "P-0"), (1, "P-1"), (2, "Q-2"), (3, "Q-3")]
    chunks = chunks_of(completion_stream(answer, pieces, echoes))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:4]] == ["P", "P", "Q", "Q"]
    assert join_completions(chunks, 4) == body["choices"]


def test_offsets_count_characters_and_find_each_token() -> None:
    """Tokens that begin inside a character, a space that was dropped at the start, and text held back over pieces."""
    words = [" Hi", " 東", "!", " 👩", "\u200d🚀", "x"]
    whole = "".join(words)[1:]
    tokens = [token(word) for word in words]
    pieces = [
        Piece(0, "content", whole[:1]),
        Piece(0, "content", whole[1:4], tuple(tokens[:1])),
        Piece(0, "content", whole[4:], tuple(tokens[1:])),
        *end(),
    ]
    body = completion_body(TEXT, pieces, USAGE)
    logprobs = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == whole
    assert logprobs["tokens"] == words
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0
    for word, offset in zip(words[1:], offsets[1:], strict=True):
        assert whole[offset:].startswith(word)
    assert join_completions(chunks_of(completion_stream(TEXT, pieces)), 1) == body["choices"]


def test_a_token_inside_a_character_begins_where_the_character_does() -> None:
    data = "a東b".encode()
    halves = [data[:2], data[2:3], data[3:]]
    tokens = tuple(TokenText(i, half.decode("utf-8", "replace"), half, -1.0) for i, half in enumerate(halves))
    body = completion_body(TEXT, [Piece(0, "content", "a東b", tokens), *end()], USAGE)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["tokens"] == ["bytes:\\x61\\xe6", "bytes:\\x9d", "bytes:\\xb1\\x62"]


def test_an_echo_shifts_offsets_and_its_first_token_is_predicted_by_nothing() -> None:
    echo = Echo("Ab c", (token("Ab", logprob=-9), token(" c", logprob=-2.0, top=[("x", -0.1)])))
    pieces = [Piece(0, "content", "!d", (token("!", logprob=-1.0, top=[("!", -1.0)]), token("d"))), *end()]
    body = completion_body(TEXT, pieces, USAGE, [echo])
    (choice,) = body["choices"]
    assert choice["text"] == "Ab c!d"
    assert choice["logprobs"] == {
        "tokens": ["Ab", " c", "!", "d"],
        "token_logprobs": [None, -2.0, -1.0, -0.5],
        "top_logprobs": [None, {"x": -0.1, " c": -2.0}, {"!": -1.0}, {"d": -0.5}],
        "text_offset": [0, 2, 4, 5],
    }
    assert join_completions(chunks_of(completion_stream(TEXT, pieces, [echo])), 1) == body["choices"]


def test_offsets_count_a_prompt_whose_tokens_are_not_told() -> None:
    body = completion_body(TEXT, content("!", "d") + end(), USAGE, [Echo("Ab c")])
    assert body["choices"][0]["logprobs"]["text_offset"] == [4, 5]


def test_scoring_only_draws_nothing() -> None:
    echo = Echo("Ab", (token("A"), token("b", logprob=-3.0)))
    body = completion_body(TEXT, end("length"), USAGE, [echo])
    assert body["choices"][0]["text"] == "Ab" and body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -3.0]


def test_a_completion_without_logprobs_says_so() -> None:
    body = completion_body(replace(TEXT, logprobs=False), ANSWERS["text"], USAGE)
    assert body["choices"][0]["logprobs"] is None
    assert body["object"] == "text_completion" and body["usage"]["total_tokens"] == 18


CUTS = st.lists(st.text(max_size=4), max_size=8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(CUTS, st.data())
def test_however_text_and_tokens_are_cut_offsets_are_those_of_the_text(words: list[str], data: st.DataObject) -> None:
    """Tokens are told with, or after, the piece that completes their text."""
    text = "".join(words)
    pieces, told, sent = [], 0, 0
    while told < len(text):
        size = data.draw(st.integers(1, len(text) - told))
        piece, told = text[told : told + size], told + size
        ready = sum(1 for i in range(len(words)) if len("".join(words[: i + 1])) <= told)
        ready = data.draw(st.integers(sent, ready))
        pieces.append(Piece(0, "content", piece, tuple(token(word) for word in words[sent:ready])))
        sent = ready
    last = Piece(0, "end", tokens=tuple(token(word) for word in words[sent:]), ending=end()[0].ending)
    body = completion_body(TEXT, [*pieces, last], USAGE)
    assert body["choices"][0]["text"] == text
    expected = [len("".join(words[:i])) for i in range(len(words))]
    assert body["choices"][0]["logprobs"]["text_offset"] == expected


# -- out: embeddings and models ---------------------------------------------------------------------------------


def test_base64_is_little_endian_float32() -> None:
    vectors = [[1.0, -0.5, 3.25], [0.1, 0.0, 1e-20]]
    request = EmbeddingRequest("m", ("a", "b"), "base64")
    body = embeddings_body(request, vectors, 5)
    for told, vector in zip(body["data"], vectors, strict=True):
        assert base64.b64decode(told["embedding"]) == struct.pack("<3f", *vector)
    plain = embeddings_body(replace(request, encoding="float"), vectors, 5)
    assert [told["embedding"] for told in plain["data"]] == [
        [struct.unpack("<f", struct.pack("<f", value))[0] for value in vector] for vector in vectors
    ]
    assert plain["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert [told["index"] for told in plain["data"]] == [0, 1]


MODELS = [ModelEntry("org/a", 1_700_000_000, 2048), ModelEntry("b", 1_700_000_000)]


def test_one_list_of_models_has_what_both_vendors_need() -> None:
    body = models_body(MODELS)
    assert (body["object"], body["has_more"], body["first_id"], body["last_id"]) == ("list", False, "org/a", "b")
    assert body["data"][0] == model_body(MODELS[0]) == {
        "id": "org/a",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "pellucid",
        "type": "model",
        "display_name": "org/a",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_model_len": 2048,
    }  # fmt: skip


def test_reasoning_is_told_before_content_and_apart_from_it() -> None:
    deltas = [
        chunk["choices"][0]["delta"] for chunk in chunks_of(stream_of(ANSWER, reasoning("a") + content("b") + end()))
    ]
    assert deltas == [{"role": "assistant", "content": ""}, {"reasoning_content": "a"}, {"content": "b"}, {}]


# -- OpenAI's own client ----------------------------------------------------------------------------------------


def test_openais_client_reads_every_answer_as_it_was_meant() -> None:
    check_client(newest("openai"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", generations("openai"), ids=lambda folder: folder.name)
def test_every_generation_of_the_client_does(folder: Path) -> None:
    check_client(folder)
    check_client_on_the_rest(folder)


def check_client(folder: Path) -> None:
    answer = replace(ANSWER, logprobs=True, include_usage=True)
    bodies = {name: chat_body(answer, pieces, USAGE) for name, pieces in ANSWERS.items()}
    names = list(ANSWERS)
    cases = [Case.of_json("chat", bodies[name]) for name in names]
    cases += [Case.of_stream("chat stream", stream_of(answer, ANSWERS[name])) for name in names]
    helped = [name for name in names if bodies[name]["choices"][0]["finish_reason"] != "length"]
    cases += [Case.of_stream("chat helper", stream_of(ANSWER, ANSWERS[name]), 1) for name in helped]
    results = iter(ask(folder, cases))
    for name in names:
        assert next(results) == bodies[name]
    for name in names:
        chunks = next(results)
        assert chunks == chunks_of(stream_of(answer, ANSWERS[name]))
        assert chunks[-1]["usage"] == bodies[name]["usage"]
    for name in helped:
        final, whole = next(results)["choices"][0], bodies[name]["choices"][0]
        assert final["finish_reason"] == whole["finish_reason"]
        assert (final["message"].get("content") or None) == (whole["message"]["content"] or None)
        assert final["message"]["role"] == "assistant"
        for made, meant in zip(
            final["message"].get("tool_calls") or [], whole["message"].get("tool_calls") or [], strict=True
        ):
            assert (made["id"], made["function"]["name"]) == (meant["id"], meant["function"]["name"])
            assert made["function"]["arguments"] == meant["function"]["arguments"]


def test_openais_client_reads_choices_completions_embeddings_models_and_errors() -> None:
    check_client_on_the_rest(newest("openai"))


def check_client_on_the_rest(folder: Path) -> None:
    several = replace(ANSWER, num_choices=2)
    pieces = content("b", choice=1) + content("a") + end(choice=1) + end()
    echo = Echo("Ab", (token("A"), token("b")))
    text = completion_body(TEXT, ANSWERS["text"], USAGE, [echo])
    failing = content("a") + end("error", error="not finite")
    vectors = [[0.25, -1.0]]
    request = EmbeddingRequest("m", ("x",), "base64")
    cases = [
        Case.of_stream("chat helper", stream_of(several, pieces), 3),
        Case.of_json("completion", text),
        Case.of_stream("completion stream", completion_stream(TEXT, ANSWERS["text"], [echo])),
        Case.of_json("embeddings", embeddings_body(request, vectors, 1)),
        Case.of_json("models", models_body(MODELS)),
        Case.of_stream("chat stream", stream_of(ANSWER, failing)),
        Case.of_stream("chat helper", b": keep-alive\n\n" + stream_of(ANSWER, ANSWERS["text"]) + b": keep-alive\n\n"),
    ]
    both, completion, chunks, embedded, models, error, alive = ask(folder, cases)
    assert [choice["message"]["content"] for choice in both["choices"]] == ["a", "b"]
    assert completion == text
    assert join_completions(chunks, 1) == text["choices"]
    assert embedded["data"][0]["embedding"] == vectors[0]
    assert models == models_body(MODELS)["data"]
    assert error["raised"] == "APIError" and error["message"] == "not finite" and error["type"] == "server_error"
    assert alive["choices"][0]["message"]["content"] == "Hello, 東京 👩🏽‍🚀\u2028\r\n"


def character_spans(data):
    """The bytes of each character that ``data`` is shown as; broken ones as Python replaces them."""
    spans, start = [], 0
    while start < len(data):
        for size in range(1, 5):
            try:
                data[start : start + size].decode()
                break
            except UnicodeDecodeError as error:
                if error.reason != "unexpected end of data" or start + size >= len(data):
                    size = max(1, error.end - error.start)
                    break
        spans.append((start, start + size))
        start += size
    return spans


def test_offsets_are_where_tokens_begin_whatever_bytes_they_hold():
    rng = random.Random(0)
    for _ in range(2000):
        tokens = [bytes(rng.choices(b"A\xe2\x82\xac\x80\xf0\x9f\xff\xc3", k=rng.randint(1, 3))) for _ in range(5)]
        data = b"".join(tokens)
        text, spans = data.decode(errors="replace"), character_spans(data)
        assert len(spans) == len(text)
        pieces = [
            Piece(0, "content", text, tuple(TokenText(1, "", token, -1.0) for token in tokens)),
            Piece(0, "end", ending=Ending("stop", num_tokens=5)),
        ]
        body = completion_body(Answer(id="a", model="m", created=1, logprobs=True), pieces, Usage(1))
        starts = [len(b"".join(tokens[:i])) for i in range(5)]
        expected = [next(i for i, (first, end) in enumerate(spans) if first <= start < end) for start in starts]
        assert body["choices"][0]["logprobs"]["text_offset"] == expected
