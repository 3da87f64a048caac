"""Deliberately wrong versions of the parallel modes: the check that modes equal one process catches every one of them."""

from functools import partial

import pytest
import torch
from support import run_ranks
from test_modes import check_equals_one_process
from torch import nn
from variants import (
    a_shard_is_forgotten,
    buffer_is_the_gradient_of_a_lone_tensor,
    nothing_is_reduced,
    rates_do_not_arrive,
)

from pellucid.parallel import comm, create_executor, ddp, zero
from pellucid.parallel.bucket import Reducer
from pellucid.parallel.executor import Executor
from pellucid.parallel.modes import DDPExecutor

SIZE, STEPS, MICRO_BATCHES, ROWS = 3, 4, 2, 12
EACH_PARAMETER = 1e-6
"""MiB: each parameter closes its bucket, so that their order matters."""


@pytest.fixture(scope="module", autouse=True)
def imports_of_an_optimizer_step():
    """Made once here: each forked rank would spend seconds on them."""
    one_process("adamw", None)


class Net(nn.Module):
    """Branches of one shape that are added up, in an order of the caller's; a buffer that matters.

    400 elements are enough for three ranks to have a share each in zero1.
    """

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.branches = nn.ModuleList(nn.Linear(20, 20, bias=False) for _ in range(4))
        self.head = nn.Linear(20, 1)
        self.register_buffer("scale", 1 + torch.rand(20))

    def forward(self, x, order):
        return self.head(sum(torch.tanh(self.branches[i](x)) * (1 + i) for i in order) * self.scale)


def batch(step):
    return torch.randn(ROWS, 20, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def rate(step):
    return 0.02 / (1 + step)


def optimizer_of(name, model):
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    return kind(model.parameters(), lr=1.0)  # the loop sets it before each step


def result(model, steps):
    return {"weights": {name: p.tolist() for name, p in model.named_parameters()}, "steps": steps}


def one_process(optimizer, max_norm):
    """The training that every mode must equal, in plain torch."""
    model, steps = Net(seed=0).double(), []
    stepper = optimizer_of(optimizer, model)
    for step in range(STEPS):
        stepper.param_groups[0]["lr"] = rate(step)
        loss = model(batch(step), range(4)).pow(2).sum() / ROWS
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
        stepper.step()
        stepper.zero_grad()
        steps.append([loss.item(), norm.item(), rate(step)])
    return result(model, steps)


def rank(mode, average, optimizer, max_norm):
    """The same on this rank's rows, in micro-batches, from weights of its own and with the branches in an order of its own."""
    me = comm.rank()
    model, steps = Net(seed=me).double(), []
    executor = create_executor(mode, MICRO_BATCHES, average=average, bucket_size_mb=EACH_PARAMETER)
    wrapped, stepper, *_ = executor.prepare(model, optimizer_of(optimizer, model))
    for step in range(STEPS):
        stepper.param_groups[0]["lr"] = rate(step)
        total = 0.0
        for rows in batch(step).chunk(SIZE)[me].chunk(MICRO_BATCHES):
            with executor.accumulate(wrapped):
                loss = wrapped(rows, range(4) if me else range(3, -1, -1)).pow(2).sum()
                executor.backward(loss / len(rows) / MICRO_BATCHES if average else loss / ROWS)
            total += loss.item() / ROWS
        executor.finish_grads()
        norm = executor.grad_norm() if max_norm is None else executor.clip_grad_norm_(max_norm)
        stepper.step()
        steps.append([comm.all_reduce(total, tag="loss"), norm, rate(step)])
    return result(model, steps)


def check(mode, average=False, optimizer="sgd", max_norm=None):
    """Returns a check to be made: ranks have run, and are compared with one process when it is called."""
    ranks = run_ranks(lambda: rank(mode, average, optimizer, max_norm), SIZE)
    return partial(check_equals_one_process, ranks, one_process(optimizer, max_norm))


@pytest.mark.parametrize("optimizer, max_norm", [("sgd", None), ("sgd", 0.3), ("adamw", 0.3)])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_the_modes_as_they_are_pass(mode, average, optimizer, max_norm):
    norms = [norm for _, norm, _ in one_process(optimizer, max_norm)["steps"]]
    assert max_norm is None or max(norms) > 2 * max_norm, "clipping must act"
    check(mode, average, optimizer, max_norm)()


# -- wrong everywhere ---------------------------------------------------------------------------------------


def scaled_by(factor, patch):
    """``factor(W)`` where 1/W is right."""
    for module in (ddp, zero):
        patch.setattr(module, "scale_for_average", lambda flat, num_ranks: flat.mul_(factor(num_ranks)))


def in_order_of_arrival(patch):
    def launch_ready(self):
        for bucket in self.buckets:
            if all(bucket.ready) and bucket.pending is None:
                bucket.pending = self.launch(bucket)

    patch.setattr(Reducer, "_launch_ready", launch_ready)


def buffers_stay_apart(patch):
    def without_buffers(module, group):
        own = [buffer.clone() for buffer in module.buffers()]
        broadcast(module, group)
        for buffer, mine in zip(module.buffers(), own, strict=True):
            buffer.copy_(mine)

    broadcast = ddp.broadcast_module
    for module in (ddp, zero):
        patch.setattr(module, "broadcast_module", without_buffers)


def clipped_before_the_sum(patch):
    """Each rank clips what it has, and only then are gradients reduced."""

    def finish(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.ddp.finish_gradient_sync()

    patch.setattr(Reducer, "_hook", lambda self, bucket, i: lambda parameter: None)
    patch.setattr(DDPExecutor, "_finish", finish)
    patch.setattr(Executor, "clip_grad_norm_", lambda self, max_norm: self.grad_norm())


# -- wrong where the optimizer is sharded -------------------------------------------------------------------


BOTH, DDP_ONLY, ZERO_ONLY = ("ddp", "zero1"), ("ddp",), ("zero1",)
VARIANTS = {
    "nothing is reduced": (nothing_is_reduced, DDP_ONLY, {}),
    "the divisor is 2": (partial(scaled_by, lambda num_ranks: 1 / 2), BOTH, {"average": True}),
    "averaged twice": (partial(scaled_by, lambda num_ranks: num_ranks**-2), BOTH, {"average": True}),
    "the factor W is missing": (partial(scaled_by, lambda num_ranks: 1), BOTH, {"average": True}),
    "buckets leave as they fill": (in_order_of_arrival, BOTH, {}),
    "buffers are not broadcast": (buffers_stay_apart, BOTH, {}),
    "clipped before the sum": (clipped_before_the_sum, DDP_ONLY, {"average": True, "max_norm": 0.3}),
    "a lone tensor is not copied": (buffer_is_the_gradient_of_a_lone_tensor, DDP_ONLY, {}),
    "the rate does not arrive": (rates_do_not_arrive, ZERO_ONLY, {}),
    "a shard is never stepped": (a_shard_is_forgotten, ZERO_ONLY, {}),
}


@pytest.mark.parametrize("mode, name", [(mode, name) for name, (_, modes, _) in VARIANTS.items() for mode in modes])
def test_a_wrong_variant_is_caught(monkeypatch, mode, name):
    variant, _, settings = VARIANTS[name]
    with monkeypatch.context() as patch:
        variant(patch)
        made = check(mode, **settings)
    with pytest.raises(AssertionError):
        made()
