"""`drill`: kills of every kind are recovered from, and what is not recovered from is named with the way to repeat it."""

import pytest
from support import TINY

from pellucid.config import run_config
from pellucid.errors import ConfigError
from pellucid.train.run_folder import RunFolder
from pellucid.verify.drill import KINDS, Case, Drill, _chosen, drill
from pellucid.verify.lives import Place
from pellucid.verify.moments import Moment

CONFIG = {"model": TINY, "parallel": {"bucket_size_mb": 0.01}, "train": {"steps": 10}, "optim": {"lr": 1e-3}}


def test_a_kill_of_each_kind_is_recovered_from():
    done = drill(run_config(CONFIG), 2, sample=1, seed=1)
    assert done.passed and done.place == Place("zero1", 2) and done.lines()[-1] == "3 of 3 recovered"
    assert [case.kill.kind for case in done.cases] == list(KINDS)
    # three checkpoints, each with a part of either rank, and the model; six steps of both ranks, before and after
    assert done.num_moments["file"] > 100 and done.num_moments["collective"] > 150 and done.num_moments["step"] == 24
    assert {case.kill.rank for case in done.cases} <= {0, 1}


def test_what_is_not_recovered_from_is_named_and_can_be_repeated(monkeypatch):
    """A log that is not cut back to the checkpoint has steps twice."""

    def open_log(self, step):
        open_as_it_is(self, 10**9)

    open_as_it_is = RunFolder.open_log
    monkeypatch.setattr(RunFolder, "open_log", open_log)
    fifth = Moment("step", 1, 10)  # after step 5; the checkpoint is of step 4
    at_once = CONFIG | {"train": {"steps": 10, "async_save": False}}
    done = drill(run_config(at_once), 2, only=fifth)
    assert not done.passed and [case.kill for case in done.cases] == [fifth]
    failed, last = done.lines()[-2:]
    assert failed.startswith("FAILED: killed after the update of step 5 (rank 1, --case step:1:10): ")
    assert "metrics.jsonl has steps [1, 2, 3, 4, 5, 5, 6], not 1 to 6" in failed and last == "0 of 1 recovered"


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["save at once", "save in background"])
@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_kills_drawn_from_all_moments_are_survived_in_every_mode(mode, background):
    table = CONFIG | {"parallel": {"mode": mode}, "train": {"steps": 10, "async_save": background}}
    done = drill(run_config(table), 2, sample=8, seed=len(mode))
    assert done.passed, done.lines()


# -- which are tried ----------------------------------------------------------------------------------------


def moments(kind, num):
    return [Moment(kind, rank, number + 1) for rank in range(2) for number in range(num)]


def test_kinds_take_turns_in_an_order_that_the_seed_draws():
    by_kind = {kind: moments(kind, num) for kind, num in zip(KINDS, (10, 20, 2), strict=True)}
    every = _chosen(by_kind, None, 0, None)
    assert sorted(map(str, every)) == sorted(str(moment) for own in by_kind.values() for moment in own)
    assert [moment.kind for moment in every[:12]] == [*KINDS] * 4
    assert _chosen(by_kind, None, 0, None) == every != _chosen(by_kind, None, 1, None)
    assert len(_chosen(by_kind, 3, 0, None)) == 9
    assert _chosen(by_kind, None, 0, Moment("file", 1, 7)) == [Moment("file", 1, 7)]
    with pytest.raises(
        ConfigError, match=r"--case file:1:11: this run has no such moment; it has file 20, collective 40"
    ):
        _chosen(by_kind, None, 0, Moment("file", 1, 11))


def test_the_last_line_counts_what_was_recovered():
    fine, bad = Case(Moment("file", 0, 1, "before write a")), Case(Moment("step", 1, 2, "after b"), "weights w differ")
    done = Drill(Place("ddp", 2), {"file": 9, "step": 4}, [fine, bad])
    assert done.lines() == [
        "file  1 of 1 recovered  (9 moments in a run)",
        "step  0 of 1 recovered  (4 moments in a run)",
        "FAILED: killed after b (rank 1, --case step:1:2): weights w differ",
        "1 of 2 recovered",
    ]
    assert not done.passed and not Drill(Place("ddp", 2), {}).passed


def test_one_rank_has_nobody_to_outlive_it():
    with pytest.raises(ConfigError, match="--nproc must be at least 2"):
        drill(run_config(CONFIG), 1)
