"""`pellucid doctor` looks at this machine and says what would help."""

import json
import platform
import shutil
from pathlib import Path

import pytest
import torch

from pellucid.cli import doctor, main


def test_what_is_found_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["python"] == platform.python_version()
    assert torch.__version__.startswith(found["torch"].split("+")[0])
    assert found["torch_threads"] == torch.get_num_threads()
    assert found["float32_gflops"] > 0 and found["bfloat16_gflops"] > 0
    assert found["train_dtype_auto"] in ("float32", "bfloat16")
    assert found["disk_free_gb"] == pytest.approx(shutil.disk_usage(Path.cwd()).free / 1e9, rel=0.2)
    assert found["extra_test"] is True


def test_the_table_has_a_line_for_each_finding_and_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "install g++ or clang" in out
    assert 'pip install "pellucid[formats]"' in out
    for name in ("python", "torch", "cpu_features", "compiler", "kernels", "allocator_loaded", "tmp_free_gb"):
        assert any(line.startswith(name + " ") for line in out.splitlines())


def test_a_missing_library_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CORE", (*doctor.CORE, "surely-not-installed"))
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "required libraries are missing: surely-not-installed" in captured.err
    assert "surely-not-installed" in captured.out
