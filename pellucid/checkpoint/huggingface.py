"""`ModelConfig` <-> a Hugging Face ``config.json``. Weights need no translation: their names are the same.

A model that transformers has a class for is written as that class (llama, qwen3, mistral); any other as model_type
"pellucid", with the keys of `ModelConfig`. What transformers does not know but we must not lose stands in a table of
its own under ``"pellucid"``. Reading refuses, by name, every key whose meaning we cannot honour.
"""

import dataclasses
from typing import Any

from pellucid.config import ModelConfig, build
from pellucid.errors import ConfigError
from pellucid.model.rope import ntk_theta
from pellucid.registry import nearest

OWN = "pellucid"
"""Our model_type, and the key of the table of what transformers has no key for."""

ENCODERS = ("pellucid_encoder", "bert")
"""The model_types of encoders, which `pellucid.checkpoint.encoder_folder` reads."""

_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
"""Fields that every config.json must have, under the same name as ours."""

_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"attention_bias": False, "mlp_bias": False},
    "mistral": _COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "qwen3": _COMMON
    | {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768, "attention_bias": False},
    OWN: {
        f.name: f.default
        for f in dataclasses.fields(ModelConfig)
        if f.name not in _SHAPE and f.name not in ("rope_theta", "rope_scaling", "dropout", "attend", "embedding_range")
    },
}
"""Fields of each model_type that have our name, and what its config class in transformers 5 takes where they lack."""

_WINDOW_KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen3": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    OWN: {},
}

_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "chunk_size_feed_forward": (0,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "quantization_config": (None,),
}
"""Keys that change the model, and the values of them that leave it the one we compute."""

_HARMLESS = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "_name_or_path", "name_or_path", "_attn_implementation", "attn_implementation",
    "return_dict", "id2label", "label2id", "problem_type", "is_llama_config", "transformers.js_config", "task_specific_params",
    "unsloth_version", "unsloth_fixed",
}  # fmt: skip
"""Keys that say nothing about the forward pass."""

_ROPE_KEYS = {"rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings", "layer_types"}


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
                f"config.json: the table {OWN!r} says {_brief(own)}, which makes {f.name} {getattr(again, f.name)!r}, but "
                f"the keys beside it make it {getattr(config, f.name)!r}; correct or remove the table"
            )
    return ours


# -- writing ------------------------------------------------------------------------------------------------


def _foreign(config: ModelConfig) -> dict[str, Any]:
    """The keys without our own table and without what is not about the model's shape."""
    kind = _model_type(config)
    classes = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    table: dict[str, Any] = {
        "architectures": [classes.get(kind, "PellucidForCausalLM")],
        "model_type": kind,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in (*_SHAPE, *_FIELDS[kind])},
        "rope_parameters": _rope_parameters(config),
    }
    windowed = _is_windowed(config)
    if kind == "mistral":
        table["sliding_window"] = config.sliding_window if windowed else None
    elif kind == "qwen3":
        full = min(config.max_window_layers, config.num_hidden_layers) if windowed else config.num_hidden_layers
        table |= {
            "use_sliding_window": windowed,
            "sliding_window": config.sliding_window if windowed else None,
            "max_window_layers": full,
            "layer_types": ["full_attention"] * full + ["sliding_attention"] * (config.num_hidden_layers - full),
        }
    return table


def _model_type(config: ModelConfig) -> str:
    """The class in transformers that computes this model, or our own name."""
    biases = config.attention_bias or config.mlp_bias
    windowed = _is_windowed(config)
    if config.attention_gate:
        return OWN
    if config.qk_norm:
        return OWN if config.mlp_bias else "qwen3"
    if not windowed and config.hidden_size % config.num_attention_heads == 0:  # LlamaConfig insists, without need
        return "llama"
    return "mistral" if not biases and not (windowed and config.max_window_layers) else OWN


def _is_windowed(config: ModelConfig) -> bool:
    return config.sliding_window is not None and config.max_window_layers < config.num_hidden_layers


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    if scaling["rope_type"] == "ntk":
        return {"rope_type": "default", "rope_theta": ntk_theta(config.rope_theta, scaling["factor"], config.head_dim)}
    return {**scaling, "rope_theta": config.rope_theta}


# -- reading ------------------------------------------------------------------------------------------------


def _read_foreign(table: dict[str, Any]) -> ModelConfig:
    kind = table.get("model_type")
    if kind in ENCODERS:
        raise ConfigError(
            f"config.json: model_type {kind!r} is an encoder, which gives vectors and no text; open it with "
            "pellucid.load_encoder or `pellucid embed`"
        )
    if kind not in _FIELDS:
        raise ConfigError(
            f"config.json: model_type {kind!r} cannot be read{nearest(str(kind), list(_FIELDS))}; "
            f"known: {', '.join(_FIELDS)}"
        )
    _refuse_unknown(kind, table)
    if missing := [name for name in _SHAPE if table.get(name) is None]:
        raise ConfigError(f"config.json lacks {', '.join(missing)}")
    if not isinstance(table["num_hidden_layers"], int):
        raise ConfigError(f"config.json: num_hidden_layers must be a whole number, got {table['num_hidden_layers']!r}")
    values = {name: table[name] for name in _SHAPE}
    values |= {name: table.get(name, default) for name, default in _FIELDS[kind].items()}
    for name in ("num_key_value_heads", "head_dim"):
        values[name] = values[name] or 0
    if kind == "qwen3":
        values["qk_norm"] = True
    if kind in ("mistral", "qwen3"):
        values |= _windows(kind, table)
    elif table.get("layer_types") not in (None, ["full_attention"] * values["num_hidden_layers"]):
        raise ConfigError(f"config.json: layer_types must all be full_attention for model_type {kind!r}")
    theta, scaling = _rope(table)
    return build(ModelConfig, values | {"rope_theta": theta, "rope_scaling": scaling}, "config.json: ")


def _refuse_unknown(kind: str, table: dict[str, Any]) -> None:
    known = {*_SHAPE, *_FIELDS[kind], *_WINDOW_KEYS[kind], *_ROPE_KEYS}
    for key, value in table.items():
        if key in known or key in _HARMLESS:
            continue
        if key not in _ONLY:
            raise ConfigError(
                f"config.json: key {key} ({_brief(value)}) means nothing to model_type {kind!r}"
                f"{nearest(key, sorted(known))}; remove it if it does not change the model"
            )
        if value not in _ONLY[key]:
            raise ConfigError(f"config.json: {key} is {_brief(value)}; only {_ONLY[key][0]!r} is supported")


def _windows(kind: str, table: dict[str, Any]) -> dict[str, Any]:
    """sliding_window and max_window_layers; (None, 0) where no layer has a window."""
    keys = {name: table.get(name, default) for name, default in _WINDOW_KEYS[kind].items()}
    layers, types = table["num_hidden_layers"], table.get("layer_types")
    window = keys["sliding_window"] if keys.get("use_sliding_window", True) else None
    full = keys.get("max_window_layers") or 0
    if not isinstance(full, int):
        raise ConfigError(f"config.json: max_window_layers must be a whole number, got {_brief(full)}")
    if types is not None and not isinstance(types, list):
        raise ConfigError(f"config.json: layer_types must be a list, got {_brief(types)}")
    full = min(full, layers) if window is not None else layers
    expected = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if kind == "qwen3" and types is not None and types != expected:  # transformers goes by the list
        full = types.count("full_attention")
        expected = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if types is not None and (types != expected or (window is None and full < layers)):
        raise ConfigError(
            f"config.json: layer_types {_brief(types)} does not fit; supported are full_attention layers followed by "
            "sliding_attention layers with a sliding_window, num_hidden_layers in all"
        )
    if full >= layers:
        return {"sliding_window": None, "max_window_layers": 0}
    return {"sliding_window": window, "max_window_layers": full}


def _rope(table: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and rope_scaling in our form; scaling None where it is the default."""
    given = {key: table[key] for key in ("rope_parameters", "rope_scaling") if table.get(key)}
    forms = {key: _flat_rope(key, value, table) for key, value in given.items()}
    if len(forms) == 2 and forms["rope_parameters"] != forms["rope_scaling"]:
        raise ConfigError("config.json: rope_parameters and rope_scaling are both there and differ; remove one of them")
    theta, scaling = next(iter(forms.values()), (table.get("rope_theta") or 10_000.0, {"rope_type": "default"}))
    original, kind = table.get("original_max_position_embeddings"), scaling["rope_type"]
    if original is not None:
        if kind in ("yarn", "llama3"):
            scaling["original_max_position_embeddings"] = original
        elif original != table.get("max_position_embeddings"):
            raise ConfigError(
                f"config.json: original_max_position_embeddings {original!r} means nothing to rope_type {kind!r}"
            )
    return theta, None if kind == "default" and len(scaling) == 1 else scaling


def _flat_rope(key: str, value: Any, table: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: {key} must be a table, got {_brief(value)}")
    if all(isinstance(inner, dict) for inner in value.values()):  # one table for each layer type
        inner, *others = value.values()
        if any(other != inner for other in others):
            raise ConfigError(f"config.json: {key} differs between layer types: {_brief(value)}")
        value = inner
    scaling = {name: x for name, x in value.items() if x is not None}
    legacy = scaling.pop("type", None)
    kind = scaling.setdefault("rope_type", legacy or "default")
    if legacy not in (None, kind):
        raise ConfigError(f"config.json: {key} has type {legacy!r} and rope_type {kind!r}; remove one of them")
    if scaling.pop("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"config.json: {key}.partial_rotary_factor is {value['partial_rotary_factor']}; only 1 works")
    theta = scaling.pop("rope_theta", table.get("rope_theta") or 10_000.0)
    window = table.get("max_position_embeddings", _FIELDS[table["model_type"]]["max_position_embeddings"])
    if kind == "llama3":
        scaling.setdefault("original_max_position_embeddings", window)
    original = scaling.get("original_max_position_embeddings")
    if kind in ("default", "linear", "ntk", "dynamic") and original is not None and original == window:
        del scaling["original_max_position_embeddings"]
    if kind == "yarn" and "factor" not in scaling and isinstance(original, int) and isinstance(window, int):
        scaling["factor"] = window / max(original, 1)
    return theta, scaling


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
