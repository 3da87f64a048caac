"""The README's commands and examples are run as printed, in order, in one folder; only sizes are cut down."""

import io
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from pellucid import registry
from pellucid.cli import main

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--train.steps", "2", "--train.global_batch", "2", "--train.micro_batch", "2", "--train.val_every", "2"]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shortened(words: list[str]) -> list[str]:
    """The same command on little text and for two steps."""
    words = ["200KB" if previous == "--size" else word for previous, word in zip(["", *words], words, strict=False)]
    if words[0] == "train" and "--resume" not in words:
        words += SMALL
        if "--nproc" in words:  # forked: a spawned rank imports torch first; two ranks share a batch of four
            words += ["--parallel.start_method", "fork", "--train.global_batch", "4"]
    if words[0] == "generate" and "--max-tokens" not in words:
        words += ["--max-tokens", "8"]
    return words


def test_the_readme_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    for kind in registry.HOMES:
        registry.names(kind)  # or what is imported meanwhile would be registered in the copy alone
    monkeypatch.setattr(registry, "_entries", {kind: dict(entries) for kind, entries in registry._entries.items()})
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "Once"}\n{"id": "b", "ids": [5, 6]}\n')
    commands = [
        words
        for block in blocks(ROOT / "README.md", "bash")
        for line in block.splitlines()
        if (words := shlex.split(line, comments=True))
        and words[0] == "pellucid"
        # tests/verify/test_documents.py has the first two, and tests/server/test_lifecycle.py what runs until a signal
        and words[1] not in ("verify", "drill", "serve")
    ]
    assert {words[1] for words in commands} >= {
        "prepare", "train", "eval", "generate", "chat", "inspect", "config", "doctor", "trace", "plan",
    }  # fmt: skip
    for words in commands:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who is it?\n")))
        code = main(shortened(words[1:]))
        _, stderr = capfd.readouterr()
        assert code == 0, f"{shlex.join(words)}\n{stderr}"

    assert [json.loads(line)["id"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()] == [1, "b"]
    report = (tmp_path / "runs/stories/report.html").read_text()
    assert "Validation loss" in report and "preset" not in report
    log = [json.loads(line) for line in (tmp_path / "runs/stories/metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in log if event["event"] == "step"] == [1, 2]

    for document in ("README.md", "docs/data.md", "docs/training.md"):
        for number, text in enumerate(blocks(ROOT / document, "python")):
            text = text.replace(
                '"train.out"', '"train.steps": 2, "train.global_batch": 16, "train.val_every": 1, "train.out"'
            )
            example = tmp_path / f"example_{Path(document).stem}_{number}.py"
            example.write_text(text, encoding="utf-8")
            runpy.run_path(str(example))
    assert "nats a token" in capfd.readouterr().out
