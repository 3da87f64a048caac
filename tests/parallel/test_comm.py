"""Every collective beside numpy, its bytes beside the kernel's counters, and the link that is imitated."""

import ctypes
import fcntl
import socket
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import fork, run_ranks, try_ranks

from pellucid.errors import ConfigError, RankError
from pellucid.parallel import comm
from pellucid.parallel.check import CollectiveCheck
from pellucid.parallel.link import Link

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def values(rank, num, dtype=torch.float32):
    """Small whole numbers, so that sums are exact in every type."""
    return torch.from_numpy(np.random.default_rng(rank).integers(-30, 30, num)).to(dtype)


def everybodys(num, size):
    return np.stack([values(r, num).numpy() for r in range(size)])


# -- results ------------------------------------------------------------------------------------------------


def every_collective():
    """What each operation gives this rank, as lists of numbers; the last is what came of sums in every type."""
    size, me = comm.world_size(), comm.rank()
    n = 6 * size
    summed, largest, mine = values(me, n), values(me, n), values(me, n)
    comm.all_reduce_(summed, tag="sum").wait()
    comm.all_reduce_(largest, tag="max", op="max").wait()
    full, shard = values(me, n), torch.empty(6)
    comm.reduce_scatter(full, shard, tag="scatter").wait()
    untouched = torch.equal(full, values(me, n))
    in_place = values(me, n)
    comm.reduce_scatter(in_place, in_place[6 * me : 6 * me + 6], tag="scatter").wait()
    gathered, collected = torch.empty(n * size), torch.empty(n * size) if me == 0 else None
    comm.all_gather(mine, gathered, tag="gather").wait()
    comm.gather(mine, collected, tag="collect").wait()
    copies = [values(me, 5) for _ in range(size)]
    for src in range(size):
        comm.broadcast(copies[src], tag="copy", src=src).wait()
    types = []
    for dtype in KINDS:
        one, part = values(me, n, dtype), torch.empty(6, dtype=dtype)
        comm.reduce_scatter(values(me, n, dtype), part, tag="scatter").wait()
        comm.all_reduce_(one, tag="sum").wait()
        types.append([one.tolist(), part.tolist()])
    return {
        "sum": summed.tolist(), "max": largest.tolist(), "scatter": shard.tolist(), "untouched": untouched,
        "in_place": in_place[6 * me : 6 * me + 6].tolist(), "gather": gathered.tolist(),
        "collect": None if collected is None else collected.tolist(), "copies": [c.tolist() for c in copies], "types": types,
    }  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_collective_gives_what_numpy_does(size):
    table = everybodys(6 * size, size)
    for me, found in enumerate(run_ranks(every_collective, size)):
        own = table.sum(0)[6 * me : 6 * me + 6].tolist()
        assert found["sum"] == table.sum(0).tolist() and found["max"] == table.max(0).tolist()
        assert found["scatter"] == found["in_place"] == own and found["untouched"]
        assert found["gather"] == table.reshape(-1).tolist()
        assert found["collect"] == (table.reshape(-1).tolist() if me == 0 else None)
        assert found["copies"] == everybodys(5, size).tolist()
        assert found["types"] == [[table.sum(0).tolist(), own]] * len(KINDS)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_numbers_are_summed_in_float64_and_words_of_any_length_come_in_rank_order(size):
    def rank():
        me = comm.rank()
        words = comm.all_gather_bytes(b"\0ab\0" * me, tag="words")  # the first rank has nothing to say
        silent = comm.all_gather_bytes(b"", tag="words")
        comm.barrier(tag="here")
        return [
            comm.all_reduce(1 + me * 2**-40, tag="one"),
            comm.all_reduce([float(me), 1.0], tag="two"),
            [word.hex() for word in words],
            [word.hex() for word in silent],
        ]

    expected = [
        sum(1 + r * 2**-40 for r in range(size)),
        [sum(range(size)), size],
        [(b"\0ab\0" * r).hex() for r in range(size)],
        [""] * size,
    ]
    assert run_ranks(rank, size) == [expected] * size


def test_the_sum_of_a_reduce_scatter_is_made_in_rank_order():
    shares = [1e8, -1e8, 1.0]  # 1.0 in this order; 0.0 in float32 where the last comes earlier

    def rank():
        shard = torch.empty(64)
        comm.reduce_scatter(torch.full((192,), shares[comm.rank()]), shard, tag="scatter").wait()
        return shard.unique().tolist()

    assert run_ranks(rank, 3) == [[1.0]] * 3


def test_nobody_leaves_a_barrier_before_all_are_there():
    def rank():
        time.sleep(0.1 * comm.rank())
        came = time.monotonic()
        comm.barrier(tag="here")
        return came, time.monotonic()

    times = run_ranks(rank, 3)
    assert min(left for _, left in times) >= max(came for came, _ in times)


def test_a_collective_may_be_waited_for_twice_and_by_a_group_alone():
    def rank():
        pair = dist.new_group([0, 2])
        if comm.rank() == 1:
            return None
        one, copy = torch.tensor([1.0 + comm.rank()]), torch.tensor([float(comm.rank())])
        pending = comm.all_reduce_(one, tag="sum", group=pair)
        pending.wait()
        pending.wait()
        comm.broadcast(copy, tag="copy", src=1, group=pair).wait()  # the second of the group
        return comm.world_size(pair), comm.rank(pair), one.item(), copy.item()

    assert run_ranks(rank, 3) == [[2, 0, 4.0, 2.0], None, [2, 1, 4.0, 2.0]]


def test_alone_every_operation_gives_its_own_back_and_nothing_is_recorded():
    with comm.record() as ledger:
        one, mine, copy = values(0, 8), torch.empty(8), torch.empty(8)
        comm.all_reduce_(one, tag="sum").wait()
        comm.reduce_scatter(one, mine, tag="scatter").wait()
        comm.all_gather(mine, copy, tag="gather").wait()
        comm.gather(mine, mine.clone(), tag="collect").wait()
        comm.broadcast(one, tag="copy").wait()
        comm.barrier(tag="here")
        assert comm.all_gather_bytes(b"word", tag="words") == [b"word"]
        assert comm.all_reduce([1.5, 2.0], tag="two") == [1.5, 2.0] and comm.decide("save", True) is True
    assert torch.equal(one, values(0, 8)) and torch.equal(copy, one)
    assert ledger.events == [] and (comm.world_size(), comm.rank()) == (1, 0)


# -- ranks that disagree ------------------------------------------------------------------------------------


def test_while_calls_are_checked_ranks_that_disagree_are_told_before_anything_is_sent():
    def rank():
        store = dist.distributed_c10d._get_default_store()
        comm.use(check=CollectiveCheck(store, comm.rank(), 2), check_until=3)
        comm.begin_step(1)
        comm.all_reduce(1.0, tag="loss")
        comm.decide("save", True)
        try:
            comm.decide("save", comm.rank() == 1)
        except RankError as error:
            told = str(error)
        comm.begin_step(4)  # no longer checked
        return told, comm.decide("stop", comm.rank() == 1)

    results = run_ranks(rank, 2)
    for told, _ in results:
        assert "save=True" in told and "save=False" in told and "test_comm.py:" in told
    assert [decided for _, decided in results] == [False, True]


# -- bytes --------------------------------------------------------------------------------------------------


def own_network():
    """Move this process into a network of its own, where nobody else sends, if that is permitted."""
    if ctypes.CDLL(None).unshare(0x40000000) == 0:  # CLONE_NEWNET
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def sent_over_loopback():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def issue(op, numel):
    size, me = comm.world_size(), comm.rank()
    full, shard = torch.ones(numel), torch.ones(numel // size)
    if op == "all_reduce":
        return comm.all_reduce_(full, tag=op)
    if op == "reduce_scatter":
        return comm.reduce_scatter(full, shard, tag=op)
    if op == "all_gather":
        return comm.all_gather(shard, full, tag=op)
    if op == "all_to_all":
        return comm.all_to_all(full, torch.empty(numel), tag=op)
    if op == "gather":
        return comm.gather(shard, full if me == 0 else None, tag=op)
    return comm.broadcast(full, tag=op, src=1)


OPS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather"]


def count_each(numel):
    """For each operation: bytes that this rank's ledger says, bytes that the kernel counted for all ranks together."""
    found = {}
    for op in OPS:
        issue(op, numel).wait()  # connections and buffers are there afterwards
        comm.barrier(tag="before")
        before = sent_over_loopback()
        comm.barrier(tag="begin")
        with comm.record() as ledger:
            issue(op, numel).wait()
        comm.barrier(tag="end")
        found[op] = [ledger.wire_bytes(), sent_over_loopback() - before]
        assert ledger.payload_bytes() == 4 * numel
        comm.barrier(tag="after")
    return found


def judge(numel, size):
    """Sizes of errors by operation."""
    found = run_ranks(lambda: count_each(numel), size)
    said = {op: sum(one[op][0] for one in found) for op in OPS}
    return {op: abs(said[op] / found[0][op][1] - 1) for op in OPS}


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="the kernel's counters are read from /proc")
@pytest.mark.parametrize("size", [2, 4])
def test_the_bytes_of_the_ledger_are_those_that_the_kernel_counts(size):
    def measure():
        own_network()
        errors = []
        # others may send over the same loopback, and on a busy machine TCP sends some of it twice: to be right once will do
        while not errors or max(errors[-1].values()) >= 0.02:
            assert len(errors) < 4, errors
            errors.append(judge(1_200_000, size))

    assert fork(measure) == 0


# -- an imitated link ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, bytes_per_s, latency_s",
    [
        ("1Gbit/s,0.2ms", 1.25e8, 2e-4),
        ("100Mbit/s", 1.25e7, 0.0),
        (" 2.5GB/s , 30us", 2.5e9, 3e-5),
        ("8MB/s,1s", 8e6, 1.0),
        ("1e3Mbit/s,0ms", 1.25e8, 0.0),
    ],
)
def test_a_link_is_written_as_a_bandwidth_and_a_latency(text, bytes_per_s, latency_s):
    link = Link.parse(text)
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((bytes_per_s, latency_s))


@pytest.mark.parametrize(
    "text",
    ["", "fast", "1Gbit", "1Gbit/s,2", "0Gbit/s", "-1Mbit/s", "nanMB/s", "infGB/s", "1Gbit/s,-1ms", "1Gbit/s,1ms,1ms"],
)
def test_a_link_written_otherwise_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r'parallel\.emulate is .* like "1Gbit/s,0\.2ms"') as caught:
        Link.parse(text)
    assert repr(text) in str(caught.value)


def test_a_link_carries_one_collective_after_the_other():
    link = Link(1e6, 0.01)
    now = time.perf_counter()
    first, second = link.charge(5_000), link.charge(0)
    assert first == pytest.approx(now + 0.015, abs=0.005) and second == pytest.approx(first + 0.01)
    time.sleep(0.03)
    now = time.perf_counter()
    assert link.charge(0) >= now + 0.01  # it was idle meanwhile, and has saved nothing up


def over_link(num, compute_s=0.0):
    """``num`` collectives at once over a link of 0.1 s, and computation meanwhile.

    Returns seconds until all are over, seconds of waiting, and when the first was issued, the last waited for, and over.
    """
    comm.barrier(tag="begin")
    comm.use(link=Link(1e12, 0.1))
    with comm.record() as ledger:
        began = time.perf_counter()
        pending = [comm.all_reduce_(torch.ones(1000), tag="sum") for _ in range(num)]
        if compute_s:
            pending[-1]._works[0].wait()  # the other rank is there too, however busy the machine
            time.sleep(compute_s)
        asked = time.perf_counter()
        for one in pending:
            one.wait()
        over = time.perf_counter()
    comm.use()
    first, last = ledger.events[0], ledger.events[-1]
    return over - began, over - asked, [first.t_issue, last.t_wait, last.t_done]


def test_a_collective_takes_as_long_as_the_link_and_two_share_it():
    def rank():
        return over_link(1), over_link(2)

    for (alone, _, times), (pair, _, later) in run_ranks(rank, 2):
        assert alone >= 0.1 and pair >= 0.2  # on a busy machine they may be late, never early
        assert later[2] - later[0] >= 0.1999
        assert times[0] <= times[1] < times[2]


def test_computation_hides_a_collective_and_the_ledger_says_when_it_was_over():
    def rank():
        return over_link(1, compute_s=0.2)

    for _, waited, (issued, asked, done) in run_ranks(rank, 2):
        assert waited < 0.1
        assert issued + 0.0999 <= done < asked


def test_bytes_take_time_too():
    def rank():
        comm.use(link=Link(1e6, 0.0))
        began = time.perf_counter()
        comm.all_reduce_(torch.ones(25_000), tag="one").wait()  # 100 kB are sent by each of two ranks
        return time.perf_counter() - began

    assert min(run_ranks(rank, 2)) >= 0.1


def test_a_rank_that_dies_ends_the_collective_of_the_others():
    def rank():
        if comm.rank() == 1:
            raise SystemExit(3)
        comm.all_reduce(1.0, tag="loss")

    statuses, _ = try_ranks(rank, 2, timeout=20)
    assert statuses == [1, 3]
