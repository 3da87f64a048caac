"""What next-token prediction adds to its loss: log Z squared, by its weight, in training alone."""

import pytest
import torch
import torch.nn.functional as F
from support import TINY, tiny_config, windows

from pellucid.config import ModelConfig
from pellucid.data.batches import Loader
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.train import Callback, Trainer
from pellucid.train.strategies import LossOutput, Pretrain, PretrainOptions, metrics_of


class Seen(Callback):
    def __init__(self):
        self.infos, self.validations = [], []

    def on_before_step(self, trainer, info):
        self.infos.append(info)
        self.grads = [p.grad.clone() for p in trainer.model.parameters()]

    def on_validation(self, trainer, info):
        self.validations.append(info)


def run(strategy=None, **changes):
    seen = Seen()
    config = tiny_config(train__steps=1, train__val_every=1, optim__max_grad_norm="none", **changes)
    Trainer(
        config,
        strategy=strategy,
        callbacks=[seen],
        train_data=windows(30),
        val_data=windows(5, seed=9, score_once=True),
    ).train()
    return seen


def test_z_loss_is_in_the_loss_and_its_gradient_and_logged_by_its_weight():
    seen = run(strategy__z_loss=0.05)
    model = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3))
    (batch,) = Loader(windows(30), global_batch=4, micro_batch=4, seed=3).next_window()
    logits = model(batch.tokens, batch.positions, model.make_attend(batch.document_ids)).logits[batch.loss_mask]
    z = 0.05 * torch.log(torch.exp(logits).sum(-1)).square().mean()
    loss = F.cross_entropy(logits, batch.targets[batch.loss_mask]) + z
    (info,) = seen.infos
    assert info.loss == pytest.approx(loss.item(), rel=1e-6)
    assert info.metrics == {"z_loss": pytest.approx(z.item(), rel=1e-6)} and z > 0.5
    loss.backward()
    for ours, theirs in zip(seen.grads, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-4, atol=1e-7)
    (plain,), (validation,) = run().validations, seen.validations
    assert plain.metrics == {} and validation.metrics == {"z_loss": 0.0}


def test_a_metric_that_is_not_declared_or_taken_is_refused():
    class Undeclared(Pretrain):
        def __call__(self, model, batch):
            return LossOutput(super().__call__(model, batch).sum, {"surprise": torch.ones(())})

    with pytest.raises(ConfigError, match=r"gives the metrics \['surprise'\] and declares \[\]"):
        run(Undeclared(PretrainOptions()))
    strategy = Pretrain(PretrainOptions())
    strategy.metrics = ("lr",)
    with pytest.raises(ConfigError, match=r"'lr', which metrics.jsonl has already"):
        metrics_of(strategy)


def test_a_weight_out_of_range_is_refused():
    with pytest.raises(ConfigError, match=r"strategy.z_loss must be finite and not negative"):
        PretrainOptions(z_loss=-0.1)
