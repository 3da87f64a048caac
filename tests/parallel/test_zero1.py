"""zero1 holds one copy of the optimizer's state over all ranks, and steps as the unsharded optimizer does."""

import hashlib
from itertools import pairwise

import pytest
import torch
from nets import Net
from safetensors.torch import load_file, save_file
from support import run_ranks, whole_state
from torch import nn

from pellucid.errors import CheckpointError, ConfigError, TrainingError
from pellucid.parallel import DDP, comm, create_executor
from pellucid.parallel.parts import WholeTensors


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    prepared("none", Net())


def adamw(model, **changes):
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], **({"lr": 1e-2, "fused": True} | changes)
    )


def prepared(mode, model, optimizer=None, *, steps=1, all_of_it=lambda step: True, size_mb=25.0, scheduler=None):
    """An executor after some steps on data of this rank's own; of one process in mode none: on everybody's."""
    options = {} if mode == "none" else {"bucket_size_mb": size_mb}
    executor = create_executor(mode, **options)
    wrapped, stepper, _, scheduler = executor.prepare(model, optimizer or adamw(model), None, scheduler)
    for step in range(steps):
        train(executor, wrapped, stepper, step, all_of_it=all_of_it(step))
        if scheduler is not None:
            scheduler.step()
    return executor, wrapped, stepper


def inputs(step, rank):
    return torch.randn(5, 19, generator=torch.Generator().manual_seed(100 * step + rank))


def train(executor, wrapped, stepper, step, *, all_of_it=True):
    with executor.accumulate(wrapped):
        executor.backward(wrapped(inputs(step, comm.rank()), all_of_it=all_of_it).square().mean())
    stepper.step()


def one_process(model, optimizer, size, *, steps=1):
    """The same steps on the inputs of all ranks together, with torch alone."""
    for step in range(steps):
        torch.stack([model(inputs(step, rank)).square().mean() for rank in range(size)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fingerprint(tensors):
    """Hash, dtype and shape by name."""

    def of(tensor):
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return [hashlib.sha256(data).hexdigest(), str(tensor.dtype), list(tensor.shape)]

    return {name: of(tensor) for name, tensor in tensors.items()}


def weights(model):
    return fingerprint(dict(model.named_parameters()))


# -- who holds what -----------------------------------------------------------------------------------------


def aligned():
    """Every tensor a multiple of 64 elements: no padding between them."""
    return nn.Sequential(nn.Linear(64, 192), nn.Linear(192, 64), nn.Linear(64, 128, bias=False))


@pytest.mark.parametrize("build", [Net, aligned])
@pytest.mark.parametrize("size, size_mb", [(2, 25.0), (3, 0.002), (4, 25.0)])
def test_the_moments_of_all_ranks_are_one_copy_and_balanced(size, size_mb, build):
    def rank():
        model = build()
        executor = create_executor("zero1", bucket_size_mb=size_mb)
        _, stepper, *_ = executor.prepare(model, adamw(model))
        with executor.accumulate(model):
            executor.backward(sum(parameter.sum() for parameter in model.parameters()))
        stepper.step()
        held = [state[key].numel() for state in stepper.state.values() for key in ("exp_avg", "exp_avg_sq")]
        owned = [[piece.name, piece.start, piece.weight.numel()] for piece in executor.slices.values()]
        return [sum(held), owned, len(executor.buckets)]

    results = run_ranks(rank, size)
    numel = {name: p.numel() for name, p in build().named_parameters() if p.requires_grad}
    held = [result[0] // 2 for result in results]
    assert sum(held) == sum(numel.values())
    for name, length in numel.items():
        spans = sorted((start, start + n) for _, owned, _ in results for owner, start, n in owned if owner == name)
        assert spans[0][0] == 0 and spans[-1][1] == length, name
        assert all(left[1] == right[0] for left, right in pairwise(spans)), name
    padding = sum(-n % 64 for n in numel.values())
    assert max(held) - sum(held) / size <= 64 * results[0][2] + padding


def test_weights_of_the_optimizer_share_memory_with_the_models():
    def rank():
        executor, *_ = prepared("zero1", Net())
        for piece in executor.slices.values():
            whole = piece.parameter.detach().view(-1)[piece.start :]
            assert piece.weight.data_ptr() == whole.data_ptr()
        return len(executor.slices)

    assert all(run_ranks(rank, 2))


# -- the same steps as the whole optimizer ------------------------------------------------------------------


@pytest.mark.parametrize("size_mb", [25.0, 0.002])
@pytest.mark.parametrize(
    "build",
    [
        adamw,
        lambda model: adamw(model, fused=False, amsgrad=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    ],
    ids=["fused adamw", "amsgrad", "momentum"],
)
def test_the_state_of_all_ranks_is_the_unsharded_optimizers_to_the_bit(build, size_mb):
    """Against torch's optimizer over whole parameters, whose gradients DDP averages: sums of two have one order."""

    def rank():
        results = []
        for mode in ("ddp", "zero1"):
            model = Net()
            executor, *_ = prepared(mode, model, build(model), steps=5, size_mb=size_mb)
            results.append([fingerprint(whole_state(executor)), weights(model)])
        return results

    ranks = run_ranks(rank, 2)
    (whole, sharded), (_, other) = ranks
    assert whole == sharded and len(whole[0]) >= 6
    assert other == whole, "the weights are on all"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_steps_equal_one_process_on_everybodys_data(size):
    def rank():
        model = Net()
        prepared("zero1", model, torch.optim.SGD(model.parameters(), lr=0.01), steps=3, size_mb=0.002)
        return {name: parameter.tolist() for name, parameter in model.named_parameters()}

    ranks = run_ranks(rank, size)
    model = Net()
    one_process(model, torch.optim.SGD(model.parameters(), lr=0.01), size, steps=3)
    start = dict(Net().named_parameters())
    for name, parameter in model.named_parameters():
        for result in ranks:
            torch.testing.assert_close(torch.tensor(result[name]), parameter.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter, start[name]) == name.startswith("frozen"), name


def test_a_learning_rate_that_is_edited_acts():
    def rank():
        model = Net()
        executor, wrapped, stepper = prepared("zero1", model)
        moved = weights(model) != weights(Net())
        before = weights(model)
        for group in stepper.param_groups:
            group["lr"] = 0.0
        train(executor, wrapped, stepper, 1)
        return moved, before == weights(model)

    assert run_ranks(rank, 2) == [[True, True]] * 2


def test_a_schedule_of_twenty_steps_equals_the_unsharded_run():
    def rank():
        results = []
        for mode in ("ddp", "zero1"):
            model = Net()
            optimizer = adamw(model)
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: (step + 1) / 10 if step < 10 else 0.9**step
            )
            _, _, stepper = prepared(mode, model, optimizer, steps=20, scheduler=schedule)
            results.append([stepper.param_groups[0]["lr"], weights(model)])
        return results

    for whole, sharded in run_ranks(rank, 2):
        assert whole == sharded and whole[0] == pytest.approx(1e-2 * 0.9**20)


# -- what moves ---------------------------------------------------------------------------------------------


def test_new_weights_travel_once_a_bucket_and_frozen_ones_never():
    def rank():
        executor, wrapped, stepper = prepared("zero1", Net())
        with comm.record() as ledger:
            train(executor, wrapped, stepper, 1)
        return len(executor.buckets), [[event.op, event.tag, list(event.owner)] for event in ledger.events]

    for num_buckets, events in run_ranks(rank, 2):
        gathered = [owner for op, tag, owner in events if tag.startswith("param/")]
        assert num_buckets == len(gathered) == 1, "a few thousand weights are one collective"
        assert sorted(op for op, tag, _ in events) == ["all_gather", "all_reduce", "reduce_scatter"], events
        assert not any(name.startswith("frozen") for _, _, owner in events for name in owner)


def test_frozen_parameters_stay_although_the_optimizer_was_given_them():
    def rank():
        model = Net()
        prepared("zero1", model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), steps=2)
        return torch.equal(model.frozen.weight, Net().frozen.weight), torch.equal(model.last.weight, Net().last.weight)

    assert run_ranks(rank, 2) == [[True, False]] * 2


def test_a_parameter_that_no_rank_uses_stays_and_one_that_some_use_is_averaged():
    def rank():
        model = Net()
        executor, wrapped, stepper = prepared(
            "zero1", model, adamw(model, weight_decay=0.5), all_of_it=lambda step: False
        )
        untouched = torch.equal(model.seldom, Net().seldom)
        names = sorted({key.rpartition("/")[0] for key in whole_state(executor)})
        on_one = model(inputs(1, 1)).square().mean()
        expected = torch.autograd.grad(on_one, model.seldom)[0] / 2
        with executor.accumulate(wrapped):
            executor.backward(wrapped(inputs(1, comm.rank()), all_of_it=comm.rank() == 1).square().mean())
        executor.finish_grads()
        mine = [g.tensor.tolist() for g in executor.gradients() if g.name == "seldom"]
        stepper.step()
        return [untouched, names, mine, expected.tolist(), model.seldom.abs().min().item() > 0, weights(model)]

    first, second = run_ranks(rank, 2)
    assert first[0] and first[1] == ["first.bias", "first.weight", "last.bias", "last.weight", "scale"]
    averaged = [value for part in first[2] + second[2] for value in part]
    assert averaged == pytest.approx(first[3]) and 0.0 not in first[3]
    assert first[4] and first[5] == second[5]


def test_gradients_are_kept_apart_until_the_last_micro_batch_of_a_window():
    def rank():
        model = Net()
        executor = create_executor("zero1", 2)
        wrapped, *_ = executor.prepare(model, adamw(model))
        with comm.record() as ledger, executor.accumulate(wrapped):
            executor.backward(wrapped(inputs(0, comm.rank())).square().mean() / 2)
        assert not ledger.events
        own = model.last.weight.grad.flatten().tolist()
        with comm.record() as ledger:
            with executor.accumulate(wrapped):
                executor.backward(wrapped(inputs(1, comm.rank())).square().mean() / 2)
            executor.finish_grads()
        assert all(p.grad is None for p in model.parameters()), "final gradients are slices; no rank has whole ones"
        return [own, [event.tag for event in ledger.events]]

    (first, tags), (second, _) = run_ranks(rank, 2)
    assert first != second and tags == ["grad/bucket0", "used"]


# -- refusals -----------------------------------------------------------------------------------------------


def test_a_trainable_parameter_outside_the_optimizer_is_refused_by_name():
    def rank():
        model = Net()
        with pytest.raises(ConfigError, match=r"last\.bias is trainable but not in the optimizer; freeze it"):
            create_executor("zero1").prepare(
                model, torch.optim.SGD([p for n, p in model.named_parameters() if n != "last.bias"])
            )
        with pytest.raises(ConfigError, match="give one to prepare"):
            create_executor("zero1").prepare(model)

    run_ranks(rank, 2)


def test_a_model_is_taken_over_once():
    def rank():
        model = Net()
        prepared("zero1", model, steps=0)
        for mode in ("zero1", "ddp"):
            with pytest.raises(ConfigError, match="by another wrapper already"):
                prepared(mode, model, steps=0)
        with pytest.raises(ConfigError, match="wrapped in DDP already"):
            prepared("zero1", DDP(Net()), steps=0)

    run_ranks(rank, 2)


def test_the_inner_optimizer_may_not_step_while_gradients_are_on_the_wire():
    def rank():
        model = Net()
        optimizer = adamw(model)
        executor, wrapped, stepper = prepared("zero1", model, optimizer)
        with executor.accumulate(wrapped):
            executor.backward(wrapped(inputs(1, comm.rank())).square().mean())
        with pytest.raises(TrainingError, match="gradients are still on the wire"):
            optimizer.step()
        stepper.step()
        with pytest.raises(ConfigError, match=r"step\(closure\) is not supported"):
            stepper.step(lambda: 0.0)

    run_ranks(rank, 2)


# -- an optimizer of one's own ------------------------------------------------------------------------------


class Normalized(torch.optim.Optimizer):
    """Moves each tensor by lr along its whole direction: a slice alone would move further."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.sub_(mean / mean.norm(), alpha=group["lr"])


@pytest.mark.parametrize("size", [2, 3])
def test_an_optimizer_that_looks_at_whole_tensors_gets_whole_tensors(size):
    def rank():
        model = Net()
        executor, *_ = prepared("zero1", model, Normalized(model.parameters(), 0.1), steps=3)
        owned = [[piece.name, list(piece.weight.shape)] for piece in executor.slices.values()]
        state = {key: value.tolist() for key, value in whole_state(executor).items()}
        return [owned, {name: p.tolist() for name, p in model.named_parameters()}, state]

    ranks = run_ranks(rank, size)
    owned = sorted(line for result in ranks for line in result[0])
    assert owned == sorted([name, list(p.shape)] for name, p in Net().named_parameters() if p.requires_grad)
    model = Net()
    optimizer = Normalized(model.parameters(), 0.1)
    one_process(model, optimizer, size, steps=3)
    for name, parameter in model.named_parameters():
        for _, got, _ in ranks:
            torch.testing.assert_close(torch.tensor(got[name]), parameter.detach(), rtol=1e-5, atol=1e-6)
        if parameter.requires_grad:
            whole = torch.tensor(ranks[0][2][f"{name}/mean"])
            torch.testing.assert_close(whole, optimizer.state[parameter]["mean"], rtol=1e-4, atol=1e-6)


def test_a_group_can_say_that_its_tensors_may_be_cut():
    def rank():
        model = Net()
        groups = [{"params": [p for p in model.parameters() if p.requires_grad], "elementwise": True}]
        executor, *_ = prepared("zero1", model, Normalized(groups, 0.1))
        return [[piece.name, piece.weight.numel()] for piece in executor.slices.values()]

    first, second = run_ranks(rank, 2)
    assert {name for name, _ in first} & {name for name, _ in second}, "some tensor lies on both"


class Factored(Normalized):
    """Keeps a row of each matrix: no shape that a checkpoint knows."""

    @torch.no_grad()
    def step(self):
        super().step()
        for state in self.state.values():
            state["row"] = torch.ones(3)


def test_a_state_of_another_shape_than_its_parameter_is_refused_when_it_is_saved():
    def rank():
        model = Net()
        executor, *_ = prepared("zero1", model, Factored(model.parameters(), 0.1))
        with pytest.raises(CheckpointError, match=r"/row has shape \(3,\), the parameter \("):
            list(executor.optimizer_parts())

    run_ranks(rank, 2)


# -- state --------------------------------------------------------------------------------------------------


def test_a_state_saved_by_any_number_of_ranks_loads_into_any_other(tmp_path):
    def write():
        executor, *_ = prepared("zero1", Net(), steps=3)
        state = whole_state(executor)
        if comm.rank() == 0:
            save_file({name: t.clone() for name, t in state.items()}, tmp_path / f"{comm.world_size()}.safetensors")

    def read():
        got = {}
        for saved in (1, 2, 3, 4):
            executor, wrapped, stepper = prepared("zero1", Net(), steps=0, size_mb=0.002)
            executor.load_optimizer_state(WholeTensors(load_file(tmp_path / f"{saved}.safetensors")))
            state = fingerprint(whole_state(executor))
            train(executor, wrapped, stepper, 3)
            after = whole_state(executor)
            got[saved] = [state, {key: after[key].item() for key in after if key.endswith("/step")}]
        return got

    save_file(whole_state(prepared("none", Net(), steps=3)[0]), tmp_path / "1.safetensors")
    for size in (2, 3, 4):
        run_ranks(write, size)
    expected = {str(n): fingerprint(load_file(tmp_path / f"{n}.safetensors")) for n in (1, 2, 3, 4)}
    assert len({str(sorted(e)) for e in expected.values()}) == 1, "the same names from every number of ranks"
    for results in ([read()], *(run_ranks(read, size)[:1] for size in (2, 3, 4))):
        (got,) = results
        for saved, (state, steps) in got.items():
            assert state == expected[str(saved)]
            assert set(steps.values()) == {4.0}


def test_loaded_by_as_many_ranks_training_goes_on_to_the_bit(tmp_path):
    def rank():
        model = Net()
        executor, wrapped, stepper = prepared("zero1", model, steps=3)
        state = whole_state(executor)
        if comm.rank() == 0:
            save_file({name: t.clone() for name, t in state.items()}, tmp_path / "state")
            save_file(model.state_dict(), tmp_path / "model")
        comm.barrier(tag="written")
        again = Net()
        again.load_state_dict(load_file(tmp_path / "model"))
        other, wrapped_again, stepper_again = prepared("zero1", again, steps=0)
        other.load_optimizer_state(WholeTensors(load_file(tmp_path / "state")))
        for step in (3, 4):
            train(executor, wrapped, stepper, step)
            train(other, wrapped_again, stepper_again, step)
        return weights(model) == weights(again), fingerprint(whole_state(executor)) == fingerprint(whole_state(other))

    assert run_ranks(rank, 3) == [[True, True]] * 3


def test_state_that_the_optimizer_has_already_is_cut_and_kept():
    """Against an optimizer that is never cut."""

    def rank():
        results = []
        for mode in ("ddp", "zero1"):
            model = Net()
            optimizer = adamw(model)
            one_process(model, optimizer, 2, steps=2)
            executor, *_ = prepared(mode, model, optimizer, steps=2)
            results.append([fingerprint(whole_state(executor)), weights(model)])
        return results[0] == results[1]

    assert run_ranks(rank, 2) == [True, True]


def moments(dtype):
    """A state for `Net` with moments of a type of their own."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, parameter in Net().named_parameters():
        if parameter.requires_grad:
            state[f"{name}/step"] = torch.tensor(7.0)
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{name}/{key}"] = torch.rand(parameter.shape, generator=generator).to(dtype)
    return state


@pytest.mark.parametrize("mode, size", [("none", 1), ("ddp", 2), ("zero1", 2)])
def test_moments_keep_their_type_through_saving_and_loading(mode, size):
    def rank():
        executor, _, stepper = prepared(mode, Net())
        executor.load_optimizer_state(WholeTensors(moments(torch.bfloat16)))
        held = {str(state[key].dtype) for state in stepper.state.values() for key in ("exp_avg", "exp_avg_sq")}
        return [sorted(held), fingerprint(whole_state(executor))]

    results = [rank()] if size == 1 else run_ranks(rank, size)
    assert results[0] == [["torch.bfloat16"], fingerprint(moments(torch.bfloat16))]
    assert all(held == ["torch.bfloat16"] for held, _ in results)


def test_missing_extra_and_misshapen_state_is_refused_by_name():
    def rank():
        model = Net()
        executor, *_ = prepared("zero1", model, steps=0)
        state = {f"{n}/exp_avg": torch.zeros(p.shape) for n, p in model.named_parameters() if p.requires_grad}
        executor.load_optimizer_state(WholeTensors(state))
        before = fingerprint(whole_state(executor))
        without = {k: v + 1 for k, v in state.items() if k != "last.weight/exp_avg"}
        with pytest.raises(CheckpointError, match=r"no optimizer state for last\.weight"):
            executor.load_optimizer_state(WholeTensors(without, without_state=["scale"]))
        with pytest.raises(CheckpointError, match="nobody/exp_avg belongs to no parameter"):
            executor.load_optimizer_state(WholeTensors(state | {"nobody/exp_avg": torch.ones(3)}))
        with pytest.raises(CheckpointError, match=r"last\.weight/exp_avg has shape \(3,\), the parameter \(7, 67\)"):
            executor.load_optimizer_state(WholeTensors(state | {"last.weight/exp_avg": torch.ones(3)}))
        with pytest.raises(CheckpointError, match="the checkpoint has no scale/exp_avg_sq"):
            executor.load_optimizer_state(WholeTensors(state | {"seldom/exp_avg_sq": torch.ones(70)}))
        assert fingerprint(whole_state(executor)) == before, "nothing is changed by what is refused"
        executor.load_optimizer_state(WholeTensors(without, without_state=["last.weight"]))
        after = whole_state(executor)
        assert after.keys() == without.keys() and all(bool((value == 1).all()) for value in after.values())

    run_ranks(rank, 2)
