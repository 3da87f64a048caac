"""Killed anywhere and resumed, a run ends with the same bits as one that was never interrupted."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from support import fork, outcome_of, tiny_config, wait, windows

from pellucid.checkpoint import files
from pellucid.errors import CheckpointError, ConfigError
from pellucid.train import Callback, Trainer

CHANGES = dict(
    model__dropout=0.2, train__steps=6, train__save_every=2, train__val_every=2, train__keep_last=1,
    train__global_batch=4, train__micro_batch=2, train__async_save=False,
    callbacks={"early_stopping": {"patience": 50}}, optim__schedule="wsd",
)  # fmt: skip


def run(out, *, resume=True, hook=None, callbacks=(), **changes):
    trainer = Trainer(
        tiny_config(out, **(CHANGES | changes)),
        train_data=windows(12),
        val_data=windows(3, seed=9, score_once=True),
        callbacks=callbacks,
    )
    trainer.train(resume=resume)
    return trainer


def outcome(out):
    """Everything that must not depend on interruptions."""
    return outcome_of(out, 6)


def assert_same(got, expected):
    assert got[0].keys() == expected[0].keys()
    different = [key for key, value in expected[0].items() if not torch.equal(got[0][key], value)]
    assert not different, different
    assert got[1:] == expected[1:]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The oracle, once with training that moved."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert fork(lambda: run(out, resume=False)) == 0
    result = outcome(out)
    assert [r["step"] for r in result[1] if r["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert any(key.endswith("exp_avg") and value.abs().max() > 0 for (_, key), value in result[0].items())
    return result


def count_operations(out):
    """The operations of the second and last save of a run, and of its final model folder."""
    log = []
    files.before_operation = lambda name, path: log.append((name, str(path)))
    try:
        run(out, resume=False)
    finally:
        files.before_operation = None
    return log


@pytest.mark.slow
def test_killed_before_and_after_every_operation_of_the_saves(tmp_path, unbroken):
    operations = count_operations(tmp_path / "count")
    assert {name for name, _ in operations} == {"make", "write", "fsync", "rename", "remove"}
    # every point of the save at step 4, which also drops the one of step 2, and of the final model folder
    parts = ("00000004", "00000006", "/model.tmp")
    first = {part: next(i for i, (_, path) in enumerate(operations) if part in path) for part in parts}
    points = [*range(first["00000004"], first["00000006"]), *range(first["/model.tmp"], len(operations))]
    points.insert(0, first["00000004"] - 1)  # the log is synced before
    assert operations[points[0]][1].endswith("metrics.jsonl") and len(points) >= 30
    bad = []
    for point in points:
        for moment in ("before", "torn", "after"):
            if moment == "torn" and operations[point][0] != "write":
                continue
            out = tmp_path / f"{point}-{moment}"
            status = fork(lambda out=out, point=point, moment=moment: killed_at(out, point, moment))
            if status != -signal.SIGKILL or fork(lambda out=out: run(out)) != 0:
                bad.append((operations[point], moment, status))
            else:
                assert_same(outcome(out), unbroken)
                assert not list((out / "checkpoints").glob("*.tmp-*"))
            shutil.rmtree(out, ignore_errors=True)
    assert not bad


def killed_at(out, point, moment):
    seen = 0

    def die(name, path):
        nonlocal seen
        if seen == point:
            if moment == "torn":
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    if moment == "before":
        files.before_operation = die
    else:
        files.after_operation = die
    run(out, resume=False)


def test_killed_at_twenty_random_times(tmp_path, unbroken):
    rng = random.Random(0)
    begin = time.monotonic()
    assert fork(lambda: run(tmp_path / "timed", resume=False)) == 0
    duration = time.monotonic() - begin
    kills = 0
    for case in range(80):  # on a busy machine many are too late
        if kills >= 20:
            break
        out = tmp_path / str(case)
        for _ in range(3):  # killed up to three times in one life
            pid = os.fork()
            if pid == 0:
                try:
                    run(out, train__async_save=case % 2 == 0)
                finally:
                    os._exit(0)
            time.sleep(rng.uniform(0, duration))
            os.kill(pid, signal.SIGKILL)
            kills += wait(pid, 10) == -signal.SIGKILL
        assert fork(lambda out=out: run(out)) == 0
        assert_same(outcome(out), unbroken)
    assert kills >= 20


def test_resumed_in_the_middle_of_an_epoch_on_another_micro_batch_it_sees_the_same_samples(tmp_path):
    def samples(out, **changes):
        seen = {}

        class Seen(Callback):
            def on_batch_end(self, trainer, info):
                seen.setdefault(info.step, []).extend(i for i in info.batch.sample_ids.tolist() if i >= 0)

        run(out, callbacks=[Seen()], **changes)
        return seen

    whole = samples(tmp_path / "whole")
    first = samples(tmp_path / "parts", train__steps=4)
    second = samples(tmp_path / "parts", train__micro_batch=4)
    assert sorted(second) == [5, 6] and first | second == whole


def test_a_finished_run_resumed_trains_nothing_more(tmp_path):
    run(tmp_path / "run")
    before = outcome(tmp_path / "run")
    log = (tmp_path / "run/metrics.jsonl").read_bytes()
    steps = []

    class Steps(Callback):
        def on_before_step(self, trainer, info):
            steps.append(info.step)

    run(tmp_path / "run", callbacks=[Steps()])
    assert not steps and (tmp_path / "run/metrics.jsonl").read_bytes() == log
    assert_same(outcome(tmp_path / "run"), before)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "config.json"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(tmp_path, unbroken, capfd, name, damage):
    out = tmp_path / "run"
    assert fork(lambda: run(out, resume=False, train__keep_last=0)) == 0
    file = out / "checkpoints/step_00000006" / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-7])
    else:
        file.unlink()
    capfd.readouterr()
    assert fork(lambda: run(out, train__keep_last=0)) == 0
    message = capfd.readouterr().err
    assert name in message and "step_00000006" in message
    assert_same(outcome(out), unbroken)


def test_a_manifest_without_its_keys_is_named_and_the_checkpoint_before_it_is_used(tmp_path, unbroken, capfd):
    out = tmp_path / "run"
    assert fork(lambda: run(out, resume=False, train__keep_last=0)) == 0
    (out / "checkpoints/step_00000006/manifest.json").write_text('{"format": "pellucid-checkpoint"}')
    assert fork(lambda: run(out, train__keep_last=0)) == 0
    assert "skipping checkpoint step_00000006" in capfd.readouterr().err
    assert_same(outcome(out), unbroken)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path):
    out = tmp_path / "run"
    run(out, train__keep_last=0)
    for folder in (out / "checkpoints").iterdir():
        (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"no checkpoint .* can be read.*model\.safetensors"):
        run(out)


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path):
    out = tmp_path / "run"
    run(out)
    path = out / "checkpoints/step_00000006/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="upgrade pellucid"):
        run(out)


def test_a_used_folder_and_a_second_run_in_one_folder_are_refused(tmp_path):
    out = tmp_path / "run"
    refused = []

    class Second(Callback):
        def on_optimizer_step(self, trainer, info):
            with pytest.raises(ConfigError, match="in use by another process"):
                run(out)
            refused.append(info.step)

    run(out, callbacks=[Second()], train__steps=2)
    assert refused == [1, 2]
    with pytest.raises(ConfigError, match="--resume"):
        run(out, resume=False)


@pytest.mark.parametrize(
    "key, change",
    [
        ("optim.lr", dict(optim__lr=5e-3)),
        ("model.dropout", dict(model__dropout=0.1)),
        ("train.seed", dict(train__seed=4)),
    ],
)
def test_resuming_with_another_setting_that_matters_is_refused_by_name(tmp_path, key, change):
    run(tmp_path / "run", train__steps=2)
    with pytest.raises(ConfigError, match=rf"{key} was .* is .* now"):
        run(tmp_path / "run", **change)


def test_an_unwritable_run_folder_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(tmp_path / "file" / "run")


def test_optimizer_moments_are_saved_by_name_and_load_into_plain_adamw(tmp_path):
    trainer = run(tmp_path / "run")
    tensors = load_file(tmp_path / "run/checkpoints/step_00000006/optimizer.safetensors")
    parameters = dict(trainer.model.named_parameters())
    assert {key.rpartition("/")[0] for key in tensors} == set(parameters)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(tensors[f"{name}/exp_avg_sq"], trainer.optimizer.state[parameters[name]]["exp_avg_sq"])
    plain = torch.optim.AdamW(parameters.values())
    state = plain.state_dict() | {
        "state": {
            i: {key: tensors[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            for i, name in enumerate(parameters)
        }
    }
    plain.load_state_dict(state)
    assert plain.state[parameters[name]]["step"] == 6
