"""Between logits and tokens: which rows a sequence is drawn from, and what is told of the outcome."""

import math
from dataclasses import dataclass

from torch import Tensor

from pellucid.inference.constraints import ConstraintState
from pellucid.inference.request import FinishReason, Row, SamplingParams, TokenEvent
from pellucid.inference.sample import prompt_logprobs
from pellucid.inference.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class Drawing:
    """A sequence that gets its next tokens from these rows of the logits: after what is known of it, then its draft."""

    sequence: Sequence
    rows: range


def first_wanted(chunk: Chunk) -> int:
    """Of the chunk's tokens, the first whose logits are looked at."""
    sequence = chunk.sequence
    if sequence.lacks_prompt_logprobs:
        return 0
    return min(chunk.count, len(sequence.tokens) - 1 - chunk.start)


def judge_prompt(chunk: Chunk, rows: Tensor) -> None:
    """What the model thought of the prompt's tokens after the chunk's first, from logits ``[count, V]``.

    A sequence that was pre-empted meanwhile reads its prompt again, and knows some of it.
    """
    sequence = chunk.sequence
    known = sequence.prompt_logprobs or [None]  # of the first token, which nothing predicts
    after = max(0, len(known) - 1 - chunk.start)
    following = sequence.tokens[chunk.start + after + 1 : min(chunk.start + chunk.count + 1, sequence.num_prompt)]
    top = sequence.request.params.prompt_logprobs
    assert top is not None
    sequence.prompt_logprobs = [*known, *prompt_logprobs(rows[after : after + len(following)], following, top)]


def advance(constraint: ConstraintState, token: int) -> tuple[bool, str | None]:
    """Whether nothing may follow the token, and what went wrong: the constraint is the request's own affair."""
    try:
        constraint.accept(token)
        return constraint.finished, None
    except Exception as error:
        return False, f"the constraint raised {type(error).__name__}: {error}"


def row_of(sequence: Sequence) -> Row:
    """What its next token depends on."""
    return Row(
        sequence.request.params, sequence.seed, sequence.choice, len(sequence.tokens), sequence.request.tokens,
        sequence.output, sequence.constraint,
    )  # fmt: skip


def start_constraint(params: SamplingParams) -> ConstraintState | None:
    """Where a sample of a request begins."""
    return params.constraint.start() if params.constraint is not None else None


def event_of(
    sequence: Sequence, token: int | None, reason: FinishReason | None = None, error: str | None = None
) -> TokenEvent:
    """What is told of the token drawn last, or of an end without one."""
    logprob = sequence.logprobs[-1] if token is not None else math.nan
    top = sequence.top_logprobs[-1] if token is not None else ()
    first = len(sequence.tokens) <= sequence.num_prompt + 1
    known = sequence.prompt_logprobs if first and error is None else None
    return TokenEvent(sequence.request.id, token, logprob, reason, sequence.choice, top, error, known)
