"""The report comes out of any run, says what the files say, and is one page that needs nothing else."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page

from pellucid.errors import DataError, StorageError
from pellucid.report import build_report
from pellucid.report.chart import Chart, Curve, ticks
from pellucid.report.files import read_samples
from pellucid.report.metrics import MAX_POINTS, Series, means, read_log, thin
from pellucid.report.page import embedded
from pellucid.report.report import charts, final_numbers

ATTACK = "</script><script>alert('x')</script><img src=x onerror=alert(1)> & \"quotes\" ]]>"


def step(number: int, **values: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "step": number,
        "epoch": 0,
        "tokens": number * 100,
        "loss": 3.0 / number,
        "lr": 1e-3,
    } | values


def write_log(run: Path, *events: dict[str, Any] | str) -> None:
    lines = [event if isinstance(event, str) else json.dumps(event) + "\n" for event in events]
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def page_of(run: Path) -> Page:
    return Page(build_report(run).read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A whole run, every text of which tries to break out of the page."""
    folder = tmp_path / "run <b> & 1"
    (folder / "model").mkdir(parents=True)
    events: list[dict[str, Any] | str] = []
    for i in range(1, 41):
        events.append(step(i, grad_norm=1.0 + i % 3, seconds=0.5, tokens_per_s=200.0 + i))
        if i % 10 == 0:
            events.append({"event": "validation", "step": i, "loss": 2.0 + abs(i - 30) / 10, "tokens": 50})
            events.append({"event": "save", "step": i, "path": ATTACK})
    write_log(folder, *events)
    samples = [
        {"kind": "story", "prompt": "Once", "text": ATTACK, "verdict": True},
        {"kind": ATTACK, "prompt": ATTACK, "text": "bad one", "verdict": False},
        {"kind": "chat", "prompt": [{"role": "user", "content": "Who?"}], "text": "Milo.", "verdict": "odd " + ATTACK},
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples), encoding="utf-8")
    (folder / "evaluation.json").write_text(json.dumps({"loss": 1.25, "tasks": {ATTACK: {"acc": 0.5, "n": 2000}}}))
    (folder / "config.toml").write_text(f"# {ATTACK}\n[train]\nsteps = 50\n", encoding="utf-8")
    (folder / "model" / "config.json").write_text(json.dumps({"hidden_size": 384, "note": ATTACK}))
    (folder / "model" / "README.md").write_text(f"# A card\n{ATTACK}\n")
    header = json.dumps({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [60, 64]},
    }).encode()  # fmt: skip
    (folder / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    return folder


def test_the_page_parses_and_lies_in_the_run(run: Path) -> None:
    path = build_report(run)
    assert path == run / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert page.tags[0][0] == "html" and ("title", {}) in page.tags


def test_the_page_needs_nothing_from_outside(run: Path) -> None:
    text = build_report(run).read_text(encoding="utf-8")
    assert not re.search(r"(https?:)?//\w+\.\w+|@import|url\((?!#)", text)
    page = Page(text)
    for tag, attributes in page.tags:
        assert "src" not in attributes
        for key in ("href", "action", "data", "xlink:href"):
            assert (attributes.get(key) or "data:,") == "data:,", f"<{tag} {key}>"
        assert tag not in ("iframe", "object", "embed", "base", "form")
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in (policy or "")


def test_text_of_the_run_never_becomes_markup(run: Path) -> None:
    page = page_of(run)
    assert len([1 for tag, _ in page.tags if tag == "script"]) == 2  # the data and the page's own
    assert all(tag not in ("img", "b") or attributes == {} for tag, attributes in page.tags)
    assert not [1 for tag, _ in page.tags if tag == "img"]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    for place in (ATTACK, "odd " + ATTACK, "run <b> & 1", f"# {ATTACK}"):
        assert page.says(place), place
    assert not any("alert(" in text for text in page.scripts)


def test_embedded_data_cannot_end_its_script() -> None:
    text = embedded(ATTACK)
    assert not set("<>&") & set(text)
    assert json.loads(text) == ATTACK


def test_a_verdict_may_be_a_word_with_ok_for_yes(tmp_path: Path) -> None:
    verdicts = [True, "ok", False, "the name changes", None]
    lines = [json.dumps({"kind": "story", "prompt": None, "text": "t", "verdict": verdict}) for verdict in verdicts]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    samples, total = read_samples(tmp_path / "samples.jsonl")
    assert total == 5
    assert [sample.verdict for sample in samples] == ["passes", "ok", "fails", "the name changes", ""]
    assert [sample.good for sample in samples] == [True, True, False, False, None]
    assert {sample.prompt for sample in samples} == {""}


def test_it_shows_the_numbers_of_the_run(run: Path) -> None:
    page = page_of(run)
    losses = [3.0 / i for i in range(1, 41)]
    for text in (
        f"{sum(losses) / 40:.4f}",  # training loss
        "3.0000", "best 2.0000 at step 30",  # validation
        f"{math.e**3:,.4g}",
        "4k", "4,000",  # tokens
        "220/s", "20.0 s", "of 50",
        "passes", "fails", "1 of 3 pass", "user: Who?",
        "1.25", "2,000",  # evaluation
        "16", "64 B", "384",  # 3 * 5 + 1 parameters
        "step 40",
    ):  # fmt: skip
        assert page.says(text), text


def test_each_curve_is_drawn_with_and_without_scripts(run: Path) -> None:
    text = build_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert [chart["id"] for chart in page.data()] == ["loss", "validation", "lr", "grad_norm", "tokens_per_s"]
    assert text.count("<polyline") == 6 + 1  # loss holds two; one more in the script that draws them anew
    curves = {c["name"]: c["points"] for c in page.data()[0]["curves"]}
    assert curves["training"][0] == [1, 3.0] and curves["training"][-1] == [40, 0.075]
    assert curves["validation"] == [[10, 4.0], [20, 3.0], [30, 2.0], [40, 3.0]]


def test_a_mixture_of_experts_has_charts_of_its_own_and_other_runs_have_not(tmp_path: Path) -> None:
    titles = ["Balancing loss of the experts", "Entropy of the router", "Busiest expert", "Experts without a token"]
    router = {"router_loss": 0.012, "router_entropy": 1.75, "router_load": 2.0, "router_dead": 0}
    write_log(tmp_path, *(step(i, **router | {"router_load": 2.0 / i}) for i in range(1, 5)))
    text = " ".join(page_of(tmp_path).texts)
    assert all(title in text for title in titles) and "times an equal share" in text
    write_log(tmp_path, *(step(i) for i in range(1, 5)))
    assert not [title for title in titles if title in " ".join(page_of(tmp_path).texts)]


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert page.says("No step of training")
    assert page.data() == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "evaluation.json", "config.toml", "model"])
def test_any_one_file_may_be_missing(run: Path, name: str) -> None:
    path = run / name
    for inner in sorted(path.rglob("*"), reverse=True) if path.is_dir() else [path]:
        inner.unlink()
    page_of(run)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "evaluation.json", "config.toml", "model/config.json"]
)
@pytest.mark.parametrize("junk", [b"\xff\x00\xfe{]", b"[1, 2]\n", b"", b"null", b'{"event": "step"}\n', b"[" * 100_000])
def test_any_one_file_may_be_junk(run: Path, name: str, junk: bytes) -> None:
    (run / name).write_bytes(junk)
    page_of(run)


def test_weights_that_are_junk_cost_only_their_count(run: Path) -> None:
    for junk in (b"", b"\x01", (2**60).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"{]"):
        (run / "model" / "model.safetensors").write_bytes(junk)
        assert page_of(run).says("384")


def test_a_last_line_cut_short_by_a_kill_is_no_fault(tmp_path: Path) -> None:
    write_log(tmp_path, step(1), step(2), '{"event": "step", "st')
    log = read_log(tmp_path / "metrics.jsonl")
    assert [event["step"] for event in log.steps] == [1, 2]
    assert log.bad_lines == []
    assert not page_of(tmp_path).says("broken")


def test_broken_lines_in_the_middle_are_counted_out_loud(tmp_path: Path) -> None:
    write_log(tmp_path, step(1), "{oops\n", "7\n", "\n", '{"event": "step"}\n', step(2))
    log = read_log(tmp_path / "metrics.jsonl")
    assert [event["step"] for event in log.steps] == [1, 2]
    assert log.bad_lines == [2, 3, 5]
    assert page_of(tmp_path).says("metrics.jsonl: 3 broken, line 2, 3, 5.")


def test_events_of_another_kind_are_no_fault(tmp_path: Path) -> None:
    write_log(
        tmp_path,
        step(1),
        {"event": "hash", "step": 1, "sha256": "0"},
        {"event": "gradients", "step": 1, "parameters": {}},
    )
    log = read_log(tmp_path / "metrics.jsonl")
    assert (len(log.steps), log.bad_lines) == (1, [])


def test_a_step_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    write_log(
        tmp_path,
        step(1), step(2), step(3, loss=9.0), {"event": "validation", "step": 3, "loss": 9.0, "tokens": 1},
        step(2, loss=0.2), step(3, loss=0.3), {"event": "validation", "step": 3, "loss": 0.5, "tokens": 1},
    )  # fmt: skip
    log = read_log(tmp_path / "metrics.jsonl")
    assert log.series("loss").values == [3.0, 0.2, 0.3]
    assert (log.validation().steps, log.validation().values) == ([3], [0.5])


def test_a_save_logged_late_does_not_erase_steps(tmp_path: Path) -> None:
    write_log(tmp_path, step(1), step(2), {"event": "save", "step": 1, "path": "x"}, step(3))
    log = read_log(tmp_path / "metrics.jsonl")
    assert ([e["step"] for e in log.steps], [e["step"] for e in log.saves]) == ([1, 2, 3], [1])


@pytest.mark.parametrize("spelling", ["nan", "NaN", "inf", "-inf", "Infinity"])
def test_non_finite_numbers_are_reported_and_do_not_break_the_curve(tmp_path: Path, spelling: str) -> None:
    write_log(tmp_path, step(1), step(2, loss=spelling, grad_norm=spelling), step(3))
    page = page_of(tmp_path)
    assert page.says(f"Loss: 1 non-finite, the first {float(spelling)} at step 2.")
    (training, _) = page.data()[0]["curves"]
    assert [x for x, _ in training["points"]] == [1, 3]
    assert training["odd"] == [[2, str(float(spelling))]]


def test_a_run_that_never_had_a_finite_loss_still_reports(tmp_path: Path) -> None:
    write_log(tmp_path, step(1, loss="nan"))
    assert page_of(tmp_path).says("Loss: 1 non-finite")


def test_unknown_values_are_absent_not_zero(tmp_path: Path) -> None:
    write_log(
        tmp_path, {"event": "step", "step": 1, "loss": 2.0}, {"event": "step", "step": 2, "loss": True, "lr": None}
    )
    log = read_log(tmp_path / "metrics.jsonl")
    assert final_numbers(log) == {"step": 2, "loss": 2.0}
    assert final_numbers(read_log(tmp_path / "absent.jsonl")) == {}


def test_training_time_covers_the_steps_that_were_not_logged(tmp_path: Path) -> None:
    write_log(tmp_path, step(10, seconds=2.0), step(20, seconds=4.0))
    assert final_numbers(read_log(tmp_path / "metrics.jsonl"))["seconds"] == 60.0


# -- thinning ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), max_size=400), st.integers(4, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float], limit: int) -> None:
    series = Series(list(range(1, len(values) + 1)), values)
    kept = thin(series, limit)
    assert len(kept) <= limit
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert all(values[x - 1] == y for x, y in kept)
    if values:
        assert (kept[0], kept[-1]) == ((1, values[0]), (len(values), values[-1]))
        assert (min(y for _, y in kept), max(y for _, y in kept)) == (min(values), max(values))
    if len(values) <= limit:
        assert len(kept) == len(values)


def test_a_spike_of_one_step_among_a_hundred_thousand_is_seen(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for i in range(1, 100_001):
            loss = 80.0 if i == 77_777 else 0.001 if i == 33_333 else 2.0 + (i % 7) / 10
            file.write(f'{{"event": "step", "step": {i}, "tokens": {i}, "loss": {loss}}}\n')
    page = page_of(tmp_path)
    points = page.data()[0]["curves"][0]["points"]
    assert MAX_POINTS / 4 < len(points) <= MAX_POINTS
    assert [77_777, 80.0] in points and [33_333, 0.001] in points
    assert points[0][0] == 1 and points[-1][0] == 100_000
    assert len([x for x, _ in points if x <= 1000]) > 200  # a logarithmic axis has something to show
    assert (tmp_path / "report.html").stat().st_size < 400_000


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300), st.integers(1, 50))
def test_means_stand_for_every_value(values: list[float], limit: int) -> None:
    got = means(Series(list(range(len(values))), values), limit)
    assert len(got) <= limit and got[-1][0] == len(values) - 1
    sizes = [b - a for a, b in zip([-1, *(x for x, _ in got)], [x for x, _ in got], strict=False)]
    assert math.isclose(sum(n * y for n, (_, y) in zip(sizes, got, strict=True)), sum(values), abs_tol=1e-6)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_few_and_inside(low: float, length: float) -> None:
    high = low + length
    if high - low < 1e-6 * max(1.0, abs(low)):
        return
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert all(low - length * 1e-6 <= tick <= high + length * 1e-6 for tick in found)


@pytest.mark.parametrize("value", [0.0, 2.5, -3.0, 1e-12])
def test_a_curve_of_one_value_is_drawn(value: float) -> None:
    for steps in ([5], [5, 6, 7]):
        svg = Chart("x", "<t>", "", (Curve("c", Series(steps, [value] * len(steps))),)).svg()
        assert "nan" not in svg and "<polyline" in svg and "&lt;t&gt;" in svg


# -- writing -------------------------------------------------------------------------------------------------


def test_an_older_report_is_replaced_and_nothing_else_is_left(run: Path) -> None:
    (run / "report.html").write_text("old")
    before = {path.name for path in run.iterdir()}
    build_report(run)
    assert (run / "report.html").read_text() != "old"
    assert {path.name for path in run.iterdir()} == before


def test_a_failed_write_keeps_the_older_report(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "report.html").write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        build_report(run)
    assert (run / "report.html").read_text() == "old"
    assert not list(run.glob(".report*"))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such run folder"):
        build_report(tmp_path / "absent")


def test_a_checkpoint_stands_in_for_a_model_that_is_not_there_yet(tmp_path: Path) -> None:
    for name, size, complete in [("step_00000100", 1, True), ("step_00000200", 2, True), ("step_00000300", 3, False)]:
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"hidden_size": size}))
        if complete:
            (folder / "manifest.json").write_text("{}")
    assert page_of(tmp_path).says("checkpoints/step_00000200")


def test_reading_a_run_does_not_load_torch(run: Path) -> None:
    script = f"import sys\nfrom pellucid.report import build_report\nbuild_report({str(run)!r})\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_what_a_strategy_measures_is_drawn_and_its_loss_is_one_of_pairs(tmp_path: Path) -> None:
    events = [
        step(1, pairs=4, margin=0.1, supervised=0.5),
        {"event": "validation", "step": 1, "loss": 0.69, "pairs": 9, "margin": 0.05},
        step(2, pairs=4, margin=0.2, supervised=0.5),
    ]
    write_log(tmp_path, *events)
    drawn = {chart.id: chart for chart in charts(read_log(tmp_path / "metrics.jsonl"))}
    assert list(drawn) == ["loss", "validation", "lr", "metric_margin", "metric_supervised"]
    assert drawn["loss"].unit == "nats per pair"
    training, validation = drawn["metric_margin"].curves
    assert training.series.values == [0.1, 0.2] and validation.series.values == [0.05]
    assert "perplexity" not in build_report(tmp_path).read_text(encoding="utf-8")


def test_the_last_samples_are_shown(tmp_path: Path) -> None:
    lines = [json.dumps({"step": i, "kind": f"step {i}", "prompt": "a", "text": str(i)}) for i in range(130)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    samples, total = read_samples(tmp_path / "samples.jsonl")
    assert total == 130 and [s.text for s in samples] == [str(i) for i in range(30, 130)]
