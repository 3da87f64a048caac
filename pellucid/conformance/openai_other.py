"""OpenAI, the routes beside chat: /v1/completions, /v1/embeddings, /v1/models."""

import math
from functools import partial
from typing import Any

from pellucid.conformance.case import Failed, Skipped, case, same, true
from pellucid.conformance.session import LONG, UNICODE, Session, middle

PROMPT = "The cat and the dog"


def complete(s: Session, **changes: Any) -> Any:
    """A checked greedy completion. The client's type is wrong about echoes: the first token has no log-probability."""
    request = {"model": s.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "seed": 1} | changes
    answer = s.client.completions.create(**{name: value for name, value in request.items() if value is not None})
    return answer if "echo" in changes else s.valid(answer)


@case("openai", "completions", feature="completions")
def completions(s: Session) -> None:
    answer = complete(s)
    same(answer.object, "text_completion", "object")
    same([choice.index for choice in answer.choices], [0], "indexes of the choices")
    true(answer.choices[0].finish_reason in ("stop", "length"), "finish_reason is stop or length")
    same(answer.choices[0].logprobs, None, "logprobs that were not asked for")
    true(not answer.choices[0].text.startswith(PROMPT), "the prompt is not part of the text unless echo is asked for")
    usage = complete(s, max_tokens=None, extra_body={"ignore_eos": True}).usage
    true(
        0 < usage.completion_tokens <= 16, f"16 tokens unless max_tokens says otherwise, got {usage.completion_tokens}"
    )
    same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")


@case("openai", "completions: streamed", feature="completions")
def streamed(s: Session) -> None:
    whole = complete(s).choices[0]
    chunks = complete_stream(s)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    same("".join(choice.text for choice in choices), whole.text, "text, against the whole answer")
    same([c.finish_reason for c in choices if c.finish_reason], [whole.finish_reason], "finish_reason, told once")
    same({chunk.id for chunk in chunks}, {chunks[0].id}, "id of all chunks")


def complete_stream(s: Session, **changes: Any) -> list[Any]:
    request = {
        "model": s.model,
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "seed": 1,
        "stream": True,
    } | changes
    return list(s.client.completions.create(**request))


@case("openai", "completions: several prompts, n=2", feature="completions")
def several_prompts(s: Session) -> None:
    prompts = [PROMPT, "one two three"]
    alone = [complete(s, prompt=prompt).choices[0].text for prompt in prompts]
    answer = complete(s, prompt=prompts, n=2)
    same([choice.index for choice in answer.choices], [0, 1, 2, 3], "indexes of the choices")
    same(
        [c.text for c in answer.choices],
        [alone[0], alone[0], alone[1], alone[1]],
        "the choices of each prompt, in order",
    )
    texts = ["", ""]
    for choice in (choice for chunk in complete_stream(s, prompt=prompts) for choice in chunk.choices):
        texts[choice.index] += choice.text
    same(texts, alone, "streams of two prompts")


@case("openai", "completions: token arrays", feature="token arrays")
def token_arrays(s: Session) -> None:
    one = complete(s, prompt=[5, 6, 7])
    same(one.usage.prompt_tokens, 3, "prompt tokens of three ids")
    two = complete(s, prompt=[[5, 6, 7], [8, 9]])
    same([choice.index for choice in two.choices], [0, 1], "indexes of the choices")
    same(two.choices[0].text, one.choices[0].text, "text of ids beside others")
    same(two.usage.prompt_tokens, 5, "prompt tokens of three and two ids")


def check_arrays(logprobs: Any, text: str, *, echoed: bool) -> None:
    """The parallel arrays of a completion whose text is ``text``."""
    true(logprobs is not None, "logprobs were asked for and are null")
    lengths = [
        len(logprobs.tokens),
        len(logprobs.token_logprobs),
        len(logprobs.top_logprobs),
        len(logprobs.text_offset),
    ]
    same(lengths, lengths[:1] * 4, "lengths of tokens, token_logprobs, top_logprobs, text_offset")
    true(lengths[0] > 0, "there is a token")
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\N{REPLACEMENT CHARACTER}" not in token and not token.startswith("bytes:"):
            true(text[offset:].startswith(token), f"token {token!r} stands at {offset} of {text!r}")
    first, *others = logprobs.token_logprobs
    for value in others if echoed else [first, *others]:
        true(value is not None and -1e5 < value <= 1e-6, f"log-probability {value} is at most 0 and finite")
    if echoed:
        same(first, None, "log-probability of the first prompt token")


@case("openai", "completions: logprobs", feature="logprobs")
def logprobs(s: Session) -> None:
    choice = complete(s, logprobs=2).choices[0]
    check_arrays(choice.logprobs, choice.text, echoed=False)
    true(all(len(top) >= 2 for top in choice.logprobs.top_logprobs), "two alternatives for each token")
    choices = [c for chunk in complete_stream(s, logprobs=2) for c in chunk.choices]
    arrays = [c.logprobs for c in choices if c.logprobs]
    same([o for a in arrays for o in a.text_offset], choice.logprobs.text_offset, "text_offset of the stream")
    same([t for a in arrays for t in a.tokens], choice.logprobs.tokens, "tokens of the stream")


@case("openai", "completions: echo", feature="echo")
def echo(s: Session) -> None:
    plain = complete(s).choices[0].text
    choice = complete(s, echo=True, logprobs=1).choices[0]
    same(choice.text, PROMPT + plain, "prompt and answer")
    check_arrays(choice.logprobs, choice.text, echoed=True)
    same(
        complete(s, prompt=UNICODE, echo=True, max_tokens=1).choices[0].text[: len(UNICODE)],
        UNICODE,
        "an echoed prompt",
    )


@case("openai", "completions: score only", feature="echo")
def score(s: Session) -> None:
    answer = complete(s, echo=True, logprobs=1, max_tokens=0)
    same(answer.choices[0].text, PROMPT, "text: the prompt alone")
    same(answer.usage.completion_tokens, 0, "completion_tokens")
    check_arrays(answer.choices[0].logprobs, PROMPT, echoed=True)
    more = complete(s, echo=True, logprobs=1, max_tokens=4).choices[0].logprobs.token_logprobs[1:]
    scores = answer.choices[0].logprobs.token_logprobs[1:]
    near = all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(scores, more, strict=False))
    true(near, "the prompt's log-probabilities do not depend on what follows")


@case("openai", "completions: stop string", feature="completions")
def stop_string(s: Session) -> None:
    text = complete(s, max_tokens=LONG).choices[0].text
    stop = middle(text)
    if not stop:
        raise Failed(f"no text to stop within: {text!r}")
    choice = complete(s, max_tokens=LONG, stop=[stop]).choices[0]
    same((choice.text, choice.finish_reason), (text[: text.index(stop)], "stop"), f"text and reason with stop {stop!r}")


def embed(s: Session, **changes: Any) -> Any:
    """A checked answer with vectors."""
    if s.target.embedder is None:
        raise Skipped(s.target.no_embedder)
    return s.valid(s.client.embeddings.create(**({"model": s.target.embedder, "input": PROMPT} | changes)))


def vectors(answer: Any) -> list[list[float]]:
    same([item.index for item in answer.data], list(range(len(answer.data))), "indexes of the vectors")
    return [item.embedding for item in answer.data]


def far(one: list[float], other: list[float]) -> float:
    """The largest difference of two vectors."""
    same(len(one), len(other), "length of the vectors")
    return max(abs(x - y) for x, y in zip(one, other, strict=True))


@case("openai", "embeddings")
def embeddings(s: Session) -> None:
    answer = embed(s)
    same((answer.object, answer.data[0].object), ("list", "embedding"), "object")
    (vector,) = vectors(answer)
    floats = embed(s, encoding_format="float")
    true(far(vector, vectors(floats)[0]) < 1e-6, "base64, the client's default, and float tell the same vector")
    true(abs(math.hypot(*vector) - 1) < 1e-3, f"length 1, got {math.hypot(*vector)}")
    true(answer.usage.prompt_tokens > 0, "prompt tokens are counted")
    same(answer.usage.total_tokens, answer.usage.prompt_tokens, "total_tokens")


@case("openai", "embeddings: several inputs")
def several_inputs(s: Session) -> None:
    texts = [PROMPT, "tea " * 12, "owl"]
    alone = [vectors(embed(s, input=text))[0] for text in texts]
    together = vectors(embed(s, input=texts))
    same(len(together), 3, "number of vectors")
    true(max(map(far, together, alone)) < 1e-5, "a vector does not depend on those beside it, and they come in order")
    true(far(alone[0], alone[1]) > 1e-4, "different texts have different vectors")


@case("openai", "embeddings: token arrays", feature="token arrays")
def embedded_tokens(s: Session) -> None:
    both = vectors(embed(s, input=[[5, 6, 7], [8, 9]]))
    same(len(both), 2, "number of vectors")
    true(far(both[0], vectors(embed(s, input=[5, 6, 7]))[0]) < 1e-5, "the same ids alone have the same vector")


@case("openai", "embeddings: dimensions", feature="dimensions")
def dimensions(s: Session) -> None:
    (whole,) = vectors(embed(s))
    (cut,) = vectors(embed(s, dimensions=len(whole) // 2))
    kept = whole[: len(whole) // 2]
    true(far(cut, [x / math.hypot(*kept) for x in kept]) < 1e-5, "the first half, brought to length 1 again")


@case("openai", "embeddings: nothing to embed")
def empty_input(s: Session) -> None:
    embed(s)
    s.refused(lambda: embed(s, input=""), 400, "BadRequestError")
    s.refused(lambda: embed(s, input=[]), 400, "BadRequestError")


@case("openai", "models")
def models(s: Session) -> None:
    listed = [s.valid(model) for model in s.client.models.list()]
    true(s.model in [model.id for model in listed], f"{s.model!r} is in the list")
    for model in listed:
        same(
            (model.object, isinstance(model.created, int), bool(model.owned_by)),
            ("model", True, True),
            "object, created, owned_by",
        )
        same(s.client.models.retrieve(model.id).id, model.id, "id of the model that was asked for")
    same([m.created for m in s.client.models.list()], [m.created for m in listed], "created, which does not change")


@case("openai", "models: unknown, also with a slash")
def unknown_model(s: Session) -> None:
    for name in ("no-such-model", "no/such-model"):
        refusal = s.refused(partial(s.client.models.retrieve, name), 404, "NotFoundError")
        same((refusal.code, refusal.param), ("model_not_found", "model"), "code and param")
