"""What the server's routes answer, as JSON schemas (2020-12), which /openapi.json shows."""

from pellucid.server.openapi_schemas import (
    Schema,
    array,
    boolean,
    fields,
    integer,
    nullable,
    number,
    one_of,
    ref,
    string,
)

_NAT = integer(0)
_LOGPROB = number(-9999, 0)
_TOKEN = {"token": string(), "logprob": _LOGPROB, "bytes": array(integer(0, 255))}
_CALL = fields(
    "id type function",
    id=string(),
    type=one_of("function"),
    function=fields("name arguments", name=string(), arguments=string()),
)
_HEAD = {
    "id": string(),
    "created": _NAT,
    "model": string(),
    "system_fingerprint": nullable(string()),
    "usage": ref("Usage"),
}
_STOP_REASON: Schema = {"type": ["string", "integer"]}

ANSWERS: dict[str, Schema] = {
    "Usage": fields(
        "prompt_tokens completion_tokens total_tokens",
        prompt_tokens=_NAT,
        completion_tokens=_NAT,
        total_tokens=_NAT,
        prompt_tokens_details=fields("cached_tokens", cached_tokens=_NAT),
        completion_tokens_details=fields("reasoning_tokens", reasoning_tokens=_NAT),
    ),
    "ChatAnswer": fields(
        "id object created model choices usage",
        **_HEAD,
        object=one_of("chat.completion"),
        choices=array(
            fields(
                "index message finish_reason logprobs",
                index=_NAT,
                message=fields(
                    "role content",
                    role=one_of("assistant"),
                    content=nullable(string()),
                    refusal={"type": "null"},
                    reasoning_content=string(),
                    tool_calls=array(_CALL, 1),
                ),
                finish_reason=one_of("stop", "length", "tool_calls"),
                stop_reason=_STOP_REASON,
                logprobs=nullable(
                    fields(
                        "content",
                        content=array(
                            fields("token logprob bytes top_logprobs", **_TOKEN, top_logprobs=array(fields("", **_TOKEN)))
                        ),
                        refusal={"type": "null"},
                    )
                ),
            ),
            1,
        ),
    ),
    "CompletionAnswer": fields(
        "id object created model choices usage",
        **_HEAD,
        object=one_of("text_completion"),
        choices=array(
            fields(
                "index text finish_reason logprobs",
                index=_NAT,
                text=string(),
                finish_reason=one_of("stop", "length"),
                stop_reason=_STOP_REASON,
                logprobs=nullable(
                    fields(
                        "tokens token_logprobs top_logprobs text_offset",
                        tokens=array(string()),
                        token_logprobs=array(nullable(_LOGPROB)),
                        top_logprobs=array(nullable({"type": "object", "additionalProperties": _LOGPROB})),
                        text_offset=array(_NAT),
                    )
                ),
            ),
            1,
        ),
    ),
    "EmbeddingAnswer": fields(
        "object model data usage",
        object=one_of("list"),
        model=string(),
        data=array(
            fields(
                "object index embedding",
                object=one_of("embedding"),
                index=_NAT,
                embedding={"anyOf": [array({"type": "number"}, 1), string(minLength=4)]},
            ),
            1,
        ),
        usage=fields("prompt_tokens total_tokens", prompt_tokens=_NAT, total_tokens=_NAT),
    ),
    "Model": fields(
        "id object created owned_by type display_name created_at lifecycle max_model_len",
        id=string(),
        object=one_of("model"),
        created=_NAT,
        owned_by=string(),
        type=one_of("model"),
        display_name=string(),
        created_at=string(format="date-time"),
        lifecycle=one_of("active"),
        max_model_len=nullable(integer(1)),
    ),
    "ModelList": fields(
        "object data has_more first_id last_id",
        object=one_of("list"),
        data=array(ref("Model")),
        has_more=boolean(),
        first_id=nullable(string()),
        last_id=nullable(string()),
    ),
    "Message": fields(
        "id type role model content stop_reason stop_sequence usage",
        id=string(),
        type=one_of("message"),
        role=one_of("assistant"),
        model=string(),
        content=array(
            {
                "oneOf": [
                    fields("type text", type=one_of("text"), text=string(minLength=1)),
                    fields("type thinking signature", type=one_of("thinking"), thinking=string(), signature=string()),
                    fields(
                        "type id name input", type=one_of("tool_use"), id=string(), name=string(), input={"type": "object"}
                    ),
                ]
            }
        ),
        stop_reason=one_of("end_turn", "stop_sequence", "max_tokens", "model_context_window_exceeded", "tool_use"),
        stop_sequence=nullable(string()),
        usage=fields(
            "input_tokens output_tokens cache_read_input_tokens cache_creation_input_tokens",
            input_tokens=_NAT,
            output_tokens=_NAT,
            cache_read_input_tokens=_NAT,
            cache_creation_input_tokens=_NAT,
        ),
    ),
    "TokenCount": fields("input_tokens", input_tokens=_NAT),
    "OpenAIError": fields(
        "error",
        error=fields(
            "message type param code",
            message=string(minLength=1),
            type=one_of("invalid_request_error", "rate_limit_error", "server_error"),
            param=nullable(string()),
            code=nullable(string()),
        ),
    ),
    "AnthropicError": fields(
        "type error request_id",
        type=one_of("error"),
        error=fields(
            "type message",
            type=one_of(
                "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
                "request_too_large", "rate_limit_error", "api_error", "overloaded_error",
            ),
            message=string(minLength=1),
        ),
        request_id=string(),
    ),
    "Health": fields("status", status=one_of("ok", "failed"), problems=array(string())),
    "Ready": fields("status", status=string()),
    "State": fields("models", models={"type": "object", "additionalProperties": {"type": "object"}}),
    "Steps": fields("model steps", model=string(), steps=array({"type": "object"})),
}  # fmt: skip
