"""Against one head at a time, written as the paper has it; both forms, and what a cache holds of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.config import LoraConfig, ModelConfig
from pellucid.inference.paged import PagedAttend, PagedCache, Span
from pellucid.model import KVSpec, Transformer
from pellucid.model.attend import WindowAttend
from pellucid.model.lora import add_lora, merge, remove_lora
from pellucid.model.mla import LatentAttention
from pellucid.model.rope import Rotary

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64, "initializer_range": 0.3,
    "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
DYNAMIC = {"max_position_embeddings": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow-queries": {"q_lora_rank": 7},
    "biases": {"q_lora_rank": 7, "attention_bias": True},
    "interleaved": {"rope_interleave": True},
    "yarn": {"rope_scaling": YARN},
    "dynamic": DYNAMIC,
    "wide-values": {"v_head_dim": 20},
    "window": {"sliding_window": 5, "max_window_layers": 1},
    "qk-norm": {"qk_norm": True},
    "gate": {"attention_gate": True, "rope_interleave": True},
    "canonical": {"attend": "canonical", "num_attention_heads": 4},
}
ABSORBING = [name for name in VARIANTS if name not in ("qk-norm", "gate")]


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_model(dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """Large weights everywhere, norms and biases too."""
    model = Transformer(ModelConfig(**SHAPE | changes), generator=torch.Generator().manual_seed(0)).to(dtype).eval()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter += (some(*parameter.shape, seed=i) * 0.3).to(dtype)
    return model


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(1))


BLOCK = 4


def cache_of(model: Transformer, blocks: int) -> PagedCache:
    dtype = model.model.embed_tokens.weight.dtype
    return PagedCache(model.kv_specs(), blocks, BLOCK, dtype=dtype, device=torch.device("cpu"))


@torch.no_grad()
def decoded(model: Transformer, tokens: Tensor, chunks: list[int]) -> Tensor:
    """The logits ``[B, T, V]`` of rows that come in chunks, packed."""
    (rows, width), start, outs = tokens.shape, 0, []
    each = -(-width // BLOCK)
    cache = cache_of(model, rows * each)
    for length in chunks:
        blocks = [list(range(1 + row * each, 1 + (row + 1) * each)) for row in range(rows)]
        spans = [Span(row * length, start, length, blocks[row]) for row in range(rows)]
        attend = PagedAttend(cache, spans, model.layer_windows(), exact=model.config.attend == "canonical")
        positions = torch.arange(start, start + length).repeat(rows)
        packed = tokens[:, start : start + length].flatten()
        logits = model(packed, positions, attend, rope_length=torch.full((len(packed),), width)).logits
        outs.append(logits.view(rows, length, -1))
        start += length
    assert start == width
    return torch.cat(outs, 1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pairs as complex numbers: ``[T, p]`` by angles ``[T, p / 2]``."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    return torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    ).flatten(-2)


def by_the_paper(attention: LatentAttention, config: ModelConfig, x: Tensor) -> Tensor:
    """One row ``[T, D]``, head by head; without scaled rotary embeddings."""
    a, heads = attention, config.num_attention_heads
    frequencies = config.rope_theta ** (-torch.arange(0, config.qk_rope_head_dim, 2).double() / config.qk_rope_head_dim)
    angles = torch.arange(len(x)).double()[:, None] * frequencies
    queries = (
        a.q_proj(x) if config.q_lora_rank is None else a.q_b_proj(normed(a.q_a_proj(x), a.q_a_layernorm.weight, 1e-6))
    )
    both = a.kv_a_proj_with_mqa(x)
    latent = normed(both[:, : config.kv_lora_rank], a.kv_a_layernorm.weight, 1e-6)
    mixed = []
    for h in range(heads):
        q = queries.chunk(heads, -1)[h]
        made = latent @ a.kv_b_proj.weight.chunk(heads, 0)[h].T
        k, v = (
            torch.cat([made[:, : config.qk_nope_head_dim], both[:, config.kv_lora_rank :]], -1),
            made[:, config.qk_nope_head_dim :],
        )
        if config.qk_norm:
            q, k = (normed(y, n.weight, config.rms_norm_eps) for y, n in ((q, a.q_norm), (k, a.k_norm)))
        q, k = (
            torch.cat(
                [
                    y[:, : config.qk_nope_head_dim],
                    turned(y[:, config.qk_nope_head_dim :], angles, config.rope_interleave),
                ],
                -1,
            )
            for y in (q, k)
        )
        scores = q @ k.T / (config.qk_nope_head_dim + config.qk_rope_head_dim) ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        mixed.append(scores.softmax(-1) @ v)
    out = torch.cat(mixed, -1)
    return a.o_proj(out if a.gate_proj is None else out * a.gate_proj(x).sigmoid())


# -- what is computed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "narrow-queries", "biases", "interleaved", "wide-values", "qk-norm", "gate"])
def test_a_layer_computes_the_paper_s_formula(name: str) -> None:
    model = make_model(**VARIANTS[name])
    attention, x = model.model.layers[0].self_attn, some(11, 24)
    cos, sin = model.model.rotary(torch.arange(11), 11)
    out = attention(x[None], cos.double(), sin.double(), WindowAttend((None, None)))[0]
    # angles come in float32
    torch.testing.assert_close(out, by_the_paper(attention, model.config, x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ABSORBING)
def test_absorbed_equals_expanded_in_chunks_of_any_length(name: str) -> None:
    model, tokens = make_model(**VARIANTS[name]), some_tokens(2, 19)
    assert all(block.self_attn.absorbs for block in model.model.layers)
    model_expanded = make_model(**VARIANTS[name] | {"attend": "sdpa"})
    whole = model_expanded(tokens).logits
    for chunks in ([19], [1] * 19, [7, 1, 1, 10]):
        torch.testing.assert_close(decoded(model, tokens, chunks), whole, rtol=1e-11, atol=1e-12)


def test_training_expands_and_what_caches_or_must_be_canonical_absorbs(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    for kind, chosen in (("_expanded", 10), ("_absorbed", 14)):
        form = getattr(LatentAttention, kind)
        monkeypatch.setattr(LatentAttention, kind, lambda *a, f=form, c=chosen: widths.append(c) or f(*a))
    tokens = some_tokens(1, 5)
    make_model()(tokens)
    decoded(make_model(), tokens, [5])
    make_model(attend="canonical")(tokens)
    decoded(make_model(qk_norm=True), tokens, [5])
    assert widths == [10] * 2 + [14] * 2 + [14] * 2 + [10] * 2


def test_interleaved_weights_are_half_split_ones_with_their_rows_permuted() -> None:
    pairs, halves = (
        make_model(rope_interleave=True, q_lora_rank=7, attention_bias=True),
        make_model(q_lora_rank=7, attention_bias=True),
    )
    halves.load_state_dict(pairs.state_dict())
    assert not torch.allclose(pairs(some_tokens(1, 9)).logits, halves(some_tokens(1, 9)).logits, atol=1e-2)
    order = torch.tensor([0, 2, 1, 3])  # first elements of pairs, then second ones
    with torch.no_grad():
        for block in halves.model.layers:
            queries = block.self_attn.q_b_proj.weight.view(3, 10, -1)
            queries[:, 6:] = queries[:, 6:][:, order]
            for parameter in block.self_attn.kv_a_proj_with_mqa.parameters():
                parameter[10:] = parameter[10:][order]
    torch.testing.assert_close(
        pairs(some_tokens(1, 9)).logits, halves(some_tokens(1, 9)).logits, rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "dynamic"])
def test_shifting_all_positions_leaves_the_logits_unchanged(name: str) -> None:
    model, tokens = make_model(**VARIANTS[name]), some_tokens(2, 9)
    at_zero = model(tokens).logits
    shifted = model(tokens, torch.arange(9) + 20).logits
    torch.testing.assert_close(shifted, at_zero, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(tokens, torch.arange(9) * 2).logits, at_zero, atol=1e-2)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_later_token_changes_no_earlier_logit(name: str) -> None:
    model, tokens = make_model(**VARIANTS[name]), some_tokens(1, 9)
    other = tokens.clone()
    other[0, 6] = (other[0, 6] + 1) % 40
    before, after = model(tokens).logits, model(other).logits
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 8], after[:, 8], atol=1e-3)


def test_a_sliding_window_forgets_what_lies_before_it() -> None:
    model, tokens = make_model(sliding_window=3, num_hidden_layers=1), some_tokens(1, 9)
    other = tokens.clone()
    other[0, 4] = (other[0, 4] + 1) % 40
    changed = (model(tokens).logits - model(other).logits).abs().amax(-1)[0] > 1e-9
    assert changed.tolist() == [False] * 4 + [True] * 3 + [False] * 2


@pytest.mark.parametrize("name", ["plain", "interleaved", "qk-norm"])
def test_packed_tokens_give_the_logits_of_their_rows(name: str) -> None:
    model = make_model(**VARIANTS[name])
    rows = [some_tokens(7), some_tokens(3) + 1]
    lengths = [len(row) for row in rows]

    class Packed:
        caches = True

        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
            inner = WindowAttend(model.layer_windows())
            parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
            return torch.cat([inner(layer, *(x[None] for x in part), scale=scale)[0] for part in parts])

    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = model(torch.cat(rows), positions, Packed()).logits
    for row, logits in zip(rows, packed.split(lengths), strict=True):
        torch.testing.assert_close(logits, model(row[None]).logits[0], rtol=1e-11, atol=1e-12)


def test_yarn_scales_the_whole_score_as_deepseek_does() -> None:
    attention = make_model(rope_scaling=YARN).model.layers[0].self_attn
    magnitude = 0.1 * 0.9 * torch.tensor(4.0).log().item() + 1
    assert attention.scale == pytest.approx(10**-0.5 * magnitude**2)
    without = {key: value for key, value in YARN.items() if not key.startswith("mscale")}
    assert make_model(rope_scaling=without).model.layers[0].self_attn.scale == pytest.approx(10**-0.5)
    assert make_model(rope_scaling=YARN | {"factor": 1.0}).model.layers[0].self_attn.scale == pytest.approx(10**-0.5)
    rotary = Rotary(ModelConfig(**SHAPE | {"rope_scaling": YARN}))
    assert rotary.attention_factor == pytest.approx((0.1 * 0.7 * torch.tensor(4.0).log().item() + 1) / magnitude)


# -- caches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_cache_holds_what_the_specs_say(name: str) -> None:
    model = make_model(**VARIANTS[name])
    cache = cache_of(model, 5)
    tensors = [t for layer in cache.stored for t in layer]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    per_token = 8 * sum(spec.elements_per_token() for spec in model.kv_specs())
    assert sum(storages.values()) == (5 + 1) * BLOCK * per_token


def test_a_token_leaves_its_latent_once_or_expanded_heads() -> None:
    latent = KVSpec(1, 14, 10, value_in_key=True)
    assert make_model().kv_specs() == [latent] * 2 and latent.elements_per_token() == 14
    for changes in ({"qk_norm": True}, {"attention_gate": True}):
        model = make_model(**changes)
        assert not model.model.layers[0].self_attn.absorbs
        assert model.kv_specs() == [KVSpec(3, 10, 5)] * 2 and model.kv_specs()[0].elements_per_token() == 3 * 15


@pytest.mark.parametrize("name", ["qk-norm", "gate"])
def test_what_cannot_be_absorbed_caches_expanded_heads(name: str) -> None:
    model, tokens = make_model(**VARIANTS[name]), some_tokens(2, 15)
    torch.testing.assert_close(decoded(model, tokens, [6, 1, 1, 7]), model(tokens).logits, rtol=1e-11, atol=1e-12)


def test_an_adapter_on_what_is_absorbed_is_not_lost() -> None:
    model, tokens = make_model(), some_tokens(2, 9)
    bare = model(tokens).logits
    add_lora(model, LoraConfig(r=2, alpha=4.0, targets=("kv_b_proj", "q_proj")))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(some(*parameter.shape) * 0.3)
    adapted = model(tokens).logits
    assert not torch.allclose(adapted, bare, atol=1e-2)
    assert model.kv_specs() == [KVSpec(3, 10, 5)] * 2
    torch.testing.assert_close(decoded(model, tokens, [4, 1, 4]), adapted, rtol=1e-11, atol=1e-12)
    merge(model)
    remove_lora(model)
    assert model.kv_specs() == [KVSpec(1, 14, 10, value_in_key=True)] * 2
    torch.testing.assert_close(decoded(model, tokens, [4, 1, 4]), adapted, rtol=1e-9, atol=1e-10)


def test_a_replaced_projection_is_called() -> None:
    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model, tokens = make_model(), some_tokens(1, 7)
    before = model(tokens).logits
    for block in model.model.layers:
        plain = block.self_attn.kv_b_proj
        block.self_attn.kv_b_proj = Other(10, 33, bias=False, dtype=torch.float64)
        block.self_attn.kv_b_proj.weight = nn.Parameter(plain.weight.detach() / 2)
    torch.testing.assert_close(decoded(model, tokens, [3, 4]), before, rtol=1e-11, atol=1e-12)


# -- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABSORBING)
def test_both_forms_have_the_same_gradients(name: str) -> None:
    found = []
    for absorbed in (False, True):
        model, tokens = make_model(**VARIANTS[name] | {"attend": "sdpa"}), some_tokens(2, 11)
        attend = model.make_attend()
        attend.caches = absorbed  # type: ignore[attr-defined]
        F.cross_entropy(model(tokens[:, :-1], None, attend).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    for key, grad in found[0].items():
        assert grad is not None and grad.abs().max() > 0, key
        torch.testing.assert_close(found[1][key], grad, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize("name", ["plain", "qk-norm", "wide-values", "canonical"])
def test_activation_checkpointing_gives_the_same_gradients(name: str) -> None:
    found = []
    for recompute in (False, True):
        model = make_model(torch.float32, **VARIANTS[name]).train()
        model.activation_checkpointing = recompute
        model(some_tokens(2, 9)).logits.square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    for key, grad in found[0].items():
        assert grad is not None and grad.any() and torch.equal(grad, found[1][key]), key


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("name", ["narrow-queries", "interleaved", "wide-values", "qk-norm", "gate"])
def test_bfloat16_is_near_float32_under_autocast_and_in_whole(name: str, absorbed: bool) -> None:
    tokens = some_tokens(2, 17)
    exact = make_model(torch.float32, **VARIANTS[name])(tokens).logits.float()
    for whole in (False, True):
        model = make_model(torch.float32, **VARIANTS[name]).to(torch.bfloat16 if whole else torch.float32)
        attend = model.make_attend()
        attend.caches = absorbed  # type: ignore[attr-defined]
        with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
            logits = model(tokens, None, attend).logits
        assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
        assert 0 < (logits - exact).norm() < 0.06 * exact.norm()
        logits.float().square().mean().backward()
        assert all(
            p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters()
        )


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("name", "dtype"), [("interleaved", torch.float32), ("qk-norm", torch.bfloat16)])
def test_a_model_compiles_to_one_graph(name: str, dtype: torch.dtype) -> None:
    model, tokens = make_model(dtype, **VARIANTS[name], num_hidden_layers=1, v_head_dim=12), some_tokens(2, 9)
    compiled = torch.compile(lambda tokens: model(tokens).logits, backend="eager", dynamic=False, fullgraph=True)
    near = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(compiled(tokens), model(tokens).logits, rtol=near, atol=near)


# -- shape -------------------------------------------------------------------------------------------------


def test_parameters_have_deepseek_s_names() -> None:
    model = make_model(q_lora_rank=7, attention_bias=True, qk_norm=True, attention_gate=True)
    shapes = {n: tuple(p.shape) for n, p in model.model.layers[0].self_attn.named_parameters()}
    assert shapes == {
        "q_a_proj.weight": (7, 24), "q_a_proj.bias": (7,), "q_a_layernorm.weight": (7,), "q_b_proj.weight": (30, 7),
        "kv_a_proj_with_mqa.weight": (14, 24), "kv_a_proj_with_mqa.bias": (14,), "kv_a_layernorm.weight": (10,),
        "kv_b_proj.weight": (33, 10), "o_proj.weight": (24, 15), "o_proj.bias": (24,),
        "gate_proj.weight": (15, 24), "gate_proj.bias": (15,), "q_norm.weight": (10,), "k_norm.weight": (10,),
    }  # fmt: skip
    assert "q_proj.weight" in dict(make_model().model.layers[0].self_attn.named_parameters())


def test_flops_are_those_of_the_expanded_form() -> None:
    model = make_model(q_lora_rank=7)
    attention = 24 * 7 + 7 * 30 + 24 * 14 + 10 * 33 + 15 * 24
    weights = 2 * (attention + 3 * 24 * 32) + 24 * 40
    assert model.flops_per_token(16) == 6 * weights + 6 * (2 * 16 / 2) * 3 * (10 + 5)


def test_initial_weights_follow_the_rule() -> None:
    config = ModelConfig(
        **SHAPE | {"hidden_size": 128, "kv_lora_rank": 96, "q_lora_rank": 80, "num_attention_heads": 8}
    )
    attention = Transformer(config, generator=torch.Generator().manual_seed(0)).model.layers[0].self_attn
    for linear in (attention.q_a_proj, attention.q_b_proj, attention.kv_a_proj_with_mqa, attention.kv_b_proj):
        assert linear.weight.std().item() == pytest.approx(0.3, rel=0.05)
    assert attention.o_proj.weight.std().item() == pytest.approx(0.3 / 2, rel=0.05)
    assert (attention.kv_a_layernorm.weight == 1).all()
