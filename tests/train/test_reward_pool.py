"""Rewards in worker processes: what they return arrives, and what they do wrong is said and does no harm."""

import os
import subprocess
import sys
import time

import pytest

from pellucid.errors import ConfigError, TrainingError
from pellucid.train.reward_pool import Judged, RewardPool

MODULE = """
import os, signal, sys, time
print("a module that talks")

def length(prompt, completion, record):
    print("a reward that talks")
    return len(completion) + record["plus"]

def where(prompt, completion, record):
    return os.getpid()

def slow(prompt, completion, record):
    time.sleep(0.12)
    return 1

def deaf(prompt, completion, record):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(60)

def bad(prompt, completion, record):
    if completion == "raise":
        raise ValueError("no such unit")
    if completion == "hang":
        while True:
            pass
    if completion == "die":
        os._exit(3)
    if completion == "exit":
        sys.exit(1)
    return {"nan": float("nan"), "text": "four", "none": None}.get(completion, 1)

not_a_function = 3
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "worth_of_tests.py").write_text(MODULE)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    yield
    patch.undo()


@pytest.fixture
def pool(request):
    pools = []

    def make(*rewards, timeout_s=5.0, workers=1):
        pools.append(RewardPool(rewards, plugins=(), timeout_s=timeout_s, workers=workers))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


def test_each_completion_is_worth_what_each_reward_says_in_order(pool):
    items = [Judged("p", "x" * i, {"plus": 0.5, "answer": "xx"}) for i in range(20)]
    got = pool("worth_of_tests:length", "exact_match", workers=2).score(items)
    assert got == [[i + 0.5, float(i == 2)] for i in range(20)]


def test_rewards_run_elsewhere_and_the_processes_go_with_the_pool(pool):
    one = pool("worth_of_tests:where")
    ((pid,),) = one.score([Judged("", "", {})])
    assert int(pid) != os.getpid()
    os.kill(int(pid), 0)
    one.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_a_worker_that_is_told_nothing_ends_without_a_word():
    """One that starts beside another whose rewards are not there."""
    worker = [sys.executable, "-m", "pellucid.train.reward_worker"]
    done = subprocess.run(worker, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "completion, words",
    [
        ("raise", "raised ValueError: no such unit"),
        ("nan", "returned nan"),
        ("text", "raised ValueError"),
        ("none", "raised TypeError"),
        ("die", "ended its process"),
        ("exit", "raised SystemExit"),
    ],
)
def test_a_reward_that_fails_is_named_with_the_completion(pool, completion, words):
    one = pool("worth_of_tests:bad")
    with pytest.raises(TrainingError) as error:
        one.score([Judged("a prompt", completion, {})])
    assert f"reward worth_of_tests:bad {words}" in str(error.value) and f"'{completion}'" in str(error.value)
    assert one.score([Judged("", "fine", {})]) == [[1.0]], "there is a worker again"


@pytest.mark.parametrize("what", ["raise", "die", "nan"])
def test_what_was_asked_behind_a_failure_is_forgotten(pool, what):
    """Replies to completions of the failed call are not taken for those of the next one."""
    one = pool("worth_of_tests:bad", "worth_of_tests:length")
    items = [Judged("", what if i == 5 else "x" * i, {"plus": 0}) for i in range(40)]
    with pytest.raises(TrainingError, match=f"worth_of_tests:bad .* completion '{what}'"):
        one.score(items)
    assert one.score(items[6:]) == [[1.0, float(i)] for i in range(6, 40)]


def test_each_completion_has_the_time_of_its_own(pool):
    """Many in a row may take longer than one may."""
    one = pool("worth_of_tests:slow", timeout_s=0.5)
    began = time.monotonic()
    assert one.score([Judged("", "", {})] * 20) == [[1.0]] * 20
    assert time.monotonic() - began > 2


def test_a_reward_that_hangs_is_ended_in_time_and_its_process_too(pool):
    one = pool("worth_of_tests:bad", timeout_s=0.3)
    (worker,) = one._workers
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"did not return within 0.3 s.*strategy.reward_timeout_s"):
        one.score([Judged("", "hang", {})])
    assert time.monotonic() - began < 5 and worker.process.poll() is not None


def test_telling_a_worker_that_hangs_of_long_completions_ends(pool):
    """A pipe holds 64 KiB: what does not fit would be waited for without a limit."""
    one = pool("worth_of_tests:deaf", timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"did not return within 0.3 s"):
        one.score([Judged("", "x" * 12_000, {})] * 16)
    assert time.monotonic() - began < 10


def test_few_completions_are_divided_over_all_workers(pool):
    one = pool("worth_of_tests:slow", timeout_s=5, workers=4)
    began = time.monotonic()
    assert one.score([Judged("", "x", {})] * 16) == [[1.0]] * 16
    assert time.monotonic() - began < 1.5  # one after the other they take 1.92 s


@pytest.mark.parametrize(
    "name, words",
    [
        ("exact_mach", "did you mean exact_match"),
        ("worth_of_tests:lenght", "no function 'lenght'"),
        ("worth_of_tests:not_a_function", "no function 'not_a_function'"),
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
    ],
)
def test_a_reward_that_is_not_there_is_refused_at_the_start(name, words):
    with pytest.raises(ConfigError, match=r"strategy\.rewards") as error:
        RewardPool([name], plugins=(), timeout_s=1.0, workers=1)
    assert words in str(error.value)
