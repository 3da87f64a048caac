"""Folders of tiny random models for the tests of the commands."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pellucid.checkpoint.model_folder import save_model
from pellucid.config import ModelConfig
from pellucid.model import Transformer
from pellucid.tokenizer import Tokenizer, train_bpe

TEXTS = [
    f"the {animal} asked the {other} for tea at {n} and said hello"
    for animal in ("fox", "hen", "owl")
    for other in ("cat", "dog")
    for n in range(9)
]


@cache
def make_tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 300)


def make_folder(path: Path, *, tokenizer: bool = True, template: bool = True, **changes: Any) -> Path:
    """A saved model whose answers depend on its prompt."""
    config = {
        "vocab_size": make_tokenizer().vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    }  # fmt: skip
    model = Transformer(ModelConfig(**(config | changes)), generator=torch.Generator().manual_seed(2))
    save_model(path, model, make_tokenizer() if tokenizer else None)
    if tokenizer and not template:
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    return path


def spoil(path: Path) -> Path:
    """Make every output of a saved model NaN."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return path
