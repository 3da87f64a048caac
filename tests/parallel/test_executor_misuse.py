"""What a loop of one's own can get wrong is refused or has no effect; it never makes ranks differ in silence."""

import gc

import pytest
import torch
from support import run_ranks, whole_weights

from pellucid.errors import CheckpointError, ConfigError, TrainingError
from pellucid.parallel import DDP, ShardedOptimizer, comm, create_executor
from pellucid.parallel.executor import LossScaler


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def rows(step: int = 0) -> torch.Tensor:
    """This rank's four of the eight rows of a step."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    size = 8 // comm.world_size()
    return x[comm.rank() * size : (comm.rank() + 1) * size]


def norm_alone() -> float:
    model = net()
    model(rows()).square().mean().backward()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp"])
def test_the_norm_is_the_global_one_whenever_it_is_asked(mode: str) -> None:
    def run() -> list[float]:
        bare = net()
        executor = create_executor(mode)
        model, *_ = executor.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        with executor.accumulate(model):
            executor.backward(model(rows()).square().mean())
        return [executor.grad_norm(), executor.clip_grad_norm_(10.0)]

    expected = norm_alone()
    for norms in run_ranks(run, 2):
        assert norms == pytest.approx([expected, expected], rel=1e-5)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp"])
def test_an_optimizer_with_a_parameter_of_another_model_is_refused(mode: str) -> None:
    def run() -> str:
        with pytest.raises(ConfigError) as caught:
            create_executor(mode).prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1))
        return str(caught.value)

    assert all("not the model's" in said for said in run_ranks(run, 2))


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_clipping_inside_a_window_does_nothing(mode: str) -> None:
    def run() -> list[float]:
        bare = net()
        executor = create_executor(mode, grad_accum_steps=2)
        model, optimizer, *_ = executor.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        norms = []
        for step in range(2):
            with executor.accumulate(model):
                executor.backward(model(rows(step)).square().mean() / 2)
            norms.append(executor.clip_grad_norm_(0.01))
            optimizer.step()
        return norms

    first, second = run_ranks(run, 2)
    assert first == second and first[0] == 0.0 and first[1] > 0.01


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp"])
def test_a_step_without_accumulate_finishes_by_itself(mode: str) -> None:
    def train(executor_of: str) -> list[float]:
        bare = net()
        executor = create_executor(executor_of)
        model, optimizer, *_ = executor.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.5))
        for step in range(2):
            executor.backward(model(rows(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([torch.tensor(w).reshape(-1) for w in whole_weights(executor)]).tolist()

    expected = train("none")
    for weights in run_ranks(lambda: train(mode), 2):
        assert weights == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_a_parameter_unfrozen_after_wrapping_is_refused(mode: str) -> None:
    def run() -> str:
        bare = net()
        bare[0].weight.requires_grad_(False)
        executor = create_executor(mode)
        model, *_ = executor.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        bare[0].weight.requires_grad_(True)
        with executor.accumulate(model):
            executor.backward(model(rows()).square().mean())
        with pytest.raises(TrainingError) as caught:
            executor.step()
        return str(caught.value)

    assert all("0.weight was frozen when it was wrapped" in said for said in run_ranks(run, 2))


def test_a_model_can_be_wrapped_again_when_its_wrapper_is_gone() -> None:
    def run() -> list[float]:
        bare = net()
        first = DDP(bare)
        del first
        gc.collect()
        again = DDP(bare)
        again(rows()).square().mean().backward()
        again.finish_gradient_sync()
        return torch.cat([p.grad.reshape(-1) for p in bare.parameters()]).tolist()

    one, two = run_ranks(run, 2)
    assert one == two and any(one)


def test_a_sharded_optimizer_keeps_its_state_to_itself() -> None:
    def run() -> list[str]:
        said = []
        bare = net()
        ddp = create_executor("ddp")
        ddp.prepare(bare, ShardedOptimizer(bare.parameters(), torch.optim.SGD, lr=0.1))
        with pytest.raises(CheckpointError) as caught:
            list(ddp.optimizer_parts())
        said.append(str(caught.value))
        other = net()
        with pytest.raises(ConfigError) as refused:
            create_executor("zero1").prepare(other, ShardedOptimizer(other.parameters(), torch.optim.SGD, lr=0.1))
        return [*said, str(refused.value)]

    for in_ddp, in_zero1 in run_ranks(run, 2):
        assert "optimizer.state_dict()" in in_ddp and "plain one" in in_zero1


def test_a_rank_that_owns_nothing_unscales_nothing() -> None:
    def run() -> float:
        bare = torch.nn.Linear(4, 3, bias=False)
        executor = create_executor("zero1")
        executor.scaler = LossScaler(8.0)
        model, *_ = executor.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        with executor.accumulate(model):
            executor.backward(model(rows()).square().mean())
        executor.finish_grads()
        return executor.grad_norm()

    one, two = run_ranks(run, 2, timeout=20)
    assert one == two > 0
