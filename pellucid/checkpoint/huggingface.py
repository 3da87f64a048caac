"""`ModelConfig` <-> a Hugging Face ``config.json``. Weights need no translation: their names are the same.

A model that transformers has a class for is written as that class (llama, mistral, qwen2, qwen3, qwen3_moe, deepseek_v2,
deepseek_v3); any other as model_type "pellucid", with the keys of `ModelConfig`. What transformers does not know but we
must not lose stands in a table of its own under ``"pellucid"``. Reading refuses, by name, every key whose meaning we
cannot honour.
"""

import dataclasses
from typing import Any

from pellucid.checkpoint.huggingface_family import family_type, read_family, write_family
from pellucid.checkpoint.huggingface_keys import (
    CLASSES,
    FIELDS,
    HARMLESS,
    MORE_KEYS,
    OWN,
    ROPE_KEYS,
    SHAPE,
    WINDOW_KEYS,
    brief,
    only,
)
from pellucid.checkpoint.huggingface_rope import read_rope, write_rope
from pellucid.config import ModelConfig, build
from pellucid.errors import ConfigError
from pellucid.model_config import MAX_LAYERS
from pellucid.registry import nearest

ENCODERS = ("pellucid_encoder", "bert")
"""The model_types of encoders, which `pellucid.checkpoint.encoder_folder` reads."""


def to_hf_config(
    config: ModelConfig,
    *,
    dtype: str = "float32",
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """The config.json of a model, for transformers 5 and for `from_hf_config`, which gives ``config`` back.

    Args:
        dtype: of the saved weights, such as "float32".
    """
    table = _foreign(config) | {
        "dtype": dtype,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    seen = _read_foreign(table)
    own = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != getattr(seen, f.name)
    }
    return table | ({OWN: own} if own else {})


def from_hf_config(table: dict[str, Any]) -> ModelConfig:
    """The model that a config.json describes.

    Both generations of rotary keys are read: ``rope_theta`` + ``rope_scaling`` and ``rope_parameters``.

    Raises:
        ConfigError: a key or value that we cannot represent, or one missing; names it.
    """
    config = _read_foreign({key: value for key, value in table.items() if key != OWN})
    own = table.get(OWN, {})
    if not isinstance(own, dict):
        raise ConfigError(f"config.json: {OWN} must be a table, got {own!r}")
    if not own:
        return config
    ours = build(ModelConfig, {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | own, f"{OWN}.")
    again = _read_foreign(_foreign(ours))
    for f in dataclasses.fields(config):
        if getattr(again, f.name) != getattr(config, f.name):
            raise ConfigError(
                f"config.json: the table {OWN!r} says {brief(own)}, which makes {f.name} {getattr(again, f.name)!r}, but "
                f"the keys beside it make it {getattr(config, f.name)!r}; correct or remove the table"
            )
    return ours


# -- writing ------------------------------------------------------------------------------------------------


def _foreign(config: ModelConfig) -> dict[str, Any]:
    """The keys without our own table and without what is not about the model's shape."""
    kind = _model_type(config)
    table: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in (*SHAPE, *FIELDS[kind])},
        **write_family(kind, config),
        "rope_parameters": write_rope(config),
    }
    windowed = _is_windowed(config)
    if kind in WINDOW_KEYS:
        table["sliding_window"] = config.sliding_window if windowed else None
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        table["use_sliding_window"] = windowed
    if kind in ("qwen2", "qwen3"):
        full = min(config.max_window_layers, config.num_hidden_layers) if windowed else config.num_hidden_layers
        table["max_window_layers"] = full
        table["layer_types"] = _layer_types(full, config.num_hidden_layers)
    return table


def _model_type(config: ModelConfig) -> str:
    """The class in transformers that computes this model, or our own name."""
    windowed, own_out_bias = _is_windowed(config), config.attention_out_bias is not None
    if config.is_latent or config.n_routed_experts:
        return family_type(config, windowed)
    if config.attention_gate:
        return OWN
    if config.qk_norm:
        return OWN if config.mlp_bias or own_out_bias else "qwen3"
    if own_out_bias:
        return "qwen2" if config.attention_bias and not config.mlp_bias else OWN
    if not windowed and config.hidden_size % config.num_attention_heads == 0:  # LlamaConfig insists, without need
        return "llama"
    biases = config.attention_bias or config.mlp_bias
    return "mistral" if not biases and not (windowed and config.max_window_layers) else OWN


def _is_windowed(config: ModelConfig) -> bool:
    return config.sliding_window is not None and config.max_window_layers < config.num_hidden_layers


def _layer_types(full: int, layers: int) -> list[str]:
    return ["full_attention"] * full + ["sliding_attention"] * (layers - full)


# -- reading ------------------------------------------------------------------------------------------------


def _read_foreign(table: dict[str, Any]) -> ModelConfig:
    kind = table.get("model_type")
    if kind in ENCODERS:
        raise ConfigError(
            f"config.json: model_type {kind!r} is an encoder, which gives vectors and no text; open it with "
            "pellucid.load_encoder or `pellucid embed`"
        )
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ConfigError(
            f"config.json: model_type {kind!r} cannot be read{nearest(str(kind), list(FIELDS))}; "
            f"known: {', '.join(FIELDS)}"
        )
    _refuse_unknown(kind, table)
    if missing := [name for name in SHAPE if table.get(name) is None]:
        raise ConfigError(f"config.json lacks {', '.join(missing)}")
    if not isinstance(layers := table["num_hidden_layers"], int) or layers > MAX_LAYERS:
        raise ConfigError(
            f"config.json: num_hidden_layers must be a whole number up to {MAX_LAYERS:,}, got {brief(layers)}"
        )
    values = {name: table[name] for name in SHAPE}
    values |= {name: table.get(name, default) for name, default in FIELDS[kind].items()}
    for name in ("num_key_value_heads", "head_dim"):
        if table.get(name) is not None and not table[name]:
            raise ConfigError(f"config.json: {name} is {brief(table[name])}; give at least 1, or leave it out")
        values[name] = values[name] or 0
    if kind == "qwen2":
        values |= {"attention_bias": True, "attention_out_bias": False}
    if kind == "qwen3":
        values["qk_norm"] = True
    values |= read_family(kind, table)
    if kind in WINDOW_KEYS:
        values |= _windows(kind, table)
    elif table.get("layer_types") not in (None, ["full_attention"] * values["num_hidden_layers"]):
        raise ConfigError(f"config.json: layer_types must all be full_attention for model_type {kind!r}")
    theta, scaling = read_rope(table)
    return build(ModelConfig, values | {"rope_theta": theta, "rope_scaling": scaling}, "config.json: ")


def _refuse_unknown(kind: str, table: dict[str, Any]) -> None:
    known, fixed = {*SHAPE, *FIELDS[kind], *WINDOW_KEYS.get(kind, ()), *MORE_KEYS.get(kind, ()), *ROPE_KEYS}, only(kind)
    for key, value in table.items():
        if key in fixed:
            if value not in fixed[key]:
                supported = " or ".join(repr(each) for each in fixed[key] if each is not None) or "null"
                raise ConfigError(f"config.json: {key} is {brief(value)}; only {supported} is supported")
        elif key not in known and key not in HARMLESS:
            raise ConfigError(
                f"config.json: key {key} ({brief(value)}) means nothing to model_type {kind!r}"
                f"{nearest(key, sorted(known))}; remove it if it does not change the model"
            )


def _windows(kind: str, table: dict[str, Any]) -> dict[str, Any]:
    """sliding_window and max_window_layers; (None, 0) where no layer has a window."""
    keys = {name: table.get(name, default) for name, default in WINDOW_KEYS[kind].items()}
    layers, types = table["num_hidden_layers"], table.get("layer_types")
    window = keys["sliding_window"] if keys.get("use_sliding_window", True) else None
    full = keys.get("max_window_layers") or 0
    if not isinstance(full, int):
        raise ConfigError(f"config.json: max_window_layers must be a whole number, got {brief(full)}")
    if types is not None and not isinstance(types, list):
        raise ConfigError(f"config.json: layer_types must be a list, got {brief(types)}")
    if kind == "qwen3_moe" and window is not None and full:
        raise ConfigError(
            f"config.json: max_window_layers is {full}; with use_sliding_window every layer of model_type {kind!r} has the "
            "window, set it to 0"
        )
    full = min(full, layers) if window is not None else layers
    expected = _layer_types(full, layers)
    if kind in ("qwen2", "qwen3") and types is not None and types != expected:  # transformers goes by the list
        full = types.count("full_attention")
        expected = _layer_types(full, layers)
    if types is not None and (types != expected or (window is None and full < layers)):
        raise ConfigError(
            f"config.json: layer_types {brief(types)} does not fit; supported are full_attention layers followed by "
            "sliding_attention layers with a sliding_window, num_hidden_layers in all"
        )
    if full >= layers:
        return {"sliding_window": None, "max_window_layers": 0}
    return {"sliding_window": window, "max_window_layers": full}
