"""The bodies of the server's routes as JSON schemas (2020-12), which /openapi.json shows."""

from typing import Any

from pellucid.inference.request import MAX_ALTERNATIVES
from pellucid.server.anthropic import MESSAGES_IGNORED, MESSAGES_REFUSED
from pellucid.server.openai import (
    CHAT_IGNORED,
    CHAT_REFUSED,
    COMPLETION_IGNORED,
    COMPLETION_REFUSED,
    EMBEDDING_IGNORED,
    MAX_INPUTS,
)
from pellucid.server.openai_sampling import MAX_GRAMMAR_LENGTH, MAX_STOP_LENGTH, MAX_STOPS

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def string(**limits: Any) -> Schema:
    return {"type": "string", **limits}


def integer(low: int | None = None, high: int | None = None) -> Schema:
    limits = {"minimum": low, "maximum": high}
    return {"type": "integer", **{name: value for name, value in limits.items() if value is not None}}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def boolean() -> Schema:
    return {"type": "boolean"}


def array(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    limit = {} if high is None else {"maxItems": high}
    return {"type": "array", "items": items, "minItems": low, **limit}


def one_of(*values: str | None) -> Schema:
    return {"enum": list(values)}


def fields(required: str, **properties: Schema) -> Schema:
    """An object; ``required``: the names that must be there, parted by spaces."""
    found: Schema = {"type": "object", "properties": properties}
    return found | ({"required": required.split()} if required else {})


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _optional(properties: dict[str, Schema]) -> dict[str, Schema]:
    return {name: nullable(schema) for name, schema in properties.items()}


def _request(required: dict[str, Schema], optional: dict[str, Schema], ignored: set[str], refused: Any = ()) -> Schema:
    """A body. Null is the same as absent; ignored fields may be anything; refused ones may only be null."""
    properties = required | _optional(optional) | {name: {} for name in sorted(ignored)}
    properties |= {name: {"type": "null", "description": "not supported"} for name in sorted(refused)}
    return {"type": "object", "required": list(required), "properties": properties}


# -- requests -----------------------------------------------------------------------------------------------

MODEL = string(minLength=1)
TOOL_NAME = string(pattern="^[A-Za-z0-9_.-]{1,128}$")
TOKEN_ID = integer(0, 2**31 - 1)
STOP = string(minLength=1, maxLength=MAX_STOP_LENGTH)
PROMPTS: Schema = {
    "anyOf": [
        string(),
        array(string(), 1, MAX_INPUTS),
        array(TOKEN_ID, 1),
        array(array(TOKEN_ID, 1), 1, MAX_INPUTS),
    ]
}
INPUTS: Schema = {
    "anyOf": [
        string(minLength=1),
        array(string(minLength=1), 1, MAX_INPUTS),
        array(TOKEN_ID, 1),
        array(array(TOKEN_ID, 1), 1, MAX_INPUTS),
    ]
}
RESPONSE_FORMAT: Schema = {
    "oneOf": [
        fields("type", type=one_of("text", "json_object")),
        fields("type json_schema", type=one_of("json_schema"), json_schema=fields("schema", schema={"type": "object"})),
        fields("type regex", type=one_of("regex"), regex=string(minLength=1, maxLength=MAX_GRAMMAR_LENGTH)),
        fields("type grammar", type=one_of("grammar"), grammar=string(minLength=1, maxLength=MAX_GRAMMAR_LENGTH)),
    ]
}
SAMPLING: dict[str, Schema] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "n": integer(1),
    "seed": integer(-(2**63), 2**64 - 1),
    "stop": {"anyOf": [STOP, array(STOP, 0, MAX_STOPS)]},
    "stop_token_ids": array(TOKEN_ID),
    "ignore_eos": boolean(),
    "min_tokens": integer(0),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": number(-100, 100),
    },
    "response_format": RESPONSE_FORMAT,
    "stream": boolean(),
    "stream_options": fields("", include_usage=nullable(boolean())),
    "cache_salt": string(),
}
TEXT_PART = fields("type text", type=one_of("text"), text=string())
CALL = fields(
    "function",
    id=nullable(string()),
    type=one_of("function", None),
    function=fields("name", name=string(), arguments=nullable(string())),
)
PARTS: Schema = {"anyOf": [string(), array(TEXT_PART)]}


def _answer(required: str, **properties: Schema) -> Schema:
    """A message of the assistant's: text, calls or reasoning must be there."""
    may_be = {
        "content": nullable(PARTS),
        "reasoning_content": nullable(string()),
        "tool_calls": nullable(array(CALL)),
    }
    return fields(f"role {required}", role=one_of("assistant"), **(may_be | properties))


MESSAGE: Schema = {
    "anyOf": [
        fields(
            "role content",
            role=one_of("system", "developer", "user", "tool", "function"),
            content=PARTS,
            name=nullable(string()),
            tool_call_id=nullable(string()),
        ),
        _answer("content", content=PARTS),
        _answer("tool_calls", tool_calls=array(CALL, 1)),
        _answer("reasoning_content", reasoning_content=string(minLength=1)),
    ]
}
FUNCTION = fields("name", name=TOOL_NAME, description=nullable(string()), parameters=nullable({"type": "object"}))
TOOL_CHOICE: Schema = {
    "anyOf": [
        one_of("auto", "none", "required"),
        fields("type function", type=one_of("function"), function=fields("name", name=TOOL_NAME)),
    ]
}
CHAT = _request(
    {"model": MODEL, "messages": array(MESSAGE, 1)},
    SAMPLING
    | {
        "max_tokens": integer(1),
        "max_completion_tokens": integer(1),
        "logprobs": boolean(),
        "top_logprobs": integer(0, MAX_ALTERNATIVES),
        "tools": array(fields("type function", type=one_of("function"), function=FUNCTION)),
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": boolean(),
        "reasoning_effort": one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "chat_template_kwargs": {"type": "object"},
        "modalities": array(one_of("text"), 0, 1),
    },
    CHAT_IGNORED,
    CHAT_REFUSED,
)
COMPLETION = _request(
    {"model": MODEL, "prompt": PROMPTS},
    SAMPLING
    | {
        "max_tokens": integer(0),
        "echo": boolean(),
        "logprobs": integer(0, MAX_ALTERNATIVES),
        "best_of": integer(1),
    },
    COMPLETION_IGNORED,
    COMPLETION_REFUSED,
)
EMBEDDING = _request(
    {"model": MODEL, "input": INPUTS},
    {"encoding_format": one_of("float", "base64"), "dimensions": integer(1)},
    EMBEDDING_IGNORED,
)

USER_BLOCK: Schema = {
    "oneOf": [
        TEXT_PART,
        fields(
            "type tool_use_id",
            type=one_of("tool_result"),
            tool_use_id=string(),
            content=nullable(PARTS),
            is_error=nullable(boolean()),
        ),
    ]
}
ANSWER_BLOCK: Schema = {
    "oneOf": [
        TEXT_PART,
        fields("type id name input", type=one_of("tool_use"), id=string(), name=string(), input={"type": "object"}),
        fields("type thinking", type=one_of("thinking"), thinking=string()),
        fields("type", type=one_of("redacted_thinking")),
    ]
}
TURN: Schema = {
    "oneOf": [
        fields("role content", role=one_of("user"), content={"anyOf": [string(), array(USER_BLOCK, 1)]}),
        fields("role content", role=one_of("assistant"), content={"anyOf": [string(), array(ANSWER_BLOCK)]}),
        fields("role content", role=one_of("system"), content=PARTS),
    ]
}
ANSWER_FORMAT = fields("type schema", type=one_of("json_schema"), schema={"type": "object"})
_MESSAGES_OPTIONAL: dict[str, Schema] = {
    "system": PARTS,
    "stop_sequences": array(STOP, 0, MAX_STOPS),
    "stream": boolean(),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(-1),
    "tools": array(
        fields(
            "name input_schema",
            type=one_of("custom", None),
            name=TOOL_NAME,
            description=nullable(string()),
            input_schema={"type": "object"},
        )
    ),
    "tool_choice": {
        "oneOf": [
            fields("type", type=one_of("auto", "any", "none"), disable_parallel_tool_use=nullable(boolean())),
            fields("type name", type=one_of("tool"), name=TOOL_NAME, disable_parallel_tool_use=nullable(boolean())),
        ]
    },
    "thinking": fields("type", type=one_of("enabled", "adaptive", "disabled"), budget_tokens=nullable(integer(1))),
    "output_config": fields(
        "", format=nullable(ANSWER_FORMAT), effort=one_of("low", "medium", "high", "xhigh", "max", None)
    ),
    "output_format": ANSWER_FORMAT,
}
_HISTORY = {"model": MODEL, "messages": array(TURN, 1)}
MESSAGES = _request(_HISTORY | {"max_tokens": integer(1)}, _MESSAGES_OPTIONAL, MESSAGES_IGNORED, MESSAGES_REFUSED)
COUNT = _request(_HISTORY, _MESSAGES_OPTIONAL, MESSAGES_IGNORED | {"max_tokens"}, MESSAGES_REFUSED)

REQUESTS = {
    "ChatRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "EmbeddingRequest": EMBEDDING,
    "MessagesRequest": MESSAGES,
    "CountTokensRequest": COUNT,
}
