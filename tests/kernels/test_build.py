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
from torch._subclasses.fake_tensor import FakeTensorMode

from pellucid.kernels import build

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Whatever the environment says."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(build.SWITCH, raising=False)


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
    assert path.is_relative_to(cache) and set(path.parent.iterdir()) == {path, path.parent / "lock"}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    ran = []
    plain = build._run
    monkeypatch.setattr(build, "_run", lambda command: ran.append(command) or plain(command))
    assert build._built() == path
    assert ran == [["c++", "--version"]]


def test_of_several_processes_one_compiles(cache, tmp_path):
    """The compiler writes down each time that it is called to compile, once for each source."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >> {tmp_path}/calls;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    env = os.environ | {"CXX": str(compiler)}
    command = [sys.executable, "-c", "from pellucid.kernels import build; print(build._built())"]
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    assert len({process.communicate(timeout=120)[0] for process in processes}) == 1
    assert (tmp_path / "calls").read_text() == "x\n" * len(build.SOURCES)


def rewrite(patch, folder, name, edit):
    """The sources, one of them edited, become what is compiled."""
    for path in (build.HEADER, *build.SOURCES):
        text = path.read_text()
        (folder / path.name).write_text(edit(text) if path.name == name else text)
    patch.setattr(build, "SOURCES", tuple(folder / path.name for path in build.SOURCES))
    patch.setattr(build, "HEADER", folder / build.HEADER.name)


def test_another_source_is_another_library(cache, tmp_path, monkeypatch):
    path = build._built()
    for changed in (build.HEADER, *build.SOURCES):
        with monkeypatch.context() as patch:
            rewrite(patch, tmp_path, changed.name, lambda text: text + "\n// changed\n")
            assert build._built() != path


def test_it_computes_with_torchs_threads_alone(cache):
    """A second OpenMP runtime would keep threads of its own on the same cores."""
    ctypes.CDLL(str(build._built()))
    names = [Path(p).name for p in set(re.findall(r"(/\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE))]
    assert len([n for n in names if re.match(build.RUNTIMES, n)]) == 1


@pytest.mark.parametrize("value", ["off", "0", "OFF"])
def test_the_switch(value, monkeypatch):
    monkeypatch.setenv(build.SWITCH, value)
    assert why() == f"PELLUCID_KERNELS is {value}"


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why() == "there is no C++ compiler 'no-such-compiler'; install g++, or name one in CXX"


def test_a_compiler_that_fails_is_quoted(cache, tmp_path, monkeypatch):
    rewrite(monkeypatch, tmp_path, "experts.cpp", lambda text: "int main( {")
    assert re.search(r"ended with 1: .*error: ", why(), re.DOTALL)
    assert [path.name for path in (cache / "pellucid" / "kernels").iterdir()] == ["lock"]


def test_a_compiler_that_is_no_command_line(cache, monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "')
    assert why() == "CXX is 'g++ \"': No closing quotation"
    monkeypatch.setenv("CXX", "")  # as if it were not set
    assert build._built().exists()


def test_a_home_that_nobody_has(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert "Could not determine home directory" in why() and "XDG_CACHE_HOME" in why()


def test_a_folder_that_others_may_write_to_is_not_trusted(cache):
    folder = build._built().parent
    folder.chmod(0o777)
    assert "others may write there" in why()


def test_a_damaged_library_is_made_again(cache, monkeypatch):
    path = build._built()
    path.write_bytes(b"")
    library, reason = build._loaded.__wrapped__()
    assert library is not None and reason is None and path.stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "right", "wrong", "what"),
    [
        ("kernels.cpp", "fma(all(-8), scale", "fma(all(-7), scale", "products of weights of 4 bits are"),
        ("experts.cpp", "store(to + m.inner, grad * silu)", "store(to + m.inner, grad)", "outputs or gradients of experts are"),
    ],
)  # fmt: skip
def test_a_library_that_computes_wrongly_is_not_used(cache, tmp_path, monkeypatch, name, right, wrong, what):
    rewrite(monkeypatch, tmp_path, name, lambda text: text.replace(right, wrong))
    library, reason = build._loaded.__wrapped__()
    assert library is None and f"computes wrongly here: {what} not torch's" in reason


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, FakeTensorMode, lambda: torch.autocast("cpu"), torch.enable_grad]
)
def test_whoever_asks_first_is_told_the_same(mode):
    with mode():
        assert build._loaded.__wrapped__()[1] is None


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be made" in why() and "XDG_CACHE_HOME" in why()


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
