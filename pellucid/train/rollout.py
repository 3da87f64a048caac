"""The only place where training generates: completions by the model as it is between two steps."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pellucid.data.batches import Windows
from pellucid.errors import TrainingError
from pellucid.inference import Engine, SamplingParams, generate
from pellucid.inference.paged import bytes_per_token
from pellucid.model import Transformer
from pellucid.model.lora import add_lora, lora_of
from pellucid.parallel import comm
from pellucid.tokenizer import Tokenizer
from pellucid.train.precision import autocast

if TYPE_CHECKING:
    from pellucid.train.setup import Setup

NUM_PROMPTS = 4
TEXT_PROMPT_TOKENS = 16
"""Of a text, where nothing says how far the prompt goes."""
NEW_TOKENS = 64
DRAWN_LOGITS = 2**23
"""How many are looked at together at most, where that is more than `RUNNING` answers: drawing holds some copies of them."""
RUNNING = 64
"""Answers that are drawn together at least; an engine's usual number."""
PAGE_TOKENS = 16
"""A block of the cache of rollouts, which are often short."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer that was drawn."""

    ids: list[int]
    """Its tokens, with the one that ends it if there is one."""
    logprobs: list[float]
    """Nats, of each under the sampler at temperature 1."""
    text: str
    """Without control tokens."""
    ended: bool
    """By itself; otherwise because no more tokens were to be had."""


def answer_prompts(
    setup: "Setup",
    prompts: Sequence[tuple[int, Sequence[int]]],
    *,
    num: int,
    temperature: float,
    max_tokens: int,
    kv_gb: float,
    step: int,
) -> tuple[list[str], list[list[Sampled]]]:
    """``num`` answers to each prompt, by the run's model itself as it is now; those of a prompt share its cached tokens.

    What is drawn depends on the weights, ``train.seed``, the step and the prompt's number, with exact attention not on what
    is drawn beside it. Needs whole weights on this rank, and changes no state of training.

    Args:
        prompts: their numbers and tokens, each leaving room for one more in the window.
        max_tokens: fewer where the window ends first.
        kv_gb: for keys and values, 10^9 bytes at most; what does not fit waits.

    Returns:
        The prompts as text, and the answers to each.

    Raises:
        TrainingError: the model's logits are not finite.
    """
    model, tokenizer = setup.model, setup.tokenizer
    assert tokenizer is not None, "checked at the start"
    window = min(
        setup.config.data.context or model.config.max_position_embeddings, model.config.max_position_embeddings
    )
    lengths = [min(max_tokens, window - len(prompt)) for _, prompt in prompts]
    params = [
        SamplingParams(
            temperature=temperature, max_tokens=length, stop_ids=tokenizer.stop_ids, n=num,
            seed=_seed(setup.config.train.seed, step, number),
        )
        for (number, _), length in zip(prompts, lengths, strict=True)
    ]  # fmt: skip
    blocks = sum(num * -(-(len(p) + n) // PAGE_TOKENS) + 1 for (_, p), n in zip(prompts, lengths, strict=True))
    dtype = model.model.embed_tokens.weight.dtype
    needed_gb = (blocks + 1) * PAGE_TOKENS * bytes_per_token(model.kv_specs(), dtype) / 1e9
    with autocast(setup.device, setup.dtype):
        together = max(RUNNING, min(num * len(prompts), DRAWN_LOGITS // model.config.vocab_size))
        engine = Engine(
            model, kv_gb=min(kv_gb, needed_gb), page_size=PAGE_TOKENS, exact=model.config.attend == "canonical",
            max_running=together,
        )  # fmt: skip
        results = engine.generate([prompt for _, prompt in prompts], params)
    failed = next((result.error for result in results if result.finish_reason == "error"), None)
    if failed is not None:
        raise TrainingError(f"step {step}: an answer could not be drawn: {failed}; lower optim.lr")
    answers = [Sampled(r.ids, r.logprobs, _text(tokenizer, r.ids), r.finish_reason == "stop") for r in results]
    texts = [_text(tokenizer, prompt) for _, prompt in prompts]
    return texts, [answers[i * num : (i + 1) * num] for i in range(len(prompts))]


def _seed(*parts: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def complete_prompts(setup: "Setup", step: int) -> list[dict[str, Any]]:
    """The likeliest completions of the first validation prompts, as samples.jsonl has them; on the first rank, else none.

    Changes no state of training. ★ modes that shard weights: the first rank then holds the whole model for a while.
    """
    model = whole_model(setup)
    if model is None:
        return []
    assert setup.tokenizer is not None and setup.val_data is not None, "checked at the start"
    prompts = validation_prompts(setup)
    window = setup.model.config.max_position_embeddings
    params = [
        SamplingParams(temperature=0.0, max_tokens=min(NEW_TOKENS, window - len(p)), stop_ids=setup.tokenizer.stop_ids)
        for p in prompts
    ]
    trains = model.training
    try:
        results = generate(model.eval(), prompts, params)
    finally:
        model.train(trains)
    return [
        {
            "step": step,
            "kind": f"step {step:,}",
            "prompt": _text(setup.tokenizer, p),
            "text": _text(setup.tokenizer, r.ids),
        }
        for p, r in zip(prompts, results, strict=True)
    ]


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Embeddings may be padded beyond the tokenizer: such ids have no text."""
    return tokenizer.decode([i for i in ids if i < tokenizer.vocab_size])


def validation_prompts(setup: "Setup") -> list[list[int]]:
    """Of each of the first samples the first document up to what is supervised in it; of a text its beginning."""
    assert setup.val_data is not None
    prompts: list[list[int]] = []
    for i in range(min(NUM_PROMPTS, len(setup.val_data))):
        batch = setup.val_data.batch([i])
        if hasattr(batch, "prompts"):
            prompts.append(batch.prompts[0])
            continue
        first = batch.document_ids[0] == batch.document_ids[0, 0]
        length = int(first.long().cumprod(0).sum())
        start = 1 + int(batch.loss_mask[0, :length].long().argmax())
        if isinstance(setup.val_data, Windows):
            start = max(1, min(TEXT_PROMPT_TOKENS, length // 2))
        prompts.append(batch.tokens[0, :start].tolist())
    window = setup.model.config.max_position_embeddings
    return [prompt for prompt in prompts if 0 < len(prompt) < window]


@torch.no_grad()
def whole_model(setup: "Setup") -> Transformer | None:
    """The run's model on the first rank, itself or put together from all ranks' parts; None on the others. ★"""
    executor = setup.executor
    if not executor.shards_weights:
        return setup.model if comm.rank() == 0 else None
    model: Transformer | None = None
    if comm.rank() == 0:
        model = Transformer(setup.model.config, device="meta")
        if (lora := lora_of(setup.model)) is not None:
            add_lora(model, lora)
    tensors = {name: weight.clone() for name, weight in executor.weights() if weight is not None and model is not None}
    if model is not None:
        model.load_state_dict(tensors, assign=True)
        model.to(setup.device)
    return model
