"""The re-execution that settles the memory allocator."""

import os
import subprocess
import sys

import pytest

from pellucid.cli import allocator, build_parser

FAULTS = """
import resource, torch
def step():
    for _ in range(5):
        torch.ones(16_000_000).add_(1)  # 61 MiB: glibc maps anything above 32 MiB anew, whatever it has learnt
step()
step()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "LD_PRELOAD"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=clean | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_glibc_told_to_keep_its_memory_stops_faulting():
    as_it_comes = faults()
    if as_it_comes < 1000:
        pytest.skip("huge pages hide the faults here")
    assert faults(**allocator.GLIBC_SETTINGS) < 0.5 * as_it_comes  # the heap may still grow by a block


@pytest.mark.skipif(allocator.find() is None, reason="neither jemalloc nor tcmalloc is installed")
def test_the_library_that_was_found_stops_faulting():
    assert faults(**allocator.environment(allocator.find())) < 20_000


@pytest.mark.parametrize("installed", [True, False])
def test_the_command_is_started_again_once(monkeypatch, installed, tmp_path):
    started = []
    library = tmp_path / "libjemalloc.so.2"
    monkeypatch.setattr(allocator, "find", lambda: library if installed else None)
    monkeypatch.setattr(os, "execve", lambda path, argv, environment: started.append((argv, environment)))
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delenv(allocator.MARK, raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", ["pellucid", "train", "a.toml"])
    allocator.keep_memory()
    ((argv, environment),) = started
    assert argv[1:] == ["-m", "pellucid", "train", "a.toml"]
    assert environment[allocator.MARK] == (library.name if installed else "glibc")
    assert ("LD_PRELOAD" in environment) is installed
    monkeypatch.setenv(allocator.MARK, "none")
    allocator.keep_memory()
    assert len(started) == 1


def test_inference_asks_for_huge_pages_beside_what_the_environment_asks_for(monkeypatch):
    monkeypatch.setattr(allocator, "find", lambda: None)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert "GLIBC_TUNABLES" not in allocator.settings()
    assert allocator.settings(huge_pages=True)["GLIBC_TUNABLES"] == f"glibc.malloc.check=0:{allocator.HUGE_PAGES}"


def test_commands_that_answer_ask_for_huge_pages_and_training_does_not():
    parser = build_parser()
    purposes = {
        words: parser.parse_args(words.split()).allocator
        for words in ("generate M --prompt x", "chat M", "serve M", "bench serve M", "train c.toml")
    }
    assert list(purposes.values()) == ["inference"] * 4 + ["training"]
