"""OpenAI, /v1/chat/completions with ``stream``: what the chunks say, one by one and put together."""

import asyncio
from typing import Any

from pellucid.conformance.case import Failed, case, same, true
from pellucid.conformance.openai_chat import check_logprobs, logprobs_of
from pellucid.conformance.session import LONG, UNICODE, Session, check_stop, middle, user


def chunks_of(s: Session, **changes: Any) -> list[Any]:
    """All chunks of a stream, checked for what holds in every stream."""
    request = s.request(stream=True, **changes)
    with s.client.chat.completions.create(**request) as stream:
        chunks = [s.valid(chunk) for chunk in stream]
    true(chunks, "the stream has chunks")
    same({(c.id, c.created, c.model, c.object) for c in chunks},
         {(chunks[0].id, chunks[0].created, s.model, "chat.completion.chunk")}, "id, created, model, object of all chunks")  # fmt: skip
    ended: dict[int, str] = {}
    begun: list[int] = []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        true(choice.index not in ended, f"nothing follows the finish_reason of choice {choice.index}")
        if choice.index not in begun:
            begun.append(choice.index)
            same(choice.delta.role, "assistant", "role of the first delta")
        else:
            same(choice.delta.role, None, "role of a later delta: it is told once")
        if choice.finish_reason is not None:
            ended[choice.index] = choice.finish_reason
    wanted = list(range(changes.get("n", 1)))
    same(begun, wanted, "indexes of the choices, in the order of their first chunks")
    same(sorted(ended), wanted, "choices that end with a finish_reason")
    return chunks


def gathered(chunks: list[Any], index: int = 0) -> tuple[str, str]:
    """The text and the finish_reason of a choice."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    text = "".join(choice.delta.content or "" for choice in choices)
    return text, next(choice.finish_reason for choice in choices if choice.finish_reason)


@case("openai", "stream")
def stream(s: Session) -> None:
    prompt, text = s.talkative()
    request = {"messages": [user(prompt)], "max_tokens": LONG}
    chunks = chunks_of(s, **request)
    whole = s.chat(**request)
    same(gathered(chunks), (text, whole.choices[0].finish_reason), "text and finish_reason, against the whole answer")
    true(
        all(chunk.choices and chunk.usage is None for chunk in chunks),
        "no usage unless asked for: each chunk has a choice",
    )
    if whole.usage.completion_tokens >= 8 and "\N{REPLACEMENT CHARACTER}" not in text:
        true(sum(bool(c.choices[0].delta.content) for c in chunks) > 1, "the text comes in several chunks")


@case("openai", "stream: usage", feature="stream_options")
def usage(s: Session) -> None:
    chunks = chunks_of(s, stream_options={"include_usage": True})
    *others, last = chunks
    same(last.choices, [], "choices of the chunk with the usage")
    true(last.usage is not None, "the last chunk has the usage")
    true(all(chunk.usage is None for chunk in others), "only the last chunk has a usage")
    whole = s.chat().usage
    told = last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens
    same(told, (whole.prompt_tokens, whole.completion_tokens, whole.total_tokens), "usage, against the whole answer")


@case("openai", "stream: .stream() helper")
def helper(s: Session) -> None:
    # the helper raises where an answer is cut by its limit, so a stop string ends this one
    prompt, text = s.talkative()
    stop = middle(text)
    request = s.request(messages=[user(prompt)], max_tokens=LONG, stop=stop)
    with s.client.chat.completions.stream(**request) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = s.valid(events.get_final_completion())
    check_stop(text, "".join(deltas), stop)
    choice = final.choices[0]
    found = choice.message.content, choice.message.role, choice.finish_reason
    same(found, ("".join(deltas), "assistant", "stop"), "text, role and finish_reason of the final completion")


@case("openai", "stream: n=2")
def two_choices(s: Session) -> None:
    prompt, text = s.talkative()
    request: dict[str, Any] = {"messages": [user(prompt)], "max_tokens": LONG, "n": 2}
    chunks = chunks_of(s, **request)
    same([gathered(chunks, index)[0] for index in (0, 1)], [text, text], "two choices, against one alone")
    stop = middle(text)
    with s.client.chat.completions.stream(**s.request(**request, stop=stop)) as events:
        final = events.get_final_completion()
    for choice in final.choices:
        check_stop(text, choice.message.content, stop)
    same(len(final.choices), 2, "number of choices of the helper")


@case("openai", "stream: stop string")
def stop_string(s: Session) -> None:
    prompt, text = s.talkative()
    stop = middle(text)
    told, reason = gathered(chunks_of(s, messages=[user(prompt)], max_tokens=LONG, stop=stop))
    check_stop(text, told, stop)
    same(reason, "stop", "finish_reason")


@case("openai", "stream: max_tokens 1")
def one_token(s: Session) -> None:
    chunks = chunks_of(s, max_tokens=1)
    same(gathered(chunks)[0], s.told(s.chat(max_tokens=1)), "text of one token")


@case("openai", "stream: logprobs", feature="logprobs")
def logprobs(s: Session) -> None:
    prompt, text = s.talkative()
    request = {"messages": [user(prompt)], "max_tokens": LONG}
    told = ""
    tokens: list[Any] = []
    for choice in (c for chunk in chunks_of(s, logprobs=True, top_logprobs=3, **request) for c in chunk.choices):
        told += choice.delta.content or ""
        tokens += choice.logprobs.content if choice.logprobs else []
        data = b"".join(bytes(token.bytes or []) for token in tokens)
        length = len(told.encode())
        true(
            len(data) <= length or "\N{REPLACEMENT CHARACTER}" in told, "log-probabilities never run ahead of the text"
        )
    check_logprobs(tokens, text, 3)
    whole = logprobs_of(s, **request).choices[0].logprobs.content
    same(
        [(t.token, t.logprob) for t in tokens],
        [(t.token, t.logprob) for t in whole],
        "tokens, against the whole answer",
    )


@case("openai", "stream: a prompt of many scripts")
def scripts(s: Session) -> None:
    request = {"messages": [user(UNICODE)], "max_tokens": LONG}
    same(gathered(chunks_of(s, **request))[0], s.told(s.chat(**request)), "text, against the whole answer")


@case("openai", "stream: left early")
def left_early(s: Session) -> None:
    for _ in range(3):
        with s.client.chat.completions.create(**s.request(stream=True, max_tokens=10**6)) as events:
            next(iter(events))
    same(gathered(chunks_of(s))[0], s.told(s.chat()), "the next stream, against the whole answer")


@case("openai", "stream: asynchronous client")
def asynchronous(s: Session) -> None:
    async def text(client: Any) -> str:
        told = ""
        async for chunk in await client.chat.completions.create(**s.request(stream=True)):
            told += chunk.choices[0].delta.content or ""
        return told

    async def both() -> list[str]:
        async with s.connect(asynchronous=True) as client:
            return list(await asyncio.gather(text(client), text(client)))

    alone = s.told(s.chat())
    same(asyncio.run(both()), [alone, alone], "two streams at the same time")


@case("openai", "stream: refused before it begins")
def refused(s: Session) -> None:
    try:
        s.client.chat.completions.create(**s.request(stream=True, temperature=9))
    except s.sdk.BadRequestError:
        return
    raise Failed("a stream with temperature 9 began; it has to be a 400 with a JSON body")
