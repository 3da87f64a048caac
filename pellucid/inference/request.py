"""What is asked of a model and what comes back, in token ids."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pellucid.config import ModelConfig
from pellucid.errors import RequestError
from pellucid.registry import nearest

FinishReason = Literal["stop", "length", "error"]
"""A stop id was drawn; ``max_tokens`` or the window is used up; the logits were not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The filters act in the order temperature, top_k, top_p.

    Raises:
        RequestError: a value is of the wrong type or out of range; names the field and the value.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token, on a tie the lowest id."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens that reaches this mass, at least one token."""
    max_tokens: int = 256
    """At most this many new tokens; less where the model's window ends first."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch; None draws one for each prompt."""
    n: int = 1
    """Samples of each prompt."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the generation. The id drawn is the last of the result's ids."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, math.inf)
        _check_number("top_p", self.top_p, 0, 1)
        _check_whole("top_k", self.top_k, 0)
        _check_whole("max_tokens", self.max_tokens, 1)
        _check_whole("n", self.n, 1)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0)
            _require(self.seed < 2**64, f"seed must be below 2**64, got {self.seed}")
        _require(isinstance(self.stop_ids, (tuple, list)), f"stop_ids must be a list of ids, got {self.stop_ids!r}")
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        for stop in self.stop_ids:
            _check_whole("stop_ids", stop, 0)


def update_params(params: SamplingParams, table: Mapping[str, Any]) -> SamplingParams:
    """``params`` with the fields that ``table`` names; `RequestError` for an unknown one, naming the nearest."""
    known = [f.name for f in fields(SamplingParams)]
    for key in table:
        if key not in known:
            raise RequestError(
                f"unknown sampling parameter {key}{nearest(key, known) or '; known: ' + ', '.join(known)}"
            )
    return replace(params, **table)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued; ``params.n`` samples of it are drawn."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one sample, told as soon as it is drawn.

    ``token`` is None only where ``finish_reason`` is ``"error"``. ``logprob`` (nats) is the token's under the model's
    own distribution: temperature 1, nothing filtered.
    """

    request_id: str
    token: int | None
    logprob: float
    finish_reason: FinishReason | None
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One finished sample: the new ids with the stop id if one was drawn, their logprobs as in `TokenEvent`, and why it ended."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


def window_of(config: ModelConfig) -> int:
    """The most tokens that a sequence may hold, prompt and answer.

    ``max_position_embeddings``; dynamic rotary scaling only starts there, and stretches it by its factor.
    """
    scaling = config.rope_scaling or {}
    factor = scaling["factor"] if scaling.get("rope_type") == "dynamic" else 1
    return int(config.max_position_embeddings * factor)


def check_request(request: Request, config: ModelConfig) -> int:
    """The new tokens that this model can give: ``max_tokens``, or less where the window ends first.

    Raises:
        RequestError: the prompt is empty, holds an id that the model lacks, or leaves no room in the window.
    """
    window, length = window_of(config), len(request.tokens)
    if not length:
        raise RequestError(
            "prompt is empty and there is no beginning-of-text token to start from; give at least one token"
        )
    worst = max(request.tokens) if min(request.tokens) >= 0 else min(request.tokens)
    if not 0 <= worst < config.vocab_size:
        raise RequestError(
            f"prompt holds the token id {worst} and the model knows 0 to {config.vocab_size - 1:,}; "
            "use the tokenizer that the model was trained with"
        )
    if length >= window:
        raise RequestError(
            f"prompt has {length:,} tokens and the model's window is {window:,}; shorten it or raise max_position_embeddings"
        )
    return min(request.params.max_tokens, window - length)


def _check_whole(name: str, value: Any, low: int) -> None:
    _require(isinstance(value, int) and not isinstance(value, bool), f"{name} must be a whole number, got {value!r}")
    _require(value >= low, f"{name} must be at least {low}, got {value}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    _require(isinstance(value, (int, float)) and not isinstance(value, bool), f"{name} must be a number, got {value!r}")
    _require(low <= value <= high and math.isfinite(value), f"{name} must be {_range(low, high)}, got {value}")


def _range(low: float, high: float) -> str:
    return f"at least {low}" if math.isinf(high) else f"in [{low}, {high}]"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message)
