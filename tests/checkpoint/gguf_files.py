"""Small random GGUF files, written by the `gguf` package from facts of the format, not by what is tested."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from pellucid.config import ModelConfig
from pellucid.model import Transformer

Q = gguf.GGMLQuantizationType
DEQUANTISED = [
    type_ for type_ in Q
    if type_ in (Q.F32, Q.F16) or type_ in gguf.quants._type_traits
]  # fmt: skip

LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def random_model(**changes: Any) -> Transformer:
    """Large random weights everywhere, norms and biases too."""
    shape: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    model = Transformer(ModelConfig(**(shape | changes))).eval()
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=g) + 0.5 if p.dim() == 1 else torch.randn(p.shape, generator=g) * 0.2)
    return model


def ours_of(name: str) -> str:
    """The parameter that a tensor of a GGUF file is."""
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stem, _, kind = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, layer, inner = stem.split(".")
    return f"model.layers.{layer}.{LAYER[inner]}.{kind}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rows as a GGUF file has them, in neighbouring pairs."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The way back, as the facts about SmolLM2's file say it."""
    return (
        weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def keys_of(config: ModelConfig) -> dict[str, Any]:
    """What a converter writes about a llama, without the tokenizer."""
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
    }


def tensors_of(model: Transformer) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file, float32."""
    config, named = model.config, {name: p.detach().numpy() for name, p in model.named_parameters()}
    names = ["token_embd.weight", "output_norm.weight"] + ([] if config.tie_word_embeddings else ["output.weight"])
    for i in range(config.num_hidden_layers):
        names += [f"blk.{i}.{inner}.{kind}" for inner in LAYER for kind in ("weight", "bias")]
    tensors = {name: named[ours_of(name)] for name in names if ours_of(name) in named}
    for name, weight in tensors.items():
        if ".attn_q." in name:
            tensors[name] = permuted(weight, config.num_attention_heads)
        elif ".attn_k." in name:
            tensors[name] = permuted(weight, config.num_key_value_heads)
    return tensors


def write(
    path: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray], *, type_: Any = Q.F32, architecture: str = "llama"
) -> Path:
    """A GGUF file; matrices of float32 are quantised to ``type_``, a pair (bytes, type) goes in as it is."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        elif tensor.ndim == 1 or type_ == Q.F32:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(tensor), type_)
            writer.add_tensor(name, data, raw_dtype=None if type_ == Q.F16 else type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path: Path, model: Transformer, keys: dict[str, Any] | None = None, **options: Any) -> Path:
    """The file of a model; ``keys`` are added to, or replace, those of its shape, None takes one away."""
    merged = keys_of(model.config) | (keys or {})
    return write(path, {k: v for k, v in merged.items() if v is not None}, tensors_of(model), **options)


def peak_memory(script: str) -> tuple[int, int]:
    """Bytes that a new Python process held at most: after ``script`` up to a line "# --", and in all. Linux only.

    The kernel's ru_maxrss would begin with what the parent held.
    """
    read = "open('/proc/self/status').read().split('VmHWM:')[1].split()[0]"
    whole = script.replace("# --", f"before = {read}") + f"\nprint('peak', before, {read})"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    _, before, after = done.stdout.splitlines()[-1].split()
    return int(before) * 1024, int(after) * 1024
