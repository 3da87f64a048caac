"""Bfloat16 is packed for oneDNN where the processor has it, unless a kernel runs the whole forward of a --fast engine."""

import pytest
import torch

from pellucid import kernels
from pellucid.cli.sampling import pack_bfloat16
from pellucid.config import ModelConfig
from pellucid.model import Transformer


@pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.missing()}")
@pytest.mark.parametrize(("fast", "page_size", "packs"), [(False, 64, True), (True, 64, False), (True, 24, True)])
def test_what_is_packed(fast: bool, page_size: int, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[str] = []
    monkeypatch.setattr("pellucid.model.quantize.has_bfloat16", lambda: True)
    monkeypatch.setattr("pellucid.model.quantize.quantize_", lambda model, kind: packed.append(kind))
    config = ModelConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    pack_bfloat16(Transformer(config).to(torch.bfloat16), fast=fast, page_size=page_size)
    assert packed == (["bf16"] if packs else [])
