"""`pellucid trace` writes two files, draws without writing, and says what is wrong with exit code 2."""

import json
from pathlib import Path

import pytest
from ledgers import make_run

from pellucid.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def test_both_files_are_written_and_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run)]) == 0
    out = capsys.readouterr().out
    assert str(run / "trace.html") in out and str(run / "trace.json") in out
    assert "exposed share" in out and "as predicted" in out
    assert (run / "trace.html").stat().st_size and json.loads((run / "trace.json").read_text())["traceEvents"]


def test_json_is_one_object_with_the_exposed_share(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "--step", "4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step"] == 4 and summary["mode"] == "ddp" and summary["bytes_match"] is True
    assert 0 < summary["exposed_share"] < 1
    assert all(
        rank["exposed_s"] + rank["hidden_s"] == pytest.approx(rank["communication_s"]) for rank in summary["ranks"]
    )
    assert Path(summary["html"]).is_file() and Path(summary["trace"]).is_file()


def test_text_writes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    assert main(["trace", str(run), "--text", "--step", "4"]) == 0
    out = capsys.readouterr().out
    assert sorted(run.rglob("*")) == before
    assert "rank 1  step 4" in out and "grad/bucket4" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--step", "99"], "no step 99 in its ledger; steps 0 to 12 are recorded"),
        (["--step", "-1"], "no step -1 in its ledger"),
    ],
)
def test_a_step_that_is_not_there_is_bad_input(
    run: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert main(["trace", str(run), *args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert not (run / "trace.html").exists()


def test_a_run_without_a_ledger_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "has no ledger; it was trained with parallel.mode none" in capsys.readouterr().err


def test_text_and_json_exclude_each_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["trace", str(run), "--text", "--json"])
    assert stopped.value.code == 2
