"""The two-digit arithmetic of `pellucid demo-align`: problems divided by what they are for, answers, and who is right."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from pellucid.data.samples.arithmetic import is_held_out, two_digit_problems
from pellucid.inference import SamplingParams, engine_for
from pellucid.inference.request import Request
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.text import decode, encode_prompt
from pellucid.tokenizer import Tokenizer
from pellucid.train.callbacks import Callback, StepInfo, StopTraining
from pellucid.train.loop import Trainer
from pellucid.train.ranks import on_every_rank
from pellucid.train.rewards import exact_match
from pellucid.train.state import TrainState

MAX_TOKENS = 5
"""Of an answer: three digits, the token that ends it, and one by which to go wrong."""
TOGETHER = 256
"""Answers that are drawn at a time."""

Problem = dict[str, str]
"""{"prompt": "23 + 41 = ", "answer": "64"}"""


class Problems(NamedTuple):
    """All sums, and differences that are not negative, of two two-digit numbers, each in one part."""

    train: list[Problem]
    """What any stage may learn from; no other problem is in its data."""
    validation: list[Problem]
    """For curves, and for when to stop."""
    held_out: list[Problem]
    """Looked at when a stage has ended."""


def divide(seed: int, *, num_held_out: int, num_validation: int) -> Problems:
    """Problems in an order of the seed's own; those of the last two parts are held out of every built-in source too."""
    rng = Random(f"demo-align/{seed}")
    train: list[Problem] = []
    others: list[Problem] = []
    for expression, value in two_digit_problems():
        part = others if is_held_out(expression) else train
        part.append({"prompt": f"{expression} = ", "answer": str(value)})
    shuffle(train, rng)
    shuffle(others, rng)
    assert num_held_out + num_validation <= len(others)
    return Problems(train, others[num_held_out : num_held_out + num_validation], others[:num_held_out])


def shuffle(problems: list[Problem], rng: Random) -> None:
    """In place, by `Random.random` alone, which every Python version draws alike."""
    keys = [rng.random() for _ in problems]
    problems[:] = [problems[i] for i in sorted(range(len(problems)), key=keys.__getitem__)]


def answers_to(
    problems: Sequence[Problem], model: Transformer, tokenizer: Tokenizer, *, temperature: float = 0.0, seed: int = 0
) -> list[str]:
    """One answer to each problem as text; the likeliest at temperature 0. Leaves the model in the mode it was in."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, stop_ids=tokenizer.stop_ids, seed=seed + i)
        for i in range(len(problems))
    ]
    prompts = [encode_prompt(tokenizer, problem["prompt"]) for problem in problems]
    requests = [Request(str(i), tuple(ids), p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    trains = model.training
    try:
        results = engine_for(model.eval(), requests, TOGETHER, page_size=16, exact=False).generate(prompts, params)
    finally:
        model.train(trains)
    return [decode(tokenizer, result.ids) for result in results]


def right(problem: Problem, answer: str) -> bool:
    """What the reward of the last stage says."""
    return exact_match(problem["prompt"], answer, dict(problem)) == 1


def share_right(problems: Sequence[Problem], answers: Sequence[str]) -> float:
    """In [0, 1]."""
    return sum(map(right, problems, answers)) / len(problems)


def pairs(problems: Sequence[Problem], model: Transformer, tokenizer: Tokenizer, seed: int) -> list[dict[str, str]]:
    """The model's own wrong answers at temperature 1, each rejected for the right one; what it gets right makes no pair."""
    answers = answers_to(problems, model, tokenizer, temperature=1.0, seed=seed * len(problems))
    return [
        {"prompt": problem["prompt"], "chosen": problem["answer"], "rejected": answer.strip()}
        for problem, answer in zip(problems, answers, strict=True)
        if answer.strip() and not right(problem, answer)
    ]


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, in place of an older file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


class WatchAccuracy(Callback):
    """Answers problems every few steps: a "validation" line with ``exact_match``; may end the run.

    Args:
        problems: of which a share is right.
        every: optimizer steps between looks; the first is before the first step.
        stop_at: end the run at this share; None: look only.
    """

    def __init__(self, problems: Sequence[Problem], *, every: int, stop_at: float | None = None) -> None:
        self.problems, self.every, self.stop_at = problems, every, stop_at

    def on_train_begin(self, trainer: Trainer, info: TrainState) -> None:
        if info.step == 0:
            self._look(trainer, 0)

    def on_optimizer_step(self, trainer: Trainer, info: StepInfo) -> None:
        if info.step % self.every and info.step != info.total_steps:
            return
        share = self._look(trainer, info.step)
        if self.stop_at is not None and share >= self.stop_at:
            raise StopTraining(f"{share:.0%} of {len(self.problems)} validation problems are right")

    def _look(self, trainer: Trainer, step: int) -> float:
        """The share on all ranks, each of which answers some of the problems. ★"""
        assert trainer.setup.tokenizer is not None
        model, tokenizer = trainer.model, trainer.setup.tokenizer
        mine = self.problems[comm.rank() :: comm.world_size()]
        num_right: int = sum(
            on_every_rank(lambda: sum(map(right, mine, answers_to(mine, model, tokenizer))), tag="looks")
        )
        share = num_right / len(self.problems)
        trainer.log({"event": "validation", "step": step, "exact_match": share})
        return share
