"""Deliberately wrong versions of the parallel modes: the certificate exceeds its bound 100-fold for each, or names what fails."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support import TINY
from variants import (
    a_shard_is_forgotten,
    buffer_is_the_gradient_of_a_lone_tensor,
    nothing_is_reduced,
    rates_do_not_arrive,
)

from pellucid.config import run_config
from pellucid.errors import ConfigError
from pellucid.parallel import comm, ddp, zero
from pellucid.parallel.bucket import Reducer
from pellucid.parallel.ddp import DDP
from pellucid.parallel.executor import Executor, norms
from pellucid.parallel.fsdp_unit import ShardedParameter
from pellucid.parallel.modes import DDPExecutor
from pellucid.parallel.rows import RowExecutor
from pellucid.parallel.zero import Zero1Executor
from pellucid.parallel.zero2 import ScratchBucket
from pellucid.verify import certificate
from pellucid.verify.certificate import verify_modes

RANKS = 3
CONFIG = {
    # a lone tensor fills a bucket of its own; slices of one parameter lie on several ranks
    "model": TINY | {"hidden_size": 32, "intermediate_size": 48},
    "parallel": {"bucket_size_mb": 0.004},
    "train": {"steps": 10},
    "optim": {"lr": 1e-3, "weight_decay": 0.1},
}


@pytest.fixture(scope="module", autouse=True)
def references_made_once():
    """What one process computes: before anything is made wrong, and once for all."""
    known = {}
    make = certificate.run_reference

    def remember(config, dtype, ranks):
        key = (repr(config), dtype, ranks)
        if key not in known:
            known[key] = make(config, dtype, ranks)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "run_reference", remember)
        patch.setattr(certificate, "DTYPES", {"fp64": torch.float64})  # float32 has nothing to add here
        assert certificate_of("ddp", "zero1", "zero2", "zero3", "fsdp2").passed
        yield


def certificate_of(*modes):
    return verify_modes(run_config(CONFIG), RANKS, modes=modes)


# -- wrong everywhere ---------------------------------------------------------------------------------------


def scaled_by(factor, patch):
    """Sums that should stay sums: losses are divided by the global weight already."""
    for kind in (DDP, Zero1Executor):

        def launch(self, bucket, launch_as_it_is=kind._launch):
            bucket.flat.mul_(factor(RANKS))
            return launch_as_it_is(self, bucket)

        patch.setattr(kind, "_launch", launch)


def each_rank_divides_by_its_own_tokens(patch):
    def own(value, *, tag):
        return [RANKS * n for n in value] if tag == "tokens" else all_reduce(value, tag=tag)

    all_reduce = comm.all_reduce
    patch.setattr(comm, "all_reduce", own)


def ranks_begin_apart(patch):
    for module in (ddp, zero):
        patch.setattr(module, "broadcast_module", lambda module, group: None)


def clipped_before_the_sum(patch):
    """Each rank clips what it has, and only then are gradients reduced."""

    def finish(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.ddp.finish_gradient_sync()

    patch.setattr(Reducer, "_hook", lambda self, bucket, i: lambda parameter: None)
    patch.setattr(DDPExecutor, "_finish", finish)
    patch.setattr(DDPExecutor, "clip_grad_norm_", lambda self, max_norm, norm=None: norm)


def the_first_micro_batch_is_lost(patch):
    def backward(self, loss):
        if not self.sync_gradients:
            loss = loss * 0
        backward_as_it_is(self, loss)

    backward_as_it_is = Executor.backward
    patch.setattr(Executor, "backward", backward)


def each_micro_batch_is_reduced(patch):
    """Already reduced gradients are reduced again, as where `no_sync` does nothing."""

    def backward(self, loss):
        backward_as_it_is(self, loss)
        if not self.sync_gradients:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    comm.all_reduce_(parameter.grad, tag="grad/again").wait()

    backward_as_it_is = Executor.backward
    patch.setattr(Executor, "backward", backward)


def sums_are_rounded_to_float32(patch):
    """Far too little to be seen in a loss curve, ever."""

    def launch(self, bucket):
        bucket.flat.copy_(bucket.flat.float())
        return launch_as_it_is(self, bucket)

    launch_as_it_is = DDP._launch
    patch.setattr(DDP, "_launch", launch)


def more_is_sent_than_planned(patch):
    """Right numbers at a higher price."""

    def launch(self, bucket):
        comm.all_reduce_(bucket.flat.clone(), tag="grad/bucket0").wait()
        return launch_as_it_is(self, bucket)

    launch_as_it_is = DDP._launch
    patch.setattr(DDP, "_launch", launch)


# -- wrong where the optimizer is sharded -------------------------------------------------------------------


def each_rank_has_the_norm_of_its_own_slices(patch):
    def own(self):
        self.finish_grads()
        return float(norms(self._grads()).norm())

    patch.setattr(Zero1Executor, "grad_norm", own)


def one_tensor_counts_twice_in_the_norm(patch):
    """As a tied head would that is listed under both of its names."""
    grads = Zero1Executor._grads

    def twice(self):
        again = [part.tensor for part in self.gradients() if part.name == "model.embed_tokens.weight"]
        return [*grads(self), *again]

    patch.setattr(Zero1Executor, "_grads", twice)


def padding_leaks_into_the_norm(patch):
    """The norm of a rank's whole part of each bucket, the unused elements between parameters included."""

    def of_buckets(self):
        for bucket in self.buckets:
            used = torch.zeros(bucket.layout.numel, dtype=torch.bool)
            for slot in bucket.layout.slots:
                used[slot.offset : slot.stop] = True
            bucket.flat[~used] = 0.01  # whatever was there before
        return [bucket.flat[slice(*self._part(bucket))] for bucket in self.buckets]

    patch.setattr(Zero1Executor, "_grads", of_buckets)


def weights_are_gathered_before_the_step(patch):
    def stale(self):
        before = [weights.clone() for weights in self.weight_buffers]
        finish(self)
        for weights, old, bucket in zip(self.weight_buffers, before, self.buckets, strict=True):
            first, last = self._part(bucket)
            mine = weights[first:last].clone()
            weights.copy_(old)
            weights[first:last] = mine

    finish = Zero1Executor._finish_weights
    patch.setattr(Zero1Executor, "_finish_weights", stale)


# -- wrong where gradients or weights are sharded -----------------------------------------------------------


def a_shard_is_added_twice(patch):
    def take(self):
        own = self.own.clone()
        take_as_it_is(self)
        if self.layout.index == 0:
            self.shard.add_(own)

    take_as_it_is = ScratchBucket.take
    patch.setattr(ScratchBucket, "take", take)

    def add_gradient(self, section):
        copy = section.clone()
        add_as_it_is(self, section)
        if self.name == "model.layers.0.mlp.up_proj.weight":
            add_as_it_is(self, copy)

    add_as_it_is = ShardedParameter.add_gradient
    patch.setattr(ShardedParameter, "add_gradient", add_gradient)


def the_last_micro_batch_replaces_what_was_there(patch):
    def take(self):
        self.holds_sum = False
        take_as_it_is(self)

    take_as_it_is = ScratchBucket.take
    patch.setattr(ScratchBucket, "take", take)

    def add_gradient(self, section):
        self.parameter.grad = None
        add_as_it_is(self, section)

    add_as_it_is = ShardedParameter.add_gradient
    patch.setattr(ShardedParameter, "add_gradient", add_gradient)


def one_weight_is_gathered_as_it_was(patch):
    """Its rows before the first step, always."""

    def allocate(self):
        mine = allocate_as_it_is(self)
        if self.name == "model.layers.1.self_attn.v_proj.weight":
            mine.copy_(known.setdefault(self.name, mine.clone()))
        return mine

    known = {}  # each rank has its own: it is filled after the fork
    allocate_as_it_is = ShardedParameter.allocate
    patch.setattr(ShardedParameter, "allocate", allocate)


def replicated_vectors_count_on_every_rank(patch):
    def grad_norm(self):
        self.finish_grads()
        return float(comm.all_reduce(float(norms(self._grads()).double().square().sum()), tag="grad_norm")) ** 0.5

    patch.setattr(RowExecutor, "grad_norm", grad_norm)


def a_tied_weight_counts_twice_in_the_norm(patch):
    def grad_norm(self):
        self.finish_grads()
        parts = list(self.gradients())
        parts += [part for part in parts if part.name == "model.embed_tokens.weight"]
        squares = float(norms([part.tensor for part in parts]).double().square().sum())
        return comm.all_reduce(squares, tag="grad_norm") ** 0.5

    patch.setattr(RowExecutor, "grad_norm", grad_norm)


def rows_are_one_too_far(patch):
    """A slice that says that it begins elsewhere than it does."""

    def gradients(self):
        for part in gradients_as_they_are(self):
            yield replace(part, start=part.start + 1) if comm.rank() == 1 else part

    gradients_as_they_are = RowExecutor.gradients
    patch.setattr(RowExecutor, "gradients", gradients)


BOTH, DDP_ONLY, ZERO1_ONLY = ("ddp", "zero1"), ("ddp",), ("zero1",)
VARIANTS = {
    "nothing is reduced": (nothing_is_reduced, DDP_ONLY),
    "the divisor is 2": (partial(scaled_by, lambda ranks: 1 / 2), BOTH),
    "divided by W twice": (partial(scaled_by, lambda ranks: 1 / ranks), BOTH),
    "multiplied by W": (partial(scaled_by, lambda ranks: ranks), BOTH),
    "a mean of means": (each_rank_divides_by_its_own_tokens, BOTH),
    "ranks begin apart": (ranks_begin_apart, BOTH),
    "clipped before the sum": (clipped_before_the_sum, DDP_ONLY),
    "a lone tensor is not copied": (buffer_is_the_gradient_of_a_lone_tensor, DDP_ONLY),
    "the first micro-batch is lost": (the_first_micro_batch_is_lost, BOTH),
    "reduced at each micro-batch": (each_micro_batch_is_reduced, DDP_ONLY),
    "sums are rounded to float32": (sums_are_rounded_to_float32, DDP_ONLY),
    "the rate does not arrive": (rates_do_not_arrive, ZERO1_ONLY),
    "a shard is never stepped": (a_shard_is_forgotten, ZERO1_ONLY),
    "the norm of own slices": (each_rank_has_the_norm_of_its_own_slices, ("zero1", "zero2")),
    "one tensor twice in the norm": (one_tensor_counts_twice_in_the_norm, ZERO1_ONLY),
    "padding in the norm": (padding_leaks_into_the_norm, ZERO1_ONLY),
    "a stale gather": (weights_are_gathered_before_the_step, ("zero1", "zero2")),
    "a shard added twice": (a_shard_is_added_twice, ("zero2", "zero3")),
    "only the last micro-batch": (the_last_micro_batch_replaces_what_was_there, ("zero2", "zero3")),
    "a stale unit": (one_weight_is_gathered_as_it_was, ("zero3",)),
    "vectors W times in the norm": (replicated_vectors_count_on_every_rank, ("zero3",)),
    "a tied weight twice in the norm": (a_tied_weight_counts_twice_in_the_norm, ("zero3", "fsdp2")),
    "rows in a wrong place": (rows_are_one_too_far, ("zero3",)),
}


@pytest.mark.parametrize(
    "mode, name",
    [
        pytest.param(mode, name, marks=[pytest.mark.slow] if mode != modes[0] else [])  # each in one mode is quick
        for name, (_, modes) in VARIANTS.items()
        for mode in modes
    ],
)
def test_a_wrong_variant_exceeds_the_bound_a_hundredfold(monkeypatch, mode, name):
    variant, _ = VARIANTS[name]
    with monkeypatch.context() as patch:
        variant(patch)
        checked = certificate_of(mode)
    (result,) = checked.modes
    assert not checked.passed and result.failure
    number = result.numbers["fp64"]
    assert number.worst > 100 * number.bound, f"{number} is not far outside"
    assert checked.last_line().startswith(f"FAILED: {mode} fp64 ")


def test_bytes_beyond_the_plan_fail_although_every_number_is_right(monkeypatch):
    with monkeypatch.context() as patch:
        more_is_sent_than_planned(patch)
        checked = certificate_of("ddp")
    (result,) = checked.modes
    assert all(number.is_within for number in result.numbers.values())
    assert result.bytes == "wrong" and not checked.passed
    assert checked.last_line().startswith("FAILED: ddp bytes step 1: grad/bucket0: payload_bytes")


def test_a_mode_that_raises_or_refuses_is_named_and_the_others_go_on(monkeypatch):
    def breaks(self):
        raise ArithmeticError("as if it were real")

    with monkeypatch.context() as patch:
        patch.setattr(DDPExecutor, "_finish", breaks)
        checked = certificate_of("ddp", "zero1")
    ddp_result, zero1_result = checked.modes
    assert "ArithmeticError: as if it were real" in ddp_result.failure and zero1_result.passed
    assert checked.last_line().startswith("FAILED: ddp fp64 rank ")


def test_only_what_is_refused_before_the_first_step_is_no_failure(monkeypatch):
    def refuses(self, *_args):
        raise ConfigError("not with me")

    for where, failed in (("_wrap", False), ("_finish", True)):
        with monkeypatch.context() as patch:
            patch.setattr(DDPExecutor, where, refuses)
            checked = certificate_of("ddp", "zero1")
        assert (checked.modes[0].skipped == "not with me") != failed and bool(checked.modes[0].failure) == failed
        assert checked.passed != failed and checked.modes[1].passed
