"""`pellucid demo-align`: the whole flow on a model that knows nothing; slow: a real one, with its promise."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import Page
from small_models import make_folder, make_tokenizer
from support import run_ranks

from pellucid.checkpoint.model_folder import load_model
from pellucid.cli import align_problems, demo_align, main
from pellucid.cli.align_problems import answers_to, divide, pairs, share_right
from pellucid.data.record_files import RecordData
from pellucid.data.samples.arithmetic import is_held_out, two_digit_problems
from pellucid.train.callbacks import StopTraining

LAST_LINE = re.compile(r"accuracy: sft (\d\.\d\d) -> grpo (\d\.\d\d) \((\d+) held-out problems, seed (\d+)\)\n\Z")
STAGES = ("sft", "dpo", "grpo", "further-sft")


def expressions(lines: list[dict[str, Any]]) -> set[str]:
    return {line["prompt"].removesuffix(" = ") for line in lines}


def run(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["demo-align", "--base", str(folder / "base"), "--out", str(folder / "out"), "--quiet", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a base model, for stages of two steps."""
    for name, value in (("NUM_HELD_OUT", 20), ("NUM_VALIDATION", 10), ("NUM_ASKED", 48)):
        monkeypatch.setattr(demo_align, name, value)
    monkeypatch.setattr(demo_align, "LOOK_EVERY", dict.fromkeys(STAGES, 1))
    settings = {"train.steps": 2, "train.epochs": None, "train.global_batch": 4, "train.micro_batch": 2}
    monkeypatch.setattr(demo_align, "SHORTER", settings | {"train.dtype": "float32", "parallel.start_method": "fork"})
    monkeypatch.setattr(align_problems, "two_digit_problems", lambda: two_digit_problems()[::10])
    make_folder(tmp_path / "base")
    return tmp_path


def test_the_flow_in_small(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its output, problems, data and report; then that it goes on, and refuses another seed."""
    code, said, complaint = run(small, capsys, "--seed", "3")
    match = LAST_LINE.search(said)
    assert match is not None and (match[3], match[4]) == ("20", "3"), complaint
    assert code == 1 and "20 points more than sft" in complaint, "two steps teach nothing"
    for stage in STAGES:
        assert re.search(rf"^{stage}: \d+ steps, .* s; .*% of 20 held-out problems right$", said, re.MULTILINE)
    out = small / "out"
    check_parts(out)
    check_report(out)

    stamps = {path: path.stat().st_mtime_ns for path in out.glob("*/model/model.safetensors")}
    code, again, _ = run(small, capsys, "--seed", "3")
    assert len(stamps) == len(STAGES) and LAST_LINE.search(again)[0] == match[0]
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}, "a second demo trains nothing more"
    code, _, complaint = run(small, capsys, "--seed", "4")
    assert code == 2 and "another seed than 4" in complaint and "--fresh" in complaint
    assert expressions(lines(out / "problems" / "held_out.jsonl")) == expressions(parts(3).held_out)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parts(seed: int) -> Any:
    return divide(seed, num_held_out=20, num_validation=10)


def check_parts(out: Path) -> None:
    """No problem is in two parts, and no stage has one that is held out, neither in its records nor in its token ids."""
    read = {path.stem: lines(path) for path in (out / "problems").glob("*.jsonl")}
    assert read.keys() == {"train", "validation", "held_out", "sft", "dpo", "grpo"}
    held_out, validation, train = (expressions(read[name]) for name in ("held_out", "validation", "train"))
    assert (len(held_out), len(validation)) == (20, 10) and not held_out & validation and len(train) > 1000
    kept_apart = {expression for expression, _ in two_digit_problems() if is_held_out(expression)}
    assert held_out | validation <= kept_apart and not train & kept_apart
    for stage in ("sft", "dpo", "grpo"):
        data = RecordData.open(out / "data" / stage)
        split = data.split("train")
        tokenizer = data.tokenizer()
        decoded = [tokenizer.decode(split.record(i).parts[0].ids.tolist()) for i in range(len(split))]
        found = {re.match(r"\d\d [+-] \d\d(?= = )", text)[0] for text in decoded}
        assert found == expressions(read[stage]) <= train and len(found) > 20, stage
        with pytest.raises(Exception, match="val"):
            data.split("val")
    for pair in read["dpo"]:
        a, sign, b = pair["prompt"].removesuffix(" = ").split()
        assert int(pair["chosen"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert pair["rejected"] != pair["chosen"]


def check_report(out: Path) -> None:
    scores = json.loads((out / "evaluation.json").read_text())
    assert list(scores) == ["base", *STAGES]
    cost = {name: score["token_passes"] for name, score in scores.items()}
    a_step = cost["sft"] / scores["sft"]["steps"]
    assert abs(cost["further-sft"] - cost["dpo"] - cost["grpo"]) < a_step + 0.1 * cost["further-sft"], (
        "the same compute"
    )
    page = Page((out / "report.html").read_text())
    (data,) = (json.loads(text) for text in page.scripts if text.startswith("["))
    drawn = {chart["id"]: chart for chart in data}
    curves = {curve["name"]: [step for step, _ in curve["points"]] for curve in drawn["exact_match"]["curves"]}
    more = scores["further-sft"]["steps"]
    assert curves == {"sft": [0, 1, 2], "dpo": [2, 3, 4], "grpo": [4, 5, 6], "further-sft": list(range(2, 3 + more))}
    wanted = {
        "sft_loss",
        "dpo_metric_accuracy",
        "dpo_metric_margin",
        "grpo_metric_reward",
        "grpo_metric_kl",
        "further_sft_loss",
    }
    assert wanted <= drawn.keys()
    assert all(len(drawn[name]["curves"][0]["points"]) == 2 for name in wanted - {"further_sft_loss"})
    for name in ("base", *STAGES):
        assert page.texts.count(name) >= 1 + min(20, demo_align.NUM_SAMPLES), "its number, and its samples"
    assert not any(tag == "script" and attrs.get("src") for tag, attrs in page.tags)


def test_seeds_ask_other_problems_and_divide_all_of_them() -> None:
    assert len(parts(0).train) > 10_000
    assert parts(0) == parts(0)
    first, second = (expressions(parts(seed).held_out) for seed in (0, 1))
    assert len(first) == len(second) == 20 and len(first & second) < 5
    assert expressions(parts(0).train) == expressions(parts(1).train) and parts(0).train != parts(1).train


def test_right_answers_make_no_pair_and_shares_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(make_folder(tmp_path / "base"), dtype="float32").model
    problems = parts(0).train[:6]
    assert len(answers_to(problems, model, make_tokenizer())) == 6
    said = [problem["answer"] if i % 2 else f" {int(problem['answer']) + 1} " for i, problem in enumerate(problems)]
    said[0] = "  "
    monkeypatch.setattr("pellucid.cli.align_problems.answers_to", lambda *_, **__: said)
    assert share_right(problems, said) == 0.5
    found = pairs(problems, model, make_tokenizer(), 0)
    assert [pair["prompt"] for pair in found] == [problems[i]["prompt"] for i in (2, 4)]
    assert [int(pair["rejected"]) - int(pair["chosen"]) for pair in found] == [1, 1]


def test_ranks_divide_the_problems_of_a_look_and_all_know_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven problems, of which the first rank has four, every third is answered rightly."""
    problems = parts(0).train[:7]
    rightly = {problem["prompt"]: problem["answer"] for problem in problems[::3]}

    def look() -> Any:
        asked: list[str] = []

        def answer(mine: Any, *_: Any) -> list[str]:
            asked.extend(problem["prompt"] for problem in mine)
            return [rightly.get(problem["prompt"], "no") for problem in mine]

        monkeypatch.setattr(align_problems, "answers_to", answer)
        logged: list[Any] = []
        trainer: Any = SimpleNamespace(setup=SimpleNamespace(tokenizer=1), model=None, log=logged.append)
        watch = align_problems.WatchAccuracy(problems, every=2, stop_at=3 / 7)
        info: Any = SimpleNamespace(step=4, total_steps=9)
        with pytest.raises(StopTraining, match="43% of 7"):
            watch.on_optimizer_step(trainer, info)
        return [asked, logged]

    (first, logged), (second, also) = run_ranks(look, 2)
    assert logged == also == [{"event": "validation", "step": 4, "exact_match": 3 / 7}]
    assert len(first) == 4 and sorted(first + second) == sorted(problem["prompt"] for problem in problems)


@pytest.mark.slow
def test_reinforcement_adds_twenty_points(tmp_path: Path) -> None:
    """From nothing, seed 0: pretraining included. Starts between 20 and 60 % and rises by at least 20 points."""
    command = [sys.executable, "-m", "pellucid", "demo-align", "--out", str(tmp_path / "out"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    match = LAST_LINE.search(done.stdout)
    assert match is not None and match[3] == "500"
    assert 0.2 <= float(match[1]) <= 0.6 and float(match[2]) >= float(match[1]) + 0.19, "two digits are rounded"
    print(done.stdout)
