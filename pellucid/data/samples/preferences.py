"""Pairs of answers, a good one and a bad one, to the questions and requests of `chats`."""

from random import Random
from typing import NamedTuple

from pellucid.data.samples import arithmetic
from pellucid.data.samples.chats import ASK_SUM, READ, Message, assistant, pick, request, user
from pellucid.data.samples.stories import Story, distractors, other_slot, tell


class Preference(NamedTuple):
    """A conversation up to where an answer is due, and two answers."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def preference(rng: Random) -> Preference:
    """A pair: half about a story that is read, a quarter about one that is asked for, a quarter sums.

    The rejected answer states a fact that the story does not, tells a story about somebody and something else, or gets the
    sum wrong. Like the corpus it has no held-out pair of hero and object, and no held-out problem.
    """
    at = rng.random()
    if at < 0.5:
        return _reading(rng)
    return _telling(rng) if at < 0.75 else _sum(rng)


def _reading(rng: Random) -> Preference:
    while True:
        story = tell(rng)
        questions = [question for question in story.plot.questions if _facts_in(story, question.answer.wordings[0])]
        if questions:
            break
    question = questions[int(rng.random() * len(questions))]
    others = distractors(rng, story)
    wrong = {slot: others[other_slot(slot)] for slot in story.plot.slots if other_slot(slot) in others}
    asked = pick(rng, question.ask) % (story.forms | others)
    prompt = pick(rng, READ) % {"story": story.text, "question": asked}
    answer = next(w for w in _from(rng, question.answer.wordings) if _facts_in(story, w))
    good, bad = answer % (story.forms | others), answer % (story.forms | others | wrong)
    return Preference([user(prompt)], [assistant(good)], [assistant(bad)])


def _facts_in(story: Story, wording: str) -> bool:
    """Whether an answer names something that could be another: the object, or a fact other than who it is about."""
    told = {lexicon.fact for lexicon in (story.plot.objects, *story.plot.facts)}
    return any(f"%({slot})s" in wording for slot, lexicon in story.plot.slots.items() if lexicon.fact in told)


def _from(rng: Random, wordings: list[str]) -> list[str]:
    """All wordings, from a drawn one on."""
    start = int(rng.random() * len(wordings))
    return wordings[start:] + wordings[:start]


def _telling(rng: Random) -> Preference:
    story, other = tell(rng), tell(rng)
    while other.facts["hero"] == story.facts["hero"] or other.facts["object"] == story.facts["object"]:
        other = tell(rng)
    return Preference([user(request(rng, story))], [assistant(story.text)], [assistant(other.text)])


def _sum(rng: Random) -> Preference:
    expression, value = arithmetic.draw(rng)
    wrong = value
    while wrong == value or wrong < 0:
        off = 1 if rng.random() < 0.5 else 10
        wrong = value + (off if rng.random() < 0.5 else -off)
    asked = pick(rng, ASK_SUM) % {"expression": expression}
    return Preference([user(asked)], [assistant(f"{expression} = {value}.")], [assistant(f"{expression} = {wrong}.")])
