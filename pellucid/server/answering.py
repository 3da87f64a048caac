"""From a body to its answer: parse, admit, run; the engine's events become pieces, and pieces what the route sends."""

import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from pellucid.inference.constraints import CANNOT_GO_ON
from pellucid.inference.request import TokenEvent
from pellucid.inference.sample import NOT_FINITE
from pellucid.server.admission import Admitted, admit, encode_messages
from pellucid.server.anthropic_encode import MessageStream, count_body
from pellucid.server.call import Call
from pellucid.server.generation import Ending, Generation, Piece, Usage
from pellucid.server.openai_completions import CompletionStream
from pellucid.server.openai_encode import ChatStream
from pellucid.server.serving import Model
from pellucid.server.steps import Running

logger = logging.getLogger("pellucid.server")

OPEN_ERRORS = (NOT_FINITE, CANNOT_GO_ON, "the constraint raised")
"""Beginnings of the engine's errors that clients are told; others may hold paths or more."""
CLOSED_ERROR = "the model failed at this request; the server's log has the reason"


@dataclass(frozen=True, slots=True)
class Encoding:
    """How one answer is told."""

    stream: Callable[[], ChatStream | CompletionStream | MessageStream]
    """For one that is streamed; made when it begins to be told."""
    body: Callable[[Iterable[Piece], Usage], dict[str, Any]]
    """The whole; ApiError where a choice ended with an error."""
    tells_prompts: bool = False
    """A stream begins with what the model thought of every prompt, so it begins when all have been read."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a route asks for text and gets it."""

    prefix: str
    """Of an answer's id."""
    fields: Collection[str]
    """All that a body may hold."""
    parse: Callable[[dict[str, Any], int], Generation]
    """A body, and the most choices that it may ask for; ApiError for what is wrong in itself."""
    encoding: Callable[[str, Call, Generation, "Work"], Encoding]
    """Of the answer with this id."""


async def answer(call: Call, form: Form) -> None:
    """Answer a request for text.

    The status is sent when nothing can be refused any more: the body is right, the prompt fits, the engine has taken it.
    """
    generation = await read(call, form)
    model, id_ = call.service.model(generation.model), form.prefix + secrets.token_hex(12)
    with model.places.hold(max(1, len(generation.prompts)) * generation.params.n):
        admitted = await call.in_thread(lambda: admit(generation, model.served, request_id=id_, salt=call.owner))
        work = Work(model, admitted, call.service.metrics.first_token_seconds.labels(model.name).observe)
        encoding = form.encoding(id_, call, generation, work)
        async with aclosing(work.pieces()) as pieces:
            await anext(pieces)
            if generation.stream:
                await _stream(call, encoding, work, pieces)
                return
            whole = [piece async for some in pieces for piece in some]
    await call.send_json(encoding.body(whole, work.usage))


async def read(call: Call, form: Form) -> Generation:
    """The body; ApiError for what is wrong in it."""
    config = call.service.config
    body = await call.body(form.fields)
    return await call.off_loop(lambda: form.parse(body, min(config.max_choices, config.max_running)))


async def count_tokens(call: Call, form: Form) -> None:
    """Tell how many tokens the prompt of such a body has."""
    generation = await read(call, form)
    model = call.service.model(generation.model)
    ids = await call.in_thread(lambda: encode_messages(generation, model.served))
    await call.send_json(count_body(len(ids)))


async def _stream(call: Call, encoding: Encoding, work: "Work", pieces: AsyncIterator[list[Piece]]) -> None:
    """One write for each step."""
    stream: ChatStream | CompletionStream | MessageStream | None = None
    early: list[Piece] = []
    await call.start_stream(lambda error: (stream or encoding.stream()).fail(error))
    async for some in pieces:
        if stream is None:
            early += some
            if encoding.tells_prompts and not work.all_read:
                continue
            some, stream = early, encoding.stream()
            await call.write(stream.open(work.usage))
        await call.write(b"".join(map(stream.piece, some)))
    assert stream is not None, "every request has an event at least"
    await call.end_stream(stream.close(work.usage))


class Work:
    """What one client asked of one model: a request of the engine for each prompt."""

    def __init__(self, model: Model, admitted: list[Admitted], first_token: Callable[[float], None]) -> None:
        self.model, self.admitted = model, admitted
        self._first_token: Callable[[float], None] | None = first_token
        """Called with the seconds until there was one."""
        self._emitters = {one.request.id: one.emitters for one in admitted}
        self.first_events: dict[str, TokenEvent] = {}
        """Of each request: with the log-probabilities of its prompt, where they are asked for."""
        self._running = {one.request.id: Running(one.request.id, len(one.request.tokens)) for one in admitted}
        self._left = sum(len(one.emitters) for one in admitted)
        """Choices that have not ended."""
        self._endings: list[Ending] = []
        self._began = time.monotonic()

    @property
    def usage(self) -> Usage:
        """So far; what was drawn counts when its choice has ended."""
        running = self._running.values()
        return Usage(
            prompt=sum(one.prompt for one in running),
            completion=sum(ending.num_tokens for ending in self._endings),
            cached=sum(one.reused for one in running),
            reasoning=sum(ending.reasoning_tokens for ending in self._endings),
        )

    @property
    def all_read(self) -> bool:
        """Every prompt has been, so that all that can be told of it is known."""
        return len(self.first_events) == len(self.admitted)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """First nothing, when the engine has taken it; then what each step brings. Leaving gives everything back.

        Raises:
            RequestError, EngineError: at first; the engine does not take it.
        """
        listed = self.model.steps.requests
        listed |= self._running
        try:
            async with self.model.front.running([one.request for one in self.admitted]) as batches:
                yield []
                async for events in batches:
                    yield [piece for event in events for piece in self._push(event)]
                    if not self._left:
                        return
        finally:
            for name in self._running:
                del listed[name]

    def _push(self, event: TokenEvent) -> list[Piece]:
        self.first_events.setdefault(event.request_id, event)
        if event.token is not None:
            self._running[event.request_id].generated += 1
            if self._first_token is not None:
                self._first_token(time.monotonic() - self._began)
                self._first_token = None
        emitter = self._emitters[event.request_id][event.sample]
        if event.error is not None:
            logger.error("%s: %s", event.request_id, event.error)
            event = replace(event, error=event.error if event.error.startswith(OPEN_ERRORS) else CLOSED_ERROR)
        pieces = emitter.push(event)
        for piece in pieces:
            if piece.ending is not None:
                self._left -= 1
                self._endings.append(piece.ending)
                self.model.places.ended(piece.ending.num_tokens)
                if emitter.abandoned and self._left:  # the last is cancelled by leaving
                    self.model.front.cancel_soon(event.request_id, event.sample)
        return pieces
