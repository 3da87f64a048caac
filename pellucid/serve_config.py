"""The settings of `pellucid serve`, from TOML and flags."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from pellucid.config import Dtype, build, read_toml
from pellucid.errors import require

MAX_SECONDS = 1_000_000
"""What timers of every platform can count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """One server. Unlike the wire, which ignores fields that it does not know, this refuses them."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines can reach needs keys, or allow_anonymous."""
    port: int = 8000
    """0 takes a free one, which is told when the server listens."""
    name: str = ""
    """What clients call MODEL; empty: its folder's name. It is also called "default"."""
    models: dict[str, str] = field(default_factory=dict)
    """Further models, name to folder; each has weights, cache and steps of its own."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters on MODEL, name to folder; each is merged into a copy of it, and costs as much as a model."""
    embedders: dict[str, str] = field(default_factory=dict)
    """Encoders for /v1/embeddings, name to folder."""
    any_model: bool = False
    """Let MODEL answer whatever name a client asks for; many tools have names of vendors built in."""

    device: str = "auto"
    """Such as "cpu" or "cuda"; "auto": cuda where there is one, else cpu."""
    dtype: Dtype = "auto"
    """Of the weights; "auto": as stored."""
    weights: Literal["bf16", "int8", "int4"] | None = None
    """Packs those of the linear layers as they are loaded, on the CPU: into 8 or 4 bits, or for multiplying in bfloat16."""
    threads: int = 0
    """Of torch; 0: as torch chooses."""
    kv_gb: float = 1.0
    """For keys and values of each model, 10^9 bytes."""
    page_size: int = 64
    """Tokens a block of the cache."""
    max_running: int = 64
    """Sequences of a model that run together."""
    token_budget: int = 512
    """Tokens a step: how long a stream may wait because another's prompt is being read."""
    fast: bool = False
    """Give up that a result has the same bits whatever runs beside it, for speed."""
    speculate: int = 0
    """Tokens to guess from the text so far."""
    prefix_cache: bool = True
    """Keep what was computed for requests that begin alike."""

    api_key_file: str | None = None
    """One key a line; empty lines and what follows # are ignored. PELLUCID_API_KEY in the environment is a key too."""
    allow_anonymous: bool = False
    """Let everybody who reaches the address use it."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages, such as "https://chat.example", whose scripts may use the server; "*": all. Empty: only its own page."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names in the Host header that a server on a loopback address answers to, as behind a proxy."""
    max_queue: int = 64
    """Sequences of a model that may wait; more are refused with 429 and a time to come back."""
    max_choices: int = 16
    """The most samples ("n") that a request may ask for; never more than max_running."""
    max_body_mb: float = 8.0
    """The longest body of a request, 10^6 bytes."""
    request_timeout_s: float = 600.0
    """The longest that a request may wait and run."""
    drain_seconds: float = 30.0
    """After SIGTERM or Ctrl-C, the longest that answers which have begun may take to finish."""
    keep_alive_s: float = 15.0
    """A stream in which nothing happens sends a comment so often."""
    log_prompts: bool = False
    """Write what clients send into the log; else it never holds their text."""

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"port must be in [0, 65535], got {self.port}")
        for name in ("page_size", "max_running", "token_budget", "max_choices"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_queue", "speculate", "threads", "drain_seconds"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("kv_gb", "max_body_mb", "request_timeout_s", "keep_alive_s"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"{name} must be positive and finite, got {value}")
        for name in ("request_timeout_s", "drain_seconds", "keep_alive_s"):
            value = getattr(self, name)
            require(value <= MAX_SECONDS, f"{name} must be at most {MAX_SECONDS:,}, got {value}")
        for name in ("models", "adapters", "embedders"):
            for key, path in getattr(self, name).items():
                require(bool(key), f"{name}: a model without a name; give NAME=PATH")
                require(isinstance(path, str) and bool(path), f"{name}.{key} must be a folder, got {path!r}")
        for origin in self.cors_origins:
            require(
                origin == "*" or ("://" in origin and not origin.endswith("/")),
                f'cors_origins: {origin!r} is no origin; write it as "https://chat.example", without a path, or "*"',
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)


def load_serve_config(path: str | Path | None, given: Mapping[str, Any]) -> ServeConfig:
    """The settings in a TOML file, changed by those given; tables of models are merged.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown (the nearest is named) or a value wrong.
    """
    table = read_toml(Path(path)) if path is not None else {}
    for key, value in given.items():
        earlier = table.get(key)
        table[key] = earlier | value if isinstance(earlier, dict) and isinstance(value, dict) else value
    return build(ServeConfig, table)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own and nobody else's."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
