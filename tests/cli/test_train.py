"""`pellucid train` as a person uses it: exit codes, messages, interrupts, resume."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from support import TINY, fork

from pellucid.cli import main
from pellucid.cli.settings import split_settings

MODEL = [f"--model.{key}={value}" for key, value in TINY.items() if key != "vocab_size"]
FAST = [
    *MODEL,
    "--train.steps=6",
    "--train.global_batch=4",
    "--train.micro_batch=4",
    "--train.dtype=float32",
    "--train.save_every=2",
]


@pytest.fixture
def arguments(data_folder, tmp_path):
    return ["train", "--data.path", str(data_folder), "--out", str(tmp_path / "run"), *FAST]


def steps(tmp_path):
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if record["event"] == "step"]


def test_a_run_says_what_is_coming_trains_and_leaves_its_folder(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "step 6 of 6" in out
    assert "parameters · about" in err and "6 steps of 64 tokens" in err
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        ".lock", "config.toml", "metrics.jsonl", "report.html", "checkpoints", "model",
    }  # fmt: skip
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "generation_config.json",
    } == {p.name for p in (tmp_path / "run/model").iterdir()}


def test_a_dry_run_checks_everything_and_writes_nothing(arguments, tmp_path, capsys):
    assert main([*arguments, "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main([*arguments, "--dry-run", "--data.context=999"]) == 2


def test_the_same_command_with_resume_starts_and_goes_on_and_the_config_can_be_left_out(arguments, tmp_path, capsys):
    assert main([*arguments, "--resume", "--train.steps=4"]) == 0
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--train.steps=6"]) == 0
    assert "resuming after step 4" in capsys.readouterr().err
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--optim.warmup_step=3"], "unknown key optim.warmup_step; did you mean optim.warmup_steps?"),
        (["--optim.lr=-1"], "optim.lr must be positive, got -1"),
        (["--strategy.name=pretrian"], "did you mean pretrain?"),
        (["--train.global_batch=5"], "train.global_batch 5 is not a multiple of train.micro_batch 4"),
        (["--parallel.mode=dpd"], "unknown mode 'dpd'"),
        (["--config_version.x=1"], "config_version"),
        (["--parallel.nonsense=3"], "unknown key parallel.nonsense; known keys: mode, bucket_size_mb, "),
        (["--train.device=tpu0"], "device 'tpu0'"),
        (["--train.out=elsewhere"], "--train.out is 'elsewhere', which mean the same; give one of them"),
        (
            ["--init=a", "--train.init=b"],
            "--init is 'a' and --train.init is 'b', which mean the same; give one of them",
        ),
        (
            ["--model.hidden_size=16777216", "--model.head_dim=8", "--model.intermediate_size=16777216"],
            "the weights of this model alone need",
        ),
    ],
)
def test_bad_settings_exit_with_2_and_say_the_way_out(arguments, capsys, extra, message):
    assert main([*arguments, *extra]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_folder_is_refused(data_folder, capsys):
    assert main(["train", "--data.path", str(data_folder), *FAST]) == 2
    assert "--out" in capsys.readouterr().err


def test_dotted_settings_are_told_apart_from_paths_and_flags():
    argv = ["train", "a.toml", "--train.steps", "10", "--out", "runs/x.y", "--train.compile", "--optim.lr=1e-3"]
    assert split_settings(argv) == (
        ["train", "a.toml", "--out", "runs/x.y"],
        {"train.steps": "10", "train.compile": "true", "optim.lr": "1e-3"},
    )
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--train.steps", "3"])
    assert stop.value.code == 2


def start(arguments):
    environment = os.environ | {"PELLUCID_ALLOCATOR": "none", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "pellucid", *arguments, "--train.steps=100000", "--train.save_every=0"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_steps(tmp_path, process):
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if (tmp_path / "run/metrics.jsonl").is_file() and len(steps_so_far(tmp_path)) > 3:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


def steps_so_far(tmp_path):
    return (tmp_path / "run/metrics.jsonl").read_text().splitlines()


def test_sigterm_finishes_the_step_saves_and_exits_with_0(arguments, tmp_path):
    process = start(arguments)
    wait_for_steps(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "(SIGTERM)" in out
    last = steps(tmp_path)[-1]
    assert (tmp_path / f"run/checkpoints/step_{last:08d}/manifest.json").exists()
    assert (tmp_path / "run/report.html").exists() and not (tmp_path / "run/model").exists()


def test_a_full_disk_while_saving_exits_with_1_names_the_file_and_keeps_the_last_checkpoint(arguments, tmp_path, capfd):
    assert fork(lambda: sys.exit(main([*arguments, "--train.steps=2"]))) == 0

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        sys.exit(main([*arguments, "--resume"]))

    assert fork(fill) == 1
    assert "cannot write" in capfd.readouterr().err
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000002"]
    assert fork(lambda: sys.exit(main([*arguments, "--resume"]))) == 0
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_one_folder_under_both_names_is_one_folder(arguments, tmp_path):
    assert main([*arguments, f"--train.out={tmp_path / 'run'}", "--dry-run"]) == 0


def test_a_used_folder_is_refused_with_exit_2(arguments, capsys):
    assert main([*arguments, "--train.steps=1"]) == 0
    assert main(arguments) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_run_on_records_says_what_was_cut_and_how_full_its_rows_are(tmp_path, capsys):
    said = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "Red. " * 9}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 8)
    folder = str(tmp_path / "data")
    prepare = ["prepare", str(tmp_path / "chats.jsonl"), "--for", "sft", "--vocab-size", "300", "--val-fraction", "0"]
    assert main([*prepare, "--out", folder]) == 0
    capsys.readouterr()
    train = ["train", *FAST, "--data.path", folder, "--strategy.name=sft", "--out", str(tmp_path / "run"), "--dry-run"]
    assert main([*train, "--model.max_position_embeddings=32"]) == 0
    err = capsys.readouterr().err
    assert "train: 8 of 8 records are longer than 33 tokens and cut on the right" in err
    assert "train: 8 records in 8 rows of 32 tokens, 100.0 % filled" in err
    assert main([*train, "--model.max_position_embeddings=32", "--data.truncate=refuse"]) == 2
    assert "record 0 of split 'train' has" in capsys.readouterr().err
