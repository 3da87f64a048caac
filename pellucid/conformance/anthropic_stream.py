"""Anthropic, /v1/messages with ``stream``: the order of events, and what they say put together."""

import asyncio
import json
from typing import Any

from pellucid.conformance.anthropic_messages import prompt_tokens
from pellucid.conformance.case import Failed, case, same, true
from pellucid.conformance.session import LONG, UNICODE, Session, check_stop, middle, user


def events_of(s: Session, **changes: Any) -> list[Any]:
    """All events of a stream but pings, checked for their order."""
    with s.client.messages.create(**s.request(**changes), stream=True) as stream:
        events = [s.valid(event) for event in stream if event.type != "ping"]
    check_order([event.type for event in events], [getattr(event, "index", None) for event in events])
    start = events[0].message
    same((start.content, start.stop_reason, start.stop_sequence), ([], None, None), "content and stop of message_start")
    true(prompt_tokens(start.usage) > 0, "message_start tells the prompt's tokens")
    return events


def check_order(types: list[str], indexes: list[int | None]) -> None:
    """message_start, the blocks one after another, message_delta, message_stop."""
    same(types[:1] + types[-2:], ["message_start", "message_delta", "message_stop"], "first and last two events")
    blocks, inside = 0, False
    for kind, index in zip(types[1:-2], indexes[1:-2], strict=True):
        wanted = ("content_block_delta", "content_block_stop") if inside else ("content_block_start",)
        true(kind in wanted, f"{' or '.join(wanted)} comes next, got {kind}")
        same(index, blocks, f"index of {kind}")
        inside = kind != "content_block_stop"
        blocks += not inside
    true(not inside, "the last block is stopped")


def text_of(events: list[Any]) -> str:
    return "".join(e.delta.text for e in events if e.type == "content_block_delta" and e.delta.type == "text_delta")


def ending(events: list[Any]) -> tuple[Any, Any, int]:
    """stop_reason, stop_sequence and output tokens, as message_delta tells them."""
    delta = events[-2]
    return delta.delta.stop_reason, delta.delta.stop_sequence, delta.usage.output_tokens


def whole_ending(message: Any) -> tuple[Any, Any, int]:
    return message.stop_reason, message.stop_sequence, message.usage.output_tokens


@case("anthropic", "stream")
def stream(s: Session) -> None:
    prompt, text = s.talkative()
    request = {"messages": [user(prompt)], "max_tokens": LONG}
    events, whole = events_of(s, **request), s.chat(**request)
    same(events[0].message.model, s.model, "model")
    same(text_of(events), text, "text, against the whole answer")
    same(ending(events), whole_ending(whole), "stop_reason, stop_sequence, output_tokens, against the whole answer")
    same(prompt_tokens(events[0].message.usage), prompt_tokens(whole.usage), "prompt tokens, against the whole answer")
    deltas = [event for event in events if event.type == "content_block_delta"]
    if whole.usage.output_tokens >= 8 and "\N{REPLACEMENT CHARACTER}" not in text:
        true(len(deltas) > 1, "the text comes in several events")


@case("anthropic", "stream: .stream() helper")
def helper(s: Session) -> None:
    prompt, text = s.talkative()
    with s.client.messages.stream(**s.request(messages=[user(prompt)], max_tokens=LONG)) as events:
        told = "".join(events.text_stream)
        final = s.valid(events.get_final_message())
    same((told, s.told(final)), (text, text), "text_stream and the final message's text")
    same(
        whole_ending(final),
        whole_ending(s.chat(messages=[user(prompt)], max_tokens=LONG)),
        "how it ended, against the whole answer",
    )


@case("anthropic", "stream: stop_sequences")
def stop_sequences(s: Session) -> None:
    prompt, text = s.talkative()
    stop = middle(text)
    request = {"messages": [user(prompt)], "max_tokens": LONG, "stop_sequences": [stop]}
    events = events_of(s, **request)
    check_stop(text, text_of(events), stop)
    same(ending(events)[:2], ("stop_sequence", stop), "stop_reason and stop_sequence")
    same(ending(events), whole_ending(s.chat(**request)), "how it ended, against the whole answer")


@case("anthropic", "stream: max_tokens 1")
def one_token(s: Session) -> None:
    events, whole = events_of(s, max_tokens=1), s.chat(max_tokens=1)
    same((text_of(events), ending(events)), (s.told(whole), whole_ending(whole)), "text and ending of one token")


@case("anthropic", "stream: a prompt of many scripts")
def scripts(s: Session) -> None:
    request = {"messages": [user(UNICODE)], "max_tokens": LONG}
    same(text_of(events_of(s, **request)), s.told(s.chat(**request)), "text, against the whole answer")


@case("anthropic", "stream: thinking")
def thinking(s: Session) -> None:
    events = events_of(s, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=LONG)
    for event in events:
        if event.type == "content_block_start":
            true(
                event.content_block.type in ("text", "thinking"),
                f"a block of text or thinking, got {event.content_block}",
            )


@case("anthropic", "stream: beta namespace")
def beta(s: Session) -> None:
    with s.client.beta.messages.stream(**s.request()) as events:
        told = "".join(events.text_stream)
    same(told, s.told(s.chat()), "text, against the whole answer")


@case("anthropic", "stream: left early")
def left_early(s: Session) -> None:
    for _ in range(3):
        with s.client.messages.create(**s.request(max_tokens=2000), stream=True) as events:
            next(iter(events))
    same(text_of(events_of(s)), s.told(s.chat()), "the next stream, against the whole answer")


@case("anthropic", "stream: asynchronous client")
def asynchronous(s: Session) -> None:
    async def text(client: Any) -> str:
        async with client.messages.stream(**s.request()) as events:
            return "".join([part async for part in events.text_stream])

    async def both() -> list[str]:
        async with s.connect(asynchronous=True) as client:
            return list(await asyncio.gather(text(client), text(client)))

    alone = s.told(s.chat())
    same(asyncio.run(both()), [alone, alone], "two streams at the same time")


@case("anthropic", "stream: refused before it begins")
def refused(s: Session) -> None:
    try:
        s.client.messages.create(**s.request(messages=[{"role": "wizard", "content": "x"}]), stream=True)
    except s.sdk.BadRequestError as refusal:
        true(json.dumps(refusal.body), "the refusal has a JSON body")
        return
    raise Failed("a stream with an unknown role began; it has to be a 400 with a JSON body")
