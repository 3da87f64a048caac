"""Tasks of reasoning-gym: problems that go through JSON and are judged there as the package itself judges them."""

import json
import sys
from pathlib import Path

import pytest

from pellucid.cli import main
from pellucid.data import reasoning_gym as ours
from pellucid.data.documents import ReadLog
from pellucid.data.sources import open_source
from pellucid.errors import ConfigError, DataError
from pellucid.registry import names
from pellucid.train.reward_pool import Judged, RewardPool


@pytest.fixture
def package():
    return pytest.importorskip("reasoning_gym", reason="the extra reasoning is not installed")


def test_without_the_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours.load_package.cache_clear()
    ours.open_task.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert main(["prepare", "reasoning-gym:chain_sum", "--for", "grpo", "--out", "unused"]) == 2
    assert "pip install 'pellucid[reasoning]'" in capsys.readouterr().err
    assert "reasoning_gym" in names("reward") and "reasoning-gym" in names("source"), "known by name all the same"


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic,max_terms=2,max_digits=2", "rearc", "quantum_lock"])
def test_records_are_judged_as_the_package_judges(package, task: str) -> None:
    """After JSON; rearc compares with tuples, which JSON makes lists of."""
    source = open_source(f"reasoning-gym:{task},size=3", seed=5)
    records = [record.table for record in source.records(ReadLog())]
    name, *settings = task.split(",")
    theirs = package.create_dataset(name, seed=5, size=3, **{k: int(v) for k, v in (s.split("=") for s in settings)})
    assert len(records) == 3
    for record, entry in zip(json.loads(json.dumps(records)), theirs, strict=True):
        assert record["prompt"] == entry["question"] and record["answer"] == entry["answer"]
        for answer in (entry["answer"], "no idea", ""):
            assert ours.judge(answer, record) == theirs.score_answer(answer, entry)
        assert ours.judge(entry["answer"], record) == 1
    again = open_source(f"reasoning-gym:{task},size=3", seed=6)
    assert [record.table for record in again.records(ReadLog())] != records


def test_an_answer_that_the_judge_cannot_read_is_worth_nothing(package) -> None:
    (record,) = (r.table for r in open_source("reasoning-gym:prime_factorization,size=1").records(ReadLog()))
    entry = {"question": record["prompt"], "answer": record["answer"], "metadata": record["metadata"]}
    with pytest.raises(ValueError):
        package.get_score_answer_fn("prime_factorization")("no idea", entry)
    assert ours.judge("no idea", record) == 0 and ours.judge(record["answer"], record) == 1


@pytest.mark.parametrize(
    "text, words",
    [
        ("reasoning-gym:chain_sums", "no task 'chain_sums'; did you mean chain_sum"),
        ("reasoning-gym:chain_sum,max_term=2", "no setting 'max_term'; did you mean max_terms"),
        ("reasoning-gym:chain_sum,min_terms=9", "refused by the task"),
    ],
)
def test_what_the_package_has_not_got_is_refused(package, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_source(text)


def test_a_record_of_another_source_is_refused() -> None:
    with pytest.raises(DataError, match="lacks metadata, task; prepare data from reasoning-gym:TASK"):
        ours.judge("4", {"prompt": "2 + 2", "answer": "4"})


def test_a_folder_of_a_task_trains_with_the_reward_in_worker_processes(package, tmp_path: Path) -> None:
    """Prepared and judged by name; the worker's import of the package does not count against the first answer."""
    data = tmp_path / "data"
    command = [
        "prepare",
        "reasoning-gym:chain_sum,max_terms=2,max_digits=1,size=12",
        "--for",
        "grpo",
        "--vocab-size",
        "280",
    ]
    assert main([*command, "--out", str(data), "--quiet"]) == 0
    records = [json.loads(line) for line in (data / "train-00000.records.jsonl").read_text().splitlines()]
    pool = RewardPool(["reasoning_gym"], plugins=(), timeout_s=5.0, workers=1)
    try:
        items = [Judged(r["prompt"], said, r) for r in records[:3] for said in (f" {r['answer']}\n", "x")]
        assert pool.score(items) == [[1.0], [0.0]] * 3
    finally:
        pool.close()
    shape = ["--model.hidden_size", "16", "--model.num_hidden_layers", "1", "--model.num_attention_heads", "2"]
    settings = ["--strategy.name", "grpo", "--strategy.rewards", "reasoning_gym", "--strategy.max_tokens", "2"]
    batch = ["--train.steps", "1", "--train.global_batch", "2", "--train.micro_batch", "2", "--train.val_every", "0"]
    few = ["--strategy.completions", "2", "--strategy.reward_workers", "1", "--model.intermediate_size", "16"]
    run = ["train", *settings, *batch, *shape, *few]
    assert main([*run, "--data.path", str(data), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in log][:2] == ["step", "rollout"]
