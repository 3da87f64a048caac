"""docs/guides/grpo.md as it stands: its commands, its configuration and its reward, on a small model."""

import json
import re
import shlex
from pathlib import Path

import pytest
from support import TINY

from pellucid.cli import main

GUIDE = (Path(__file__).parents[3] / "docs/guides/grpo.md").read_text(encoding="utf-8")


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def test_the_guides_commands_run_one_after_the_other(tmp_path, monkeypatch):
    """Those of the head after a fine-tuning of a few steps, the second one shortened; then the TOML with the reward of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shape = [
        f"--model.{key}={value}" for key, value in (TINY | {"vocab_size": 0, "max_position_embeddings": 64}).items()
    ]
    short = ["--train.steps", "2", "--train.global_batch", "4", "--train.val_every", "0", "--quiet"]
    assert main(["prepare", "sample:arithmetic", "--for", "sft", "--vocab-size", "280", "--out", "data/sft"]) == 0
    fine_tuning = ["train", "--strategy.name", "sft", "--data.path", "data/sft", "--out", "runs/sft", *shape]
    assert main([*fine_tuning, *short, "--train.micro_batch", "4"]) == 0
    prepare, train = (shlex.split(line)[1:] for line in fenced("bash")[0].splitlines())
    assert main(prepare) == 0
    assert main([*train, *short, "--strategy.max_tokens", "4"]) == 0
    lines = [json.loads(line) for line in Path("runs/grpo/metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if line["event"] != "save"] == ["step", "rollout"] * 2
    assert lines[1]["answers"] == 32, "eight to each of four prompts"

    (text,) = fenced("toml")
    (reward,) = fenced("python")
    Path("my_rewards.py").write_text(reward)
    Path("grpo.toml").write_text(text)
    again = ["train", "grpo.toml", "--data.path", "data/sums", "--init", "runs/sft", "--out", "runs/own", *short]
    assert main([*again, "--strategy.rewards", "exact_match,my_rewards:near", "--strategy.max_tokens", "4"]) == 0
    lines = [json.loads(line) for line in Path("runs/own/metrics.jsonl").read_text().splitlines()]
    (rollout,) = (line for line in lines if line["event"] == "rollout")  # two updates of one
    assert {"reward/exact_match", "reward/my_rewards:near"} <= rollout.keys()


@pytest.mark.parametrize("said, worth", [("12", 1.0), ("13", 0.5), ("", 0.0), ("twelve", 0.0)])
def test_the_guides_reward_is_what_it_looks_like(said, worth):
    space: dict = {}
    exec(fenced("python")[0], space)
    assert space["near"]("", said, {"answer": "12"}) == worth
