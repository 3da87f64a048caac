"""`pellucid inspect` recognises each kind of folder, and names the first file that is damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_folder, make_tokenizer, spoil
from test_eval_command import make_data

from pellucid.checkpoint.files import write_json, write_tensors
from pellucid.checkpoint.model_folder import load_model, model_files, weights_of
from pellucid.checkpoint.reshard import part_name, write_parts
from pellucid.checkpoint.store import CheckpointStore, Write, write_files, writing_bytes
from pellucid.cli import main
from pellucid.config import run_config, to_toml
from pellucid.parallel.parts import Part, weight_shapes


def inspect(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    assert main(["inspect", str(path), "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(path)]) == 0
    assert facts["kind"] in capsys.readouterr().out.splitlines()[0]
    return facts


def refused(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    assert main(["inspect", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x40
    file.write_bytes(bytes(data))


def make_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(run_config({"data": {"path": "stories"}, "train": {"seed": 5}})))
    model = load_model(make_folder(folder / "model")).model
    store = CheckpointStore(folder / "checkpoints")
    for step in (10, 20):
        contents = model_files(model.config, weight_shapes(model), make_tokenizer())
        writes: dict[str, Write] = {name: writing_bytes(data) for name, data in contents.items()}
        for rank in range(2):
            part = Part("a/exp_avg", (3,), 2 * rank, torch.ones(2 - rank))
            writes[part_name(rank, 2)] = lambda path, part=part: write_parts(path, [part], whole=False)
        writes["model.safetensors"] = lambda path: write_tensors(path, weights_of(model))
        writes["rng.safetensors"] = lambda path: write_tensors(path, {"torch": torch.zeros(2)})
        state = {"step": step, "epoch": 1, "world_size": 2}
        writes["state.json"] = lambda path, state=state: write_json(path, state)
        temporary = store.begin(step)
        store.publish(temporary, step, write_files(temporary, writes))
    lines = [{"event": "step", "step": n, "loss": 3.0 / n} for n in range(1, 21)]
    lines.append({"event": "validation", "step": 20, "loss": 0.5, "tokens": 99})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_prepared_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "data")
    facts = inspect(capsys, data)
    assert facts["kind"] == "data" and facts["splits"]["val"]["documents"] == 20
    flip(data / "val-00000.bin", at=6)
    assert "val-00000.bin" in refused(capsys, data)
    (data / "train-00000.bin").write_bytes(b"")
    assert "train-00000.bin" in refused(capsys, data)


def test_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "model")
    facts = inspect(capsys, folder)
    model = load_model(folder).model
    assert (facts["kind"], facts["parameters"]) == ("model", model.num_parameters())
    assert facts["parameters_by_dtype"] == {"float32": model.num_parameters()}
    assert facts["config"]["hidden_size"] == 32
    assert make_tokenizer().sha256 in facts["tokenizer"]


def test_latent_attention_says_what_it_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latent = dict(num_key_value_heads=4, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    assert "cache" not in inspect(capsys, make_folder(tmp_path / "grouped"))
    absorbed = inspect(capsys, make_folder(tmp_path / "absorbed", **latent))["cache"]
    assert absorbed == "latents, 14 numbers a token and layer"
    normed = inspect(capsys, make_folder(tmp_path / "normed", **latent, qk_norm=True))["cache"]
    assert normed.startswith("expanded keys and values, 60 numbers a token and layer: with model.qk_norm")


def test_a_damaged_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nan = spoil(make_folder(tmp_path / "nan"))
    assert "model.norm.weight holds values that are not finite" in refused(capsys, nan)
    cut = make_folder(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused(capsys, cut)
    weights.unlink()
    assert "no model.safetensors" in refused(capsys, cut)
    narrow = make_folder(tmp_path / "narrow", vocab_size=290)
    assert "embedding 290 rows" in refused(capsys, narrow)


def test_a_run_and_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    facts = inspect(capsys, run)
    assert facts["kind"] == "run" and facts["checkpoints"] == ["step_00000010", "step_00000020"]
    assert facts["last_step"]["step"] == 20 and facts["last_validation"]["loss"] == 0.5
    assert facts["seed"] == 5
    checkpoint = run / "checkpoints" / "step_00000010"
    facts = inspect(capsys, checkpoint)
    assert facts["kind"] == "checkpoint" and facts["step"] == 10 and facts["epoch"] == 1
    assert facts["optimizer_files"] == 2 and facts["optimizer_tensors"] == 1
    flip(checkpoint / "optimizer-00002-of-00002.safetensors")
    assert "step_00000010/optimizer-00002-of-00002.safetensors" in refused(capsys, checkpoint)
    assert "step_00000010/optimizer-00002-of-00002.safetensors" in refused(capsys, run)


def test_an_incomplete_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = make_run(tmp_path / "run") / "checkpoints" / "step_00000020"
    (checkpoint / "manifest.json").unlink()
    assert "manifest.json is missing" in refused(capsys, checkpoint)


def test_a_manifest_without_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "checkpoints/step_00000020/manifest.json").write_text('{"format": "pellucid-checkpoint"}')
    for path in (run, run / "checkpoints/step_00000020"):
        assert "step_00000020/manifest.json is damaged: format_version" in refused(capsys, path)


def test_a_log_may_end_in_a_torn_line_but_not_hold_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    log = run / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole + '{"event": "st')
    assert inspect(capsys, run)["steps_logged"] == 20
    log.write_text("junk\n" + whole)
    assert "metrics.jsonl:1 is damaged" in refused(capsys, run)


def test_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is nothing that Pellucid knows" in refused(capsys, tmp_path)
    assert "no such file or folder" in refused(capsys, tmp_path / "nowhere")
