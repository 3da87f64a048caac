"""`ShardedOptimizer` steps as the plain optimizer does, with one copy of its state over all ranks."""

import copy
import hashlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from nets import Net
from support import digest, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR, ReduceLROnPlateau

from pellucid import OptimizerProtocol, ShardedOptimizer
from pellucid.errors import CheckpointError, ConfigError, TrainingError
from pellucid.parallel import DDP, comm

SIZES = pytest.mark.parametrize("size", [2, 3, 4])


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    model = Net()
    train(model, adamw(model.parameters(), ShardedOptimizer))


def adamw(params, sharded=None):
    """AdamW, or ours around it."""
    options = {"lr": 1e-2, "weight_decay": 0.1}
    return sharded(params, torch.optim.AdamW, **options) if sharded else torch.optim.AdamW(params, **options)


def sgd(params, sharded=None):
    options = {"lr": 1e-2, "momentum": 0.9, "nesterov": True}
    return sharded(params, torch.optim.SGD, **options) if sharded else torch.optim.SGD(params, **options)


def adam_of_groups(params, sharded=None):
    params = list(params)
    groups = [{"params": params[::2], "lr": 0.03}, {"params": params[1::2], "weight_decay": 0.2, "betas": (0.5, 0.9)}]
    return sharded(groups, torch.optim.Adam, lr=1e-2) if sharded else torch.optim.Adam(groups, lr=1e-2)


def adafactor(params, sharded=None):
    """Its state has shapes of its own, and other parts for a matrix than for a vector."""
    return sharded(params, torch.optim.Adafactor, lr=0.1) if sharded else torch.optim.Adafactor(params, lr=0.1)


def inputs(step, rank):
    return torch.randn(5, 19, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, steps=range(1), *, rank=None, all_of_it=True, scheduler=None):
    """Steps on the inputs of one rank: this one."""
    for step in steps:
        model(inputs(step, comm.rank() if rank is None else rank), all_of_it).square().mean().backward()
        if isinstance(model, DDP):
            model.finish_gradient_sync()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def one_process(build, size, num_steps):
    """The weights after steps on the inputs of all ranks together, with torch alone."""
    model = Net()
    optimizer = build(model.parameters())
    for step in range(num_steps):
        torch.stack([model(inputs(step, rank)).square().mean() for rank in range(size)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def fingerprint(state_dict):
    """An optimizer's state with a hash, dtype and shape in place of each tensor, as JSON has it."""

    def of(value):
        if not isinstance(value, torch.Tensor):
            return value
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return [hashlib.sha256(data).hexdigest(), str(value.dtype), list(value.shape)]

    return {str(i): {key: of(value) for key, value in state.items()} for i, state in state_dict["state"].items()}


def same_on_all(results):
    assert all(result == results[0] for result in results[1:]), results
    return results[0]


def tags(ledger):
    """Of the collectives of a step: grad, used, param."""
    return Counter(event.tag.partition("/")[0] for event in ledger.events)


# -- the same as the plain optimizer ------------------------------------------------------------------------


@SIZES
def test_after_ddp_weights_and_state_are_the_plain_optimizers_to_the_bit(size):
    def rank():
        found = {}
        for build in (adamw, sgd, adam_of_groups, adafactor):
            for sharded in (ShardedOptimizer, None):
                model = DDP(Net())
                optimizer = build(model.parameters(), sharded)
                train(model, optimizer, range(5))
                found.setdefault(build.__name__, []).append([digest(model), fingerprint(optimizer.state_dict())])
        return found

    found = same_on_all(run_ranks(rank, size))
    for name, (ours, plain) in found.items():
        assert ours == plain and len(plain[1]) == 6, f"{name}: of six trainable parameters each has a state"
    assert len({digest(Net()), *(weights for (weights, _), _ in found.values())}) == 5


@SIZES
def test_alone_it_averages_by_itself_and_equals_one_process_on_everybodys_data(size):
    builds = {build.__name__: build for build in (adamw, sgd, adam_of_groups)}

    def rank():
        found = {}
        for name, build in builds.items():
            model = Net()
            train(model, build(model.parameters(), ShardedOptimizer), range(4))
            found[name] = {name: parameter.tolist() for name, parameter in model.named_parameters()}
        return found

    for kind, weights in same_on_all(run_ranks(rank, size)).items():
        start = Net().state_dict()
        for name, parameter in one_process(builds[kind], size, 4).named_parameters():
            error = (torch.tensor(weights[name]) - parameter.detach()).norm()
            moved = (parameter.detach() - start[name]).norm()
            assert error <= 1e-4 * moved and (moved > 0) == parameter.requires_grad, (
                f"{kind} {name}: {error} of {moved}"
            )


def test_at_two_ranks_with_ddp_it_is_torchs_ddp_and_adamw_bit_for_bit_over_six_steps():
    def rank():
        found = []
        for wrap, sharded in ((DDP, ShardedOptimizer), (DistributedDataParallel, None)):
            model = Net()
            train(wrap(model), adamw(model.parameters(), sharded), range(6))
            found.append(digest(model))
        return found

    ours, torchs = same_on_all(run_ranks(rank, 2))
    assert ours == torchs != digest(Net())


def test_in_one_process_it_is_the_plain_optimizer_and_nothing_is_sent():
    ours, plain = Net(), Net()
    optimizers = adam_of_groups(ours.parameters(), ShardedOptimizer), adam_of_groups(plain.parameters())
    with comm.record() as ledger:
        train(ours, optimizers[0], range(3))
        state = optimizers[0].state_dict()
    train(plain, optimizers[1], range(3))
    assert digest(ours) == digest(plain) and ledger.events == []
    assert fingerprint(state) == fingerprint(optimizers[1].state_dict())
    assert state["param_groups"] == optimizers[1].state_dict()["param_groups"]


@pytest.mark.parametrize("size", [3, 4])
def test_a_rank_that_owns_nothing_takes_part(size):
    def rank():
        results = []
        for sharded in (ShardedOptimizer, None):
            torch.manual_seed(0)
            model = DDP(nn.Linear(19, 7))
            optimizer = adamw(model.module.named_parameters(), sharded)
            for step in range(3):
                model(inputs(step, comm.rank())).square().mean().backward()
                model.finish_gradient_sync()
                optimizer.step()
                optimizer.zero_grad()
            results.append([digest(model), fingerprint(optimizer.state_dict())])
            if sharded:
                mine = len(optimizer.inner.state)
                optimizer.load_state_dict(optimizer.state_dict())
        return [mine, results]

    ranks = run_ranks(rank, size)
    assert [mine for mine, _ in ranks] == [1, 1, 0, 0][:size]
    ours, plain = same_on_all([results for _, results in ranks])
    assert ours == plain


# -- who averages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrapped, average, expected",
    [
        (False, None, {"used": 1, "grad": 1, "param": 2}),
        (True, None, {"param": 2}),
        (False, False, {"param": 2}),
        (True, True, {"used": 1, "grad": 1, "param": 2}),
    ],
)
def test_gradients_are_averaged_once_unless_it_is_told_otherwise(wrapped, average, expected):
    def rank():
        model = Net()
        wrapper = DDP(model) if wrapped else model
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, average_gradients=average)
        wrapper(inputs(0, comm.rank())).square().mean().backward()
        if wrapped:
            wrapper.finish_gradient_sync()
        with comm.record() as ledger:
            optimizer.step()
        return [tags(ledger), digest(model), {n: p.tolist() for n, p in model.named_parameters()}]

    counts, _, weights = same_on_all(run_ranks(rank, 2))
    assert counts == expected
    averaged = one_process(lambda params: torch.optim.SGD(params, lr=0.1), 2, 1)
    close = [torch.allclose(torch.tensor(weights[n]), p, rtol=1e-4) for n, p in averaged.named_parameters()]
    assert all(close) == (wrapped or average is None), "one rank's gradient alone is another step"


def test_only_what_no_wrapper_makes_global_is_averaged():
    def rank():
        model, beside = DDP(nn.Linear(19, 7)), nn.Linear(7, 3)
        optimizer = ShardedOptimizer([*model.parameters(), *beside.parameters()], torch.optim.SGD, lr=0.1)
        beside(model(inputs(0, comm.rank()))).square().mean().backward()
        model.finish_gradient_sync()
        with comm.record() as ledger:
            optimizer.step()
        return [event.numel for event in ledger.events if event.tag.startswith("grad/")]

    assert run_ranks(rank, 2) == [[7 * 3 + 3]] * 2


def test_a_parameter_that_some_ranks_use_is_averaged_with_zero_and_one_that_none_uses_stays():
    def rank():
        model = Net()
        optimizer = adamw(model.parameters(), ShardedOptimizer)
        train(model, optimizer, all_of_it=False)
        untouched = torch.equal(model.seldom, Net().seldom)  # weight decay does not act either
        entry = optimizer.state_dict()["state"][1]
        expected = torch.autograd.grad(model(inputs(1, 1)).square().mean(), model.seldom)[0] / 2
        model(inputs(1, comm.rank()), comm.rank() == 1).square().mean().backward()
        optimizer.step()
        return [
            untouched,
            entry,
            torch.allclose(model.seldom.grad, expected),
            float(expected.abs().min()) > 0,
            digest(model),
        ]

    assert same_on_all(run_ranks(rank, 2))[:4] == [True, {}, True, True]


def test_a_step_while_ddp_still_reduces_is_refused_and_moves_nothing():
    def rank():
        model = DDP(Net())
        optimizer = adamw(model.parameters(), ShardedOptimizer)
        model(inputs(0, comm.rank())).square().mean().backward()
        with comm.record() as ledger, pytest.raises(TrainingError, match="finish_gradient_sync"):
            optimizer.step()
        still = digest(model) == digest(Net())
        model.finish_gradient_sync()
        optimizer.step()
        return [still, len(ledger.events), digest(model) != digest(Net())]

    assert run_ranks(rank, 2) == [[True, 0, True]] * 2


# -- what it takes ------------------------------------------------------------------------------------------


def ways_to_give(model):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    tensors = [p for _, p in named]
    return {
        "list": tensors,
        "generator": (p for p in tensors),
        "named": named,
        "named generator": (pair for pair in named),
        "groups": [{"params": tensors[:2]}, {"params": (p for p in tensors[2:])}],
        "named groups": [{"params": named[:2]}, {"params": (pair for pair in named[2:])}],
        "named groups, some of which a rank has nothing of": [{"params": [pair]} for pair in named],
        "group of one tensor": [{"params": tensors[0]}, {"params": tensors[1:]}],
    }


def test_tensors_named_ones_groups_and_generators_are_taken_as_torch_takes_them():
    def rank():
        found = {}
        for kind in ways_to_give(Net()):
            model, plain = Net(), Net()
            ours, torchs = adamw(ways_to_give(model)[kind], ShardedOptimizer), adamw(ways_to_give(plain)[kind])
            train(model, ours, rank=0)
            train(plain, torchs, rank=0)
            theirs = torchs.state_dict()
            same = ours.state_dict()["param_groups"] == theirs["param_groups"]
            same = same and fingerprint(ours.state_dict()) == fingerprint(theirs)
            found[kind] = [digest(model), same, "param_names" in ours.param_groups[0]]
        return found

    found = same_on_all(run_ranks(rank, 2))  # both ranks on the same data: an average of two is exact
    assert len({weights for weights, *_ in found.values()}) == 1
    assert all(same for _, same, _ in found.values())
    assert all(named == kind.startswith("named") for kind, (*_, named) in found.items())


@pytest.mark.parametrize(
    "give, message",
    [
        (lambda a, b: [a, b, a], r"a parameter of shape \(2, 3\) is given twice"),
        (lambda a, b: (p for p in (a, b, b)), r"a parameter of shape \(5,\) is given twice"),
        (lambda a, b: [("a", a), ("tied", a)], "parameter tied is given twice; each parameter must be in one group"),
        (lambda a, b: [{"params": [a]}, {"params": (p for p in (b, a))}], r"shape \(2, 3\) is given twice"),
        (lambda a, b: [{"params": [("a", a)]}, {"params": [("b", b), ("c", a)]}], "parameter c is given twice"),
    ],
)
def test_a_parameter_given_twice_is_refused_by_name_or_shape(give, message):
    with pytest.raises(ConfigError, match=message):
        adamw(give(nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(5))), ShardedOptimizer)


def test_what_torch_refuses_is_refused():
    weight = nn.Parameter(torch.zeros(2))
    for params, error in (([], ValueError), (weight, TypeError), ([{"params": {weight}}], TypeError), ([3], TypeError)):
        with pytest.raises(error):
            adamw(params, ShardedOptimizer)
    with pytest.raises(TypeError, match="momentun"):
        ShardedOptimizer([weight], torch.optim.SGD, momentun=0.9)


def test_a_closure_is_refused_before_anything_moves():
    model = Net()
    optimizer = adamw(model.parameters(), ShardedOptimizer)
    model(inputs(0, 0)).sum().backward()
    with pytest.raises(ConfigError, match="takes no closure; compute the loss before step"):
        optimizer.step(lambda: 0.0)
    assert digest(model) == digest(Net())


def test_it_is_what_a_loop_needs():
    assert isinstance(adamw(Net().parameters(), ShardedOptimizer), OptimizerProtocol)


def test_zero_grad_drops_the_gradients_of_all_parameters_not_only_of_ones_own():
    def rank():
        model = Net()
        optimizer = adamw(model.parameters(), ShardedOptimizer)
        train(model, optimizer)
        dropped = all(p.grad is None for p in model.parameters())
        model(inputs(0, 0)).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        return [dropped, sum(float(p.grad.abs().sum()) for p in model.parameters() if p.requires_grad)]

    assert run_ranks(rank, 2) == [[True, 0.0]] * 2


def test_a_group_that_comes_later_trains_and_its_duplicates_are_refused():
    def rank():
        results = []
        for sharded in (ShardedOptimizer, None):
            model = DDP(Net())
            head, rest = list(model.module.last.parameters()), list(model.module.first.parameters())
            optimizer = adamw(rest, sharded)
            train(model, optimizer, range(2))
            owners = dict(optimizer.owners) if sharded else {}
            optimizer.add_param_group({"params": (p for p in head), "lr": 0.05})
            if sharded:
                assert all(optimizer.owners[p] == owner for p, owner in owners.items()), "the old ones keep theirs"
                assert head[0] in optimizer.owners
            train(model, optimizer, range(2, 4))
            results.append([digest(model), fingerprint(optimizer.state_dict())])
            if sharded:
                for again in ([model.module.scale, model.module.scale], [head[1]]):
                    with pytest.raises(ConfigError, match="is given twice"):
                        optimizer.add_param_group({"params": again})
                assert len(optimizer.param_groups) == 2
        return results

    ours, plain = same_on_all(run_ranks(rank, 3))
    assert ours == plain and list(ours[1]) == ["0", "1", "2", "3"]


# -- hyper-parameters ---------------------------------------------------------------------------------------


def test_a_learning_rate_of_zero_moves_nothing_and_decay_edited_in_a_group_acts():
    def rank():
        model = DDP(Net())
        optimizer = adamw(model.parameters(), ShardedOptimizer)
        train(model, optimizer)
        before = digest(model)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, range(1, 2))
        still = digest(model) == before
        optimizer.param_groups[0] |= {"lr": 0.1, "weight_decay": 10.0}  # 1 - lr * decay: nothing is left
        train(model, optimizer, range(2, 3))
        return [still, float(model.module.last.weight.detach().abs().max())]

    for still, largest in run_ranks(rank, 2):
        assert still and 0 < largest < 0.11, "what is left is the last step of at most about lr"


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: LambdaLR(o, lambda step: (step + 1) / 10 if step < 10 else 0.9**step),
        lambda o: OneCycleLR(o, max_lr=0.05, total_steps=21),  # moves the betas too
        lambda o: CosineAnnealingWarmRestarts(o, 7),
    ],
    ids=["lambda", "one cycle", "cosine"],
)
def test_a_schedule_of_torch_over_twenty_steps_equals_the_unsharded_run(schedule):
    def rank():
        results = []
        for sharded in (ShardedOptimizer, None):
            model = DDP(Net())
            optimizer = adamw(model.parameters(), sharded)
            scheduler = schedule(optimizer)
            train(model, optimizer, range(20), scheduler=scheduler)
            results.append([digest(model), scheduler.get_last_lr(), optimizer.param_groups[0]["betas"]])
        return results

    ours, plain = same_on_all(run_ranks(rank, 2))
    assert ours == plain and ours[1] != [1e-2]


def test_a_schedule_that_watches_a_metric_acts():
    optimizer = adamw(Net().parameters(), ShardedOptimizer)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


# -- who owns what, and what moves --------------------------------------------------------------------------


def owned_bytes(optimizer):
    """Of each rank."""
    totals = [0] * optimizer.world_size
    for parameter, owner in optimizer.owners.items():
        totals[owner] += parameter.nbytes
    return totals


def odd_sizes():
    """Two dtypes, many sizes."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 5000, (37,), generator=generator).tolist()
    return [nn.Parameter(torch.zeros(n, dtype=(torch.float32, torch.bfloat16)[n % 2])) for n in sizes]


@SIZES
def test_ownership_is_balanced_by_bytes(size):
    def rank():
        optimizer = adamw(odd_sizes(), ShardedOptimizer)
        totals = owned_bytes(optimizer)
        later = odd_sizes()
        optimizer.add_param_group({"params": later})
        own = sum(p.nbytes for group in optimizer.inner.param_groups for p in group["params"])
        return [totals, owned_bytes(optimizer), own == owned_bytes(optimizer)[comm.rank()]]

    largest = max(p.nbytes for p in odd_sizes())
    for totals, later, mine in run_ranks(rank, size):
        for found in (totals, later):
            assert max(found) - sum(found) / size <= largest
        assert sum(later) == 2 * sum(totals) and mine
        assert max(later) - min(later) <= 0.01 * max(later), "with this many the largest first come out even"


def test_one_dominant_embedding_stays_alone_on_its_rank():
    def rank():
        shapes = [(16, 16)] * 9 + [(4000, 16)] + [(16,)] * 9  # in the middle: neither first nor last
        optimizer = adamw([nn.Parameter(torch.zeros(shape)) for shape in shapes], ShardedOptimizer)
        return owned_bytes(optimizer)

    totals = same_on_all(run_ranks(rank, 3))
    embedding = 4000 * 16 * 4
    assert sorted(totals)[2] == embedding and sorted(totals)[1] - sorted(totals)[0] <= 16 * 16 * 4
    assert max(totals) - sum(totals) / 3 <= embedding


def test_only_the_owner_keeps_a_moment():
    def rank():
        model = Net()
        optimizer = adamw(model.named_parameters(), ShardedOptimizer)
        train(model, optimizer)
        names = {p: n for n, p in model.named_parameters()}
        return sorted(names[p] for p in optimizer.state)

    ranks = run_ranks(rank, 3)
    assert sorted(name for names in ranks for name in names) == sorted(
        n for n, p in Net().named_parameters() if p.requires_grad
    )
    assert all(ranks), "each rank has some"


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_step_of_sixty_tensors_is_a_few_collectives_that_are_under_way_together(wrapped):
    def rank():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(19, 19) for _ in range(30)))
        model.requires_grad_(True)
        model[3].requires_grad_(False)
        wrapper = DDP(model) if wrapped else model
        optimizer = adamw(model.parameters(), ShardedOptimizer)
        wrapper(inputs(0, comm.rank())).square().mean().backward()
        if wrapped:
            wrapper.finish_gradient_sync()
        with comm.record() as ledger:
            optimizer.step()
        sent = [event for event in ledger.events if event.tag.startswith("param/")]
        together = max(event.t_issue for event in sent) <= min(event.t_wait for event in sent)
        return [tags(ledger), {event.op for event in sent} == {"broadcast"}, sum(e.numel for e in sent), together]

    counts, broadcasts, numel, together = same_on_all(run_ranks(rank, 3))
    assert counts == {"param": 3} | ({} if wrapped else {"used": 1, "grad": 1})
    assert broadcasts and numel == 29 * (19 * 19 + 19), "the frozen layer is not sent"
    assert together


def test_large_weights_travel_in_several_messages_and_types_apart(monkeypatch):
    monkeypatch.setattr("pellucid.parallel.layout.CHUNK_BYTES", 4096)

    def rank():
        parameters = odd_sizes()
        optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=1.0)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + comm.rank())
        with comm.record() as ledger:
            optimizer.step()
        right = all(torch.equal(p, torch.full_like(p, -1.5)) for p in parameters)
        return [right, tags(ledger), max(event.payload_bytes for event in ledger.events)]

    right, counts, largest = same_on_all(run_ranks(rank, 2))
    assert right and 10 < counts["param"] < len(odd_sizes()), "several tensors a message"
    assert counts["grad"] > 10 and largest <= max(p.nbytes for p in odd_sizes())


def test_a_frozen_parameter_stays_and_one_that_is_unfrozen_later_is_refused_by_name():
    def rank():
        model = Net()
        optimizer = adamw(model.named_parameters(), ShardedOptimizer)
        train(model, optimizer, range(2))
        stayed = torch.equal(model.frozen.weight, Net().frozen.weight)
        state = sorted(optimizer.state_dict()["state"])
        model.frozen.requires_grad_(True)
        message = r"parameter 4 \(frozen\.weight\) was frozen .* make a new ShardedOptimizer"
        with pytest.raises(ConfigError, match=message):
            train(model, optimizer)
        return [stayed, state]

    assert run_ranks(rank, 2) == [[True, [0, 1, 2, 3, 6, 7]]] * 2


def test_a_process_group_divides_over_its_ranks_alone():
    def rank():
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        group = groups[dist.get_rank() % 2]
        results = []
        for sharded in (True, False):
            model = Net()
            wrapper = DDP(model, process_group=group) if not sharded else model
            if sharded:
                optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, group, lr=0.1, momentum=0.9)
                owners = sorted({*optimizer.owners.values()})
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            train(wrapper, optimizer, range(2), rank=dist.get_rank())
            results.append([digest(model), fingerprint(optimizer.state_dict())])
        return [results[0] == results[1], owners, results[0]]

    ranks = run_ranks(rank, 4)
    assert [found[:2] for found in ranks] == [[True, [0, 1]]] * 4
    assert ranks[0][2] == ranks[2][2] != ranks[1][2] == ranks[3][2], "two groups, two trainings"


def test_a_parameter_that_does_not_lie_row_by_row_in_memory_is_trained_saved_and_loaded():
    def rank():
        results = []
        for sharded in (ShardedOptimizer, None):
            weight = nn.Parameter(torch.randn(7, 19, generator=torch.Generator().manual_seed(0)).t())
            assert not weight.is_contiguous()
            params, options = (
                [weight, nn.Parameter(torch.zeros(3))],
                {"lr": 0.01, "fused": True},
            )  # reads memory in order
            optimizer = (
                sharded(params, torch.optim.AdamW, **options) if sharded else torch.optim.AdamW(params, **options)
            )
            for step in range(4):
                weight.grad = None
                (inputs(step, 0) @ weight).square().mean().backward()
                optimizer.step()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            results.append([digest(nn.ParameterList([weight])), fingerprint(optimizer.state_dict())["0"]])
        return results

    ours, plain = same_on_all(run_ranks(rank, 2))
    assert ours == plain


# -- state --------------------------------------------------------------------------------------------------


def trained(*, steps=3, rank=0):
    """Every rank on the data of one: runs on any number of ranks can be compared."""
    model = Net()
    optimizer = adamw(model.named_parameters(), ShardedOptimizer)
    train(model, optimizer, range(steps), rank=rank)
    return model, optimizer


def test_a_state_saved_by_any_number_of_ranks_loads_into_any_other_and_training_goes_on(tmp_path):
    def write():
        model, optimizer = trained()
        state = optimizer.state_dict()
        if comm.rank() == 0:
            torch.save([model.state_dict(), state], tmp_path / f"{comm.world_size()}.pt")
        saved = fingerprint(state)
        train(model, optimizer, range(3, 5), rank=0)
        return [saved, digest(model)]

    def read():
        found = {}
        for saved in (1, 2, 3, 4):
            weights, state = torch.load(tmp_path / f"{saved}.pt", weights_only=True)
            model = Net()
            model.load_state_dict(weights)
            optimizer = adamw(model.named_parameters(), ShardedOptimizer)
            optimizer.load_state_dict(state)
            loaded = fingerprint(optimizer.state_dict())
            train(model, optimizer, range(3, 5), rank=0)
            found[saved] = [loaded, digest(model), model.last.weight.tolist()]
        return found

    wrote = {1: write()} | {size: same_on_all(run_ranks(write, size)) for size in (2, 3, 4)}
    reference = None
    for size in (1, 2, 3, 4):
        found = read() if size == 1 else same_on_all(run_ranks(read, size))
        for saved, (loaded, weights, values) in found.items():
            state, continued = wrote[int(saved)]
            assert loaded == state and len(state) == 6, f"saved by {saved}, loaded by {size}"
            if int(saved) == size:
                assert weights == continued, f"going on with {size} ranks is not bit-identical"
            reference = reference or values
            torch.testing.assert_close(torch.tensor(values), torch.tensor(reference), rtol=1e-5, atol=1e-6)


def test_loaded_by_as_many_ranks_training_goes_on_to_the_bit_on_data_of_each_rank():
    def rank():
        model = DDP(Net())
        optimizer = adam_of_groups(model.parameters(), ShardedOptimizer)
        train(model, optimizer, range(3))
        again = Net()
        again.load_state_dict(model.state_dict())
        again = DDP(again)
        other = adam_of_groups(again.parameters(), ShardedOptimizer)
        other.load_state_dict(optimizer.state_dict())
        apart = [optimizer.state[p]["exp_avg"].data_ptr() for p in optimizer.state]
        assert not {*apart} & {other.state[p]["exp_avg"].data_ptr() for p in other.state}, "a copy"
        for one, its in ((model, optimizer), (again, other)):
            train(one, its, range(3, 5))
        return [digest(model) == digest(again), fingerprint(optimizer.state_dict()) == fingerprint(other.state_dict())]

    assert run_ranks(rank, 3) == [[True, True]] * 3


def test_the_state_of_several_ranks_is_complete_on_each_and_plain_adamw_goes_on_with_it(tmp_path):
    def rank():
        model, optimizer = trained()
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / f"{comm.rank()}.pt")
        train(model, optimizer, range(3, 5), rank=0)
        return digest(model)

    continued = same_on_all(run_ranks(rank, 2))
    for rank in range(2):
        weights, state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        model = Net()
        model.load_state_dict(weights)
        plain = adamw(model.named_parameters())
        plain.load_state_dict(state)
        assert fingerprint(plain.state_dict()) == fingerprint(state)
        assert plain.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
        train(model, plain, range(3, 5), rank=0)
        assert digest(model) == continued  # two equal gradients have an exact average


def test_a_plain_optimizers_state_goes_on_sharded_with_its_learning_rate():
    def rank():
        results = []
        for resumed in (True, False):
            model = Net()
            optimizer = adam_of_groups(model.parameters())
            optimizer.param_groups[1]["lr"] = 0.002
            train(model, optimizer, range(2), rank=0)
            if resumed:
                plain, optimizer = optimizer, adam_of_groups(model.parameters(), ShardedOptimizer)
                before = fingerprint(plain.state_dict())
                optimizer.load_state_dict(plain.state_dict())
            train(model, optimizer, range(2, 4), rank=0)
            assert fingerprint(plain.state_dict()) == before, "what is loaded is copied"
            results.append([digest(model), [group["lr"] for group in optimizer.param_groups]])
        return results

    sharded, plain = same_on_all(run_ranks(rank, 2))
    assert sharded == plain and plain[1] == [0.03, 0.002]


@pytest.mark.parametrize("of_weights, of_moments", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_keep_their_type_where_torchs_own_loading_would_cast_them(of_weights, of_moments):
    def rank():
        weights = [nn.Parameter(torch.zeros(n, 3, dtype=getattr(torch, of_weights))) for n in (4, 5, 6)]
        moment = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).to(getattr(torch, of_moments))
        plain, optimizer = adamw(weights), adamw(weights, ShardedOptimizer)
        state = plain.state_dict()
        for i, weight in enumerate(weights):
            of_it = moment[: len(weight)]
            state["state"][i] = {"step": torch.tensor(7.0), "exp_avg": of_it, "exp_avg_sq": of_it.square()}
        optimizer.load_state_dict(state)
        held = {str(s[key].dtype) for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}
        plain.load_state_dict(state)
        cast = str(plain.state[weights[0]]["exp_avg"].dtype)
        return [sorted(held), fingerprint(optimizer.state_dict()) == fingerprint(state), cast]

    expected = [[f"torch.{of_moments}"], True, f"torch.{of_weights}"]
    assert same_on_all(run_ranks(rank, 2)) == expected


def without(state, i, key=None):
    state = copy.deepcopy(state)
    if key is None:
        del state["state"][i]
    else:
        del state["state"][i][key]
    return state


def with_shape(state, i, key, shape):
    state = copy.deepcopy(state)
    state["state"][i][key] = torch.zeros(shape)
    return state


def renamed(state):
    state = copy.deepcopy(state)
    names = state["param_groups"][0]["param_names"]
    names[2], names[6] = names[6], names[2]
    return state


def regrouped(state):
    state = copy.deepcopy(state)
    group = state["param_groups"][0]
    state["param_groups"] = [group | {"params": group["params"][:3]}, group | {"params": group["params"][3:]}]
    return state


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda s: without(s, 6), r"no state for parameter 6 \(last\.weight\); give it an empty entry"),
        (lambda s: without(s, 6, "exp_avg_sq"), r"no exp_avg_sq for parameter 6 \(last\.weight\)"),
        (
            lambda s: with_shape(s, 2, "exp_avg", (19, 67)),
            r"exp_avg of parameter 2 \(first\.weight\) has shape \(19, 67\), the parameter \(67, 19\)",
        ),
        (lambda s: s | {"state": s["state"] | {8: s["state"][0]}}, "has state for parameter 8, this one has 8"),
        (regrouped, r"has groups of \[3, 5\] parameters, this one of \[8\]"),
        (renamed, r"parameter 2 of the saved optimizer is last\.weight, of this one first\.weight"),
    ],
    ids=["missing", "missing part", "shape", "extra", "groups", "names"],
)
def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(damage, message):
    def rank():
        _, optimizer = trained()
        before, lr = fingerprint(optimizer.state_dict()), optimizer.param_groups[0]["lr"]
        state = damage(optimizer.state_dict())
        for group in state["param_groups"]:
            group["lr"] = 5.0
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict(state)
        return fingerprint(optimizer.state_dict()) == before and optimizer.param_groups[0]["lr"] == lr

    assert run_ranks(rank, 2) == [True, True]


def test_the_state_of_a_new_optimizer_is_empty_and_one_that_no_step_reached_is_not_missing():
    def rank():
        model = Net()
        optimizer = adamw(model.parameters(), ShardedOptimizer)
        new = optimizer.state_dict()
        train(model, optimizer, all_of_it=False)
        before = optimizer.state_dict()
        optimizer.load_state_dict(before)
        plain = adamw(Net().parameters())
        plain.load_state_dict(before)
        same = fingerprint(optimizer.state_dict()) == fingerprint(before)
        optimizer.load_state_dict(new)
        return [new["state"], same, len(optimizer.state_dict()["state"])]

    assert run_ranks(rank, 2) == [[{}, True, 0]] * 2
