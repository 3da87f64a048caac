"""The llama architecture of GGUF <-> `ModelConfig`: keys, names of tensors, and the order of query and key rows.

GGUF's rotary embedding turns neighbouring rows of a head together, ours row i of the first half with row i of the second:
the rows of ``attn_q`` and ``attn_k`` are permuted on the way in and out. Reading refuses, by name, every key of the
architecture whose meaning we cannot honour.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pellucid.config import ModelConfig, build
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model.rope import inverse_frequencies, ntk_theta

ARCHITECTURE = "llama"
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor ``[head_dim / 2]`` that divides the rotary frequencies; Llama 3's scaling is written so."""
ROPE_NOTE = "pellucid.rope_scaling"
"""Our own key: the scaling that ``ROPE_FACTORS`` was made from, as JSON."""

_NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys, after ``llama.``, that every file has -> our fields."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that change the model, and the values of them that leave it the one we compute."""

_READ = {
    *_NUMBERS, "attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_HARMLESS = {"rope.scaling.finetuned", "tensor_data_layout", "attention.layer_norm_epsilon"}
_NOT_IN_THE_FILE = {"dropout", "initializer_range", "embedding_range", "attend"}
"""Fields of ours that say nothing about a finished model's output."""

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensor_name(name: str) -> str:
    """A parameter's name in a GGUF file: ``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, _, number, inner = module.split(".", 3)
    return f"blk.{number}.{_LAYER[inner]}.{kind}"


def rotary_rows(name: str, config: ModelConfig, *, to_file: bool) -> Tensor | None:
    """The permutation of a parameter's rows: row i there is row ``result[i]`` here. None where rows stay in place.

    Args:
        name: ours.
        to_file: "there" is the file; else it is the model.
    """
    if ".q_proj." in name:
        heads = config.num_attention_heads
    elif ".k_proj." in name:
        heads = config.num_key_value_heads
    else:
        return None
    rows, half = torch.arange(heads * config.head_dim), config.head_dim // 2
    pairs = rows.view(heads, 2, half) if to_file else rows.view(heads, half, 2)
    return pairs.transpose(1, 2).reshape(-1)


# -- reading ------------------------------------------------------------------------------------------------


def read_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Tensor | None, *, origin: str
) -> ModelConfig:
    """The model that a GGUF file describes.

    Args:
        shapes: of its tensors, by the file's names; they say what is tied, which biases there are, and the vocabulary.
        factors: `ROPE_FACTORS`, where the file has it.
        origin: the file, for messages.

    Raises:
        CheckpointError: another architecture, or a key that is missing, contradicts another or means what we cannot do.
    """
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise CheckpointError(
            f"{origin}: general.architecture is {architecture!r}; only {ARCHITECTURE!r} files can be imported"
        )
    if metadata.get("general.type", "model") != "model":
        raise CheckpointError(f"{origin}: general.type is {metadata['general.type']!r}; only a 'model' can be imported")
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{origin} is one of {metadata['split.count']} parts (split.count); join them with `llama-gguf-split --merge`"
        )
    keys = {key.partition(".")[2]: value for key, value in metadata.items() if key.startswith(f"{ARCHITECTURE}.")}
    _refuse_unknown(keys, origin)
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{origin}: missing token_embd.weight, the embedding")
    values: dict[str, Any] = {field: _number(keys, key, origin) for key, field in _NUMBERS.items()}
    if not 0 < values["num_hidden_layers"] <= len(shapes):  # before billions of layers are looked for
        raise CheckpointError(
            f"{origin}: {ARCHITECTURE}.block_count is {values['num_hidden_layers']!r}, and there are {len(shapes)} tensors"
        )
    values["num_key_value_heads"] = _number(keys, "attention.head_count_kv", origin, values["num_attention_heads"])
    values["vocab_size"] = embedding[0]
    values["tie_word_embeddings"] = "output.weight" not in shapes
    values["attention_bias"] = any(".attn_" in name and name.endswith(".bias") for name in shapes)
    values["mlp_bias"] = any(".ffn_" in name and name.endswith(".bias") for name in shapes)
    values["rope_theta"] = float(_number(keys, "rope.freq_base", origin, 10_000.0))
    if "attention.key_length" in keys:
        values["head_dim"] = _number(keys, "attention.key_length", origin)
    values["rope_scaling"] = _rope_scaling(keys, origin)
    try:
        config = build(ModelConfig, values, "")
        _check_sizes(keys, config, shapes, origin)
        if factors is not None:
            scaling = _scaling_of(factors, config, metadata.get(ROPE_NOTE), origin)
            config = build(ModelConfig, values | {"rope_scaling": scaling}, "")
    except ConfigError as error:
        raise CheckpointError(f"{origin}: {error}") from None
    return config


def _refuse_unknown(keys: Mapping[str, Any], origin: str) -> None:
    for key, value in keys.items():
        if key in _READ or key in _HARMLESS:
            continue
        if key not in _ONLY:
            raise CheckpointError(f"{origin}: the key {ARCHITECTURE}.{key} ({value!r}) is none that we can honour")
        if value not in _ONLY[key]:
            raise CheckpointError(f"{origin}: {ARCHITECTURE}.{key} is {value!r}; only {_ONLY[key][0]!r} is supported")


def _number(keys: Mapping[str, Any], key: str, origin: str, default: float | None = None) -> Any:
    """A number, or a list with the same one for every layer."""
    value = keys.get(key, default)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if value is None:
        raise CheckpointError(f"{origin}: {ARCHITECTURE}.{key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"{origin}: {ARCHITECTURE}.{key} is {value!r}; one number for all layers is supported")
    return value


def _check_sizes(
    keys: Mapping[str, Any], config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], origin: str
) -> None:
    """Whether keys agree with each other and with the tensors that bound them; nothing is allocated by a key's word."""
    queries = (config.num_attention_heads * config.head_dim, config.hidden_size)
    for name, expected in (
        ("token_embd.weight", (config.vocab_size, config.hidden_size)),
        ("blk.0.attn_q.weight", queries),
    ):
        if name not in shapes:
            raise CheckpointError(f"{origin}: missing {name}")
        if shapes[name] != expected:
            raise CheckpointError(f"{origin}: {name} has shape {shapes[name]}, the keys of the file say {expected}")
    for key, size, why in (
        ("attention.value_length", config.head_dim, f"{ARCHITECTURE}.attention.key_length"),
        ("rope.dimension_count", config.head_dim, "the size of a head, all of which must turn"),
        ("vocab_size", config.vocab_size, "the number of rows of token_embd.weight"),
    ):
        if keys.get(key, size) != size:
            raise CheckpointError(f"{origin}: {ARCHITECTURE}.{key} is {keys[key]!r}, but {why} is {size}")


def _rope_scaling(keys: Mapping[str, Any], origin: str) -> dict[str, Any] | None:
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) or 1.0
    kind = keys.get("rope.scaling.type", "linear" if factor != 1 else "none")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{origin}: {ARCHITECTURE}.rope.scaling.type is {kind!r}; 'none', 'linear' and 'yarn' are supported"
        )
    if kind == "yarn":
        further = {
            "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        }
        return {"rope_type": "yarn", "factor": factor} | {k: v for k, v in further.items() if v is not None}
    if kind == "none" and factor != 1:
        raise CheckpointError(
            f"{origin}: {ARCHITECTURE}.rope.scaling.type is 'none', but {ARCHITECTURE}.rope.scaling.factor is {factor!r}"
        )
    return {"rope_type": "linear", "factor": factor} if factor != 1 else None


def rope_factors(config: ModelConfig) -> Tensor:
    """What a scaling divides each rotary frequency by, ``[head_dim / 2]`` float32."""
    plain = dataclasses.replace(config, rope_scaling=None)
    return inverse_frequencies(plain) / inverse_frequencies(config)


def _scaling_of(factors: Tensor, config: ModelConfig, note: str | None, origin: str) -> dict[str, Any] | None:
    """The scaling of Llama 3 that gives ``factors``.

    Raises:
        CheckpointError: none does, the file names another scaling too, or our own note contradicts them.
    """
    if config.rope_scaling is not None:
        raise CheckpointError(f"{origin}: has both {ARCHITECTURE}.rope.scaling keys and {ROPE_FACTORS}")
    if factors.shape != (config.head_dim // 2,):
        raise CheckpointError(
            f"{origin}: {ROPE_FACTORS} has shape {tuple(factors.shape)}, not ({config.head_dim // 2},)"
        )
    if note is None and bool((factors == 1).all()):
        return None
    try:
        scaling: dict[str, Any] = _fit(factors, config) if note is None else dict(json.loads(note))
    except (ValueError, RecursionError, TypeError) as error:
        raise CheckpointError(f"{origin}: {ROPE_NOTE} is {note!r}, no JSON table: {error}") from None
    made = rope_factors(dataclasses.replace(config, rope_scaling=scaling))
    if not torch.allclose(made, factors, rtol=1e-4, atol=0):
        source = "no scaling of Llama 3" if note is None else f"not the scaling in {ROPE_NOTE}"
        raise CheckpointError(f"{origin}: {ROPE_FACTORS} is {source}; its values are {factors.tolist()[:8]} ...")
    return scaling


def _fit(factors: Tensor, config: ModelConfig) -> dict[str, Any]:
    """Parameters of Llama 3's scaling from its effect, with ``low_freq_factor`` 1: only ratios to it have an effect.

    Between the two frequencies, the share that is kept grows linearly with the turns in the original window. Where fewer
    than two factors lie between them, what all releases of Llama 3 have.
    """
    factor = float(factors.max())
    kept = (1 / factors.double() - 1 / factor) / (1 - 1 / factor)
    between = (kept > 1e-4) & (kept < 1 - 1e-4)
    original, span = 8192, 3.0
    if int(between.sum()) > 1:
        turns = inverse_frequencies(dataclasses.replace(config, rope_scaling=None)).double() / (2 * math.pi)
        columns = torch.stack([turns[between], -torch.ones(int(between.sum()), dtype=torch.float64)], dim=1)
        slope, offset = torch.linalg.lstsq(columns, kept[between, None]).solution.flatten().tolist()
        if slope > 0 and offset > 0:
            original, span = round(slope / offset), round(1 / offset, 3)
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0 + span,
        "original_max_position_embeddings": original,
    }


# -- writing ------------------------------------------------------------------------------------------------


def write_config(config: ModelConfig) -> tuple[dict[str, Any], Tensor | None]:
    """The keys of a GGUF file for a model, and `ROPE_FACTORS` where its scaling is written so.

    Raises:
        ConfigError: the architecture has no place for a field; names it.
    """
    plain = _simplest(config)
    scaling = plain.rope_scaling or {"rope_type": "default"}
    keys: dict[str, Any] = {key: getattr(plain, field) for key, field in _NUMBERS.items()} | {
        "attention.head_count_kv": plain.num_key_value_heads,
        "attention.key_length": plain.head_dim,
        "attention.value_length": plain.head_dim,
        "vocab_size": plain.vocab_size,
        "rope.dimension_count": plain.head_dim,
        "rope.freq_base": float(plain.rope_theta),
    }
    factors = None
    metadata: dict[str, Any] = {"general.architecture": ARCHITECTURE}
    if scaling["rope_type"] in ("linear", "yarn"):
        names = {
            "rope_type": "type",
            "factor": "factor",
            "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        given = {names[key]: value for key, value in scaling.items() if key in names}
        keys |= {f"rope.scaling.{k}": float(v) if k in _FLOATS else v for k, v in given.items()}
    elif scaling["rope_type"] == "llama3":
        factors = rope_factors(plain)
        metadata[ROPE_NOTE] = json.dumps(scaling)
    metadata |= {f"{ARCHITECTURE}.{key}": value for key, value in keys.items()}
    _refuse_loss(plain, metadata, factors)
    return metadata, factors


_FLOATS = ("factor", "yarn_beta_fast", "yarn_beta_slow")


def _simplest(config: ModelConfig) -> ModelConfig:
    """The same model without what has no effect."""
    changes: dict[str, Any] = {}
    if config.sliding_window is None or config.max_window_layers >= config.num_hidden_layers:
        changes |= {"sliding_window": None, "max_window_layers": 0}
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "default" or scaling == {"rope_type": "linear", "factor": 1}:
        changes["rope_scaling"] = None
    elif scaling["rope_type"] == "ntk":
        theta = ntk_theta(config.rope_theta, scaling["factor"], config.head_dim)
        changes |= {"rope_scaling": None, "rope_theta": theta}
    return dataclasses.replace(config, **changes)


def _refuse_loss(config: ModelConfig, metadata: Mapping[str, Any], factors: Tensor | None) -> None:
    """Reads the keys again: whatever comes back otherwise has no place in the file, fields of tomorrow included."""
    norm = (config.hidden_size,)
    shapes: dict[str, tuple[int, ...]] = {f"blk.{i}.attn_norm.weight": norm for i in range(config.num_hidden_layers)}
    shapes["token_embd.weight"] = (config.vocab_size, config.hidden_size)
    shapes["blk.0.attn_q.weight"] = (config.num_attention_heads * config.head_dim, config.hidden_size)
    if not config.tie_word_embeddings:
        shapes["output.weight"] = shapes["token_embd.weight"]
    if config.attention_bias:
        shapes["blk.0.attn_q.bias"] = (config.num_attention_heads * config.head_dim,)
    if config.mlp_bias:
        shapes["blk.0.ffn_up.bias"] = (config.intermediate_size,)
    seen = read_config(metadata, shapes, factors, origin="the file to be written")
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(seen, field.name)
        if field.name not in _NOT_IN_THE_FILE and ours != theirs:
            raise ConfigError(
                f"the llama architecture of GGUF has no place for model.{field.name} {ours!r} (it would come back as "
                f"{theirs!r}); `pellucid export` without --to gguf keeps everything"
            )
