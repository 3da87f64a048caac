"""`DDP` beside torch's own and beside sums made by hand, and where ranks differ, forget or misuse it."""

import hashlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support import digest, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pellucid.errors import ConfigError, PellucidError
from pellucid.parallel import DDP, comm, create_executor

TINY_BUCKETS = 1e-5
"""MiB: every parameter closes its bucket."""


@pytest.fixture(scope="module", autouse=True)
def imports_of_an_optimizer_step():
    """Made once here: each forked rank would spend seconds on them."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()


def chain(seed=0, width=64, depth=4):
    torch.manual_seed(seed)
    layers = [nn.Linear(6, width), *(nn.Linear(width, width) for _ in range(depth - 2)), nn.Linear(width, 3)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def rows(step, rank, num=None):
    """A rank's share of a step's data: ranks have unequal numbers of rows."""
    return torch.randn(num or 2 + rank, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def square(model, x):
    return model(x).pow(2).mean()


def grads_by_hand(model, losses):
    """The gradient of each loss alone, at the model's weights: one table a loss, without any communication."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = [torch.autograd.grad(loss(model), list(trainable.values()), allow_unused=True) for loss in losses]
    return [dict(zip(trainable, grads, strict=True)) for grads in found]


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


def grad_digest(model):
    held = (grad for grad in grads(model).values() if grad is not None)
    return hashlib.sha256(b"".join(grad.float().numpy().tobytes() for grad in held)).hexdigest()


def refusal(function):
    """The message with which ``function`` is refused."""
    try:
        function()
    except PellucidError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def same_on_all(results):
    assert all(result == results[0] for result in results[1:]), results
    return results[0]


def backward(ddp, loss=square, x=None):
    loss(ddp, rows(0, comm.rank()) if x is None else x).backward()


# -- the same as torch --------------------------------------------------------------------------------------


def steps_beside_torch(ddp_of_torch, bucket_mb, zero_grad=None, steps=5):
    """Both engines on the same data: (bit-equal at every step, largest difference, digest of ours)."""
    ours, theirs = DDP(chain(), bucket_mb), ddp_of_torch(chain())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    equal, worst = True, 0.0
    for step in range(steps):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            square(model, rows(step, comm.rank())).backward()
            if model is ours:
                ours.finish_gradient_sync()
            optimizer.step()
            if zero_grad is not None:
                optimizer.zero_grad(set_to_none=zero_grad)
        pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
        equal = equal and all(torch.equal(a, b) for a, b in pairs)
        worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
    moved = not torch.equal(next(ours.parameters()), next(chain().parameters()))
    return equal and moved, worst, digest(ours)


@pytest.mark.parametrize("zero_grad", [True, False, None], ids=["to_none", "to_zero", "kept"])
@pytest.mark.parametrize("bucket_mb", [25, 0.01])
def test_at_two_ranks_it_is_torchs_ddp_bit_for_bit_over_five_steps(bucket_mb, zero_grad):
    def rank():
        return steps_beside_torch(partial(DistributedDataParallel, bucket_cap_mb=bucket_mb), bucket_mb, zero_grad)

    equal, worst, _ = same_on_all(run_ranks(rank, 2))
    assert equal and worst == 0.0


@pytest.mark.parametrize("bucket_mb", [25, 0.01, TINY_BUCKETS])
@pytest.mark.parametrize("size", [3, 4])
def test_with_more_ranks_it_is_close_to_torchs_and_replicas_are_the_same_bits(size, bucket_mb):
    results = run_ranks(lambda: steps_beside_torch(DistributedDataParallel, bucket_mb, True), size)
    assert same_on_all(results)[1] < 1e-5


def test_alone_nothing_changes_and_nothing_is_sent():
    model, plain = DDP(chain()), chain()
    for one in (model, plain):
        square(one, rows(0, 0)).backward()
    with comm.record() as ledger:
        model.finish_gradient_sync()
    assert ledger.events == [] and all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


# -- sums and averages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_are_the_average_of_ranks_or_their_sum(size, average):
    def rank():
        by_hand = grads_by_hand(chain(), [partial(square, x=rows(0, r)) for r in range(size)])
        model = DDP(chain(), 0.01, average=average)
        backward(model)
        model.finish_gradient_sync()
        for name, grad in grads(model.module).items():
            total = sum(one[name] for one in by_hand)
            torch.testing.assert_close(grad, total / size if average else total, rtol=1e-5, atol=1e-7)
        return grad_digest(model)

    same_on_all(run_ranks(rank, size))


def test_a_plain_sgd_step_on_three_ranks_is_one_process_on_all_rows():
    everything = torch.cat([rows(0, r) for r in range(3)])

    def step(model, x):
        (model(x).pow(2).sum() / (3 * len(everything))).backward()  # the sum over this rank's rows, the mean over all
        if isinstance(model, DDP):
            model.finish_gradient_sync()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return [p.detach() for p in model.parameters()]

    def rank():
        for ours, alone in zip(step(DDP(chain(), average=False), rows(0, comm.rank())), expected, strict=True):
            torch.testing.assert_close(ours, alone, rtol=1e-6, atol=1e-7)

    expected = step(chain(), everything)
    assert not torch.allclose(expected[0], chain()[0].weight, rtol=1e-3)  # a wrong factor would be seen
    run_ranks(rank, 3)


class OneWeight(nn.Module):
    def __init__(self, dtype, value=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


def test_an_average_in_float16_does_not_overflow_in_the_sum():
    def rank():
        model = DDP(OneWeight(torch.float16))
        model(torch.full((4,), 40000.0, dtype=torch.float16)).backward()
        model.finish_gradient_sync()
        return model.module.weight.grad.tolist()

    assert run_ranks(rank, 2) == [[40000.0] * 4] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_bfloat16_gradients_can_be_reduced_in_float32(size):
    def share(rank):
        return torch.tensor([1.0, 256.0, 3.140625, -7.0]).to(torch.bfloat16) * (1 + rank / 4)

    def rank():
        model = DDP(OneWeight(torch.bfloat16), reduce_dtype=torch.float32)
        with comm.record() as ledger:
            for micro in range(2):  # local gradients of a window still add up in bfloat16
                with model.no_sync() if micro == 0 else nullcontext():
                    model(share(comm.rank())).backward()
            model.finish_gradient_sync()
        grad = model.module.weight.grad
        return [str(grad.dtype), grad.float().tolist(), [e.dtype for e in ledger.events if e.tag.startswith("grad/")]]

    mean = torch.stack([(share(r) + share(r)).float() * (1 / size) for r in range(size)]).sum(0).to(torch.bfloat16)
    assert same_on_all(run_ranks(rank, size)) == ["torch.bfloat16", mean.float().tolist(), ["float32"]]


# -- accumulation -------------------------------------------------------------------------------------------


def test_a_window_is_reduced_once_and_inside_it_ranks_hold_different_gradients():
    def rank():
        model = DDP(chain(), 0.01)
        by_hand = grads_by_hand(
            chain(), [lambda m, r=r: sum(square(m, rows(step, r)) for step in range(3)) for r in range(2)]
        )
        inside = []
        with comm.record() as ledger:
            for step in range(3):
                with model.no_sync() if step < 2 else nullcontext():
                    backward(model, x=rows(step, comm.rank()))
                if step < 2:
                    inside.append(grad_digest(model))
            num_before = len(ledger.events)
            model.finish_gradient_sync()
        for name, grad in grads(model.module).items():
            torch.testing.assert_close(grad, (by_hand[0][name] + by_hand[1][name]) / 2, rtol=1e-5, atol=1e-7)
        return inside, grad_digest(model), sorted(ledger.ops()), len(model.buckets), num_before

    (inside, after, ops, num, num_before), (inside1, after1, *_) = run_ranks(rank, 2)
    assert len({*inside, *inside1}) == 4, "inside the window every rank has its own"
    assert after == after1
    assert ops == sorted([f"all_reduce:grad/bucket{i}" for i in range(num)] + ["all_reduce:used"])
    assert num > 2 and num_before == num  # nothing inside no_sync, all in the last backward


def test_nested_no_sync_ends_with_the_outermost():
    model = DDP(chain())
    with model.no_sync():
        with model.no_sync():
            pass
        assert not model.reducer.synchronizing
    assert model.reducer.synchronizing


def test_gradients_live_in_the_buckets_and_a_second_window_adds_to_them_as_in_torch():
    def rank():
        ours, theirs = DDP(chain(), 0.01), DistributedDataParallel(chain(), gradient_as_bucket_view=True)
        inside = []
        for step in range(4):  # two windows of two, nothing zeroed between them
            for model in (ours, theirs):
                with model.no_sync() if step % 2 == 0 else nullcontext():
                    backward(model, x=rows(step, comm.rank()))
            if step % 2:
                ours.finish_gradient_sync()
                buffers = {bucket.flat.untyped_storage().data_ptr() for bucket in ours.buckets}
                inside += [p.grad.untyped_storage().data_ptr() in buffers for p in ours.parameters()]
        equal = [torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
        return all(inside), all(equal)

    assert run_ranks(rank, 2) == [[True, True]] * 2


# -- the same module everywhere -----------------------------------------------------------------------------


class Furnished(nn.Module):
    """Trainable and frozen parameters, and buffers of several types."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.frozen = nn.Linear(6, 5), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("hidden", torch.randn(3, dtype=torch.float64), persistent=False)
        self.norm.num_batches_tracked += seed
        with torch.no_grad():
            self.norm.running_mean.uniform_()

    def forward(self, x):
        return self.norm(self.frozen(self.inner(x))) * self.scalar


def furniture(module):
    total = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        total.update(name.encode() + tensor.detach().numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_starts_with_the_first_ranks_parameters_and_buffers(size):
    def rank():
        module = Furnished(comm.rank())
        before = furniture(module)
        DDP(module)
        return before, furniture(module)

    results = run_ranks(rank, size)
    assert len({before for before, _ in results}) == size
    assert {after for _, after in results} == {results[0][0]}


def renamed():
    module = nn.Module()
    module.first, module.third = nn.Linear(2, 2), nn.Linear(2, 2)
    return module


def two_layers(second=(2, 2), dtype=torch.float32, frozen=False, buffer=None, extra=False):
    module = nn.Module()
    module.first, module.second = nn.Linear(2, 2), nn.Linear(*second, dtype=dtype)
    module.second.requires_grad_(not frozen)
    if buffer is not None:
        module.register_buffer("table", torch.zeros(buffer))
    if extra:
        module.third = nn.Linear(2, 2)
    return module


@pytest.mark.parametrize(
    "other, left, right",
    [
        (partial(two_layers, (3, 2)), "second.weight float32 [2, 2] (trainable)", "second.weight float32 [2, 3] (trainable)"),
        (partial(two_layers, dtype=torch.float64), "second.weight float32 [2, 2]", "second.weight float64 [2, 2]"),
        (partial(two_layers, frozen=True), "second.weight float32 [2, 2] (trainable)", "second.weight float32 [2, 2] (frozen)"),
        (renamed, "second.weight float32", "third.weight float32"),
        (partial(two_layers, buffer=3), "nothing more", "table float32 [3] (buffer)"),
        (partial(two_layers, extra=True), "nothing more", "third.weight float32 [2, 2] (trainable)"),
    ],
    ids=["shape", "dtype", "frozen", "name", "buffer", "extra"],
)  # fmt: skip
def test_ranks_with_different_modules_are_told_the_first_difference_on_every_rank(other, left, right):
    def rank():
        return refusal(lambda: DDP(other() if comm.rank() == 2 else two_layers()))

    message = same_on_all(run_ranks(rank, 3))
    assert message.startswith("RankError: ranks hold different modules: ")
    assert f"rank 0 has {left}" in message and f"rank 2 has {right}" in message


def test_a_checkpoint_never_sees_the_wrapper():
    model = DDP(chain())
    assert list(model.state_dict()) == list(chain().state_dict())
    model.load_state_dict(chain(seed=5).state_dict())
    assert torch.equal(model.module[0].weight, chain(seed=5)[0].weight)


# -- parameters that a loss does not reach ------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right, self.idle = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, *heads):
        x = torch.tanh(self.trunk(x))
        return sum(getattr(self, head)(x).pow(2).mean() for head in heads) + x.mean()


@pytest.mark.parametrize("bucket_mb", [25, TINY_BUCKETS])
@pytest.mark.parametrize("size", [2, 3])
def test_a_parameter_unused_on_some_ranks_is_averaged_with_zero_and_one_unused_everywhere_stays_none(size, bucket_mb):
    def heads(rank):
        return [["left"], ["left", "right"], []][rank]

    def rank():
        by_hand = grads_by_hand(Heads(), [lambda m, r=r: m(rows(0, r), *heads(r)) for r in range(size)])
        model = DDP(Heads(), bucket_mb)
        model(rows(0, comm.rank()), *heads(comm.rank())).backward()
        model.finish_gradient_sync()
        for name, grad in grads(model.module).items():
            if name.startswith("idle"):
                assert grad is None
            else:
                shares = [one[name] for one in by_hand if one[name] is not None]
                torch.testing.assert_close(grad, sum(shares) / size, rtol=1e-5, atol=1e-7)
        return grad_digest(model)

    same_on_all(run_ranks(rank, size))


def test_a_parameter_that_only_an_earlier_micro_batch_of_one_rank_reached_counts():
    def rank():
        model = DDP(Heads(), TINY_BUCKETS)
        expected = grads_by_hand(Heads(), [lambda m: m(rows(0, 1), "left", "right")])[0]
        with model.no_sync():
            model(rows(0, comm.rank()), *(["left", "right"] if comm.rank() == 1 else [])).backward()
        model(rows(1, comm.rank()), "left").backward()
        model.finish_gradient_sync()
        torch.testing.assert_close(model.module.right.weight.grad, expected["right.weight"] / 2)
        for p in model.parameters():  # the next window reaches it nowhere, and no gradient is left over
            p.grad = None
        model(rows(2, comm.rank()), "left").backward()
        model.finish_gradient_sync()
        return model.module.right.weight.grad is None, model.module.left.weight.grad is not None

    assert run_ranks(rank, 2) == [[True, True]] * 2


# -- order --------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Equal branches, added up; the order in which they are used is the caller's."""

    def __init__(self, num=4):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(num))

    def forward(self, x, order):
        for i in order:
            x = torch.tanh(self.branches[i](x))
        return x.pow(2).mean()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_use_the_same_layers_in_another_order_get_the_right_averages(size):
    orders = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]]

    def rank():
        by_hand = grads_by_hand(Branches(), [lambda m, r=r: m(rows(0, r), orders[r]) for r in range(size)])
        model = DDP(Branches(), TINY_BUCKETS)
        model(rows(0, comm.rank()), orders[comm.rank()]).backward()
        model.finish_gradient_sync()
        for name, grad in grads(model.module).items():
            torch.testing.assert_close(grad, sum(one[name] for one in by_hand) / size, rtol=1e-5, atol=1e-8)

    run_ranks(rank, size)


def test_reductions_start_inside_backward():
    def rank():
        executor = create_executor("ddp", bucket_size_mb=0.005)
        model, *_ = executor.prepare(chain(depth=6))
        with comm.record() as ledger, executor.accumulate(model):
            executor.backward(square(model, rows(0, comm.rank())))
            inside = [event.tag for event in ledger.events if event.phase == "backward"]
            executor.finish_grads()
        return inside, len(model.buckets), [list(bucket.layout.names) for bucket in model.buckets]

    inside, num, names = same_on_all(run_ranks(rank, 2))
    assert num >= 5 and len(inside) >= num - 1
    assert inside == [f"grad/bucket{i}" for i in range(len(inside))]
    assert names[0][0] == "10.bias" and names[-1][-1] == "0.weight"  # backward reaches the last layer first


# -- misuse -------------------------------------------------------------------------------------------------


def test_a_module_is_wrapped_once_and_must_have_something_dense_to_reduce():
    inner = DDP(chain())
    holder = nn.ModuleDict({"part": inner})
    sparse = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True)})
    with pytest.raises(ConfigError, match="the module is wrapped in DDP already"):
        DDP(inner)
    with pytest.raises(ConfigError, match="part is wrapped in DDP already"):
        DDP(holder)
    with pytest.raises(ConfigError, match=r"^0\.weight is reduced by another wrapper already"):
        DDP(inner.module)
    with pytest.raises(ConfigError, match=r"^table has sparse gradients"):
        DDP(sparse)
    with pytest.raises(ConfigError, match="nothing to reduce"):
        DDP(chain().requires_grad_(False))
    with pytest.raises(ConfigError, match="bucket_size_mb must be positive, got 0"):
        DDP(chain(), 0)


def test_a_second_finish_does_nothing():
    def rank():
        model = DDP(chain(), 0.01)
        backward(model)
        model.finish_gradient_sync()
        first = grad_digest(model)
        with comm.record() as ledger:
            model.finish_gradient_sync()
        return grad_digest(model) == first, ledger.ops()

    assert run_ranks(rank, 2) == [[True, []]] * 2


@pytest.mark.parametrize("bucket_mb", [25, TINY_BUCKETS])
def test_a_step_or_a_forward_before_the_finish_is_refused_and_after_it_is_not(bucket_mb):
    """An idle layer keeps its bucket back, and all later ones: what nothing has left for is just as wrong to step on."""

    def rank():
        model = DDP(Heads(), bucket_mb)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = digest(model)
        model(rows(0, comm.rank()), "left").backward()
        messages = [refusal(optimizer.step), refusal(lambda: model(rows(1, comm.rank()), "left"))]
        untouched = digest(model) == before
        with torch.no_grad():
            model(rows(1, comm.rank()), "left")  # evaluation sends nothing and is free
        model.finish_gradient_sync()
        model(rows(1, comm.rank()), "left")
        optimizer.step()
        return messages, untouched, digest(model) != before

    messages, untouched, moved = same_on_all(run_ranks(rank, 2))
    assert untouched and moved
    assert messages[0].startswith("TrainingError: an optimizer step while gradients")
    assert messages[1].startswith("TrainingError: a forward while gradients")
    assert all("call finish_gradient_sync() first" in message for message in messages)


def test_an_accumulated_forward_with_a_synchronised_backward_is_refused_by_name():
    model = DDP(chain())
    with model.no_sync():
        loss = square(model, rows(0, 0))
    assert refusal(loss.backward).startswith("TrainingError: the gradient of 6.bias arrived in a synchronised backward")


def test_a_backward_that_adds_to_a_gradient_on_the_wire_is_refused_by_name():
    model = DDP(chain())
    with model.no_sync():
        earlier = square(model, rows(0, 0))
    square(model, rows(1, 0)).backward()
    with model.no_sync():
        message = refusal(earlier.backward)
    assert message.startswith("TrainingError: a backward added to the gradient of 6.bias while it is on the wire")


def test_a_gradient_that_becomes_ready_twice_is_refused_by_name():
    model = DDP(Heads())
    loss = model(rows(0, 0), "left", "right")
    loss.backward(retain_graph=True)
    message = refusal(loss.backward)
    assert message.startswith("TrainingError: the gradient of ") and "became ready twice" in message
    assert any(name in message for name in ("right.weight", "right.bias", "left.weight", "left.bias"))


# -- other arrangements -------------------------------------------------------------------------------------


def test_a_process_group_reduces_over_its_ranks_alone():
    def rank():
        pair = dist.new_group([0, 2])
        if comm.rank() == 1:
            return None
        by_hand = grads_by_hand(Furnished(0), [partial(square, x=rows(0, r, 4)) for r in (0, 2)])
        with comm.record() as ledger:
            model = DDP(Furnished(comm.rank()), 0.01, pair)
            backward(model, x=rows(0, comm.rank(), 4))
            model.finish_gradient_sync()
        found = {name: grad for name, grad in grads(model.module).items() if grad is not None}
        for name, grad in found.items():
            torch.testing.assert_close(grad, (by_hand[0][name] + by_hand[1][name]) / 2, rtol=1e-4, atol=1e-7)
        return grad_digest(model), sorted(found), {event.group for event in ledger.events} == {str(pair.group_name)}

    first, none, last = run_ranks(rank, 3)
    assert none is None and first == last
    assert first[1] == ["inner.bias", "inner.weight", "norm.bias", "norm.weight", "scalar"] and first[2]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.head(self.embedding(tokens)), tokens, reduction="sum")


def test_tied_weights_move_once_and_are_right():
    def rank():
        by_hand = grads_by_hand(Tied(), [lambda m, r=r: m(torch.tensor([r, r + 1, 5])) for r in range(3)])
        model = DDP(Tied(), average=False)
        with comm.record() as ledger:
            model(torch.tensor([comm.rank(), comm.rank() + 1, 5])).backward()
            model.finish_gradient_sync()
        torch.testing.assert_close(
            model.module.head.weight.grad, sum(one["embedding.weight"] for one in by_hand), rtol=1e-5, atol=1e-6
        )
        return ledger.payload_bytes("grad/"), model.module.head.weight is model.module.embedding.weight

    assert run_ranks(rank, 3) == [[9 * 6 * 4, True]] * 3
