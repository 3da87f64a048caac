import pytest
import torch
from support import TINY

from pellucid.config import ModelConfig
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.optim import AdamWOptions, build_adamw, parameter_groups


@pytest.mark.parametrize("tied", [True, False])
def test_each_parameter_is_in_one_group_and_only_hidden_matrices_are_decayed(tied):
    model = Transformer(ModelConfig(**TINY, tie_word_embeddings=tied, attention_bias=True, qk_norm=True))
    decayed, plain = parameter_groups(model, weight_decay=0.1)
    names = [name for group in (decayed, plain) for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    for name, parameter in decayed["params"]:
        assert parameter.ndim == 2 and "embed" not in name and "norm" not in name
    for name, _ in plain["params"]:
        assert any(part in name for part in ("embed", "norm", "bias")), name
    assert ("lm_head.weight" in [name for name, _ in decayed["params"]]) is not tied


def test_frozen_parameters_are_left_out():
    model = Transformer(ModelConfig(**TINY))
    model.model.embed_tokens.weight.requires_grad_(False)
    names = [name for group in parameter_groups(model, weight_decay=0.1) for name, _ in group["params"]]
    assert names and "model.embed_tokens.weight" not in names


def test_a_bfloat16_model_is_refused_because_its_updates_would_vanish():
    model = Transformer(ModelConfig(**TINY)).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="float32"):
        build_adamw(model, 1e-3, AdamWOptions())
    weight = torch.nn.Parameter(torch.ones(1))  # what float32 does and bfloat16 would not
    optimizer = torch.optim.AdamW([weight], lr=6e-4, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert weight.item() == pytest.approx(1 - 0.06, abs=1e-4)


@pytest.mark.parametrize(
    "bad", [dict(betas=(1.0, 0.9)), dict(eps=0.0), dict(weight_decay=-1.0), dict(weight_decay=float("inf"))]
)
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        AdamWOptions(**bad)
