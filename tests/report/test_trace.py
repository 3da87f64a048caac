"""The trace shows the step that was asked for, adds its times and bytes up rightly, and is one page that needs nothing else."""

import io
import json
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import BUCKETS, Line, make_run, plan, step_lines, write_lines
from pages import Page

from pellucid.errors import DataError, StorageError
from pellucid.report.trace import Trace, build_trace, print_summary, print_trace, read_trace
from pellucid.report.trace_events import trace_events
from pellucid.report.trace_ledger import LedgerFile
from pellucid.report.trace_step import format_time, length, parts, stacked, standstill, totals

ATTACK = "</script><script>alert('x')</script><img src=x onerror=alert(1)> & \"quotes\""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def change(run: Path, rank: int, step: int, which: str, /, **values: Any) -> None:
    """Put other values into the lines of a tag in one rank's step; ``drop=True`` leaves them out."""
    path = run / "ledger" / f"rank{rank:05d}.jsonl"
    changed = []
    for line in lines_of(path):
        if line["step"] == step and line["tag"] == which:
            if values.get("drop"):
                continue
            line |= values
        changed.append(line)
    write_lines(path, changed)


def by_tag(trace: Trace) -> dict[str, dict[str, Any]]:
    return {row["tag"]: row for row in trace.summary["bytes"]}


# -- which step ----------------------------------------------------------------------------------------------


def test_the_step_shown_is_the_ordinary_one_of_median_duration(run: Path) -> None:
    durations = {}
    for step in (7, 8, 9, 11, 12):  # 5 and 10 have a validation and a save
        events, spans = step_lines(step, 0, 2)
        durations[step] = max([e["t_done"] for e in events] + [s["t_end"] for s in spans])
    want = sorted(durations, key=durations.__getitem__)[2]
    trace = read_trace(run)
    assert trace.step == want and trace.recorded == (0, 12)
    assert totals(trace.ranks[0]).step_s == pytest.approx(durations[want])


def test_a_step_that_was_asked_for_is_read_from_every_rank(run: Path) -> None:
    for step in (0, 1, 5, 12):
        trace = read_trace(run, step)
        assert [rank.rank for rank in trace.ranks] == [0, 1]
        for rank in trace.ranks:
            events, spans = step_lines(step, rank.rank, 2, slow=1 + 0.08 * rank.rank)
            assert [(e.tag, e.t_issue, e.t_done) for e in rank.collectives] == [
                (e["tag"], e["t_issue"], e["t_done"]) for e in events
            ]
            assert [(s.phase, s.micro) for s in rank.spans] == [(s["phase"], s["micro"]) for s in spans]


def test_a_step_that_is_not_there_is_refused_with_what_is(run: Path) -> None:
    with pytest.raises(DataError, match="no step 13 in its ledger; steps 0 to 12 are recorded"):
        read_trace(run, 13)


def test_a_run_without_a_ledger_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no ledger; it was trained with parallel\.mode none or with parallel\.ledger"
    ):
        read_trace(tmp_path)
    with pytest.raises(DataError, match="no such run folder"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "ledger").mkdir()
    with pytest.raises(DataError, match="holds no step yet"):
        read_trace(tmp_path)


def test_a_torn_last_line_is_left_out_and_its_step_is_not_typical(run: Path, tmp_path: Path) -> None:
    path = run / "ledger" / "rank00000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1].replace(b'"step": 12', b'"step": 13')[:40])
    assert len(read_trace(run, 12).ranks[0].collectives) == 8
    path.write_bytes(whole[:-30])
    assert len(read_trace(run, 12).ranks[0].collectives) == 7
    short = make_run(tmp_path / "short", steps=1)
    assert read_trace(short).step == 1
    path = short / "ledger" / "rank00001.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert read_trace(short).step == 0


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"\x00\x00garbage", "no JSON"),
        (b"[1]", "no JSON object"),
        (b'{"tag": "x"}', '"step" is no whole number'),
        (b'{"step": 7, "micro": 0, "op": "all_reduce", "tag": 5, "owner": []}', '"tag" is no text'),
        (b'{"step": 7, "micro": 0, "op": "a", "tag": "b", "owner": "w"}', '"owner" is no list of names'),
    ],
)
def test_a_damaged_line_is_named(run: Path, line: bytes, why: str) -> None:
    path = run / "ledger" / "rank00001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(i for i, text in enumerate(lines) if b'"step": 7' in text) + 2
    lines[number - 1] = line + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError) as caught:
        read_trace(run, 7)
    assert f"{path}:{number} is damaged ({why})" in str(caught.value)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(-1, 10), st.randoms())
def test_bisection_finds_what_a_scan_finds(steps: list[int], wanted: int, chance: random.Random) -> None:
    steps.sort()
    file = LedgerFile(Path("nowhere"))
    text = b"".join(json.dumps({"step": s, "pad": "x" * chance.randrange(60)}).encode() + b"\n" for s in steps)
    file._file, file._size = io.BytesIO(text + b'{"torn'), len(text) + 6
    assert [r["step"] for r in file.read(wanted, dict)] == [s for s in steps if s == wanted]
    assert list(file.steps_back()) == sorted(set(steps), reverse=True)
    assert file.first_step() == (steps[0] if steps else None)


def test_a_long_ledger_is_not_loaded_to_show_a_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    path = run / "ledger" / "rank00000.jsonl"
    one = [json.dumps(line) for line in step_lines(3, 0, 2)[0]]
    with path.open("w") as file:
        for step in range(1, 4001):
            file.writelines(text.replace('"step": 3', f'"step": {step}') + "\n" for text in one)
    assert path.stat().st_size > 10_000_000
    tracemalloc.start()
    trace = read_trace(run, 2500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.ranks[0].collectives) == 8 and trace.recorded == (0, 4000)
    assert peak < 500_000


def test_ranks_left_behind_by_a_larger_world_do_not_choose_the_step(run: Path) -> None:
    for kind, lines in zip(("rank", "phases"), step_lines(2, 7, 8), strict=True):
        write_lines(run / "ledger" / f"{kind}00007.jsonl", lines)
    assert read_trace(run).step > 6
    old = read_trace(run, 2)
    assert [rank.rank for rank in old.ranks] == [0, 1, 7]
    assert any("prediction is for 2 ranks" in note for note in old.notes)


# -- times ---------------------------------------------------------------------------------------------------


def test_exposed_and_hidden_time_equal_those_of_a_fine_grid(run: Path) -> None:
    for step in (3, 5):
        for rank in read_trace(run, step).ranks:
            events, _ = step_lines(step, rank.rank, 2, slow=1 + 0.08 * rank.rank)
            grid = 5_000
            end = max(e["t_done"] for e in events)
            at = [(i + 0.5) * end / grid for i in range(grid)]
            under_way = [any(e["t_issue"] <= t < e["t_done"] for e in events) for t in at]
            still = [any(max(e["t_wait"], e["t_issue"]) <= t < e["t_done"] for e in events) for t in at]
            sums = totals(rank)
            assert sums.communication_s == pytest.approx(sum(under_way) * end / grid, abs=4e-4)
            assert sums.exposed_s == pytest.approx(sum(still) * end / grid, abs=4e-4)
            assert sums.hidden_s == pytest.approx(sums.communication_s - sums.exposed_s)
            assert sums.exposed_share == pytest.approx(sum(still) / sum(under_way), abs=0.01)
            assert 0 < sums.exposed_s < sums.communication_s


def test_overlapping_waits_count_once(run: Path) -> None:
    before = read_trace(run, 3).ranks[0]
    (third,) = [event for event in before.collectives if event.tag == "grad/bucket3"]
    assert third.exposed[1] > third.exposed[0]
    change(run, 0, 3, "grad/bucket4", t_wait=third.t_wait)
    after = read_trace(run, 3).ranks[0]
    each = sum(end - begin for begin, end in (event.exposed for event in after.collectives))
    assert totals(after).exposed_s == pytest.approx(totals(before).exposed_s) and each > totals(after).exposed_s * 1.1
    assert length([(0, 4), (1, 2), (3, 5), (7, 7), (9, 8)]) == 5


def test_what_was_done_before_it_was_waited_for_was_hidden(run: Path) -> None:
    (event,) = [e for e in read_trace(run, 3).ranks[0].collectives if e.tag == "grad/bucket0"]
    assert event.t_wait > event.t_done and event.exposed[0] == event.exposed[1] == event.t_done


def test_hidden_parts_of_all_bars_cover_the_hidden_time(run: Path) -> None:
    for rank in read_trace(run, 3).ranks:
        still = standstill(rank)
        cut = [part for event in rank.collectives for part in parts(event, still)]
        sums = totals(rank)
        assert length(i for kind, i in cut if kind == "hidden") == pytest.approx(sums.hidden_s)
        assert length(i for kind, i in cut if kind != "hidden") == pytest.approx(sums.exposed_s)
        for event in rank.collectives:
            pieces = [i for _, i in parts(event, still)]
            assert pieces[0][0] == event.life[0] and pieces[-1][1] == event.life[1]
            assert all(a[1] == b[0] for a, b in pairwise(pieces))


def test_the_worst_rank_stands_for_all(run: Path) -> None:
    summary = read_trace(run).summary
    assert summary["exposed_share"] == max(rank["exposed_share"] for rank in summary["ranks"])
    assert {rank["rank"] for rank in summary["ranks"]} == {0, 1}


def test_a_collective_that_nobody_waited_for_is_counted_and_named(run: Path) -> None:
    before = totals(read_trace(run, 3).ranks[0])
    change(run, 0, 3, "grad/bucket4", t_wait=0.0, t_done=0.0)
    trace = read_trace(run, 3)
    after = totals(trace.ranks[0])
    assert after.wire_bytes == before.wire_bytes and after.communication_s < before.communication_s
    assert any("1 collectives" in note for note in trace.notes)


def test_a_rank_that_sent_nothing_has_no_exposed_share(run: Path) -> None:
    for path in (run / "ledger").glob("rank*.jsonl"):
        path.write_text("")
    trace = read_trace(run)
    assert trace.summary["exposed_share"] == 0.0 and trace.summary["ranks"][0]["bytes_per_s"] == 0.0
    build_trace(trace)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (min(p), max(p))), max_size=12))
def test_bars_in_a_row_do_not_overlap_and_rows_are_as_few_as_can_be(intervals: list[tuple[int, int]]) -> None:
    rows = stacked(intervals)
    for i, a in enumerate(intervals):
        for j in range(i):
            if rows[i] == rows[j]:
                assert a[1] <= intervals[j][0] or intervals[j][1] <= a[0]
    if intervals and all(begin < end for begin, end in intervals):
        deepest = max(sum(begin <= t < end for begin, end in intervals) for t in range(21))
        assert max(rows) + 1 == deepest


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_what_moves_as_planned_matches(tmp_path: Path, mode: str) -> None:
    trace = read_trace(make_run(tmp_path / "run", mode=mode))
    assert trace.summary["bytes_match"] is True
    rows = by_tag(trace)
    assert set(rows) == {row["tag"] for row in plan(2, mode)["step"]}
    assert rows["grad/bucket1"]["predicted"]["payload_bytes"] == 4 * (4 * 64 * 64 + 3 * 160 * 64)


@pytest.mark.parametrize(
    "values",
    [{"payload_bytes": 188_420}, {"wire_bytes": 1}, {"dtype": "bfloat16"}, {"drop": True}, {"op": "all_gather"}],
)
def test_one_rank_that_differs_is_found(run: Path, values: dict[str, Any]) -> None:
    change(run, 1, 3, "grad/bucket2", **values)
    trace = read_trace(run, 3)
    assert trace.summary["bytes_match"] is False
    assert {row["tag"] for row in trace.summary["bytes"] if row["matches"] is False} == {"grad/bucket2"}
    assert read_trace(run, 4).summary["bytes_match"] is True


def test_parameters_that_travel_unforeseen_differ_and_a_validation_does_not(run: Path) -> None:
    rows = by_tag(read_trace(run, 5))
    assert rows["validation"]["matches"] is None and rows["save/state"]["matches"] is None
    assert read_trace(run, 5).summary["bytes_match"] is True
    change(run, 0, 5, "save/state", tag="param/bucket9", owner=["w"])
    assert by_tag(read_trace(run, 5))["param/bucket9"]["matches"] is False


def test_a_row_of_the_plan_may_stand_for_all_tags_below_it(run: Path) -> None:
    table = plan(2)
    small = [row for row in table["step"] if not row["tag"].startswith("grad/")]
    sums = {
        key: sum(r[key] for r in table["step"] if r["tag"].startswith("grad/"))
        for key in ("payload_bytes", "wire_bytes")
    }
    table["step"] = [*small, {"tag": "grad", "op": "all_reduce", "count": 3, "dtype": "float32", **sums}]
    (run / "ledger" / "plan.json").write_text(json.dumps(table))
    trace = read_trace(run, 3)
    assert trace.summary["bytes_match"] is True
    assert by_tag(trace)["grad"]["recorded"][0]["count"] == 5
    change(run, 0, 3, "grad/bucket2", payload_bytes=8)
    assert read_trace(run, 3).summary["bytes_match"] is False


def test_nothing_is_compared_before_the_first_step_or_without_a_plan(run: Path) -> None:
    assert read_trace(run, 0).summary["bytes_match"] is None
    for text in ("", "{}", '{"mode": "ddp", "world_size": 2, "step": [{"tag": "x"}]}'):
        (run / "ledger" / "plan.json").write_text(text)
        trace = read_trace(run)
        assert trace.plan is None and trace.summary["bytes_match"] is None
        assert any("no prediction" in note for note in trace.notes)
        build_trace(trace)


# -- trace.json ----------------------------------------------------------------------------------------------


def test_the_events_are_what_perfetto_reads(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", mode="zero1")
    trace = read_trace(run)
    table = json.loads(build_trace(trace)[1].read_text())
    events = table["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    for rank in (0, 1):
        assert {(rank, name) for name in (f"rank {rank}", "forward", "backward", "communication", "optimizer")} <= names
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X") and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0 and event["name"] and isinstance(event["args"], dict)
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"} >= set(threads)
    for slices in threads.values():  # two slices of a thread lie apart or one in the other
        for i, a in enumerate(slices):
            for b in slices[:i]:
                low, high = sorted(((a["ts"], a["ts"] + a["dur"]), (b["ts"], b["ts"] + b["dur"])))
                assert low[1] <= high[0] + 1e-3 or high[1] <= low[1] + 1e-3 or low[0] == high[0]
    sent = [e for e in events if e["name"] == "grad/bucket1"]
    want = [e for rank in trace.ranks for e in rank.collectives if e.tag == "grad/bucket1"]
    assert [round(e["ts"] / 1e6, 7) for e in sent] == [e.t_issue for e in want]
    assert [round((e["ts"] + e["dur"]) / 1e6, 7) for e in sent] == [e.t_done for e in want]


def test_every_rank_is_in_the_events_however_many(tmp_path: Path) -> None:
    trace = read_trace(make_run(tmp_path / "run", world=11, steps=2))
    assert {event["pid"] for event in trace_events(trace.ranks)["traceEvents"]} == set(range(11))
    page = Page(build_trace(trace)[0].read_text())
    assert page.count("svg", "lanes") == 8
    assert page.says("of the 11 that recorded this step")


# -- trace.html ----------------------------------------------------------------------------------------------


def page_of(run: Path, step: int | None = None) -> Page:
    return Page(build_trace(read_trace(run, step))[0].read_text(encoding="utf-8"))


def test_the_page_has_a_bar_for_everything_that_was_recorded(run: Path) -> None:
    page, trace = page_of(run, 3), read_trace(run, 3)
    collectives = sum(len(rank.collectives) for rank in trace.ranks)
    assert page.count("svg", "lanes") == 2
    assert page.count("g", "communication") == collectives == 16
    assert page.count("g", "forward") == page.count("g", "backward") == 8 and page.count("g", "optimizer") == 2
    bars = page.data()["bars"]
    drawn = [int(attrs["data-i"] or "") for tag, attrs in page.tags if tag == "g" and "data-i" in attrs]
    assert drawn == list(range(len(bars)))
    for bar in bars:
        if "tag" in bar:
            assert bar["hidden"] + bar["behind"] + bar["exposed"] == pytest.approx(bar["end"] - bar["begin"])


def test_bars_stand_where_and_as_long_as_they_lasted(run: Path) -> None:
    page, rank = page_of(run, 3), read_trace(run, 3).ranks[0]
    end = max(one.end for one in read_trace(run, 3).ranks)
    works = [attrs for tag, attrs in page.tags if tag == "rect" and attrs.get("class") == "work"]
    for span, attrs in zip([s for s in rank.spans if s.phase == "forward"], works[:4], strict=True):
        assert float((attrs["x"] or "").rstrip("%")) / 100 * end == pytest.approx(span.t_begin, abs=1e-5)
        assert float((attrs["width"] or "").rstrip("%")) / 100 * end == pytest.approx(
            span.t_end - span.t_begin, abs=1e-5
        )
    exposed = [float((a["width"] or "").rstrip("%")) for t, a in page.tags if t == "rect" and a.get("class") == "still"]
    both = sum(totals(one).exposed_s for one in read_trace(run, 3).ranks)
    assert sum(exposed) / 100 * end == pytest.approx(both, rel=1e-3)


def test_a_parameter_is_found_in_every_collective_that_carried_it(tmp_path: Path) -> None:
    data = page_of(make_run(tmp_path / "run", mode="zero1")).data()
    names = [p["name"] for p in data["parameters"]]
    assert names == [name for bucket in BUCKETS for name, _ in bucket]
    wanted = names.index("model.layers.1.mlp.up_proj.weight")
    assert data["parameters"][wanted] | {"shape": "160 × 64", "bytes": 40_960} == data["parameters"][wanted]
    tags = [(b["rank"], b["tag"]) for b in data["bars"] if "owner" in b and wanted in data["owners"][b["owner"]]]
    assert tags == [(0, "grad/bucket2"), (0, "param/bucket2"), (1, "grad/bucket2"), (1, "param/bucket2")]


def test_the_page_shows_what_differs(run: Path) -> None:
    assert not page_of(run, 3).says("✗")
    change(run, 1, 3, "grad/bucket2", payload_bytes=188_416 + 4096)
    page = page_of(run, 3)
    assert page.says("✗ differs") and page.says("+4,096") and page.says("rank 1")
    assert page.says("✓ match")


def test_the_page_needs_nothing_else_and_texts_cannot_break_out(run: Path) -> None:
    change(run, 0, 3, "grad/bucket1", tag=ATTACK, owner=[ATTACK], op=ATTACK, dtype=ATTACK, phase=ATTACK)
    (run / "ledger" / "phases00000.jsonl").write_text(
        json.dumps({"step": 3, "micro": 0, "phase": ATTACK, "t_begin": 0.0, "t_end": 0.1}) + "\n"
    )
    page = page_of(run, 3)
    assert len(page.scripts) == 3 and page.data()["parameters"][-1]["name"] == ATTACK
    for tag, attrs in page.tags:
        assert tag not in ("img", "iframe", "object", "base", "form")
        for name, value in attrs.items():
            assert not name.startswith("on"), name
            if name in ("src", "href", "xlink:href"):
                assert value == "data:,"
    policy = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy and (policy[0] or "").startswith("default-src 'none'")
    assert "http://www.w3.org/2000/svg" in page.scripts[-1] and page.scripts[-1].count("http") == 1


def test_a_page_that_cannot_be_written_says_so(run: Path) -> None:
    trace = read_trace(run)
    (run / "trace.html").mkdir()
    with pytest.raises(StorageError, match=r"trace\.html: cannot be written"):
        build_trace(trace)
    assert [path.name for path in run.iterdir() if ".tmp-" in path.name] == []


# -- text ----------------------------------------------------------------------------------------------------


def drawn(trace: Trace, monkeypatch: pytest.MonkeyPatch, columns: int, encoding: str = "utf-8") -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_trace(trace, file)
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_picture_is_as_wide_as_the_terminal(run: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    text = drawn(read_trace(run, 3), monkeypatch, columns)
    picture = text.splitlines()[: -1 - text.splitlines()[::-1].index("")]
    assert max(map(len, picture)) <= columns and "\x1b" not in text
    bars = next(line for line in picture if line.startswith("backward"))
    assert [c for c in bars if c.isdigit()] == list("0123")


def test_the_picture_is_to_scale(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = read_trace(run, 3)
    text = drawn(trace, monkeypatch, 200)
    margin = len("grad/bucket0") + 2
    end = max(rank.end for rank in trace.ranks)
    (bucket,) = [event for event in trace.ranks[0].collectives if event.tag == "grad/bucket3"]
    line = next(line for line in text.splitlines() if line.startswith("grad/bucket3"))[margin:]
    columns = 200 - margin
    where = [i for i, c in enumerate(line) if c in "░▒█"]
    assert (
        abs(where[0] - bucket.t_issue / end * columns) <= 1 and abs(where[-1] + 1 - bucket.t_done / end * columns) <= 1
    )
    still = line.count("█") / columns * end
    assert still == pytest.approx(bucket.exposed[1] - bucket.exposed[0], abs=end / columns)


def test_the_picture_without_blocks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(read_trace(run, 3), monkeypatch, 100, encoding="latin-1")
    assert "#" in next(line for line in text.splitlines() if line.startswith("grad/bucket4"))


def test_the_summary_says_what_differs(run: Path) -> None:
    file = io.StringIO()
    print_summary(read_trace(run, 3), file)
    assert "as predicted" in file.getvalue()
    change(run, 1, 3, "grad/bucket2", drop=True)
    print_summary(read_trace(run, 3), file)
    assert "differ from the prediction: grad/bucket2 (all_reduce)" in file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0"),
        (3.2e-4, "320 µs"),
        (9.999e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9999, "1.00 s"),
        (75, "75.00 s"),
    ],
)
def test_times_read_well(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
