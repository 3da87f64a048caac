"""Text in, text out: what stands between a tokenizer and ids-only generation."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pellucid.errors import CheckpointError, PellucidError, RequestError
from pellucid.inference import Engine, Request, SamplingParams, generate, stream
from pellucid.inference.sample import NOT_FINITE
from pellucid.model import Transformer
from pellucid.model_config import ModelConfig
from pellucid.tokenizer import Tokenizer
from pellucid.tokenizer.stream import IncrementalDecoder


def generate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: str | Sequence[str],
    params: SamplingParams,
    *,
    batch_size: int = 16,
) -> list[str]:
    """The continuation of each prompt, without the prompt; ``n`` for each, in order.

    Raises:
        RequestError: a prompt leaves no room in the model's window.
        CheckpointError: the tokenizer does not fit the model.
        PellucidError: the model's logits were not finite; names the prompt.
    """
    check_tokenizer(tokenizer, model.config)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    ids = [encode_prompt(tokenizer, text) for text in texts]
    results = generate(model, ids, with_stop_ids(params, tokenizer), batch_size=batch_size)
    for i, result in enumerate(results):
        if result.finish_reason == "error":
            raise PellucidError(failed(f"prompt {i // params.n}", len(result.ids), result.error))
    return [decode(tokenizer, result.ids) for result in results]


def stream_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    engine: Engine | None = None,
) -> Iterator[str]:
    """The pieces of one answer as its tokens are drawn, never half a character; errors as in `generate_text`.

    Args:
        engine: of ``model``, with what it remembers of earlier prompts; None makes one.
    """
    params = with_stop_ids(params, tokenizer)
    events = stream(model, prompt, params) if engine is None else engine.stream(Request("text", tuple(prompt), params))
    decoder = IncrementalDecoder(tokenizer)
    for drawn, event in enumerate(events):
        if event.finish_reason == "error":
            raise PellucidError(failed("the answer", drawn, event.error))
        if event.token is not None and event.token < tokenizer.vocab_size:
            yield decoder.push(event.token)
    yield decoder.finish()


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that is to be continued: as a document begins, with the beginning token where there is one.

    Raises:
        RequestError: nothing to start from: the text is empty and the tokenizer has no beginning token.
    """
    ids = ([] if tokenizer.prefix_id is None else [tokenizer.prefix_id]) + tokenizer.encode(text)
    if not ids:
        raise RequestError("prompt is empty and the tokenizer has no beginning token to start from; give some text")
    return ids


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of drawn ids. Embeddings are often padded beyond the tokenizer: such ids have no text."""
    return tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])


def with_stop_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """``params`` that end where the tokenizer says, unless they name stop ids of their own."""
    return params if params.stop_ids else replace(params, stop_ids=tokenizer.stop_ids)


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """`CheckpointError` where the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids and the model's embedding {config.vocab_size:,} rows; "
            "they do not belong together: put the tokenizer that the model was trained with beside it"
        )


def failed(what: str, drawn: int, error: str | None) -> str:
    """The message for a request that ended with ``finish_reason`` "error"."""
    hint = "; its weights are damaged or its dtype is too narrow: try --dtype float32" if error == NOT_FINITE else ""
    return f"{what}: {error} after {drawn} new tokens{hint}"
