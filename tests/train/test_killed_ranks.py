"""Whatever rank is killed at whatever moment, the run that is started again ends as the one that was never interrupted."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support import TINY, outcome_of, tensors_of, tiny_config, windows

from pellucid import launch
from pellucid.checkpoint import files
from pellucid.errors import RankError
from pellucid.parallel import comm
from pellucid.parallel.world import VARIABLES
from pellucid.train import Callback, Trainer

MODES = ("ddp", "zero1")
CHANGES = dict(
    model__dropout=0.2, train__steps=6, train__global_batch=8, train__save_every=2, train__val_every=2,
    train__keep_last=2, callbacks={"early_stopping": {"patience": 50}}, optim__schedule="wsd",
)  # fmt: skip
HOOKS = (
    "on_train_begin", "on_epoch_begin", "on_batch_begin", "on_batch_end", "on_before_step", "on_validation",
    "on_optimizer_step", "on_save",
)  # fmt: skip
NUM_HOOKS, NUM_OPERATIONS = 40, 72
"""About as many calls and file operations as a whole run has."""


class Death(NamedTuple):
    """A rank is killed: in its n-th call of a callback, before the writer's n-th file operation, or after n seconds."""

    rank: int
    moment: str
    n: float

    def arm(self, out):
        """Called on every rank; returns the callbacks that a `Trainer` needs for it."""
        Path(f"{out}.pid{comm.rank()}").write_text(str(os.getpid()))
        if self.moment == "operation" and comm.rank() == 0:
            files.before_operation = Countdown(self.n, lambda: self.kill(out))
        if comm.rank() != self.rank:
            return []
        if self.moment == "seconds":
            threading.Timer(self.n, lambda: self.kill(out)).start()
        return [every_hook(Countdown(self.n, lambda: self.kill(out)))] if self.moment == "call" else []

    def kill(self, out):
        os.kill(int(Path(f"{out}.pid{self.rank}").read_text()), signal.SIGKILL)


class Countdown:
    """Calls ``then`` the n-th time that it is called."""

    def __init__(self, n, then):
        self.left, self.then = n, then

    def __call__(self, *_args):
        self.left -= 1
        if self.left == 0:
            self.then()


def every_hook(function):
    return type("EveryHook", (Callback,), dict.fromkeys(HOOKS, lambda self, trainer, info: function()))()


def run(out, mode, death, changes):
    """On each rank."""
    torch.set_num_threads(1)
    callbacks = death.arm(out) if death else []
    trainer = Trainer(
        tiny_config(out, parallel__mode=mode, **(CHANGES | changes)),
        train_data=windows(12),
        val_data=windows(3, seed=9, score_once=True),
        callbacks=callbacks,
    )
    first = []
    trainer.setup.callbacks.append(at_begin(lambda: first.append(trainer.state.step)))
    trainer.train(resume=True)
    return first[0], trainer.state.step


def at_begin(function):
    return type("AtBegin", (Callback,), {"on_train_begin": lambda self, trainer, info: function()})()


def live(out, mode, death=None, **changes):
    """One life of a run on two ranks: (first step, last step) of each, or None if the death came before the end."""
    begin = time.monotonic()
    try:
        return launch(run, 2, out, mode, death, changes, start_method="fork")
    except RankError as error:
        assert death is not None, error
        assert str(error).startswith(f"rank {death.rank} was killed by SIGKILL"), error
        assert time.monotonic() - begin < 20, "the other rank must not wait for the dead one"
        return None


def outcome(out, step=6):
    """Everything that must not depend on interruptions."""
    return *outcome_of(out, step), (out / "model/model.safetensors").read_bytes()


def assert_same(out, expected):
    got = outcome(out)
    assert got[0].keys() == expected[0].keys()
    different = [key for key, value in expected[0].items() if not torch.equal(got[0][key], value)]
    assert not different, different
    assert got[1:] == expected[1:]
    assert not list(out.glob("**/*.tmp-*")), "leftovers of the dead"


def assert_ledgers_fit(out, whole):
    """No step's lines are torn, there twice, or other than those of the unbroken run. (Those not yet written are lost.)

    But for those of saves: in which step a checkpoint written in the background is published, is a matter of time.
    """

    def steps(folder, rank):
        lines = map(json.loads, (folder / f"ledger/rank{rank:05d}.jsonl").read_text().splitlines())
        by_step = groupby((line for line in lines if 1 <= line["step"] < 6), key=lambda line: line["step"])
        return [(step, [line["tag"] for line in own if not line["tag"].startswith("save")]) for step, own in by_step]

    for rank in range(2):
        found, expected = steps(out, rank), dict(steps(whole, rank))
        assert found == sorted(found) and len(dict(found)) == len(found) >= 2
        assert all(tags == expected[step] for step, tags in found)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """By mode, the oracle: its folder and outcome."""
    # the first step of an optimizer is slow in a process; forked ranks inherit a warm one
    Trainer(tiny_config("", train__steps=1), train_data=windows(12)).train()
    known = {}
    for mode in MODES:
        out = tmp_path_factory.mktemp("unbroken") / mode
        assert live(out, mode) == [(0, 6)] * 2
        known[mode] = out, outcome(out)
        tensors, log, state, *_ = known[mode][1]
        assert [record["step"] for record in log if record["event"] == "step"] == [1, 2, 3, 4, 5, 6]
        assert any(key.endswith("exp_avg") and value.abs().max() > 0 for (_, key), value in tensors.items())
        assert state["cursor"]["samples"] > 0 and state["mode"] == mode and state["world_size"] == 2
    return known


@pytest.mark.parametrize(
    "mode, background, deaths",
    [
        # the writer, in its second checkpoint, which the other rank waits for
        ("ddp", False, [Death(0, "operation", 31)]),
        # the other one: in step 5, when the checkpoint of step 2 is published for sure, and while both write the next one
        ("zero1", True, [Death(1, "call", 32), Death(1, "operation", 12)]),
    ],
    ids=MODES,
)
def test_killed_in_training_and_in_saving_a_run_ends_with_the_same_bits(tmp_path, unbroken, mode, background, deaths):
    out = tmp_path / "run"
    for death in deaths:
        assert live(out, mode, death, train__async_save=background) is None
        assert not (out / "model").exists()
        assert mode != "ddp" or list(out.glob("checkpoints/step_00000004.tmp-*")), "in the middle of the checkpoint"
    (first, last), other = live(out, mode, train__async_save=background)
    assert first in (2, 4, 6) and last == 6 and other == (first, last), "it went on from a checkpoint"
    whole, expected = unbroken[mode]
    assert_same(out, expected)
    assert_ledgers_fit(out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("background", [False, True], ids=["save at once", "save in background"])
@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_until_it_is_done(tmp_path, unbroken, mode, background, seed):
    rng = random.Random(seed)
    begin = time.monotonic()
    live(tmp_path / "timed", mode)
    duration = time.monotonic() - begin  # of this machine, today
    longest = {"call": NUM_HOOKS, "operation": NUM_OPERATIONS}
    out, deaths, ended = tmp_path / "run", 0, None
    for attempt in range(30):
        moment = rng.choice(["call", "operation", "seconds"])
        n = rng.uniform(0, duration) if moment == "seconds" else rng.randint(1, longest[moment])
        ended = live(out, mode, Death(rng.randrange(2), moment, n), train__async_save=background)
        deaths += ended is None
        if attempt >= 5 and deaths:
            break
        if not deaths:  # it was done before it could die: a rank has fewer operations than the other, a clock is late
            shutil.rmtree(out)
    live(out, mode, train__async_save=background)
    assert deaths >= 1
    whole, expected = unbroken[mode]
    assert_same(out, expected)
    assert_ledgers_fit(out, whole)


# -- torchrun -----------------------------------------------------------------------------------------------

PLUGIN = '''
import os, signal
from dataclasses import dataclass
from pathlib import Path
from pellucid.parallel import comm
from pellucid.registry import register
from pellucid.train import Callback

@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    marks: str
    """Folder of a file for each death that has been."""

@register("callback", "dies", config=Options)
class Dies(Callback):
    """Kills rank 1 once in step 3 and rank 0 once in step 5."""
    def __init__(self, options):
        self.marks = Path(options.marks)
    def on_before_step(self, trainer, info):
        mark = self.marks / f"rank{comm.rank()}"
        if info.step == 5 - 2 * comm.rank() and not mark.exists():
            mark.write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
            os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.mark.slow
def test_under_torchrun_a_run_whose_ranks_are_killed_goes_on_by_itself_from_the_newest_checkpoint(
    tmp_path, data_folder
):
    (tmp_path / "dies.py").write_text(PLUGIN)
    (tmp_path / "marks").mkdir()
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def train(out, config):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max_restarts", "3"]
        command += ["--monitor_interval", "0.1", "-m", "pellucid", "train", str(config), "--out", str(tmp_path / out)]
        command += [f"--model.{key}={value}" for key, value in TINY.items() if key != "vocab_size"]
        command += ["--data.path", str(data_folder), "--parallel.mode=zero1", "--model.dropout=0.1"]
        command += ["--train.steps=6", "--train.global_batch=8", "--train.micro_batch=2", "--train.dtype=float32"]
        command += ["--train.save_every=2", "--train.val_every=3", "--train.async_save=false"]
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done

    (tmp_path / "plain.toml").touch()
    (tmp_path / "deadly.toml").write_text(f'plugins = ["dies"]\n[callbacks.dies]\nmarks = "{tmp_path / "marks"}"\n')
    whole, killed = train("whole", tmp_path / "plain.toml"), train("killed", tmp_path / "deadly.toml")
    marks = {path.name: path.read_text() for path in (tmp_path / "marks").iterdir()}
    assert marks == {"rank1": "0", "rank0": "1"}, "each died once, in the first and in the second start"
    assert "resuming" not in whole.stderr
    assert "resuming after step 2" in killed.stderr and "resuming after step 4" in killed.stderr
    assert killed.stdout.count("step 6 of 6") == 1
    results = [[], []]
    for out, result in zip(("whole", "killed"), results, strict=True):
        last = tmp_path / out / "checkpoints/step_00000006"
        result += sorted((key, value.tolist()) for key, value in tensors_of(last).items())
        for record in map(json.loads, (tmp_path / out / "metrics.jsonl").read_text().splitlines()):
            result.append({k: v for k, v in record.items() if k not in ("time", "seconds", "tokens_per_s")})
        result.append((tmp_path / out / "model/model.safetensors").read_bytes())
    assert results[0] == results[1]
