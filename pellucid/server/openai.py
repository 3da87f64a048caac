"""OpenAI's bodies in: chat completions, completions and embeddings. Answers go out through `openai_encode`.

What each field does stands in docs/serving.md; a test reads its table and drives these functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pellucid.inference.request import MAX_ALTERNATIVES
from pellucid.server.errors import invalid
from pellucid.server.fields import Fields, check_ids, invalid_value, shown, wrong_type
from pellucid.server.generation import Generation
from pellucid.server.openai_messages import read_messages, read_tool_choice, read_tools
from pellucid.server.openai_sampling import read_grammar, read_sampling, read_stop

WHOLE_WINDOW = 2**31 - 1
"""``max_tokens`` where the client names none and the answer may fill the window."""
MAX_CHOICES = 128
MAX_INPUTS = 2048
"""Texts in one request for embeddings; prompts, and choices of them all, in one for completions."""

_SHARED = {
    "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
    "stop", "stop_token_ids", "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "response_format", "cache_salt",
}  # fmt: skip
CHAT_SUPPORTED = _SHARED | {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "reasoning_effort", "modalities", "chat_template_kwargs",
}  # fmt: skip
CHAT_IGNORED = {
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "metadata", "store", "service_tier", "verbosity", "prediction",
}  # fmt: skip
"""They change nothing here, and are no mistake."""
_GUIDED = "say it as response_format, see docs/serving.md"
CHAT_REFUSED = {
    "functions": "give tools",
    "function_call": "give tool_choice",
    "audio": "answers are text",
    "moderation": "this server does not moderate",
    "web_search_options": "this server does not search",
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "structured_outputs": _GUIDED,
}
"""To ignore these would give another answer than was asked for."""
COMPLETION_SUPPORTED = _SHARED | {"prompt", "echo", "best_of"}
COMPLETION_IGNORED = {"user"}
COMPLETION_REFUSED = {
    "suffix": "models continue a prompt, they do not fill a gap",
    **{name: why for name, why in CHAT_REFUSED.items() if why is _GUIDED},
}
EMBEDDING_SUPPORTED = {"model", "input", "encoding_format", "dimensions"}
EMBEDDING_IGNORED = {"user"}

CHAT_FIELDS = CHAT_SUPPORTED | CHAT_IGNORED | CHAT_REFUSED.keys()
COMPLETION_FIELDS = COMPLETION_SUPPORTED | COMPLETION_IGNORED | COMPLETION_REFUSED.keys()
EMBEDDING_FIELDS = EMBEDDING_SUPPORTED | EMBEDDING_IGNORED


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts, or ids, to be embedded. What depends on the model is checked by who has it."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    encoding: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    """Keep so many of the first components, normalised again; None keeps all."""


def parse_chat(body: Mapping[str, Any], *, max_n: int = MAX_CHOICES) -> Generation:
    """A body of /v1/chat/completions.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(body)
    fields.require("model", "messages")
    _refuse(fields, CHAT_REFUSED)
    messages = read_messages(fields)
    if fields.array("modalities") not in ([], ["text"]):
        raise invalid_value("modalities", f'must be ["text"], got {shown(fields.raw("modalities"))}; answers are text')
    logprobs, top = fields.flag("logprobs"), fields.whole("top_logprobs", None, 0, MAX_ALTERNATIVES)
    if top and not logprobs:
        raise invalid_value("top_logprobs", "is given without logprobs; set logprobs to true")
    older = fields.whole("max_tokens", None, 1)
    limit = fields.whole("max_completion_tokens", older, 1)
    tools = read_tools(fields)
    return Generation(
        model=fields.text("model", "", empty=False),
        messages=messages,
        params=read_sampling(fields, WHOLE_WINDOW if limit is None else limit, max_n, top_logprobs=top or 0),
        stop=read_stop(fields),
        ignore_eos=fields.flag("ignore_eos"),
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        grammar=read_grammar(fields),
        template_options=_template_options(fields),
        logprobs=logprobs,
        stream=fields.flag("stream"),
        include_usage=_include_usage(fields),
        cache_salt=fields.text("cache_salt", ""),
        limit_given=limit is not None,
    )


def parse_completion(body: Mapping[str, Any], *, max_n: int = MAX_CHOICES) -> Generation:
    """A body of /v1/completions. With ``echo`` and ``logprobs`` the prompt's log-probabilities are asked for as well.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = Fields(body)
    fields.require("model", "prompt")
    _refuse(fields, COMPLETION_REFUSED)
    prompts = read_prompts(fields, "prompt")
    echo = fields.flag("echo")
    top = fields.whole("logprobs", None, 0, MAX_ALTERNATIVES)
    limit = fields.whole("max_tokens", None, 0 if echo else 1)
    params = read_sampling(
        fields, 16 if limit is None else limit, max_n, top_logprobs=top or 0, prompt_logprobs=top if echo else None
    )
    if len(prompts) * params.n > MAX_INPUTS:
        message = f"prompt and n ask for {len(prompts) * params.n:,} choices, at most {MAX_INPUTS:,}; ask in parts"
        raise invalid(message, "integer_above_max_value", "n")
    if fields.whole("best_of", params.n, 1) != params.n:
        raise invalid_value("best_of", f"must equal n, which is {params.n}; every choice is given back")
    return Generation(
        model=fields.text("model", "", empty=False),
        prompts=prompts,
        params=params,
        stop=read_stop(fields),
        ignore_eos=fields.flag("ignore_eos"),
        grammar=read_grammar(fields),
        echo=echo,
        logprobs=top is not None,
        stream=fields.flag("stream"),
        include_usage=_include_usage(fields),
        cache_salt=fields.text("cache_salt", ""),
        limit_given=limit is not None,
    )


def parse_embeddings(body: Mapping[str, Any]) -> EmbeddingRequest:
    """A body of /v1/embeddings.

    Raises:
        ApiError: 400, naming the field; an empty text or list of ids is refused.
    """
    fields = Fields(body)
    fields.require("model", "input")
    inputs = read_prompts(fields, "input")
    for i, one in enumerate(inputs):
        if not one:
            path = "input" if len(inputs) == 1 else f"input[{i}]"
            raise invalid_value(path, "is empty; there is nothing to embed")
    encoding = fields.choice("encoding_format", "float", ("float", "base64"))
    return EmbeddingRequest(
        model=fields.text("model", "", empty=False),
        inputs=inputs,
        encoding="base64" if encoding == "base64" else "float",
        dimensions=fields.whole("dimensions", None, 1),
    )


def read_prompts(fields: Fields, name: str) -> tuple[str | tuple[int, ...], ...]:
    """A string, strings, ids or lists of ids."""
    value, path = fields.raw(name), fields.path(name)
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise wrong_type(path, "a string or an array", value)
    items = fields.array(name, empty=False)
    if isinstance(items[0], int | float):
        return (check_ids(items, path),)
    if len(items) > MAX_INPUTS:
        raise invalid(f"{path} has {len(items):,} entries, at most {MAX_INPUTS:,}", "array_above_max_length", path)
    if isinstance(items[0], str):
        for i, item in enumerate(items):
            if not isinstance(item, str):
                raise wrong_type(f"{path}[{i}]", "a string as the first is", item)
        return tuple(items)
    return tuple(check_ids(item, f"{path}[{i}]") for i, item in enumerate(items))


def _refuse(fields: Fields, refused: Mapping[str, str]) -> None:
    for name, why in refused.items():
        fields.refuse(name, why)


def _template_options(fields: Fields) -> dict[str, Any]:
    """``chat_template_kwargs``, and ``reasoning_effort`` under its own name; "none" switches thinking off."""
    effort = fields.choice("reasoning_effort", None, ("none", "minimal", "low", "medium", "high", "xhigh", "max"))
    options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        options["enable_thinking"] = False
    return options | fields.table("chat_template_kwargs")


def _include_usage(fields: Fields) -> bool:
    """Has no effect where nothing is streamed."""
    options = fields.object("stream_options")
    return options is not None and options.flag("include_usage") and fields.flag("stream")
