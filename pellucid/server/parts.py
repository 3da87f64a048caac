"""What the readers of an answer's text tell each other: which characters of it belong to what."""

from typing import Literal, NamedTuple


class Part(NamedTuple):
    """Characters ``start ... end`` of an answer's text, and what they are.

    ``text`` is those characters; nothing for a ``tool_start``, and ``{}`` where a call has no arguments. Parts come in the
    order of the text. What lies between them is not shown.
    """

    kind: Literal["content", "reasoning", "tool_start", "tool_arguments"]
    text: str
    start: int
    end: int
    tool_index: int = 0
    tool_name: str = ""


def begun(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` begin ``marker``, and may still become it."""
    most = min(len(marker) - 1, len(text))
    return next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)


def spaced(text: str, end: int) -> int:
    """Where the white space before ``end`` begins."""
    return len(text[:end].rstrip())
