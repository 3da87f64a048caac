"""`exactness_problem`: a model that rounds by what else is in a product is noticed, named, and run as inexact."""

import logging

import pytest
import torch
from tiny_engine import KINDS, engine, tiny
from torch import nn

from pellucid.inference.probe import exactness_problem
from pellucid.inference.request import SamplingParams


class ByRows(nn.Linear):
    """Rounds in another way from 64 rows on."""

    def forward(self, x):
        out = super().forward(x)
        return out if x.shape[0] < 64 else out * (1 + 2**-20)


def replace(parent, name, kind):
    old = getattr(parent, name)
    new = kind(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    setattr(parent, name, new)


@pytest.mark.parametrize("place", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_linear_layer_that_rounds_by_rows_is_named_and_the_engine_goes_on_without(place, caplog):
    model = tiny()
    assert exactness_problem(model) is None
    parent, name = place.split(".")
    replace(getattr(model.model.layers[1], parent), name, ByRows)
    assert f"model.layers.1.{place}" in exactness_problem(model)
    with caplog.at_level(logging.WARNING):
        one = engine(model)
    assert not one.exact and not one.runner.exact
    assert "the engine runs with exact=False" in caplog.text and place in caplog.text
    assert one.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].finish_reason == "length"


def test_a_head_that_rounds_by_rows_is_noticed():
    model = tiny(tie_word_embeddings=False)
    replace(model, "lm_head", ByRows)
    assert "lm_head" in exactness_problem(model)


class ByElements(nn.Module):
    """A feed-forward layer without a linear layer, that rounds in another way where its input has many elements."""

    def forward(self, x):
        return x * (1 + 2**-20) if x.numel() > 20 * x.shape[-1] else x


def test_a_layer_that_rounds_by_its_input_is_noticed():
    model = tiny()
    model.model.layers[1].mlp = ByElements()
    assert "layer 1" in exactness_problem(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_models_as_they_are_can_be_asked_in_every_type(kind, dtype):
    exactness_problem(tiny(kind, dtype))  # what the answer is, is the machine's affair


def test_nan_weights_and_dropout_are_no_rounding():
    if exactness_problem(tiny()) is not None:
        pytest.skip("this machine rounds by the number of rows")
    model = tiny(dropout=0.3, intermediate_size=64).train()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = torch.nan
    assert exactness_problem(model) is None and model.training


def test_no_warning_where_exactness_was_not_asked_for(caplog):
    model = tiny()
    replace(model.model.layers[0].mlp, "up_proj", ByRows)
    assert not engine(model, exact=False).exact and not caplog.text
