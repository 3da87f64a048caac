"""Multiple choice by log-probability, and generation by exact match, both run through the engine.

Scores are those of each example alone: the engine is exact unless told otherwise, so what runs together changes none.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.errors import PellucidError, RequestError
from pellucid.evaluate.task_files import Choices, Question, Task
from pellucid.inference import Request, SamplingParams, check_request, engine_for, window_of
from pellucid.inference.sequence import Sequence as EngineSequence
from pellucid.model import Transformer
from pellucid.text import decode, encode_prompt, failed, with_stop_ids
from pellucid.tokenizer import Tokenizer

MAX_TOKENS = 64
BATCH_SIZE = 16
PAGE_SIZE = 16
"""Small, since choices share whole pages of their prompt and each reads the rest again."""

Progress = Callable[[int, int], None]
"""Called with what is done and what there is."""


def evaluate_task(
    model: Transformer,
    tokenizer: Tokenizer,
    task: Task,
    *,
    max_tokens: int = MAX_TOKENS,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> dict[str, float]:
    """``acc`` and ``acc_norm`` of multiple choice, ``exact_match`` of generation, and ``n``, the examples.

    ``acc``: the right choice has the greatest summed log-probability. ``acc_norm``: the greatest for each character of
    the choice, without space around it. Of equal ones the first counts. ``exact_match``: the likeliest completion, without space
    around it, is one of the answers.

    Args:
        max_tokens: of an answer; ignored by multiple choice.
        batch_size: sequences that run together; changes speed and memory, never a score.

    Raises:
        RequestError: a prompt, with its choice, does not fit the model's window, or cannot be encoded; names the example.
        PellucidError: the model's output is not finite; names the example.
    """
    n = len(task.examples)
    choices = [example for example in task.examples if isinstance(example, Choices)]
    if choices:
        right = right_norm = 0
        sums = choice_sums(model, tokenizer, choices, batch_size=batch_size, progress=progress)
        for example, totals in zip(choices, sums, strict=True):
            lengths = [max(1, len(text.strip())) for text in example.choices]
            per_character = [total / length for total, length in zip(totals, lengths, strict=True)]
            right += best(totals) == example.answer
            right_norm += best(per_character) == example.answer
        return {"acc": right / n, "acc_norm": right_norm / n, "n": n}
    questions = [example for example in task.examples if isinstance(example, Question)]
    said = completions(model, tokenizer, questions, max_tokens=max_tokens, batch_size=batch_size, progress=progress)
    matches = 0
    for question, text in zip(questions, said, strict=True):
        answer = text if task.end is None else text.partition(task.end)[0]
        matches += answer.strip() in question.answers
    return {"exact_match": matches / n, "n": n}


def best(scores: Sequence[float]) -> int:
    """The index of the greatest, the first of equal ones."""
    return max(range(len(scores)), key=scores.__getitem__)


# -- multiple choice ----------------------------------------------------------------------------------------


def choice_sums(
    model: Transformer,
    tokenizer: Tokenizer,
    examples: Sequence[Choices],
    *,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> Iterator[list[float]]:
    """The log-probability (nats) of each choice after its prompt, summed over its tokens; example by example.

    A choice is a request whose output is given (`Given`): the engine computes what prompts share once, and tells
    what the model thought of each token. Errors as in `evaluate_task`, those of requests before anything has run.
    """
    requests = [
        request for i, example in enumerate(examples) for request in _choice_requests(model, tokenizer, i, example)
    ]
    engine = engine_for(model, requests, min(batch_size, len(requests)), page_size=PAGE_SIZE)
    engine.scheduler.draft = rest_of_given  # a choice in one forward: the engine checks its tokens as it does any guess
    results = iter(engine.results(requests))
    for done, example in enumerate(examples, start=1):
        sums = []
        for number in range(len(example.choices)):
            [result] = next(results)
            if result.finish_reason == "error":
                raise PellucidError(failed(f"{example.location}: choice {number}", len(result.ids), result.error))
            sums.append(math.fsum(result.logprobs))
        if progress is not None:
            progress(done, len(examples))
        yield sums


def _choice_requests(model: Transformer, tokenizer: Tokenizer, index: int, example: Choices) -> Iterator[Request]:
    window = window_of(model.config)
    for number, choice in enumerate(example.choices):
        where = f"{example.location}: choice {number}"
        try:
            prompt, following = encode_choice(tokenizer, example.prompt, choice)
        except PellucidError as error:
            raise RequestError(f"{where}: {error}") from error
        if not following:
            raise RequestError(f"{where}: {choice!r} has no token of its own after the prompt; give it other text")
        if len(prompt) + len(following) > window:
            raise RequestError(
                f"{where}: prompt and choice have {len(prompt) + len(following):,} tokens and the model's window is "
                f"{window:,}; shorten them or raise max_position_embeddings"
            )
        given = Given(tuple(following), tokenizer.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=len(following), seed=0, constraint=given)
        yield Request(f"{index}.{number}", tuple(prompt), params)


def encode_choice(tokenizer: Tokenizer, prompt: str, choice: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt, begun as documents begin, and those of a choice after it.

    White space at the end of the prompt belongs to the choice, since most vocabularies write a word with the space before
    it. The two are encoded as one text; where the prompt's own ids do not begin that (a token spans the border), apart.

    Source:
        ``_encode_pair`` of EleutherAI's lm-evaluation-harness, which cuts the ids of the whole where the prompt's end in
        the latter case.
    """
    text = prompt.rstrip()
    choice = prompt[len(text) :] + choice
    before = encode_prompt(tokenizer, text)
    whole = encode_prompt(tokenizer, text + choice)
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    return before, tokenizer.encode(choice)


@dataclass(frozen=True, slots=True)
class Given:
    """A `Constraint` that allows one output alone."""

    ids: tuple[int, ...]
    vocab_size: int

    def start(self) -> "GivenState":
        return GivenState(self)


@dataclass(slots=True)
class GivenState:
    """A `ConstraintState` of a `Given`."""

    given: Given
    position: int = 0

    @property
    def may_end(self) -> bool:
        return self.position == len(self.given.ids)

    @property
    def finished(self) -> bool:
        return self.may_end

    @property
    def rest(self) -> list[int]:
        """What is still to come."""
        return list(self.given.ids[self.position :])

    def mask(self) -> Tensor:
        mask = torch.zeros(self.given.vocab_size, dtype=torch.bool)
        mask[self.rest[:1]] = True
        return mask

    def accept(self, token: int) -> None:
        assert self.rest[:1] == [token], f"the token {token} is not the one that is given"
        self.position += 1

    def copy(self) -> "GivenState":
        return GivenState(self.given, self.position)


def rest_of_given(sequence: EngineSequence) -> list[int]:
    """A draft for a sequence of the engine whose output is given: all that is left but the last, after which nothing comes."""
    state = sequence.constraint
    return state.rest[:-1] if isinstance(state, GivenState) else []


# -- generation ---------------------------------------------------------------------------------------------


def completions(
    model: Transformer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    max_tokens: int = MAX_TOKENS,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> Iterator[str]:
    """The likeliest answer to each question, greedily token by token; prompts and messages as `pellucid generate` takes them.

    Errors as in `evaluate_task`, those of requests before anything has run.
    """
    params = with_stop_ids(SamplingParams(temperature=0, max_tokens=max_tokens, seed=0), tokenizer)
    requests = []
    for number, question in enumerate(questions):
        try:
            prompt = question.prompt
            ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
            requests.append(Request(str(number), tuple(ids), params))
            check_request(requests[-1], model.config)
        except PellucidError as error:
            raise RequestError(f"{question.location}: {error}") from error
    engine = engine_for(model, requests, min(batch_size, len(requests)))
    for done, (question, [result]) in enumerate(zip(questions, engine.results(requests), strict=True), start=1):
        if result.finish_reason == "error":
            raise PellucidError(failed(question.location, len(result.ids), result.error))
        if progress is not None:
            progress(done, len(questions))
        yield decode(tokenizer, result.ids)
