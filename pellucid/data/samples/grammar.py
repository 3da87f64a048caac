"""One grammar, used in both directions: it tells stories and it recognises them.

A template is text with slots and choices: ``"{hero} (ran|walked) to {place}."``. A `Step` is a list of templates of
which one is used, a `Plot` a sequence of steps, and a story of the plot is one template of each step, joined by spaces,
with all slots filled from the same facts. Telling expands every step into its flat list of ``%``-formats, which is
fast; reading (`Reader`) walks the templates themselves. No plot has a rule of its own in either direction.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import log

from pellucid.data.samples.words import FRIEND, HERO, Lexicon


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one form of one fact."""

    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Several wordings of which one is used."""

    options: tuple["Template", ...]


Template = tuple[str | Slot | Choice, ...]


def parse_template(source: str) -> Template:
    """``source`` as literals, `Slot` and `Choice`; choices may nest."""
    tokens = re.findall(r"\{\w+\}|[(|)]|[^{(|)}%]+", source)
    assert "".join(tokens) == source, f"not a template: {source!r}"
    options, rest = _parse_options(tokens, 0)
    assert rest == len(tokens) and len(options) == 1, f"unbalanced choice in {source!r}"
    return options[0]


def _parse_options(tokens: list[str], at: int) -> tuple[tuple[Template, ...], int]:
    """The options from ``at`` up to the closing parenthesis or the end, and where that is."""
    options: list[Template] = []
    nodes: list[str | Slot | Choice] = []
    while at < len(tokens) and tokens[at] != ")":
        if tokens[at] == "(":
            inner, at = _parse_options(tokens, at + 1)
            nodes.append(Choice(inner))
        elif tokens[at] == "|":
            options.append(tuple(nodes))
            nodes = []
        else:
            nodes.append(Slot(tokens[at][1:-1]) if tokens[at][0] == "{" else tokens[at])
        at += 1
    return (*options, tuple(nodes)), at


def expand(template: Template) -> list[str]:
    """Every wording of ``template``, with its slots as ``%(name)s``."""
    parts: list[list[str]] = []
    for node in template:
        if isinstance(node, Choice):
            parts.append([wording for option in node.options for wording in expand(option)])
        else:
            parts.append([f"%({node.name})s" if isinstance(node, Slot) else node])
    return ["".join(wording) for wording in product(*parts)]


@dataclass(frozen=True, eq=False)
class Step:
    """What happens at one point of a plot, in alternative wordings."""

    templates: tuple[Template, ...]

    @cached_property
    def wordings(self) -> list[str]:
        """All wordings of all templates, as ``%``-formats; telling draws one of them uniformly."""
        return [wording for template in self.templates for wording in expand(template)]


def step(*sources: str) -> Step:
    """A step that is told by one of the templates ``sources``."""
    return Step(tuple(parse_template(source) for source in sources))


@dataclass(frozen=True, eq=False)
class Question:
    """Ways to ask for a fact of a story, and ways to answer from the same facts."""

    ask: Step
    answer: Step


def question(ask: str, answer: str) -> Question:
    """A question from two templates."""
    return Question(step(ask), step(answer))


@dataclass(frozen=True, eq=False)
class Plot:
    """A kind of story. Its first step names the hero and the object, so that a prompt can give both.

    Attributes:
        objects: the things this story can be about.
        facts: what else is drawn, beside hero, friend and object.
        steps: told in this order.
        questions: what a reader of the story can answer.
    """

    name: str
    objects: Lexicon
    facts: tuple[Lexicon, ...]
    steps: tuple[Step, ...]
    questions: tuple[Question, ...]

    @cached_property
    def slots(self) -> dict[str, Lexicon]:
        """The lexicon behind each slot that the templates may use."""
        return {slot: lexicon for lexicon in (HERO, FRIEND, self.objects, *self.facts) for slot in lexicon.slots}

    @cached_property
    def nats(self) -> float:
        """Entropy of the choices of wording, in nats a story."""
        return sum(log(len(step.wordings)) for step in self.steps)


Facts = dict[str, str]


@dataclass
class Reader:
    """Reads ``text`` as a story of ``plot``; remembers how far any reading came and what it wanted there."""

    plot: Plot
    text: str
    furthest: int = 0
    step: int = 0
    expected: str = ""

    def stories(self) -> Iterator[Facts]:
        """The facts of every reading of the whole text, if there is one."""
        yield from self._steps(0, 0, {})

    def _steps(self, number: int, at: int, facts: Facts) -> Iterator[Facts]:
        if number == len(self.plot.steps):
            if at == len(self.text):
                yield facts
            else:
                self._fail(at, number, "the end")
            return
        if number > 0:
            if not self.text.startswith(" ", at):
                return self._fail(at, number, "another sentence")
            at += 1
        for template in self.plot.steps[number].templates:
            for end, known in self._match(template, at, facts, number):
                yield from self._steps(number + 1, end, known)

    def _match(self, template: Template, at: int, facts: Facts, number: int) -> Iterator[tuple[int, Facts]]:
        """Ends and facts of the ways in which ``template`` fits the text from ``at`` under ``facts``."""
        if not template:
            yield at, facts
            return
        node, rest = template[0], template[1:]
        if isinstance(node, Choice):
            for option in node.options:
                yield from self._match(option + rest, at, facts, number)
        elif isinstance(node, Slot):
            for spelling, known in self._fill(node.name, at, facts, number):
                yield from self._match(rest, at + len(spelling), known, number)
        elif self.text.startswith(node, at):
            yield from self._match(rest, at + len(node), facts, number)
        else:
            self._fail(at, number, f"{node.strip()!r}")

    def _fill(self, slot: str, at: int, facts: Facts, number: int) -> Iterator[tuple[str, Facts]]:
        """Spellings at ``at`` that ``slot`` allows: the one of a known fact, or any that settles an unknown one."""
        lexicon = self.plot.slots[slot]
        known = facts.get(lexicon.fact)
        if known is not None:
            spelling = lexicon.forms[known][slot]
            if self.text.startswith(spelling, at):
                yield spelling, facts
            else:
                self._fail(at, number, f"{spelling!r} for the {lexicon.fact} {known}", known=True)
            return
        readings = lexicon.readings[slot]
        for length in lexicon.lengths[slot]:
            spelling = self.text[at : at + length]
            for value in readings.get(spelling, ()):
                if not (lexicon is FRIEND and value == facts.get("hero")):
                    yield spelling, {**facts, lexicon.fact: value}
        self._fail(at, number, f"a {lexicon.fact}")

    def _fail(self, at: int, number: int, expected: str, *, known: bool = False) -> None:
        """Note a failure; of several at one place, one against a ``known`` fact says most."""
        if at > self.furthest or (at == self.furthest and known):
            self.furthest, self.step, self.expected = at, number, expected
