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


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_an_update_equals_the_published_iteration_in_float64(shape):
    torch.manual_seed(0)
    gradient = torch.randn(shape, dtype=torch.float64)
    wide = gradient if shape[0] <= shape[1] else gradient.T
    x = wide / wide.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    expected = x if shape[0] <= shape[1] else x.T
    torch.testing.assert_close(orthogonalize(gradient.float()[None])[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_one_step_equals_torchs_muon():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**TINY))
    other = Transformer(ModelConfig(**TINY))
    other.load_state_dict(model.state_dict())
    ours = build_muon(model, 0.02, MuonOptions(weight_decay=0.1))
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
@pytest.mark.parametrize("size", [2, 3])
def test_an_owner_s_whole_matrix_is_updated_to_the_bits_of_one_process(mode, size):
    """One rank has the gradient and the others zeros, so that their sum has its bits; weights then have them too.

    fsdp2 cuts vectors anywhere, and fused AdamW rounds the odd tail of a tensor otherwise: there matrices, of one step.
    """
    steps = 1 if mode == "fsdp2" else 3

    def weights(mode):
        model = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1))
        executor = create_executor(mode, average=False)
        wrapped, *_ = executor.prepare(model, build_muon(model, 0.02, MuonOptions(weight_decay=0.1)))
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
    "bad", [dict(momentum=1.0), dict(newton_schulz_steps=0), dict(adamw_lr_ratio=0.0), dict(weight_decay=-1.0)]
)
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        MuonOptions(**bad)
