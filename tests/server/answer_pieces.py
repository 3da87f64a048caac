"""Answers as pieces, for tests of what encoders make of them, and a reader of event streams that knows none of ours."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pellucid.server.generation import Ending, EndReason, Piece, TokenText, Usage


def token(text: str, id_: int = 0, logprob: float = -0.5, top: Sequence[tuple[str, float]] = ()) -> TokenText:
    data = text.encode()
    alternatives = tuple((i, other, other.encode(), value) for i, (other, value) in enumerate(top))
    return TokenText(id_, text, data, logprob, alternatives)


def content(*texts: str, choice: int = 0) -> list[Piece]:
    """A piece a text, each one token."""
    return [Piece(choice, "content", text, (token(text),)) for text in texts]


def reasoning(*texts: str, choice: int = 0) -> list[Piece]:
    return [Piece(choice, "reasoning", text) for text in texts]


def call(index: int, name: str, *fragments: str, choice: int = 0) -> list[Piece]:
    """A tool call, its arguments in fragments."""
    start = Piece(choice, "tool_start", tool_index=index, tool_id=f"call_{index}x", tool_name=name)
    return [start, *(Piece(choice, "tool_arguments", text, tool_index=index) for text in fragments)]


def end(
    reason: EndReason = "stop", stop: str | int | None = None, *, choice: int = 0, error: str | None = None
) -> list[Piece]:
    return [Piece(choice, "end", ending=Ending(reason, stop, error))]


USAGE = Usage(prompt=11, completion=7, cached=4, reasoning=2)

ANSWERS: dict[str, list[Piece]] = {
    "text": content("Hel", "lo", ", 東", "京 👩🏽‍🚀\u2028\r\n") + end(),
    "nothing": end(),
    "thought": reasoning("hm", "m") + content("Yes") + end("length"),
    "stop string": content("a", "b") + end("stop_string", "END"),
    "window": content("a") + end("context"),
    "tool": call(0, "get", '{"a', '": [1, "}"]}') + end("tool_calls"),
    "text and tools": content("Wait") + call(0, "get", "{}") + call(1, "put", '{"x": ', '"é"}') + end("tool_calls"),
    "all": reasoning("why") + content("So") + call(0, "get", '{"q": null}') + end("tool_calls"),
}
"""Of one choice."""


class EventReader:
    """An event stream, read as its bytes come: WHATWG HTML, "Parsing an event stream" and "Interpreting an event stream"."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False
        self._name, self._data = "", list[str]()

    def feed(self, chunk: bytes) -> list[tuple[str, str]]:
        """(event, data) of each event that these bytes complete."""
        events = []
        for byte in chunk:
            if byte == 0x0A and self._after_cr:  # the second half of a line's end
                self._after_cr = False
                continue
            self._after_cr = byte == 0x0D
            if byte not in (0x0A, 0x0D):
                self._line.append(byte)
                continue
            line, self._line = self._line.decode("utf-8"), bytearray()
            if line:
                self._take(line)
            elif self._data:
                events.append((self._name or "message", "\n".join(self._data)))
            if not line:
                self._name, self._data = "", []
        return events

    def _take(self, line: str) -> None:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)


def conforming_events(chunks: Iterable[bytes]) -> list[tuple[str, str]]:
    """All events of a stream that comes in chunks."""
    reader = EventReader()
    return [event for chunk in chunks for event in reader.feed(chunk)]


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream of OpenAI's, which ends as it should."""
    events = conforming_events([stream])
    assert {name for name, _ in events} == {"message"}
    assert events[-1][1] == "[DONE]"
    return [json.loads(data) for _, data in events[:-1]]
