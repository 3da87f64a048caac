"""Event streams reach a conforming client as what they are, however their bytes are cut."""

import json
import math
from collections.abc import Callable

import pytest
from answer_pieces import ANSWERS, USAGE, EventReader, conforming_events

from pellucid.server import sse
from pellucid.server.anthropic_encode import MessageStream
from pellucid.server.generation import Piece
from pellucid.server.openai_completions import CompletionStream
from pellucid.server.openai_encode import Answer, ChatStream

ANSWER = Answer(id="chatcmpl-1", model="m", created=5, logprobs=True, top_logprobs=1, include_usage=True)


def chat(pieces: list[Piece]) -> bytes:
    stream = ChatStream(ANSWER)
    return stream.open(USAGE) + b"".join(map(stream.piece, pieces)) + stream.close(USAGE)


def completion(pieces: list[Piece]) -> bytes:
    stream = CompletionStream(ANSWER)
    return stream.open(USAGE) + b"".join(map(stream.piece, pieces)) + stream.close(USAGE)


def message(pieces: list[Piece]) -> bytes:
    stream = MessageStream("msg_1", "m", "req_1")
    return stream.open(USAGE) + sse.KEEP_ALIVE + b"".join(map(stream.piece, pieces)) + stream.close(USAGE)


STREAMS = [(encode, name) for encode in (chat, message) for name in ANSWERS] + [(completion, "text")]


@pytest.mark.parametrize(("encode", "name"), STREAMS)
def test_a_stream_cut_at_every_byte_is_the_same_events(encode: Callable[[list[Piece]], bytes], name: str) -> None:
    stream = encode(ANSWERS[name])
    events = conforming_events([stream])
    assert len(events) >= 3 and stream.endswith(b"\n\n")
    for cut in range(len(stream) + 1):
        reader = EventReader()
        assert reader.feed(stream[:cut]) + reader.feed(stream[cut:]) == events
    assert conforming_events(bytes([byte]) for byte in stream) == events


@pytest.mark.parametrize(("encode", "name"), STREAMS)
def test_a_stream_that_breaks_off_tells_whole_events_only(encode: Callable[[list[Piece]], bytes], name: str) -> None:
    stream = encode(ANSWERS[name])
    events = conforming_events([stream])
    told = [conforming_events([stream[:cut]]) for cut in range(len(stream))]
    assert all(some == events[: len(some)] for some in told)
    assert len(told[-1]) == len(events) - 1  # the last byte completes the last event


def test_two_events_reach_a_conforming_client_as_two() -> None:
    stream = sse.event({"a": 1}) + sse.event({"b": "x\ny\r\n\u2028: z"}, "named")
    assert conforming_events([stream]) == [
        ("message", '{"a":1}'),
        ("named", json.dumps({"b": "x\ny\r\n\u2028: z"}, ensure_ascii=False, separators=(",", ":"))),
    ]


def test_bytes_of_an_event() -> None:
    assert sse.event({"a": "é", "b": None}) == 'data: {"a":"é","b":null}\n\n'.encode()
    assert sse.event({"a": 1}, "ping") == b'event: ping\ndata: {"a":1}\n\n'
    assert sse.DONE == b"data: [DONE]\n\n"


def test_keep_alive_is_no_event_wherever_it_stands_between_events() -> None:
    first, second = sse.event({"a": 1}), sse.event({"b": 2}, "x")
    plain = conforming_events([first + second])
    alive = sse.KEEP_ALIVE
    assert conforming_events([alive + first + alive + alive + second + alive]) == plain
    assert conforming_events([alive]) == []


def test_numbers_that_json_lacks_are_never_sent() -> None:
    with pytest.raises(ValueError):
        sse.event({"a": math.inf})


def test_half_a_surrogate_pair_cannot_end_a_stream() -> None:
    assert json.loads(sse.dump({"a": "\ud800"})) == {"a": "?"}


def test_streams_are_neither_cached_nor_held_back() -> None:
    assert sse.HEADERS["Content-Type"].startswith("text/event-stream")
    assert sse.HEADERS["Cache-Control"] == "no-cache" and sse.HEADERS["X-Accel-Buffering"] == "no"
