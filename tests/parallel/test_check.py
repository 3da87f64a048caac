import os
import random
import re
import signal
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pellucid.errors import RankError
from pellucid.parallel.check import CollectiveCheck, Intent
from tests.support import wait

SITE = "pellucid/train/loop.py:142"
LIMIT_S = 5.0


def bucket(number: int, *, op: str = "all_reduce", dtype: str = "float32", numel: int = 1024, tag: str = "") -> Intent:
    return Intent(op, tag or f"grad/bucket{number}", dtype, numel, site=SITE)


def decision(name: str, value: bool) -> Intent:
    return Intent("decide", name, "", 0, f"{name}={value}", SITE)


class ProbedStore:
    """Counts what is asked of a store, and first calls ``probe(operation, key)``."""

    def __init__(self, store, probe=lambda operation, key: None) -> None:
        self.store, self.probe, self.calls = store, probe, Counter()

    def __getattr__(self, operation):
        def call(key, *args):
            self.calls[operation] += 1
            self.probe(operation, key[0] if isinstance(key, list) else key)
            return getattr(self.store, operation)(key, *args)

        return call


def on_threads(size, body):
    """``body(rank)`` on each of ``size`` threads. Returns what each raised (or None) and how many seconds it took."""
    outcome = [None] * size

    def run(rank):
        begin, error = time.monotonic(), None
        try:
            body(rank)
        except BaseException as raised:
            error = raised
        outcome[rank] = error, time.monotonic() - begin

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert None not in outcome, f"ranks hang: {[rank for rank, done in enumerate(outcome) if done is None]}"
    return [error for error, _ in outcome], [seconds for _, seconds in outcome]


def on_forks(size, body):
    """``body(rank)`` on each of ``size`` forked processes; every one must end well."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                body(rank)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [wait(pid, 30) for pid in pids] == [0] * size


def issue(check, intents, leave=None):
    for intent in intents:
        check.before(intent)
    if leave is not None:
        check.leave(leave)


# -- disagreements: what the odd rank does instead of the others' six collectives, and how the two sides read ------

COMMON = [bucket(i) for i in range(6)]


def instead(k, intent):
    return [*COMMON[:k], intent, *COMMON[k + 1 :]], None


def decided(k, name):
    """The decision is on both sides, with another value."""
    return [*COMMON[:k], decision(name, True), *COMMON[k:]], [*COMMON[:k], decision(name, False), *COMMON[k:]]


REASON = "DataError: shard 3 is cut short"
DISAGREEMENTS = {
    "op": lambda k: (COMMON, *instead(k, bucket(k, op="reduce_scatter"))),
    "size": lambda k: (COMMON, *instead(k, bucket(k, numel=1_048_576))),
    "dtype": lambda k: (COMMON, *instead(k, bucket(k, dtype="bfloat16"))),
    "tag": lambda k: (COMMON, *instead(k, bucket(k, tag="tokens"))),
    "swapped": lambda k: (COMMON, [*COMMON[:k], COMMON[k + 1], COMMON[k], *COMMON[k + 2 :]], None),
    "skips one": lambda k: (COMMON, [*COMMON[:k], *COMMON[k + 1 :]], None),
    "one more": lambda k: (COMMON, [*COMMON[:k], bucket(9), *COMMON[k:]], None),
    "save": lambda k: (*decided(k, "save"), None),
    "stop": lambda k: (*decided(k, "stop"), None),
    "skip": lambda k: (*decided(k, "skip"), None),
    "left": lambda k: (COMMON, COMMON[:k], "finished"),
    "failed": lambda k: (COMMON, COMMON[:k], REASON),
}
SIDES = {
    "op": ("all_reduce grad/bucket{k} float32 x 1,024", "reduce_scatter grad/bucket{k} float32 x 1,024"),
    "size": ("all_reduce grad/bucket{k} float32 x 1,024", "all_reduce grad/bucket{k} float32 x 1,048,576"),
    "dtype": ("all_reduce grad/bucket{k} float32 x 1,024", "all_reduce grad/bucket{k} bfloat16 x 1,024"),
    "tag": ("all_reduce grad/bucket{k} float32 x 1,024", "all_reduce tokens float32 x 1,024"),
    "swapped": ("all_reduce grad/bucket{k} float32 x 1,024", "all_reduce grad/bucket{next} float32 x 1,024"),
    "skips one": ("all_reduce grad/bucket{k} float32 x 1,024", "all_reduce grad/bucket{next} float32 x 1,024"),
    "one more": ("all_reduce grad/bucket{k} float32 x 1,024", "all_reduce grad/bucket9 float32 x 1,024"),
    "save": ("decide save=True", "decide save=False"),
    "stop": ("decide stop=True", "decide stop=False"),
    "skip": ("decide skip=True", "decide skip=False"),
    "left": ("all_reduce grad/bucket{k} float32 x 1,024", "left: finished"),
    "failed": ("all_reduce grad/bucket{k} float32 x 1,024", "left: " + REASON),
}


def named(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} " + {(0, 1, 2): "0-2", (1, 2, 3): "1-3"}.get(
        tuple(ranks), ", ".join(map(str, ranks))
    )


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise_with_both_sides(kind, size):
    rng = random.Random(f"{kind}{size}")
    odd, k = rng.randrange(size), rng.randrange(5)
    theirs, its, reason = DISAGREEMENTS[kind](k)
    delays = [rng.uniform(0, 0.05) for _ in range(size)]
    store = dist.HashStore()

    def body(rank):
        check = CollectiveCheck(store, rank, size)
        time.sleep(delays[rank])
        issue(check, *((its, reason) if rank == odd else (theirs,)))

    errors, seconds = on_threads(size, body)
    others = [rank for rank in range(size) if rank != odd]
    their_side, its_side = (text.format(k=k, next=k + 1) for text in SIDES[kind])
    lines = {
        f"  {named(others)}: {their_side} at {SITE}",
        f"  rank {odd}: {its_side}" + (f" at {SITE}" if not reason else ""),
    }
    assert max(seconds) < LIMIT_S
    for rank, error in enumerate(errors):
        if rank == odd and reason:
            assert error is None
            continue
        assert type(error) is RankError and error.rank == (odd if reason else None)
        head, *body_lines = str(error).split("\n")
        assert f"after {k} in agreement" in head
        assert set(body_lines[:2]) == lines
        assert ("same number of steps" if reason else "same branch") in body_lines[2]


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_disagree_raise_before_the_backend_can_hang(tmp_path, size):
    def body(rank):
        store = dist.FileStore(str(tmp_path / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        check = CollectiveCheck(store, rank, size)
        for numel in (8, 16, 32 if rank else 33):
            begin = time.monotonic()
            if numel > 16:
                with pytest.raises(RankError, match=rf"rank 0: all_reduce loss float32 x 33 at {SITE}"):
                    check.before(bucket(0, tag="loss", numel=numel))
                assert time.monotonic() - begin < LIMIT_S
            else:
                check.before(bucket(0, tag="loss", numel=numel))
                x = torch.ones(numel)
                dist.all_reduce(x)
                assert x[0] == size

    on_forks(size, body)


def test_equal_ranks_share_a_line_and_at_most_eight_lines_are_shown():
    store = dist.HashStore()
    numels = [7, 7, 7, 1, 7, 2, 3, 4, 5, 6, 8, 9]

    def body(rank):
        CollectiveCheck(store, rank, 12).before(bucket(0, numel=numels[rank]))

    errors, _ = on_threads(12, body)
    text = str(errors[5])
    assert all(str(error) == text for error in errors)
    assert "ranks 0-2, 4: all_reduce grad/bucket0 float32 x 7 at" in text
    assert len(re.findall("x [0-9]", text)) == 8 and "and 1 more sides" in text


def test_the_site_is_shown_and_not_compared():
    store = dist.HashStore()

    def body(rank):
        check = CollectiveCheck(store, rank, 2)
        check.before(Intent("barrier", "save", "float32", 0, site=f"loop.py:{rank}"))
        check.before(Intent("barrier", "stop" if rank else "end", "float32", 0, site=f"loop.py:{rank}"))

    errors, _ = on_threads(2, body)
    assert "rank 0: barrier end at loop.py:0\n  rank 1: barrier stop at loop.py:1\n" in str(errors[0])


# -- ranks that are late, gone or interrupted ---------------------------------------------------------------------


def test_a_rank_late_by_three_seconds_is_waited_for_at_few_questions():
    store = ProbedStore(dist.HashStore())

    def body(rank):
        check = CollectiveCheck(store if rank == 0 else store.store, rank, 2, patience_s=0.1)
        check.before(bucket(0))
        time.sleep(3 * rank)
        check.before(bucket(1))

    errors, seconds = on_threads(2, body)
    assert errors == [None, None] and min(seconds) >= 3
    assert store.calls["check"] < 200


def test_ranks_that_disagree_do_not_wait_for_a_third_which_raises_when_it_comes():
    store = dist.HashStore()

    def body(rank):
        check = CollectiveCheck(store, rank, 3, patience_s=0.2)
        time.sleep(1.0 if rank == 1 else 0)
        check.before(bucket(0, numel=4 if rank == 2 else 5))

    errors, seconds = on_threads(3, body)
    assert seconds[0] < 0.9 and seconds[2] < 0.9
    for error in (errors[0], errors[2]):
        assert "rank 0: all_reduce" in str(error) and "rank 1: has not come this far\n" in str(error)
    assert "ranks 0, 1: all_reduce grad/bucket0 float32 x 5" in str(errors[1])


@pytest.mark.parametrize("operation", ["check", "get"])
def test_a_rank_interrupted_while_it_waits_is_named_now_or_before_the_next(operation):
    """In `check` nobody has agreed yet; in `get` all have, and the others are about to go on."""
    store = dist.HashStore()
    interrupted = threading.Event()

    def interrupt(asked, key):
        if asked == operation and key.endswith("verdict"):
            raise KeyboardInterrupt

    def body(rank):
        check = CollectiveCheck(ProbedStore(store, interrupt) if rank == 1 else store, rank, 3)
        try:
            if rank != 1 and operation == "check":
                assert interrupted.wait(5)
            time.sleep(0 if rank == 1 else 0.1)
            issue(check, COMMON[:3])
        except KeyboardInterrupt:
            check.leave("interrupted")
            interrupted.set()

    errors, seconds = on_threads(3, body)
    assert errors[1] is None and max(seconds) < LIMIT_S
    for error in (errors[0], errors[2]):
        assert isinstance(error, RankError) and error.rank == 1 and "rank 1: left: interrupted\n" in str(error)
        assert f"after {int(operation == 'get')} in agreement" in str(error)


def test_who_has_left_or_disagreed_may_not_go_on():
    store = dist.HashStore()
    checks = [CollectiveCheck(store, rank, 2, patience_s=0) for rank in range(2)]
    checks[1].leave("finished")
    checks[1].leave("finished again")
    with pytest.raises(RankError, match=r"rank 1: left: finished\n"):
        checks[0].before(bucket(0))
    with pytest.raises(RankError, match="rank 0 disagreed"):
        checks[0].before(bucket(0))
    with pytest.raises(RankError, match=r"rank 1 left \(finished\)"):
        checks[1].before(bucket(0))


def serve_from(rank, fds):
    """A TCPStore whose server is in the process of rank 0. Ranks are forked before it starts: it has threads."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(fds[1], f"{store.port:8}".encode() * 4)
        return store
    return dist.TCPStore("127.0.0.1", int(os.read(fds[0], 8)), None, False)


def test_the_death_of_the_store_raises_instead_of_asking_for_ever():
    fds = os.pipe()

    def body(rank):
        store = serve_from(rank, fds)
        check, unused = CollectiveCheck(store, rank, 3), CollectiveCheck(store, rank, 3, name="unused")
        check.before(bucket(0))
        if rank == 0:
            store.wait(["waiting/1", "waiting/2"], timedelta(seconds=20))
            time.sleep(0.1)
            os._exit(0)
        store.set(f"waiting/{rank}", "yes")
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"lost the store.* before all_reduce grad/bucket1"):
            check.before(bucket(1))
        assert time.monotonic() - begin < LIMIT_S
        check.leave("failed")
        unused.leave("failed")  # nobody is there to be told
        with pytest.raises(RankError, match="lost the store"):
            CollectiveCheck(store, rank, 3)

    on_forks(3, body)


def test_the_rank_that_serves_the_store_ends_only_when_the_others_have_read_why():
    fds = os.pipe()

    def dawdle(operation, key):
        if (operation, key.rpartition("/")[2]) == ("get", "sides"):
            time.sleep(0.3)

    def body(rank):
        check = CollectiveCheck(ProbedStore(serve_from(rank, fds), dawdle if rank else lambda *_: None), rank, 3)
        with pytest.raises(RankError, match="rank 1: decide save=False"):
            check.before(decision("save", rank != 1))
        if rank == 0:
            os._exit(0)

    on_forks(3, body)


# -- agreement ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hash", "file", "prefix"])
def test_two_hundred_agreements_leave_few_keys_whoever_dawdles(tmp_path, kind):
    size = 3
    stores = {
        "hash": lambda: shared,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), size),
        "prefix": lambda: dist.PrefixStore("run", shared),
    }
    shared = dist.HashStore()
    rng = random.Random(5)

    def dawdle(operation, key):
        if key.endswith("verdict") and rng.random() < 0.05:
            time.sleep(0.005)

    opened = [stores[kind]() for _ in range(size)]

    def body(rank):
        check = CollectiveCheck(ProbedStore(opened[rank], dawdle), rank, size)
        for i in range(200):
            check.before(bucket(i) if i % 10 else decision("save", bool(i % 20)))

    errors, _ = on_threads(size, body)
    assert errors == [None] * size
    # three keys of each of the last two collectives, and the openings; a FileStore adds one of its own
    assert opened[0].num_keys() <= 2 * 3 + size + 1


def test_a_check_costs_a_rank_the_same_number_of_operations_whatever_their_number():
    most = {}
    for size in (2, 24):
        store = dist.HashStore()
        probed = [ProbedStore(store) for _ in range(size)]

        def body(rank, probed=probed, size=size):
            check = CollectiveCheck(probed[rank], rank, size)
            issue(check, COMMON)
            check.before(bucket(7, numel=1 + (rank == 1)))

        errors, seconds = on_threads(size, body)
        assert all(isinstance(error, RankError) for error in errors) and max(seconds) < LIMIT_S
        # but for the questions of those who wait, and of rank 0 for its readers: both are a matter of time
        most[size] = max(sum(p.calls.values()) - p.calls["check"] for p in probed[1:])
    assert most[24] <= most[2] + 6 * 4  # a rank that is last each time also clears away


def test_a_second_check_over_the_same_store_does_not_meet_the_keys_of_the_first():
    store = dist.HashStore()

    def body(rank):
        for tag in ("first", "second"):
            check = CollectiveCheck(store, rank, 2)
            issue(check, [bucket(0, tag=tag), bucket(1, tag=tag)], leave="finished")

    assert on_threads(2, body)[0] == [None, None]


def test_checks_of_two_groups_keep_apart():
    store = dist.HashStore()

    def body(rank):
        world = CollectiveCheck(store, rank, 4)
        time.sleep(0.05 if rank in (1, 2) else 0)  # a rank of either pair opens first
        pair = CollectiveCheck(store, rank % 2, 2, name=f"pair{rank // 2}")
        world.before(bucket(0))
        pair.before(bucket(0, numel=1 + rank // 2))
        world.before(bucket(1))

    assert on_threads(4, body)[0] == [None] * 4


def test_a_signal_is_handled_while_a_rank_waits(tmp_path):
    """A wait inside the store would put the handler off until the others come, which may be never."""

    def end(*_):
        raise SystemExit(7)

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGTERM, end)
            CollectiveCheck(dist.FileStore(str(tmp_path / "store"), 2), 0, 2).before(bucket(0))
        except SystemExit as stop:
            status = stop.code
        finally:
            os._exit(status)
    time.sleep(0.3)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGTERM)
    assert wait(pid, 5) == 7
