"""`pellucid plan`: contract, arithmetic, refusals."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pellucid.cli import main
from pellucid.cli.plan import LINKS, plan_facts
from pellucid.config import load_config
from pellucid.train.activations import peak_activation_bytes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SETTINGS = {"model.vocab_size": "8192", "model.num_hidden_layers": "2", "train.micro_batch": "2"}
SMALL = [str(CONFIGS / "small.toml"), *(word for key, value in SETTINGS.items() for word in (f"--{key}", value))]
PARAMETERS = 8192 * 384 + 2 * (384 * (2 * 384 + 2 * 128 + 3 * 1024) + 2 * 384) + 384
BYTES = 4 * PARAMETERS


@pytest.fixture(scope="module")
def on_four_ranks() -> dict[str, Any]:
    return plan_facts(load_config(SMALL[0], SETTINGS), 4, [*LINKS, "25Gbit/s,50us"])


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_json_has_what_the_contract_says_and_the_buffers(capsys):
    facts = planned(capsys, *SMALL, "--world-size", "4", "--link", "25Gbit/s,50us")
    assert set(facts) == {"parameters", "world_size", "modes"}
    assert (facts["parameters"], facts["world_size"]) == (PARAMETERS, 4)
    assert (
        set(facts["modes"]) >= {"ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp"} and "none" not in facts["modes"]
    )
    for mode in facts["modes"].values():
        assert set(mode) == {
            "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes_estimate", "step", "wire_bytes",
            "padding_bytes", "seconds_at", "scratch_bytes",
        }  # fmt: skip
        assert set(mode["seconds_at"]) == {"100Gbit/s", "10Gbit/s", "1Gbit/s", "25Gbit/s,50us"}
        for row in mode["step"]:
            assert set(row) == {"tag", "op", "count", "payload_bytes", "wire_bytes", "dtype"}
        assert mode["wire_bytes"] == sum(row["wire_bytes"] for row in mode["step"])


def test_memory_and_bytes_are_those_of_the_formulas(on_four_ranks):
    modes = on_four_ranks["modes"]
    config = load_config(SMALL[0], SETTINGS)
    scalars = 8 * 16 + 256  # a few numbers, and a byte a parameter tensor
    rows = modes["zero3"]
    held = rows["weights_bytes"] + rows["gradients_bytes"] + rows["optimizer_bytes"]
    assert held == pytest.approx(4 * BYTES / 4, rel=0.01) and 0 < rows["scratch_bytes"] <= 2 * BYTES
    for mode, state in (("ddp", 2 * BYTES), ("torch_ddp", 2 * BYTES), ("zero1", 2 * BYTES / 4)):
        held = modes[mode]
        assert held["weights_bytes"] == BYTES
        assert held["gradients_bytes"] == pytest.approx(BYTES, rel=1e-3)
        assert held["optimizer_bytes"] == pytest.approx(state, rel=1e-3)
        assert held["wire_bytes"] - 1.5 * held["padding_bytes"] == pytest.approx(1.5 * BYTES, abs=2 * scalars)
        assert held["activations_bytes_estimate"] == peak_activation_bytes(config)


def test_muon_keeps_less_than_adamw(capsys):
    adamw, muon = (
        planned(capsys, *SMALL, "--world-size", "2", "--optim.name", name)["modes"]["ddp"]["optimizer_bytes"]
        for name in ("adamw", "muon")
    )
    assert adamw == 2 * BYTES and muon == BYTES + 4 * (8192 * 384 + 5 * 384)  # two tensors for embedding and norms


def test_seconds_are_latency_and_bytes_over_bandwidth(on_four_ranks):
    for mode in on_four_ranks["modes"].values():
        count = sum(row["count"] for row in mode["step"])
        assert mode["seconds_at"]["25Gbit/s,50us"] == pytest.approx(count * 50e-6 + mode["wire_bytes"] * 8 / 25e9)
        assert mode["seconds_at"]["1Gbit/s"] == pytest.approx(mode["wire_bytes"] * 8 / 1e9)
        assert mode["seconds_at"]["1Gbit/s"] == pytest.approx(100 * mode["seconds_at"]["100Gbit/s"])


def test_one_rank_sends_nothing_in_any_mode(capsys):
    modes = planned(capsys, *SMALL, "--world-size", "1")["modes"]
    assert {mode["wire_bytes"] for mode in modes.values()} == {0} and "none" in modes
    assert {mode["optimizer_bytes"] for mode in modes.values()} == {2 * BYTES}


def test_a_batch_that_does_not_divide_is_rounded_up_and_said(capsys):
    assert main(["plan", *SMALL, "--world-size", "3", "--json"]) == 0
    captured = capsys.readouterr()
    assert "train.global_batch 16 is not a multiple of train.micro_batch 2 x 3 ranks" in captured.err
    assert "planned with a global batch of 18" in captured.err
    assert json.loads(captured.out) == planned(capsys, *SMALL, "--world-size", "3", "--train.global_batch", "18")
    assert "--world-size must be at least 1 and at most 1,000,000, got 0" in refused(
        capsys, *SMALL, "--world-size", "0"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "1000000000000"], "--world-size must be at least 1 and at most 1,000,000, got 1000000000000"),
        (["--parallel.mode", "nonsense"], "unknown mode 'nonsense'"),
        (["--train.device", "quantum"], "train.device 'quantum' is unknown"),
        (["--model.max_position_embeddings", "9" * 20], "model.max_position_embeddings must be at most 2,147,483,647"),
        (
            ["--model.max_position_embeddings", "2147483647", "--data.context", "2147483647"],
            "one micro-batch of 2 x 2,147,483,647 tokens has tensors of more bytes than 64 bits count; lower train.micro_batch",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(capsys, words, message):
    assert message in refused(capsys, *SMALL, "--world-size", "2", *words)


def test_a_device_that_is_not_here_can_be_planned_for(capsys):
    assert planned(capsys, *SMALL, "--world-size", "2", "--train.device", "cuda:3")["world_size"] == 2


def test_a_link_that_is_none_is_refused(capsys):
    said = refused(capsys, *SMALL, "--world-size", "4", "--link", "fast")
    assert "--link is 'fast'" in said and "25Gbit/s,50us" in said


def test_the_vocabulary_is_that_of_the_data_where_there_is_data(capsys, data_folder):
    vocab_size = json.loads((data_folder / "index.json").read_text())["vocab_size"]
    facts = planned(capsys, SMALL[0], *SMALL[3:], "--world-size", "2", "--data.path", str(data_folder))
    assert facts["parameters"] == PARAMETERS - (8192 - vocab_size) * 384
    assert main(["plan", SMALL[0], "--world-size", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "planned with a vocabulary of 8,192" in captured.err and "--data.path" in captured.err
    assert json.loads(captured.out)["parameters"] == 12_587_904


def test_the_tables_show_every_mode_in_80_columns(capsys):
    assert main(["plan", *SMALL, "--world-size", "8"]) == 0
    out = capsys.readouterr().out
    assert f"{PARAMETERS:,} parameters, 8 ranks, 4,096 tokens a step: 1 x 2 sequences of 256 on each rank" in out
    for mode in ("ddp", "zero1", "torch_ddp"):
        assert sum(line.split()[:1] == [mode] for line in out.splitlines()) >= 3
    assert max(len(line.rstrip()) for line in out.splitlines()[1:]) <= 80
    (row,) = [line for line in out.splitlines() if line.split()[:3] == ["ddp", "grad/*", "all_reduce"]]
    assert f"{BYTES:,}" in row and f"{2 * 7 * BYTES // 8:,}" in row


def test_8b_on_1024_ranks_is_quick(capsys):
    began = time.process_time()
    facts = planned(capsys, str(CONFIGS / "8b.toml"), "--world-size", "1024")
    assert time.process_time() - began < 10
    assert facts["parameters"] == 8_030_261_248
    zero1 = facts["modes"]["zero1"]
    assert "About 20 GiB of activations" in (CONFIGS / "8b.toml").read_text()
    assert zero1["activations_bytes_estimate"] / 2**30 == pytest.approx(20, abs=0.7)
    assert zero1["optimizer_bytes"] < 2 * zero1["weights_bytes"] / 1000
