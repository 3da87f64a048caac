"""Against a loop over tokens and experts that knows no sorting, no grouping and no derivatives."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid import kernels, load_model, save_model
from pellucid.checkpoint import export_model
from pellucid.config import LoraConfig, ModelConfig
from pellucid.model import Transformer, experts
from pellucid.model.experts import ROUND, stacked
from pellucid.model.lora import LoraLinear, add_lora
from pellucid.model.moe import MixtureOfExperts, Router, balance

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "initializer_range": 0.3, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
}  # fmt: skip
BIASED: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "group-limited": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "all-groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 4},
    "bias": {"topk_method": "noaux_tc"},
    "bias-grouped": {"topk_method": "noaux_tc", "n_group": 4, "topk_group": 2},
    "bias-one-group": {"topk_method": "noaux_tc", "n_group": 2, "topk_group": 1},
}


class Other(nn.Linear):
    """A linear layer of another class, which must be called itself."""


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_moe(**changes: Any) -> MixtureOfExperts:
    """In float64; large weights, and a bias that changes choices."""
    moe = MixtureOfExperts(ModelConfig(**SHAPE | changes)).double()
    with torch.no_grad():
        for i, parameter in enumerate(moe.parameters()):
            parameter.copy_(some(*parameter.shape, seed=i) * (0.1 if parameter.dim() == 1 else 0.5))
    return moe


def make_model(**changes: Any) -> Transformer:
    return Transformer(ModelConfig(**SHAPE | changes), generator=torch.Generator().manual_seed(0))


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(1))


def choose(config: ModelConfig, scores: list[float]) -> list[int]:
    """The experts of one token, best first; the lowest number of equals."""
    size = config.n_routed_experts // config.n_group
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.n_group)]

    def of_group(group: list[int]) -> float:
        best = sorted((scores[e] for e in group), reverse=True)
        return best[0] if config.topk_method != "noaux_tc" else sum(best[:2])

    if config.topk_group < config.n_group:
        groups = sorted(groups, key=of_group, reverse=True)[: config.topk_group]
    return sorted((e for group in groups for e in group), key=lambda e: -scores[e])[: config.num_experts_per_tok]


def feed_forward(expert: Any, x: Tensor) -> Tensor:
    return expert.down_proj(F.silu(expert.gate_proj(x)) * expert.up_proj(x))


def naive(moe: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Outputs, probabilities and choices of tokens ``[N, D]``, one at a time."""
    config, outs, probs, chosen = moe.gate.config, [], [], []
    for token in x:
        logits = moe.gate.weight @ token
        scores = 1 / (1 + torch.exp(-logits)) if config.scoring_func == "sigmoid" else logits.exp() / logits.exp().sum()
        bias = moe.gate.e_score_correction_bias
        mine = choose(config, (scores if bias is None else scores + bias).tolist())
        total = sum(scores[e] for e in mine) if config.norm_topk_prob else 1.0
        out = sum(scores[e] / total * config.routed_scaling_factor * feed_forward(moe.experts[e], token) for e in mine)
        if moe.shared_experts is not None:
            out = out + feed_forward(moe.shared_experts, token)
        outs.append(out)
        probs.append(scores / scores.sum())
        chosen.append(mine)
    return torch.stack(outs), torch.stack(probs), chosen


def gradients(
    moe: MixtureOfExperts, x: Tensor, forward: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Of the input and of every trained parameter, through the outputs and the probabilities."""
    moe.zero_grad()
    x = x.clone().requires_grad_()
    out, probs = forward(x)
    ((out * some(*out.shape, seed=5)).sum() + (probs * some(*probs.shape, seed=6)).sum()).backward()
    found = {"x": x.grad} | {name: p.grad for name, p in moe.named_parameters() if p.requires_grad}
    return {
        name: torch.zeros((), dtype=torch.float64) if grad is None else grad.clone() for name, grad in found.items()
    }


def routed(moe: MixtureOfExperts) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        out, routing = moe(x)
        return out, routing.probs

    return forward


def make_slow(moe: MixtureOfExperts, kind: str) -> None:
    """Something in an expert that is no plain linear layer; the function stays."""
    plain = moe.experts[1].up_proj
    other: nn.Linear = Other(plain.in_features, plain.out_features, bias=False, dtype=plain.weight.dtype)
    if kind == "lora":
        other = LoraLinear(plain, LoraConfig(r=2, alpha=4.0))
        with torch.no_grad():
            other.lora_B.weight.copy_(some(*other.lora_B.weight.shape))
    else:
        other.weight = plain.weight
    moe.experts[1].up_proj = other


# -- what is computed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fast", "other", "lora"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(scoring: str, method: str, kind: str) -> None:
    x = some(9, 12)
    for norm, scaling, shared in itertools.product((False, True), (1.0, 2.5), (0, 2)):
        if kind != "fast" and norm != bool(shared):
            continue  # the router is the same
        options = {"norm_topk_prob": norm, "routed_scaling_factor": scaling, "n_shared_experts": shared}
        moe = make_moe(scoring_func=scoring, **METHODS[method], **options)
        if kind != "fast":
            make_slow(moe, kind)
        expected, probs, chosen = naive(moe, x)
        out, routing = moe(x)
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(routing.probs, probs, rtol=1e-12, atol=1e-13)
        assert routing.chosen.tolist() == chosen
        ours, theirs = gradients(moe, x, routed(moe)), gradients(moe, x, lambda x, moe=moe: naive(moe, x)[:2])
        assert ours.keys() == theirs.keys()
        for name, grad in ours.items():
            torch.testing.assert_close(grad, theirs[name].expand_as(grad), rtol=1e-10, atol=1e-11, msg=name)
        assert sum(bool(grad.any()) for grad in ours.values()) > 12


def test_each_way_to_choose_chooses_otherwise() -> None:
    x, found = some(200, 12), {}
    for method, options in METHODS.items():
        moe = make_moe(**options)
        with torch.no_grad():
            moe.gate.weight.copy_(some(8, 12, seed=3))
        found[method] = moe(x)[1].chosen.sort(-1).values
    for one, other in itertools.combinations(METHODS, 2):
        same = {one, other} == {"greedy", "all-groups"}
        assert torch.equal(found[one], found[other]) == same, (one, other)
    groups = found["group-limited"] // 2
    assert max(len(set(row)) for row in groups.tolist()) == 2


def test_derivatives_equal_finite_differences() -> None:
    moe = make_moe(
        hidden_size=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=3, n_shared_experts=1, **BIASED
    )
    parameters = {name: p.detach().requires_grad_() for name, p in moe.named_parameters() if p.requires_grad}

    def forward(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        out, routing = torch.func.functional_call(moe, dict(zip(parameters, values, strict=True)), (x,))
        return out, routing.probs

    assert torch.autograd.gradcheck(forward, (some(5, 4).requires_grad_(), *parameters.values()))


def test_rows_and_packed_tokens_are_the_same_tokens() -> None:
    moe, x = make_moe(n_shared_experts=1), some(3, 5, 12)
    out, routing = moe(x)
    flat, of_flat = moe(x.flatten(0, 1))
    torch.testing.assert_close(out.flatten(0, 1), flat, rtol=1e-12, atol=1e-13)
    assert routing.probs.shape == (3, 5, 8) and routing.chosen.shape == (3, 5, 3)
    assert torch.equal(routing.chosen.flatten(0, 1), of_flat.chosen)


@pytest.mark.parametrize("way", ["our kernel", "our kernel, emulating bfloat16", "torch", "torch, bfloat16"])
@pytest.mark.parametrize("grouped", [True, False])
def test_one_call_for_all_experts_and_one_for_each_are_near_the_exact_mixture(
    grouped: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernel, calls, apply = way.startswith("our kernel"), [], experts._MixByKernel.apply
    if by_kernel and not kernels.available():
        pytest.skip(f"no kernels: {kernels.missing()}")
    monkeypatch.setattr("pellucid.model.linear._processor_emulates", lambda: by_kernel)
    monkeypatch.setattr(experts._MixByKernel, "apply", lambda *args: calls.append(1) or apply(*args))
    if not by_kernel:
        monkeypatch.setattr("pellucid.model.experts.fits", lambda *_, **__: False)
    dtype = torch.bfloat16 if "bfloat16" in way else torch.float32
    moe = make_moe(hidden_size=32, moe_intermediate_size=16, **BIASED).to(dtype)
    with torch.no_grad():
        moe.gate.e_score_correction_bias[1] = -100.0  # gets no token
    if not grouped:
        moe.experts[3].up_proj.weight = nn.Parameter(moe.experts[3].up_proj.weight.clone())
    weights = [getattr(e, n).weight for e in moe.experts for n in ("gate_proj", "up_proj", "down_proj")]
    assert (stacked(weights) is not None) == grouped
    x = some(30, 32).to(dtype)
    exact = make_moe(hidden_size=32, moe_intermediate_size=16, **BIASED)
    exact.load_state_dict(moe.state_dict())
    chosen = moe(x)[1].chosen
    assert torch.equal(exact(x.double())[1].chosen, chosen) and not (chosen == 1).any()
    ours, theirs = (gradients(each, x.to(each.gate.weight.dtype), routed(each)) for each in (moe, exact))
    assert bool(calls) == by_kernel
    near = 1e-5 if dtype == torch.float32 else 0.03
    assert (moe(x)[0] - exact(x.double())[0]).norm() < near * exact(x.double())[0].norm()
    for name, grad in ours.items():
        assert (grad - theirs[name]).norm() <= near * theirs[name].norm(), name
        assert bool(grad.any()) == (not name.startswith("experts") or int(name.split(".")[1]) in chosen), name


def test_emulated_bfloat16_widens_only_experts_that_are_used_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.available():
        pytest.skip(f"no kernels: {kernels.missing()}")
    monkeypatch.setattr("pellucid.model.linear._processor_emulates", lambda: True)
    moe = make_moe(hidden_size=32, moe_intermediate_size=16, num_experts_per_tok=1).bfloat16()
    x, widened, kept, given = some(1, 32).bfloat16(), [], [], experts._widened
    monkeypatch.setattr(experts, "_widened", lambda *args: widened.extend(given(*args)) or widened[-24:])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = moe(x)[0]
    assert [w.dtype for w in widened].count(torch.float32) == 3 and len(widened) == 24
    matrices = [t for t in kept if t.shape in ((16, 32), (32, 16))]
    assert len(matrices) == 24 and all(t.dtype == torch.bfloat16 for t in matrices)
    out.sum().backward()
    grads = [e.up_proj.weight.grad for e in moe.experts]
    assert sum(bool(grad.any()) for grad in grads) == 1 and all(grad.dtype == torch.bfloat16 for grad in grads)


def test_bfloat16_products_have_few_different_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.model.linear._processor_emulates", lambda: False)
    seen: list[Tensor] = []
    grouped_mm = F.grouped_mm

    def watched(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        seen.append(offs)
        return grouped_mm(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", watched)
    moe, x = make_moe(hidden_size=32, moe_intermediate_size=16).bfloat16(), some(50, 32).bfloat16()
    counts = torch.bincount(moe(x)[1].chosen.flatten(), minlength=8)
    moe(x)[0].sum().backward()
    assert len(seen) == 1 * 2 + 6 and (counts % ROUND != 0).any()
    for ends in seen:
        rows = ends.diff(prepend=ends.new_zeros(1))
        assert (rows % ROUND == 0).all() and (rows >= counts).all() and (rows - counts < ROUND).all()


# -- uneven loads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fast", "other", "lora"])
def test_an_expert_without_a_token_has_gradients_of_zero(kind: str) -> None:
    moe = make_moe(topk_method="noaux_tc")
    make_slow(moe, kind) if kind != "fast" else None
    with torch.no_grad():
        moe.gate.e_score_correction_bias[1] = -100.0
    out, routing = moe(some(6, 12))
    assert not (routing.chosen == 1).any()
    out.square().sum().backward()
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float64, name
        assert bool(parameter.grad.any()) == (int(name.split(".")[0]) in routing.chosen), name


@pytest.mark.parametrize("kind", ["fast", "other"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_all_tokens_may_go_to_one_expert(tokens: int, kind: str) -> None:
    moe, x = make_moe(num_experts_per_tok=1, topk_method="noaux_tc"), some(tokens, 12)
    make_slow(moe, kind) if kind != "fast" else None
    with torch.no_grad():
        moe.gate.e_score_correction_bias[6] = 100.0
        out, routing = moe(x)
    assert routing.chosen.unique().tolist() == [6]
    torch.testing.assert_close(out, routing.probs[:, 6:7] * feed_forward(moe.experts[6], x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_token_may_go_to_every_expert(tokens: int) -> None:
    moe, x = make_moe(num_experts_per_tok=8), some(tokens, 12)
    torch.testing.assert_close(moe(x)[0], naive(moe, x)[0], rtol=1e-11, atol=1e-12)


def test_experts_that_score_alike_are_chosen_once_each_and_alike_for_all_tokens() -> None:
    moe, x = make_moe(n_group=4, topk_group=2, topk_method="group_limited_greedy"), some(20, 12)
    with torch.no_grad():
        moe.gate.weight.zero_()
    out, routing = moe(x)
    assert all(len(set(row)) == 3 and row == routing.chosen[0].tolist() for row in routing.chosen.tolist())
    expected = sum(feed_forward(moe.experts[e], x) / 8 for e in routing.chosen[0].tolist())
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


# -- types -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["fast", "other"])
def test_under_autocast_the_router_is_exact_and_gradients_are_float32(kind: str) -> None:
    moe = make_moe(n_shared_experts=1, hidden_size=32, moe_intermediate_size=32, **BIASED).float()
    make_slow(moe, kind) if kind != "fast" else None
    x = some(40, 32).float()
    found = []
    for rough in (False, True):
        moe.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=rough):
            out, routing = moe(x)
            loss = out.float().square().sum()
        loss.backward()
        found.append((out, routing, {name: p.grad.clone() for name, p in moe.named_parameters() if p.requires_grad}))
    (exact, exactly, grads), (rounded, roughly, rough_grads) = found
    assert rounded.dtype == torch.bfloat16 and roughly.probs.dtype == torch.float32
    assert torch.equal(exactly.probs, roughly.probs) and torch.equal(exactly.chosen, roughly.chosen)
    assert 0 < (rounded.float() - exact).norm() < 0.02 * exact.norm()
    for name, grad in grads.items():
        assert rough_grads[name].dtype == torch.float32
        assert (rough_grads[name] - grad).norm() <= 0.05 * grad.norm(), name


def test_autocast_leaves_float64_alone() -> None:
    moe, x = make_moe(n_shared_experts=1), some(9, 12)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x)[0]
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, moe(x)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["fast", "other"])
def test_a_bfloat16_mixture_scores_in_float32_and_is_near_the_exact_one(kind: str) -> None:
    moe = make_moe(hidden_size=32, moe_intermediate_size=32, **BIASED).bfloat16()
    make_slow(moe, kind) if kind != "fast" else None
    x = some(40, 32).bfloat16().requires_grad_()
    out, routing = moe(x)
    scores = F.linear(x.float(), moe.gate.weight.float()).sigmoid()
    torch.testing.assert_close(routing.probs, scores / scores.sum(-1, keepdim=True), rtol=1e-6, atol=0)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad is not None and x.grad.dtype == torch.bfloat16
    wide = make_moe(hidden_size=32, moe_intermediate_size=32, **BIASED)
    wide.load_state_dict(moe.state_dict())
    exact = wide(x.detach().double())[0]
    assert (out - exact).norm() < 0.02 * exact.norm()


def test_the_bias_keeps_its_float32_bits_whatever_the_model_is_cast_to() -> None:
    router = Router(ModelConfig(**SHAPE | BIASED))
    exact = torch.linspace(-0.3, 0.7, 8) + 1e-5
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.copy_(exact)
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu", torch.bfloat16)):
        cast(router)
        bias = router.e_score_correction_bias
        assert router.weight.dtype in (torch.bfloat16, torch.float16)
        assert isinstance(bias, nn.Parameter) and not bias.requires_grad
        assert bias.dtype == torch.float32 and torch.equal(bias, exact)
    router.double()
    assert router.e_score_correction_bias.dtype == torch.float64


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_on_meta_gets_its_bias_on_a_device(dtype: torch.dtype | None) -> None:
    model = Transformer(ModelConfig(**SHAPE | BIASED), device="meta").to(dtype=dtype)
    assert model.model.layers[0].mlp.gate.e_score_correction_bias.is_meta
    model.to_empty(device="cpu")
    bias = model.model.layers[0].mlp.gate.e_score_correction_bias
    assert (bias.dtype, bias.device.type, bias.requires_grad) == (torch.float32, "cpu", False)


def test_loading_and_exporting_in_bfloat16_leave_the_bias_in_float32(tmp_path: Path) -> None:
    model = make_model(**BIASED)
    exact = torch.linspace(-0.3, 0.7, 8) + 1e-5
    with torch.no_grad():
        model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(exact)
    save_model(tmp_path / "one", model)
    export_model(tmp_path / "one", tmp_path / "two", dtype="bfloat16")
    for folder, dtype in (("one", "bfloat16"), ("two", "auto"), ("two", "float32")):
        loaded = load_model(tmp_path / folder, dtype=dtype).model
        bias = loaded.model.layers[1].mlp.gate.e_score_correction_bias
        assert bias.dtype == torch.float32 and torch.equal(bias, exact) and not bias.requires_grad
        assert loaded.model.layers[1].mlp.gate.weight.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)


# -- in a model --------------------------------------------------------------------------------------------


def test_the_output_says_where_tokens_went_in_each_layer_with_experts() -> None:
    model = make_model(num_hidden_layers=3, first_k_dense_replace=1, **BIASED)
    kinds = [type(block.mlp).__name__ for block in model.model.layers]
    assert kinds == ["SwiGLU", "MixtureOfExperts", "MixtureOfExperts"]
    output = model(some_tokens(2, 7))
    assert [p.shape for p in output.router_probs] == [(2, 7, 8)] * 2
    assert [c.shape for c in output.router_choices] == [(2, 7, 3)] * 2
    assert not torch.equal(output.router_choices[0], output.router_choices[1])
    for probs, chosen in zip(output.router_probs, output.router_choices, strict=True):
        assert probs.dtype == torch.float32 and probs.requires_grad
        torch.testing.assert_close(probs.sum(-1), torch.ones(2, 7))
        assert torch.equal(chosen, probs.topk(3).indices)  # the bias still is zero
        assert chosen.dtype == torch.int64


def test_a_model_whose_layers_are_all_dense_routes_nothing() -> None:
    output = make_model(first_k_dense_replace=2)(some_tokens(1, 5))
    assert output.router_probs == output.router_choices == ()


@pytest.mark.parametrize("changes", [BIASED, {"n_shared_experts": 1, "dropout": 0.2}])
def test_activation_checkpointing_gives_the_same_gradients(changes: dict[str, Any]) -> None:
    found = []
    for recompute in (False, True):
        model = make_model(**changes).train()
        model.activation_checkpointing = recompute
        torch.manual_seed(3)
        output = model(some_tokens(2, 9))
        (output.logits.square().mean() + sum(p.square().sum() for p in output.router_probs)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    plain, recomputed = found
    for name, grad in plain.items():
        assert grad is not None and torch.equal(grad, recomputed[name]), name
    assert plain["model.layers.0.mlp.gate.weight"].any() and plain["model.layers.1.mlp.experts.0.up_proj.weight"].any()


def test_a_compiled_model_gives_the_same_losses_and_gradients() -> None:
    found = []
    for compiled in (False, True):
        model = make_model(n_shared_experts=1, **BIASED)
        torch._dynamo.reset()
        run = torch.compile(model, backend="eager", dynamic=False) if compiled else model
        output = run(some_tokens(2, 9))
        loss = output.logits.square().mean() + sum(p.square().sum() for p in output.router_probs)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(eager, other, rtol=1e-4, atol=1e-6)


def test_the_bias_is_no_matter_of_gradients() -> None:
    model = make_model(**BIASED)
    biases = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("correction_bias")}
    assert len(biases) == 2 and not any(bias.any() for bias in biases.values())
    model(some_tokens(2, 9)).logits.square().mean().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    for name, before in biases.items():
        assert model.get_parameter(name).grad is None and torch.equal(model.get_parameter(name), before)


def test_initial_weights_follow_the_rule() -> None:
    model = make_model(
        hidden_size=64,
        n_routed_experts=64,
        moe_intermediate_size=96,
        initializer_range=0.05,
        n_shared_experts=2,
        **BIASED,
    )
    moe = model.model.layers[1].mlp
    assert moe.gate.weight.std().item() == pytest.approx(0.05, rel=0.05)
    for block in (moe.experts[0], moe.experts[63], moe.shared_experts):
        assert block.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.05)
        assert block.gate_proj.weight.std().item() == pytest.approx(0.05, rel=0.05)
        assert block.down_proj.weight.std().item() == pytest.approx(0.05 / 2, rel=0.05)
    assert moe.shared_experts.up_proj.weight.shape == (192, 64)
    assert not torch.equal(moe.experts[0].up_proj.weight, moe.experts[1].up_proj.weight)


def test_frozen_experts_cost_nothing_in_backward_and_let_gradients_through() -> None:
    exact, model = make_model(), make_model()
    add_lora(model, LoraConfig(r=2, targets=("q_proj",)))
    with torch.no_grad():
        for linear in (m for m in model.modules() if isinstance(m, LoraLinear)):
            linear.lora_B.weight.copy_(some(*linear.lora_B.weight.shape) * 0.1)
            query = exact.get_submodule(next(n for n, m in model.named_modules() if m is linear))
            query.weight += linear.lora_B.weight @ linear.lora_A.weight * linear.scaling
    sizes = []
    for each in (exact, model):
        shapes: list[torch.Size] = []
        with ShapesMade(shapes):
            each(some_tokens(2, 9)).logits.square().mean().backward()
        sizes.append(sum(shape in ((7, 12), (14, 12), (12, 7)) for shape in shapes))
    assert sizes[0] > sizes[1] == 0  # gradients of the experts' weights
    through, whole = (each.model.embed_tokens.weight for each in (model, exact))
    assert through.grad is None and whole.grad is not None
    query, adapted = (each.model.layers[0].self_attn.q_proj for each in (exact, model))
    expected = adapted.scaling * adapted.lora_B.weight.T @ query.weight.grad
    torch.testing.assert_close(adapted.lora_A.weight.grad, expected, rtol=1e-4, atol=1e-6)


class ShapesMade(TorchDispatchMode):
    """Notes the shapes of matrix products that are written to nothing given."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes.append(out.shape)
        return out


def test_flops_count_the_experts_that_a_token_goes_to() -> None:
    model = make_model(n_shared_experts=2, first_k_dense_replace=1, tie_word_embeddings=False)
    attention, dense, head = 4 * 12 * 12, 3 * 12 * 20, 12 * 40
    router, experts, shared = 8 * 12, 3 * 3 * 12 * 7, 3 * 12 * 14
    weights = 2 * attention + dense + head + router + experts + shared
    keys = 2 * 16 / 2
    assert model.flops_per_token(16) == 6 * weights + 6 * keys * 2 * (6 + 6)


# -- balance -----------------------------------------------------------------------------------------------


def test_the_bias_rises_where_fewer_tokens_than_the_mean_went() -> None:
    assert balance(torch.tensor([4.0, 0.0, 2.0, 2.0]), 0.25).tolist() == [-0.25, 0.25, 0.0, 0.0]


def test_the_load_becomes_even_where_the_router_prefers_some_experts() -> None:
    router = Router(ModelConfig(**SHAPE | BIASED))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=draw) * 0.2)
        router.weight[:3, 0] += 1.0  # the first element is always 1
    loads = []
    for _ in range(300):
        x = torch.randn(512, 12, generator=draw)
        x[:, 0] = 1.0
        counts = router(x)[1].chosen.flatten().bincount(minlength=8).double()
        loads.append(float(counts.max() / counts.mean()))
        router.e_score_correction_bias += balance(counts, 0.005).float()
    assert loads[0] > 2.0 and max(loads[-10:]) < 1.25


def test_only_layers_with_experts_and_a_speed_are_balanced() -> None:
    counts = torch.tensor([[5.0, 1, 3, 3, 3, 3, 3, 3]])
    model = make_model(first_k_dense_replace=1, router_bias_update_speed=0.01, **BIASED)
    deltas = model.balance_experts(counts)
    assert list(deltas) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert list(deltas) == [n for n, _ in model.named_parameters() if n.endswith("correction_bias")]
    assert deltas["model.layers.1.mlp.gate.e_score_correction_bias"].tolist() == pytest.approx([-0.01, 0.01] + [0] * 6)
    assert make_model(first_k_dense_replace=1, **BIASED).balance_experts(counts) == {}
