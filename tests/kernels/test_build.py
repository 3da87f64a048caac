"""Kernels are compiled once, whole or not at all, and whoever cannot have them is told why and goes on without."""

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pellucid.kernels import build

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))  # is faster
    return tmp_path / "cache"


def why() -> str:
    with pytest.raises(build._Unavailable) as told:
        build._built()
    return str(told.value)


def test_what_was_compiled_is_kept_and_nothing_else(cache, monkeypatch):
    path = build._built()
    assert path.is_relative_to(cache) and list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    ran = []
    plain = build._run
    monkeypatch.setattr(build, "_run", lambda command: ran.append(command) or plain(command))
    assert build._built() == path
    assert ran == [["c++", "--version"]]


def test_another_source_is_another_library(cache, tmp_path, monkeypatch):
    path = build._built()
    changed = tmp_path / "kernels.cpp"
    changed.write_text(build.SOURCE.read_text() + "\n// changed\n")
    monkeypatch.setattr(build, "SOURCE", changed)
    assert build._built() != path


def test_it_computes_with_torchs_threads_alone(cache):
    """A second OpenMP runtime would keep threads of its own on the same cores."""
    ctypes.CDLL(str(build._built()))
    names = [Path(p).name for p in set(re.findall(r"(/\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE))]
    assert len([n for n in names if n.startswith(build.RUNTIMES)]) == 1


@pytest.mark.parametrize("value", ["off", "0", "OFF"])
def test_the_switch(value, monkeypatch):
    monkeypatch.setenv(build.SWITCH, value)
    assert why() == f"PELLUCID_KERNELS is {value}"


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why() == "there is no C++ compiler 'no-such-compiler'; install g++, or name one in CXX"


def test_a_compiler_that_fails_is_quoted(cache, tmp_path, monkeypatch):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(build, "SOURCE", broken)
    assert re.search(r"ended with 1: .*error: ", why(), re.DOTALL)
    assert list((cache / "pellucid" / "kernels").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be written" in why() and "XDG_CACHE_HOME" in why()


def test_without_them_weights_are_packed_for_torch():
    script = (
        "import torch; from pellucid import kernels; from pellucid.model.quantize import Int4Linear, Int8Linear; "
        "torch.manual_seed(0); w, x = torch.randn(64, 96), torch.randn(3, 96); "
        "assert not kernels.available(); "
        "assert all(k(w).weights is None and (k(w)(x) - x @ w.T).abs().max() < 3 for k in (Int4Linear, Int8Linear)); "
        "print(kernels.missing())"
    )
    env = os.environ | {build.SWITCH: "off"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "PELLUCID_KERNELS is off"


def test_the_op_knows_its_shape_without_data():
    x, packed = torch.empty(3, 64, device="meta"), torch.empty(2, 2, 320, dtype=torch.uint8, device="meta")
    out = torch.ops.pellucid.packed_linear(x, packed, torch.empty(0, device="meta"), 20)
    assert out.shape == (3, 20) and out.dtype == torch.float32
