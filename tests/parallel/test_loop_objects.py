"""Executors in training loops of one's own: what is prepared behaves as torch's own objects do in one process."""

import logging
from dataclasses import dataclass

import pytest
import torch
from support import run_ranks, whole_weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pellucid.errors import ConfigError
from pellucid.parallel import OptimizerProtocol, SchedulerProtocol, comm, create_executor
from pellucid.parallel.loop_objects import EndTogether, PreparedOptimizer

MODES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp")


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    fit("none", 4, epochs=1)


def dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 6, generator=generator), torch.randn(24, 3, generator=generator))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 31), nn.Tanh(), nn.Linear(31, 3))


@dataclass
class Objects:
    executor: object
    bare: nn.Module
    model: nn.Module
    optimizer: object
    loader: object
    scheduler: object


def objects(mode, batch_size, accumulation, lr=0.05):
    """A loop's objects as a person would make them, prepared."""
    bare = network()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    executor = create_executor(mode, grad_accum_steps=accumulation)
    loader = DataLoader(dataset(), batch_size=batch_size)
    return Objects(executor, bare, *executor.prepare(bare, optimizer, loader, scheduler))


def fit(mode, batch_size, *, accumulation=2, epochs=2):
    """A whole loop; every call stands where it does in one process without accumulation."""
    o = objects(mode, batch_size, accumulation)
    synced, rates = [], []
    for _ in range(epochs):
        for x, y in o.loader:
            with o.executor.accumulate(o.model):
                loss = (o.model(x) - y).square().mean() / accumulation
                o.executor.backward(loss)
                o.optimizer.step()
                o.scheduler.step()
                o.optimizer.zero_grad()
            synced.append(o.executor.sync_gradients)
            rates.append(o.scheduler.get_last_lr()[0])
    return {"weights": whole_weights(o.executor), "synced": synced, "rates": rates}


def plain(batch_size, *, accumulation=2, epochs=2):
    """The same training with torch alone."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    for _ in range(epochs):
        for number, (x, y) in enumerate(DataLoader(dataset(), batch_size=batch_size), 1):
            ((model(x) - y).square().mean() / accumulation).backward()
            if number % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def check_equal(got, expected):
    for values, parameter in zip(got["weights"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(values), parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size, batch_size", [(2, 3), (3, 2)])
def test_a_loop_of_ones_own_averages_over_ranks_and_equals_one_process(mode, size, batch_size):
    ranks = run_ranks(lambda: fit(mode, batch_size), size)
    assert all(other == ranks[0] for other in ranks)
    check_equal(ranks[0], plain(size * batch_size))
    assert ranks[0]["synced"] == [False, True] * 4
    assert ranks[0]["rates"] == pytest.approx([0.05 * 0.8 ** ((i + 1) // 2) for i in range(8)])


def test_in_one_process_too():
    got = fit("none", 6)
    check_equal(got, plain(6))
    assert got["synced"] == [False, True] * 4


@pytest.mark.parametrize("mode", MODES)
def test_inside_a_window_nothing_steps_and_gradients_stay(mode):
    def rank():
        o = objects(mode, 2, accumulation=3)
        batches = iter(o.loader)
        start = [p.detach().clone() for p in o.bare.parameters()]
        seen = []
        for _ in range(3):
            x, y = next(batches)
            with o.executor.accumulate(o.model):
                o.executor.backward((o.model(x) - y).square().mean() / 3)
                if mode not in ("zero2", "zero3"):  # there they are on their way to their owners
                    before = [p.grad for p in o.bare.parameters()]
                    o.optimizer.zero_grad()
                    kept = all(p.grad is not None for p in o.bare.parameters())
                    assert kept == (not o.executor.sync_gradients)
                    for parameter, grad in zip(o.bare.parameters(), before, strict=True):
                        parameter.grad = grad
                o.optimizer.step()
                o.scheduler.step()
            moved = any(not torch.equal(a, b) for a, b in zip(start, o.bare.parameters(), strict=True))
            seen.append([moved, o.scheduler.get_last_lr()[0]])
        return seen

    for seen in run_ranks(rank, 2):
        assert seen == [[False, 0.05], [False, 0.05], [True, pytest.approx(0.04)]]


@pytest.mark.parametrize("mode", MODES)
def test_whoever_says_which_micro_batch_is_the_last_decides(mode):
    """A window cut short at the end of an epoch is stepped."""

    def rank():
        o = objects(mode, 4, accumulation=5)
        batches = list(o.loader)
        with comm.record() as ledger:
            for i, (x, y) in enumerate(batches):
                with o.executor.accumulate(o.model, last=i == len(batches) - 1):
                    o.executor.backward((o.model(x) - y).square().mean() / len(batches))
                o.optimizer.step()
        reduced = sum(event.tag.startswith("grad/") for event in ledger.events)
        return [reduced, whole_weights(o.executor)]

    (reduced, first), (_, second) = run_ranks(rank, 2)
    each_micro_batch = {"zero2": 3, "zero3": 3 * 2 + 1, "fsdp2": 3 * 2}  # two layers, and vectors at the end
    assert reduced == each_micro_batch.get(mode, 1) and first == second
    check_equal({"weights": first}, plain(8, accumulation=3, epochs=1))


@pytest.mark.parametrize("mode", MODES)
def test_the_norm_and_clipping_are_those_of_torch_on_the_whole_batch(mode):
    def rank():
        o = objects(mode, 12, accumulation=1)
        ((x, y),) = list(o.loader)
        with o.executor.accumulate(o.model):
            o.executor.backward((o.model(x) - y).square().mean())
        norm = o.executor.clip_grad_norm_(0.1)
        o.executor.finish_grads()  # once more: nothing
        return [
            norm,
            o.executor.grad_norm(),
            {g.name: [g.start, g.tensor.flatten().tolist()] for g in o.executor.gradients()},
        ]

    first, second = run_ranks(rank, 2)
    model, (x, y) = network(), dataset().tensors
    (model(x) - y).square().mean().backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert expected > 0.2 and first[0] == second[0] == pytest.approx(expected, rel=1e-6)
    assert first[1] == second[1] == pytest.approx(0.1, rel=1e-4)
    for name, parameter in model.named_parameters():
        parts = [rank[2][name] for rank in (first, second) if name in rank[2]]
        whole = [0.0] * parameter.numel()
        for start, values in parts:  # whole ones are the same on both ranks
            whole[start : start + len(values)] = values
        torch.testing.assert_close(torch.tensor(whole), parameter.grad.flatten(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["none", *MODES])
def test_what_is_prepared_is_what_loops_expect(mode):
    def rank():
        o = objects(mode, 2, accumulation=1)
        assert o.executor.unwrap_model(o.model) is o.bare and o.executor.unwrap_model(o.bare) is o.bare
        assert isinstance(o.optimizer, OptimizerProtocol) and isinstance(o.optimizer, torch.optim.Optimizer)
        assert isinstance(o.scheduler, SchedulerProtocol)
        assert o.executor.use_distributed == (mode != "none") and o.executor.grad_accum_steps == 1
        assert list(o.bare.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        again = torch.optim.lr_scheduler.LambdaLR(o.optimizer, lambda step: 0.5)  # made of the prepared one
        assert o.optimizer.param_groups[0]["lr"] == again.get_last_lr()[0] == pytest.approx(0.025)
        o.optimizer.step()
        state = o.scheduler.state_dict()
        o.scheduler.step()
        o.scheduler.load_state_dict(state)
        assert o.scheduler.get_last_lr() == state["_last_lr"]
        o.optimizer.load_state_dict(o.optimizer.state_dict())
        with pytest.raises(ConfigError, match="set_to_none=False"):
            o.optimizer.zero_grad(set_to_none=False)
        return True

    assert [rank()] == [True] if mode == "none" else run_ranks(rank, 2) == [True, True]


def test_only_what_is_given_comes_back():
    model = network()
    assert create_executor("none").prepare(model) == (model, None, None, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = create_executor("none").prepare(model, optimizer)[1]
    assert isinstance(wrapped, PreparedOptimizer) and wrapped.defaults is optimizer.defaults
    with pytest.raises(ConfigError, match="grad_accum_steps must be at least 1, got 0"):
        create_executor("none", 0)


# -- loaders ------------------------------------------------------------------------------------------------


def prepared_loader(loader):
    model = network()
    return create_executor("ddp").prepare(model, None, loader)[2]


@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_are_equal_and_cover_every_sample_for_every_length(shuffle):
    def rank():
        found = {}
        for length in range(1, 14):
            loader = prepared_loader(DataLoader(list(range(length)), batch_size=2, shuffle=shuffle))
            orders = []
            for epoch in range(2):
                loader.sampler.set_epoch(epoch)
                orders.append([batch.tolist() for batch in loader])
            found[length] = orders
        return found

    ranks = run_ranks(rank, 3)
    for length in range(1, 14):
        for epoch in range(2):
            shares = [rank[str(length)][epoch] for rank in ranks]
            assert len({tuple(map(len, share)) for share in shares}) == 1, (
                "the same number of batches of the same sizes"
            )
            assert {i for share in shares for batch in share for i in batch} == set(range(length))
        assert (ranks[0][str(length)][0] != ranks[0][str(length)][1]) == shuffle or length < 8


def test_a_loaders_own_settings_stay():
    def collate(batch):
        return sum(batch)

    def rank():
        loader = DataLoader(
            list(range(16)), batch_size=3, drop_last=True, collate_fn=collate, num_workers=1, prefetch_factor=5, timeout=30,
        )  # fmt: skip
        mine = prepared_loader(loader)
        kept = (
            "batch_size",
            "drop_last",
            "collate_fn",
            "num_workers",
            "prefetch_factor",
            "timeout",
            "persistent_workers",
        )
        return [name for name in kept if getattr(mine, name) != getattr(loader, name)], len(mine)

    assert run_ranks(rank, 2) == [[[], 2]] * 2


class Numbers(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def a_list(length):
    return list(range(length))


def a_generator(length):
    return (i for i in range(length))


def a_stream(length):
    return DataLoader(Numbers(length), batch_size=None)


class Hears(logging.Handler):
    def __init__(self, into):
        super().__init__()
        self.into = into

    def emit(self, record):
        self.into.append(record.getMessage())


@pytest.mark.parametrize("build", [a_list, a_generator, a_stream])
@pytest.mark.parametrize("lengths", [[3, 5, 4], [2, 2, 2], [0, 3, 1], [4, 2, 2]])
def test_ranks_with_unequal_numbers_of_batches_end_together(build, lengths):
    """Nobody waits for a rank that is done: an average in each round shows it."""

    def rank():
        heard = []
        logging.getLogger("pellucid").addHandler(Hears(heard))
        loader = prepared_loader(build(lengths[comm.rank()]))
        assert isinstance(loader, EndTogether)
        taken = [(int(batch), comm.all_reduce(1.0, tag="round")) for batch in loader]
        return [taken, heard]

    shortest = min(lengths)
    warned = (
        [] if len(set(lengths)) == 1 else ["ranks have unequal numbers of batches; this epoch ends with the shortest"]
    )
    for taken, heard in run_ranks(rank, 3, timeout=30):
        assert taken == [[i, 3.0] for i in range(shortest)]
        assert heard == warned


def test_a_loader_that_is_distributed_already_and_one_process_keep_their_own():
    def rank():
        numbers = list(range(8))
        sampler = torch.utils.data.DistributedSampler(numbers, shuffle=False)
        loader = DataLoader(numbers, sampler=sampler)
        return prepared_loader(loader) is loader

    assert run_ranks(rank, 2) == [True, True]
    loader = DataLoader(list(range(8)))
    assert prepared_loader(loader) is loader


def test_the_length_of_ones_own_batches_is_known_where_they_have_one():
    assert len(EndTogether([1, 2])) == 2
    for unsized in (a_generator(3), a_stream(3)):
        with pytest.raises(TypeError):
            len(EndTogether(unsized))
