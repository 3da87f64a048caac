"""Prompts that memory cannot answer, and the judgement of what a model makes of them."""

import re
from dataclasses import dataclass
from random import Random
from typing import Literal

from pellucid.data.samples import chats
from pellucid.data.samples.grammar import Facts, Reader
from pellucid.data.samples.stories import PLOTS, Story, tell


@dataclass(frozen=True, slots=True)
class Prompt:
    """The opening of a story (``text``), or a request for one (``messages``), on a held-out pair of hero and object.

    Attributes:
        facts: what the story has to be about: the hero, the object and whatever else the prompt says.
    """

    kind: Literal["opening", "request"]
    text: str | None
    messages: chats.Messages | None
    facts: Facts


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a text is a story of the grammar, and if not, where it stops being one.

    Attributes:
        plot: the name of the plot, and ``facts`` what is true in the story; only where ``ok``.
    """

    ok: bool
    reason: str
    plot: str | None = None
    facts: Facts | None = None


def held_out_prompts(n: int, seed: int = 0) -> list[Prompt]:
    """``n`` prompts on held-out pairs, in turn an opening to continue and a request to answer."""
    rng = Random(f"sample:stories/held out/{seed}")
    return [(_request if i % 2 else _opening)(rng, tell(rng, held_out=True)) for i in range(n)]


def _opening(rng: Random, story: Story) -> Prompt:
    used = {story.plot.slots[slot].fact for slot in re.findall(r"%\((\w+)\)s", story.opening)}
    facts = {fact: value for fact, value in story.facts.items() if fact in used}
    return Prompt("opening", story.opening % story.forms, None, facts)


def _request(rng: Random, story: Story) -> Prompt:
    facts = {fact: story.facts[fact] for fact in ("hero", "object")}
    return Prompt("request", None, [chats.user(chats.request(rng, story))], facts)


def check_story(text: str, prompt: Prompt | None = None) -> Verdict:
    """Whether ``text`` is a whole story that the generator could have told, with every name, pronoun and thing right.

    Args:
        text: the story; for a prompt of kind ``opening`` with the prompt's text in front. White space around it is
            ignored, and nothing else is.
        prompt: the story must also begin as it says and be about its facts.

    The parser is the grammar itself: see `pellucid.data.samples.grammar.Reader`.
    """
    text = text.strip()
    if prompt is not None and prompt.text is not None and not text.startswith(prompt.text):
        return Verdict(False, f"does not begin with the prompt {prompt.text!r}")
    readers = [Reader(plot, text) for plot in PLOTS]
    wrong = ""
    for reader in readers:
        for facts in reader.stories():
            wrong = _contradiction(facts, prompt)
            if not wrong:
                return Verdict(True, "a story of the grammar", reader.plot.name, facts)
    return Verdict(False, wrong or _reason(max(readers, key=lambda reader: reader.furthest)))


def _contradiction(facts: Facts, prompt: Prompt | None) -> str:
    for fact, wanted in prompt.facts.items() if prompt else ():
        if facts.get(fact) != wanted:
            return f"the {fact} is {facts.get(fact)}, but the prompt asks for {wanted}"
    return ""


def _reason(reader: Reader) -> str:
    got = reader.text[reader.furthest :][:40]
    where = f"step {reader.step + 1} of {len(reader.plot.steps)} of the plot {reader.plot.name!r}"
    return (
        f"{where}: expected {reader.expected}, got {got!r}"
        if got
        else f"{where}: the text ends where {reader.expected} should be"
    )
