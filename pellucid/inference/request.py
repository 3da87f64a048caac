"""What is asked of a model and what comes back, in token ids."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.errors import RequestError
from pellucid.inference.constraints import Constraint, ConstraintState
from pellucid.registry import nearest

FinishReason = Literal["stop", "length", "error"]
"""A stop id was drawn or a constraint has nothing more to allow; ``max_tokens`` or the window is used up; the logits were
not finite, or a processor or constraint of the request's own failed."""

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
"""Prompt and output ids so far, and the row's logits [V] float32 (its own copy), to new logits of that shape and type."""

MAX_SAMPLES = 1024
"""The most samples of one prompt."""
MAX_ALTERNATIVES = 20
"""The most alternatives that are told for one token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is drawn.

    Settings act in this order: logit_bias, the three penalties (repetition, then frequency and presence),
    logits_processors, allowed_ids or constraint, min_tokens, temperature, top_k, top_p, min_p. Temperature 0, top_k 1 and
    top_p 0 are the same thing: the best token, on a tie the lowest id.

    Raises:
        RequestError: a value is of the wrong type or out of range, or two contradict each other; names the field, the
            value and the way out. Ids are compared with the vocabulary in `check_request`.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token, on a tie the lowest id."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens that reaches this mass (of what top_k left), at least one token."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one, at the given temperature."""
    repetition_penalty: float = 1.0
    """Logits of ids in the prompt or the output are divided by it where positive and multiplied where not; above 1
    discourages, below encourages. (Keskar et al. 2019, arXiv:1909.05858, section 4.1; signs as in vLLM.)"""
    presence_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logits of ids that the output holds."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logit of each id, times how often the output holds it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Id to a number in [-100, 100] that is added to its logit."""
    allowed_ids: tuple[int, ...] | None = None
    """Only these ids can be drawn, stop ids among them only where listed; None allows all."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the generation. The id drawn is the last of the result's ids."""
    min_tokens: int = 0
    """Stop ids are not drawn before so many tokens, unless nothing else is left to draw."""
    max_tokens: int = 256
    """At most this many new tokens; less where the model's window ends first. 0 draws nothing."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch; None draws one for each prompt."""
    n: int = 1
    """Samples of each prompt, 1 to 1024."""
    top_logprobs: int = 0
    """Tell the so many most probable ids of each step, 0 to 20, besides the drawn one."""
    prompt_logprobs: int | None = None
    """Tell the logprob of each prompt token but the first, with so many alternatives, 0 to 20; None tells nothing."""
    constraint: Constraint | None = None
    """A grammar for the output. A stop id can be drawn exactly where the grammar may end, and where nothing more may
    follow the sample ends with "stop" at once; without stop ids only that ends it. Not together with allowed_ids."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Called in turn. An exception, another shape or type, NaN, +inf or nothing but -inf ends this request with "error"."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_ids()
        self._check_objects()
        self._check_together()

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, without noise."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    def _check_numbers(self) -> None:
        _check_number("temperature", self.temperature, 0, math.inf)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0, math.inf)
        _require(self.repetition_penalty > 0, "repetition_penalty must be above 0, got 0; 1 switches it off")
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        for name, low in (("top_k", 0), ("min_tokens", 0), ("max_tokens", 0)):
            _check_whole(name, getattr(self, name), low)
        _check_whole("n", self.n, 1, MAX_SAMPLES)
        _check_whole("top_logprobs", self.top_logprobs, 0, MAX_ALTERNATIVES)
        if self.prompt_logprobs is not None:
            _check_whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_ALTERNATIVES)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0)
            _require(self.seed < 2**64, f"seed must be below 2**64, got {self.seed}")

    def _check_ids(self) -> None:
        object.__setattr__(self, "stop_ids", _ids("stop_ids", self.stop_ids))
        if self.allowed_ids is not None:
            object.__setattr__(self, "allowed_ids", _ids("allowed_ids", self.allowed_ids))
            _require(
                bool(self.allowed_ids), "allowed_ids is empty, so nothing could be drawn; leave it out to allow all"
            )
        _require(isinstance(self.logit_bias, Mapping), f"logit_bias must map ids to numbers, got {self.logit_bias!r}")
        for id_, bias in self.logit_bias.items():
            _check_whole("logit_bias", id_, 0)
            _check_number(f"logit_bias[{id_}]", bias, -100, 100)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_objects(self) -> None:
        _require(
            self.constraint is None or isinstance(self.constraint, Constraint),
            f"constraint must be a Constraint, got {self.constraint!r}; make one with make_constraint",
        )
        _require(
            isinstance(self.logits_processors, (tuple, list)) and all(map(callable, self.logits_processors)),
            f"logits_processors must be a list of functions, got {self.logits_processors!r}",
        )
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))

    def _check_together(self) -> None:
        _require(
            self.min_tokens <= self.max_tokens,
            f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}; lower the one or raise the other",
        )
        _require(
            self.allowed_ids is None or self.constraint is None,
            "allowed_ids and constraint both say what may be drawn; give one of them",
        )
        _require(
            self.allowed_ids is None or not self.min_tokens or not set(self.allowed_ids) <= set(self.stop_ids),
            f"min_tokens is {self.min_tokens} and allowed_ids holds stop ids only; allow another id or lower min_tokens",
        )


def update_params(params: SamplingParams, table: Mapping[str, Any]) -> SamplingParams:
    """``params`` with the fields that ``table`` names, as it comes from JSON: the ids of ``logit_bias`` may be text.

    Raises:
        RequestError: an unknown field, naming the nearest; one that holds objects; or as in `SamplingParams`.
    """
    known = [f.name for f in fields(SamplingParams) if f.name not in _OBJECTS]
    for key in table:
        if key in _OBJECTS:
            raise RequestError(f"{key} holds objects and cannot be given in a table; pass it to SamplingParams")
        if key not in known:
            raise RequestError(
                f"unknown sampling parameter {key}{nearest(key, known) or '; known: ' + ', '.join(known)}"
            )
    bias = table.get("logit_bias")
    if isinstance(bias, Mapping):
        table = {**table, "logit_bias": {_id_from_text(id_): value for id_, value in bias.items()}}
    return replace(params, **table)


_OBJECTS = ("constraint", "logits_processors")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued; ``params.n`` samples of it are drawn."""

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    salt: str = ""
    """Only requests with the same one share cached prefixes."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the next token of one sample depends on, besides its logits."""

    params: SamplingParams
    seed: int
    choice: int
    """Which of the request's ``n`` samples."""
    position: int
    """Where the token will stand: the tokens before it, prompt and output."""
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    constraint: ConstraintState | None = None
    """Has accepted the output; None exactly where ``params.constraint`` is."""


Alternatives = tuple[tuple[int, float], ...]
"""(id, logprob), the most probable first, of equal ones the lowest id; a token outside the top is listed last."""


class TokenLogprob(NamedTuple):
    """What the model thought of a token that it was given: its logprob as in `TokenEvent`, and the alternatives."""

    logprob: float
    top: Alternatives = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one sample, told as soon as it is drawn.

    ``token`` is None only where nothing was drawn: ``finish_reason`` is ``"error"``, and ``error`` then says what
    happened, or ``"length"`` of a request for no token. ``logprob`` and ``top_logprobs`` (nats) are under the model's own
    distribution: temperature 1, no filter, penalty, bias or mask.
    """

    request_id: str
    token: int | None
    logprob: float
    finish_reason: FinishReason | None
    sample: int = 0
    top_logprobs: Alternatives = ()
    error: str | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    """As in `Result`, with the first event of each sample."""


@dataclass(frozen=True, slots=True)
class Result:
    """One finished sample: the new ids with the stop id if one was drawn, their logprobs as in `TokenEvent`, and why it ended.

    ``top_logprobs`` (of each new id) and ``prompt_logprobs`` (of each prompt token; None for the first, which nothing
    predicts) are None unless asked for. ``error`` is as in `TokenEvent`.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    top_logprobs: list[Alternatives] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None


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
        RequestError: the prompt is empty, holds an id that the model lacks, or leaves no room in the window (where nothing
            is to be drawn it may fill it); an id in the parameters, or the constraint's tokenizer, is outside the vocabulary.
    """
    window, length, params = window_of(config), len(request.tokens), request.params
    if not length:
        raise RequestError(
            "prompt is empty and there is no beginning-of-text token to start from; give at least one token"
        )
    worst = _outside(request.tokens, config.vocab_size)
    if worst is not None:
        raise RequestError(
            f"prompt holds the token id {worst} and the model knows 0 to {config.vocab_size - 1:,}; "
            "use the tokenizer that the model was trained with"
        )
    if length > window or (length == window and params.max_tokens):
        raise RequestError(
            f"prompt has {length:,} tokens and the model's window is {window:,}; shorten it or raise max_position_embeddings"
        )
    _check_vocabulary(params, config.vocab_size)
    return min(params.max_tokens, window - length)


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """`RequestError` for ids that the model does not have."""
    named = {"stop_ids": params.stop_ids, "logit_bias": params.logit_bias, "allowed_ids": params.allowed_ids or ()}
    for name, ids in named.items():
        worst = _outside(ids, vocab_size)
        _require(
            worst is None,
            f"{name} holds the token id {worst} and the vocabulary has {vocab_size:,} ids; give ids from 0 to "
            f"{vocab_size - 1:,}",
        )
    if params.constraint is not None:
        size = params.constraint.vocab_size
        _require(
            size <= vocab_size,
            f"constraint was made for a tokenizer of {size:,} ids and the vocabulary has {vocab_size:,}; make it with the "
            "model's own tokenizer",
        )


def _outside(ids: Iterable[int], vocab_size: int) -> int | None:
    """An id that is not in [0, vocab_size), if there is one."""
    return next((id_ for id_ in ids if not 0 <= id_ < vocab_size), None)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    _require(isinstance(value, (tuple, list)), f"{name} must be a list of ids, got {value!r}")
    for id_ in value:
        _check_whole(name, id_, 0)
    return tuple(value)


def _id_from_text(id_: Any) -> Any:
    return int(id_) if isinstance(id_, str) and id_.isascii() and id_.isdigit() else id_


def _check_whole(name: str, value: Any, low: int, high: float = math.inf) -> None:
    _require(isinstance(value, int) and not isinstance(value, bool), f"{name} must be a whole number, got {value!r}")
    _require(low <= value <= high, f"{name} must be {_range(low, high)}, got {value}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    _require(isinstance(value, (int, float)) and not isinstance(value, bool), f"{name} must be a number, got {value!r}")
    _require(
        low <= value <= high and abs(value) <= sys.float_info.max, f"{name} must be {_range(low, high)}, got {value}"
    )


def _range(low: float, high: float) -> str:
    return f"at least {low}" if math.isinf(high) else f"in [{low}, {high}]"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise RequestError(message)
