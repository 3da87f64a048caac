"""`pellucid train --nproc N`, and the same command under torchrun. Ranks are forked here, which is quick."""

import json
import os
import signal
import socket
import sys
import time

import pytest
import torch
from support import TINY, fork, wait

import pellucid.cli.train
from pellucid.checkpoint.model_folder import load_model
from pellucid.cli import main
from pellucid.parallel.world import VARIABLES, get_rank

MODEL = [f"--model.{key}={value}" for key, value in TINY.items() if key != "vocab_size"]
FAST = [
    "--train.steps=4",
    "--train.global_batch=4",
    "--train.micro_batch=2",
    "--train.dtype=float32",
    "--train.save_every=2",
]
RANKS = ["--nproc", "2", "--parallel.mode=ddp", "--parallel.start_method=fork"]


@pytest.fixture
def arguments(data_folder, tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return ["train", "--data.path", str(data_folder), "--out", str(tmp_path / "run"), *MODEL, *FAST]


def steps(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if record["event"] == "step"]


def test_ranks_train_the_model_of_one_process_and_the_first_speaks_for_all(arguments, tmp_path, capfd):
    alone = arguments.copy()
    alone[alone.index("--out") + 1] = str(tmp_path / "alone")
    assert main(alone) == 0
    capfd.readouterr()
    assert main([*arguments, *RANKS]) == 0
    out, err = capfd.readouterr()
    assert out.count("step 4 of 4") == 1 and out.count("\n") == 1
    assert err.count("parameters · about") == 1 and err.count("step 4/4") == 1 and "rank" not in err
    assert steps(tmp_path / "run") == [1, 2, 3, 4]
    assert (tmp_path / "run/report.html").exists()
    ours, theirs = (load_model(tmp_path / name).model.state_dict() for name in ("run", "alone"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def test_what_is_wrong_is_said_once_without_a_traceback_and_exits_with_2(arguments, tmp_path, capfd):
    for extra, message in (
        (RANKS[:2], "parallel.mode is none, which trains on one rank, and there are 2; choose ddp, zero1 or torch_ddp"),
        ([*RANKS, "--data.path", str(tmp_path / "absent")], "absent"),
        ([*RANKS, "--train.global_batch=6"], "train.global_batch 6"),
        (["--nproc", "0"], "nproc must be at least 1, got 0"),
    ):
        assert main([*arguments, *extra]) == 2
        err = capfd.readouterr().err
        assert message in err and err.startswith("pellucid: ") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_rank_that_fails_is_told_with_its_traceback_and_exits_with_1(arguments, monkeypatch, capfd):
    def train(config, **options):
        if get_rank() == 1:
            raise ValueError("out of luck")
        time.sleep(60)

    monkeypatch.setattr(pellucid.cli.train, "train", train)
    assert main([*arguments, *RANKS]) == 1
    err = capfd.readouterr().err
    assert err.startswith("Traceback (most recent call last)") and ", in train\n" in err
    assert err.endswith("ValueError: out of luck\n\npellucid: rank 1 failed: ValueError: out of luck\n")


def test_ctrl_c_finishes_the_step_saves_and_exits_with_0(arguments, tmp_path, capfd):
    pid = os.fork()
    if pid == 0:
        os.setsid()  # a job of its own, as a shell starts it
        code = 99
        try:
            code = main([*arguments, *RANKS, "--train.steps=100000", "--train.save_every=0"])
        finally:
            sys.stdout.flush()
            os._exit(code)
    run = tmp_path / "run"
    end = time.monotonic() + 60
    while not ((run / "metrics.jsonl").is_file() and len(steps(run)) > 3):
        assert time.monotonic() < end and os.waitpid(pid, os.WNOHANG) == (0, 0), capfd.readouterr().err
        time.sleep(0.05)
    os.killpg(pid, signal.SIGINT)
    assert wait(pid, 30) == 0, capfd.readouterr().err
    last = steps(run)[-1]
    assert f"step {last:,} of 100,000 (SIGTERM)" in capfd.readouterr().out
    assert (run / f"checkpoints/step_{last:08d}/manifest.json").exists() and (run / "report.html").exists()


def under_torchrun(monkeypatch, **more):
    """Its environment for one rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    for name, value in (dict(zip(VARIABLES, ("0", "0", "1", "127.0.0.1", port), strict=True)) | more).items():
        monkeypatch.setenv(name, value)


def test_under_torchrun_a_restart_resumes_and_nproc_is_refused(arguments, tmp_path, monkeypatch, capfd):
    under_torchrun(monkeypatch)
    assert fork(lambda: sys.exit(main([*arguments, "--train.steps=2", "--parallel.mode=ddp"]))) == 0
    assert main([*arguments, "--nproc=1"]) == 2
    assert "--nproc 1 was given under torchrun, which starts the ranks itself; leave it out" in capfd.readouterr().err
    under_torchrun(monkeypatch, TORCHELASTIC_RESTART_COUNT="1")
    assert fork(lambda: sys.exit(main([*arguments, "--parallel.mode=ddp"]))) == 0
    assert "resuming after step 2" in capfd.readouterr().err
    assert steps(tmp_path / "run") == [1, 2, 3, 4]


def test_spawned_ranks_know_the_plugins_of_the_configuration(arguments, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "spawned_plugin.py").write_text(
        "from pellucid.registry import register\n"
        "from pellucid.train.strategies import Pretrain, PretrainOptions\n"
        "@register('strategy', 'spawned')\n"
        "class Spawned(Pretrain):\n"
        "    def __init__(self, options):\n"
        "        super().__init__(PretrainOptions())\n"
    )
    (tmp_path / "mine.toml").write_text('plugins = ["spawned_plugin"]\n[strategy]\nname = "spawned"\n')
    code = main([*arguments, "mine.toml", "--nproc=2", "--parallel.mode=ddp"])
    assert code == 0, capfd.readouterr().err
    assert steps(tmp_path / "run") == [1, 2, 3, 4]
