"""OpenAI, /v1/chat/completions: whole answers."""

import asyncio
from functools import partial
from typing import Any

from pellucid.conformance.case import Failed, case, same, true
from pellucid.conformance.session import LONG, PROMPTS, SHORT, UNICODE, Session, check_stop, middle, user


def check_choice(choice: Any, usage: Any, limit: int) -> None:
    """What holds for any plain choice of a request with one choice."""
    same(choice.message.role, "assistant", "role")
    true(isinstance(choice.message.content, str), "content is text")
    same(choice.message.tool_calls or [], [], "tool calls without tools")
    true(choice.finish_reason in ("stop", "length"), f"finish_reason {choice.finish_reason!r} is stop or length")
    if choice.finish_reason == "length":
        same(usage.completion_tokens, limit, "completion_tokens of an answer that ended at its limit")
    true(0 < usage.completion_tokens <= limit, f"1 to {limit} completion tokens, got {usage.completion_tokens}")
    same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")
    true(usage.prompt_tokens > 0, "prompt tokens are counted")


@case("openai", "chat")
def chat(s: Session) -> None:
    answer = s.chat(messages=[{"role": "system", "content": "Be kind."}, user(PROMPTS[0])])
    same(answer.object, "chat.completion", "object")
    true(answer.id, "the answer has an id")
    true(answer.created > 1_600_000_000, f"created {answer.created} are seconds since 1970")
    same(answer.model, s.model, "model")
    same([choice.index for choice in answer.choices], [0], "indexes of the choices")
    check_choice(answer.choices[0], answer.usage, SHORT)
    same(answer.choices[0].logprobs, None, "logprobs that were not asked for")
    true(answer.id != s.chat().id, "each answer has an id of its own")


@case("openai", "chat: several turns")
def several_turns(s: Session) -> None:
    first, second = user(PROMPTS[0]), user(PROMPTS[1])
    reply = {"role": "assistant", "content": "Hello."}
    short, long = s.chat(messages=[first]), s.chat(messages=[first, reply, second])
    true(long.usage.prompt_tokens > short.usage.prompt_tokens, "earlier turns are part of the prompt")


@case("openai", "chat: developer role, text parts")
def parts(s: Session) -> None:
    plain = s.chat(messages=[{"role": "system", "content": "Be kind."}, user(PROMPTS[0])])
    part, more = ({"type": "text", "text": text} for text in PROMPTS[:2])
    given = s.chat(messages=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": [part]}])
    same(given.usage.prompt_tokens, plain.usage.prompt_tokens, "prompt tokens, against system and text")
    same(s.told(given), s.told(plain), "the answer, against system and text")
    both = s.chat(messages=[{"role": "user", "content": [part, more]}])
    true(both.usage.prompt_tokens > s.chat().usage.prompt_tokens, "every part belongs to the prompt")


@case("openai", "chat: null means absent, unknown fields ignored")
def nulls(s: Session) -> None:
    names = ["stop", "n", "top_p", "logit_bias", "stream_options", "response_format", "tools", "tool_choice", "user"]
    extra: dict[str, Any] = dict.fromkeys(names) | {"some_field_of_tomorrow": {"a": [1]}}
    same(s.told(s.chat(extra_body=extra)), s.told(s.chat()), "the answer")


@case("openai", "chat: continues the assistant's last message", feature="a begun answer")
def prefill(s: Session) -> None:
    begun = {"role": "assistant", "content": "Once upon"}
    plain, given = s.chat(messages=[user(PROMPTS[0])]), s.chat(messages=[user(PROMPTS[0]), begun])
    true(given.usage.prompt_tokens > plain.usage.prompt_tokens, "the begun answer is part of the prompt")
    check_choice(given.choices[0], given.usage, SHORT)


def exact_limit(s: Session, limit: int) -> None:
    answer = s.chat(max_tokens=limit, extra_body={"ignore_eos": True})
    check_choice(answer.choices[0], answer.usage, limit)


for count in (1, 2, 3):
    case("openai", f"chat: max_tokens {count}")(partial(exact_limit, limit=count))


@case("openai", "chat: max_completion_tokens wins over max_tokens")
def newer_limit(s: Session) -> None:
    answer = s.chat(max_tokens=9, extra_body={"max_completion_tokens": 2, "ignore_eos": True})
    check_choice(answer.choices[0], answer.usage, 2)
    answer = s.chat(max_tokens=None, max_completion_tokens=3)
    check_choice(answer.choices[0], answer.usage, 3)


@case("openai", "chat: temperature 0 repeats, top_p 0 and top_k 1 agree")
def greedy(s: Session) -> None:
    prompt, text = s.talkative()
    request = {"messages": [user(prompt)], "max_tokens": LONG}
    same(s.told(s.chat(**request)), text, "the answer a second time")
    same(s.told(s.chat(**request, top_p=0, temperature=1)), text, "the answer with top_p 0")
    same(s.told(s.chat(**request, extra_body={"top_k": 1}, temperature=1)), text, "the answer with top_k 1")


@case("openai", "chat: seed repeats")
def seeds(s: Session) -> None:
    def text(seed: int) -> str:
        return s.told(s.chat(temperature=2, seed=seed, max_tokens=LONG))

    same(text(7), text(7), "the answer with the same seed")
    true(
        len({text(seed) for seed in (7, 8, 9, 2**63 - 1, -1)}) > 1,
        "five seeds at temperature 2 give two answers at least",
    )


@case("openai", "chat: n=2")
def two_choices(s: Session) -> None:
    answer = s.chat(n=2, max_tokens=5)
    same([choice.index for choice in answer.choices], [0, 1], "indexes of the choices")
    first, second = (choice.message.content for choice in answer.choices)
    same(second, first, "the second choice at temperature 0")
    alone = s.chat(max_tokens=5)
    same(first, s.told(alone), "a choice of two, against one alone")
    same(answer.usage.prompt_tokens, alone.usage.prompt_tokens, "the prompt counts once")
    same(answer.usage.completion_tokens, 2 * alone.usage.completion_tokens, "completion_tokens of two choices")
    warm = s.chat(n=2, max_tokens=LONG, temperature=2, seed=3)
    true(len({choice.message.content for choice in warm.choices}) == 2, "choices at temperature 2 differ")


@case("openai", "chat: stop string")
def stop_string(s: Session) -> None:
    prompt, text = s.talkative()
    stop = middle(text)
    answer = s.chat(messages=[user(prompt)], max_tokens=LONG, stop=stop)
    check_stop(text, s.told(answer), stop)
    same(answer.choices[0].finish_reason, "stop", "finish_reason")
    same(s.told(s.chat(messages=[user(prompt)], max_tokens=LONG, stop=["\x01\x02", stop, "\x03\x04", "\x05"])), s.told(answer),
         "the answer with four stop strings")  # fmt: skip


@case("openai", "chat: penalties and logit_bias act", feature="logit_bias")
def shifted(s: Session) -> None:
    prompt, _ = s.talkative()
    # some token of these is no end token, and nothing can outweigh 100 against -100
    forced = s.chat(messages=[user(prompt)], max_tokens=4, logit_bias={"11": 100})
    free = s.chat(messages=[user(prompt)], max_tokens=4)
    other = s.chat(messages=[user(prompt)], max_tokens=4, logit_bias={"12": 100})
    true(len({s.told(forced), s.told(free), s.told(other)}) > 1, "a bias of 100 for a token changes the answer")
    answer = s.chat(messages=[user(prompt)], presence_penalty=2, frequency_penalty=2)
    check_choice(answer.choices[0], answer.usage, SHORT)


@case("openai", "chat: a prompt of many scripts")
def scripts(s: Session) -> None:
    short, long = s.chat(messages=[user("x")]), s.chat(messages=[user(UNICODE)])
    true(long.usage.prompt_tokens > short.usage.prompt_tokens, "every character is part of the prompt")
    check_choice(long.choices[0], long.usage, SHORT)


@case("openai", "chat: a huge limit is cut to the window")
def huge_limit(s: Session) -> None:
    with s.client.chat.completions.create(**s.request(max_tokens=10**7, stream=True)) as stream:
        true(next(iter(stream)).choices, "a first chunk comes")
    check_choice((answer := s.chat()).choices[0], answer.usage, SHORT)  # the server is free again


@case("openai", "chat: request id and raw answer")
def request_id(s: Session) -> None:
    answer = s.chat()
    true(answer._request_id, "the x-request-id header reaches the client")
    true(s.chat()._request_id != answer._request_id, "each request has an id of its own")
    raw = s.client.chat.completions.with_raw_response.create(**s.request())
    true(raw.headers["content-type"].startswith("application/json"), f"JSON, got {raw.headers['content-type']!r}")
    same(s.told(raw.parse()), s.told(answer), "the answer, read from the raw one")


@case("openai", "chat: asynchronous client")
def asynchronous(s: Session) -> None:
    async def both() -> list[Any]:
        async with s.connect(asynchronous=True) as client:
            calls = (client.chat.completions.create(**s.request()) for _ in range(2))
            return list(await asyncio.gather(*calls))

    alone = s.told(s.chat())
    same([s.told(answer) for answer in asyncio.run(both())], [alone, alone], "two answers at the same time")


def logprobs_of(s: Session, **changes: Any) -> Any:
    answer = s.chat(logprobs=True, top_logprobs=3, **changes)
    if answer.choices[0].logprobs is None:
        raise Failed("logprobs were asked for and are null")
    return answer


def check_logprobs(tokens: Any, content: str, alternatives: int) -> None:
    """Tokens of a greedy answer with log-probabilities, whose bytes are the text."""
    true(tokens, "there is a log-probability for each token")
    data = b"".join(bytes(token.bytes or []) for token in tokens)
    same(data.decode("utf-8", errors="replace"), content, "the tokens' bytes, put together")
    if "\N{REPLACEMENT CHARACTER}" not in content + "".join(token.token for token in tokens):
        same("".join(token.token for token in tokens), content, "the tokens, put together")
    for token in tokens:
        true(
            -1e5 < token.logprob <= 1e-6, f"log-probability {token.logprob} of {token.token!r} is at most 0 and finite"
        )
        same(len(token.top_logprobs), alternatives, "number of top_logprobs")
        values = [top.logprob for top in token.top_logprobs]
        same(values, sorted(values, reverse=True), "top_logprobs, the most probable first")
        if values:
            best = token.top_logprobs[0]
            same(
                (best.token, best.logprob),
                (token.token, token.logprob),
                "the most probable token, drawn at temperature 0",
            )


@case("openai", "chat: logprobs and top_logprobs", feature="logprobs")
def logprobs(s: Session) -> None:
    prompt, text = s.talkative()
    answer = logprobs_of(s, messages=[user(prompt)], max_tokens=LONG)
    same(s.told(answer), text, "the answer, against one without logprobs")
    tokens = answer.choices[0].logprobs.content
    check_logprobs(tokens, text, 3)
    true(len(tokens) <= answer.usage.completion_tokens, "no more tokens than completion_tokens")
    none = s.chat(messages=[user(prompt)], max_tokens=LONG, logprobs=True)
    check_logprobs(none.choices[0].logprobs.content, text, 0)
