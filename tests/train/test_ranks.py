"""The Trainer on several ranks: what one rank knows, wants or suffers becomes everybody's, and a run resumes on any number."""

import json
import os
import resource
import signal
from collections import Counter

import pytest
import torch
from support import digest, run_ranks, tensors_of, tiny_config, windows

from pellucid.config import load_config
from pellucid.errors import ConfigError, PellucidError, RankError, StorageError, TrainingError
from pellucid.parallel import comm
from pellucid.parallel.check import CollectiveCheck
from pellucid.train import Callback, StopTraining, Trainer, loop
from pellucid.train.callbacks import GradientStatistics, GradientStatisticsOptions
from pellucid.train.ranks import on_first_rank
from pellucid.train.strategies import LossOutput, Pretrain, PretrainOptions

MODES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp")
CHANGES = dict(
    train__steps=6, train__global_batch=6, train__micro_batch=1, train__save_every=2, train__val_every=2, train__keep_last=0,
    optim__schedule__name="wsd",
)  # fmt: skip


def run(out, mode, *, resume=False, callbacks=(), strategy=None, **changes):
    trainer = Trainer(
        tiny_config(out, parallel__mode=mode, **(CHANGES | changes)),
        train_data=windows(30),
        val_data=windows(5, seed=9, score_once=True),
        callbacks=callbacks,
        strategy=strategy,
    )
    trainer.train(resume=resume)
    return trainer


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    run("", "none", train__steps=1)


class At(Callback):
    """Calls a function when a step is finished, on one rank."""

    def __init__(self, step, rank, function):
        self.step, self.rank, self.function = step, rank, function

    def on_optimizer_step(self, trainer, info):
        if info.step == self.step and comm.rank() == self.rank:
            self.function()


def interrupted(step, rank=0):
    return At(step, rank, lambda: os.kill(os.getpid(), signal.SIGTERM))


def read_log(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def read_ledger(out, rank=0):
    return [json.loads(line) for line in (out / f"ledger/rank{rank:05d}.jsonl").read_text().splitlines()]


def ordinary_step(out, rank):
    """The tags of step 5. When a checkpoint that was written in the background is published, is a matter of time."""
    lines = (line for line in read_ledger(out, rank) if line["step"] == 5)
    return Counter(line["tag"] for line in lines if not line["tag"].startswith("save"))


def outcome(out, step=6):
    """Everything on disk that must not depend on interruptions."""
    last = out / "checkpoints" / f"step_{step:08d}"
    tensors = tensors_of(last)
    log = [record for record in read_log(out) if record["event"] != "save"]
    for record in log:
        for key in ("time", "seconds", "tokens_per_s"):
            record.pop(key, None)
    state = json.loads((last / "state.json").read_text())
    state.pop("config_sha256")  # covers train.out
    return tensors, log, state


def assert_same(got, expected):
    assert got[0].keys() == expected[0].keys()
    different = [key for key, value in expected[0].items() if not torch.equal(got[0][key], value)]
    assert not different, different
    assert got[1:] == expected[1:]


# -- resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, size", [("ddp", 2), ("zero1", 3), ("torch_ddp", 2), ("zero1", 2)])
def test_resumed_on_as_many_ranks_a_run_ends_with_the_same_bits(tmp_path, mode, size):
    """Dropout is on, and the stop lies in the middle of an epoch."""
    changes = dict(model__dropout=0.2, optim__name="muon" if (mode, size) == ("zero1", 2) else "adamw")

    def unbroken():
        run(tmp_path / "unbroken", mode, **changes)

    def broken():
        first = run(tmp_path / "broken", mode, callbacks=[interrupted(3, size - 1)], **changes)
        assert first.state.step == 3 and first.stop_reason == "SIGTERM"
        again = run(tmp_path / "broken", mode, resume=True, **changes)
        return [again.state.step, digest(again.model)]

    run_ranks(unbroken, size)
    results = run_ranks(broken, size)
    assert [step for step, _ in results] == [6] * size and len({weights for _, weights in results}) == 1
    expected = outcome(tmp_path / "unbroken")
    assert_same(outcome(tmp_path / "broken"), expected)
    assert [r["step"] for r in expected[1] if r["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert {key.partition("/")[0] for kind, key in expected[0] if kind == "rng" and "rank" in key} == {
        f"rank{rank:05d}" for rank in range(1, size)
    }
    states = [expected[0]["rng", f"rank{rank:05d}/torch" if rank else "torch"] for rank in range(size)]
    assert not torch.equal(states[0], states[1]), "ranks draw different dropout"
    assert expected[2]["world_size"] == size and expected[2]["mode"] == mode
    for rank in range(size):
        steps = [line["step"] for line in read_ledger(tmp_path / "broken", rank)]
        assert steps == sorted(steps) and set(steps) == set(range(7)), "no step is missing, none there twice"
        assert ordinary_step(tmp_path / "broken", rank) == ordinary_step(tmp_path / "unbroken", rank)


class Samples(Callback):
    """The windows that this rank saw in each step."""

    def __init__(self):
        self.seen = {}

    def on_batch_end(self, trainer, info):
        self.seen.setdefault(info.step, []).extend(i for i in info.batch.sample_ids.tolist() if i >= 0)


def samples_of(ranks):
    """The set of each step, over all ranks."""
    steps = {step for rank in ranks for step in rank}
    merged = {int(step): sorted(i for rank in ranks for i in rank.get(step, [])) for step in steps}
    return dict(sorted(merged.items()))


@pytest.mark.parametrize(
    "path",
    [
        [("ddp", 2), ("zero1", 3), ("none", 1)],
        [("zero1", 2), ("none", 1), ("ddp", 3)],
        [("none", 1), ("torch_ddp", 2), ("zero1", 1)],
    ],
    ids=lambda path: " ".join(f"{mode}{size}" for mode, size in path),
)
def test_a_run_that_changes_mode_and_ranks_sees_the_same_samples_and_ends_with_close_weights(tmp_path, path):
    def part(out, mode, stop=None):
        samples = Samples()
        run(out, mode, resume=True, callbacks=[samples, *([interrupted(stop)] if stop else [])])
        return samples.seen

    whole = samples_of(run_ranks(lambda: part(tmp_path / "whole", "none"), 1))
    parts = {}
    for (mode, size), stop in zip(path, (2, 3, None), strict=True):
        parts |= samples_of(run_ranks(lambda mode=mode, stop=stop: part(tmp_path / "parts", mode, stop), size))
    assert parts == whole and list(whole) == [1, 2, 3, 4, 5, 6]
    got, expected = outcome(tmp_path / "parts"), outcome(tmp_path / "whole")
    for (kind, key), value in expected[0].items():
        if kind != "rng":
            torch.testing.assert_close(got[0][kind, key], value, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(got[1], expected[1], strict=True):
        assert ours.pop("loss") == pytest.approx(theirs.pop("loss"), rel=1e-5)
        assert ours.pop("grad_norm", 0) == pytest.approx(theirs.pop("grad_norm", 0), rel=1e-4)
        assert ours == theirs


# -- a rank that fails --------------------------------------------------------------------------------------


class NotANumber(Pretrain):
    """From a step on the loss of one rank is NaN in one micro-batch."""

    def __init__(self, rank, step):
        super().__init__(PretrainOptions())
        self.rank, self.step, self.calls = rank, step, 0
        self.documents = []

    def __call__(self, model, batch):
        loss = super().__call__(model, batch).sum
        self.calls += 1
        if comm.rank() == self.rank and self.calls == 3 * self.step + 2:
            self.documents = sorted({i for i in batch.document_ids.flatten().tolist() if i >= 0})
            return LossOutput(loss * float("nan"), {})
        return LossOutput(loss, {})


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_on_one_rank_stops_all_names_it_and_touches_no_weight(tmp_path, mode):
    def rank():
        strategy, errors, weights = NotANumber(1, 3), [], {}

        class Watch(Callback):
            def on_optimizer_step(self, trainer, info):
                weights[info.step] = digest(trainer.model)

            def on_error(self, trainer, info):
                errors.extend([type(info).__name__, digest(trainer.model)])

        with pytest.raises(TrainingError) as error:
            run(tmp_path, mode, callbacks=[Watch()], strategy=strategy)
        kind, after = errors
        assert kind == "TrainingError" and after == weights[3] != weights[2] and list(weights) == [1, 2, 3]
        return [str(error.value), strategy.documents, after]

    (first, _, left), (second, documents, right) = run_ranks(rank, 2)
    assert first == second and documents and (left == right) == (mode not in ("zero3", "fsdp2"))
    assert first.startswith("step 4: non-finite loss of micro-batch 1 on rank 1; the weights are those of step 3, ")
    assert f"Documents in it: {', '.join(map(str, documents))}." in first
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000002"]


class NoTargets(Pretrain):
    def weight(self, batch):
        return 0


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_a_step_without_a_target_anywhere_is_refused_on_every_rank(mode):
    def rank():
        with pytest.raises(TrainingError, match="step 1 has no supervised token"):
            run("", mode, strategy=NoTargets(PretrainOptions()))

    run_ranks(rank, 2)


def full_disk(out):
    """From now on this process can write no file beyond a few kB: no weights; the log, which is shorter, it can."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
    assert (out / "metrics.jsonl").stat().st_size < 3000


@pytest.mark.parametrize("at", [4, 6], ids=["in the middle", "last"])
@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_save_that_the_first_rank_cannot_write_fails_on_all(tmp_path, background, at):
    def rank():
        before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        with pytest.raises((StorageError, RankError)) as error:
            run(
                tmp_path, "zero1", callbacks=[At(at, 0, lambda: full_disk(tmp_path))], train__async_save=background,
                train__save_every=at, parallel__ledger=False,
            )  # fmt: skip
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return [type(error.value).__name__, str(error.value), error.value.exit_code]

    first, *others = run_ranks(rank, 3)
    assert first[0] == "StorageError" and "model.safetensors" in first[1] and first[2] == 1
    assert others == [["RankError", f"rank 0: {first[1]}", 1]] * 2
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_a_run_folder_that_the_first_rank_may_not_use_is_refused_on_all(tmp_path):
    def rank():
        run(tmp_path, "ddp", train__steps=1)
        with pytest.raises((ConfigError, RankError)) as error:
            run(tmp_path, "ddp", train__steps=1)
        return [type(error.value).__name__, error.value.exit_code, "--resume" in str(error.value)]

    assert run_ranks(rank, 2) == [["ConfigError", 2, True], ["RankError", 2, True]]


def test_whatever_the_first_rank_raises_the_others_hear_of(tmp_path):
    def rank():
        with pytest.raises((ZeroDivisionError, RankError)) as error:
            on_first_rank(lambda: 1 // 0, tag="test")
        assert on_first_rank(lambda: 7, tag="test") == (7 if comm.rank() == 0 else None)
        return str(error.value)

    first, second = run_ranks(rank, 2)
    assert second == f"rank 0: ZeroDivisionError: {first}"


# -- a rank that wants to stop ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook", ["on_before_step", "on_batch_end", "on_validation", "on_optimizer_step", "on_epoch_end"]
)
def test_when_a_callback_stops_one_rank_all_end_after_that_step_with_a_checkpoint(tmp_path, hook):
    """Rank 2 alone raises, in step 4 or, at the end of the epoch, in step 7."""

    def stop(self, trainer, info):
        if comm.rank() == 2 and trainer.state.step + (hook in ("on_before_step", "on_batch_end")) >= 4:
            raise StopTraining("rank 2 has seen enough")

    def rank():
        callback = type("Stops", (Callback,), {hook: stop})()
        trainer = run(tmp_path, "ddp", callbacks=[callback], train__steps=12, train__save_every=0, parallel__check=True)
        return [trainer.state.step, trainer.stop_reason]

    step = 7 if hook == "on_epoch_end" else 4
    assert -(-len(windows(30)) // 6) == 7
    assert run_ranks(rank, 3) == [[step, "rank 2 has seen enough"]] * 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step_{step:08d}"]
    assert (tmp_path / "model" / "model.safetensors").exists(), "a callback ends a run for good"


def test_a_stop_before_the_first_step_is_everybodys():
    class Never(Callback):
        def on_train_begin(self, trainer, info):
            if comm.rank() == 1:
                raise StopTraining("not today")

    def rank():
        trainer = run("", "ddp", callbacks=[Never()])
        return [trainer.state.step, trainer.stop_reason]

    assert run_ranks(rank, 2) == [[0, "not today"]] * 2


@pytest.mark.parametrize("moment", ["on_save", "after the ranks have agreed", "while they agree"])
def test_a_rank_that_wants_to_stop_too_late_for_this_step_stops_with_all_after_the_next(tmp_path, moment, monkeypatch):
    """Nobody leaves the loop alone, and no wish is lost."""

    def rank():
        def signal_me(step):
            if comm.rank() == 0 and step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

        class Late(Callback):
            def on_save(self, trainer, info):
                if moment == "on_save" and info.step == 4:
                    raise StopTraining("saved")

            def state_dict(self):
                if moment == "after the ranks have agreed":
                    signal_me(trainers[0].state.step)
                return {}

            name = "late"

        trainers = []

        class Seen(Callback):
            def on_train_begin(self, trainer, info):
                trainers.append(trainer)

        if moment == "while they agree":
            agree = loop.stop_reason

            def slow(mine, **facts):
                answer = agree(mine, **facts)
                signal_me(trainers[0].state.step)
                return answer

            monkeypatch.setattr(loop, "stop_reason", slow)
        trainer = run(tmp_path, "ddp", callbacks=[Seen(), Late()], train__steps=12, train__async_save=False)
        return [trainer.state.step, trainer.stop_reason]

    reason = "saved" if moment == "on_save" else "SIGTERM"
    assert run_ranks(rank, 2, timeout=30) == [[5, reason]] * 2
    assert (tmp_path / "checkpoints" / "step_00000005").exists()


def test_a_signal_to_one_rank_ends_all_after_the_step_and_the_run_can_go_on(tmp_path):
    def rank():
        trainer = run(tmp_path, "zero1", callbacks=[interrupted(3, 1)])
        return [trainer.state.step, trainer.stop_reason]

    assert run_ranks(rank, 2) == [[3, "SIGTERM"]] * 2
    assert (tmp_path / "checkpoints" / "step_00000003").exists() and not (tmp_path / "model").exists()
    assert run_ranks(lambda: run(tmp_path, "zero1", resume=True).state.step, 2) == [6, 6]
    assert (tmp_path / "model").exists()


def test_the_time_limit_of_one_rank_is_everybodys(monkeypatch):
    def rank():
        def over():
            monkeypatch.setattr(loop.time, "monotonic", lambda: 1e12)

        trainer = run("", "ddp", callbacks=[At(2, 1, over)], train__max_seconds=1e9)
        return [trainer.state.step, trainer.stop_reason]

    assert run_ranks(rank, 2) == [[2, "train.max_seconds = 1e+09 are over"]] * 2


# -- callbacks ----------------------------------------------------------------------------------------------

HOOKS = (
    "on_train_begin", "on_epoch_begin", "on_batch_begin", "on_batch_end", "on_before_step", "on_optimizer_step",
    "on_validation", "on_epoch_end", "on_train_end",
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_callbacks_are_called_alike_on_every_rank(mode):
    def rank():
        seen = []
        body = {hook: lambda self, trainer, info, hook=hook: seen.append(hook) for hook in HOOKS}
        run("", mode, callbacks=[type("Sees", (Callback,), body)()], train__steps=None, train__epochs=1)
        return seen

    first, second, third = run_ranks(rank, 3)
    assert first == second == third and set(first) == set(HOOKS)


class Shifted(Callback):
    """Adds 1 to every final gradient, so that means are not zero; where they are whole, says what torch finds in them."""

    def __init__(self):
        self.expected = []

    def on_before_step(self, trainer, info):
        grads = {g.name: g.tensor for g in trainer.setup.executor.gradients()}
        for grad in grads.values():
            grad.add_(1.0)
        wide = {name: grad.double() for name, grad in grads.items()}
        self.expected.append(
            {
                name: {"norm": g.norm(), "mean": g.mean(), "std": g.std(correction=0), "min": g.min(), "max": g.max()}
                for name, g in wide.items()
            }
        )


def test_gradient_statistics_are_those_of_whole_gradients_in_every_mode(tmp_path):
    def with_statistics(mode):
        shifted = Shifted()
        callbacks = [shifted, GradientStatistics(GradientStatisticsOptions(every=1))]
        changes = dict(train__steps=3, parallel__bucket_size_mb=0.004, optim__max_grad_norm="none")
        run(tmp_path / mode, mode, callbacks=callbacks, **changes)
        return shifted.expected

    expected = with_statistics("none")
    assert len(expected) == 3 and len(expected[0]) == 20
    for mode, size in (("none", 1), ("ddp", 2), ("zero1", 3)):
        if size > 1:
            run_ranks(lambda mode=mode: bool(with_statistics(mode)), size)
        got = [r for r in read_log(tmp_path / mode) if r["event"] == "gradients"]
        assert [r["step"] for r in got] == [1, 2, 3]
        for ours, theirs in zip(got, expected, strict=True):
            assert list(ours["parameters"]) == list(theirs)
            for name, values in theirs.items():
                assert ours["parameters"][name] == pytest.approx(
                    {k: float(v) for k, v in values.items()}, rel=1e-4, abs=1e-6
                ), name


# -- what is written ----------------------------------------------------------------------------------------


def test_a_ledger_that_one_rank_cannot_open_ends_the_run_on_all(tmp_path):
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger/rank00001.jsonl").mkdir()

    def rank():
        with pytest.raises(PellucidError) as error:
            run(tmp_path, "ddp", resume=True)
        return [type(error.value).__name__, str(error.value)]

    (first, told), (second, said) = run_ranks(rank, 2)
    assert (first, second) == ("RankError", "StorageError") and told == f"rank 1: {said}" and "ledger" in said


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_writes_the_log_and_every_rank_its_ledger(tmp_path, mode):
    run_ranks(lambda: run(tmp_path, mode).state.step, 3)
    log = read_log(tmp_path)
    assert Counter(r["event"] for r in log) == {"step": 6, "validation": 3, "save": 3}
    assert [r["step"] for r in log if r["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert load_config(tmp_path / "config.toml").parallel.mode == mode
    written = sorted(path.name for path in (tmp_path / "ledger").iterdir())
    assert written == ["phases00000.jsonl", "phases00001.jsonl", "phases00002.jsonl", "plan.json"] + [
        f"rank0000{rank}.jsonl" for rank in range(3)
    ]
    ledgers = [read_ledger(tmp_path, rank) for rank in range(3)]
    for ledger in ledgers:
        tags = [(line["step"], line["op"], line["tag"].split("/")[0]) for line in ledger]
        assert tags == [(line["step"], line["op"], line["tag"].split("/")[0]) for line in ledgers[0]]
        assert {step for step, *_ in tags} == set(range(7))
        assert {"tokens", "loss", "stop", "grad"} <= {tag for step, _, tag in tags if step == 3}
        assert {"validation", "save"} <= {tag for step, _, tag in tags if step == 2}
    plan = json.loads((tmp_path / "ledger/plan.json").read_text())
    assert (plan["mode"], plan["world_size"]) == (mode, 3)


def test_a_save_after_the_last_step_is_in_the_ledger(tmp_path):
    run_ranks(lambda: run(tmp_path, "zero1", train__save_every=0).state.step, 2)
    tags = [line["tag"] for line in read_ledger(tmp_path) if line["step"] == 6 and line["tag"].startswith("save")]
    said = ["save/rng", "save/folder", "save/parts", "save"]  # lengths, then what each rank has to say; no tensor moves
    assert tags == [tag + suffix for tag in said for suffix in ("/lengths", "")]


def test_without_a_ledger_none_is_written(tmp_path):
    def rank():
        run(tmp_path, "ddp", train__steps=2, parallel__ledger=False)
        return comm.ledger() is None

    assert run_ranks(rank, 2) == [True, True]
    assert not (tmp_path / "ledger").exists()


def test_alone_no_ledger_is_written(tmp_path):
    run(tmp_path, "ddp", train__steps=2)
    assert not (tmp_path / "ledger").exists()


def test_a_resumed_run_compares_its_first_steps_again(tmp_path, monkeypatch):
    def checked(resume):
        seen = []
        original = CollectiveCheck.before
        monkeypatch.setattr(
            CollectiveCheck,
            "before",
            lambda self, intent: (seen.append(comm._watch.clock.step), original(self, intent)),
        )
        steps = 5 if resume else 1
        run(tmp_path / "run", "ddp", resume=resume, train__steps=6, callbacks=[] if resume else [interrupted(steps)])
        return sorted(set(seen))

    assert run_ranks(lambda: checked(False), 2)[1] == [0, 1]
    assert run_ranks(lambda: checked(True), 2)[1] == [0, 1, 2, 3, 4]


def test_on_fewer_ranks_a_resumed_run_cuts_the_ledgers_of_the_others_too(tmp_path):
    out = tmp_path / "run"
    run_ranks(lambda: run(out, "ddp", callbacks=[interrupted(3)]) and None, 3)
    third = out / "ledger" / "rank00002.jsonl"
    steps = {json.loads(line)["step"] for line in third.read_text().splitlines()}
    assert max(steps) == 3
    (out / "checkpoints" / "step_00000003" / "manifest.json").unlink()  # the newest complete one is of step 2
    run_ranks(lambda: run(out, "ddp", resume=True) and None, 2)
    assert max(json.loads(line)["step"] for line in third.read_text().splitlines()) == 2
