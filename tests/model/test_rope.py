import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pellucid.config import ModelConfig
from pellucid.model import Transformer
from pellucid.model.rope import Rotary, inverse_frequencies, rotate, rotate_

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARNS: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.8, "mscale_all_dim": 0.5},
]


def config(scaling: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    return ModelConfig(**shape | {"rope_scaling": scaling} | changes)


def transformers_frequencies(ours: ModelConfig, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    scaling = dict(ours.rope_scaling or {})
    theirs = LlamaConfig(
        hidden_size=ours.hidden_size,
        num_attention_heads=ours.num_attention_heads,
        max_position_embeddings=ours.max_position_embeddings,
        rope_parameters={**scaling, "rope_theta": ours.rope_theta},
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, seq_len=seq_len)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 3.0}, LLAMA3, *YARNS])
def test_frequencies_and_magnitude_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    ours = config(scaling)
    expected, magnitude = transformers_frequencies(ours)
    torch.testing.assert_close(inverse_frequencies(ours), expected, rtol=1e-6, atol=0)
    assert not torch.allclose(inverse_frequencies(ours), inverse_frequencies(config()), rtol=1e-3)
    cos, _ = Rotary(ours)(torch.zeros(1, dtype=torch.long), 1)
    torch.testing.assert_close(cos, torch.full_like(cos, magnitude))


def test_ntk_stretches_the_longest_wave_by_its_factor_and_leaves_the_shortest() -> None:
    plain, ntk = inverse_frequencies(config()), inverse_frequencies(config({"rope_type": "ntk", "factor": 4.0}))
    torch.testing.assert_close(ntk[0], plain[0])
    torch.testing.assert_close(ntk[-1], plain[-1] / 4.0)


@pytest.mark.parametrize("length", [64, 128, 129, 400])
def test_dynamic_frequencies_follow_the_admitted_length(length: int) -> None:
    ours = config({"rope_type": "dynamic", "factor": 2.0})
    expected, _ = transformers_frequencies(ours, seq_len=length)
    cos, sin = Rotary(ours)(torch.ones(1, dtype=torch.long), length)
    angles = torch.atan2(sin, cos)[0, 0].view(2, -1)  # of both halves, the first turned backwards
    torch.testing.assert_close(angles[1], expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(angles[0], -angles[1])


def test_dynamic_frequencies_do_not_change_while_a_sequence_grows() -> None:
    rotary = Rotary(config({"rope_type": "dynamic", "factor": 2.0}))
    whole = rotary(torch.arange(300), 300)[0]
    alone = torch.cat([rotary(torch.tensor([i]), 300)[0] for i in range(300)])
    torch.testing.assert_close(alone, whole)
    assert not torch.allclose(rotary(torch.arange(300), 128)[0], whole)


def test_each_row_or_packed_token_has_a_dynamic_length_of_its_own() -> None:
    rotary = Rotary(config({"rope_type": "dynamic", "factor": 2.0}))
    positions = torch.arange(5).expand(2, 5)
    cos, sin = rotary(positions, torch.tensor([128, 300]))
    assert cos.shape == (2, 5, 1, 16)
    torch.testing.assert_close(cos[0], rotary(torch.arange(5), 128)[0])
    torch.testing.assert_close(sin[1], rotary(torch.arange(5), 300)[1])
    packed = rotary(positions.flatten(), torch.tensor([128] * 5 + [300] * 5))[0]
    torch.testing.assert_close(packed, cos.flatten(0, 1))


def test_rotation_is_half_split() -> None:
    x = torch.randn(3, 1, 8)
    rotary = Rotary(config(head_dim=8))
    cos, sin = rotary(torch.tensor([0, 5, 91]), 1)
    turned = rotate(x, cos, sin)
    angles = torch.tensor([0, 5, 91])[:, None, None] * rotary.inv_freq
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(3, 1, 4), angles)
    torch.testing.assert_close(turned, torch.cat([as_complex.real, as_complex.imag], -1))
    assert not torch.allclose(turned[1:], x[1:])
    with torch.no_grad():
        assert torch.equal(rotate_(x, cos, sin), turned) and torch.equal(x, turned)


def test_frequencies_stay_float32_when_the_model_is_cast_moved_or_made_on_meta() -> None:
    expected = inverse_frequencies(config())
    model = Transformer(config()).to(torch.bfloat16)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.model.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(model.double().model.rotary.inv_freq, expected)
    assert torch.equal(model.half().float().model.rotary.inv_freq, expected)
    assert torch.equal(Transformer(config(), device="meta").model.rotary.inv_freq, expected)
    with torch.device("meta"):
        made = Transformer(config())
    assert torch.equal(made.to_empty(device="cpu").model.rotary.inv_freq, expected)
    assert not any("rotary" in name for name in model.state_dict())


def test_positions_far_beyond_the_window_have_exact_angles() -> None:
    rotary = Rotary(config())
    cos, _ = rotary(torch.tensor([1_000_003]), 1)
    assert math.isclose(cos[0, 0, 0].item(), math.cos(1_000_003), abs_tol=1e-6)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_shifting_all_positions_leaves_the_logits_unchanged(qk_norm: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(config(qk_norm=qk_norm, initializer_range=0.3)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.uniform_(0.5, 2.0)  # a norm after the rotation would mix the pairs unevenly
        tokens = torch.randint(0, 50, (2, 24))
        positions = torch.arange(24)
        here = model(tokens, positions).logits
        torch.testing.assert_close(model(tokens, positions + 20).logits, here, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(tokens, positions * 2).logits, here, atol=1e-2)


def test_in_float64_nothing_is_rounded_to_float32() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    half_cos, half_sin = (torch.randn(1, 5, 1, 4) for _ in range(2))
    cos, sin = torch.cat([half_cos, half_cos], -1), torch.cat([-half_sin, half_sin], -1)
    first, second = x.chunk(2, dim=-1)
    wide_cos, wide_sin = half_cos.double(), half_sin.double()
    expected = torch.cat([first * wide_cos - second * wide_sin, second * wide_cos + first * wide_sin], dim=-1)
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned, expected, rtol=1e-14, atol=1e-14)
    weight = torch.randn_like(expected)
    (ours,) = torch.autograd.grad((turned * weight).sum(), x)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
