"""The routes that generate: how each reads a body and tells an answer."""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from pellucid.server.answering import Encoding, Form, Work
from pellucid.server.anthropic import MESSAGES_FIELDS, parse_count_tokens, parse_messages
from pellucid.server.anthropic_encode import MessageStream, message_body
from pellucid.server.call import Call
from pellucid.server.generation import Generation, Piece, Usage
from pellucid.server.openai import CHAT_FIELDS, COMPLETION_FIELDS, parse_chat, parse_completion
from pellucid.server.openai_completions import CompletionStream, Echo, completion_body
from pellucid.server.openai_encode import Answer, ChatStream, chat_body


def _answer(id_: str, generation: Generation, work: Work) -> Answer:
    return Answer(
        id=id_, model=work.model.name, created=int(time.time()), fingerprint=work.model.fingerprint,
        num_choices=sum(len(one.emitters) for one in work.admitted), logprobs=generation.logprobs,
        top_logprobs=generation.params.top_logprobs, include_usage=generation.include_usage,
    )  # fmt: skip


def _chat(id_: str, call: Call, generation: Generation, work: Work) -> Encoding:
    answer = _answer(id_, generation, work)
    return Encoding(partial(ChatStream, answer), partial(chat_body, answer))


def _completion(id_: str, call: Call, generation: Generation, work: Work) -> Encoding:
    answer = _answer(id_, generation, work)

    def echoes() -> list[Echo]:
        """Their log-probabilities are known when the prompts have been read."""
        found = [one.echo(work.first_events.get(one.request.id)) for one in work.admitted] if generation.echo else []
        return [Echo(*echo) for echo in found]

    def body(pieces: Iterable[Piece], usage: Usage) -> dict[str, Any]:
        return completion_body(answer, pieces, usage, echoes())

    return Encoding(lambda: CompletionStream(answer, echoes()), body, generation.echo and generation.logprobs)


def _messages(id_: str, call: Call, generation: Generation, work: Work) -> Encoding:
    name = work.model.name
    return Encoding(partial(MessageStream, id_, name, call.id), partial(message_body, id_, name))


CHAT = Form("chatcmpl-", CHAT_FIELDS, lambda body, max_n: parse_chat(body, max_n=max_n), _chat)
COMPLETION = Form("cmpl-", COMPLETION_FIELDS, lambda body, max_n: parse_completion(body, max_n=max_n), _completion)
MESSAGES = Form("msg_", MESSAGES_FIELDS, lambda body, max_n: parse_messages(body), _messages)
COUNT = Form("msg_", MESSAGES_FIELDS, lambda body, max_n: parse_count_tokens(body), _messages)
