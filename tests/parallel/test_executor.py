import os

import pytest
import torch
import torch.distributed as dist
from support import tiny_config, wait, windows

from pellucid.errors import ConfigError, TrainingError
from pellucid.parallel import comm, create_executor
from pellucid.parallel.executor import LossScaler
from pellucid.train import Trainer
from pellucid.train.strategies import LossOutput, Pretrain, PretrainOptions


def test_the_norm_and_clipping_equal_torchs():
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5)
    theirs.load_state_dict(ours.state_dict())
    executor = create_executor("none")
    executor.prepare(ours, torch.optim.SGD(ours.parameters(), lr=1.0))
    x = torch.randn(3, 7)
    for model in (ours, theirs):
        (model(x).pow(2).sum() * 10).backward()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert executor.clip_grad_norm_(0.5) == pytest.approx(float(expected))
    assert executor.grad_norm() == pytest.approx(0.5, rel=1e-5)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_an_unknown_mode_and_an_unknown_option_are_refused_with_the_nearest_named():
    with pytest.raises(ConfigError, match="did you mean none"):
        create_executor("nono")
    with pytest.raises(ConfigError, match=r"parallel\.none\.bucket"):
        create_executor("none", bucket=3)


def trainer_with_scale(scale):
    trainer = Trainer(tiny_config(train__steps=6), train_data=windows(30))
    trainer.setup.executor.scaler = LossScaler(scale)
    return trainer


def test_a_loss_scale_is_taken_out_before_clipping():
    plain = Trainer(tiny_config(train__steps=6), train_data=windows(30))
    scaled = trainer_with_scale(1024.0)
    for trainer in (plain, scaled):
        trainer.train()
    for a, b in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        assert torch.equal(a, b)  # powers of two change no bit


class Overflows(Pretrain):
    """The first backward overflows, as float16 gradients do."""

    def __call__(self, model, batch):
        loss = super().__call__(model, batch).sum
        first = next(model.parameters())
        infinite = (first - first.detach()).abs().sqrt().sum()  # value 0, gradient infinite
        return LossOutput(loss + infinite, {})


def test_a_step_that_overflows_is_skipped_and_the_scale_is_halved():
    trainer = Trainer(tiny_config(), strategy=Overflows(PretrainOptions()), train_data=windows(30))
    trainer.setup.executor.scaler = LossScaler(1024.0)
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.model.train()
    info = trainer._step()
    assert trainer.setup.executor.scaler.scale == 512.0 and trainer.state.step == info.step == 1
    assert all(torch.equal(a, b) for a, b in zip(start, trainer.model.parameters(), strict=True))
    trainer._loss = Pretrain(PretrainOptions())
    trainer._step()
    assert not torch.equal(start[0], next(trainer.model.parameters()))


def test_the_scale_grows_after_enough_finite_steps_and_survives_a_round_trip():
    scaler = LossScaler(4.0, growth_interval=3)
    for _ in range(3):
        scaler.update(finite=True)
    assert scaler.scale == 8.0
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert (other.scale, other.finite_steps) == (8.0, 0)


def test_a_nan_loss_is_not_blamed_on_the_scale():
    trainer = trainer_with_scale(2.0)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingError, match="non-finite"):
        trainer._step()


def test_all_reduce_is_the_number_itself_alone_and_the_sum_over_ranks(tmp_path):
    assert comm.all_reduce(2.5, tag="loss") == 2.5

    def rank(number):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        assert comm.all_reduce(1.0 + number, tag="loss") == 3.0

    pids = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                rank(number)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [wait(pid, 60) for pid in pids] == [0, 0]
