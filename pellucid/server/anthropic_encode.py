"""Messages out, in Anthropic's form: one body, or a stream of events.

Both come from the same blocks: the body is what a client makes of the stream.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pellucid.server import sse
from pellucid.server.errors import ApiError, anthropic_error_body, server_fault
from pellucid.server.generation import Ending, Piece, Usage
from pellucid.server.openai_encode import ended

_STOP_REASONS = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
}


def message_body(id_: str, model: str, pieces: Iterable[Piece], usage: Usage) -> dict[str, Any]:
    """The whole answer, ``id_`` beginning with ``msg_``. A call that the limit cut has an empty ``input``.

    Raises:
        ApiError: it ended with an error.
    """
    blocks, content, ending = _Blocks(), list[dict[str, Any]](), None
    for piece in pieces:
        for event in blocks.events(piece):
            _take(content, event)
        ending = piece.ending
    return {**_head(id_, model, usage), "content": content, **_stop(ended(ending)), "usage": usage_body(usage)}


def _take(content: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """As a client puts a message together."""
    match event:
        case {"type": "content_block_start", "content_block": block}:
            content.append({**block, "input": ""} if block["type"] == "tool_use" else dict(block))
        case {"delta": {"type": "input_json_delta", "partial_json": fragment}}:
            content[-1]["input"] += fragment
        case {"delta": {"type": "text_delta", "text": text}}:
            content[-1]["text"] += text
        case {"delta": {"type": "thinking_delta", "thinking": text}}:
            content[-1]["thinking"] += text
        case {"type": "content_block_stop"} if content[-1]["type"] == "tool_use":
            content[-1]["input"] = _input(content[-1]["input"])


def _input(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):  # cut
        return {}
    return value if isinstance(value, dict) else {}


def _head(id_: str, model: str, usage: Usage) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(usage),
    }


def _stop(ending: Ending) -> dict[str, Any]:
    """``stop_sequence`` is there even where it is null."""
    sequence = ending.stop if isinstance(ending.stop, str) else None
    return {"stop_reason": _STOP_REASONS[ending.reason], "stop_sequence": sequence}


def usage_body(usage: Usage) -> dict[str, int]:
    """``input_tokens`` are those that were computed; with those read from the cache they are the prompt."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def count_body(num_prompt: int) -> dict[str, int]:
    """The answer of count_tokens."""
    return {"input_tokens": num_prompt}


class _Blocks:
    """Which content block is open. Blocks follow each other, and none is empty but a tool's or one that was cut."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        match piece.kind:
            case "content" if piece.text:
                if self._kind != "text":
                    yield from self._begin({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": piece.text})
            case "reasoning" if piece.text:
                if self._kind != "thinking":
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": piece.text})
            case "tool_start":
                id_ = "toolu_" + piece.tool_id.removeprefix("call_")
                yield from self._begin({"type": "tool_use", "id": id_, "name": piece.tool_name, "input": {}})
            case "tool_arguments" if piece.text:
                assert self._kind == "tool_use", "arguments follow their call"
                yield self._delta({"type": "input_json_delta", "partial_json": piece.text})
            case "end":
                yield from self._end()

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self._index, self._kind = self._index + 1, block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end(self) -> Iterator[dict[str, Any]]:
        if self._kind == "thinking":  # clients wait for a signature; nobody here checks one
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""


class MessageStream:
    """A streamed answer: `open`, `piece` for each piece, then `close`; or `fail` at any time. Each gives bytes to send.

    Once an error has been told nothing follows: every later call gives no bytes.
    """

    def __init__(self, id_: str, model: str, request_id: str) -> None:
        self._id, self._model, self._request_id = id_, model, request_id
        self._blocks = _Blocks()
        self._ending: Ending | None = None
        self.failed = False

    def open(self, usage: Usage) -> bytes:
        """``message_start``, with the tokens of the prompt."""
        return _event({"type": "message_start", "message": _head(self._id, self._model, usage)})

    def piece(self, piece: Piece) -> bytes:
        """The events that tell a piece; none where it holds nothing to tell, or after an error."""
        if self.failed:
            return b""
        if piece.kind == "end":
            try:
                self._ending = ended(piece.ending)
            except ApiError as error:
                return self.fail(error)
        return b"".join(map(_event, self._blocks.events(piece)))

    def close(self, usage: Usage) -> bytes:
        """Why it ended and the usage; an error where it has no end, so that no client is misled."""
        if self.failed or self._ending is None:
            return self.fail(server_fault("the answer broke off"))
        delta = {"type": "message_delta", "delta": _stop(self._ending), "usage": usage_body(usage)}
        return _event(delta) + _event({"type": "message_stop"})

    def fail(self, error: ApiError) -> bytes:
        """The event that makes clients raise."""
        if self.failed:
            return b""
        self.failed = True
        return _event(anthropic_error_body(error, self._request_id))


def _event(data: dict[str, Any]) -> bytes:
    """Clients drop events whose name is not their type."""
    return sse.event(data, data["type"])
