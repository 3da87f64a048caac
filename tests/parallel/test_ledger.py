"""What a line of the ledger says, when it says something happened, and what a resumed run keeps of it."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from support import run_ranks

from pellucid.errors import StorageError
from pellucid.parallel import comm
from pellucid.parallel.ledger import Clock, CommEvent, CommLedger, LedgerFiles, Span, wire_bytes

FIELDS = [
    "step", "micro", "op", "tag", "group", "dtype", "numel", "payload_bytes", "wire_bytes", "owner", "phase",
    "t_issue", "t_wait", "t_done",
]  # fmt: skip
"""Of a line, as the architecture's section 9 promises them."""


def event(step, tag="grad/bucket0", **changes):
    values = dict(
        step=step, micro=0, op="all_reduce", tag=tag, group="world", dtype="float32", numel=8, payload_bytes=32,
        wire_bytes=32, owner=("a.weight", "b.bias"), phase="backward", t_issue=0.125, t_wait=0.25, t_done=1 / 3,
    )  # fmt: skip
    return CommEvent(**(values | changes))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13, 64])
def test_all_ranks_together_send_what_the_algorithms_need(size):
    payload = 960 * 4 * size
    together = {
        op: sum(wire_bytes(op, payload, size, rank) for rank in range(size))
        for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "barrier")
    }
    others = size - 1
    assert together == {
        "all_reduce": 2 * others * payload, "reduce_scatter": others * payload, "all_gather": others * payload,
        "broadcast": others * payload, "gather": others * payload // size, "barrier": 0,
    }  # fmt: skip


def test_a_broadcast_goes_along_a_binomial_tree_and_a_gather_ends_at_rank_0():
    assert [wire_bytes("broadcast", 10, 8, rank) for rank in range(8)] == [30, 0, 10, 0, 20, 0, 10, 0]
    assert [wire_bytes("broadcast", 10, 6, rank) for rank in range(6)] == [30, 0, 10, 0, 10, 0]
    assert [wire_bytes("gather", 12, 3, rank) for rank in range(3)] == [0, 4, 4]


# -- what is recorded ---------------------------------------------------------------------------------------


def every_operation():
    """One collective of each kind, in the second micro-batch of step 7, and the lines of this rank's file."""
    size, me = comm.world_size(), comm.rank()
    full, shard = torch.zeros(4 * size, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)
    with comm.record() as ledger:
        comm.begin_step(7)
        comm.begin_micro_batch(1)
        comm.all_reduce(1.0, tag="tokens")
        comm.enter("forward")
        comm.broadcast(shard, tag="copy", src=1).wait()
        comm.enter("backward")
        pending = comm.all_reduce_(full, tag="grad/bucket0", owner=("a.weight", "b.bias"))
        comm.reduce_scatter(full.clone(), shard, tag="grad/bucket1", owner=["c"]).wait()
        pending.wait()
        comm.enter("optimizer")
        comm.all_gather(shard, full, tag="param/bucket0").wait()
        comm.enter("other")
        comm.gather(shard, full if me == 0 else None, tag="save/exp_avg").wait()
        comm.barrier(tag="end")
    return ledger


def test_a_line_says_what_moved_how_much_of_it_for_whom_and_when(tmp_path):
    def rank():
        files = LedgerFiles(tmp_path / "ledger", comm.rank(), after=0)
        files.write(every_operation())
        files.close()

    size = 3
    run_ranks(rank, size)
    for me in range(size):
        found = lines(tmp_path / "ledger" / f"rank{me:05d}.jsonl")
        assert all(list(line) == FIELDS for line in found)
        assert {(line["step"], line["micro"], line["group"]) for line in found} == {(7, 1, "world")}
        assert [[line[key] for key in FIELDS[2:4] + FIELDS[5:8] + FIELDS[9:11]] for line in found] == [
            ["all_reduce", "tokens", "float64", 1, 8, [], "other"],
            ["broadcast", "copy", "bfloat16", 4, 8, [], "forward"],
            ["all_reduce", "grad/bucket0", "bfloat16", 12, 24, ["a.weight", "b.bias"], "backward"],
            ["reduce_scatter", "grad/bucket1", "bfloat16", 12, 24, ["c"], "backward"],
            ["all_gather", "param/bucket0", "bfloat16", 12, 24, [], "optimizer"],
            ["gather", "save/exp_avg", "bfloat16", 12, 24, [], "other"],
            ["barrier", "end", "float32", 0, 0, [], "other"],
        ]
        # rank 1 is the root of the broadcast: it sends to 2 and 0, who are done then
        assert [line["wire_bytes"] for line in found] == [10, [0, 16, 0][me], 32, 16, 16, [0, 8, 8][me], 0]
        assert all(0 <= line["t_issue"] <= line["t_wait"] for line in found)
        assert all(line["t_issue"] <= line["t_done"] < 60 for line in found)
        issued = [line["t_issue"] for line in found]
        assert issued == sorted(issued)
        spans = lines(tmp_path / "ledger" / f"phases{me:05d}.jsonl")
        assert [list(span) for span in spans] == [["step", "micro", "phase", "t_begin", "t_end"]] * 3
        assert [(span["step"], span["micro"], span["phase"]) for span in spans] == [
            (7, 1, "forward"), (7, 1, "backward"), (7, 1, "optimizer"),
        ]  # fmt: skip
        for line in found:
            assert all((line["phase"] == s["phase"]) == (s["t_begin"] <= line["t_issue"] <= s["t_end"]) for s in spans)


def test_waiting_for_a_late_rank_is_exposed_and_what_is_over_before_anybody_asks_is_hidden():
    def rank():
        store = dist.distributed_c10d._get_default_store()
        with comm.record() as ledger:
            comm.begin_step(1)
            if comm.rank() == 0:
                store.set("rank 0 waits", "now")
            else:
                store.get("rank 0 waits")
                time.sleep(0.3)
            comm.all_reduce(1.0, tag="late")
            pending = comm.all_reduce_(torch.ones(10), tag="early")
            pending._works[0].wait()
            time.sleep(0.1)
            pending.wait()
        late, early = ledger.events
        return [late.t_done - late.t_wait, early.t_done - early.t_wait]

    (exposed, hidden), (_, hidden1) = run_ranks(rank, 2)
    assert exposed > 0.2
    assert hidden < -0.05 and hidden1 < -0.05


def test_a_recorder_inside_another_keeps_its_own_and_gives_back_the_outer_one():
    def rank():
        with comm.record() as outer:
            comm.all_reduce(1.0, tag="first")
            with comm.record() as inner:
                comm.all_reduce(1.0, tag="second")
            comm.all_reduce(1.0, tag="third")
        comm.all_reduce(1.0, tag="fourth")
        return outer.ops(), inner.ops(), comm.ledger() is None

    assert run_ranks(rank, 2) == [[["all_reduce:first", "all_reduce:third"], ["all_reduce:second"], True]] * 2


def test_totals_are_those_of_the_tags_with_a_prefix():
    ledger = CommLedger([event(1), event(1, tag="grad/bucket1", payload_bytes=5, wire_bytes=7), event(1, tag="tokens")])
    assert (ledger.payload_bytes("grad/"), ledger.wire_bytes("grad/")) == (37, 39)
    assert (ledger.payload_bytes(), ledger.wire_bytes()) == (69, 71)
    assert ledger.ops() == ["all_reduce:grad/bucket0", "all_reduce:grad/bucket1", "all_reduce:tokens"]
    ledger.clear()
    assert ledger.ops() == [] and ledger.wire_bytes() == 0


def test_phases_follow_one_another_and_only_computation_is_noted():
    clock, ledger = Clock(), CommLedger()
    clock.enter("backward", None)  # nobody records
    clock.micro = 3
    clock.begin_step(4)
    assert (clock.step, clock.micro, clock.phase) == (4, 0, "other") and clock.now() < 1
    for micro in range(2):
        clock.micro = micro
        for phase in ("forward", "backward", "other"):
            clock.enter(phase, ledger)
            time.sleep(0.001)
    assert [(s.step, s.micro, s.phase) for s in ledger.spans] == [
        (4, 0, "forward"), (4, 0, "backward"), (4, 1, "forward"), (4, 1, "backward"),
    ]  # fmt: skip
    times = [t for s in ledger.spans for t in (s.t_begin, s.t_end)]
    assert times == sorted(times) and times[0] >= 0 and times[1] - times[0] >= 0.001
    assert ledger.spans[0].t_end == ledger.spans[1].t_begin and clock.phase == "other"


# -- files --------------------------------------------------------------------------------------------------


def write_steps(folder, steps, after):
    files = LedgerFiles(folder, 0, after=after)
    for step in steps:
        files.write(CommLedger([event(step), event(step, tag="loss")], [Span(step, 0, "forward", 0.0, 0.1 + 0.2)]))
    files.close()


def test_writing_empties_the_ledger_and_is_on_disk_at_once(tmp_path):
    files, ledger = LedgerFiles(tmp_path / "run" / "ledger", 3, after=0), CommLedger([event(1)], [])
    files.write(ledger)
    assert ledger.events == []
    (line,) = lines(tmp_path / "run" / "ledger" / "rank00003.jsonl")
    assert line["t_done"] == 0.3333333 and line["owner"] == ["a.weight", "b.bias"]
    assert lines(tmp_path / "run" / "ledger" / "phases00003.jsonl") == []
    files.close()


def test_a_resumed_run_keeps_what_its_checkpoint_had_done_and_goes_on_after_it(tmp_path):
    write_steps(tmp_path, range(6), after=0)
    write_steps(tmp_path, (3, 4), after=2)
    assert [line["step"] for line in lines(tmp_path / "rank00000.jsonl")] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [line["step"] for line in lines(tmp_path / "phases00000.jsonl")] == [0, 1, 2, 3, 4]
    write_steps(tmp_path, (5,), after=99)
    assert [line["step"] for line in lines(tmp_path / "phases00000.jsonl")] == [0, 1, 2, 3, 4, 5]
    write_steps(tmp_path, (1,), after=0)  # from the beginning; what came before the first step stays
    assert [line["step"] for line in lines(tmp_path / "rank00000.jsonl")] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "damage", ['{"step": 2, "micro": 0, "op', '{"step": 2}', "\0\0\0\0\n", "[]\n", '{"stop": 1}\n']
)
def test_a_torn_or_damaged_line_goes_and_with_it_all_that_follows(tmp_path, damage):
    write_steps(tmp_path, (1, 2), after=0)
    path = tmp_path / "rank00000.jsonl"
    good = path.read_text()
    path.write_text(good + damage + (good if damage.endswith("\n") else ""))
    write_steps(tmp_path, (3,), after=2)
    assert path.read_text().startswith(good)
    assert [line["step"] for line in lines(path)] == [1, 1, 2, 2, 3, 3]


def test_a_disk_that_refuses_the_ledger_is_named_with_the_way_out(tmp_path):
    (tmp_path / "ledger").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"cannot write .*ledger.*parallel\.ledger = false"):
        LedgerFiles(tmp_path / "ledger", 0, after=0)
    files = LedgerFiles(tmp_path / "other", 0, after=0)
    files._events.close()
    files._events = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115 - closed by the ledger
    with pytest.raises(StorageError, match="No space left"):
        files.write(CommLedger([CommEvent(1, 0, "all_reduce", "loss", "world", "float64", 1, 8, 8, (), "other", 0.0)]))
    files.close()
