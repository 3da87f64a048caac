"""What a decode step reads, against closed forms, and what the machine reads, against what cannot be."""

from typing import Any

import pytest
import torch
from tiny_engine import tiny

from pellucid.evaluate.roofline import DecodeSteps, kv_bytes, read_bandwidth, roofline, weight_bytes
from pellucid.inference import StepRecord
from pellucid.model.quantize import quantize_

torch.set_num_threads(1)

V, D, F, L, H, K, d = 97, 64, 96, 2, 4, 2, 16
LAYER = D * H * d + 2 * D * K * d + H * d * D + 3 * D * F
NORMS = (2 * L + 1) * D
FREQUENCIES = d // 2 * 4
"""The rotary buffer, float32 whatever the weights are."""


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_read_once_and_the_embedding_only_as_a_head(tied: bool, dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype, tie_word_embeddings=tied)
    expected = (L * LAYER + V * D + NORMS) * dtype.itemsize
    assert weight_bytes(model) == pytest.approx(expected, abs=FREQUENCIES)
    assert weight_bytes(model, 64) == weight_bytes(model)


def test_quantised_weights_count_as_they_lie_in_memory() -> None:
    model = tiny(dtype=torch.bfloat16)
    quantize_(model, "int4")
    # 4 bits, and a scale and a zero of 16 bits for 32 inputs; the head 8 bits and a scale a row, of which our kernel has a
    # multiple of 16, or 16 bits: by processor
    rows = -(-V // 16) * 16
    expected = [L * LAYER * 5 / 8 + head + NORMS * 2 for head in (rows * D + rows * 4, V * D * 2, V * D + V * 2)]
    assert min(abs(weight_bytes(model) - bytes_) for bytes_ in expected) <= FREQUENCIES


def test_experts_count_where_a_token_goes_to_them() -> None:
    model = tiny("moe")
    expert = 3 * 64 * 32 * 4
    all_of_them, one, two = (weight_bytes(model, tokens) for tokens in (1e9, 1, 2))
    assert all_of_them - one == L * 4 * expert  # 2 of 6 for a single token
    # the other four are missed by both tokens with (4/6)^2
    assert all_of_them - two == pytest.approx(L * 6 * (4 / 6) ** 2 * expert, abs=1)


@pytest.mark.parametrize(
    ("kind", "context", "elements"),
    [
        ("gqa", 50, 2 * 2 * 16 * 50),
        ("window", 50, 2 * 2 * 16 * 20),
        ("window", 7, 2 * 2 * 16 * 7),
        ("mla", 50, (16 + 8) * 50),
    ],
)
def test_keys_and_values_follow_the_attention(kind: Any, context: int, elements: int) -> None:
    assert kv_bytes(tiny(kind), context) == L * elements * 4
    assert kv_bytes(tiny(kind), context, torch.bfloat16) == L * elements * 2


def test_the_bound_is_bandwidth_over_bytes() -> None:
    model = tiny()
    decode = DecodeSteps(steps=10, sequences=30, contexts=30 * 40, tokens=30, seconds=0.5)
    found = roofline(model, decode, {1: 2.0, 2: 3.0})
    assert found is not None
    per_token = weight_bytes(model) / 3 + kv_bytes(model, 40)
    assert found.bytes_per_token == pytest.approx(per_token, rel=1e-6)
    assert (found.mean_batch, found.mean_context, found.tokens_per_s) == (3, 40, 60)
    assert found.bound_tokens_per_s == pytest.approx(3e9 / per_token, rel=1e-6)
    # the definition in bytes: what was read a second, of what can be
    assert found.share == pytest.approx((10 * weight_bytes(model) + 30 * kv_bytes(model, 40)) / 0.5 / 3e9, rel=1e-6)
    assert roofline(model, DecodeSteps(), {1: 2.0}) is None


def test_right_guesses_make_a_step_cheaper_by_the_token() -> None:
    alone, guessed = (
        roofline(tiny(), DecodeSteps(steps=4, sequences=4, contexts=80, tokens=tokens, seconds=1.0), {1: 1.0})
        for tokens in (4, 8)
    )
    assert alone is not None and guessed is not None
    assert guessed.bytes_per_token == alone.bytes_per_token / 2


def test_a_step_counts_unless_a_prompt_is_read_in_it() -> None:
    def record(*chunks: tuple[str, int, int, int]) -> StepRecord:
        return StepRecord(1, chunks, {}, 0, 0, (), (), 0, 0, 0, 0, 0.25)

    decode, prompts = DecodeSteps(), {"a": 5, "b": 7}
    decode.add(record(("a", 0, 5, 1), ("b", 0, 0, 7)), prompts, 2)
    assert decode == DecodeSteps()
    decode.add(record(("a", 0, 5, 1), ("b", 0, 9, 3)), prompts, 4)
    assert decode == DecodeSteps(steps=1, sequences=2, contexts=6 + 12, tokens=4, seconds=0.25)


def test_reading_is_timed_with_the_threads_asked_for() -> None:
    threads = torch.get_num_threads()
    speed = read_bandwidth(1, size=32 * 2**20)
    assert 0.05 < speed < 2000  # GB/s: neither a disk nor more than any cache gives to one core
    assert torch.get_num_threads() == threads
