"""Sampling parameters out of range are refused by name and value."""

import copy
import json
import math
from typing import Any

import pytest

from pellucid.config import ModelConfig
from pellucid.errors import ConfigError, RequestError
from pellucid.inference import Request, SamplingParams, check_request, update_params, window_of
from pellucid.inference.request import MAX_SAMPLES
from pellucid.train.strategies.grpo_options import GrpoOptions


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be at least 0, got -0.1"),
        ("temperature", math.nan, "temperature must be at least 0, got nan"),
        ("temperature", math.inf, "temperature must be at least 0, got inf"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("temperature", True, "temperature must be a number, got True"),
        ("top_p", 1.5, "top_p must be in [0, 1], got 1.5"),
        ("top_p", -1, "top_p must be in [0, 1], got -1"),
        ("top_k", -1, "top_k must be at least 0, got -1"),
        ("top_k", 2.5, "top_k must be a whole number, got 2.5"),
        ("max_tokens", -1, "max_tokens must be at least 0, got -1"),
        ("min_tokens", -1, "min_tokens must be at least 0, got -1"),
        ("temperature", 10**400, "temperature must be at least 0, got 1000"),
        ("min_p", 1.1, "min_p must be in [0, 1], got 1.1"),
        ("repetition_penalty", 0, "repetition_penalty must be above 0, got 0; 1 switches it off"),
        ("repetition_penalty", math.nan, "repetition_penalty must be at least 0, got nan"),
        ("presence_penalty", 2.5, "presence_penalty must be in [-2, 2], got 2.5"),
        ("frequency_penalty", -2.5, "frequency_penalty must be in [-2, 2], got -2.5"),
        ("logit_bias", [1], "logit_bias must map ids to numbers, got [1]"),
        ("logit_bias", {3: 101}, "logit_bias[3] must be in [-100, 100], got 101"),
        ("logit_bias", {-3: 1}, "logit_bias must be at least 0, got -3"),
        ("logit_bias", {"x": 1}, "logit_bias must be a whole number, got 'x'"),
        ("logit_bias", {3: None}, "logit_bias[3] must be a number, got None"),
        ("allowed_ids", [], "allowed_ids is empty, so nothing could be drawn; leave it out to allow all"),
        ("allowed_ids", [1, -1], "allowed_ids must be at least 0, got -1"),
        ("allowed_ids", "abc", "allowed_ids must be a list of ids, got 'abc'"),
        ("top_logprobs", 21, "top_logprobs must be in [0, 20], got 21"),
        ("top_logprobs", True, "top_logprobs must be a whole number, got True"),
        ("prompt_logprobs", 21, "prompt_logprobs must be in [0, 20], got 21"),
        ("prompt_logprobs", True, "prompt_logprobs must be a whole number, got True"),
        ("min_tokens", 257, "min_tokens 257 is more than max_tokens 256; lower the one or raise the other"),
        ("n", 0, "n must be in [1, 1024], got 0"),
        ("n", 1025, "n must be in [1, 1024], got 1025"),
        ("seed", -1, "seed must be at least 0, got -1"),
        ("seed", 2**64, "seed must be below 2**64"),
        ("seed", "x", "seed must be a whole number, got 'x'"),
        ("stop_ids", 3, "stop_ids must be a list of ids, got 3"),
        ("stop_ids", ["a"], "stop_ids must be a whole number, got 'a'"),
    ],
)
def test_a_value_out_of_range_is_refused_by_field_and_value(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert message in str(caught.value)
    with pytest.raises(RequestError):
        update_params(SamplingParams(), {field: value})


def test_the_borders_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=0, top_k=0, max_tokens=0, n=1, seed=2**64 - 1, stop_ids=(), min_p=1)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, logit_bias={0: -100, 1: 100}, allowed_ids=[0])  # type: ignore[arg-type]
    SamplingParams(min_tokens=3, max_tokens=3, top_logprobs=20, n=1024, prompt_logprobs=0, repetition_penalty=1e-9)
    assert SamplingParams(stop_ids=[3, 4]).stop_ids == (3, 4)  # type: ignore[arg-type]


def test_grpo_asks_for_no_more_samples_than_can_be_drawn() -> None:
    GrpoOptions(completions=MAX_SAMPLES)
    with pytest.raises(ConfigError, match="completions must be at most 1024, got 1025; larger groups are not drawn"):
        GrpoOptions(completions=MAX_SAMPLES + 1)


def test_a_misspelt_parameter_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter temprature; did you mean temperature"):
        update_params(SamplingParams(), {"temprature": 0.5})
    changed = update_params(SamplingParams(seed=4), {"top_k": 5})
    assert (changed.top_k, changed.seed) == (5, 4)


def test_the_window_bounds_the_answer() -> None:
    config = ModelConfig(vocab_size=10, max_position_embeddings=4096)
    assert check_request(Request("a", (1,) * 4000, SamplingParams(max_tokens=200)), config) == 96
    assert check_request(Request("a", (1,) * 10, SamplingParams(max_tokens=200)), config) == 200
    with pytest.raises(RequestError) as caught:
        check_request(Request("a", (1,) * 4210, SamplingParams()), config)
    assert str(caught.value) == (
        "prompt has 4,210 tokens and the model's window is 4,096; shorten it or raise max_position_embeddings"
    )
    assert check_request(Request("a", (1,) * 4096, SamplingParams(max_tokens=0)), config) == 0
    with pytest.raises(RequestError, match="prompt has 4,097 tokens"):
        check_request(Request("a", (1,) * 4097, SamplingParams(max_tokens=0)), config)
    dynamic = ModelConfig(
        vocab_size=10, max_position_embeddings=100, rope_scaling={"rope_type": "dynamic", "factor": 2.5}
    )
    assert window_of(dynamic) == 250


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 2 and allowed_ids holds stop ids only; allow another id"):
        SamplingParams(min_tokens=2, allowed_ids=(4, 5), stop_ids=(3, 4, 5))
    SamplingParams(min_tokens=2, allowed_ids=(4, 5), stop_ids=(4,))
    SamplingParams(min_tokens=0, allowed_ids=(4, 5), stop_ids=(4, 5))


@pytest.mark.parametrize("field", ["stop_ids", "allowed_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused_by_field_and_size(field: str) -> None:
    config = ModelConfig(vocab_size=1000)
    good, bad = ({3: 1.0, 999: 1.0}, {3: 1.0, 1000: 1.0}) if field == "logit_bias" else ((3, 999), (3, 1000))
    check_request(Request("a", (1,), SamplingParams(**{field: good})), config)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        check_request(Request("a", (1,), SamplingParams(**{field: bad})), config)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"{field} holds the token id 1000 and the vocabulary has 1,000 ids; give ids from 0 to 999"
    )


def test_a_table_may_hold_what_json_can_say() -> None:
    table = json.loads(
        '{"logit_bias": {"50": -100, "7": 2.5}, "allowed_ids": [3, 7], "stop_ids": [7], "top_logprobs": 2}'
    )
    params = update_params(SamplingParams(temperature=0.5), table)
    assert params.logit_bias == {50: -100, 7: 2.5} and params.allowed_ids == (3, 7)
    assert (params.stop_ids, params.top_logprobs, params.temperature) == ((7,), 2, 0.5)
    with pytest.raises(RequestError, match="logit_bias must be a whole number, got 'x7'"):
        update_params(SamplingParams(), {"logit_bias": {"x7": 1}})
    with pytest.raises(RequestError, match="logits_processors holds objects and cannot be given in a table"):
        update_params(SamplingParams(), {"logits_processors": []})


def test_processors_must_be_functions() -> None:
    with pytest.raises(RequestError, match="logits_processors must be a list of functions, got"):
        SamplingParams(logits_processors=("x",))  # type: ignore[arg-type]


def test_parameters_do_not_change_with_what_they_were_made_from_and_travel() -> None:
    bias, stops = {3: 1.0}, [5]
    params = SamplingParams(logit_bias=bias, stop_ids=stops)  # type: ignore[arg-type]
    bias[3], stops[0] = 9.0, 6
    assert params.logit_bias == {3: 1.0} and params.stop_ids == (5,)
    assert copy.deepcopy(params) == params and hash(params) == hash(copy.deepcopy(params))


@pytest.mark.parametrize(
    ("params", "greedy"),
    [({"temperature": 0}, True), ({"top_k": 1}, True), ({"top_p": 0}, True), ({}, False), ({"top_k": 2}, False)],
)
def test_the_best_token_can_be_asked_for_in_three_ways(params: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**params).greedy is greedy
