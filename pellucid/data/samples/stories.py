"""Draws the facts of a story and tells it."""

from bisect import bisect
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import log
from random import Random
from zlib import crc32

from pellucid.data.samples import plots_people, plots_things
from pellucid.data.samples.grammar import Facts, Plot
from pellucid.data.samples.words import FRIEND, HERO, Lexicon

PLOTS: tuple[Plot, ...] = plots_things.ALL + plots_people.ALL
HELD_OUT_ONE_IN = 10
FLATNESS = 10
"""The most common name comes as often as the tenth in a corpus that follows Zipf's law."""


def is_held_out(hero: str, thing: str) -> bool:
    """Whether the corpus never tells a story about ``hero`` and ``thing``; the same on every machine."""
    return crc32(f"{hero}/{thing}".encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Story:
    """A told story and what is true in it.

    Attributes:
        forms: every slot of the plot, spelled.
        opening: the wording of the first step, which names the hero and the object; a ``%``-format.
        nats: -log of the probability with which the generator tells exactly this.
    """

    plot: Plot
    facts: Facts
    forms: dict[str, str]
    text: str
    opening: str
    nats: float


def tell(rng: Random, *, held_out: bool = False) -> Story:
    """A story about a hero and an object that are in the corpus together, or with ``held_out`` are not."""
    # Only rng.random() is the same on every Python version; choice() and shuffle() are not promised to be.
    draw = rng.random
    plot = PLOTS[int(draw() * len(PLOTS))]
    heroes, objects = by_frequency(HERO), by_frequency(plot.objects)
    while True:
        hero, thing = heroes[zipf(draw(), len(heroes))], objects[zipf(draw(), len(objects))]
        if is_held_out(hero, thing) == held_out:
            break
    friend = hero
    while friend == hero:
        friend = heroes[zipf(draw(), len(heroes))]
    cast = nats_of_cast(plot, hero, thing, friend, held_out)
    facts = {"hero": hero, "friend": friend, "object": thing}
    forms = {**HERO.forms[hero], **FRIEND.forms[friend], **plot.objects.forms[thing]}
    for lexicon in plot.facts:
        value = lexicon.values[int(draw() * len(lexicon.values))]
        facts[lexicon.fact] = value
        forms |= lexicon.forms[value]
    wordings = [step.wordings[int(draw() * len(step.wordings))] for step in plot.steps]
    text = " ".join(wordings) % forms
    return Story(plot, facts, forms, text, wordings[0], cast + nats_of_facts(plot) + plot.nats)


@cache
def by_frequency(lexicon: Lexicon) -> tuple[str, ...]:
    """The values of ``lexicon``, the common ones first: in an order that has nothing to do with what they mean."""
    return tuple(sorted(lexicon.values, key=lambda value: crc32(value.encode())))


def zipf(draw: float, size: int) -> int:
    """A rank below ``size`` for a uniform ``draw``: as in real text, a few are common and most are rare (Zipf-Mandelbrot)."""
    return bisect(_cumulative(size), draw)


@cache
def _cumulative(size: int) -> tuple[float, ...]:
    harmonic = tuple(accumulate(1 / (rank + FLATNESS) for rank in range(size)))
    return tuple(value / harmonic[-1] for value in harmonic[:-1])


def nats_of_cast(plot: Plot, hero: str, thing: str, friend: str, held_out: bool) -> float:
    """-log of the chance of these three in a story of ``plot``."""
    heroes, objects = chances(HERO), chances(plot.objects)
    among_others = heroes[friend] / (1 - heroes[hero])
    return log(_chance_of_pairs(plot, held_out)) - log(heroes[hero]) - log(objects[thing]) - log(among_others)


@cache
def chances(lexicon: Lexicon) -> dict[str, float]:
    """How often each value of ``lexicon`` is drawn; they sum to 1."""
    bounds = (0.0, *_cumulative(len(lexicon.values)), 1.0)
    return {value: bounds[i + 1] - bounds[i] for i, value in enumerate(by_frequency(lexicon))}


@cache
def _chance_of_pairs(plot: Plot, held_out: bool) -> float:
    heroes, objects = chances(HERO), chances(plot.objects)
    return sum(
        p * q for hero, p in heroes.items() for thing, q in objects.items() if is_held_out(hero, thing) == held_out
    )


@cache
def nats_of_facts(plot: Plot) -> float:
    """-log of the chance of ``plot`` and of facts about its place, colours and so on."""
    return log(len(PLOTS)) + sum(log(len(lexicon.values)) for lexicon in plot.facts)


def distractors(rng: Random, story: Story) -> dict[str, str]:
    """Forms of facts that are *not* the story's, under ``other_...``, for questions whose answer is no."""
    others: dict[str, str] = {}
    for lexicon in (story.plot.objects, *story.plot.facts):
        wrong = wrong_values(lexicon, story.facts)
        for slot, spelling in lexicon.forms[wrong[int(rng.random() * len(wrong))]].items():
            others[other_slot(slot)] = spelling
    return others


def wrong_values(lexicon: Lexicon, facts: Facts) -> list[str]:
    """What the fact of ``lexicon`` is not; no object that is held out for the hero."""
    values = [value for value in lexicon.values if value != facts[lexicon.fact]]
    if lexicon.fact == "object":
        values = [value for value in values if not is_held_out(facts["hero"], value)]
    return values


def other_slot(slot: str) -> str:
    """``other_color`` for ``color``, ``a_other_object`` for ``a_object``, ``at_other_place`` for ``at_place``."""
    head, _, tail = slot.rpartition("_")
    return f"{head}_other_{tail}" if head else f"other_{tail}"
