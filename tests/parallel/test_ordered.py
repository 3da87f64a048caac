"""parallel.reduction "ordered": a run has the same bits on 1, 2, 4 and 8 ranks, and says so where it would not."""

import hashlib
import json
import math
import os
import signal
from dataclasses import asdict
from fractions import Fraction

import pytest
import torch
from experts import EXPERTS
from experts import changes as of_model
from safetensors.torch import load_file
from support import MemorySplit, fork, random_lengths, recorded, run_ranks, tiny_config, windows
from test_plan import ORDINARY, check_plan
from torch import nn

from pellucid.data.batches import Windows
from pellucid.errors import ConfigError, TrainingError
from pellucid.model import Transformer
from pellucid.parallel import DDP, comm, create_executor, ordered
from pellucid.parallel.executor import Executor
from pellucid.parallel.fingerprint import weights_sha256
from pellucid.parallel.layout import parameter_infos
from pellucid.parallel.ordered import MicroBatchTree, global_norm
from pellucid.parallel.parts import Part
from pellucid.train import Callback, Trainer, loop

STEPS, MICRO_BATCHES, FEW = 6, 8, 3
RUN = dict(
    model__hidden_size=20, model__intermediate_size=27, model__head_dim=10, model__dropout=0.1, optim__max_grad_norm=0.4,
    optim__weight_decay=0.1, optim__schedule="constant", parallel__bucket_size_mb=0.008, train__steps=STEPS,
    train__global_batch=2 * MICRO_BATCHES,
    train__micro_batch=2, train__val_every=STEPS, train__save_every=0,
)  # fmt: skip
"""A model of odd sizes, several buckets, 8 micro-batches a step."""


def data():
    """Windows of long documents and of documents of one token, of which nothing is supervised."""
    lengths = [n for length in random_lengths(30) for n in ([length] if length % 2 else [1] * length)]
    return Windows(MemorySplit(lengths), 16)  # type: ignore[arg-type]


class Steps(Callback):
    """Of each step loss, norm and a hash of all weights, and the targets of each of this rank's micro-batches."""

    def __init__(self):
        self.seen, self.targets, self.validations = [], [], []

    def on_batch_end(self, trainer, info):
        self.targets.append([info.step, int(info.batch.loss_mask.sum())])

    def on_optimizer_step(self, trainer, info):
        self.seen.append([info.loss, info.grad_norm, weights_sha256(trainer.setup.executor.weights())])

    def on_validation(self, trainer, info):
        self.validations.append(info.loss)


def train(mode, *, out="", reduction="ordered", callbacks=(), resume=False, **changes):
    """What this rank knows after a run."""
    config = tiny_config(out, parallel__mode=mode, parallel__reduction=reduction, **(RUN | changes))
    steps = Steps()
    trainer = Trainer(
        config,
        callbacks=[steps, *callbacks],
        train_data=data(),
        val_data=windows(3, seed=5, score_once=True),
    )
    trainer.train(resume=resume)
    return {"steps": steps.seen, "validations": steps.validations, "targets": steps.targets}


def outcome(mode, size, **changes):
    """Losses, norms, hashes and validations of a run, which are the same on each of its ranks."""
    ranks = run_ranks(lambda: train(mode, **changes), size, timeout=120)
    results = [[rank["steps"], rank["validations"]] for rank in ranks]
    assert all(result == results[0] for result in results), "replicas differ"
    return results[0]


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    train("none", reduction="sum", train__steps=1)


@pytest.fixture(scope="module")
def alone():
    """One process, and that its run is one that could differ."""
    (found,) = run_ranks(lambda: train("none"), 1)
    losses, norms, hashes = zip(*found["steps"], strict=True)
    assert len(set(hashes)) == STEPS and losses[0] > losses[-1]
    assert sum(norm > 0.4 for norm in norms) >= STEPS - 1, "clipping must act"
    counts = {}
    for step, targets in found["targets"]:
        counts.setdefault(step, []).append(targets)
    assert len(set(counts[1])) > 4, "masks must be uneven"
    assert sorted({len(c) for c in counts.values()}) == [5, 8], "the last step of an epoch has fewer micro-batches"
    assert len(data()) % 2 == 1, "the last of them has an empty row"
    return [found["steps"], found["validations"]]


# -- the same bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_losses_norms_and_all_weights_are_those_of_one_process(alone, mode, size):
    assert outcome(mode, size) == alone


def test_plain_sums_give_other_bits_on_each_number_of_ranks(alone):
    hashes = {
        outcome(mode, size, reduction="sum", train__steps=FEW)[0][-1][2]
        for mode, size in [("none", 1), ("ddp", 2), ("zero1", 4)]
    }
    assert len(hashes | {alone[0][FEW - 1][2]}) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"optim__name": "muon", "optim__max_grad_norm": None},
        {"train__dtype": "bfloat16"},
        {"model__tie_word_embeddings": False, "model__attention_bias": True, "model__qk_norm": True},
        {"model__attend": "canonical"},
    ],
    ids=["muon", "bfloat16", "untied with biases", "canonical"],
)
@pytest.mark.parametrize(
    "mode, size",
    [("zero1", 4), ("ddp", 2), pytest.param("zero1", 8, marks=pytest.mark.slow)],
)
def test_other_runs_are_the_same_too(alone, mode, size, changes):
    changes = changes | {"train__steps": FEW, "train__val_every": 0}
    one = outcome("none", 1, **changes)
    assert one[0][-1] != alone[0][FEW - 1] and outcome(mode, size, **changes) == one


def test_activation_checkpointing_changes_no_bit(alone):
    """Dropout of the forward that is run again is that of the first."""
    few = {"train__steps": FEW, "train__activation_checkpointing": True}
    assert outcome("ddp", 2, **few)[0] == alone[0][:FEW]
    assert outcome("none", 1, model__dropout=0.0, **few)[0] != alone[0][:FEW], "dropout must act"


class Routers(Callback):
    """What is logged of a mixture of experts."""

    def __init__(self):
        self.seen = []

    def on_optimizer_step(self, trainer, info):
        self.seen.append(asdict(info.router))


@pytest.mark.parametrize("mode, size", [("ddp", 2), ("zero1", 4)])
def test_a_mixture_of_experts_has_the_same_bits_too(mode, size):
    """Biases of routers are in the hash, and what is logged of them is the same."""

    def rank(mode):
        routers = Routers()
        found = train(mode, callbacks=[routers], train__steps=FEW, train__val_every=0, **of_model(EXPERTS))
        return [found["steps"], routers.seen]

    (one,) = run_ranks(lambda: rank("none"), 1)
    assert run_ranks(lambda: rank(mode), size) == [one] * size
    assert all(router["loss"] > 0 and router["load"] > 1 for router in one[1]) and len(one[1]) == FEW


@pytest.mark.slow
def test_a_compiled_run_is_the_same_too():
    changes = {"train__compile": True, "train__steps": 3, "train__val_every": 0}
    one = outcome("none", 1, **changes)
    for mode, size in [("ddp", 2), ("zero1", 4)]:
        assert outcome(mode, size, **changes) == one


def test_a_model_like_those_people_train_has_the_same_bits_too():
    """Matrices for which kernels go other ways than for small ones."""
    changes = {
        "model__hidden_size": 258, "model__intermediate_size": 353, "model__head_dim": 64, "model__vocab_size": 1031,
        "train__steps": 2, "train__val_every": 0, "parallel__bucket_size_mb": 0.5,
    }  # fmt: skip
    one = outcome("none", 1, **changes)
    assert outcome("zero1", 4, **changes) == one == outcome("ddp", 2, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("hidden, inner", [(258, 353), (384, 1024)])
def test_muon_gives_large_matrices_the_same_bits_whichever_others_a_rank_has(hidden, inner):
    changes = {
        "model__hidden_size": hidden, "model__intermediate_size": inner, "model__head_dim": 64, "optim__name": "muon",
        "model__num_hidden_layers": 3, "train__steps": 3, "train__val_every": 0, "parallel__bucket_size_mb": 1.0,
    }  # fmt: skip
    one = outcome("none", 1, **changes)
    assert outcome("zero1", 2, **changes) == one == outcome("zero1", 8, **changes)


class Stop(Callback):
    """As an interruption does, after a step."""

    def __init__(self, step):
        self.step = step

    def on_optimizer_step(self, trainer, info):
        if info.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "path",
    [
        [("ddp", 4), ("zero1", 2), ("none", 1)],
        [("none", 1), ("zero1", 8), ("ddp", 2)],
    ],
    ids=lambda path: " ".join(f"{mode}{size}" for mode, size in path),
)
def test_a_run_that_goes_on_with_other_ranks_ends_with_the_same_bits(tmp_path, alone, path):
    seen = []
    for (mode, size), stop in zip(path, (2, 4, None), strict=True):
        callbacks = [Stop(stop)] if stop else []
        part = dict(out=str(tmp_path / "run"), resume=True, callbacks=callbacks)
        seen += run_ranks(lambda mode=mode, part=part: train(mode, **part), size)[0]["steps"]
    assert seen == alone[0]
    last = load_file(tmp_path / f"run/checkpoints/step_{STEPS:08d}/model.safetensors")
    assert weights_sha256(last.items()) == alone[0][-1][2]


# -- versions that are wrong --------------------------------------------------------------------------------


def in_rank_order(patch):
    """As `comm.reduce_scatter` adds: a tree only for two ranks."""
    patch.setattr(ordered, "reduce_scatter", comm.reduce_scatter)


def own_part_first(patch):
    """Then those of others as they come: every part of a bucket is added in another order."""

    def reduce_scatter(full, shard, *, tag, owner=(), group=None):
        received, first, size = torch.empty_like(full), comm.rank(), comm.world_size()

        def add_up():
            rows = received.view(size, -1)
            shard.copy_(sum(rows[(first + i) % size] for i in range(size)))

        return comm.all_to_all(full, received, tag=tag, owner=owner, group=group).then(add_up)

    patch.setattr(ordered, "reduce_scatter", reduce_scatter)


def as_it_comes(patch):
    """A running sum on each rank."""

    def add(self, i):
        parameter = self._parameters[i]
        for level in list(self._sums[i]):
            parameter.grad.add_(self._sums[i].pop(level))
        if not self._last:
            self._sums[i][0], parameter.grad = parameter.grad, None

    patch.setattr(MicroBatchTree, "_add", add)


def dropout_by_rank(patch):
    patch.setattr(loop.Trainer, "_key_dropout", lambda self, micro: None)


def dropout_by_the_ranks_own_count(patch):
    seed = ordered.micro_batch_seed
    patch.setattr(loop, "micro_batch_seed", lambda s, step, number: seed(s, step, number % 2))


def norm_of_slices(patch):
    patch.setattr(Executor, "grad_norm", lambda self: global_norm_of_halves(self.gradients(), self.shards_gradients))


def global_norm_of_halves(parts, sharded):
    """In float32, from what a rank has of a tensor."""
    squares = sum(float(part.tensor.norm().square()) for part in parts)
    return math.sqrt(comm.all_reduce(squares, tag="grad_norm") if sharded else squares)


WRONG = {
    "added in rank order": (in_rank_order, "ddp", 4),
    "added in rank order, sharded": (in_rank_order, "zero1", 4),
    "added from the own part on": (own_part_first, "ddp", 4),
    "added as it comes": (as_it_comes, "ddp", 2),
    "dropout by rank": (dropout_by_rank, "ddp", 2),
    "dropout by the rank's own count": (dropout_by_the_ranks_own_count, "zero1", 4),
    "norm of slices": (norm_of_slices, "zero1", 2),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_caught(monkeypatch, alone, name):
    variant, mode, size = WRONG[name]
    with monkeypatch.context() as patch:
        variant(patch)
        found = outcome(mode, size, train__steps=FEW)
    assert found[0][-1][2] != alone[0][FEW - 1][2]


# -- the parts ----------------------------------------------------------------------------------------------


def binary(values):
    """The tree, written down as it is defined."""
    return values[0] if len(values) == 1 else binary(values[: len(values) // 2]) + binary(values[len(values) // 2 :])


@pytest.mark.parametrize("num", [1, 2, 4, 8, 16])
def test_a_rank_adds_its_micro_batches_in_a_tree_and_keeps_few_copies(num):
    torch.manual_seed(num)
    weight, seldom, never = (nn.Parameter(torch.randn(7, 3)) for _ in range(3))
    tree = MicroBatchTree([("weight", weight), ("seldom", seldom), ("never", never)])
    values = torch.randn(num, 7, 3)
    held = []
    for i, value in enumerate(values):
        with tree.micro_batch(i, last=i == num - 1):
            loss = (weight * value).sum()
            (loss + (seldom * value).sum() if i % 3 == 0 else loss).backward()
        held.append(tree.bytes_held / (weight.nbytes + seldom.nbytes))
    assert torch.equal(weight.grad, binary(list(values)))
    assert torch.equal(seldom.grad, binary([v if i % 3 == 0 else torch.zeros(7, 3) for i, v in enumerate(values)]))
    assert never.grad is None and held[-1] == 0
    assert max(held) <= math.log2(num)
    if num > 4:
        assert not torch.equal(weight.grad, sum(values)), "a running sum has other bits, or this shows nothing"


@pytest.mark.parametrize("came", range(1, 9))
def test_micro_batches_that_are_missing_at_the_end_count_as_zero(came):
    torch.manual_seed(came)
    values = torch.randn(8, 50)
    values[came:] = 0
    weight = nn.Parameter(torch.zeros(50))
    tree = MicroBatchTree([("weight", weight)])
    for window in range(2):
        weight.grad = None
        for i in range(came):
            with tree.micro_batch(i, last=i == came - 1):
                (weight * values[i]).sum().backward()
        assert torch.equal(weight.grad, binary(list(values))), window


@pytest.mark.parametrize("size", [1, 2])
def test_a_sum_has_no_negative_zero(size):
    """Whose sign would say how many micro-batches were added."""

    def rank():
        model = nn.Linear(3, 1, bias=False)
        executor = create_executor("ddp", 2, average=False, reduction="ordered")
        wrapped, *_ = executor.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            with executor.accumulate(wrapped):
                executor.backward((wrapped(torch.ones(1, 3)) * -0.0).sum())
        executor.finish_grads()
        return [math.copysign(1, value) for value in model.weight.grad.flatten().tolist()]

    assert run_ranks(rank, size) == [[1, 1, 1]] * size


def test_buckets_leave_during_backward_and_are_gathered_in_order(tmp_path):
    run_ranks(lambda: train("ddp", out=str(tmp_path / "run"), train__steps=2, parallel__bucket_size_mb=0.004), 2)
    lines = [json.loads(line) for line in (tmp_path / "run/ledger/rank00000.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["step"] == 2 and line["tag"].startswith("grad/")]
    sent = [line for line in own if line["op"] == "all_to_all"]
    assert [line["tag"] for line in sent] == [f"grad/bucket{i}" for i in range(len(sent))] and len(sent) > 4
    assert sum(line["phase"] == "backward" and line["micro"] == 3 for line in sent) >= len(sent) - 1
    gathered = [line for line in own if line["op"] == "all_gather"]
    assert [line["tag"] for line in gathered] == [f"{line['tag']}/gather" for line in sent]
    assert len(own) == 2 * len(sent)


def test_a_gradient_that_comes_twice_or_outside_is_refused():
    model = nn.Linear(2, 1, bias=False)
    executor = create_executor("none", 2, reduction="ordered")
    wrapped, *_ = executor.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    twice = pytest.raises(TrainingError, match=r"the gradient of weight arrived twice .* call backward once")
    with twice, executor.accumulate(wrapped):
        executor.backward(wrapped(torch.ones(1, 2)).sum())
        executor.backward(wrapped(torch.ones(1, 2)).sum())
    with pytest.raises(TrainingError, match=r"inside executor\.accumulate"):
        executor.backward(wrapped(torch.ones(1, 2)).sum())


def test_weights_that_lie_oddly_in_memory_are_moved():
    storage = torch.zeros(65)
    model = nn.Linear(64, 1, bias=False)
    model.weight.data = storage[1:].view(1, 64)
    assert model.weight.data_ptr() % 64
    create_executor("none", reduction="ordered").prepare(model)
    assert model.weight.data_ptr() % 64 == 0


# -- the norm -----------------------------------------------------------------------------------------------


def gradients(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": (301, 7), "b": (64,), "c": (1,), "d": (300_001,)}
    return {
        name: torch.randn(size, generator=generator)
        * 10.0 ** (5 * torch.randn(size, generator=generator)).clamp(-18, 17)
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_the_norm_is_the_exact_one_to_the_last_bits(scale):
    tensors = {name: tensor.clamp(-1e17, 1e17) * scale for name, tensor in gradients().items()}
    found = global_norm([Part(n, tuple(t.shape), 0, t) for n, t in tensors.items()], sharded=False)
    total = sum(Fraction(value) ** 2 for t in tensors.values() for value in t.double().flatten().tolist())
    assert found == pytest.approx(float(total) ** 0.5, rel=1e-14) and found > 0


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_norm_does_not_depend_on_who_holds_which_slice(size):
    tensors = gradients()
    whole = global_norm([Part(n, tuple(t.shape), 0, t) for n, t in tensors.items()], sharded=False)

    def rank():
        parts = []
        for number, (name, tensor) in enumerate(tensors.items()):
            cuts = [0, *sorted(64 * (tensor.numel() * (r + number % 2) // size // 64) for r in range(1, size))]
            cuts.append(tensor.numel())
            start, stop = cuts[comm.rank()], cuts[comm.rank() + 1]
            if start < stop:
                parts.append(Part(name, tuple(tensor.shape), start, tensor.view(-1)[start:stop]))
        return [global_norm(parts, sharded=True), sum(part.tensor.numel() for part in parts)]

    found = run_ranks(rank, size)
    assert [norm for norm, _ in found] == [whole] * size
    assert sum(numel for _, numel in found) == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_makes_the_norm_so(value):
    tensor = torch.ones(200)
    tensor[77] = value
    assert math.isnan(global_norm([Part("a", (200,), 0, tensor)], sharded=False))
    assert global_norm([], sharded=False) == 0.0


# -- plan and ledger ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
@pytest.mark.parametrize("size, size_mb", [(2, 25), (4, 0.005)])
def test_an_ordinary_step_sends_what_was_planned(tmp_path, mode, size, size_mb):
    """Losses of a step, norm and gradients are other collectives than plain sums have."""
    changes = dict(parallel__bucket_size_mb=size_mb, train__global_batch=2 * size, train__micro_batch=1, train__steps=3)
    run_ranks(lambda: train(mode, out=str(tmp_path / "run"), **changes), size)
    infos = parameter_infos(Transformer(tiny_config(**RUN).model, device="meta"))
    own = check_plan(tmp_path / "run", size, mode, infos, size_mb, reduction="ordered")
    plain = check_plain(own, mode, size, infos, size_mb)
    weights = sum(info.num_bytes for info in infos)
    assert own.gradients_bytes == plain.gradients_bytes + weights + own.padding_bytes // 2 * (mode == "ddp")
    assert len(recorded(tmp_path / "run", size - 1, ORDINARY)) == len(own.step)


def check_plain(own, mode, size, infos, size_mb):
    """Gradients and weights are as many bytes as plain sums send, but for padding."""
    from pellucid.parallel.plan import plan

    plain = plan(infos, mode=mode, world_size=size, micro_batches=2, bucket_size_mb=size_mb)

    def sent(planned):
        large = [row.wire_bytes for row in planned.step if row.tag.startswith(("grad/", "param/"))]
        return sum(large) - planned.padding_bytes * (size - 1) / size

    assert sent(own) == pytest.approx(sent(plain), abs=8 * len(own.step))
    return plain


def test_every_doubling_of_micro_batches_costs_one_copy_of_the_gradients():
    from pellucid.parallel.plan import plan

    infos = parameter_infos(Transformer(tiny_config(**RUN).model, device="meta"))
    weights = sum(info.num_bytes for info in infos)
    held = [
        plan(infos, mode="none", world_size=1, micro_batches=k, reduction="ordered").gradients_bytes / weights
        for k in (1, 2, 4, 8, 16)
    ]
    assert held == [1, 2, 3, 4, 5]


# -- refused ------------------------------------------------------------------------------------------------


REFUSED = {
    "another mode": ("torch_ddp", {}, r"works in modes none, ddp, zero1, and parallel\.mode is torch_ddp; choose"),
    "six micro-batches": ("zero1", {"train__global_batch": 12}, r"global_batch / train\.micro_batch is 6; .* 4 or 8"),
    "another type": (
        "ddp",
        {"parallel__ddp__reduce_dtype": "bfloat16"},
        r'ddp\.reduce_dtype is bfloat16; set it to "none"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_hold_is_refused_before_the_first_step(tmp_path, size, name):
    mode, changes, message = REFUSED[name]

    def rank():
        with pytest.raises(ConfigError, match=r'parallel\.reduction "ordered" .*' + message):
            train(mode, out=str(tmp_path / "run"), **changes)

    run_ranks(rank, size)
    assert not (tmp_path / "run").exists()


def test_three_ranks_are_refused():
    def rank():
        with pytest.raises(ConfigError, match=r"needs 1, 2, 4, 8, \.\.\. ranks, and there are 3; change --nproc"):
            train("ddp", train__global_batch=24)

    run_ranks(rank, 3)


def test_more_than_one_thread_is_refused():
    def two_threads():
        torch.set_num_threads(2)
        with pytest.raises(ConfigError, match=r"needs one thread a rank, .* has 2; set OMP_NUM_THREADS=1"):
            train("none")
        train("none", reduction="sum", train__steps=1)

    assert fork(two_threads) == 0


def test_another_device_is_refused(monkeypatch):
    from pellucid.train import setup

    config = tiny_config(parallel__reduction="ordered")
    with pytest.raises(ConfigError, match=r'train\.device is cuda:0; set train\.device to "cpu"'):
        setup._refuse_order(config, torch.device("cuda:0"))


def test_a_reduction_of_another_name_is_refused():
    with pytest.raises(ConfigError, match=r'parallel\.reduction must be "sum" or "ordered", got \'orderd\''):
        create_executor("ddp", reduction="orderd")
    with pytest.raises(ConfigError, match=r"parallel\.reduction must be one of sum, ordered"):
        tiny_config(parallel__reduction="orderd")


def test_ddp_alone_adds_what_ranks_hold_in_a_tree():
    def rank():
        model = nn.Linear(37, 1, bias=False)
        wrapped = DDP(model, average=False, reduction="ordered")
        wrapped(value(comm.rank())).sum().backward()
        wrapped.finish_gradient_sync()
        return model.weight.grad.flatten().tolist()

    def value(r):
        return torch.randn(1, 37, generator=torch.Generator().manual_seed(r))

    expected = binary([value(r) for r in range(4)]).flatten()
    assert not torch.equal(expected, sum(value(r) for r in range(4)).flatten())
    assert run_ranks(rank, 4) == [expected.tolist()] * 4


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_in_a_loop_of_ones_own_ranks_average_to_the_same_bits(mode):
    """A mean over ranks of means over micro-batches is divided by powers of two, which rounds nothing."""

    def rank():
        torch.manual_seed(0)
        model, k = nn.Sequential(nn.Linear(37, 11), nn.Tanh(), nn.Linear(11, 1)), 4 // comm.world_size()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        executor = create_executor(mode, k, reduction="ordered")
        wrapped, stepper, *_ = executor.prepare(model, optimizer)
        norms = []
        for step in range(3):
            for i in range(comm.rank() * k, (comm.rank() + 1) * k):
                x = torch.randn(3, 37, generator=torch.Generator().manual_seed(10 * step + i))
                with executor.accumulate(wrapped):
                    executor.backward(wrapped(x).square().mean() / k)
            norms.append(executor.clip_grad_norm_(0.1))
            stepper.step()
        return [norms, weights_sha256(executor.weights())]

    (one,) = run_ranks(rank, 1)
    assert run_ranks(rank, 2) == [one] * 2 and run_ranks(rank, 4) == [one] * 4
    assert min(one[0]) > 0.1, "clipping must act"


# -- hashes in the log --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, size, reduction", [("none", 1, "sum"), ("zero1", 2, "sum"), ("ddp", 2, "ordered")])
def test_the_log_has_a_hash_of_all_weights(tmp_path, mode, size, reduction):
    """Of the checkpoint's, put together as documented."""
    changes = dict(train__hash_every=2, train__steps=5, train__save_every=4, train__keep_last=0)
    run_ranks(lambda: train(mode, out=str(tmp_path / "run"), reduction=reduction, **changes), size)
    log = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    hashes = {line["step"]: line["sha256"] for line in log if line["event"] == "hash"}
    assert list(hashes) == [2, 4] and hashes[2] != hashes[4]
    lines = []
    weights = load_file(tmp_path / "run/checkpoints/step_00000004/model.safetensors")
    for name in sorted(weights):
        shape = "x".join(str(n) for n in weights[name].shape)
        lines.append(f"{name} float32 {shape} {hashlib.sha256(weights[name].numpy().tobytes()).hexdigest()}\n")
    assert len(lines) > 10 and hashlib.sha256("".join(lines).encode()).hexdigest() == hashes[4]


def test_a_hash_knows_name_type_shape_and_value():
    base = {"b": torch.arange(6.0), "a": torch.tensor(1.0)}
    variants = [
        base,
        {"c": base["b"], "a": base["a"]},
        {"b": base["b"].view(2, 3), "a": base["a"]},
        {"b": base["b"].view(torch.int32), "a": base["a"]},
        {"b": base["b"].to(torch.bfloat16), "a": base["a"]},
        {"b": base["b"], "a": torch.tensor(-1.0)},
        {"b": base["b"]},
    ]
    assert len({weights_sha256(variant.items()) for variant in variants}) == len(variants)
    assert weights_sha256(reversed(base.items())) == weights_sha256(base.items())
    strided = torch.stack([base["b"], base["b"]], 1)[:, 0]
    assert weights_sha256([("b", strided), ("a", base["a"]), ("x", None)]) == weights_sha256(base.items())
