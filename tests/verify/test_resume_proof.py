"""`verify_resume`: what really resumes passes, and what comes back wrong is named."""

import json

import pytest
from support import TINY

from pellucid.config import run_config
from pellucid.data.batches import Loader
from pellucid.errors import ConfigError
from pellucid.parallel import optimizer_state, zero
from pellucid.train import saving
from pellucid.verify.lives import PARTS, Outcome, Place, Plan, keeps_bits, plan_lives, samples
from pellucid.verify.moments import Moment
from pellucid.verify.resume import Crossing, ResumeProof, SamePlace, verify_resume

CONFIG = {
    "model": TINY | {"hidden_size": 32, "intermediate_size": 48},
    "parallel": {"bucket_size_mb": 0.01},
    "train": {"steps": 10},
    "optim": {"lr": 1e-3},
}


def proof_of(*modes, **options):
    return verify_resume(run_config(CONFIG), 2, modes=modes, **options)


def test_killed_runs_end_with_the_bits_of_the_unbroken_one_and_go_on_elsewhere():
    proof = proof_of("zero1", seed=3)
    assert not proof.failures() and proof.passed
    assert proof.last_line() == "resumed: 4 of 4"
    alone, sharded = proof.same
    assert (alone.place, sharded.place) == (Place("none", 1), Place("zero1", 2))
    for one in proof.same:
        assert one.resumed_from in (2, 4), "from the beginning it would prove little"
        assert len(one.kills) == 2 and one.hashes.keys() == set(PARTS) and "  same bits\n    killed " in one.lines()
    assert alone.hashes["weights"] != sharded.hashes["weights"], "dropout was on: other ranks draw other numbers"
    assert {(str(one.source), str(one.target)) for one in proof.crossings} == {
        ("none x 1", "zero1 x 2"), ("zero1 x 2", "none x 1"),
    }  # fmt: skip
    assert all(0 < one.distance < proof.bound / 10 for one in proof.crossings if one.target.ranks == 2)
    assert json.loads(json.dumps(proof.to_json()))["proved"] == 4


@pytest.mark.slow
def test_from_every_mode_on_every_number_of_ranks_to_every_other():
    proof = verify_resume(run_config(CONFIG), 3, everything=True)
    assert proof.passed, proof.failures()
    assert len(proof.crossings) == len(proof.places) ** 2 > 100
    assert not any("." in cell for row in proof.table()[1:] for cell in row[1:])


def failures_of(*modes):
    proof = proof_of(*modes)
    assert not proof.passed
    return " ".join(proof.failures())


def test_dropout_that_is_drawn_anew_is_seen(monkeypatch):
    monkeypatch.setattr(saving, "restore_rng", lambda state: None)
    assert "FAILED: zero1 x 2: weights model." in failures_of("zero1")


def test_a_cursor_that_begins_anew_is_seen(monkeypatch):
    monkeypatch.setattr(Loader, "load_state_dict", lambda self, state: None)
    told = failures_of("zero1")
    assert "step 3 had samples [" in told


class Swapped:
    """Saved tensors that take the keys' weights for the values', which have the same shape."""

    def __init__(self, saved):
        self.saved, self.keys, self.shape, self.without_state = saved, saved.keys, saved.shape, saved.without_state

    def read(self, name, *span):
        return self.saved.read(name.replace("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"), *span)


def test_moments_of_another_parameter_are_seen(monkeypatch):
    def load(optimizer, slices, saved, *rest):
        load_as_it_is(optimizer, slices, Swapped(saved), *rest)

    load_as_it_is = optimizer_state.load_state
    for module in (optimizer_state, zero):
        monkeypatch.setattr(module, "load_state", load)
    told = failures_of("zero1")
    assert (
        "x 2 to none x 1: moments model.layers.0.self_attn.k_proj.weight/exp_avg are not those of the checkpoint"
        in told
    )
    assert "FAILED: zero1 x 2: weights model." in told


def test_a_load_that_raises_is_named_and_the_others_go_on(monkeypatch):
    def load(*_args):
        raise ArithmeticError("as if it were real")

    monkeypatch.setattr(zero, "load_state", load)
    proof = proof_of("zero1")
    told = [(str(one.source), str(one.target), one.failure) for one in proof.crossings]
    assert [bool(failure) for _, target, failure in told] == [target == "zero1 x 2" for _, target, _ in told]
    assert sum("ArithmeticError: as if it were real" in failure for *_, failure in told) == 1
    assert not proof.same[0].failure and "ArithmeticError" in proof.same[1].failure


def test_one_number_of_ranks_is_refused():
    with pytest.raises(ConfigError, match="--nproc must be at least 2"):
        verify_resume(run_config(CONFIG), 1)


# -- what is told -------------------------------------------------------------------------------------------


def test_every_number_of_ranks_shares_the_batch_where_runs_move_and_dropout_is_on_where_they_stay():
    config = run_config(CONFIG)
    moves, stays = plan_lives(config, 4, stays=False).config, plan_lives(config, 3, stays=True).config
    assert all(moves.train.global_batch % (moves.train.micro_batch * ranks) == 0 for ranks in (1, 2, 3, 4))
    assert moves.model.dropout == 0 < stays.model.dropout
    assert stays.train.global_batch // (stays.train.micro_batch * 3) == 2, "gradients are accumulated"


def test_a_sample_that_is_another_one_the_second_time_is_an_error(tmp_path):
    line = {"step": 3, "micro": 0, "ids": [1, 2]}
    (tmp_path / "samples0.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line) + "\n")
    (tmp_path / "samples1.jsonl").write_text(json.dumps(line | {"ids": [0]}) + "\n")
    assert samples(tmp_path) == {3: [0, 1, 2]}
    (tmp_path / "samples1.jsonl").write_text(
        json.dumps(line | {"ids": [0]}) + "\n" + json.dumps(line | {"ids": [5]}) + "\n"
    )
    with pytest.raises(Exception, match=r"step 3 had samples \[0\] and later \[5\]"):
        samples(tmp_path)


def test_the_first_difference_is_named_weights_first():
    def of(**changes):
        parts = {part: {"a": "1", "b": "2"} for part in PARTS}
        return Outcome(parts | changes)

    assert of().first_difference(of()) == ""
    assert of(moments={"a": "1"}).first_difference(of()) == "moments b"
    assert of(rng={"a": "9"}).first_difference(of(weights={"a": "1", "b": "3"})) == "weights b"
    assert of().part_hash("rng") != of(rng={"a": "9"}).part_hash("rng")


def test_the_table_has_a_sign_for_each_number_of_ranks():
    places = [Place("none", 1), Place("ddp", 2), Place("ddp", 3)]
    crossings = [Crossing(places[0], places[2]), Crossing(places[1], places[0], failure="weights")]
    proof = ResumeProof([SamePlace(places[1]), SamePlace(Place("zero9", 2), skipped="why")], crossings, places, 1.0)
    assert proof.table() == [
        ["from", "none", "ddp"],
        ["none x 1", ".", ".+"],
        ["ddp x 2", "X", ".."],
        ["ddp x 3", ".", ".."],
    ]
    assert proof.last_line() == "resumed: 2 of 3" and not proof.passed
    assert proof.failures() == ["FAILED: ddp x 2 to none x 1: weights"]
    assert proof.same[1].lines() == "zero9 x 2  cannot run here: why"


def test_moments_are_named_by_what_can_be_typed():
    moment = Moment("file", 1, 12, "before rename x")
    assert str(moment) == "file:1:12" and Moment.parse("file:1:12") == moment
    for wrong in ("file", "file:1", "disk:1:2", "file:x:2", "file:1:-2"):
        with pytest.raises(ConfigError, match="is no moment of a run; write KIND:RANK:NUMBER"):
            Moment.parse(wrong)
    assert isinstance(plan_lives(run_config(CONFIG), 2, stays=True), Plan)


@pytest.mark.slow
def test_torchs_own_ddp_keeps_what_it_can():
    """On three ranks its sums depend on when it began; if this fails torch has changed, and `keeps_bits` may."""
    config = run_config(CONFIG | {"model": CONFIG["model"] | {"hidden_size": 64, "intermediate_size": 96}})
    proof = verify_resume(config, 3, modes=["torch_ddp"], everything=True)
    assert not proof.failures()
    assert [keeps_bits(one.place) for one in proof.same] == [True, True, False]
    assert "  same within the bound\n" in proof.same[2].lines()
