"""Anthropic, /v1/messages: whole answers, token counts, models."""

import asyncio
from functools import partial
from typing import Any

from pellucid.conformance.case import case, same, true
from pellucid.conformance.session import LONG, PROMPTS, SHORT, UNICODE, Session, check_stop, middle, user


def prompt_tokens(usage: Any) -> int:
    """All tokens of the prompt: those of the cache are counted apart."""
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return sum(part or 0 for part in parts)


def check_message(message: Any, limit: int) -> None:
    """What holds for any plain answer."""
    same((message.type, message.role), ("message", "assistant"), "type and role")
    true({block.type for block in message.content} <= {"text", "thinking"}, f"blocks of text, got {message.content}")
    true(
        message.stop_reason in ("end_turn", "max_tokens"),
        f"stop_reason {message.stop_reason!r} is end_turn or max_tokens",
    )
    if message.stop_reason == "max_tokens":
        same(message.usage.output_tokens, limit, "output_tokens of an answer that ended at its limit")
    true(0 < message.usage.output_tokens <= limit, f"1 to {limit} output tokens, got {message.usage.output_tokens}")
    same(message.stop_sequence, None, "stop_sequence where none was given")
    true(prompt_tokens(message.usage) > 0, "prompt tokens are counted")


@case("anthropic", "messages")
def messages(s: Session) -> None:
    message = s.chat()
    true(message.id and message.id != s.chat().id, "each message has an id of its own")
    same(message.model, s.model, "model")
    check_message(message, SHORT)


@case("anthropic", "messages: system as text and as blocks")
def system(s: Session) -> None:
    plain, text = s.chat(), s.chat(system="Be kind and brief.")
    blocks = s.chat(system=[{"type": "text", "text": "Be kind and brief.", "cache_control": {"type": "ephemeral"}}])
    true(prompt_tokens(text.usage) > prompt_tokens(plain.usage), "the system text is part of the prompt")
    same(prompt_tokens(blocks.usage), prompt_tokens(text.usage), "prompt tokens of blocks, against the text")
    same(s.told(blocks), s.told(text), "the answer to blocks, against the text")


@case("anthropic", "messages: a system message among the others")
def inner_system(s: Session) -> None:
    given = s.chat(messages=[{"role": "system", "content": "Be kind and brief."}, user(PROMPTS[0])])
    true(prompt_tokens(given.usage) > prompt_tokens(s.chat().usage), "the system message is part of the prompt")


@case("anthropic", "messages: turns, blocks, one role twice")
def turns(s: Session) -> None:
    reply = {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}
    texts = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in PROMPTS[:2]]
    once = s.chat(messages=[texts[0]])
    same(s.told(once), s.told(s.chat()), "the answer to a block of text, against the text")
    check_message(s.chat(messages=[texts[0], reply, texts[1]]), SHORT)
    twice = s.chat(messages=texts)  # two of the user's in a row are one turn
    true(prompt_tokens(twice.usage) > prompt_tokens(once.usage), "both messages are part of the prompt")


@case("anthropic", "messages: continues the assistant's last message", feature="a begun answer")
def prefill(s: Session) -> None:
    message = s.chat(messages=[user(PROMPTS[0]), {"role": "assistant", "content": "Once upon"}])
    check_message(message, SHORT)
    true(prompt_tokens(message.usage) > prompt_tokens(s.chat().usage), "the begun answer is part of the prompt")


def exact_limit(s: Session, limit: int) -> None:
    check_message(s.chat(max_tokens=limit), limit)


for count in (1, 2, 3):
    case("anthropic", f"messages: max_tokens {count}")(partial(exact_limit, limit=count))


@case("anthropic", "messages: stop_sequences")
def stop_sequences(s: Session) -> None:
    prompt, text = s.talkative()
    stop = middle(text)
    message = s.chat(messages=[user(prompt)], max_tokens=LONG, stop_sequences=["\x01\x02", stop])
    check_stop(text, s.told(message), stop)
    same((message.stop_reason, message.stop_sequence), ("stop_sequence", stop), "stop_reason and stop_sequence")


@case("anthropic", "messages: sampling as extra fields")
def sampling(s: Session) -> None:
    prompt, text = s.talkative()
    for extra in ({"temperature": 0}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 0}):
        same(
            s.told(s.chat(messages=[user(prompt)], max_tokens=LONG, extra_body=extra)),
            text,
            f"the greedy answer, by {extra}",
        )
    warm = {s.told(s.chat(max_tokens=LONG, extra_body={"temperature": 1, "top_p": 1})) for _ in range(6)}
    true(
        warm != {s.told(s.chat(max_tokens=LONG))} or len(text) < 8,
        "temperature 1 does not always give the greedy answer",
    )


@case("anthropic", "messages: metadata and service_tier ignored")
def ignored(s: Session) -> None:
    message = s.chat(
        metadata={"user_id": "u"}, service_tier="auto", extra_body={"temperature": 0, "tomorrow": {"a": 1}}
    )
    same(s.told(message), s.told(s.chat()), "the answer")


@case("anthropic", "messages: thinking accepted")
def thinking(s: Session) -> None:
    for setting in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}):
        check_message(s.chat(thinking=setting), SHORT)
    said = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Hello."}]
    check_message(s.chat(messages=[user("hi"), {"role": "assistant", "content": said}, user("and?")]), SHORT)


@case("anthropic", "messages: a prompt of many scripts")
def scripts(s: Session) -> None:
    message = s.chat(messages=[user(UNICODE)])
    check_message(message, SHORT)
    true(
        prompt_tokens(message.usage) > prompt_tokens(s.chat(messages=[user("x")]).usage),
        "every character is part of the prompt",
    )


@case("anthropic", "messages: beta namespace")
def beta(s: Session) -> None:
    message = s.valid(s.client.beta.messages.create(**s.request(betas=["some-beta-2026-01-01"])))
    check_message(message, SHORT)
    same(s.told(message), s.told(s.chat()), "the answer, against the plain route")


@case("anthropic", "messages: request id and raw answer")
def request_id(s: Session) -> None:
    message = s.chat()
    true(
        message._request_id and message._request_id != s.chat()._request_id, "the request-id header reaches the client"
    )
    raw = s.client.messages.with_raw_response.create(**s.request())
    true(raw.headers["content-type"].startswith("application/json"), f"JSON, got {raw.headers['content-type']!r}")
    same(s.told(raw.parse()), s.told(message), "the answer, read from the raw one")


@case("anthropic", "messages: asynchronous client")
def asynchronous(s: Session) -> None:
    async def both() -> list[Any]:
        async with s.connect(asynchronous=True) as client:
            return list(await asyncio.gather(*(client.messages.create(**s.request()) for _ in range(2))))

    alone = s.told(s.chat())
    same([s.told(message) for message in asyncio.run(both())], [alone, alone], "two answers at the same time")


@case("anthropic", "count_tokens")
def count_tokens(s: Session) -> None:
    tool = {"name": "ping", "description": "Ping.", "input_schema": {"type": "object", "properties": {}}}
    requests: list[dict[str, Any]] = [
        {"messages": [user(PROMPTS[0])]},
        {"messages": [user(UNICODE)], "system": "Be kind."},
        {"messages": [user("a"), {"role": "assistant", "content": "b"}, user("c")]},
        {"messages": [user("ping?")], "tools": [tool]},
    ]
    counts = []
    for request in requests:
        counted = s.valid(s.client.messages.count_tokens(model=s.model, **request)).input_tokens
        same(counted, prompt_tokens(s.chat(**request, max_tokens=1).usage), f"count of {request}, against usage")
        counts.append(counted)
    true(len(set(counts)) > 1, f"the count depends on the prompt, got {counts}")
    beta = s.client.beta.messages.count_tokens(model=s.model, **requests[0]).input_tokens
    same(beta, counts[0], "count in the beta namespace")


@case("anthropic", "models")
def models(s: Session) -> None:
    listed = [s.valid(model) for model in s.client.models.list()]
    true(s.model in [model.id for model in listed], f"{s.model!r} is in the list")
    for model in listed:
        same(
            (model.type, bool(model.display_name), bool(model.created_at)),
            ("model", True, True),
            "type, display_name, created_at",
        )
        same(s.client.models.retrieve(model.id).id, model.id, "id of the model that was asked for")
