"""Adapters on the command line: trained on a base, and used wherever a model is."""

import json
from pathlib import Path

import pytest
import torch
from small_models import make_folder
from support import fork

from pellucid.checkpoint.adapter import save_adapter
from pellucid.checkpoint.model_folder import load_model, save_model
from pellucid.cli import main
from pellucid.config import LoraConfig, ModelConfig
from pellucid.model import Transformer
from pellucid.model.lora import add_lora
from pellucid.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    model = load_model(make_folder(folder / "base")).model
    add_lora(model, LoraConfig(r=2, alpha=4.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(name)))
    save_adapter(folder / "adapter", model, base="../base")
    return folder / "adapter"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_an_adapter_generates_and_is_measured_as_its_merged_model(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the fox asked the hen for tea at 3 and said hello\n" * 5)
    assert main(["export", str(adapter), "--out", str(tmp_path / "merged")]) == 0
    answers, losses = {}, {}
    for path in (adapter, tmp_path / "merged", adapter.parent / "base"):
        answers[path.name] = said(
            capsys, "generate", str(path), "--prompt", "the fox", "--temperature", "0", "--max-tokens", "12", "--dtype", "float32"
        )  # fmt: skip
        facts = said(capsys, "eval", str(path), "--data", str(tmp_path / "text.txt"), "--json", "--dtype", "float32")
        losses[path.name] = json.loads(facts)["loss"]
    assert answers["adapter"] == answers["merged"] != answers["base"]
    assert losses["adapter"] == pytest.approx(losses["merged"], abs=1e-5)
    assert abs(losses["adapter"] - losses["base"]) > 1e-2


def test_a_gguf_file_has_the_adapter_merged(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    said(capsys, "export", str(adapter), "--to", "gguf", "--type", "f32", "--out", str(tmp_path / "a.gguf"))
    said(capsys, "import", str(tmp_path / "a.gguf"), "--out", str(tmp_path / "read"))
    said(capsys, "export", str(adapter), "--out", str(tmp_path / "merged"))
    read, merged, base = (
        load_model(path).model for path in (tmp_path / "read", tmp_path / "merged", adapter.parent / "base")
    )
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, merged(tokens).logits, atol=1e-5, rtol=0)
        assert (merged(tokens).logits - base(tokens).logits).abs().max() > 1e-2


def test_inspect_says_what_an_adapter_is_on(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(said(capsys, "inspect", str(adapter), "--json"))
    assert facts["kind"] == "adapter"
    assert facts["adapter"] == {"r": 2, "alpha": 4.0, "use_rslora": False, "layers": 14, "base": "../base"}


def test_an_adapter_is_trained_with_dotted_settings_and_exported_from_a_checkpoint(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.load(data_folder)
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    base = tmp_path / "base"
    save_model(base, Transformer(shape), tokenizer)
    common = [
        "--data.path", str(data_folder), "--train.global_batch=4", "--train.micro_batch=4", "--train.dtype=float32",
        "--train.val_every=0", "--optim.lr=0.01",
    ]  # fmt: skip
    words = [
        "train", "--init", str(base), "--lora.r", "2", "--lora.targets", "q_proj,v_proj", "--train.steps=3", *common,
        "--train.save_every=2", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    assert fork(lambda: main(words)) == 0
    assert said(capsys, "export", str(tmp_path / "run"), "--to", "adapter", "--out", str(tmp_path / "a"))
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "run/adapter" / file).read_bytes()
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert config["r"] == 2 and config["base_model_name_or_path"] == str(base)
    report = (tmp_path / "run/report.html").read_text()
    assert "lora" in report
    assert main(["train", "--init", str(tmp_path / "a"), "--train.steps=3", *common, "--out", str(tmp_path / "b")]) == 2
    assert "is an adapter, not a model; merge it" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "c"), "--lora.target", "q_proj"]) == 2
    assert "did you mean lora.targets" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "c"), "--lora.targets", "query"]) == 2
    assert "'query' matches no linear layer; the model has down_proj" in capsys.readouterr().err


def test_what_has_no_adapter_exports_none(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(adapter.parent / "base")
    assert main(["export", base, "--to", "adapter", "--out", str(tmp_path / "x")]) == 2
    assert "has no adapter" in capsys.readouterr().err
    assert main(["export", str(adapter), "--to", "adapter", "--dtype", "float16", "--out", str(tmp_path / "x")]) == 2
    assert main(["export", str(adapter), "--to", "adapter", "--out", str(adapter)]) == 2
    assert not (tmp_path / "x").exists() and load_model(adapter).config
