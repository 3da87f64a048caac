"""Every mode trains as one process does: the same losses, norms, rates and weights, however the batch is split."""

import sys

import pytest
import torch
import torch.nn.functional as F
from support import TINY, MemorySplit, run_ranks, tiny_config, windows

from pellucid.config import ModelConfig
from pellucid.data.batches import Loader, Windows
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.parallel import comm, create_executor, executor
from pellucid.train import Callback, Trainer

MODES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp")
RUN = dict(
    train__steps=20, train__global_batch=12, train__val_every=0, optim__max_grad_norm=0.3,
    optim__schedule__name="linear",
)  # fmt: skip
OF_MUON = 5e-6
"""Orthogonalising enlarges what is small in a gradient, its rounding errors too: so far off are splits in one process."""
SPLITS = [(2, 6), (2, 3), (2, 1), (3, 4), (3, 2), (4, 3), (4, 1)]
"""Ranks and sequences a forward: 12 sequences a step, in up to 6 micro-batches a rank."""


class Steps(Callback):
    """What each step reported here, and how many targets this rank had in it."""

    def __init__(self):
        self.seen, self.targets = [], []

    def on_batch_end(self, trainer, info):
        if info.micro == 0:
            self.targets.append(0)
        self.targets[-1] += int(info.batch.loss_mask.sum())

    def on_before_step(self, trainer, info):
        self.seen.append([info.loss, info.grad_norm, info.lr])


def outcome(mode, *, data=None, double=False, **changes):
    """What this rank knows after a run."""
    config = tiny_config(parallel__mode=mode, **(RUN | changes))
    steps = Steps()
    generator = torch.Generator().manual_seed(config.train.seed)
    model = Transformer(config.model, generator=generator).double() if double else None
    trainer = Trainer(config, model=model, callbacks=[steps], train_data=data or windows(30))
    trainer.train()
    weights = {n: None if w is None else w.tolist() for n, w in trainer.setup.executor.weights()}
    return {"weights": weights, "steps": steps.seen, "targets": steps.targets}


def check_equals_one_process(ranks, alone, *, rtol=1e-6):
    """All ranks hold the same bits; they are those of one process up to the order of additions."""
    for other in ranks[1:]:
        for name, values in other["weights"].items():
            assert values is None or values == ranks[0]["weights"][name], "replicas differ"
        assert other["steps"] == ranks[0]["steps"], "ranks know different losses, norms or rates"
    for number, (got, expected) in enumerate(zip(ranks[0]["steps"], alone["steps"], strict=True), 1):
        assert got == pytest.approx(expected, rel=rtol), f"step {number}: loss, norm, rate"
    errors, sizes = [], []
    for name, values in alone["weights"].items():
        expected = torch.tensor(values, dtype=torch.float64)
        errors.append((torch.tensor(ranks[0]["weights"][name], dtype=torch.float64) - expected).norm())
        sizes.append(expected.norm())
        assert errors[-1] <= 5 * rtol * sizes[-1], f"{name}: {errors[-1] / sizes[-1]}"
    assert torch.stack(errors).norm() <= rtol * torch.stack(sizes).norm()


@pytest.fixture(scope="module")
def alone():
    """One process, whole batches."""
    result = outcome("none", train__micro_batch=12)
    assert 0 < len(windows(30)) % 12 <= 6, "the last step of an epoch must leave ranks without samples"
    assert sum(norm > 0.3 for _, norm, _ in result["steps"]) >= 10, "clipping must act"
    assert len({rate for *_, rate in result["steps"]}) > 15
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size, micro", [(2, 3), (3, 4), (4, 1)])
def test_twenty_steps_equal_one_process(alone, mode, size, micro):
    check_equals_one_process(run_ranks(lambda: outcome(mode, train__micro_batch=micro), size), alone)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "mode, size, micro", [("none", 1, 1), ("none", 1, 3), *((mode, *split) for mode in MODES for split in SPLITS)]
)
def test_every_split_of_the_global_batch_gives_the_same_training(mode, size, micro, optimizer):
    alone = outcome("none", train__micro_batch=12, optim__name=optimizer)
    ranks = run_ranks(lambda: outcome(mode, train__micro_batch=micro, optim__name=optimizer), size)
    check_equals_one_process(ranks, alone, rtol=OF_MUON if optimizer == "muon" else 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_muon_orthogonalises_whole_matrices_in_every_mode(mode):
    alone = outcome("none", train__micro_batch=12, optim__name="muon", train__steps=8)
    ranks = run_ranks(lambda: outcome(mode, train__micro_batch=2, optim__name="muon", train__steps=8), 3)
    check_equals_one_process(ranks, alone, rtol=OF_MUON)


@pytest.mark.parametrize("mode", MODES)
def test_in_float64_only_the_last_bits_differ(mode):
    alone = outcome("none", train__micro_batch=12, double=True, train__steps=8)
    ranks = run_ranks(lambda: outcome(mode, train__micro_batch=2, double=True, train__steps=8), 3)
    check_equals_one_process(ranks, alone, rtol=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_uneven_masks_and_ranks_without_a_target_change_nothing(mode):
    """Documents of one token have no target, so some ranks have nothing to learn from in some steps."""
    lengths = [1] * 70 + [30, 3, 17] + [1] * 50 + [9, 40] + [1] * 20
    changes = dict(train__global_batch=4, train__steps=8)

    def data():
        return Windows(MemorySplit(lengths), 16)

    alone = outcome("none", data=data(), train__micro_batch=4, **changes)
    ranks = run_ranks(lambda: outcome(mode, data=data(), train__micro_batch=1, **changes), 4)
    targets = [rank["targets"] for rank in ranks]
    assert any(0 in of_step and sum(of_step) > 0 for of_step in zip(*targets, strict=True))
    assert [sum(of_step) for of_step in zip(*targets, strict=True)] == alone["targets"]
    check_equals_one_process(ranks, alone)


SGD = """
import torch
from pellucid.registry import register

@register("optimizer", "plain_sgd")
def build(model, lr, options):
    return torch.optim.SGD(model.parameters(), lr=lr)
"""
PLAIN = dict(
    plugins=["sgd_of_a_test"], optim__name="plain_sgd", optim__lr=2.0, optim__warmup_steps=0,
    optim__schedule__name="constant", optim__max_grad_norm="none", train__steps=1, train__global_batch=6,
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_one_step_of_plain_sgd_at_three_ranks_is_the_gradient_of_the_whole_batch(tmp_path, mode):
    """AdamW and clipping would hide a wrong factor; two ranks a factor that is always two."""
    (tmp_path / "sgd_of_a_test.py").write_text(SGD)

    def rank():
        sys.path.insert(0, str(tmp_path))
        return [outcome(mode, train__micro_batch=micro, **PLAIN)["weights"] for micro in (2, 1)]

    results = [weights for rank in run_ranks(rank, 3) for weights in rank]
    model = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3))
    (batch,) = Loader(windows(30), global_batch=6, micro_batch=6, seed=3).next_window()
    logits = model(batch.tokens, batch.positions, model.make_attend(batch.document_ids)).logits
    F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask]).backward()
    for name, parameter in model.named_parameters():
        moved = -2.0 * parameter.grad.double()
        tolerance = 1e-5 * moved.norm() + 1e-7 * parameter.norm()
        held = [weights for weights in results if weights[name] is not None]
        assert len(held) >= 2, "the first rank holds it after each of its two runs"
        for weights in held:
            got = torch.tensor(weights[name], dtype=torch.float64) - parameter.detach().double()
            assert (got - moved).norm() <= tolerance, name
        assert moved.norm() > 100 * tolerance, name


def test_at_two_ranks_ddp_and_zero1_agree_to_the_bit_for_any_buckets():
    """A sum of two has one order, and slices begin where torch's kernels round alike. The norm is a sum over slices: no clipping."""

    def weights():
        changes = dict(train__micro_batch=3, train__steps=6, optim__max_grad_norm="none")
        cases = [("ddp", 25), ("ddp", 0.002), ("zero1", 25), ("zero1", 0.002)]
        first, *others = (outcome(mode, parallel__bucket_size_mb=size, **changes)["weights"] for mode, size in cases)
        return [other == first for other in others]

    assert run_ranks(weights, 2) == [[True, True, True]] * 2


# -- validation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [1, 2, 9])
def test_a_validation_is_the_same_number_for_any_number_of_ranks_and_uneven_sizes(documents):
    def value(mode):
        held_out = windows(documents, seed=5, score_once=True)
        config = tiny_config(parallel__mode=mode, train__global_batch=12, train__micro_batch=2)
        trainer = Trainer(config, train_data=windows(30), val_data=held_out)
        before = torch.get_rng_state().tolist()
        info = trainer.validate()
        assert trainer.model.training and torch.get_rng_state().tolist() == before
        return [info.loss, info.tokens, len(held_out)]

    alone = value("none")
    for size, mode in ((2, "ddp"), (3, "zero1"), (3, "torch_ddp")):
        assert run_ranks(lambda mode=mode: value(mode), size) == [alone] * size


# -- what cannot run ----------------------------------------------------------------------------------------


def refused(build):
    """The message of the `ConfigError` that this rank got."""
    with pytest.raises(ConfigError) as error:
        build()
    return str(error.value)


def test_mode_none_on_several_ranks_is_refused_on_each():
    first, second = run_ranks(lambda: refused(lambda: Trainer(tiny_config(), train_data=windows(30))), 2)
    assert first == second and "parallel.mode is none and there are 2 processes" in first and "choose ddp" in first


@pytest.mark.parametrize("mode", MODES)
def test_a_global_batch_that_does_not_divide_is_refused(mode):
    config = tiny_config(parallel__mode=mode, train__global_batch=8, train__micro_batch=2)
    messages = run_ranks(lambda: refused(lambda: Trainer(config, train_data=windows(30))), 3)
    assert set(messages) == {"train.global_batch 8 is not a multiple of train.micro_batch 2 x 3 ranks"}


@pytest.mark.parametrize("mode", MODES)
def test_alone_every_mode_runs_as_none_and_says_so_once(mode, monkeypatch, caplog):
    monkeypatch.setattr(executor, "_said", set())
    for _ in range(2):
        assert type(create_executor(mode)) is executor.Executor
    said = [record.message for record in caplog.records if mode in record.message]
    assert said == [f"parallel.mode {mode} with one process runs as none"]


def test_static_graph_with_accumulation_is_refused():
    config = tiny_config(parallel={"mode": "torch_ddp", "torch_ddp": {"static_graph": True}}, train__micro_batch=1)
    (message, _) = run_ranks(lambda: refused(lambda: Trainer(config, train_data=windows(30))), 2)
    assert "static_graph crashes torch" in message and "train.micro_batch" in message


# -- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, option, right",
    [
        ("ddp", "bucket_size", "bucket_size_mb"),
        ("ddp", "reduce_type", "reduce_dtype"),
        ("zero1", "bucket_sise_mb", "bucket_size_mb"),
        ("torch_ddp", "find_unused_parameter", "find_unused_parameters"),
    ],
)
def test_an_unknown_option_of_a_mode_is_refused_with_the_nearest(mode, option, right):
    with pytest.raises(ConfigError, match=rf"parallel\.{mode}\.{option}.*did you mean parallel\.{mode}\.{right}\?"):
        tiny_config(parallel={"mode": mode, mode: {option: 1}})
    with pytest.raises(ConfigError, match=rf"parallel\.{mode}\.{option}.*did you mean parallel\.{mode}\.{right}\?"):
        create_executor(mode, **{option: 1})


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_a_bucket_size_that_is_not_positive_is_refused(mode):
    with pytest.raises(ConfigError, match=rf"parallel\.{mode}\.bucket_size_mb must be positive, got -1"):
        tiny_config(parallel={"mode": mode, mode: {"bucket_size_mb": -1.0}})


def num_buckets(parallel):
    """Different gradient buckets in the second step: torch's DDP has a single one in the first."""
    trainer = Trainer(tiny_config(parallel=parallel, train__global_batch=4), train_data=windows(30))
    trainer._step()
    with comm.record() as ledger:
        trainer._step()
    return len({event.tag for event in ledger.events if event.tag.startswith("grad/")})


@pytest.mark.parametrize(
    "mode, own", [("ddp", "bucket_size_mb"), ("zero1", "bucket_size_mb"), ("torch_ddp", "bucket_cap_mb")]
)
def test_the_bucket_size_reaches_the_buckets_and_a_modes_own_table_comes_first(mode, own):
    def rank():
        return [
            num_buckets({"mode": mode}),
            num_buckets({"mode": mode, "bucket_size_mb": 0.004}),
            num_buckets({"mode": mode, "bucket_size_mb": 0.004, mode: {own: 25.0}}),
            num_buckets({"mode": mode, mode: {own: 0.004}}),
        ]

    (one, many, again, own_table), _ = run_ranks(rank, 2)
    assert one == again == 1 and many == own_table and many > 2


def test_gradients_are_reduced_in_the_type_that_is_asked_for():
    def rank():
        parallel = {"mode": "ddp", "ddp": {"reduce_dtype": "bfloat16"}}
        trainer = Trainer(tiny_config(parallel=parallel), train_data=windows(30))
        with comm.record() as ledger:
            trainer._step()
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
        return sorted({event.dtype for event in ledger.events if event.tag.startswith("grad/")})

    assert run_ranks(rank, 2) == [["bfloat16"]] * 2
