"""Stop strings, whichever way tokens split them."""

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """Text that no stop string can begin in any more, and the stop string that was found, if one was."""

    text: str
    stop: str | None = None


class StopStrings:
    """Text in, text out up to the first stop string.

    The first that is complete ends the text; of several that are complete with the same character the longest counts.
    What is held back is the longest end of the text that begins a stop string, so the outcome hangs on the characters
    alone, not on how they are cut. A character takes constant time, amortised, for each stop string.

    Source:
        Knuth, Morris, Pratt 1977, "Fast pattern matching in strings", the table of borders.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string is everywhere"
        self._stops = tuple(sorted(set(stops), key=lambda stop: -len(stop)))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each that the text ends with
        self._held = ""

    def push(self, text: str) -> Released:
        """What ``text`` makes certain. Nothing may be pushed after a stop string has been found."""
        if not self._stops:
            return Released(text)
        text = self._held + text
        for i in range(len(self._held), len(text)):
            stop = self._step(text[i])
            if stop is not None:
                return Released(text[: i + 1 - len(stop)], stop)
        kept = len(text) - max(self._matched)
        self._held = text[kept:]
        return Released(text[:kept])

    def finish(self) -> str:
        """What was held back: the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        for i, stop in enumerate(self._stops):
            size = self._matched[i]
            while size and stop[size] != character:
                size = self._borders[i][size - 1]
            if stop[size] == character:
                size += 1
            if size == len(stop):
                return stop
            self._matched[i] = size
        return None


def _borders(stop: str) -> list[int]:
    """For each beginning of ``stop``: the length of its longest proper beginning that it also ends with."""
    borders, size = [0], 0
    for character in stop[1:]:
        while size and stop[size] != character:
            size = borders[size - 1]
        size += stop[size] == character
        borders.append(size)
    return borders
