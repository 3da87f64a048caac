"""`pellucid bench serve`: the load that was asked for and nothing else is measured, and the figures fit each other."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_models import make_folder, spoil

from pellucid.cli import main
from pellucid.evaluate import roofline

LENGTHS = ["--prompt-tokens", "6:20", "--max-tokens", "3:9"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "small", tokenizer=False)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline.read_bandwidth, "__kwdefaults__", {"size": 2**22})


def bench(model: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["bench", "serve", str(model), "--device", "cpu", "--quiet", "--json", *flags]) == 0
    [line] = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_closed_loop_serves_every_request_in_full_and_the_warm_up_is_not_counted(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(model, capsys, "--requests", "7", "--concurrency", "3", "--seed", "5", *LENGTHS)
    again = bench(model, capsys, "--requests", "7", "--concurrency", "3", "--seed", "5", "--warm-up", "0", *LENGTHS)
    assert (found["requests"], found["completed"], found["failed"]) == (7, 7, 0)
    assert 7 * 6 <= found["prompt_tokens"] <= 7 * 20 and 7 * 3 <= found["output_tokens"] <= 7 * 9
    assert found["prefilled_tokens"] == found["prompt_tokens"] and found["reused_tokens"] == 0
    counts = ("prompt_tokens", "output_tokens", "steps", "prefilled_tokens", "pages_cached", "evictions")
    assert [again[name] for name in counts] == [found[name] for name in counts]
    assert found["output_tokens_per_s"] == pytest.approx(found["output_tokens"] / found["seconds"])
    assert found["requests_per_s"] == found["goodput_requests_per_s"] == pytest.approx(7 / found["seconds"])
    for name in ("ttft_s", "tpot_s", "itl_s", "e2el_s"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"] <= found["seconds"]
    assert found["load"]["concurrency"] == 3 and found["load"]["rate"] is None
    assert found["peak_rss_bytes"] > 2**26 and 0 < found["pages_held_most"] <= found["pages"]


def test_an_open_loop_waits_for_its_arrivals(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(model, capsys, "--requests", "6", "--rate", "20", *LENGTHS)
    assert found["completed"] == 6 and found["load"]["concurrency"] is None
    from pellucid.evaluate.workload import Workload

    arrivals = Workload(requests=6, rate=20.0).arrivals()
    assert arrivals is not None and found["seconds"] > arrivals[-1] - arrivals[0]


def test_prefixes_are_shared_within_groups(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = make_folder(model.parent / "wide", tokenizer=False, max_position_embeddings=256)
    flags = ["--requests", "6", "--concurrency", "2", "--prompt-tokens", "5", "--max-tokens", "2"]
    found = bench(wide, capsys, *flags, "--shared-prefix", "128", "--groups", "2")
    assert found["reused_tokens"] == 4 * 128 and found["prefilled_tokens"] == 2 * 133 + 4 * 5


def test_the_roofline_sees_the_weights_as_they_are(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "2", "--concurrency", "2", "--prompt-tokens", "10", "--max-tokens", "5"]
    whole, half, packed = (
        bench(model, capsys, *flags, *more)["roofline"]
        for more in (["--dtype", "float32"], ["--dtype", "bfloat16"], ["--dtype", "bfloat16", "--weights", "int4"])
    )
    assert whole["weight_bytes_per_step"] == pytest.approx(2 * half["weight_bytes_per_step"], rel=0.001)
    assert packed["weight_bytes_per_step"] < 0.7 * half["weight_bytes_per_step"]
    assert whole["kv_bytes_per_sequence"] == 2 * half["kv_bytes_per_sequence"]
    # four steps of two sequences, which see 11 to 14 tokens
    assert (half["mean_batch"], half["mean_context"]) == (2, 12.5)
    assert half["kv_bytes_per_sequence"] == 2 * (2 * 2 * 8) * 12.5 * 2
    per_token = half["weight_bytes_per_step"] / 2 + half["kv_bytes_per_sequence"]
    assert half["bytes_per_token"] == pytest.approx(per_token)
    fastest = max(half["read_gb_per_s"].values()) * 1e9
    assert half["share"] == pytest.approx(half["tokens_per_s"] * per_token / fastest)
    assert "1" in half["read_gb_per_s"]


def test_limits_decide_what_is_good(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "3", "--concurrency", "1", *LENGTHS]
    generous = bench(model, capsys, *flags, "--ttft-limit", "60", "--tpot-limit", "60", "--e2el-limit", "60")
    strict = bench(model, capsys, *flags, "--ttft-limit", "60", "--tpot-limit", "1e-9")
    assert generous["goodput_requests_per_s"] == generous["requests_per_s"] > 0
    assert strict["goodput_requests_per_s"] == 0 and strict["completed"] == 3
    assert strict["limits"] == {"ttft_s": 60.0, "tpot_s": 1e-9, "e2el_s": None}


def test_the_table_says_the_same_in_words(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--requests", "4", "--concurrency", "2", "--speculate", "2", "--ttft-limit", "60", "--fast"]
    assert main(["bench", "serve", str(model), "--device", "cpu", *flags, *LENGTHS]) == 0
    captured = capsys.readouterr()
    table = {line[:20].strip(): line[21:] for line in captured.out.splitlines()}
    assert table["requests"].startswith("4 completed, 0 failed")
    assert table["goodput"].endswith("within TTFT 60 s")
    assert "mean" in table["TPOT, ms"] and "p99" in table["ITL, ms"]
    assert "MBU" in table["so at most"] and "GB/s with 1 thread" in table["memory gives"]
    assert "4 of 4 requests" in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--requests", "0"], "requests must be at least 1, got 0"),
        (["--concurrency", "0"], "concurrency must be at least 1, got 0"),
        (["--rate", "-1"], "rate must be finite and at least 0.001, got -1.0"),
        (["--rate", "1e-300"], "rate must be finite and at least 0.001, got 1e-300"),
        (["--requests", "1000000000000"], "requests must be at most 100000, got 1000000000000"),
        (["--concurrency", "1000000000000"], "concurrency must be at most 100000, got 1000000000000"),
        (["--prompt-tokens", "9:3"], "prompt_tokens must be two lengths"),
        (["--groups", "2"], "groups 2 differ in their shared_prefix"),
        (["--ttft-limit", "0"], "the limit ttft_s must be above 0"),
        (["--warm-up", "-1"], "--warm-up must be in [0, 100000], got -1"),
        (["--warm-up", "1000000000000"], "--warm-up must be in [0, 100000], got 1000000000000"),
        (["--prompt-tokens", "64"], "a prompt has up to 64 tokens and the model's window is 64; lower --prompt-tokens"),
        (["--prompt-tokens", f"9:{10**30}"], "tokens and the model's window is 64; lower --prompt-tokens"),
        (["--prompt-tokens", "9", "--shared-prefix", str(10**12)], "a prompt has up to 1,000,000,000,009 tokens and"),
        (["--kv-gb", "0", "--prompt-tokens", "9"], "kv_gb 0.0 has no room"),
        (["--prompt-tokens", "40", "--max-tokens", "25"], "ends after 24 of 25 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["bench", "serve", str(model), "--device", "cpu", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


@pytest.mark.parametrize(
    "flags", [["--rate", "1", "--concurrency", "2"], ["--max-tokens", "many"], ["--weights", "int2"]]
)
def test_flags_that_make_no_sense_end_with_2(model: Path, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", str(model), *flags])
    assert ended.value.code == 2


def test_a_model_that_fails_ends_with_1_and_says_why(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = spoil(make_folder(model.parent / "broken", tokenizer=False))
    flags = ["--device", "cpu", "--requests", "2", "--concurrency", "1", "--quiet", "--json", *LENGTHS]
    assert main(["bench", "serve", str(broken), *flags]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["completed"], found["failed"], found["ttft_s"], found["roofline"]) == (0, 2, None, None)
    assert "request 0 failed: the model's logits are not finite" in captured.err
