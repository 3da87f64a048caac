"""Chat completions out, in OpenAI's form: one body, or a stream of chunks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pellucid.inference.constraints import CANNOT_GO_ON
from pellucid.server import sse
from pellucid.server.errors import ApiError, invalid, openai_error_body, server_fault, unavailable
from pellucid.server.generation import Choice, Ending, Piece, TokenText, ToolCall, Usage, gather

LOWEST_LOGPROB = -9999.0
"""Told for minus infinity, which JSON lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What every part of an answer repeats, and how it was asked for.

    ``num_choices``: of the whole request, ``n`` times the prompts. ``top_logprobs``: alternatives for each token.
    """

    id: str
    model: str
    created: int
    """Seconds since 1970."""
    fingerprint: str | None = None
    num_choices: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    include_usage: bool = False

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def chat_body(answer: Answer, pieces: Iterable[Piece], usage: Usage) -> dict[str, Any]:
    """The whole answer.

    ``logprobs.content`` has an entry for each token of the content, as streams tell them; hidden tokens, reasoning and
    tool calls have none.

    Raises:
        ApiError: a choice ended with an error.
    """
    choices = []
    for i, choice in enumerate(gather(pieces, answer.num_choices)):
        entry = {"index": i, "message": _message(choice), **finish(ended(choice.ending))}
        entry["logprobs"] = _logprobs(answer, choice.tokens)
        choices.append(entry)
    return {**answer.head("chat.completion"), "choices": choices, "usage": usage_body(usage)}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def ended(ending: Ending | None) -> Ending:
    """A normal ending.

    Raises:
        ApiError: the choice ended with an error or not at all; for a streamed answer, the event that must say so.
    """
    if ending is None:
        raise server_fault("the answer broke off")
    if ending.reason == "error" and (ending.error or "").startswith(CANNOT_GO_ON):  # it would at every further try
        raise invalid(f"{ending.error}; give a simpler schema or grammar", "invalid_value")
    if ending.reason == "error":
        raise server_fault(ending.error or "the model failed at this request")
    if ending.reason == "cancelled":
        raise unavailable(ending.error or "the server is closing and ended this answer; ask again", 1)
    return ending


def finish(ending: Ending) -> dict[str, Any]:
    """``finish_reason``, and which stop string or id it was."""
    reason = {"stop_string": "stop", "context": "length"}.get(ending.reason, ending.reason)
    told: dict[str, Any] = {"finish_reason": reason}
    if ending.reason == "stop_string":
        told["stop_reason"] = ending.stop
    return told


def finite(logprob: float) -> float:
    """As JSON can have it."""
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


def _logprobs(answer: Answer, tokens: Iterable[TokenText]) -> dict[str, Any] | None:
    if not answer.logprobs:
        return None
    entries = []
    for token in tokens:
        entry = _token(token.text, token.logprob, token.data)
        # the engine tells the drawn token last where it is outside the top
        top = token.top[: answer.top_logprobs]
        entry["top_logprobs"] = [_token(text, logprob, data) for _, text, data, logprob in top]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def _token(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


class OpenAIStream:
    """A streamed answer: `open`, `piece` for each piece, then `close`; or `fail` at any time. Each gives bytes to send.

    Once an error has been told nothing follows: every later call gives no bytes.
    """

    def __init__(self, answer: Answer, kind: str) -> None:
        self.answer = answer
        self.failed = False
        self._head = answer.head(kind) | ({"usage": None} if answer.include_usage else {})
        self._left = set(range(answer.num_choices))

    def open(self, usage: Usage) -> bytes:
        """A chunk for each choice, in order: clients take a choice to exist when they see it first."""
        raise NotImplementedError

    def piece(self, piece: Piece) -> bytes:
        """The chunk that tells a piece; none where it holds nothing to tell, or after an error."""
        if self.failed:
            return b""
        if piece.kind != "end":
            told = self._told(piece)
            return b"" if told is None else self._chunk(piece.choice, told)
        try:
            end = finish(ended(piece.ending))
        except ApiError as error:
            return self.fail(error)
        self._left.discard(piece.choice)
        return self._chunk(piece.choice, self._told_last(piece) | end)

    def close(self, usage: Usage) -> bytes:
        """The usage, where it was asked for, and the end; an error where a choice has none, so that no client is misled."""
        if self.failed or self._left:
            return self.fail(server_fault("the answer broke off"))
        told = b""
        if self.answer.include_usage:
            told = sse.event({**self._head, "choices": [], "usage": usage_body(usage)})
        return told + sse.DONE

    def fail(self, error: ApiError) -> bytes:
        """The event that makes clients raise."""
        if self.failed:
            return b""
        self.failed = True
        return sse.event(openai_error_body(error))

    def _told(self, piece: Piece) -> dict[str, Any] | None:
        """A choice's fields for a piece that does not end it; None: there is nothing to tell."""
        raise NotImplementedError

    def _told_last(self, piece: Piece) -> dict[str, Any]:
        """Those for the one that does, besides why."""
        raise NotImplementedError

    def _chunk(self, index: int, told: dict[str, Any]) -> bytes:
        return sse.event({**self._head, "choices": [{"index": index, "finish_reason": None, **told}]})


class ChatStream(OpenAIStream):
    """Of a chat completion."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer, "chat.completion.chunk")

    def open(self, usage: Usage) -> bytes:
        """The role of each choice, which clients would add up if it came twice."""
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return b"".join(self._chunk(i, first) for i in range(self.answer.num_choices))

    def _told(self, piece: Piece) -> dict[str, Any] | None:
        tokens = piece.tokens if piece.kind == "content" and self.answer.logprobs else ()
        if not (piece.text or tokens or piece.kind == "tool_start"):
            return None
        return {"delta": _delta(piece), "logprobs": _logprobs(self.answer, tokens) if tokens else None}

    def _told_last(self, piece: Piece) -> dict[str, Any]:
        return {"delta": {}, "logprobs": _logprobs(self.answer, piece.tokens) if piece.tokens else None}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece.kind:
        case "content":
            return {"content": piece.text}
        case "reasoning":
            return {"reasoning_content": piece.text}
        case "tool_start":
            call = _call(ToolCall(piece.tool_id, piece.tool_name))
            return {"tool_calls": [{"index": piece.tool_index, **call}]}
    assert piece.kind == "tool_arguments"
    return {"tool_calls": [{"index": piece.tool_index, "function": {"arguments": piece.text}}]}
