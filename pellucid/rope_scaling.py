"""What ``model.rope_scaling`` may hold: the keys of each way to stretch the window."""

import math
from typing import Any

from pellucid.errors import ConfigError
from pellucid.registry import nearest

_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "ntk": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_ROPE_OPTIONAL = {
    "yarn": {
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    },
}  # fmt: skip


def check_rope_scaling(scaling: dict[str, Any]) -> None:
    """`ConfigError` where a key is unknown, missing or out of range for the ``rope_type``."""
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        known = list(_ROPE_KEYS)
        close = nearest(str(kind), known)
        raise ConfigError(f"model.rope_scaling.rope_type is {kind!r}{close}; known: {', '.join(known)}")
    keys = set(scaling) - {"rope_type"}
    if missing := _ROPE_KEYS[kind] - keys:
        raise ConfigError(f"model.rope_scaling lacks {', '.join(sorted(missing))} for rope_type {kind!r}")
    if unknown := keys - _ROPE_KEYS[kind] - _ROPE_OPTIONAL.get(kind, set()):
        raise ConfigError(f"model.rope_scaling.{min(unknown)} is not known to rope_type {kind!r}")
    for key in sorted(keys - {"truncate"}):
        value, least = scaling[key], 1 if key in ("factor", "original_max_position_embeddings") else 0
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < math.inf:
            raise ConfigError(f"model.rope_scaling.{key} must be a number of at least {least}, got {value!r}")
    if not isinstance(scaling.get("truncate", True), bool):
        raise ConfigError(f"model.rope_scaling.truncate must be true or false, got {scaling['truncate']!r}")
    if kind == "llama3" and not 0 < scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ConfigError(
            f"model.rope_scaling.low_freq_factor {scaling['low_freq_factor']} must be positive and below "
            f"high_freq_factor {scaling['high_freq_factor']}"
        )
