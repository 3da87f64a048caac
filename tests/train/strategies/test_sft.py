"""Fine-tuning on conversations: the stored mask alone is learnt, whatever the split, mode or interruption."""

import json
import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from records import conversations
from support import TINY, digest, run_ranks, tensors_of, tiny_config, whole_weights

from pellucid.config import ModelConfig
from pellucid.data.batches import Loader
from pellucid.errors import ConfigError, TrainingError
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.train import Callback, Trainer
from pellucid.train.losses import neftune_noise
from pellucid.train.strategies import SftOptions

MODES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp")


class Seen(Callback):
    def __init__(self, stop_at=None):
        self.infos, self.validations, self.stop_at = [], [], stop_at

    def on_optimizer_step(self, trainer, info):
        self.infos.append(info)
        if info.step == self.stop_at and comm.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation(self, trainer, info):
        self.validations.append(info)


def run(out="", *, resume=False, stop_at=None, data=None, **changes):
    settings = dict(
        strategy__name="sft", train__steps=4, train__global_batch=6, train__micro_batch=1, train__val_every=2,
        train__save_every=2, train__keep_last=0, optim__warmup_steps=0, optim__schedule="constant",
    )  # fmt: skip
    seen = Seen(stop_at)
    trainer = Trainer(
        tiny_config(out, **(settings | changes)), train_data=data or conversations(60), val_data=conversations(9, seed=5),
        callbacks=[seen],
    )  # fmt: skip
    trainer.train(resume=resume)
    return trainer, seen


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    run(train__steps=1, train__val_every=0)


def mean_loss(model, data, rows, *, key=None, smoothing=0.0, noise=None):
    """Each record of ``rows`` on its own, unpadded and unpacked: the mean over learnt tokens."""
    samples = data if key is None else data.for_epoch(key)
    total, count = 0.0, 0
    for row in rows:
        for number in samples._records[samples._rows.row(row)]:
            (record,) = data.split.record(int(number)).parts
            tokens, learnt = torch.tensor(record.ids)[None], torch.tensor(record.learnt[1:])
            added = noise(int(number), len(record.ids) - 1) if noise is not None else None
            logits = model(tokens[:, :-1], embedding_noise=added).logits[0]
            total = total + F.cross_entropy(
                logits[learnt], tokens[0, 1:][learnt], reduction="sum", label_smoothing=smoothing
            )
            count += int(learnt.sum())
    return total / count


@pytest.mark.parametrize("alpha, smoothing", [(0.0, 0.0), (5.0, 0.0), (0.0, 0.2)])
def test_steps_are_those_of_a_plain_loop_over_single_records(alpha, smoothing):
    """Packed, padded and in micro-batches of one row: the same weights after three steps of SGD."""
    trainer, seen = run(
        optim__name="sgd", optim__lr=0.3, optim__max_grad_norm="none", train__steps=3, strategy__neftune_alpha=alpha,
        strategy__label_smoothing=smoothing,
    )  # fmt: skip
    model = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3))
    start = [p.detach().clone() for p in model.parameters()]
    data = conversations(60)
    loader = Loader(data, global_batch=6, micro_batch=6, seed=3)
    plain = mean_loss(model, data, range(6)).item()
    for info in seen.infos:
        (batch,) = loader.next_window()

        def noise(number, length, step=info.step):
            where = torch.arange(length)[None], torch.full((1, length), number)
            return neftune_noise(*where, TINY["hidden_size"], alpha=alpha, seed=3, step=step)

        added = noise if alpha else None
        loss = mean_loss(model, data, batch.sample_ids.tolist(), key=3 << 32, smoothing=smoothing, noise=added)
        assert info.loss == pytest.approx(loss.item(), rel=1e-5)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.3 * p.grad)
    for ours, theirs, before in zip(trainer.model.parameters(), model.parameters(), start, strict=True):
        moved = (theirs - before).norm()
        assert moved > 0 and (ours - theirs).norm() < 1e-4 * moved + 1e-6
    assert plain == pytest.approx(math.log(61), rel=0.05)


def test_what_users_say_changes_no_label_and_the_share_of_learnt_tokens_is_logged():
    data = conversations(60)
    _trainer, seen = run(train__steps=1, data=data)
    (batch,) = Loader(data, global_batch=6, micro_batch=6, seed=3).next_window()
    assert seen.infos[0].supervised == pytest.approx(
        float(batch.loss_mask.sum() / (batch.document_ids >= 0).sum()), rel=1e-6
    )
    assert 0.2 < seen.infos[0].supervised < 0.9


def test_validation_has_neither_noise_nor_smoothing_and_entropy_is_logged_where_it_is_wanted():
    trainer, seen = run(
        strategy__neftune_alpha=5.0,
        strategy__label_smoothing=0.2,
        strategy__entropy=True,
        train__steps=2,
        optim__lr=0.05,
    )
    data = conversations(9, seed=5)
    with torch.no_grad():
        expected = mean_loss(trainer.model.eval(), data, range(len(data)))
    (validation,) = seen.validations
    assert validation.loss == pytest.approx(expected.item(), rel=1e-5) and validation.unit == "tokens"
    for info in (*seen.infos, validation):
        assert 0.9 * math.log(61) < info.metrics["entropy"] <= math.log(61)
    assert run(train__steps=1)[1].infos[0].metrics == {}


def test_noise_is_other_in_each_step_and_the_same_whatever_the_split():
    losses = {
        micro: [
            info.loss for info in run(strategy__neftune_alpha=50.0, train__micro_batch=micro, train__steps=3)[1].infos
        ]
        for micro in (1, 3, 6)
    }
    assert losses[3] == pytest.approx(losses[1], rel=1e-5) and losses[6] == pytest.approx(losses[1], rel=1e-5)
    quiet = [info.loss for info in run(train__steps=3)[1].infos]
    assert all(abs(a - b) > 1e-5 for a, b in zip(losses[1], quiet, strict=True))


def test_a_step_without_a_learnt_token_is_refused_and_a_micro_batch_without_one_adds_nothing():
    with pytest.raises(TrainingError, match="step 1 has no supervised token"):
        run(data=conversations(60, unlearnt=tuple(range(60))))
    data = conversations(60, unlearnt=tuple(range(0, 60, 2)))
    whole, split = (run(data=data, train__micro_batch=m, train__steps=2)[1].infos for m in (6, 1))
    assert [i.loss for i in split] == pytest.approx([i.loss for i in whole], rel=1e-5)


# -- modes --------------------------------------------------------------------------------------------------

STEP = dict(
    optim__name="sgd", optim__lr=5.0, train__steps=1, train__val_every=1, optim__max_grad_norm="none",
    strategy__neftune_alpha=5.0, strategy__label_smoothing=0.1, strategy__entropy=True,
)  # fmt: skip


def outcome(**changes):
    """Every third record has nothing to learn, so that ranks weigh differently."""
    data = conversations(60, unlearnt=tuple(range(0, 60, 3)))
    trainer, seen = run(**(STEP | dict(data=data) | changes))
    info, validation = seen.infos[-1], seen.validations[-1]
    names = list(trainer.setup.executor.weight_shapes())
    logged = [info.loss, info.supervised, validation.loss, *info.metrics.values(), *validation.metrics.values()]
    return [dict(zip(names, whole_weights(trainer.setup.executor), strict=True)), logged]


@pytest.fixture(scope="module")
def alone():
    return outcome(train__micro_batch=6)


@pytest.mark.parametrize(
    "mode, size",
    [(m, 3) for m in MODES] + [pytest.param(m, 2, marks=pytest.mark.slow) for m in MODES],
)
def test_a_step_on_ranks_is_that_of_one_process(alone, mode, size):
    start = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3))
    for weights, logged in run_ranks(lambda: outcome(parallel__mode=mode), size):
        assert logged == pytest.approx(alone[1], rel=1e-5)
        for name, parameter in start.named_parameters():
            ours, theirs = (torch.tensor(w[name]) for w in (weights, alone[0]))
            moved = (theirs - parameter.detach()).norm()
            tolerance = 1e-4 * moved + 3e-7 * parameter.norm()
            assert (ours - theirs).norm() <= tolerance < moved / 10, name


def test_with_ordered_sums_loss_and_metrics_have_the_same_bits_on_any_number_of_ranks():
    def logged():
        changes = dict(
            parallel__mode="ddp" if comm.world_size() > 1 else "none", parallel__reduction="ordered", train__global_batch=4,
            train__micro_batch=1, train__steps=3, strategy__entropy=True, strategy__neftune_alpha=5.0,
        )  # fmt: skip
        return [[info.loss, info.metrics["entropy"], info.supervised] for info in run(**changes)[1].infos]

    (alone,) = run_ranks(logged, 1)
    assert run_ranks(logged, 2) == [alone] * 2 and len({loss for loss, *_ in alone}) == 3


def log_of(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for key in ("time", "seconds", "tokens_per_s"):
            line.pop(key, None)
    return [line for line in lines if line["event"] != "save"]


@pytest.mark.parametrize(
    "mode, size",
    [
        ("none", 1), ("zero1", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddp", 2), ("zero2", 3), ("zero3", 3), ("fsdp2", 2))),
    ],
)  # fmt: skip
def test_a_stopped_run_ends_with_the_bits_of_an_unbroken_one(tmp_path, mode, size):
    """With dropout and noise, stopped in the middle of an epoch whose rows are packed anew each time."""
    changes = dict(
        parallel__mode=mode, train__steps=6, strategy__neftune_alpha=5.0, strategy__entropy=True, model__dropout=0.1,
        data=conversations(60),
    )  # fmt: skip

    def unbroken():
        return run(tmp_path / "a", **changes)[0].state.epoch

    def broken():
        first, _ = run(tmp_path / "b", stop_at=5, **changes)
        assert first.state.step == 5 and first.stop_reason == "SIGTERM"
        again, _ = run(tmp_path / "b", resume=True, **changes)
        return [again.state.step, digest(again.model)]

    epochs = [unbroken()] if size == 1 else run_ranks(unbroken, size)
    assert epochs[0] > 0, "the second epoch has rows of its own"
    broken() if size == 1 else run_ranks(broken, size)
    a, b = (tensors_of(tmp_path / name / "checkpoints/step_00000006") for name in ("a", "b"))
    assert a.keys() == b.keys() and not [key for key in a if not torch.equal(a[key], b[key])]
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")


@pytest.mark.parametrize("bad", [dict(label_smoothing=1.0), dict(neftune_alpha=-1.0)])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SftOptions(**bad)
