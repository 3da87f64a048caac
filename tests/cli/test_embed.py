"""`pellucid embed`: one vector a record, in input order, resumed by id, bad input named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import make_folder, make_tokenizer

from pellucid.checkpoint.encoder_folder import load_encoder, save_encoder
from pellucid.cli import main
from pellucid.config import ModelConfig
from pellucid.model import EmbedConfig, Encoder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("models") / "encoder")


def make_encoder(path: Path) -> Path:
    config = ModelConfig(
        vocab_size=make_tokenizer().vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=24,
        initializer_range=0.3,
    )
    encoder = Encoder(config, EmbedConfig(normalize=True), generator=torch.Generator().manual_seed(2))
    save_encoder(path, encoder, make_tokenizer())
    return path


TEXTS = ["the fox asked", "hello", "the owl asked the cat for tea at 3", "a", "the hen and the dog", "tea", "at 8"]
LONG = "the fox asked the cat for tea at 3 and said hello " * 4


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def embed(model: Path, source: Path, *arguments: str) -> int:
    return main(["embed", str(model), "--input", str(source), "--quiet", *arguments])


def records() -> list[dict[str, Any]]:
    return [{"id": f"t{i}", "text": text} if i % 3 else {"text": text} for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("batch_size", ["1", "2", "32"])
def test_vectors_come_in_input_order_whatever_runs_together(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: str
) -> None:
    monkeypatch.setattr("pellucid.cli.embed.WINDOW", 2)  # so that texts are sorted in several goes
    source, out = write_lines(tmp_path / "in.jsonl", records()), tmp_path / "out.jsonl"
    assert embed(model, source, "--out", str(out), "--batch-size", batch_size) == 0
    found = read_lines(out)
    assert [r["id"] for r in found] == [1, "t1", "t2", 4, "t4", "t5", 7]
    loaded = load_encoder(model)
    for record, text in zip(found, TEXTS, strict=True):
        assert list(record) == ["id", "embedding", "tokens"]
        tokens = make_tokenizer().encode_document(text)
        assert record["tokens"] == len(tokens)
        with torch.no_grad():
            alone = loaded.encoder(torch.tensor([tokens]), torch.tensor([len(tokens)])).embedding[0]
        assert torch.tensor(record["embedding"]).sub(alone).abs().max() < 1e-6
    assert len({tuple(record["embedding"][:3]) for record in found}) == len(TEXTS)


def test_what_is_written_is_the_float32_itself(model: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", records()), tmp_path / "out.jsonl"
    assert embed(model, source, "--out", str(out)) == 0
    found = torch.tensor([record["embedding"] for record in read_lines(out)])
    assert torch.equal(found, load_encoder(model).embed(TEXTS))


def test_an_interrupted_file_is_resumed_by_id_and_put_in_order(model: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", records()), tmp_path / "out.jsonl"
    command = ["--out", str(out), "--batch-size", "1"]
    assert embed(model, source, *command) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    kept = json.dumps(json.loads(lines[2]) | {"embedding": ["kept"]}).encode() + b"\n"
    for rest in (b"", lines[4], lines[5][:20]):
        out.write_bytes(kept + rest)
        assert embed(model, source, *command) == 0
        assert out.read_bytes() == b"".join([*lines[:2], kept, *lines[3:]])
    for torn in (lines[0][:1], lines[0][:40], lines[0][:-1]):
        out.write_bytes(torn)
        assert embed(model, source, *command) == 0
        assert out.read_bytes() == whole


def test_an_out_file_of_something_else_is_refused_as_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", records()), tmp_path / "out.jsonl"
    alien = ":1: not a result of this command; give another --out"
    for content, message in [
        ("my notes", alien),
        ('{"id": "t1", "text": "hello"}', alien),  # a copy of what is read
        ('{"id": "t1", "text": "hello"}\n', alien),
        ('{"id": [1]}\n', alien),
        ('{"id": "z", "embedding": [0.1], "tokens": 3}\n', ":1: id 'z' (sample 0) is not asked for"),
        (
            '{"id": "t1", "embedding": [0.1], "tokens": 99}\n',
            ":1: id 't1' is there already and is the vector of a text of 99 tokens, and the text has",
        ),
    ]:
        out.write_text(content)
        assert embed(model, source, "--out", str(out)) == 2
        assert message in capsys.readouterr().err
        assert out.read_text() == content


def test_the_file_that_is_read_is_not_written_to(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", records())
    source.write_bytes(whole := source.read_bytes().removesuffix(b"\n"))
    assert embed(model, source, "--out", str(source)) == 2
    assert f"--out {source} is the file that --input reads; give another --out" in capsys.readouterr().err
    assert source.read_bytes() == whole


def test_results_can_go_to_a_device(model: Path, tmp_path: Path) -> None:
    assert embed(model, write_lines(tmp_path / "in.jsonl", records()), "--out", "/dev/null") == 0


def test_without_out_vectors_go_to_stdout_and_the_summary_to_stderr(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed(model, write_lines(tmp_path / "in.jsonl", records())) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["id"] for line in captured.out.splitlines()] == [1, "t1", "t2", 4, "t4", "t5", 7]
    assert "7 results, 0 kept, 0 failed" in captured.err


def test_the_summary_is_one_object(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", records()), tmp_path / "out.jsonl"
    assert embed(model, source, "--out", str(out), "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    tokens = sum(len(make_tokenizer().encode_document(text)) for text in TEXTS)
    assert {key: summary[key] for key in ("results", "kept", "failed", "tokens")} == {
        "results": 7, "kept": 0, "failed": 0, "tokens": tokens,
    }  # fmt: skip
    assert embed(model, source, "--json") == 2
    assert "give --out" in capsys.readouterr().err


def test_another_key_may_hold_the_text(model: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"text": 3, "body": "the fox"}]), tmp_path / "out.jsonl"
    assert embed(model, source, "--out", str(out), "--text-key", "body") == 0
    assert read_lines(out)[0]["tokens"] == len(make_tokenizer().encode_document("the fox"))


def test_long_texts_are_refused_by_name_and_cut_only_when_asked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"text": "tea"}, {"text": LONG}]), tmp_path / "out.jsonl"
    assert embed(model, source, "--out", str(out)) == 2
    size = len(make_tokenizer().encode_document(LONG))
    assert f"in.jsonl:2: the text has {size} tokens and the encoder takes 24" in capsys.readouterr().err
    assert not out.exists()
    assert embed(model, source, "--out", str(out), "--truncate") == 0
    assert [r["tokens"] for r in read_lines(out)] == [len(make_tokenizer().encode_document("tea")), 24]
    ids = make_tokenizer().encode_document(LONG)
    cut = [*ids[:23], ids[-1]]
    assert torch.equal(torch.tensor(read_lines(out)[1]["embedding"]), load_encoder(model).encoder.embed_ids([cut])[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "in.jsonl:2: not JSON"),
        ("[1]", "in.jsonl:2: a line must be a JSON object"),
        ('{"text": ""}', "in.jsonl:2: the text is empty"),
        ('{"text": 5}', 'in.jsonl:2: "text" must be text, got 5; --text-key'),
        ('{"body": "x"}', 'in.jsonl:2: "text" must be text, the record has body; --text-key'),
        ('{"id": 1, "text": "x"}', "in.jsonl:2: id 1 is that of"),
        ('{"text": "\\ud800"}', "in.jsonl:2: text has a lone surrogate"),
        ('{"id": "\\ud800", "text": "x"}', "in.jsonl:2: \"id\" '\\ud800' has a lone surrogate"),
    ],
)
def test_bad_records_are_named_before_anything_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "tea"}\n' + line + "\n")
    assert embed(model, source, "--out", str(out)) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_decoder_and_a_bad_batch_size_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", records())
    assert embed(make_folder(tmp_path / "decoder"), source) == 2
    assert "no encoder that can be read" in capsys.readouterr().err
    assert embed(model, source, "--batch-size", "0") == 2
    assert "--batch-size must be at least 1" in capsys.readouterr().err
    assert main(["generate", str(model), "--prompt", "tea"]) == 2
    assert "`pellucid embed`" in capsys.readouterr().err


def test_a_vector_that_is_not_finite_has_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_encoder(tmp_path / "broken")
    file = model / "model.safetensors"
    tensors = load_file(file)
    (tea,) = set(make_tokenizer().encode("q")) - set(make_tokenizer().encode("hello"))
    tensors["model.embed_tokens.weight"][tea] = torch.nan
    save_file(tensors, file)
    source, out = write_lines(tmp_path / "in.jsonl", [{"text": "q"}, {"text": "hello"}]), tmp_path / "out.jsonl"
    assert embed(model, source, "--out", str(out)) == 1
    assert "in.jsonl:1: the vector is not finite" in capsys.readouterr().err
    assert [r["id"] for r in read_lines(out)] == [2]


def test_inspect_says_what_an_encoder_is(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    weights = load_file(model / "model.safetensors")
    assert facts["parameters"] == sum(x.numel() for x in weights.values()) and facts["tensors"] == len(weights)
    assert facts["vectors"] == {"width": 32, "pooling": "mean", "normalize": True} and facts["max_tokens"] == 24
    broken = make_encoder(tmp_path / "broken")
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, broken / "model.safetensors")
    assert main(["inspect", str(broken)]) == 2
    assert "model.norm.weight holds values that are not finite" in capsys.readouterr().err
