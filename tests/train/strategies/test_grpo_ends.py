"""Online GRPO that is interrupted, killed, or meets a full disk: what is left goes on to the bit, and no process stays."""

import errno
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from grpo_runs import ONLINE, run
from support import digest, fork, run_ranks, tensors_of, tiny_config, wait

from pellucid.checkpoint.store import newest_undamaged
from pellucid.cli import main
from pellucid.config import to_toml
from pellucid.errors import StorageError
from pellucid.inference import Engine
from pellucid.parallel import comm
from pellucid.train import Callback, rollout

MODULE = """
import os, signal, time

def even(prompt, completion, record):
    codes = completion.encode()
    return sum(c % 2 == 0 for c in codes) / len(codes) if codes else 0.0

def even_and_ctrl_c(prompt, completion, record):
    "The 20th completion, which is one of the second rollout, is the moment at which somebody presses Ctrl-C, or a job is ended."
    if _counted() == 20:
        os.killpg(os.getpgrp(), int(os.environ["SIGNAL"]))
    return even(prompt, completion, record)

def even_and_long(prompt, completion, record):
    "As long as a reward may take, from the 20th completion on."
    if _counted() >= 20:
        open(os.environ["COUNT"] + ".hangs", "w").close()
        time.sleep(600)
    return even(prompt, completion, record)

def _counted():
    "Which it is of all calls, in both workers: where one's own byte ended. The file's size may be past it by then."
    if "COUNT" not in os.environ:
        return 0
    with open(os.environ["COUNT"], "a") as file:
        file.write("x")
        file.flush()
        return os.lseek(file.fileno(), 0, os.SEEK_CUR)
"""
TWICE = dict(train__steps=6, strategy__updates=2, train__save_every=20, optim__lr=3e-2, strategy__reward_workers=2)


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "rewards_that_end.py").write_text(MODULE)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    yield
    patch.undo()


def in_a_group(function, *, timeout=60.0):
    """Run ``function`` in a process group of its own, as a shell starts a job; the exit status, once that process is gone."""

    def child():
        os.setsid()
        function()

    pid = start(child)
    return pid, wait(pid, timeout)


def start(function):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def nobody_in(group, *, within=0.0):
    """Whether no process of a group is there any more."""
    end = time.monotonic() + within
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)


def log_of(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = ("time", "seconds", "tokens_per_s", "update_tokens_per_s")
    return [{k: v for k, v in line.items() if k not in times} for line in lines if line["event"] != "save"]


def same(out, other, step):
    ours, theirs = (tensors_of(folder / f"checkpoints/step_{step:08d}") for folder in (out, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


# -- Ctrl-C -------------------------------------------------------------------------------------------------


class CtrlC(Callback):
    """In the second micro-batch of a step."""

    def __init__(self, step):
        self.step = step

    def on_batch_begin(self, trainer, info):
        if (info.step, info.micro) == (self.step, 1):
            os.killpg(os.getpgrp(), signal.SIGINT)


class Interrupted(Engine):
    """The second time that answers are drawn somebody presses Ctrl-C."""

    times = 0

    def generate(self, *args):
        Interrupted.times += 1
        if Interrupted.times == 2:
            os.killpg(os.getpgrp(), signal.SIGINT)
        return super().generate(*args)


@pytest.fixture(scope="module")
def whole(prompts, tmp_path_factory):
    """A run that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole")
    trainer, _ = run(prompts, out, strategy__rewards=["rewards_that_end:even_and_ctrl_c"], **TWICE)
    return out, digest(trainer.model)


@pytest.mark.parametrize("moment", ["drawing", "judging", "judging, SIGTERM", "update", "second update"])
def test_ctrl_c_ends_the_run_after_the_step_and_it_goes_on_to_the_bit(prompts, whole, tmp_path, moment):
    """The signal goes to the whole process group: reward workers live on until the step is done, and then they are gone."""
    changes = TWICE | {"strategy__rewards": ["rewards_that_end:even_and_ctrl_c"]}
    last = 4 if moment == "second update" else 3
    number = signal.SIGTERM if "SIGTERM" in moment else signal.SIGINT

    def life():
        callbacks = [CtrlC(last)] if "update" in moment else []
        if "judging" in moment:
            os.environ |= {"COUNT": str(tmp_path / "count"), "SIGNAL": str(number.value)}
        if moment == "drawing":
            rollout.Engine = Interrupted
        trainer, _ = run(prompts, tmp_path / "run", callbacks=callbacks, **changes)
        assert trainer.stop_reason == number.name and trainer.state.step == last

    group, status = in_a_group(life)
    assert status == 0 and nobody_in(group)
    found = newest_undamaged(tmp_path / "run/checkpoints")
    assert found.name == f"step_{last:08d}" and (found / "extra/grpo.safetensors").exists() == (last == 3)
    rest, seen = run(prompts, tmp_path / "run", resume=True, **changes)
    assert [info.step for info in seen.infos] == list(range(last + 1, 7))
    assert digest(rest.model) == whole[1] and same(tmp_path / "run", whole[0], 6)
    assert log_of(tmp_path / "run") == log_of(whole[0])


def wait_for(condition, within=20.0):
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["second Ctrl-C", "SIGKILL"])
def test_where_a_reward_takes_long_a_second_ctrl_c_or_a_kill_leaves_no_process(prompts, tmp_path, how):
    """Both workers judge for as long as strategy.reward_timeout_s lets them, and nobody waits for them."""
    changes = TWICE | {"strategy__rewards": ["rewards_that_end:even_and_long"], "strategy__reward_timeout_s": 300.0}
    changes |= {"train__save_every": 2, "train__async_save": False}  # one in the background is there a step later

    def life():
        os.setsid()
        os.environ["COUNT"] = str(tmp_path / "count")
        run(prompts, tmp_path / "run", **changes)

    group = start(life)
    wait_for((tmp_path / "count.hangs").exists)
    began = time.monotonic()
    if how == "SIGKILL":
        os.kill(group, signal.SIGKILL)
        assert wait(group, 5) == -signal.SIGKILL
    else:
        os.killpg(group, signal.SIGINT)
        time.sleep(0.2)
        assert os.waitpid(group, os.WNOHANG) == (0, 0), "the first one waits for the step"
        os.killpg(group, signal.SIGINT)
        assert wait(group, 10) == 130
    assert nobody_in(group, within=5) and time.monotonic() - began < 10
    assert newest_undamaged(tmp_path / "run/checkpoints").name == "step_00000002"
    rest, _ = run(prompts, tmp_path / "run", resume=True, **changes)
    assert rest.state.step == 6


@pytest.mark.slow
def test_ctrl_c_on_a_job_of_ranks_ends_all_of_its_processes_and_it_goes_on_to_the_bit(prompts, tmp_path):
    """The command, its ranks and their workers, with the signal from inside a reward."""
    settings = dict(TWICE, strategy__rewards="rewards_that_end:even_and_ctrl_c", parallel__mode="zero1")
    more = {"data__path": str(prompts), "strategy__rewards": ["rewards_that_end:even"], "optim__eps": 1e-4}
    config = tiny_config(**ONLINE | more)
    (tmp_path / "run.toml").write_text(to_toml(config))
    words = [f"--{key.replace('__', '.')}={value}" for key, value in settings.items()]
    argv = ["train", str(tmp_path / "run.toml"), "--quiet", "--nproc", "2", *words]

    def life():
        os.environ |= {"COUNT": str(tmp_path / "count"), "SIGNAL": str(signal.SIGINT.value)}
        sys.exit(main([*argv, f"--train.out={tmp_path / 'run'}"]))

    group, status = in_a_group(life, timeout=120)
    assert status == 0 and nobody_in(group, within=2)
    assert newest_undamaged(tmp_path / "run/checkpoints").name == "step_00000003"
    assert main([*argv, f"--train.out={tmp_path / 'run'}", "--resume"]) == 0
    changes = settings | {"strategy__rewards": ["rewards_that_end:even_and_ctrl_c"]}
    run_ranks(lambda: run(prompts, tmp_path / "whole", **changes)[0].state.step, 2)
    assert same(tmp_path / "run", tmp_path / "whole", 6) and log_of(tmp_path / "run") == log_of(tmp_path / "whole")


# -- a full disk --------------------------------------------------------------------------------------------

FULL = dict(
    train__steps=8, strategy__updates=3, strategy__reference_every=3, train__save_every=2, optim__name="sgd", optim__lr=1.0,
    strategy__rewards=["rewards_that_end:even"],
)  # fmt: skip
"""SGD keeps nothing, so that extra/grpo.safetensors, with the answers and a refreshed reference, is the largest file."""


class FullDisk(Callback):
    """From the end of a step on this process can write no file as large as the weights and the answers together."""

    def __init__(self, step, rank=0):
        self.step, self.rank = step, rank

    def on_optimizer_step(self, trainer, info):
        if info.step == self.step and comm.rank() == self.rank:
            size = (Path(trainer.config.train.out) / "checkpoints/step_00000002/model.safetensors").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 512, resource.RLIM_INFINITY))


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_where_the_answers_do_not_fit_on_the_disk_the_last_checkpoint_stands(prompts, tmp_path, background, size):
    """Step 2 is saved, with answers; step 4, which has a reference too, cannot be; with room again it goes on to the bit."""
    changes = FULL | {"train__async_save": background} | ({"parallel__mode": "zero2"} if size > 1 else {})

    def life():
        try:
            run(prompts, tmp_path / "run", callbacks=[FullDisk(4)], **changes)
        except Exception as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return [type(error).__name__, str(error)]
        return None

    if size == 1:
        assert fork(lambda: (tmp_path / "said").write_text(json.dumps([life()]))) == 0
        said = json.loads((tmp_path / "said").read_text())
    else:
        said = run_ranks(life, size)
    assert said[0][0] == StorageError.__name__ and "grpo.safetensors" in said[0][1]
    assert os.strerror(errno.EFBIG) in said[0][1]
    assert said[1:] == [["RankError", f"rank 0: {said[0][1]}"]] * (size - 1)
    assert os.listdir(tmp_path / "run/checkpoints") == ["step_00000002"]
    found = newest_undamaged(tmp_path / "run/checkpoints")
    assert found.name == "step_00000002" and "grpo.safetensors" in os.listdir(found / "extra")

    def rest():
        return digest(run(prompts, tmp_path / "run", resume=True, **changes)[0].model)

    def whole():
        return digest(run(prompts, tmp_path / "whole", **changes)[0].model)

    ends = [rest(), whole()] if size == 1 else [run_ranks(rest, size), run_ranks(whole, size)]
    assert ends[0] == ends[1] and same(tmp_path / "run", tmp_path / "whole", 8)
