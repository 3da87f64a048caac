"""Rotary embeddings in a Hugging Face ``config.json``: both generations of its keys are read, the newest is written."""

from typing import Any

from pellucid.checkpoint.huggingface_keys import FIELDS, brief
from pellucid.errors import ConfigError
from pellucid.model.rope import ntk_theta
from pellucid.model_config import ModelConfig


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """``rope_parameters`` of a config.json."""
    scaling = dict(config.rope_scaling or {"rope_type": "default"})
    if scaling["rope_type"] == "ntk":
        return {"rope_type": "default", "rope_theta": ntk_theta(config.rope_theta, scaling["factor"], config.head_dim)}
    return {**scaling, "rope_theta": config.rope_theta}


def read_rope(table: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and rope_scaling in our form; scaling None where it is the default."""
    given = {key: table[key] for key in ("rope_parameters", "rope_scaling") if table.get(key)}
    forms = {key: _flat_rope(key, value, table) for key, value in given.items()}
    if len(forms) == 2 and forms["rope_parameters"] != forms["rope_scaling"]:
        raise ConfigError("config.json: rope_parameters and rope_scaling are both there and differ; remove one of them")
    theta, scaling = next(iter(forms.values()), (_theta(table), {"rope_type": "default"}))
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
        raise ConfigError(f"config.json: {key} must be a table, got {brief(value)}")
    if all(isinstance(inner, dict) for inner in value.values()):  # one table for each layer type
        inner, *others = value.values()
        if any(other != inner for other in others):
            raise ConfigError(f"config.json: {key} differs between layer types: {brief(value)}")
        value = inner
    scaling = {name: x for name, x in value.items() if x is not None}
    legacy = scaling.pop("type", None)
    kind = scaling.setdefault("rope_type", legacy or "default")
    if legacy not in (None, kind):
        raise ConfigError(f"config.json: {key} has type {legacy!r} and rope_type {kind!r}; remove one of them")
    if scaling.pop("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"config.json: {key}.partial_rotary_factor is {value['partial_rotary_factor']}; only 1 works")
    theta = scaling.pop("rope_theta", _theta(table))
    if table.get("rope_theta") not in (None, theta):
        raise ConfigError(
            f"config.json: rope_theta is {brief(table['rope_theta'])} and {key}.rope_theta {brief(theta)}; remove one of them"
        )
    window = table.get("max_position_embeddings", FIELDS[table["model_type"]]["max_position_embeddings"])
    if kind == "llama3":
        scaling.setdefault("original_max_position_embeddings", window)
    original = scaling.get("original_max_position_embeddings")
    if kind in ("default", "linear", "ntk", "dynamic") and original is not None and original == window:
        del scaling["original_max_position_embeddings"]
    if kind == "yarn" and "factor" not in scaling and isinstance(original, int) and isinstance(window, int):
        scaling["factor"] = window / max(original, 1)
    return theta, scaling


def _theta(table: dict[str, Any]) -> Any:
    """The base that stands beside the tables; that of transformers where it does not."""
    return 10_000.0 if table.get("rope_theta") is None else table["rope_theta"]
