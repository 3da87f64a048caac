"""Ranks come up, come home in order, and never outlive their use. Most cases fork: it costs a tenth of a second."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import fork, wait

from pellucid.errors import ConfigError, DataError, RankError
from pellucid.parallel.launch import launch
from pellucid.parallel.world import get_rank

HERE = Path(__file__).parent


def add_up(x):
    """Changes its argument, and tells what the ranks together have."""
    x += get_rank()
    total = x.clone()
    dist.all_reduce(total)
    return get_rank(), x, total


def environment():
    keep = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
    return {name: os.environ.get(name) for name in keep}, torch.get_num_threads()


def note_pid(folder):
    (folder / f".{get_rank()}").write_text(str(os.getpid()))
    (folder / f".{get_rank()}").rename(folder / f"rank{get_rank()}")


def sleep(folder):
    note_pid(folder)
    time.sleep(60)


def pids(folder, num):
    end = time.monotonic() + 30
    while len(found := list(folder.glob("rank*"))) < num:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.01)
    return [int(path.read_text()) for path in sorted(found)]


def assert_gone(ids, within=5.0):
    end = time.monotonic() + within
    for pid in ids:
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < end, f"process {pid} lives on"
            time.sleep(0.01)


def check_sums(results, x, num):
    assert [rank for rank, _, _ in results] == list(range(num))
    for rank, mine, total in results:
        assert torch.equal(mine, torch.tensor([1.0 + rank, 2.0 + rank]))  # of its own: no other rank added to it
        assert torch.equal(total, torch.tensor([1.0 * num + sum(range(num)), 2.0 * num + sum(range(num))]))
    assert torch.equal(x, torch.tensor([1.0, 2.0]))


# -- results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, num", [("fork", 3), ("spawn", 2)])
def test_results_come_in_rank_order_and_each_rank_has_its_own_arguments(method, num):
    x = torch.tensor([1.0, 2.0])
    check_sums(launch(add_up, num, x, start_method=method), x, num)


def test_a_fork_runs_a_closure_and_a_large_result_comes_home():
    size = 300_000
    first, second = launch(lambda: torch.full((size,), float(get_rank())), 2, start_method="fork")
    assert first.sum() == 0 and second.sum() == size


def test_ranks_find_torchruns_variables_and_nothing_of_a_torchrun_around_them(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    results = launch(environment, 2, start_method="fork")
    for rank, (found, threads) in enumerate(results):
        assert found == {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": None,
        }  # fmt: skip
        assert threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launch(environment, 1, start_method="fork")[0][1] == torch.get_num_threads()


def test_a_fork_computes_with_several_threads_after_its_parent_did(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def compute():
        values = torch.ones(1_000_000).add_(1)
        (torch.randn(200, 200) @ torch.randn(200, 200)).sum()
        return torch.get_num_threads(), float(values.sum())

    def parent():
        os.sched_getaffinity = lambda pid: set(range(4))
        torch.set_num_threads(2)
        assert compute() == (2, 2_000_000.0)
        assert launch(compute, 2, start_method="fork") == [(2, 2_000_000.0)] * 2
        assert compute() == (2, 2_000_000.0)

    assert fork(parent, timeout=30) == 0


def test_two_jobs_on_one_machine_do_not_meet():
    def job(value):
        for _ in range(3):
            x = torch.tensor([value])
            results = launch(add_up, 2, x, start_method="fork")
            assert float(results[0][2]) == 2 * value + 1

    children = []
    for value in (10.0, 1000.0):
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                job(value)
                os._exit(0)
            os._exit(1)
        children.append(pid)
    assert [wait(pid, 60) for pid in children] == [0, 0]


def test_a_launch_from_another_thread_works():
    found = []
    thread = threading.Thread(target=lambda: found.extend(launch(get_rank, 2, start_method="fork")))
    thread.start()
    thread.join(30)
    assert found == [0, 1]


def test_nothing_is_left_behind(tmp_path):
    def parent():
        tempfile.tempdir = str(tmp_path)
        launch(get_rank, 2, start_method="fork")
        before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
        for function in (get_rank, fails):
            with suppress(RankError):
                launch(function, 2, start_method="fork")
        assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()

    assert fork(parent) == 0


# -- failures -----------------------------------------------------------------------------------------------


def fails():
    if get_rank() == 1:
        raise ValueError("of this rank alone")
    dist.all_reduce(torch.ones(1))


def refuses_sigterm_while_one_fails(folder):
    note_pid(folder)
    if get_rank() == 1:
        pids(folder, 3)
        fails()
    if get_rank() == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_raises_ends_the_others_in_seconds_and_its_traceback_is_told(tmp_path):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(refuses_sigterm_while_one_fails, 3, tmp_path, start_method="fork")
    assert time.monotonic() - began < 5
    error = caught.value
    assert str(error) == "rank 1 failed: ValueError: of this rank alone"
    assert (error.rank, error.error, error.exit_code) == (1, "ValueError", 1)
    assert "in fails" in error.traceback and error.traceback.endswith("ValueError: of this rank alone\n")
    assert "run_rank" not in error.traceback and error.traceback in error.__notes__[0]
    assert_gone(pids(tmp_path, 3), within=0)


def end_by_signal():
    if get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_it_is_the_first_failure_that_is_told_not_one_that_follows_from_it():
    for _ in range(4):
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
            launch(end_by_signal, 3, start_method="fork")
        assert (caught.value.rank, caught.value.error, caught.value.traceback) == (1, "SIGKILL", "")


def raise_in_turn():
    time.sleep(0.05 * (3 - get_rank()))
    raise ValueError(f"rank {get_rank()}")


def test_of_several_failures_the_earliest_is_told():
    with pytest.raises(RankError, match="rank 2 failed: ValueError: rank 2"):
        launch(raise_in_turn, 3, start_method="fork")


def refuse_configuration():
    if get_rank() == 1:
        raise ConfigError("optim.lr must be positive, got -1")
    time.sleep(60)


def refuse_as_told_by_another_rank():
    if get_rank() == 1:
        raise RankError("rank 0: data is damaged", rank=0, exit_code=2)
    time.sleep(0.1)
    raise DataError("data is damaged")


@pytest.mark.parametrize(
    "function, message, error, exit_code",
    [
        (refuse_configuration, r"optim\.lr must be positive, got -1", "ConfigError", 2),
        (refuse_as_told_by_another_rank, "data is damaged", "DataError", 2),
        (lambda: os._exit(3), r"rank \d ended with exit status 3 and without a result", "exit status 3", 1),
        (lambda: os._exit(0), r"rank \d ended with exit status 0 and without a result", "exit status 0", 1),
        (lambda: sys.exit(4), r"rank \d failed: SystemExit: 4", "SystemExit", 1),
        (
            lambda: (x for x in ()),
            r"rank \d failed: TypeError: its result, of type generator, cannot be sent .*",
            "TypeError",
            1,
        ),
    ],
)
def test_every_way_to_end_without_a_result_is_an_error_that_says_so(function, message, error, exit_code):
    with pytest.raises(RankError) as caught:
        launch(function, 2, start_method="fork")
    assert re.fullmatch(message, str(caught.value))
    assert (caught.value.error, caught.value.exit_code) == (error, exit_code)


def test_wrong_arguments_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="nproc must be at least 1, got 0"):
        launch(get_rank, 0)
    with pytest.raises(ConfigError, match="start_method 'thread' is unknown; known: spawn, fork, forkserver"):
        launch(get_rank, 1, start_method="thread")
    with pytest.raises(ConfigError, match=r"<lambda> and its arguments cannot be sent .* start_method=\"fork\""):
        launch(lambda: 0, 2)


def test_a_rank_cannot_fork_ranks_of_its_own():
    with pytest.raises(RankError, match="would copy the process group") as caught:
        launch(lambda: launch(get_rank, 1, start_method="fork"), 1, start_method="fork")
    assert caught.value.error == "ConfigError"


# -- signals ------------------------------------------------------------------------------------------------


def start_parent(body):
    """A process of its own group, as a shell starts a job, that calls ``body`` and exits with what it returns."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 99
        with suppress(BaseException):
            code = body()
        os._exit(code)
    return pid


def finishes_on_request(folder):
    """Like a training loop: counts the requests to stop, and returns a while after the first."""
    seen = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: seen.append(signal.Signals(number).name))
    note_pid(folder)
    while not seen:
        time.sleep(0.01)
    time.sleep(0.5)
    return seen


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_request_to_stop_reaches_each_rank_once_and_what_they_finish_is_returned(tmp_path, whole_group):
    def body():
        return 7 if launch(finishes_on_request, 2, tmp_path, start_method="fork") == [["SIGTERM"]] * 2 else 1

    pid = start_parent(body)
    pids(tmp_path, 2)
    if whole_group:
        os.killpg(pid, signal.SIGINT)  # Ctrl-C in a terminal
    else:
        os.kill(pid, signal.SIGTERM)
    assert wait(pid, 30) == 7


def ignores_requests(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep(folder)


@pytest.mark.parametrize("function, requests", [(sleep, 1), (ignores_requests, 2)])
def test_ranks_that_do_not_finish_are_an_interrupt_at_once_or_at_the_second_request(tmp_path, function, requests):
    def body():
        try:
            launch(function, 2, tmp_path, start_method="fork")
        except KeyboardInterrupt:
            return 130
        return 1

    pid = start_parent(body)
    ranks = pids(tmp_path, 2)
    for _ in range(requests):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.kill(pid, signal.SIGINT)
        time.sleep(0.3)
    assert wait(pid, 5) == 130
    assert_gone(ranks, within=0)


def test_ranks_end_when_the_launching_process_is_killed(tmp_path):
    pid = start_parent(lambda: launch(ignores_requests, 3, tmp_path, start_method="fork"))
    ranks = pids(tmp_path, 3)
    os.kill(pid, signal.SIGKILL)
    assert wait(pid, 5) == -signal.SIGKILL
    assert_gone(ranks)


SCRIPT = """
import sys, torch
from pathlib import Path
from test_launch import add_up, check_sums, ignores_requests, launch
if __name__ == "__main__":
    x = torch.tensor([1.0, 2.0])
    check_sums(launch(add_up, 2, x, start_method="forkserver"), x, 2)
    launch(ignores_requests, 2, Path(sys.argv[1]), start_method="forkserver")
"""


def test_a_fork_server_gives_the_same_results_and_its_ranks_end_with_the_launching_process_too(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path], env=environment)
    try:
        ranks = pids(tmp_path, 2)
    finally:
        parent.kill()
        parent.wait()
    assert_gone(ranks)
