"""SGD is torch's, decays matrices alone, and is the same in every mode."""

import pytest
import torch
from support import TINY, run_ranks, tiny_config, whole_weights, windows

from pellucid.config import ModelConfig, load_config
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.optim import SGDOptions, build_sgd
from pellucid.train import Trainer

OPTIONS = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}


def test_three_steps_equal_the_textbook():
    model, other = (Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1)) for _ in range(2))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_sgd(model, 0.1, SGDOptions(**OPTIONS))
    momenta = [torch.zeros_like(p) for p in other.parameters()]
    x = torch.arange(16)[None]
    for _ in range(3):
        for m in (model, other):
            m.zero_grad()
            m(x).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for (name, p), v in zip(other.named_parameters(), momenta, strict=True):
                decay = 0.1 if p.ndim == 2 and "embed" not in name else 0.0
                g = p.grad + decay * p
                v.mul_(0.9).add_(g)
                p.sub_(0.1 * (g + 0.9 * v))
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert not torch.equal(ours, start[name]), name


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_ranks_step_as_one_process(mode):
    def weights(mode, micro):
        config = tiny_config(
            parallel__mode=mode, optim__name="sgd", optim__lr=0.5, optim__momentum=0.9, optim__weight_decay=0.1,
            train__steps=4, train__global_batch=6, train__micro_batch=micro, train__val_every=0,
        )  # fmt: skip
        trainer = Trainer(config, train_data=windows(30))
        trainer.train()
        executor = trainer.setup.executor
        return dict(zip(executor.weight_shapes(), whole_weights(executor), strict=True))

    alone = weights("none", 6)
    start = dict(Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3)).named_parameters())
    for got in run_ranks(lambda: weights(mode, 1), 3):
        for name, expected in alone.items():
            ours, theirs = torch.tensor(got[name]), torch.tensor(expected)
            moved = (theirs - start[name].detach()).norm()
            tolerance = 1e-3 * moved + 1e-6 * theirs.norm()
            assert (ours - theirs).norm() <= tolerance < moved / 10, name


def test_a_run_resumes_to_the_same_bits(tmp_path):
    def run(out, steps, resume):
        changes = dict(optim__name="sgd", optim__momentum=0.9, train__steps=steps, optim__schedule="constant")
        trainer = Trainer(tiny_config(out, **changes), train_data=windows(20))
        trainer.train(resume=resume)
        return trainer

    whole = run(tmp_path / "a", 8, False)
    run(tmp_path / "b", 4, False)
    parts = run(tmp_path / "b", 8, True)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(momentum=1.0), "optim.momentum"),
        (dict(nesterov=True), "optim.nesterov is true and optim.momentum 0"),
        (dict(weight_decay=-1.0), "optim.weight_decay"),
        (dict(weight_decay=float("inf")), "optim.weight_decay"),
    ],
)
def test_options_out_of_range_are_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        SGDOptions(**bad)


def test_a_narrow_model_and_a_misspelt_name_are_refused():
    with pytest.raises(ConfigError, match=r"sgd: .* is torch.bfloat16; its updates would round away"):
        build_sgd(Transformer(ModelConfig(**TINY)).bfloat16(), 0.1, SGDOptions())
    with pytest.raises(ConfigError, match="unknown optimizer 'mun'; did you mean muon"):
        load_config(None, {"optim.name": "mun"})
