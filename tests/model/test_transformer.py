from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pellucid.config import PRESETS, ModelConfig
from pellucid.errors import ConfigError
from pellucid.model import Attend, KVSpec, Transformer, init_weights
from pellucid.model.attend import fused_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip
EVERYTHING: dict[str, Any] = {
    "qk_norm": True, "attention_gate": True, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
    "sliding_window": 5, "max_window_layers": 1,
}  # fmt: skip


def make_model(seed: int = 0, **changes: Any) -> Transformer:
    return Transformer(ModelConfig(**SHAPE | changes), generator=torch.Generator().manual_seed(seed))


def some_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Transformer, tokens: Tensor, attend: Attend | None = None) -> Tensor:
    logits = model(tokens[:, :-1], None, attend).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None and grad.abs().max() > 0 for grad in found.values())
    return {name: grad for name, grad in found.items() if grad is not None}


# -- shape and names ---------------------------------------------------------------------------------------


def test_the_optional_parts_have_the_names_of_their_models() -> None:
    names = set(dict(make_model(num_hidden_layers=1, **EVERYTHING).named_parameters()))
    attention = {f"{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")}
    attention |= {"q_norm.weight", "k_norm.weight", "gate_proj.weight", "gate_proj.bias"}
    mlp = {f"{p}_proj.{kind}" for p in ("gate", "up", "down") for kind in ("weight", "bias")}
    block = {f"self_attn.{n}" for n in attention} | {f"mlp.{n}" for n in mlp}
    block |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert names == {f"model.layers.0.{n}" for n in block} | {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_a_tied_head_is_the_embedding_listed_and_saved_once() -> None:
    model = make_model()
    assert "lm_head.weight" not in model.state_dict()
    assert "lm_head.weight" not in dict(model.named_parameters())
    hidden = torch.randn(2, 32)
    assert torch.equal(model.head(hidden), hidden @ model.model.embed_tokens.weight.T)
    assert "lm_head.weight" in make_model(tie_word_embeddings=False).state_dict()


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 0"):
        make_model(vocab_size=0)


def test_kv_specs_say_what_a_token_leaves_in_each_layer() -> None:
    assert make_model(head_dim=10).kv_specs() == [KVSpec(2, 10, 10)] * 3
    assert KVSpec(2, 10, 6).elements_per_token() == 32
    assert KVSpec(1, 10, 6, value_in_key=True).elements_per_token() == 10


def test_presets_have_about_the_sizes_that_they_promise() -> None:
    for preset, vocabulary, millions in (("tiny", 2048, 1), ("small", 8192, 12.6), ("base", 32768, 110)):
        config = ModelConfig(vocab_size=vocabulary, **PRESETS[preset])
        assert Transformer(config, device="meta").num_parameters() == pytest.approx(millions * 1e6, rel=0.2)


# -- counting ----------------------------------------------------------------------------------------------


def test_the_reference_configuration_needs_79_megaflops_a_token() -> None:
    model = Transformer(ModelConfig(vocab_size=8192, **PRESETS["small"]), device="meta")
    assert model.num_parameters() == 12_587_904
    assert model.num_parameters(embedding=False) == 12_587_904 - 8192 * 384
    assert f"{model.flops_per_token(256) / 1e6:.1f}" == "79.0"


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_gate": True, "head_dim": 12}])
def test_flops_equal_those_that_torch_counts_in_the_matrix_products(changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    with FlopCounterMode(display=False) as counter:
        model(some_tokens(2, 24)).logits.sum().backward()
    heads = 4 * model.config.head_dim
    attention = 12 * 24 * heads * 3  # torch's kernel is not counted on the CPU, ours is causal: half of this
    expected = counter.get_total_flops() / 48
    kernel = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" in str(op)) / 48
    assert model.flops_per_token(24) - attention / 2 == expected - kernel


def test_a_sliding_window_needs_fewer_flops() -> None:
    plain, windowed = make_model().flops_per_token(32), make_model(sliding_window=8).flops_per_token(32)
    mean_keys = sum(min(t + 0.5, 8) for t in range(32)) / 32
    assert plain - windowed == pytest.approx(12 * 3 * 32 * (16 - mean_keys), rel=0.02)
    assert make_model(sliding_window=100).flops_per_token(32) == plain


# -- initial weights ---------------------------------------------------------------------------------------


def test_initial_weights_follow_the_rule() -> None:
    model = make_model(hidden_size=256, intermediate_size=512, initializer_range=0.02, **EVERYTHING)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif p.dim() == 1:
            assert (p == 1).all(), name
        else:
            residual = "o_proj" in name or "down_proj" in name
            assert p.std().item() == pytest.approx(0.02 / (6**0.5 if residual else 1), rel=0.05), name
            assert abs(p.mean().item()) < 1e-3, name


def test_embedding_range_scales_the_embedding_alone() -> None:
    plain, wide = (
        make_model(seed=5, initializer_range=0.02),
        make_model(seed=5, initializer_range=0.02, embedding_range=1.0),
    )
    for (name, a), b in zip(plain.named_parameters(), wide.parameters(), strict=True):
        factor = 50.0 if "embed_tokens" in name else 1.0
        torch.testing.assert_close(b, a * factor, rtol=1e-5, atol=0.0), name


def test_a_tied_head_leaves_the_embedding_as_drawn() -> None:
    tied, untied = make_model(seed=5), make_model(seed=5, tie_word_embeddings=False)
    assert torch.equal(tied.model.embed_tokens.weight, untied.model.embed_tokens.weight)


def test_the_generator_decides_the_weights_and_the_global_one_is_left_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second, other = make_model(7), make_model(7), make_model(8)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)
    init_weights(other, torch.Generator().manual_seed(7))
    assert torch.equal(other.model.layers[2].mlp.up_proj.weight, first.model.layers[2].mlp.up_proj.weight)


def test_weights_assigned_to_a_model_on_meta_give_the_same_logits() -> None:
    model = make_model(**EVERYTHING)
    empty = Transformer(model.config, device="meta")
    assert all(p.is_meta for p in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(empty(some_tokens(2, 8)).logits, model(some_tokens(2, 8)).logits)


# -- forward -----------------------------------------------------------------------------------------------


def test_logits_are_the_head_of_the_hidden_states_that_come_with_them() -> None:
    model = make_model()
    out = model(some_tokens(2, 8))
    assert out.logits.shape == (2, 8, 40) and out.hidden.shape == (2, 8, 32)
    assert torch.equal(model.forward_hidden(some_tokens(2, 8)), out.hidden)
    assert torch.equal(model.head(out.hidden), out.logits)


@pytest.mark.parametrize("changes", [{}, EVERYTHING])
def test_packed_tokens_give_the_logits_of_their_rows(changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    rows = [some_tokens(9, seed=1), some_tokens(14, seed=2)]
    windows = model.layer_windows()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        parts = []
        for a, b in ((0, 9), (9, 23)):
            distance = torch.arange(b - a)[:, None] - torch.arange(b - a)
            mask = (distance >= 0) & (distance < (windows[layer] or 99))
            parts.append(fused_attention(*(x[None, a:b] for x in (q, k, v)), mask, scale)[0])
        return torch.cat(parts)

    positions = torch.cat([torch.arange(9), torch.arange(14)])
    packed = model(torch.cat(rows), positions, attend).logits
    assert packed.shape == (23, 40)
    torch.testing.assert_close(packed, torch.cat([model(row[None]).logits[0] for row in rows]), rtol=1e-4, atol=1e-4)


def test_packed_tokens_without_positions_or_attend_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="packed tokens"):
        model(some_tokens(5), torch.arange(5))
    with pytest.raises(ValueError, match="packed tokens"):
        model(some_tokens(5), None, model.make_attend())


@pytest.mark.parametrize("changes", [{}, EVERYTHING])
@pytest.mark.parametrize("autocast", [False, True])
def test_joined_linears_give_the_results_and_gradients_of_separate_ones(
    changes: dict[str, Any], autocast: bool
) -> None:
    joined, separate = make_model(**changes), make_model(**changes)
    for block in separate.model.layers:
        block.self_attn.join = block.mlp.join = False
    for model in (joined, separate):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, some_tokens(2, 17))
        loss.backward()
    for name, grad in gradients(joined).items():
        error = (grad - gradients(separate)[name]).norm() / grad.norm()
        assert error < (0.05 if autocast else 1e-5), name


def test_a_replaced_linear_is_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = make_model()
    before = model(some_tokens(1, 8)).logits
    up = model.model.layers[1].mlp.up_proj
    doubled = Doubled(up.in_features, up.out_features, bias=False)
    doubled.weight = nn.Parameter(up.weight.detach() / 2)
    model.model.layers[1].mlp.up_proj = doubled
    torch.testing.assert_close(model(some_tokens(1, 8)).logits, before)


def test_the_gate_closes_and_opens_the_attention_of_each_element() -> None:
    model = make_model(num_hidden_layers=1, attention_gate=True, attention_bias=True)
    plain = make_model(num_hidden_layers=1, attention_bias=True)
    plain.load_state_dict(model.state_dict(), strict=False)
    gate = model.model.layers[0].self_attn.gate_proj
    tokens = some_tokens(1, 8)
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.fill_(100.0)
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
        gate.bias.fill_(-100.0)
        last = model(tokens).logits
        changed = tokens.clone()
        changed[0, 0] = (changed[0, 0] + 1) % 40
        assert torch.equal(model(changed).logits[:, 1:], last[:, 1:])  # nothing passes between tokens


# -- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sdpa", "canonical"])
def test_activation_checkpointing_gives_the_same_gradients_with_dropout(kernel: str) -> None:
    found = []
    for recompute in (False, True):
        model = make_model(dropout=0.2, attend=kernel).train()
        model.activation_checkpointing = recompute
        torch.manual_seed(11)
        loss = loss_of(model, some_tokens(2, 17), model.make_attend(torch.tensor([[0] * 7 + [1] * 9] * 2)))
        loss.backward()
        found.append((loss, gradients(model)))
    (plain_loss, plain), (recomputed_loss, recomputed) = found
    assert torch.equal(plain_loss, recomputed_loss)
    for name, grad in plain.items():
        assert torch.equal(grad, recomputed[name]), name


def test_activation_checkpointing_keeps_fewer_activations() -> None:
    kept = []
    for recompute in (False, True):
        model = make_model()
        model.activation_checkpointing = recompute
        total = 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            loss_of(model, some_tokens(2, 17))
        kept.append(total)
    assert kept[1] < kept[0] / 2


def test_dropout_acts_in_training_only_and_follows_the_global_generator() -> None:
    model = make_model(dropout=0.3)
    tokens = some_tokens(2, 8)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    torch.testing.assert_close(model(tokens).logits, make_model().eval()(tokens).logits)
    model.train()
    torch.manual_seed(1)
    first, second = model(tokens).logits, model(tokens).logits
    torch.manual_seed(1)
    assert torch.equal(model(tokens).logits, first)
    assert not torch.equal(first, second)


DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8}


@pytest.mark.parametrize("changes", [{}, EVERYTHING, DYNAMIC])
@pytest.mark.parametrize("with_documents", [False, True])
def test_model_and_loss_compile_to_one_graph(changes: dict[str, Any], with_documents: bool) -> None:
    model = make_model(**changes)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def loss(tokens: Tensor, ids: Tensor) -> Tensor:
        return loss_of(model, tokens, model.make_attend(ids if with_documents else None))

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, dynamic=False, fullgraph=True)
    for seed in (1, 2):
        ids = torch.tensor([[0] * (5 + seed) + [1] * (11 - seed)] * 2)
        tokens = some_tokens(2, 17, seed=seed)
        torch.testing.assert_close(compiled(tokens, ids), loss(tokens, ids), rtol=1e-5, atol=1e-6)
    assert graphs == 1


def test_an_attend_made_outside_a_compiled_graph_can_change_with_the_batch() -> None:
    model = make_model(sliding_window=6, max_window_layers=1)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, backend=backend, dynamic=False, fullgraph=True)
    for cut in (3, 7, 12):
        ids = torch.tensor([[0] * cut + [1] * (16 - cut)] * 2)
        tokens = some_tokens(2, 17, seed=cut)
        result = compiled(model, tokens, model.make_attend(ids, written_out=True))
        torch.testing.assert_close(result, loss_of(model, tokens, model.make_attend(ids)), rtol=1e-5, atol=1e-6)
    assert graphs == 1


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.filterwarnings("error")
def test_bfloat16_autocast_is_close_to_float32(qk_norm: bool) -> None:
    model = make_model(qk_norm=qk_norm)
    exact = loss_of(model, some_tokens(2, 33))
    with torch.autocast("cpu", torch.bfloat16):
        rough = loss_of(model, some_tokens(2, 33))
    assert rough != exact
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0.02)
