"""How tokens are drawn, when to stop and what the answer must satisfy, as OpenAI's two routes for text say it."""

import json
from typing import Any

from pellucid.inference.request import SamplingParams
from pellucid.server.errors import invalid
from pellucid.server.fields import Fields, check_ids, check_number, invalid_value, shown, wrong_type
from pellucid.server.generation import Grammar

MAX_STOPS = 64
MAX_STOP_LENGTH = 1000
MAX_GRAMMAR_LENGTH = 16_384
"""Of a regular expression or Lark grammar: a step over a long rule takes time that grows with the square of its length."""


def read_sampling(
    fields: Fields, max_tokens: int, max_n: int, *, top_logprobs: int, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The fields that say how tokens are drawn. A negative ``seed`` counts from 2**64 down."""
    repetition = fields.number("repetition_penalty", 1.0, 0, 100)
    if repetition == 0:
        path = "repetition_penalty"
        raise invalid(f"{path} must be above 0, got 0; 1 switches it off", "decimal_below_min_value", path)
    min_tokens = fields.whole("min_tokens", 0, 0)
    if min_tokens > max_tokens:
        raise invalid_value(
            "min_tokens", f"is {shown(min_tokens)} and max_tokens {max_tokens}; lower the one or raise the other"
        )
    seed = fields.whole("seed", None, -(2**63), 2**64 - 1)
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_p=fields.number("top_p", 1.0, 0, 1),
        top_k=max(0, fields.whole("top_k", 0, -1)),
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=repetition,
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=_logit_bias(fields),
        stop_ids=_stop_ids(fields),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        seed=None if seed is None else seed % 2**64,
        n=fields.whole("n", 1, 1, max_n),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(fields: Fields) -> dict[int, float]:
    """Token ids as text, as JSON has it, to numbers in [-100, 100]."""
    bias = {}
    for key, value in fields.table("logit_bias").items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid_value("logit_bias", f"must have token ids as keys, got {shown(key)}")
        bias[int(key)] = check_number(value, f"logit_bias.{key}", -100, 100)
    return bias


def _stop_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids")
    return check_ids(ids, "stop_token_ids") if ids else ()


def read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    return read_stops([value] if isinstance(value, str) else fields.array("stop"), "stop")


def read_stops(stops: list[Any], path: str) -> tuple[str, ...]:
    """Stop strings: not empty, since the empty string is everywhere, and neither many nor long."""
    if len(stops) > MAX_STOPS:
        raise invalid(f"{path} has {len(stops)} strings, at most {MAX_STOPS}", "array_above_max_length", path)
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type(path, "a string or an array of strings", stop)
        if len(stop) > MAX_STOP_LENGTH:
            message = f"{path} holds a string of {len(stop):,} characters, at most {MAX_STOP_LENGTH:,}"
            raise invalid(message, "string_above_max_length", path)
        if not stop:
            raise invalid_value(path, "holds an empty string, which is found everywhere; leave it out")
    return tuple(stops)


def read_grammar(fields: Fields) -> Grammar | None:
    """``response_format``: text, json_object, json_schema, and of our own regex and grammar (Lark)."""
    form = fields.object("response_format")
    if form is None:
        return None
    form.require("type")
    kind = form.choice("type", None, ("text", "json_object", "json_schema", "regex", "grammar"))
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        form.require("json_schema")
        inner = form.object("json_schema")
        assert inner is not None
        inner.require("schema")
        return Grammar("json_schema", json.dumps(inner.table("schema")))
    if kind == "regex" or kind == "grammar":
        form.require(kind)
        text = form.text(kind, "", empty=False)
        if len(text) > MAX_GRAMMAR_LENGTH:
            message = f"{form.path(kind)} has {len(text):,} characters, at most {MAX_GRAMMAR_LENGTH:,}"
            raise invalid(message, "string_above_max_length", form.path(kind))
        return Grammar("regex" if kind == "regex" else "lark", text)
    return None
