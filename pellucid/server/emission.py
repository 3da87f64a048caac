"""The one way from drawn tokens to what a client is told, streamed or not.

    tokens -> text, never half a character -> up to a stop string -> reasoning, content, tool calls -> pieces

Each stage holds back what it cannot know yet, and the end of an answer goes through the same stages. Which characters a
token made is kept beside the text all the way, so tokens and their log-probabilities are told with the last character of
theirs that is shown; a token of which nothing is shown (a marker, the end) only counts.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Literal

from pellucid.inference.request import TokenEvent, TokenLogprob
from pellucid.server.drawn_text import DrawnText
from pellucid.server.generation import Ending, EndReason, Piece
from pellucid.server.parts import Part
from pellucid.server.reasoning import Markers, ReasoningReader, Where
from pellucid.server.stops import StopStrings
from pellucid.server.tools import ToolFormat, ToolReader, new_call_id
from pellucid.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How the tokens of a request become pieces; the same for all of its choices."""

    tokenizer: Tokenizer
    end_ids: frozenset[int] = frozenset()
    """The model's own; they end an answer with "stop"."""
    stop_ids: frozenset[int] = frozenset()
    """The client's."""
    stop: tuple[str, ...] = ()
    """They act on the answer's whole text before it is taken apart: on reasoning, markers and tool calls too."""
    min_tokens: int = 0
    """Text that comes before so many tokens cannot end the answer."""
    reasoning: tuple[Markers, Where] | None = None
    """The markers, and where the answer begins."""
    tools: tuple[ToolFormat, frozenset[str]] | None = None
    """Form and names of calls; None: none are looked for."""
    parallel: bool = True
    logprobs: bool = False
    """Tell tokens with the text."""
    length_reason: Literal["length", "context"] = "length"
    """What it means that no more tokens may be drawn."""
    follows: tuple[int, ...] = ()
    """What stands directly before the answer, where that is a part of the same text."""
    hidden: frozenset[int] = field(init=False)
    """Ids that never show as text: control tokens, but for the markers that are looked for."""

    def __post_init__(self) -> None:
        markers: set[str | None] = set(self.reasoning[0]) if self.reasoning else set()
        if self.tools:
            markers |= {self.tools[0].open, self.tools[0].close}
        shown = {id_ for token, id_ in self.tokenizer.special_tokens.items() if token in markers}
        object.__setattr__(self, "hidden", frozenset(self.tokenizer.special_tokens.values()) - shown)


class Emitter:
    """One choice: its events in, in order; pieces out. Nothing comes after the piece of kind "end".

    Attributes:
        num_tokens: tokens drawn so far.
        ending: None until the end.
        abandoned: it has ended here and the engine does not know: cancel it there.
    """

    def __init__(self, rules: Rules, choice: int = 0) -> None:
        self.rules, self.choice = rules, choice
        self.num_tokens = 0
        self.ending: Ending | None = None
        self.abandoned = False
        self._text = DrawnText(rules.tokenizer)
        self._text.decoder.follow(rules.follows)
        self._stops = StopStrings(rules.stop)
        self._reasoning = ReasoningReader(*rules.reasoning) if rules.reasoning else None
        self._tools = ToolReader(*rules.tools, parallel=rules.parallel) if rules.tools else None
        self._released = 0  # characters that have passed the stop strings
        self._starts: list[int] | None = [] if self._reasoning else None  # of tokens, while they may be reasoning
        self._num_reasoning = 0
        self._last: Part | None = None  # that was shown

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.ending is not None

    def push(self, event: TokenEvent) -> list[Piece]:
        """What an event makes certain."""
        if self.finished:
            return []
        pieces = [] if event.token is None else self._read(event, event.token)
        if event.finish_reason is not None:
            return pieces + self._finish(event)
        self.abandoned = bool(pieces) and pieces[-1].kind == "end"
        return pieces

    def close(self, reason: Literal["cancelled", "error"], error: str | None = None) -> list[Piece]:
        """End it from outside, with what was held back."""
        if self.finished:
            return []
        self.abandoned = True
        return self._flush() + self._end(reason, error=error)

    # -- tokens ---------------------------------------------------------------------------------------------

    def _read(self, event: TokenEvent, token: int) -> list[Piece]:
        rules = self.rules
        self.num_tokens += 1
        if token in rules.end_ids or token in rules.stop_ids:
            return []
        if self._starts is not None:
            self._starts.append(self._text.length)
        if token in rules.hidden or token >= rules.tokenizer.vocab_size:
            return []
        told = TokenLogprob(event.logprob, event.top_logprobs) if rules.logprobs else None
        return self._advance(self._text.push(token, told))

    def _advance(self, text: str) -> list[Piece]:
        if self.num_tokens < self.rules.min_tokens:
            return self._show(text)
        released, stop = self._stops.push(text)
        pieces = self._show(released)
        return pieces if stop is None else pieces + self._stop(stop)

    def _stop(self, stop: str) -> list[Piece]:
        """A stop string has come; the only call, after which no other may come, may have ended it before."""
        return [] if self.finished else self._drain() + self._end("stop_string", stop)

    def _finish(self, event: TokenEvent) -> list[Piece]:
        """The engine has ended it; a stop string may have done so before."""
        pieces = [] if self.finished else self._flush()
        if self.ending is not None:
            return pieces
        if event.finish_reason == "error":
            return pieces + self._end("error", error=event.error)
        if event.finish_reason == "length":
            return pieces + self._end(self.rules.length_reason)
        if event.token in self.rules.stop_ids and event.token not in self.rules.end_ids:
            return pieces + self._end("stop_string", event.token)
        return pieces + self._end("tool_calls" if self._tools and self._tools.num_complete else "stop")

    def _flush(self) -> list[Piece]:
        """What all stages hold back."""
        pieces = self._advance(self._text.finish())
        if not self.finished:
            pieces += self._show(self._stops.finish())
        return pieces if self.finished else pieces + self._drain()

    def _end(self, reason: EndReason, stop: str | int | None = None, error: str | None = None) -> list[Piece]:
        if self._starts is not None:
            self._num_reasoning = len(self._starts) if self._reasoning and self._reasoning.where == "inside" else 0
        self.ending = Ending(reason, stop, error, self.num_tokens, self._num_reasoning)
        return [Piece(self.choice, "end", ending=self.ending)]

    # -- text -----------------------------------------------------------------------------------------------

    def _show(self, text: str) -> list[Piece]:
        """Text that no stop string takes away any more."""
        parts = [Part("content", text, self._released, self._released + len(text))] if text else []
        self._released += len(text)
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
            self._count_reasoning(self._reasoning)
        if self._tools is not None:
            parts = [out for part in parts for out in self._called(self._tools, part)]
        held = (self._reasoning.num_held if self._reasoning else 0) + (self._tools.num_held if self._tools else 0)
        pieces = self._pieces(parts, self._released - held)
        if self._tools is not None and self._tools.finished:
            pieces += self._drain() + self._end("tool_calls")
        return pieces

    def _drain(self) -> list[Piece]:
        """What is held back behind the stop strings: no text follows."""
        self._text.settle()
        parts = self._reasoning.finish() if self._reasoning else []
        if self._tools is not None:
            parts = [out for part in parts for out in self._called(self._tools, part)] + self._tools.finish()
        return self._pieces(parts, self._text.length)

    def _called(self, tools: ToolReader, part: Part) -> list[Part]:
        return tools.push(part) if part.kind == "content" else [part]

    def _count_reasoning(self, reader: ReasoningReader) -> None:
        if self._starts is not None and reader.where in ("gap", "after"):
            self._num_reasoning, self._starts = bisect_left(self._starts, reader.end), None

    def _pieces(self, parts: list[Part], decided: int) -> list[Piece]:
        """Parts with their tokens, and those tokens that turn out to be shown in part, now that the text is known so far."""
        pieces: list[Piece] = []
        for part in parts:
            if part.start == part.end:  # the beginning of a call, or arguments that the model left out
                id_ = new_call_id() if part.kind == "tool_start" else ""
                pieces.append(Piece(self.choice, part.kind, part.text, (), part.tool_index, id_, part.tool_name))
                continue
            pieces += self._late(part.start)
            self._last = part
            tokens = self._text.show(part.end)
            pieces.append(Piece(self.choice, part.kind, part.text, tokens, part.tool_index))
        return _joined(pieces + self._late(decided))

    def _late(self, position: int) -> list[Piece]:
        """Tokens that end before ``position``, of which some characters have been shown and the others will not be."""
        tokens = self._text.shown_until(position)
        if not tokens:
            return []
        assert self._last is not None, "something has been shown"
        return [Piece(self.choice, self._last.kind, tokens=tokens, tool_index=self._last.tool_index)]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of the same kind as one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is None or piece.kind == "tool_start" or (last.kind, last.tool_index) != (piece.kind, piece.tool_index):
            joined.append(piece)
        else:
            joined[-1] = replace(last, text=last.text + piece.text, tokens=last.tokens + piece.tokens)
    return joined
