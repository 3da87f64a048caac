"""FSDP around modules that know nothing of it: rows of weights, gathered while a unit computes, freed otherwise."""

import copy
import gc
import pickle
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from nets import Net
from support import run_ranks, tiny_config, whole_weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from pellucid import FSDP
from pellucid.errors import ConfigError, TrainingError
from pellucid.model import Transformer
from pellucid.parallel import DDP, ShardedOptimizer, comm, create_executor, fsdp
from pellucid.parallel.layout import parameter_infos, row_range, units_of
from pellucid.parallel.plan import plan

torch.optim.AdamW([nn.Parameter(torch.zeros(2))]).step()


def stack(tied=True):
    """19 words of 10 numbers through layers of odd sizes; the head may be the embedding. 3 units and a root."""
    torch.manual_seed(0)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(19, 10)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 10, bias=i != 1)) for i in range(3)
            )
            self.head = nn.Linear(10, 19, bias=False)
            if tied:
                self.head.weight = self.embed.weight
            self.order = [0, 1, 2]
            self.recompute = False

        def forward(self, x):
            h = self.embed(x)
            for i in self.order:
                layer = self.layers[i]
                h = h + (checkpoint(layer, h, use_reentrant=False) if self.recompute else layer(h))
            return self.head(h)

    return Stack()


def data(step):
    return torch.randint(0, 19, (12, 5), generator=torch.Generator().manual_seed(step))


def mine(batch):
    size = len(batch) // comm.world_size()
    return batch[comm.rank() * size :][:size]


def train(model, wrapped, steps=3, optimizer=torch.optim.SGD, lr=0.5, micro=1):
    """Losses of this rank. Plain gradients, so that a wrong factor shows."""
    inner = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        for part in mine(data(step)).chunk(micro):
            loss = F.cross_entropy(wrapped(part).flatten(0, 1), part.flatten()) / micro
            loss.backward()
            losses.append(loss.item())
            if wrapped is not model:
                wrapped.finish_gradient_sync()
        inner.step()
        inner.zero_grad()
    return losses


def whole(wrapped):
    return {name: tensor.tolist() for name, tensor in wrapped.gather_full_params().items()}


def assert_equal(ranks, model, rtol=2e-6):
    for rank in ranks:
        assert set(rank) == set(dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.tensor(rank[name]), parameter.detach(), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_plain_sgd_steps_equal_one_process(size, tied):
    def rank():
        model = stack(tied)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(comm.rank())  # the first rank's weights are everybody's
        wrapped = FSDP(model)
        train(model, wrapped)
        return whole(wrapped)

    alone = stack(tied)
    before = [p.detach().clone() for p in alone.parameters()]
    train(alone, alone)
    assert all((p - b).norm() > 1e-3 for p, b in zip(alone.parameters(), before, strict=True))
    assert_equal(run_ranks(rank, size), alone)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_holds_its_rows_and_nothing_else_between_steps(size):
    def rank():
        model = stack()
        names = [name for name, _ in model.named_parameters()]
        shapes = {name: p.shape for name, p in model.named_parameters()}
        wrapped = FSDP(model)
        train(model, wrapped, optimizer=torch.optim.AdamW, lr=0.01)
        assert [name for name, _ in wrapped.module.named_parameters()] == names
        for name, parameter in model.named_parameters():
            first, last = row_range(shapes[name][0], comm.rank(), comm.world_size())
            rows = shapes[name][0] if parameter.ndim < 2 else last - first
            assert parameter.shape == (rows, *shapes[name][1:]), name
        gc.collect()
        held = {
            id(o.untyped_storage()): o.untyped_storage().nbytes() for o in gc.get_objects() if type(o) is torch.Tensor
        }
        assert all(p.padded.untyped_storage().nbytes() == 0 for p in wrapped.sharded)
        assert len(held) > 0
        return sum(p.numel() for p in model.parameters() if p.ndim > 1)

    held = run_ranks(rank, size)
    assert sum(held) == sum(p.numel() for p in stack().parameters() if p.ndim > 1)


def test_whole_weights_of_a_layer_are_there_only_while_it_computes():
    def rank():
        model = stack()
        wrapped = FSDP(model)
        seen = []

        def there(name, when):
            sizes = {u.path: any(p.padded.untyped_storage().nbytes() for p in u.sharded) for u in wrapped.units}
            seen.append([when, name, [path for path, whole in sizes.items() if whole]])

        for i, layer in enumerate(model.layers):
            layer[1].register_forward_hook(lambda *_, i=i: there(i, "forward"))
            layer[1].register_full_backward_hook(lambda *_, i=i: there(i, "backward"))
        for _ in range(2):
            seen.clear()
            train(model, wrapped, steps=1)
        return seen

    expected = [
        ["forward", 0, ["root", "layers.0", "layers.1"]],
        ["forward", 1, ["root", "layers.1", "layers.2"]],
        ["forward", 2, ["root", "layers.2"]],
        ["backward", 2, ["root", "layers.1", "layers.2"]],
        ["backward", 1, ["root", "layers.0", "layers.1"]],
        ["backward", 0, ["root", "layers.0"]],
    ]
    assert run_ranks(rank, 2) == [expected, expected], "one layer, and the next one ahead"


def test_kept_gathered_from_forward_to_backward_a_third_less_is_sent_and_the_steps_are_the_same():
    def rank():
        model = stack()
        wrapped = FSDP(model, reshard_after_forward=False)
        train(model, wrapped)
        with comm.record() as ledger:
            train(model, wrapped, steps=1)
        there = [p.padded.untyped_storage().nbytes() for p in wrapped.sharded]
        with torch.no_grad():
            wrapped(data(0))
        there += [p.padded.untyped_storage().nbytes() for p in wrapped.sharded]
        return [whole(wrapped), [e.tag for e in ledger.events if e.op == "all_gather"], there]

    alone = stack()
    train(alone, alone)
    train(alone, alone, steps=1)
    ranks = run_ranks(rank, 3)
    assert_equal([weights for weights, *_ in ranks], alone)
    assert ranks[0][1] == ["param/root/forward", *(f"param/layers.{i}/forward" for i in range(3))]
    assert not any(ranks[0][2]), "free after a step, and after evaluation"


def test_the_next_unit_is_asked_for_before_the_one_at_hand_has_computed():
    """By launches: from the second step on a layer's gather is issued when the layer before it begins."""

    def rank():
        model = stack()
        wrapped = FSDP(model)
        log = []
        for i, layer in enumerate(model.layers):
            layer[1].register_forward_hook(lambda *_, i=i: log.append(f"forward {i}"))
            layer[1].register_full_backward_hook(lambda *_, i=i: log.append(f"backward {i}"))
        start = fsdp.Unit.start

        def noted(self, phase):
            if not self.gathered and self._pending is None:
                log.append(f"gather {self.path} {phase}")
            start(self, phase)

        fsdp.Unit.start = noted
        try:
            train(model, wrapped, steps=1)
            first, log[:] = list(log), []
            train(model, wrapped, steps=1)
        finally:
            fsdp.Unit.start = start
        return [first, log]

    first, second = run_ranks(rank, 2)[0]
    assert first.index("forward 0") < first.index("gather layers.1 forward")
    assert second == [
        "gather root forward", "gather layers.0 forward", "gather layers.1 forward", "forward 0", "gather layers.2 forward",
        "forward 1", "forward 2", "gather layers.2 backward", "gather layers.1 backward", "backward 2",
        "gather layers.0 backward", "backward 1", "backward 0",
    ]  # fmt: skip


def test_another_order_of_layers_falls_back_is_counted_and_is_right():
    def rank():
        model = stack()
        wrapped = FSDP(model)
        changes = []
        for order in ([0, 1, 2], [0, 1, 2], [2, 0, 1], [2, 0, 1], [1], [0, 1, 2, 0]):
            model.order = order
            train(model, wrapped, steps=1)
            changes.append([wrapped.forward_order.num_changes, wrapped.backward_order.num_changes])
        return [changes, whole(wrapped)]

    alone = stack()
    for order in ([0, 1, 2], [0, 1, 2], [2, 0, 1], [2, 0, 1], [1], [0, 1, 2, 0]):
        alone.order = order
        train(alone, alone, steps=1)
    ranks = run_ranks(rank, 2)
    assert ranks[0][0] == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 1], [3, 3]], "a short pass is known when the next begins"
    assert_equal([weights for _, weights in ranks], alone)


@pytest.mark.parametrize("size", [2, 3])
def test_activation_checkpointing_changes_nothing(size):
    def rank():
        model = stack()
        model.recompute = True
        wrapped = FSDP(model)
        train(model, wrapped, steps=4)
        with comm.record() as ledger:
            train(model, wrapped, steps=1)
        return [whole(wrapped), [event.tag for event in ledger.events]]

    alone = stack()
    train(alone, alone, steps=4)
    train(alone, alone, steps=1)
    ranks = run_ranks(rank, size)
    assert_equal([weights for weights, _ in ranks], alone)
    assert sum(tag.startswith("param/") for tag in ranks[0][1]) == 7, "recomputing gathers nothing a second time"


def test_frozen_layers_are_sharded_too_and_needed_until_the_gradient_has_passed_them():
    """The frozen matrix of a layer is used in backward after the gradient of the trained one is complete."""

    def make():
        model = stack(tied=False)
        for layer in model.layers:
            layer[0].weight.requires_grad_(False)
        model.embed.weight.requires_grad_(False)
        return model

    def rank():
        model = make()
        wrapped = FSDP(model)
        train(model, wrapped)
        with comm.record() as ledger:
            train(model, wrapped, steps=1)
        sent = {name for e in ledger.events if e.tag.startswith("grad/") for name in e.owner}
        return [whole(wrapped), sorted(sent), model.layers[0][0].weight.shape[0]]

    alone = make()
    train(alone, alone)
    train(alone, alone, steps=1)
    ranks = run_ranks(rank, 3)
    assert_equal([weights for weights, *_ in ranks], alone)
    assert ranks[0][1] == sorted(name for name, p in alone.named_parameters() if p.requires_grad)
    assert [rows for *_, rows in ranks] == [3, 3, 1]


def test_a_model_of_one_unit_with_numbers_and_seldom_used_parameters():
    def run(wrapped, model, all_of_it):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=0.5)
        for step in range(3):
            x = torch.randn(12, 19, generator=torch.Generator().manual_seed(step))
            wrapped(mine(x), all_of_it).square().mean().backward()
            if wrapped is not model:
                wrapped.finish_gradient_sync()
            optimizer.step()
            optimizer.zero_grad()

    def rank():
        model = Net()
        wrapped = FSDP(model)
        run(wrapped, model, True)
        run(wrapped, model, comm.rank() == 1)  # missing on some ranks it counts as zero
        run(wrapped, model, False)  # missing everywhere it stays None, and nothing decays it
        return whole(wrapped)

    class Half(Net):
        """What one process sees where every second row reaches ``seldom``."""

        share = 1.0

        def forward(self, x, all_of_it=True):
            y = super().forward(x, False)
            if not all_of_it:
                return y
            rows = torch.zeros(len(x), 1)
            rows[int(len(x) * (1 - self.share)) :] = 1
            return y + rows * self.seldom.sum()

    alone = Half()
    run(alone, alone, True)
    alone.share = 0.5
    run(alone, alone, True)
    run(alone, alone, False)
    assert_equal(run_ranks(rank, 2), alone, rtol=1e-5)


def test_gradients_accumulate_without_sync_and_with_it():
    def gradients(model):
        return {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None}

    def rank():
        results, sent = [], []
        for sync_each in (True, False):
            model = stack()
            wrapped = FSDP(model)
            batches = mine(data(0)).chunk(3)
            with comm.record() as ledger:
                for i, part in enumerate(batches):
                    with nullcontext() if sync_each or i == 2 else wrapped.no_sync():
                        (F.cross_entropy(wrapped(part).flatten(0, 1), part.flatten()) / 3).backward()
                    if sync_each:
                        wrapped.finish_gradient_sync()
                    elif i < 2:
                        assert all(p.grad is None for p in model.parameters() if p.ndim > 1), "whole, not in rows"
                wrapped.finish_gradient_sync()  # where it was called before it does nothing
            sent.append(sum(event.op == "reduce_scatter" for event in ledger.events))
            results.append(gradients(model))
        return [results, sent]

    for results, sent in run_ranks(rank, 2):
        assert sent == [12, 4], "three times, and once"
        assert len(results[0]) == len(dict(stack().named_parameters()))
        for name, value in results[0].items():
            torch.testing.assert_close(torch.tensor(results[1][name]), torch.tensor(value), rtol=1e-5, atol=1e-7)
            assert torch.tensor(value).abs().sum() > 0


def test_two_forwards_before_one_backward_and_two_backwards():
    """As preference losses do: a pair through the model, then one loss; weights are gathered for each."""

    def run(wrapped, model, joint):
        a, b = mine(data(0)), mine(data(1))
        losses = [F.cross_entropy(wrapped(x).flatten(0, 1), x.flatten()) for x in (a, b)]
        if joint:
            (losses[0] - 0.3 * losses[1]).backward()
        else:
            losses[0].backward()
            (-0.3 * losses[1]).backward()
        if wrapped is not model:
            wrapped.finish_gradient_sync()

    def rank():
        model = stack()
        wrapped = FSDP(model)
        run(wrapped, model, True)
        for p in model.parameters():
            p.data.copy_(p.grad)
        return whole(wrapped)

    alone = stack()
    run(alone, alone, True)
    for p in alone.parameters():
        p.data.copy_(p.grad)
    assert_equal(run_ranks(rank, 2), alone, rtol=1e-5)


def test_a_weight_that_is_touched_outside_its_module_is_named():
    class Peeks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x):
            assert self.layers[1].weight.shape == (6, 6) and self.layers[1].weight.dtype == torch.float32
            return F.linear(self.layers[0](x), self.layers[1].weight)

    def rank():
        model = Peeks()
        wrapped = FSDP(model)
        with pytest.raises(TrainingError, match=r"layers\.1\.weight is first touched outside the forward of a module"):
            wrapped(torch.ones(2, 6))
        model.forward = lambda x: model.layers[1](model.layers[0](x))
        wrapped(torch.ones(2, 6)).sum().backward()  # the error has left nothing behind
        wrapped.finish_gradient_sync()
        return [list(p.shape) for p in model.parameters()]

    assert run_ranks(rank, 2)[0] == [[3, 6], [6], [3, 6], [6]]


def test_computing_in_bfloat16_keeps_float32_rows_and_gradients():
    def rank():
        model = stack()
        wrapped = FSDP(model, torch.bfloat16)
        kinds = []
        model.layers[0][1].register_forward_hook(lambda m, args, out: kinds.append(str(args[0].dtype)))
        model.embed.register_forward_hook(lambda m, args, out: kinds.append(str(out.dtype)))
        x = mine(data(0))
        with comm.record() as ledger:
            F.cross_entropy(wrapped(x).float().flatten(0, 1), x.flatten()).backward()
            wrapped.finish_gradient_sync()
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
        return [kinds, sorted({f"{e.op} {e.dtype}" for e in ledger.events if e.op != "all_reduce"})]

    kinds, moved = run_ranks(rank, 2)[0]
    assert kinds == ["torch.bfloat16"] * 2
    assert moved == ["all_gather bfloat16", "reduce_scatter float32"]


def test_bfloat16_gradients_are_close_to_those_of_float32():
    def rank():
        grads = []
        for dtype in (None, torch.bfloat16):
            model = Transformer(tiny_config().model, generator=torch.Generator().manual_seed(1))
            wrapped = FSDP(model, dtype)
            x = torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(comm.rank()))
            F.cross_entropy(wrapped(x).logits.float().flatten(0, 1), x.flatten()).backward()
            wrapped.finish_gradient_sync()
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        return float((grads[0] - grads[1]).norm() / grads[0].norm())

    assert all(0 < error < 0.05 for error in run_ranks(rank, 2))


def test_evaluation_gathers_and_frees_and_does_not_disturb_training():
    def rank():
        model = stack()
        wrapped = FSDP(model)
        train(model, wrapped, steps=1)
        with torch.no_grad():
            bare, through = model(data(5)), wrapped(data(5))
        assert torch.equal(bare, through)
        assert all(p.padded.untyped_storage().nbytes() == 0 for p in wrapped.sharded)
        train(model, wrapped, steps=2)
        return whole(wrapped)

    alone = stack()
    train(alone, alone, steps=1)
    train(alone, alone, steps=2)
    assert_equal(run_ranks(rank, 2), alone)


def test_misuse_is_refused():
    def rank():
        model = stack()
        wrapped = FSDP(model)
        for wrap in (FSDP, DDP):
            with pytest.raises(ConfigError, match=r"wrapped|reduced by another wrapper"):
                wrap(model)
        with pytest.raises(ConfigError, match="wrapped in FSDP already"):
            FSDP(nn.Sequential(wrapped, nn.Linear(3, 3)))
        with pytest.raises(ConfigError, match="sparse"):
            FSDP(nn.Embedding(4, 4, sparse=True))
        x = mine(data(0))
        wrapped(x).sum().backward()
        with pytest.raises(TrainingError, match="finish_gradient_sync"):
            wrapped(x)
        with pytest.raises(TrainingError, match="on the wire"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        wrapped.finish_gradient_sync()
        return True

    assert all(run_ranks(rank, 2))


def test_ranks_with_different_modules_are_told_so():
    def rank():
        model = nn.Linear(3, 4 + comm.rank())
        try:
            FSDP(model)
        except Exception as error:
            return str(error)
        return ""

    assert all("ranks hold different modules" in message and "weight" in message for message in run_ranks(rank, 2))


def test_units_are_the_elements_of_outermost_lists():
    model = Transformer(tiny_config().model, device="meta")
    paths = set(units_of(model).values())
    assert paths == {"", "model.layers.0", "model.layers.1"}
    assert units_of(model)["model.embed_tokens.weight"] == units_of(model)["model.norm.weight"] == ""
    assert units_of(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4))) == {
        "0.weight": "0", "1.weight": "1", "1.bias": "1",
    }  # fmt: skip
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)])
    assert set(units_of(nested).values()) == {"0.0", "0.1", "1"}
    assert set(units_of(stack()).values()) == {"", "layers.0", "layers.1", "layers.2"}
    shared = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3, bias=False))
    shared[1].weight = shared[0].weight
    assert units_of(shared) == {"0.weight": ""}, "of several units: the root's"


def test_one_process_is_no_special_case():
    def rank():
        model = stack()
        wrapped = FSDP(model)
        train(model, wrapped)
        return whole(wrapped)

    alone = stack()
    train(alone, alone)
    assert_equal(run_ranks(rank, 1), alone)


# -- modules and loops that do unusual things ---------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x))))


class Plain(nn.Module):
    """Three layers that are units, between ends that are the root's."""

    def __init__(self, layer=Layer):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = h + self.use(layer, h)
        return self.head(h)

    def use(self, layer, h):
        return layer(h)


X = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def loss(wrapped, x=X):
    return wrapped(x).square().mean()


def finish(wrapped):
    if isinstance(wrapped, FSDP):
        wrapped.finish_gradient_sync()


def assert_gradients_are_those_of_one_process(make, run, size=2):
    """``run(model, wrapped)`` on each rank, with the same data, and alone. Gradients are compared by writing them into weights."""

    def gradients(model):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.grad if p.grad is not None else torch.full_like(p, 7.0))

    def rank():
        model = make()
        wrapped = FSDP(model)
        run(model, wrapped)
        wrapped.finish_gradient_sync()
        gradients(model)
        return whole(wrapped)

    alone = make()
    run(alone, alone)
    gradients(alone)
    assert all(p.abs().sum() > 0 for p in alone.parameters())
    assert_equal(run_ranks(rank, size), alone, rtol=1e-5)


@dataclass(slots=True)
class Out:
    y: torch.Tensor


class InDataclass(Plain):
    class Layer(Layer):
        def forward(self, x):
            return Out(super().forward(x))

    def __init__(self):
        super().__init__(InDataclass.Layer)

    def use(self, layer, h):
        return layer(h).y

    def forward(self, x):
        return SimpleNamespace(inner=[Out(super().forward(x))])


class WritesIntoAList(Plain):
    """As layers do that collect router losses."""

    class Layer(Layer):
        def forward(self, x, losses, *, state):
            losses.append(self.a(x).square().mean())
            state["h"] = x
            return super().forward(x)

    def __init__(self):
        super().__init__(WritesIntoAList.Layer)

    def forward(self, x):
        self.losses, self.state = [], {}
        return super().forward(x) + sum(self.losses) + self.state["h"].mean()

    def use(self, layer, h):
        return layer(h, self.losses, state=self.state)


class OneDictionary(Plain):
    class Layer(Layer):
        def forward(self, inputs):
            return {"h": super().forward(inputs["h"])}

    def __init__(self):
        super().__init__(OneDictionary.Layer)

    def use(self, layer, h):
        return layer({"h": h})["h"]


class Reentrant(Plain):
    def use(self, layer, h):
        return checkpoint(layer, h, use_reentrant=True)


class KeepsItsLoss(Plain):
    def forward(self, x):
        self.loss = super().forward(x).square().mean()


def transposed():
    """Weights that are not contiguous."""
    model = Plain()
    for layer in model.layers:
        layer.a.weight = nn.Parameter(layer.a.weight.detach().t())
    model.head.weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).t())
    assert not model.head.weight.is_contiguous()
    return model


@pytest.mark.parametrize(
    "make, run",
    [
        (InDataclass, lambda model, wrapped: wrapped(X).inner[0].y.square().mean().backward()),
        (WritesIntoAList, lambda model, wrapped: loss(wrapped).backward()),
        (OneDictionary, lambda model, wrapped: loss(wrapped).backward()),
        (Reentrant, lambda model, wrapped: loss(wrapped).backward()),
        (transposed, lambda model, wrapped: loss(wrapped).backward()),
        (KeepsItsLoss, lambda model, wrapped: (wrapped(X), model.loss.backward())),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_unusual_modules_have_the_gradients_of_one_process(make, run, size):
    assert_gradients_are_those_of_one_process(make, run, size)


def test_reentrant_recomputation_frees_a_layer_before_the_next_one():
    def rank():
        model = Reentrant()
        wrapped = FSDP(model)
        seen = []

        def note(*_):
            there = [u.path for u in wrapped.units if any(p.padded.untyped_storage().nbytes() for p in u.sharded)]
            grads = [u.path for u in wrapped.units if any(p.whole.grad is not None for p in u.sharded)]
            seen.append([there, grads])

        for layer in model.layers:
            layer.a.register_full_backward_hook(note)
        for _ in range(2):
            seen.clear()
            loss(wrapped).backward()
            wrapped.finish_gradient_sync()
        return seen

    seen = run_ranks(rank, 2)[0]
    assert len(seen) == 3
    assert [len(there) for there, _ in seen] == [3, 3, 2], "the root, a layer, and the next one ahead"
    assert [grads for _, grads in seen] == [["root", f"layers.{i}"] for i in (2, 1, 0)]


def zero_grad_between(model, wrapped):
    """The order of many loops: forward, zero_grad, backward."""
    loss(wrapped).backward()
    finish(wrapped)
    now = loss(wrapped, 2 * X)
    model.zero_grad()
    now.backward()


def drop_what_no_sync_kept(model, wrapped):
    with wrapped.no_sync() if isinstance(wrapped, FSDP) else nullcontext():
        loss(wrapped).backward()
    wrapped.zero_grad()
    loss(wrapped, 2 * X).backward()


def drop_what_is_on_the_wire(model, wrapped):
    loss(wrapped).backward()
    wrapped.zero_grad()
    finish(wrapped)
    loss(wrapped, 2 * X).backward()


def finish_without_backward(model, wrapped):
    wrapped(X)
    finish(wrapped)
    loss(wrapped).backward()


def freeze_for_a_while(model, wrapped):
    weight = model.layers[1].a.weight
    weight.requires_grad_(False)
    loss(wrapped).backward()
    finish(wrapped)
    assert weight.grad is None
    model.zero_grad()
    weight.requires_grad_(True)
    loss(wrapped).backward()


def ask_for_the_gradient_of_the_input(model, wrapped):
    x = X.clone().requires_grad_()
    assert torch.autograd.grad(loss(wrapped, x), x)[0].abs().sum() > 0
    finish(wrapped)
    assert all(p.grad is None for p in model.parameters())
    loss(wrapped).backward()


def go_on_after_an_error_in_forward(model, wrapped):
    layer = model.layers[2]
    broken, layer.b = layer.b, None
    with pytest.raises(TypeError):
        wrapped(X)
    layer.b = broken
    assert all(type(p) is nn.Parameter for p in model.parameters())
    loss(wrapped).backward()


def go_on_after_an_error_in_backward(model, wrapped):
    def fail(grad):
        raise ValueError("in backward")

    handle = model.layers[1].a.register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
    with pytest.raises(ValueError, match="in backward"):
        loss(wrapped).backward()
    handle.remove()
    finish(wrapped)
    model.zero_grad()
    loss(wrapped).backward()


@pytest.mark.parametrize(
    "run",
    [
        zero_grad_between, drop_what_no_sync_kept, drop_what_is_on_the_wire, finish_without_backward, freeze_for_a_while,
        ask_for_the_gradient_of_the_input, go_on_after_an_error_in_forward, go_on_after_an_error_in_backward,
    ],
)  # fmt: skip
def test_unusual_loops_have_the_gradients_of_one_process(run):
    assert_gradients_are_those_of_one_process(Plain, run)


def test_between_forward_and_backward_the_module_has_its_rows():
    def rank():
        model = Plain()
        wrapped = FSDP(model)
        before = {name: list(value.shape) for name, value in wrapped.state_dict().items()}
        kept = wrapped(X)
        after = {name: list(value.shape) for name, value in wrapped.state_dict().items()}
        kept.sum().backward()
        return before == after

    assert run_ranks(rank, 2) == [True, True]


def test_a_unit_that_runs_alone_can_be_finished():
    def rank():
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(2)))
        wrapped = FSDP(model)
        model[0](torch.ones(2, 6)).sum().backward()
        wrapped.finish_gradient_sync()
        assert model[0].weight.grad.abs().sum() > 0 and model[1].weight.grad is None
        wrapped(torch.ones(2, 6)).sum().backward()
        return True

    assert run_ranks(rank, 2) == [True, True]


def test_a_unit_leaves_no_hooks_on_what_it_returns_of_its_parameters():
    class Scaled(Layer):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return super().forward(x), self.scale

    class Model(Plain):
        def use(self, layer, h):
            y, scale = layer(h)
            return y * scale

    def rank():
        model = Model(Scaled)
        wrapped = FSDP(model)
        for _ in range(2):
            loss(wrapped).backward()
            wrapped.finish_gradient_sync()
        return [len(layer.scale._backward_hooks or ()) for layer in model.layers]

    assert run_ranks(rank, 2) == [[0, 0, 0]] * 2


def test_types_that_differ_inside_a_unit_are_counted_as_they_are():
    def rank():
        model = Plain()
        layer = model.layers[1]
        layer.a.double()
        layer.forward = lambda x: torch.tanh(layer.b(layer.a(x.double()).float()))
        executor = create_executor("zero3")
        wrapped, optimizer, *_ = executor.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with comm.record() as ledger:
            executor.backward(loss(wrapped))
            optimizer.step()
        planned = {row.tag: row.payload_bytes for row in plan(executor.infos, mode="zero3", world_size=2).step}
        return [[e.payload_bytes, planned[e.tag]] for e in ledger.events if e.tag.endswith("layers.1")]

    assert run_ranks(rank, 2)[0] == [[6 * 6 * (8 + 4)] * 2]


def test_weights_that_are_no_floats_are_gathered_as_they_are():
    def rank():
        model = Plain()
        model.table = nn.Parameter(torch.arange(300, dtype=torch.int32).view(30, 10), requires_grad=False)
        kinds = []
        model.register_forward_hook(lambda *_: kinds.append(str(model.table.dtype) + str(int(model.table.sum()))))
        FSDP(model, torch.bfloat16)(X.bfloat16())
        return kinds

    assert run_ranks(rank, 2)[0] == ["torch.int3244850"]


# -- what cannot be supported is refused --------------------------------------------------------------------


class ReturnsItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 6))

    def forward(self, h):
        return self.table[: len(h)]


def keeps_norms(model):
    model.first = nn.Embedding(8, 6, max_norm=0.5)
    model.forward = lambda x: model.head(model.first(torch.arange(8)))
    return model


def step_before_backward(model, wrapped):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    now = loss(wrapped)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    now.backward()


def load_and_replace(model, wrapped):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    wrapped(X)


REFUSED = {
    "its weight is returned": (
        lambda: Plain(ReturnsItsWeight), lambda model, wrapped: wrapped(X), r"layers\.0 returns its weight layers\.0\.table",
    ),
    "changed in forward": (
        lambda: keeps_norms(Plain()), lambda model, wrapped: wrapped(X), r"first\.weight is changed in place in forward",
    ),
    "changed before backward": (Plain, step_before_backward, r"weight has changed between forward and backward"),
    "gradients of gradients": (
        Plain, lambda model, wrapped: loss(wrapped).backward(create_graph=True), r"create_graph=True",
    ),
    "cast": (Plain, lambda model, wrapped: wrapped.double()(X.double()), r"weight has become torch\.float64 on cpu"),
    "cast inside": (Plain, lambda model, wrapped: (model.layers[0].b.half(), wrapped(X)), r"layers\.0\.b\.\w+ has become"),
    "replaced": (Plain, load_and_replace, r"is not the parameter any more that was wrapped"),
    "copied": (Plain, lambda model, wrapped: copy.deepcopy(wrapped), r"cannot be copied or pickled"),
    "pickled": (Plain, lambda model, wrapped: pickle.dumps(wrapped), r"cannot be copied or pickled"),
    "a copy inside": (Plain, lambda model, wrapped: copy.deepcopy(model)(X), r"a copy of one that FSDP has wrapped"),
    "a copied unit": (
        Plain, lambda model, wrapped: copy.deepcopy(model.layers[0])(torch.ones(2, 6)), r"a copy of one that FSDP has wrapped",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_full_sharding_cannot_do_is_refused(case):
    make, run, message = REFUSED[case]

    def rank():
        model = make()
        wrapped = FSDP(model)
        with pytest.raises(TrainingError, match=message):
            run(model, wrapped)
        return True

    assert run_ranks(rank, 2) == [True, True]


def test_an_input_changed_in_place_is_refused_by_torch_and_never_wrong():
    class Changes(Layer):
        def forward(self, x):
            return super().forward(x.mul_(2))

    def rank():
        wrapped = FSDP(Plain(Changes))
        with pytest.raises(RuntimeError, match="InputOfFSDPUnit is a view and is being modified inplace"):
            wrapped(X)
        return True

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.parametrize("mode", ["zero3", "fsdp2"])
def test_gradients_from_before_are_refused(mode):
    def rank():
        model = Plain()
        loss(model).backward()
        with pytest.raises(ConfigError, match=r"first\.weight has a gradient already"):
            create_executor(mode).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return True

    assert run_ranks(rank, 2) == [True, True]


def test_fsdp2_refuses_what_torch_would_get_wrong_or_cannot_shard():
    class Chooses(Layer):
        def forward(self, x):
            return (self.a if comm.rank() else self.b)(x)

    def prepare(model):
        executor = create_executor("fsdp2")
        wrapped, *_ = executor.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return executor, wrapped

    def rank():
        model = Plain()
        prepare(model)
        with pytest.raises(ConfigError, match="sharded by torch already"):
            prepare(model)
        mixed = Plain()
        mixed.layers[1].a.double()
        with pytest.raises(
            ConfigError, match=r"layers\.1 has torch\.float64 and torch\.float32 \(layers\.1\.b\.weight\)"
        ):
            prepare(mixed)
        executor, wrapped = prepare(Plain(Chooses))
        with pytest.raises(TrainingError, match=r"layers\.2 gave no gradient for some of its parameters"):
            executor.backward(loss(wrapped))  # torch would add a's gradient to b's
        with pytest.raises(TrainingError, match="a backward has ended in an error"):
            executor.backward(loss(wrapped))
        executor, wrapped = prepare(transposed())
        executor.backward(loss(wrapped))
        return executor.grad_norm()

    alone = transposed()
    loss(alone).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
    assert run_ranks(rank, 2) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("mode", ["zero2", "zero3", "fsdp2"])
def test_gradients_that_were_dropped_move_nothing_and_do_not_come_back(mode):
    def rank():
        model = Plain()
        executor = create_executor(mode, grad_accum_steps=2)
        wrapped, optimizer, *_ = executor.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1))
        with executor.accumulate(wrapped, last=False):  # the last one's gradients may still be on the wire after it
            executor.backward(loss(wrapped, 3 * X))
        with executor.accumulate(wrapped, last=True):
            executor.backward(loss(wrapped, 3 * X))
        optimizer.zero_grad()
        optimizer.step()
        unmoved = whole_weights(executor)
        with executor.accumulate(wrapped, last=True):
            executor.backward(loss(wrapped))
        optimizer.step()
        return [unmoved, whole_weights(executor)]

    alone = Plain()
    before = [p.tolist() for p in alone.parameters()]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5, weight_decay=0.1)
    loss(alone).backward()
    optimizer.step()
    for unmoved, moved in run_ranks(rank, 2):
        assert unmoved == before
        for got, parameter in zip(moved, alone.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(got), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_training_goes_on_after_an_error_in_backward(mode):
    def fail(grad):
        raise ValueError("in backward")

    def rank():
        model = Plain()
        executor = create_executor(mode)
        wrapped, optimizer, *_ = executor.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        handle = model.layers[1].a.register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
        with pytest.raises(ValueError, match="in backward"):
            executor.backward(loss(wrapped))
        handle.remove()
        executor.finish_grads()
        optimizer.zero_grad()
        executor.backward(loss(wrapped))
        optimizer.step()
        return whole_weights(executor)

    alone = Plain()
    loss(alone).backward()
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    for moved in run_ranks(rank, 2):
        for got, parameter in zip(moved, alone.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(got), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["zero3", "fsdp2"])
def test_a_hook_on_the_gradient_of_a_matrix_is_refused_since_it_would_not_run(mode):
    def rank():
        model = Plain()
        model.first.weight.register_hook(lambda grad: 0 * grad)
        with pytest.raises(ConfigError, match=r"first\.weight has a hook on its gradient"):
            create_executor(mode).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        late = Plain()
        wrapped = FSDP(late)
        handle = late.head.weight.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(ConfigError, match=r"head\.weight has a hook on its gradient"):
            wrapped(X)
        handle.remove()
        loss(wrapped).backward()
        return True

    assert run_ranks(rank, 2) == [True, True]


def test_a_sharded_optimizer_would_mix_the_rows_of_ranks_and_is_refused():
    def rank():
        model = Plain()
        before = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        wrapped = FSDP(model)
        loss(wrapped).backward()
        wrapped.finish_gradient_sync()
        for optimizer in (before, ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)):
            with pytest.raises(ConfigError, match="is sharded by FSDP"):
                optimizer.step()
        return True

    assert run_ranks(rank, 2) == [True, True]


def test_fsdp2_with_a_single_number_has_no_plan():
    model = Plain()
    model.scale = nn.Parameter(torch.tensor(1.0))
    assert plan(parameter_infos(model), mode="zero3", world_size=2).step
    with pytest.raises(ConfigError, match="fsdp2 cannot shard the single number scale"):
        plan(parameter_infos(model), mode="fsdp2", world_size=2)


def test_frozen_layers_at_the_front_are_planned_without_a_backward():
    def rank():
        model = Plain()
        for p in [*model.first.parameters(), *model.layers[0].parameters()]:
            p.requires_grad_(False)
        executor = create_executor("zero3")
        trained = [p for p in model.parameters() if p.requires_grad]
        wrapped, optimizer, *_ = executor.prepare(model, torch.optim.SGD(trained, lr=0.1))
        with comm.record() as ledger:
            executor.backward(loss(wrapped))
            optimizer.step()
        planned = [row.tag for row in plan(executor.infos, mode="zero3", world_size=2).step]
        return [sorted(tag for tag in tags if "/" in tag) for tags in (planned, [e.tag for e in ledger.events])]

    planned, recorded = run_ranks(rank, 2)[0]
    assert planned == recorded and "param/layers.1/backward" in planned
