"""`pellucid verify`: what is printed, what it exits with, and how it says that something is wrong."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import TINY

from pellucid.cli import main
from pellucid.config import run_config, to_toml
from pellucid.parallel.modes import DDPExecutor

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LINE = re.compile(
    r"(\w+)  fp64 \d\.\de-\d\d <= \d\.\de-1\d  fp32 \d\.\de-\d\d <= \d\.\de-0\d  bytes (ok|not planned)  grads nonzero  PASS"
)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(run_config({"model": TINY, "train": {"steps": 10}})))
    return str(path)


def test_a_line_a_mode_and_the_verdict_last(config, capsys):
    assert main(["verify", config, "--nproc", "2"]) == 0
    printed = capsys.readouterr()
    *modes, last = printed.out.splitlines()
    passed = [match[1] for line in modes if (match := LINE.fullmatch(line))]
    assert {"ddp", "zero1", "torch_ddp"} <= set(passed)
    assert all(LINE.fullmatch(line) or "cannot run here: " in line for line in modes)
    assert last == f"verified: {len(passed)} modes, 2 ranks"
    assert "train.steps 10 -> 3" in printed.err, "what was shrunk is said"


def test_json_has_every_number_and_what_was_shrunk(config, capsys):
    assert main(["verify", config, "--nproc", "2", "--json", "--quiet", "--optim.lr", "1e-4"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert found["passed"] and found["ranks"] == 2 and found["shrunk"]["train.steps"] == 3
    number = found["modes"]["ddp"]["numbers"]["fp64"]
    assert number["worst"] < number["bound"] and number["where"] and found["modes"]["ddp"]["bytes"] == "ok"


def test_a_mode_that_is_wrong_ends_with_1_and_names_the_tensor(config, capsys, monkeypatch):
    finish = DDPExecutor._finish

    def doubled(self):
        finish(self)
        self.model.model.norm.weight.grad.mul_(2)

    monkeypatch.setattr(DDPExecutor, "_finish", doubled)
    assert main(["verify", config, "--nproc", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("FAILED: ddp fp64 model.norm.weight (gradient of step 1)")
    assert next(line for line in lines if line.startswith("ddp")).endswith("FAIL")
    assert next(line for line in lines if line.startswith("zero1")).endswith("PASS")


def test_one_rank_is_bad_usage(config, capsys):
    assert main(["verify", config, "--nproc", "1"]) == 2
    assert "--nproc must be at least 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "small", "135m", "1b", "8b"])
def test_every_configuration_that_comes_with_pellucid_is_verified(name, capsys):
    assert main(["verify", str(CONFIGS / f"{name}.toml"), "--nproc", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("verified: ")


# -- resuming and drilling ----------------------------------------------------------------------------------


def test_resume_prints_a_line_a_place_the_table_and_the_verdict(config, capsys, monkeypatch):
    monkeypatch.setattr("pellucid.verify.resume.names", lambda kind: ["ddp", "none"])
    assert main(["verify", config, "--nproc", "2", "--resume", "--seed", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"ddp x 2  weights \w{8}  moments \w{8}  rng \w{8}  cursor \w{8}  samples \w{8}  losses \w{8}  same bits",
        lines[2],
    )
    killed = r" {4}killed .+ \(rank \d\) and after the update of step 5 \(rank \d\), resumed from step [24]"
    assert re.fullmatch(killed, lines[3])
    table = [line.split() for line in lines[-4:-1]]
    assert table == [["from", "none", "ddp"], ["none", "x", "1", ".", "+"], ["ddp", "x", "2", "+", "."]]
    assert lines[-1] == "resumed: 4 of 4"


def test_resume_has_json_and_its_flags_belong_to_it(config, capsys, monkeypatch):
    monkeypatch.setattr("pellucid.verify.resume.names", lambda kind: ["ddp", "none"])
    assert main(["verify", config, "--nproc", "2", "--resume", "--all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["proved"] == found["tried"] == 6 and len(found["crossings"]) == 4
    assert {crossing["to"]["ranks"] for crossing in found["crossings"]} == {1, 2}
    assert main(["verify", config, "--all"]) == 2
    assert "--all and --seed belong to --resume" in capsys.readouterr().err


def test_drill_counts_by_kind_and_ends_with_what_was_recovered(config, capsys):
    assert main(["drill", config, "--sample", "1", "--quiet"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "zero1, 2 ranks" and lines[-1] == "3 of 3 recovered" and printed.err == ""
    assert [line.split("  (")[0] for line in lines[1:4]] == [
        f"{k}  1 of 1 recovered" for k in ("file", "collective", "step")
    ]


def test_a_drill_can_repeat_one_case_and_says_so_in_json(config, capsys):
    assert main(["drill", config, "--case", "step:1:7", "--json", "--quiet", "--parallel.mode", "ddp"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["recovered"], found["tried"]) == ("ddp", 1, 1)
    assert found["cases"][0] == {"case": "step:1:7", "what": "before the update of step 4", "rank": 1, "failure": ""}
    assert main(["drill", config, "--case", "nothing"]) == 2


@pytest.mark.parametrize("flags, after", [([], "ddp  fp64"), (["--resume"], "none x 1")])
def test_a_signal_ends_a_proof_at_once_with_130(config, flags, after):
    """Its runs would save and be content; what they left must not be taken for a result."""
    command = [sys.executable, "-m", "pellucid", "verify", config, "--nproc", "2", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(after)
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.endswith("pellucid: interrupted\n"), said
    assert "verified:" not in rest and "resumed:" not in rest
