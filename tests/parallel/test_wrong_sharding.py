"""Deliberately wrong versions of the modes that shard gradients and weights: equality with one process catches each."""

from functools import partial

import pytest
import torch
from support import run_ranks
from test_modes import check_equals_one_process
from torch import nn

from pellucid.parallel import comm, create_executor, ddp, fsdp, zero, zero2
from pellucid.parallel.fsdp import FSDP
from pellucid.parallel.fsdp_unit import ShardedParameter, Unit
from pellucid.parallel.parts import WholeTensors
from pellucid.parallel.rows import RowExecutor
from pellucid.train.ranks import gather_json

SIZE, STEPS, MICRO_BATCHES, ROWS = 3, 4, 2, 12
MODES = ("zero2", "zero3", "fsdp2")


class Net(nn.Module):
    """Tied ends, layers of one shape, rows that three ranks cannot share evenly, vectors that stay whole in zero3."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(20, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.head = nn.Linear(10, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        h = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            h = h + torch.tanh(layer(h)) * (1 + i)
        return self.head(h)


def batch(step):
    return torch.randint(0, 20, (ROWS, 3), generator=torch.Generator().manual_seed(step))


def optimizer_of(name, model):
    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name](model.parameters(), lr=0.05)


def one_process(optimizer, max_norm):
    """The training that every mode must equal, in plain torch."""
    model, steps = Net(seed=0).double(), []
    stepper = optimizer_of(optimizer, model)
    for step in range(STEPS):
        loss = model(batch(step)).square().sum() / ROWS
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
        stepper.step()
        stepper.zero_grad()
        steps.append([loss.item(), norm.item(), 0.05])
    return {"weights": {name: p.tolist() for name, p in model.named_parameters()}, "steps": steps}


def prepared(mode, average, optimizer, seed):
    model = Net(seed).double()
    executor = create_executor(mode, MICRO_BATCHES, average=average)
    wrapped, stepper, *_ = executor.prepare(model, optimizer_of(optimizer, model))
    return executor, wrapped, stepper


def everybodys(tables):
    """What all ranks' parts are together, for a new executor to read."""
    mine = [(part.name, list(part.shape), part.start, part.tensor.flatten().tolist()) for part in tables]
    whole = {}
    for name, shape, start, values in (row for rows in gather_json(mine, tag="test/state") for row in rows):
        flat = whole.setdefault(name, torch.zeros(torch.Size(shape), dtype=torch.float64)).view(-1)
        flat[start : start + len(values)] = torch.tensor(values, dtype=torch.float64)
    return {n: t.float() if n.endswith("/step") else t for n, t in whole.items()}


def rank(mode, average, optimizer, max_norm):
    """The same on this rank's rows, in micro-batches; half-way a new executor goes on from weights and state."""
    me, steps = comm.rank(), []
    executor, wrapped, stepper = prepared(mode, average, optimizer, seed=me)
    for step in range(STEPS):
        if step == STEPS // 2:
            state = WholeTensors(everybodys(list(executor.optimizer_parts())))
            weights = {n: w.tolist() if w is not None else None for n, w in executor.weights()}
            first = gather_json(weights, tag="test/weights")[0]
            executor, wrapped, stepper = prepared(mode, average, optimizer, seed=7)
            executor.load_weights(WholeTensors({n: torch.tensor(v, dtype=torch.float64) for n, v in first.items()}))
            executor.load_optimizer_state(state)
        total = 0.0
        for rows in batch(step).chunk(SIZE)[me].chunk(MICRO_BATCHES):
            with executor.accumulate(wrapped):
                loss = wrapped(rows).square().sum()
                executor.backward(loss / len(rows) / MICRO_BATCHES if average else loss / ROWS)
            total += loss.item() / ROWS
        executor.finish_grads()
        norm = executor.grad_norm() if max_norm is None else executor.clip_grad_norm_(max_norm)
        stepper.step()
        steps.append([comm.all_reduce(total, tag="loss"), norm, 0.05])
    return {"weights": {n: None if w is None else w.tolist() for n, w in executor.weights()}, "steps": steps}


def check(mode, average=False, optimizer="sgd", max_norm=None):
    """Returns a check to be made: ranks have run, and are compared with one process when it is called."""
    ranks = run_ranks(lambda: rank(mode, average, optimizer, max_norm), SIZE)
    return partial(check_equals_one_process, ranks, one_process(optimizer, max_norm))


@pytest.mark.parametrize("optimizer, max_norm", [("sgd", None), ("sgd", 0.3), ("adamw", 0.3)])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_modes_as_they_are_pass(mode, average, optimizer, max_norm):
    norms = [norm for _, norm, _ in one_process(optimizer, max_norm)["steps"]]
    assert max_norm is None or max(norms) > 2 * max_norm, "clipping must act"
    check(mode, average, optimizer, max_norm)()


def stale_weights(patch):
    """Gathered once and kept: the optimizer's step is not seen."""

    def keep(self, *, stand_in):
        for p in self.sharded:
            p.put(p.stand_in if stand_in else p.parameter)

    patch.setattr(Unit, "release", keep)
    patch.setattr(Unit, "refuse_changed", lambda self, when: None)  # it would say so


def scaled_by(factor, patch):
    for module in (ddp, zero, fsdp):
        patch.setattr(module, "scale_for_average", lambda flat, num_ranks: flat.mul_(factor(num_ranks)))


def a_shard_is_reduced_twice(patch):
    add, take = ShardedParameter.add_gradient, zero2.ScratchBucket.take

    def twice(self, section):
        add(self, section.clone())
        add(self, section)

    def take_twice(self):
        own = self.own.clone()
        take(self)
        self.shard.add_(own)

    patch.setattr(ShardedParameter, "add_gradient", twice)
    patch.setattr(zero2.ScratchBucket, "take", take_twice)


def only_the_last_micro_batch_counts(patch):
    def last(self, section):
        self.parameter.grad = section.view(self.num_rows, *self.shape[1:])[: self.last - self.first]

    def take(self):
        self.shard.copy_(self.own)
        self.holds_sum = True
        self.close()

    patch.setattr(ShardedParameter, "add_gradient", last)
    patch.setattr(zero2.ScratchBucket, "take", take)


def tied_weights_count_twice_in_the_norm(patch):
    own_rows = RowExecutor._own_rows

    def twice(self):
        for row in own_rows(self):
            yield row
            if row.name == "embed.weight":
                yield row

    patch.setattr(RowExecutor, "_own_rows", twice)


def vectors_count_on_every_rank_in_the_norm(patch):
    patch.setattr(RowExecutor, "_own_rows", lambda self: iter(self.rows))


def padding_counts_in_the_norm(patch):
    """What pads the last ranks' sections is not cleared, and the norm is taken of whole sections."""
    take, add = ShardedParameter.take_gradient, ShardedParameter.add_gradient
    sections = {}

    def dirty(self):
        flat = take(self)
        rows = flat.view(self.padded.shape)
        rows[self.shape[0] :] = 1.0
        return flat

    def keep(self, section):
        sections[self.name] = section.clone() + sections.get(self.name, 0)
        add(self, section)

    def norm(self):
        self.finish_grads()
        mine = sum(float(s.square().sum()) for s in sections.values())
        mine += sum(float(r.weight.grad.square().sum()) for r in self.rows if r.replicated and comm.rank() == 0)
        sections.clear()
        return comm.all_reduce(mine, tag="grad_norm") ** 0.5

    patch.setattr(ShardedParameter, "take_gradient", dirty)
    patch.setattr(ShardedParameter, "add_gradient", keep)
    patch.setattr(RowExecutor, "grad_norm", norm)


def moments_of_another_parameter(patch):
    """The layers' states are loaded one further: shapes fit."""
    read = WholeTensors.read

    def other(self, name, start=0, stop=None):
        if name.startswith("layers.") and "/" in name:
            name = name.replace(name[:8], f"layers.{(int(name[7]) + 1) % 3}")
        return read(self, name, start, stop)

    patch.setattr(WholeTensors, "read", other)


def moments_from_another_place(patch):
    """Each rank reads the first rows."""
    read = WholeTensors.read

    def first(self, name, start=0, stop=None):
        if not name.endswith(("/exp_avg", "/exp_avg_sq")) or stop is None:
            return read(self, name, start, stop)
        return read(self, name, 0, stop - start)

    patch.setattr(WholeTensors, "read", first)


def a_unit_is_never_sent(patch):
    reduce = FSDP._reduce
    patch.setattr(FSDP, "_reduce", lambda self, unit: None if unit.path == "layers.1" else reduce(self, unit))


ADAMW = {"optimizer": "adamw", "max_norm": 0.3}
VARIANTS = {
    "stale weights": (stale_weights, ("zero3",), {}),
    "the divisor is 2": (partial(scaled_by, lambda num_ranks: 1 / 2), ("zero2", "zero3"), {"average": True}),
    "the factor W is missing": (partial(scaled_by, lambda num_ranks: 1), ("zero2", "zero3"), {"average": True}),
    "a shard is reduced twice": (a_shard_is_reduced_twice, ("zero2", "zero3"), {}),
    "only the last micro-batch counts": (only_the_last_micro_batch_counts, ("zero2", "zero3"), {}),
    "tied weights count twice in the norm": (tied_weights_count_twice_in_the_norm, ("zero3", "fsdp2"), {}),
    "vectors count on every rank in the norm": (vectors_count_on_every_rank_in_the_norm, ("zero3",), {}),
    "padding counts in the norm": (padding_counts_in_the_norm, ("zero3",), {}),
    "moments of another parameter": (moments_of_another_parameter, MODES, ADAMW),
    "moments from another place": (moments_from_another_place, MODES, ADAMW),
    "a unit is never sent": (a_unit_is_never_sent, ("zero3",), {}),
}


@pytest.mark.parametrize("mode, name", [(mode, name) for name, (_, modes, _) in VARIANTS.items() for mode in modes])
def test_a_wrong_variant_is_caught(monkeypatch, mode, name):
    variant, _, settings = VARIANTS[name]
    with monkeypatch.context() as patch:
        variant(patch)
        made = check(mode, **settings)
    with pytest.raises(AssertionError):
        made()
