"""Sampling parameters out of range are refused by name and value."""

import math
from typing import Any

import pytest

from pellucid.config import ModelConfig
from pellucid.errors import RequestError
from pellucid.inference import Request, SamplingParams, check_request, update_params, window_of


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
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("n", 0, "n must be at least 1, got 0"),
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
    SamplingParams(temperature=0, top_p=0, top_k=0, max_tokens=1, n=1, seed=2**64 - 1, stop_ids=())
    assert SamplingParams(stop_ids=[3, 4]).stop_ids == (3, 4)  # type: ignore[arg-type]


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
    dynamic = ModelConfig(
        vocab_size=10, max_position_embeddings=100, rope_scaling={"rope_type": "dynamic", "factor": 2.5}
    )
    assert window_of(dynamic) == 250
