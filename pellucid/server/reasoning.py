"""Reasoning, split off the answer at the markers of the model's template."""

from typing import Literal, NamedTuple

from pellucid.server.parts import Part, begun, spaced
from pellucid.tokenizer import Tokenizer


class Markers(NamedTuple):
    """What stands around a model's reasoning."""

    open: str
    close: str


KNOWN = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<seed:think>", "</seed:think>"),
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),
)

Where = Literal["before", "inside", "gap", "after"]
"""Of an answer: what comes first is not known; in the reasoning; in the white space behind it; in the content."""


def find_markers(tokenizer: Tokenizer) -> Markers | None:
    """Those that the chat template names, or that are tokens of their own; None: the model does not mark reasoning."""
    template = tokenizer.chat_template or ""
    for markers in KNOWN:
        if all(marker in template for marker in markers):
            return markers
    return next((m for m in KNOWN if all(tokenizer.id_of(marker) is not None for marker in m)), None)


def where_prompt_ends(tail: str, markers: Markers) -> Where:
    """Where an answer begins, from the end of the prompt's text: its template may have begun, or closed, the reasoning."""
    tail = tail.rstrip()
    if tail.endswith(markers.open):
        return "inside"
    return "after" if tail.endswith(markers.close) else "before"


class ReasoningReader:
    """Text in, parts out: reasoning, then content. Text that comes before any marker is content, and no marker counts then.

    White space around the markers is dropped. Held back are: white space, and what may become a marker.

    Attributes:
        where: the text stands now.
        end: the characters up to and with the closing marker; 0 until that has come.
        num_held: characters held back.
    """

    def __init__(self, markers: Markers, where: Where) -> None:
        self._markers, self.where, self.end = markers, where, 0
        self._text, self._start = "", 0  # what is held back, and where it begins
        self._told = False

    @property
    def num_held(self) -> int:
        return len(self._text)

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        if self.where == "before":
            self._before()
        if self.where == "inside":
            parts.append(self._inside())
        if self.where == "gap":
            self._gap()
        if self.where == "after":
            parts.append(self._take(len(self._text), "content"))
        return [part for part in parts if part.text]

    def finish(self) -> list[Part]:
        """What was held back: the answer has ended."""
        part = self._take(len(self._text), "reasoning" if self.where == "inside" else "content")
        return [part] if part.text else []

    def _before(self) -> None:
        bare = self._text.lstrip()
        if bare.startswith(self._markers.open):
            self._skip(len(self._text) - len(bare) + len(self._markers.open))
            self.where = "inside"
        elif not self._markers.open.startswith(bare):
            self.where = "after"

    def _inside(self) -> Part:
        if not self._told:
            self._skip(len(self._text) - len(self._text.lstrip()))
            if self._text.startswith(self._markers.open):  # some models repeat what the template has begun
                self._skip(len(self._markers.open))
                self._skip(len(self._text) - len(self._text.lstrip()))
            if self._markers.open.startswith(self._text):
                return self._take(0, "reasoning")
        end = self._text.find(self._markers.close)
        closed = end >= 0
        size = spaced(self._text, end if closed else len(self._text) - begun(self._text, self._markers.close))
        part = self._take(size, "reasoning")
        self._told = self._told or size > 0
        if closed:
            self._skip(end - size + len(self._markers.close))
            self.end, self.where = self._start, "gap"
        return part

    def _gap(self) -> None:
        self._skip(len(self._text) - len(self._text.lstrip()))
        if self._text:
            self.where = "after"

    def _take(self, size: int, kind: Literal["content", "reasoning"]) -> Part:
        part = Part(kind, self._text[:size], self._start, self._start + size)
        self._skip(size)
        return part

    def _skip(self, size: int) -> None:
        self._text, self._start = self._text[size:], self._start + size
