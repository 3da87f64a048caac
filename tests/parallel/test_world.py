"""Who this process is among the ranks, from torchrun's environment, and functions of one rank."""

import json
import os
import socket
import subprocess
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from support import fork, wait

from pellucid.errors import ConfigError, DataError, RankError
from pellucid.parallel.launch import launch
from pellucid.parallel.world import (
    VARIABLES,
    World,
    get_current_device,
    get_rank,
    get_world_size,
    in_environment,
    is_restart,
    only_on_rank,
    process_group,
    resolve_device,
    store,
)


@pytest.fixture
def environment(monkeypatch):
    """Sets torchrun's variables to the given values, and no others of them."""
    for name in (*VARIABLES, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)

    def set_to(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_to


def test_alone_it_is_rank_0_of_1(environment):
    with process_group() as world:
        assert world == World.current() == World(0, 1, 0, resolve_device("auto"))
        assert world.group is None
        assert not dist.is_initialized() and store() is None
    assert (get_rank(), get_world_size(), get_current_device()) == (0, 1, world.device)
    assert not in_environment() and not is_restart()


@pytest.mark.parametrize(
    "values, message",
    [
        ({"RANK": 0}, "has RANK but not LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": 4}, "has WORLD_SIZE but not RANK"),
        ({"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}, "but not MASTER_PORT;"),
        (dict(zip(VARIABLES, (2, 0, 2, "localhost", 1), strict=True)), "RANK is 2 and WORLD_SIZE is 2"),
        (dict(zip(VARIABLES, ("one", 0, 2, "localhost", 1), strict=True)), "RANK is 'one'"),
        (dict(zip(VARIABLES, (0, 0, 2, "localhost", -1), strict=True)), "MASTER_PORT is '-1'"),
        (dict(zip(VARIABLES, (0, 0, 2, "localhost", 99999), strict=True)), "MASTER_PORT is '99999'.* from 0 to 65535"),
        (dict(zip(VARIABLES, (0, 0, 2**31, "localhost", 1), strict=True)), "WORLD_SIZE is '2147483648'"),
    ],
)
def test_an_environment_that_is_incomplete_or_contradicts_itself_is_refused_by_name(environment, values, message):
    environment(**values)
    assert in_environment()
    with pytest.raises(ConfigError, match=message), process_group():
        pass
    assert not dist.is_initialized()


def test_what_other_programs_leave_in_the_environment_does_not_make_a_rank(environment):
    environment(WORLD_SIZE=1, LOCAL_RANK=0, MASTER_PORT=29500, TORCHELASTIC_RESTART_COUNT=0)
    assert not in_environment() and not is_restart()
    environment(TORCHELASTIC_RESTART_COUNT=2)
    assert is_restart()


def test_a_backend_that_cannot_be_used_is_refused(environment):
    environment(**dict(zip(VARIABLES, (0, 0, 1, "localhost", 1), strict=True)), LOCAL_WORLD_SIZE=99)
    with pytest.raises(ConfigError, match="backend is nccl, for which 99 ranks need a cuda device each"):  # noqa: SIM117
        with process_group("nccl"):
            pass
    with pytest.raises(ConfigError, match="backend 'mpi' is unknown; known: auto, gloo, nccl"), process_group("mpi"):
        pass


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_by_hand(body, num=2):
    """Ranks as an operator would start them: variables in the environment, one process each. Their exit statuses."""
    port, children = str(free_port()), []
    for rank in range(num):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                values = (str(rank), str(rank), str(num), "127.0.0.1", port)
                os.environ |= dict(zip(VARIABLES, values, strict=True))
                code = body(rank)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    return [wait(pid, 30) for pid in children]


def test_the_environment_makes_a_group_that_is_gone_after_the_block(environment):
    def body(rank):
        threads = set(os.listdir("/proc/self/task"))
        with process_group(timeout_s=20) as world:
            assert (world.rank, world.size, world.local_rank) == (rank, 2, rank)
            assert world.device.type == "cpu" and world.group is dist.group.WORLD and dist.get_backend() == "gloo"
            with process_group() as inner:  # it is there already
                assert inner == world
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total)
            store().set(f"key{rank}", "value")
            assert float(total) == 3.0 and store().get(f"key{1 - rank}") == b"value"
        assert not dist.is_initialized() and World.current().size == 1 and world.group is None
        assert set(os.listdir("/proc/self/task")) == threads  # one that outlives its group could abort the exit
        return 0

    assert start_by_hand(body) == [0, 0]


def test_the_rank_that_hosts_the_store_waits_for_those_who_still_read_it(environment):
    def body(rank):
        with process_group(timeout_s=20):
            if rank == 0:
                store().set("late", "news")
            else:
                time.sleep(0.5)
                assert store().get("late") == b"news"
        return 0

    assert start_by_hand(body) == [0, 0]


def test_when_a_block_raises_its_rank_leaves_at_once_whatever_the_others_do(environment, tmp_path):
    def body(rank):
        try:
            with process_group(timeout_s=20):
                began = time.monotonic()
                if rank == 1:
                    raise ZeroDivisionError
                while not (tmp_path / "left").exists():  # joins no collective
                    time.sleep(0.01)
                os._exit(0)
        except ZeroDivisionError:
            (tmp_path / "left").touch()
            return 3 if time.monotonic() - began < 1 else 4

    assert start_by_hand(body) == [0, 3]


# -- one rank only ------------------------------------------------------------------------------------------


def one_speaks():
    @only_on_rank(1)
    def speak(word):
        return f"{word} from {get_rank()}"

    return speak("hello"), speak.__name__


def test_a_function_of_one_rank_gives_none_elsewhere():
    assert launch(one_speaks, 3, start_method="fork") == [(None, "speak"), ("hello from 1", "speak"), (None, "speak")]


def others_wait(path):
    @only_on_rank(1, sync=True)
    def write():
        time.sleep(0.3)
        path.write_text("done")
        return 5

    return write(), path.exists()


def test_with_sync_nobody_goes_on_before_it_has_run(tmp_path):
    assert launch(others_wait, 3, tmp_path / "file", start_method="fork") == [(None, True), (5, True), (None, True)]


def all_hear():
    @only_on_rank(0, sync=True)
    def fail():
        raise DataError("a.txt is empty")

    try:
        fail()
    except DataError as error:
        return str(error)
    except RankError as error:
        return str(error), error.rank, error.error, error.exit_code, "in fail" in error.traceback


def test_with_sync_an_error_on_the_rank_is_an_error_on_all():
    told = ("rank 0 failed: DataError: a.txt is empty", 0, "DataError", 2, True)
    assert launch(all_hear, 3, start_method="fork") == ["a.txt is empty", told, told]


def test_alone_the_function_simply_runs_and_an_absent_rank_is_refused():
    assert only_on_rank(0, sync=True)(lambda: 3)() == 3
    with pytest.raises(ConfigError, match=r"only_on_rank\(2\): there is no such rank; they are 0 to 0"):
        only_on_rank(2)(print)()


# -- torchrun -----------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys, torch
import torch.distributed as dist
from pellucid.parallel.world import is_restart, process_group
with process_group(timeout_s=60) as world:
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    if not is_restart() and world.rank == 1 and sys.argv[2] == "1":
        sys.exit(1)
    with open(f"{sys.argv[1]}/rank{world.rank}.json", "w") as file:
        json.dump([world.size, world.local_rank, float(total), dist.get_backend()], file)
"""


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_torchrun_starts_ranks_and_starts_them_again_after_a_failure(environment, tmp_path, restarts):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", f"--max_restarts={restarts}"]
    command += ["--monitor_interval=0.1", str(tmp_path / "script.py"), str(tmp_path), str(restarts)]
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found == [[2, 0, 3.0, "gloo"], [2, 1, 3.0, "gloo"]]


@pytest.mark.gpu
def test_on_cuda_a_rank_has_the_device_of_its_number_and_nccl(environment):
    def body():
        environment(**dict(zip(VARIABLES, (0, 0, 1, "127.0.0.1", free_port()), strict=True)), LOCAL_WORLD_SIZE=1)
        with process_group() as world:
            assert world.device == World.current("cuda").device == torch.device("cuda", 0)
            assert dist.get_backend() == "nccl" and World.current("cpu").device == torch.device("cpu")
            total = torch.ones(1, device=world.device)
            dist.all_reduce(total)
            assert float(total) == 1.0
        with process_group("gloo") as world:
            assert world.device == torch.device("cpu")

    assert fork(body) == 0
