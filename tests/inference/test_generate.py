"""Greedy decoding with the cache against recomputation of the whole sequence, batches against single prompts."""

import importlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pellucid.config import ModelConfig
from pellucid.errors import RequestError
from pellucid.inference import Request, SamplingParams, TokenEvent, engine_for, generate, stream
from pellucid.inference.runner import ModelRunner
from pellucid.model import Transformer
from pellucid.model.canonical import MATMUL_ROWS
from pellucid.model.moe import Router

torch.set_num_threads(1)

VOCAB = 61
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 40, "initializer_range": 0.25,
}  # fmt: skip
MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
MOE: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NOAUX: dict[str, Any] = MOE | {
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "qk-norm": {"qk_norm": True, "attention_bias": True},
    "gate": {"attention_gate": True, "mlp_bias": True},
    "sliding": {"sliding_window": 5},
    "sliding-some-layers": {"sliding_window": 4, "max_window_layers": 2},
    "canonical": {"attend": "canonical"},
    "canonical-sliding": {"attend": "canonical", "sliding_window": 6},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "ntk": {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
    "dynamic": {"max_position_embeddings": 12, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": YARN},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 10,
        }
    },
    "mla": MLA | {"q_lora_rank": 10, "rope_interleave": True},
    "mla-dynamic": MLA | {"max_position_embeddings": 12, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "mla-yarn": MLA | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    "mla-sliding": MLA | {"sliding_window": 5, "max_window_layers": 1, "v_head_dim": 20},
    "mla-expanded": MLA | {"qk_norm": True, "attention_gate": True},
    "moe": MOE,
    "mla-moe": MLA | NOAUX,
    "canonical-mla-moe": MLA | NOAUX | {"attend": "canonical"},
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=14)


def make_model(seed: int = 0, **changes: Any) -> Transformer:
    model = Transformer(ModelConfig(**(BASE | changes)), generator=torch.Generator().manual_seed(seed)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases that act
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    return model


def make_prompts(count: int, seed: int = 0, longest: int = 24) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@torch.no_grad()
def recompute(
    model: Transformer, prompt: list[int], params: SamplingParams, window: int = 40
) -> tuple[list[int], list[float]]:
    """Greedy decoding that runs the model over the whole sequence for every token."""
    ids, logprobs = list(prompt), []
    admitted = len(prompt) + min(params.max_tokens, window - len(prompt))
    while len(ids) < admitted:
        logits = model(torch.tensor([ids]), rope_length=admitted).logits[0, -1].double()
        ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
        if ids[-1] in params.stop_ids:
            break
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_with_the_cache_equals_recomputing_everything(name: str) -> None:
    model = make_model(**VARIANTS[name])
    window = 48 if "dynamic" in name else 40
    prompts = make_prompts(12, seed=len(name))
    results = generate(model, prompts, GREEDY, batch_size=5)
    for prompt, result in zip(prompts, results, strict=True):
        ids, logprobs = recompute(model, prompt, GREEDY, window)
        assert result.ids == ids
        assert result.logprobs == pytest.approx(logprobs, abs=2e-4)
        assert result.finish_reason == "length"
    assert len({tuple(r.ids) for r in results}) > 6  # the model really looks at its prompt


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["gqa", "sliding", "dynamic", "mla", "mla-moe"])
def test_a_prompt_gets_the_same_tokens_alone_and_in_any_batch(name: str, temperature: float) -> None:
    model = make_model(seed=3, **VARIANTS[name])
    prompts = make_prompts(9, seed=5)
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=11, top_p=0.95)
    alone = [generate(model, [prompt], params)[0] for prompt in prompts]
    for batch_size in (2, 4, 9):
        together = generate(model, prompts, params, batch_size=batch_size)
        assert [r.ids for r in together] == [r.ids for r in alone]
    backwards = generate(model, prompts[::-1], params)
    assert [r.ids for r in backwards] == [r.ids for r in alone[::-1]]


def rows_round_alike(inputs: int, outputs: int) -> bool:
    """Whether this machine's float32 linear gives a row the same bits in any product of `MATMUL_ROWS` rows or more."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(200, inputs, generator=draw), torch.randn(outputs, inputs, generator=draw)
    whole = F.linear(x, weight)
    return all(torch.equal(F.linear(x[:n], weight), whole[:n]) for n in range(MATMUL_ROWS, 200))


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 32},
        MLA | {"q_lora_rank": 32, "kv_lora_rank": 32},
        MLA | {"qk_norm": True},
        MOE | {"head_dim": 32, "moe_intermediate_size": 32},
        MLA | NOAUX | {"kv_lora_rank": 32, "moe_intermediate_size": 32, "n_routed_experts": 12, "n_group": 3},
    ],
    ids=["plain", "mla", "mla-expanded", "moe", "mla-moe"],
)
def test_canonical_attention_gives_the_same_bits_alone_and_batched(changes: dict[str, Any]) -> None:
    # torch rounds the last numel % 32 elements of silu by another routine, hence sizes as real models have
    model = make_model(seed=4, **{"attend": "canonical", "intermediate_size": 64} | changes)
    if not all(rows_round_alike(*shape) for shape in {m.weight.shape[::-1] for m in model.modules() if multiplies(m)}):
        pytest.skip("matrix products of this machine round by their number of rows")
    prompts = [p + [1] * MATMUL_ROWS for p in make_prompts(7, seed=1, longest=9)]
    together = generate(model, prompts, GREEDY)
    for prompt, result in zip(prompts, together, strict=True):
        assert generate(model, [prompt], GREEDY)[0].logprobs == result.logprobs
        tokens = torch.tensor([prompt + result.ids])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1]
        whole = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0] - logits.logsumexp(-1)
        assert whole.tolist() == result.logprobs


def multiplies(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear | torch.nn.Embedding | Router)  # the embedding is the head


def test_dynamic_rope_is_fixed_from_the_admitted_maximum_of_each_row() -> None:
    model = make_model(**VARIANTS["dynamic"])
    prompts = make_prompts(1, seed=1, longest=6) + [make_prompts(1, seed=2)[0] + [3] * 10]
    params = [replace(GREEDY, max_tokens=n) for n in (3, 20)]
    results = generate(model, prompts, params)
    for prompt, p, result in zip(prompts, params, results, strict=True):
        assert result.logprobs == pytest.approx(recompute(model, prompt, p, 48)[1], abs=2e-4)
    (shorter,) = generate(model, [prompts[1]], params[0])
    assert shorter.logprobs[0] != pytest.approx(results[1].logprobs[0], abs=1e-3)  # other frequencies from the start


def test_a_stop_id_ends_its_row_and_is_its_last_id() -> None:
    model = make_model()
    prompts = make_prompts(6, seed=2)
    free = generate(model, prompts, GREEDY)
    stop = free[0].ids[4]
    stopped = generate(model, prompts, replace(GREEDY, stop_ids=(stop,)))
    for before, after in zip(free, stopped, strict=True):
        if stop in before.ids:
            cut = before.ids.index(stop) + 1
            assert (after.ids, after.finish_reason) == (before.ids[:cut], "stop")
            assert len(after.logprobs) == cut
        else:
            assert (after.ids, after.finish_reason) == (before.ids, "length")
    assert stopped[0].finish_reason == "stop"


def test_rows_that_finished_are_not_computed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[list[int]] = []
    forward = ModelRunner.forward

    def watch(runner: ModelRunner, batch: Any, *args: Any) -> Any:
        computed.append([chunk.count for chunk in batch.chunks])
        return forward(runner, batch, *args)

    monkeypatch.setattr(ModelRunner, "forward", watch)
    params = [replace(GREEDY, max_tokens=n) for n in (1, 3, 2)]
    results = generate(make_model(), [[1, 2, 3], [4], [5, 6]], params)
    assert [len(r.ids) for r in results] == [1, 3, 2]
    assert computed == [[3, 1, 2], [1, 1], [1]]


def test_generation_stops_at_the_window_with_reason_length() -> None:
    model = make_model()
    (result,) = generate(model, [[1] * 37], replace(GREEDY, max_tokens=100))
    assert (len(result.ids), result.finish_reason) == (3, "length")
    assert result.ids == recompute(model, [1] * 37, replace(GREEDY, max_tokens=100))[0]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1] * 40, "prompt has 40 tokens and the model's window is 40; shorten it or raise max_position_embeddings"),
        ([3, 61], "prompt holds the token id 61 and the model knows 0 to 60"),
        ([-1, 3], "prompt holds the token id -1"),
    ],
)
def test_an_impossible_prompt_is_refused_before_anything_runs(prompt: list[int], message: str) -> None:
    events: list[TokenEvent] = []
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        generate(make_model(), [[1, 2], prompt], GREEDY, batch_size=1, on_event=events.append)
    assert not events


def test_samples_of_one_prompt_differ_and_a_seed_repeats_them() -> None:
    model = make_model(initializer_range=0.1)
    params = SamplingParams(n=4, seed=7, max_tokens=10)
    first = generate(model, [[1, 2], [3]], params)
    assert len(first) == 8 and len({tuple(r.ids) for r in first}) == 8
    assert [r.ids for r in generate(model, [[3]], params)] == [r.ids for r in first[4:]]
    assert [r.ids for r in generate(model, [[1, 2]], replace(params, n=2))] == [r.ids for r in first[:2]]
    assert generate(model, [[1, 2]], replace(params, seed=8))[0].ids != first[0].ids
    unseeded = replace(params, seed=None, n=1)
    twice = generate(model, [[1, 2], [1, 2]], unseeded)
    assert twice[0].ids != twice[1].ids


def test_a_row_without_finite_logits_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    prompts = [[1, 2], [3], [4, 5, 6]]
    healthy = generate(model, prompts, GREEDY)
    calls = 0
    module = importlib.import_module("pellucid.inference.engine")
    real = module.sample

    def poisoned(logits: torch.Tensor, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            logits = logits.clone()
            logits[1, 17] = torch.nan
        return real(logits, *args)

    monkeypatch.setattr(module, "sample", poisoned)
    results = generate(model, prompts, GREEDY)
    assert [r.ids for r in results] == [healthy[0].ids, healthy[1].ids[:3], healthy[2].ids]
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert len(results[1].logprobs) == 3


def test_the_stream_tells_each_token_of_generate() -> None:
    model = make_model()
    params = SamplingParams(seed=3, max_tokens=8)
    (result,) = generate(model, [[9, 8]], params)
    events = list(stream(model, [9, 8], params))
    assert [e.token for e in events] == result.ids
    assert [e.logprob for e in events] == result.logprobs
    assert [e.finish_reason for e in events] == [None] * 7 + ["length"]
    heard: list[TokenEvent] = []
    generate(model, [[1], [9, 8]], params, on_event=heard.append)
    assert [e.token for e in heard if e.request_id == "1"] == result.ids


def test_generation_leaves_the_model_as_it_was() -> None:
    model = make_model(dropout=0.5).train()
    greedy = generate(model, [[1, 2, 3]], GREEDY)
    assert model.training and greedy == generate(model.eval(), [[1, 2, 3]], GREEDY)
    iterator = stream(model, [1, 2, 3], GREEDY)
    next(iterator)
    assert torch.is_grad_enabled()
    iterator.close()


def test_an_engine_has_no_more_room_than_its_requests_need() -> None:
    model = Transformer(ModelConfig(**BASE))
    requests = [Request(str(i), (1, 2, 3), SamplingParams(max_tokens=4, n=n)) for i, n in enumerate((1, 3))]
    for together, running in ((1, 3), (4, 4), (10**15, 4)):
        engine = engine_for(model, requests, together)
        assert engine.scheduler.max_running == running and engine.pool.num_blocks == 2 * running
