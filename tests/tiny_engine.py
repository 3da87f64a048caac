"""Tiny models of every kind of attention and feed-forward layer, random requests for them, and how results are compared."""

import random

import torch

from pellucid.config import ModelConfig
from pellucid.inference.engine import Engine
from pellucid.inference.request import SamplingParams
from pellucid.model import Transformer

VOCABULARY = 97
KINDS = {
    "gqa": {},
    "mla": {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4},
    "moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
            "scoring_func": "sigmoid"},
    "window": {"sliding_window": 20},
}  # fmt: skip


def tiny(kind="gqa", dtype=torch.float32, **overrides):
    """Two layers; its weights are wide enough that the answers vary."""
    fields = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "attend": "canonical",
        "initializer_range": 0.2,
    }  # fmt: skip
    config = ModelConfig(**{**fields, **KINDS[kind], **overrides})
    return Transformer(config, generator=torch.Generator().manual_seed(1)).to(dtype).eval()


def engine(model, blocks=None, **options):
    """An engine with blocks of 8 tokens, ``blocks`` of them."""
    options.setdefault("page_size", 8)
    if blocks is not None:
        token = sum(s.elements_per_token() for s in model.kv_specs())
        options["kv_gb"] = (
            blocks * options["page_size"] * token * options.get("kv_dtype", dtype_of(model)).itemsize / 1e9
        )
        options["kv_gb"] *= 1 + 1e-9
    return Engine(model, **{"kv_gb": 0.01, **options})


def dtype_of(model):
    return model.model.embed_tokens.weight.dtype


def prompt(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def random_requests(seed, count, *, longest=50, new=20):
    """Prompts, some of which begin alike, and every setting that changes what is drawn."""
    rng = random.Random(seed)
    shared = prompt(seed, 40)
    found = []
    for i in range(count):
        tokens = shared[: rng.choice([0, 8, 24, 40])] + prompt(rng.random(), rng.randint(1, longest))
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.3]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            logit_bias=rng.choice([{}, {rng.randrange(VOCABULARY): 4.0}]),
            stop_ids=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 2]))),
            max_tokens=rng.randint(0, new),
            seed=i,
            n=rng.choice([1, 1, 1, 3]),
            top_logprobs=rng.choice([0, 3]),
            prompt_logprobs=rng.choice([None, None, None, 2]),
        )
        found.append((tokens, params))
    return found


def bits(result):
    """All that must be the same to the last bit."""
    return (
        result.ids, result.logprobs, result.finish_reason, result.top_logprobs, result.prompt_logprobs, result.error
    )  # fmt: skip


def alone(model, requests, **options):
    """The results of each request on an engine of its own, without a cache of prefixes."""
    one = engine(model, prefix_cache=False, **options)
    return [[bits(r) for r in one.generate([tokens], params)] for tokens, params in requests]
