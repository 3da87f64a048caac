"""`pellucid eval`: prepared data, text, the data of a run; one object; bad input named."""

import json
import math
from pathlib import Path

import pytest
from small_models import TEXTS, make_folder, make_tokenizer, spoil

from pellucid.cli import main
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


def score(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    assert main(["eval", *arguments, "--json", "--quiet"]) == 0
    result: dict[str, float] = json.loads(capsys.readouterr().out)
    return result


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
        ([model, "--data", text, "--stride", "-1"], "--stride must not be negative, got -1"),
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
