"""`pellucid prepare` as a person meets it: flags, exit codes, stdout and stderr, signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pellucid.cli import main
from pellucid.data.shards import TokenData

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(f"Document number {i}. The cat sat on the mat, and sat, and sat.\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "nothing.md").write_text("")
    return folder


def test_the_summary_says_what_was_made(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", str(corpus), "--out", str(tmp_path / "data"), "--vocab-size", "300", "--val-fraction", "0.2"]
    assert main([*command, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    data = TokenData.open(tmp_path / "data")
    first, *rest = out.splitlines()
    tokens = sum(data.split(name).num_tokens for name in ("train", "val"))
    assert first.startswith(f"{tmp_path / 'data'}: 30 documents, {tokens:,} tokens, ")
    assert f"from   {corpus}: " in out
    assert "licence not stated" in out
    assert "left out: 1 empty, 1 files of other kinds" in out
    assert any(re.match(r"  val +\d+ documents", line) for line in rest)


def test_json_is_one_object_on_stdout(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "zz.jsonl").write_text('{"text": "good"}\n' + "bad\n" * 25)
    command = ["prepare", str(corpus), "--out", str(tmp_path / "data"), "--vocab-size", "300", "--on-error", "skip"]
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["documents"] == 31
    assert summary["splits"].keys() == {"train", "val"}
    assert summary["bytes_per_token"] == pytest.approx(summary["bytes"] / summary["tokens"], abs=1e-3)
    assert (summary["skipped"], len(summary["first_skipped"]), summary["empty"], summary["ignored_files"]) == (
        25,
        20,
        1,
        1,
    )
    assert len(re.findall(r"^skipped: .*zz\.jsonl:\d+: not JSON", err, re.M)) == 20
    assert "skipped: 5 more" in err


def test_weights_and_sources(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", str(corpus), "sample:stories", "--size", "30KB", "--weights", "1", "3", "--vocab-size", "400"]
    assert main([*command, "--out", str(tmp_path / "data")]) == 0
    out = capsys.readouterr().out
    shares = [float(share) for share in re.findall(r"\((\d+\.\d) %\)", out)]
    assert shares == pytest.approx([25, 75], abs=4)
    assert "note: the mixture ended with the last document of" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.txt", "--out", "data"], r"pellucid: gone\.txt: no such file or folder"),
        (["texts", "--out", "texts"], r"pellucid: --out .*texts has files in it"),
        (["texts", "--out", "data", "--val-fraction", "2"], r"--val-fraction must be in \[0, 1\), got 2\.0"),
        (["texts", "--out", "data", "--weights", "1", "2"], r"--weights must have one number for each"),
        (["sample:pyton", "--out", "data"], r"did you mean sample:python\?"),
        (["texts", "--out", "data", "--tokenizer", "texts"], r"texts has no tokenizer\.json"),
        (["texts", "--out", "data", "--workers", "100000"], r"--workers is 100000, for \d+ cores; .* \d+ at most"),
        (["texts", "--out", "data", "--vocab-size", "0"], r"--vocab-size must be at least 1, got 0"),
        (["texts", "--out", "data", "--text-key", "body"], r"--text-key is 'body', and texts has no file with keys"),
        (["sample:stories", "--out", "data", "--text-key", "body"], r"--text-key is 'body'.*leave it out"),
    ],
)
def test_bad_usage_is_status_2_and_one_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    "arguments", [["texts"], ["--out", "d"], ["texts", "--out", "d", "--vocab-size", "9", "--tokenizer", "x"]]
)
def test_what_the_parser_refuses_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["prepare", *arguments])
    assert end.value.code == 2
    assert "usage: pellucid prepare" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing(corpus: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    endless = tmp_path / "endless.txt"
    os.mkfifo(endless)
    command = [sys.executable, "-m", "pellucid", "prepare", str(endless), "--out", str(tmp_path / "data")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with endless.open("w") as pipe:  # opens as soon as the command reads: it is in the middle of its work then
        pipe.write("some text\n")
        pipe.flush()
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("data.tmp-*")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert "Traceback" not in err
    assert re.search("interrupted|terminated; nothing was written", err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["endless.txt", "texts"]


# -- records for post-training ------------------------------------------------------------------------------


def test_records_are_made_and_their_summary_says_what_training_will_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "Red. " * 20}]
    lines = [json.dumps({"messages": chat})] * 9 + [json.dumps({"messages": chat[:1]})]
    (tmp_path / "chats.jsonl").write_text("\n".join([*lines, json.dumps({"messages": [*chat, chat[0]]})]))
    command = ["prepare", str(tmp_path / "chats.jsonl"), "--for", "sft", "--vocab-size", "300", "--context", "32"]
    command += ["--on-error", "skip", "--val-fraction", "0", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "data")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'data'}: 10 records for sft\n")
    assert "longer than 32: 10; training treats them as data.truncate says" in out
    assert re.search(r"rows of 32 tokens are \d+\.\d % filled", out)
    assert "left out: the last turns of 1 conversations, which nobody answers" in out
    assert "left out: 1 skipped" in out
    assert re.search(r"skipped: .*chats\.jsonl:10: no assistant turn in messages", err)
    assert main([*command, "--out", str(tmp_path / "again"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["kind"], summary["records"], summary["skipped"]) == ("sft", 10, 1)
    assert summary["longer_than_context"] == 10 and 0 < summary["rows_filled"] <= 1


def test_bad_examples_are_exit_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "chosen": "y", "rejected": "y"}\n')
    assert main(["prepare", str(tmp_path / "a.jsonl"), "--for", "dpo", "--out", str(tmp_path / "data")]) == 2
    assert "a.jsonl:1: chosen and rejected are the same" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
