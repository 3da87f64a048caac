"""`pellucid export` makes a model folder of a checkpoint or a run; what it writes is what was trained."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import make_folder, make_tokenizer
from support import fork, run_ranks, tiny_config, windows

from pellucid.checkpoint import files
from pellucid.checkpoint.model_folder import load_model, save_model
from pellucid.cli import main
from pellucid.errors import ConfigError, TrainingError
from pellucid.train import Trainer


def train(out: Path, mode: str = "none") -> None:
    config = tiny_config(out, parallel__mode=mode, train__steps=4, train__save_every=2, train__val_every=0)
    Trainer(config, train_data=windows(12)).train()


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "run"
    run_ranks(lambda: train(out, "zero1"), 2)
    return out


def test_a_checkpoint_of_several_ranks_becomes_a_model(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = a_run / "checkpoints" / "step_00000002"
    assert main(["export", str(checkpoint), "--out", str(tmp_path / "new" / "model")]) == 0
    assert "step_00000002" in capsys.readouterr().out
    expected = load_file(checkpoint / "model.safetensors")
    loaded = load_model(tmp_path / "new" / "model").model
    assert dict(loaded.named_parameters()).keys() == expected.keys()
    assert all(torch.equal(p, expected[name]) for name, p in loaded.named_parameters())
    names = {path.name for path in (tmp_path / "new" / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md"}, "and nothing of the optimizer"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_a_run_gives_its_finished_model_else_its_newest_checkpoint(a_run: Path, tmp_path: Path) -> None:
    final = load_file(a_run / "model" / "model.safetensors")
    assert main(["export", str(a_run), "--out", str(tmp_path / "a")]) == 0
    assert all(torch.equal(tensor, final[name]) for name, tensor in load_file(tmp_path / "a/model.safetensors").items())
    (a_run / "model").rename(a_run / "elsewhere")
    try:
        assert main(["export", str(a_run), "--out", str(tmp_path / "b")]) == 0
    finally:
        (a_run / "elsewhere").rename(a_run / "model")
    assert (tmp_path / "b/model.safetensors").read_bytes() == (a_run / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_written_in_another_type(
    a_run: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.checkpoint.model_folder.CONVERTED", 7)  # pieces that divide nothing evenly
    assert main(["export", str(a_run), "--out", str(tmp_path / "out"), "--dtype", dtype]) == 0
    kind = getattr(torch, dtype)
    for name, tensor in load_file(a_run / "model" / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], tensor.to(kind))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert (
        load_model(tmp_path / "out").model.dtype == kind if hasattr(load_model(tmp_path / "out").model, "dtype") else 1
    )


def test_a_tokenizer_and_a_model_card_go_with_it_and_a_foreign_copy_of_a_tied_head_does_not(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", tie_word_embeddings=True)
    (source / "README.md").write_text("mine")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    assert main(["export", str(source), "--out", str(tmp_path / "out")]) == 0
    loaded = load_model(tmp_path / "out")
    assert loaded.tokenizer is not None and loaded.tokenizer.sha256 == make_tokenizer().sha256
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    save_file(tensors | {"lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])},
              source / "model.safetensors")  # fmt: skip
    assert main(["export", str(source), "--out", str(tmp_path / "out2")]) == 2


def test_what_cannot_be_exported_or_written_over_is_refused(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> str:
        assert main(["export", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    assert "is no model folder: it has thesis.txt" in refused(a_run, "--out", tmp_path / "used")
    for to in ("model", "adapter"):
        said = refused(a_run, "--out", tmp_path / "model.GGUF", "--to", to)
        assert f"--to {to} writes a folder; add --to gguf" in said and not (tmp_path / "model.GGUF").exists()
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["thesis.txt"]
    # beside what would be replaced
    repository = make_folder(tmp_path / "repository")
    (repository / ".git").mkdir()
    (repository / ".git" / "HEAD").write_text("mine")
    assert "it has .git" in refused(a_run, "--out", repository)
    assert (repository / ".git" / "HEAD").read_text() == "mine" and load_model(repository)
    newest = a_run / "checkpoints" / "step_00000002"
    before = {path: path.read_bytes() for path in newest.rglob("*") if path.is_file()}
    assert "is no model folder" in refused(repository, "--out", newest)
    with pytest.raises(ConfigError, match=r"is no model folder: it has manifest\.json"):
        save_model(newest, load_model(repository).model)
    assert before == {path: path.read_bytes() for path in newest.rglob("*") if path.is_file()}
    assert "no such model" in refused(tmp_path / "nowhere", "--out", tmp_path / "x")
    source = make_folder(tmp_path / "source")
    assert "is what is read" in refused(source, "--out", source)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors")
    assert "missing model.norm.weight" in refused(source, "--out", tmp_path / "x")
    assert not list(tmp_path.glob("x*")), "nothing half-written"
    checkpoint = a_run / "checkpoints" / "step_00000002" / "model.safetensors"
    whole = checkpoint.read_bytes()
    try:
        checkpoint.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert "does not have the hash" in refused(checkpoint.parent, "--out", tmp_path / "x")
    finally:
        checkpoint.write_bytes(whole)


def test_what_a_type_cannot_hold_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_folder(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, source / "model.safetensors")
    earlier = make_folder(tmp_path / "out")
    before = (earlier / "model.safetensors").read_bytes()
    assert main(["export", str(source), "--out", str(earlier), "--dtype", "float16"]) == 1
    assert "model.norm.weight is not finite in float16" in capsys.readouterr().err
    assert (earlier / "model.safetensors").read_bytes() == before and len(list(tmp_path.iterdir())) == 2
    assert main(["export", str(source), "--out", str(earlier), "--dtype", "bfloat16"]) == 0
    model = load_model(source).model
    for value in (torch.nan, -torch.inf):
        with torch.no_grad():
            model.model.norm.weight[0] = value
        with pytest.raises(TrainingError, match=r"model.norm.weight is not finite in float32"):
            save_model(tmp_path / "new", model)
        assert not (tmp_path / "new").exists()


def test_killed_anywhere_it_leaves_the_earlier_model_or_the_new_one(a_run: Path, tmp_path: Path) -> None:
    arguments = ["export", str(a_run), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]
    seen: list[str] = []
    files.before_operation = lambda name, path: seen.append(name)
    try:
        assert main(arguments) == 0
    finally:
        files.before_operation = None
    for point in range(len(seen)):

        def die(name: str, path: Path, left: list[int] = [point]) -> None:  # noqa: B006 - a new list each time
            left[0] -= 1
            if left[0] < 0:
                signal.raise_signal(signal.SIGKILL)

        def export(hook: object = die) -> None:
            files.before_operation = hook  # type: ignore[assignment]
            main(arguments)

        assert fork(export) == -signal.SIGKILL
        where = tmp_path / "out"
        if sys.platform != "linux" and not where.exists():  # between two renames
            where = next(path for path in tmp_path.iterdir() if ".tmp-old-" in path.name)
        assert load_model(where).config.hidden_size == 16, seen[point]
        assert main(arguments) == 0
        assert [path.name for path in tmp_path.iterdir()] == ["out"], "leftovers of the killed are gone"
