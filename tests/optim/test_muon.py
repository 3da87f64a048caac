import pytest
import torch
from support import TINY, run_ranks, tiny_config, whole_weights, windows

from pellucid.config import LoraConfig, ModelConfig
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.model.lora import add_lora
from pellucid.optim import MuonOptions
from pellucid.optim.muon import build_muon, orthogonalize
from pellucid.parallel import comm, create_executor
from pellucid.train import Trainer


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (16, 16), (1, 30), (30, 1)])
def test_the_singular_values_of_an_update_are_about_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, *shape) * 1e-3))
    assert values.min() > 0.65 and values.max() < 1.25


def test_a_low_rank_gradient_gives_a_low_rank_update_with_the_same_directions():
    torch.manual_seed(0)
    low = torch.randn(12, 2) @ torch.randn(2, 20)
    update = orthogonalize(low[None])[0]
    values = torch.linalg.svdvals(update)
    assert (values[:2] > 0.65).all() and (values[2:] < 1e-3).all()
    u, _, v = torch.linalg.svd(low, full_matrices=False)
    assert torch.linalg.matrix_norm(u[:, :2].T @ update @ v[:2].T, 2) > 0.65


def published(gradient, steps=5):
    """The iteration as it is written down, in float64."""
    wide = gradient.double() if gradient.shape[0] <= gradient.shape[1] else gradient.double().T
    x = wide / wide.norm()
    for _ in range(steps):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x if gradient.shape[0] <= gradient.shape[1] else x.T


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (12, 20), (16, 16)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7])
def test_an_update_equals_the_published_iteration_in_float64(shape, steps):
    torch.manual_seed(0)
    gradient = torch.randn(shape, dtype=torch.float64)
    expected = published(gradient, steps)
    torch.testing.assert_close(orthogonalize(gradient.float(), steps).double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(orthogonalize(gradient, steps), expected, rtol=1e-9, atol=1e-10)
    several = orthogonalize(torch.stack([gradient, 2 * gradient.flip(0)]), steps)
    torch.testing.assert_close(several[0], expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(several[1], published(gradient.flip(0), steps), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("decay", ["1", "1/i", "1/i^2", "exp(-i/8)", "20 of 96"])
def test_in_bfloat16_it_is_as_near_as_torchs_own_whatever_the_singular_values(decay):
    """Those of gradients fall off steeply, and what is small must not be blown up by the rounding of what is large."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    torch.manual_seed(0)
    rows, columns = 96, 256
    i = torch.arange(1, rows + 1, dtype=torch.float64)
    values = {
        "1": torch.ones(rows, dtype=torch.float64), "1/i": 1 / i, "1/i^2": 1 / i**2, "exp(-i/8)": (-i / 8).exp(),
        "20 of 96": (i <= 20) + 1e-4 * (i > 20),
    }[decay]  # fmt: skip
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64))[0]
    gradient = (left * values @ right.T).float()
    expected = published(gradient)
    theirs = _zeropower_via_newtonschulz(gradient, (3.4445, -4.7750, 2.0315), 5, 1e-7).double()
    for matrix, reference in ((gradient, expected), (gradient.T.contiguous(), expected.T)):
        ours = orthogonalize(matrix, dtype=torch.bfloat16)
        assert ours.dtype == torch.float32 and ours.shape == matrix.shape
        distance, bound = (ours - reference).norm(), (theirs - expected).norm()
        assert 0 < distance < 1.25 * bound + 0.03 * expected.norm()
        assert torch.linalg.svdvals(ours).max() < 1.3


def test_in_bfloat16_no_small_matrix_is_blown_up():
    torch.manual_seed(1)
    for _ in range(100):
        values = (-8 * torch.rand(8, dtype=torch.float64) * torch.rand(1, dtype=torch.float64)).exp()
        left = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
        right = torch.linalg.qr(torch.randn(16, 8, dtype=torch.float64))[0]
        gradient = (left * values @ right.T).float()
        ours, expected = orthogonalize(gradient, dtype=torch.bfloat16).double(), published(gradient)
        assert torch.linalg.svdvals(ours).max() < 1.25
        assert (ours - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize(("dtype", "alike"), [("float32", 0.95), ("bfloat16", 0.9)])
def test_one_step_equals_torchs_muon(dtype, alike):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**TINY))
    other = Transformer(ModelConfig(**TINY))
    other.load_state_dict(model.state_dict())
    ours = build_muon(model, 0.02, MuonOptions(weight_decay=0.1, newton_schulz_dtype=dtype))
    hidden = [n for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    theirs = torch.optim.Muon(
        [p for n, p in other.named_parameters() if n in hidden],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="original",
    )
    x = torch.randint(0, 61, (2, 16))
    for m in (model, other):
        m(x).logits.logsumexp(-1).sum().backward()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    ours.step()
    theirs.step()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if name in hidden:
            mine, step = (a - start[name]).detach(), (b - start[name]).detach()
            assert step.abs().max() > 0
            # theirs iterates in bfloat16: the same direction and length, but not the same digits
            assert torch.cosine_similarity(mine.flatten(), step.flatten(), dim=0) > 0.95, name
            assert mine.norm() == pytest.approx(float(step.norm()), rel=0.1), name


@pytest.mark.parametrize("tied", [True, False])
def test_only_hidden_matrices_get_muon_and_the_rest_equals_adamw_to_the_bit(tied):
    torch.manual_seed(0)
    config = ModelConfig(**TINY, tie_word_embeddings=tied, attention_bias=True)
    model, other = Transformer(config), Transformer(config)
    other.load_state_dict(model.state_dict())
    ours = build_muon(model, 0.02, MuonOptions(adamw_lr_ratio=0.1))
    muon = {id(p) for g in ours.param_groups if g["muon"] for p in g["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in muon}
    assert names == {n for n, _ in model.named_parameters() if n.endswith("proj.weight")}
    assert sorted(map(id, model.parameters())) == sorted(id(p) for g in ours.param_groups for p in g["params"])
    rest = [p for n, p in other.named_parameters() if n not in names]
    theirs = torch.optim.AdamW(rest, lr=0.002, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for group in ours.param_groups:
        group["lr"] = 0.02 * group.get("lr_scale", 1.0)
    for _ in range(3):
        for m in (model, other):
            m.zero_grad()
            m(torch.arange(16)[None]).logits.logsumexp(-1).sum().backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            b.grad.copy_(a.grad)
        ours.step()
        theirs.step()
    for name, parameter in other.named_parameters():
        if name not in names:
            assert torch.equal(dict(model.named_parameters())[name], parameter), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("own", ["auto", "float32", "bfloat16"])
def test_products_are_in_the_type_of_the_run_s_unless_the_configuration_says_otherwise(tmp_path, dtype, own):
    config = tiny_config(
        tmp_path / "run", optim__name="muon", optim__newton_schulz_dtype=own, train__steps=1, train__dtype=dtype
    )
    trainer = Trainer(config, train_data=windows(20))
    expected = dtype if own == "auto" else own
    assert trainer.optimizer.options.newton_schulz_dtype == expected
    trainer.train()
    assert f'newton_schulz_dtype = "{expected}"' in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_s_products_round_as_the_type_says(dtype):
    """That the option acts: what 10 steps make of the weights differs by bfloat16's rounding, and is alike otherwise."""

    def weights(newton_schulz_dtype):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1))
        optimizer = build_muon(model, 0.02, MuonOptions(newton_schulz_dtype=newton_schulz_dtype))
        model(torch.arange(16)[None]).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        return model.model.layers[0].mlp.up_proj.weight.detach()

    assert torch.equal(weights(dtype), weights("auto")) == (dtype == "float32")
    torch.testing.assert_close(weights(dtype), weights("auto"), rtol=0, atol=2e-3)


def test_a_muon_run_resumes_to_the_same_bits(tmp_path):
    def run(out, steps, resume):
        trainer = Trainer(
            tiny_config(out, optim__name="muon", train__steps=steps, optim__schedule="constant"), train_data=windows(20)
        )
        trainer.train(resume=resume)
        return trainer

    whole = run(tmp_path / "a", 8, False)
    run(tmp_path / "b", 4, False)
    parts = run(tmp_path / "b", 8, True)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.optimizer.param_groups[1]["lr"] == pytest.approx(0.25 * whole.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), (3, "float32"), (3, "bfloat16")])
def test_an_owner_s_whole_matrix_is_updated_to_the_bits_of_one_process(mode, size, dtype):
    """One rank has the gradient and the others zeros, so that their sum has its bits; weights then have them too.

    fsdp2 cuts vectors anywhere, and fused AdamW rounds the odd tail of a tensor otherwise: there matrices, of one step.
    """
    steps = 1 if mode == "fsdp2" else 3

    def weights(mode):
        model = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1))
        executor = create_executor(mode, average=False)
        options = MuonOptions(weight_decay=0.1, newton_schulz_dtype=dtype)
        wrapped, *_ = executor.prepare(model, build_muon(model, 0.02, options))
        for i in range(steps):
            with executor.accumulate(wrapped, last=True):
                loss = wrapped(torch.arange(i, 16 + i)[None]).logits.logsumexp(-1).sum()
                executor.backward(loss * (comm.rank() == 0))
            executor.finish_grads()
            executor.step()
        return dict(zip(executor.weight_shapes(), whole_weights(executor), strict=True))

    alone = weights("none")
    start = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1))
    assert all(parameter.tolist() != alone[name] for name, parameter in start.named_parameters())
    for got in run_ranks(lambda: weights(mode), size):
        different = [name for name in alone if got[name] != alone[name]]
        assert [name for name in different if mode != "fsdp2" or name.endswith("proj.weight")] == []


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"]])
def test_an_adapter_of_the_head_is_the_head_s(targets):
    model = Transformer(ModelConfig(**TINY, tie_word_embeddings=False))
    add_lora(model, LoraConfig(r=2, alpha=4.0, targets=tuple(targets)))
    groups = build_muon(model, 0.02, MuonOptions()).param_groups
    muon = [name for group in groups if group["muon"] for name in group["param_names"]]
    assert muon and all("q_proj.lora_" in name for name in muon)


@pytest.mark.parametrize(
    "bad",
    [
        dict(momentum=1.0),
        dict(newton_schulz_steps=0),
        dict(adamw_lr_ratio=0.0),
        dict(weight_decay=-1.0),
        dict(weight_decay=float("inf")),
    ],
)
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        MuonOptions(**bad)
