"""`--weights int8|int4` of eval, generate and chat: it acts, it is checked, and embed has none."""

import io
import json
from pathlib import Path

import pytest
import torch
from small_models import TEXTS, make_folder

from pellucid.checkpoint.model_folder import load_model
from pellucid.cli import main
from pellucid.inference import SamplingParams, generate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text("\n".join(TEXTS[:10]))
    return path


def test_eval_scores_the_quantised_model(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for flags in ([], ["--weights", "int8"], ["--weights", "int4"]):
        assert main(["eval", str(model), "--data", str(text), "--device", "cpu", "--json", "--quiet", *flags]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert len(set(losses)) == 3
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.05)


def test_generate_and_chat_run_the_quantised_model(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--device", "cpu", "--weights", "int4", "--temperature", "0", "--max-tokens", "5"]
    assert main(["generate", str(model), "--prompt", "the fox", "--json", "--logprobs", *flags]) == 0
    [record] = json.loads(capsys.readouterr().out)["results"]
    loaded = load_model(model, device="cpu", weights="int4")
    assert loaded.tokenizer is not None
    prompt = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode("the fox")]
    params = SamplingParams(temperature=0, max_tokens=5)
    [expected] = generate(loaded.model, [[i for i in prompt if i is not None]], params)
    assert record["ids"] == expected.ids and record["logprobs"] == expected.logprobs
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the fox\n")))
    assert main(["chat", str(model), *flags]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [["eval", "--data", "x"], ["generate", "--prompt", "x"], ["chat"]])
def test_an_unknown_value_ends_with_2_and_the_known_ones(
    command: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command[0], str(model), *command[1:], "--weights", "int2"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "int2" in error and "int8" in error and "int4" in error


def test_another_device_ends_with_2(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.checkpoint.model_folder.resolve_device", lambda name: torch.device("cuda", 0))
    assert main(["generate", str(model), "--prompt", "x", "--weights", "int8"]) == 2
    error = capsys.readouterr().err
    assert 'weights "int8" run on cpu' in error and "cuda:0" in error and "set device to cpu" in error


def test_embed_has_no_such_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["embed", str(tmp_path), "--weights", "int8"])
    assert ended.value.code == 2
