"""`pellucid eval`: prepared data, text, the data of a run, tasks; one object; bad input named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from small_models import TEXTS, make_folder, make_tokenizer, spoil

from pellucid import registry
from pellucid.cli import main
from pellucid.cli.evaluate import run_config_of
from pellucid.config import run_config, to_toml
from pellucid.data.index import write_index
from pellucid.data.shards import ShardWriter
from pellucid.tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "small")


def make_data(folder: Path, tokenizer: Tokenizer | None = None, splits: tuple[str, ...] = ("train", "val")) -> Path:
    tokenizer = tokenizer or make_tokenizer()
    folder.mkdir()
    tokenizer.save(folder)
    entries = {}
    for split in splits:
        writer = ShardWriter(folder, split, "uint16", 1000)
        for text in TEXTS[: 20 if split == "val" else 50]:
            writer.add(tokenizer.encode_document(text))
        entries[split] = writer.finish()
    write_index(
        folder,
        dtype="uint16",
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.sha256,
        splits=entries,
        sources=[],
    )
    return folder


def score(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json", "--quiet"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def make_tasks(folder: Path) -> tuple[str, str]:
    """A file of each form."""
    choices, asked = folder / "tea.jsonl", folder / "asked.jsonl"
    line = {"prompt": "the fox asked the", "choices": [" cat", " hen for tea", " dog"], "answer": 1}
    choices.write_text(2 * f"{json.dumps(line)}\n")
    line = {"prompt": "the owl", "answer": ["x", "y"]}
    asked.write_text(3 * f"{json.dumps(line)}\n")
    return str(choices), str(asked)


def test_tasks_are_scored_by_name_with_and_without_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tea, asked = make_tasks(tmp_path)
    text = tmp_path / "a.txt"
    text.write_text("the fox asked the hen")
    alone = score(capsys, str(model), "--tasks", tea, asked, "--max-tokens", "4", "--shots", "1")
    assert list(alone) == ["tasks"] and list(alone["tasks"]) == ["tea", "asked"]
    assert list(alone["tasks"]["tea"]) == ["acc", "acc_norm", "n"] and alone["tasks"]["tea"]["n"] == 2
    assert alone["tasks"]["asked"] == {"exact_match": 0, "n": 3}
    both = score(capsys, str(model), "--data", str(text), "--tasks", tea, "--tasks", "arithmetic,size=1")
    assert list(both) == ["tokens", "documents", "nll", "loss", "perplexity", "bits_per_byte", "tasks"]
    assert list(both["tasks"]) == ["tea", "arithmetic,size=1"]
    del both["tasks"]
    assert both == score(capsys, str(model), "--data", str(text))
    assert main(["eval", str(model), "--tasks", tea, asked, "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    head, first, second = (line.split() for line in captured.out.splitlines())
    assert head == ["task", "acc", "acc_norm", "exact_match", "n"]
    assert first[0] == "tea" and len(first) == 4 and second == ["asked", "0", "3"]
    assert "tea 100 % example 2 of 2" in captured.err


def test_tasks_and_flags_that_cannot_be_used_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tea, asked = make_tasks(tmp_path)
    bare = make_folder(tmp_path / "bare", tokenizer=False)
    data = make_data(tmp_path / "data")
    text = tmp_path / "a.txt"
    text.write_text("the fox asked the hen")
    for arguments, message in [
        ([model, "--tasks", tea, tea], "would both be called 'tea'"),
        ([bare, "--tasks", tea], "has no tokenizer.json, which tasks need"),
        ([model, "--tasks", tea, "--max-tokens", "4"], "these tasks are all multiple choice"),
        ([model, "--tasks", asked, "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        ([model, "--tasks", asked, "--shots", "-1"], "--shots must be at least 0, got -1"),
        ([model, "--tasks", asked, "--shots", "3"], "--shots 3 needs more than 3 examples"),
        ([model, "--tasks", asked, "--plugins", "no_such_module"], "cannot import 'no_such_module'"),
        ([model, "--data", text, "--max-tokens", "4"], "--max-tokens is about tasks"),
        ([model, "--data", text, "--shots", "0"], "--shots is about tasks"),
        ([model, "--tasks", asked, "--stride", "4"], "--stride is about data, and only tasks are scored"),
        ([model, "--tasks", asked, "--split", "val"], "--split is about data"),
        ([model, "--tasks", asked, "--text-key", "text"], "--text-key is about data"),
        ([model, "--data", text, "--split", "val"], f"--split val is of prepared data, and {text} has no index.json"),
        (
            [model, "--data", text, "--text-key", "text"],
            f"--text-key text is of records, and {text} has no file of them",
        ),
        ([model, "--data", data, "--text-key", "text"], f"--text-key text is of text, and {data} is prepared data"),
    ]:
        assert main(["eval", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_a_task_may_be_registered_by_a_plugin_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in registry.HOMES:
        registry.names(kind)  # or what is imported meanwhile would be registered in the copy alone
    monkeypatch.setattr(registry, "_entries", {kind: dict(entries) for kind, entries in registry._entries.items()})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plugin_of_a_run.py").write_text(
        "from pellucid.registry import register\n"
        "@register('task', 'of-a-run')\n"
        "class Task:\n"
        "    def __init__(self, options): ...\n"
        "    def examples(self):\n"
        "        yield {'prompt': 'the', 'choices': [' fox', ' hen'], 'answer': 0}\n"
        "        yield {'prompt': 'the', 'choices': [' fox'], 'answer': 0}\n"
    )
    run = tmp_path / "run"
    run.mkdir()
    make_folder(run / "model")
    (run / "config.toml").write_text(to_toml(run_config({"plugins": ["plugin_of_a_run"]})))
    assert main(["eval", str(run), "--tasks", "of-a-run"]) == 2
    assert 'of-a-run:2: "choices" must be a list of two texts or more' in capsys.readouterr().err


def test_a_model_is_of_a_run_only_where_it_stands_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("the fox asked the hen")
    (tmp_path / "config.toml").write_text('title = "of another program"\n')
    (tmp_path / "deep").mkdir()
    for folder in (tmp_path / "m", tmp_path / "deep" / "m"):
        make_folder(folder)
        assert score(capsys, str(folder), "--data", str(text))["documents"] == 1
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(run_config({"data": {"context": 16}})))
    for folder in (run, run / "checkpoints" / "step_00000001", run / "model_ema"):
        config = run_config_of(str(folder))
        assert config is not None and config.data.context == 16


def test_a_model_directly_under_the_root_belongs_to_no_run() -> None:
    assert run_config_of("/pellucid-no-such-model") is None and run_config_of("/") is None


def test_prepared_data_and_its_text_score_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path / "data")
    text = tmp_path / "val.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXTS[:20]))
    prepared = score(capsys, str(model), "--data", str(data))
    assert list(prepared) == ["tokens", "documents", "nll", "loss", "perplexity", "bits_per_byte"]
    assert prepared["perplexity"] == pytest.approx(math.exp(prepared["nll"] / prepared["tokens"]))
    assert score(capsys, str(model), "--data", str(text)) == pytest.approx(prepared)
    text.write_text(text.read_text().replace('"text"', '"body"'))
    assert score(capsys, str(model), "--data", str(text), "--text-key", "body") == pytest.approx(prepared)
    assert score(capsys, str(model), "--data", str(data), "--batch-size", "1") == pytest.approx(prepared, rel=1e-6)
    assert score(capsys, str(model), "--data", str(data), "--split", "train")["documents"] == 50
    strided = score(capsys, str(model), "--data", str(data), "--stride", "8")
    assert strided["tokens"] == prepared["tokens"] and strided["nll"] != prepared["nll"]


def test_a_table_is_printed_without_json(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "data")
    assert main(["eval", str(model), "--data", str(data)]) == 0
    captured = capsys.readouterr()
    names = [line.split()[0] for line in captured.out.splitlines()]
    assert names == ["tokens", "documents", "nll", "loss", "perplexity", "bits_per_byte"]
    assert "scoring the val split" in captured.err


def test_a_run_is_scored_on_its_own_data_and_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = make_data(tmp_path / "data"), tmp_path / "run"
    run.mkdir()
    make_folder(run / "model")
    (run / "config.toml").write_text(to_toml(run_config({"data": {"path": str(data), "context": 16}})))
    own = score(capsys, str(run))
    assert own == score(capsys, str(run / "model"))
    assert own["tokens"] == score(capsys, str(run), "--data", str(data))["tokens"]
    elsewhere = make_folder(tmp_path / "elsewhere")
    assert own["nll"] != score(capsys, str(elsewhere), "--data", str(data))["nll"]  # its window is 64, not 16


def test_what_does_not_fit_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_data(tmp_path / "other", train_bpe(TEXTS, 280))
    larger = make_data(tmp_path / "larger", train_bpe([*TEXTS, "zebra zebu zebras" * 3], 320))
    train_only = make_data(tmp_path / "train-only", splits=("train",))
    bare = make_folder(tmp_path / "bare", tokenizer=False)
    text = tmp_path / "a.txt"
    text.write_text("the fox asked")
    for arguments, message in [
        ([model], "records no training data; name some with --data"),
        ([model, "--data", other], "was prepared with another tokenizer than the model's"),
        ([model, "--data", larger], "ids and the model knows"),
        ([model, "--data", train_only], "has no split 'val'"),
        ([model, "--data", tmp_path / "nowhere"], "no such file or folder"),
        ([bare, "--data", text], "has no tokenizer.json to encode"),
        ([model, "--data", text, "--stride", "65"], "stride 65 is longer than the context 64"),
        ([model, "--data", text, "--stride", "-1"], "--stride must be at least 0, got -1"),
        ([model, "--data", text, "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        ([make_folder(tmp_path / "narrow", vocab_size=290), "--data", text], "embedding 290 rows"),
    ]:
        assert main(["eval", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_a_model_with_damaged_weights_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = spoil(make_folder(tmp_path / "broken"))
    text = tmp_path / "a.txt"
    text.write_text("the fox asked")
    assert main(["eval", str(broken), "--data", str(text)]) == 1
    assert "not finite" in capsys.readouterr().err
