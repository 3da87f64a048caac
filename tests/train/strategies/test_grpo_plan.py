"""What ranks tell each other in a rollout is planned: exactly where that can be known, at most where answers decide."""

import json

import pytest
import torch
from grpo_runs import ONLINE, rollouts, run
from support import recorded, run_ranks, tiny_config, try_ranks

from pellucid import save_model
from pellucid.cli.plan import plan_facts
from pellucid.parallel import comm
from pellucid.report.trace import build_trace, read_trace
from pellucid.train import Trainer

pytestmark = pytest.mark.usefixtures("rewards")
QUIET = dict(train__save_every=0, train__steps=5)
"""Steps 3 and 4 are ordinary ones, with two updates of one rollout."""


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    run(data=rollouts(), train__steps=1)


def table(rows):
    return {(r["tag"], r["op"], r["dtype"]): [r["count"], r["payload_bytes"], r["wire_bytes"]] for r in rows}


def split(rows):
    """Those of a rollout, and the others."""
    told = {key: row for key, row in rows.items() if key[0].startswith("rollout")}
    return told, {key: row for key, row in rows.items() if key not in told}


ANSWERS = ("rollout/answers", "all_gather", "uint8")


def longest(lengths, *, rewards, scores):
    """Bytes of the rank that has most to say: 17 columns and their heads, by hand; ``lengths`` of (ids, learnt) a rank."""
    return max(
        17 * 8 + sum(8 + 1 + 4 + 7 * 8 + 8 * rewards + 9 * ids + 4 * scores * learnt for ids, learnt in answers)
        for answers in lengths
    )


def lengths_of(trainer):
    """Of this rank's answers, which are still those of the last rollout."""
    share = trainer.config.train.global_batch // comm.world_size() * trainer.setup.strategy.options.completions
    everybodys = [a for group in trainer.setup.strategy.answers.values() for a in group]
    mine = everybodys[comm.rank() * share : (comm.rank() + 1) * share]
    return [[len(a.ids), a.num_learnt] for a in mine]


ORDERED = {"parallel__reduction": "ordered", "train__global_batch": 8}
LORA = {"lora": {"r": 2, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}}


@pytest.mark.parametrize(
    "mode, size, updates, more",
    [("ddp", 2, 1, {}), ("zero1", 3, 2, {}), ("zero2", 2, 2, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("ddp", 3, 2, {}), ("zero1", 2, 1, {}), ("zero2", 3, 1, {}), ("ddp", 2, 2, ORDERED), ("zero1", 2, 2, ORDERED),
        ("zero2", 2, 2, LORA)))],
)  # fmt: skip
def test_a_rollout_sends_what_was_planned_and_a_step_nothing_else(prompts, tmp_path, mode, size, updates, more):
    changes = QUIET | more | dict(parallel__mode=mode, strategy__updates=updates)
    changes |= dict(
        strategy__rewards=["grpo_rewards:even", "exact_match"], strategy__completions=8, strategy__max_tokens=20
    )
    if more == LORA:
        plain, _ = run(prompts, train__steps=1)
        save_model(tmp_path / "base", plain.model, plain.setup.tokenizer)
        changes["train__init"] = str(tmp_path / "base")
    lengths = run_ranks(lambda: lengths_of(run(prompts, tmp_path, **changes)[0]), size)
    assert len({ids for rank in lengths for ids, _ in rank}) > 1, "answers differ in length"
    planned = json.loads((tmp_path / "ledger/plan.json").read_text())
    exact = table(row for row in planned["rollout"]["rows"] if row["exact"])
    (bound,) = table(row for row in planned["rollout"]["rows"] if not row["exact"]).items()
    assert planned["rollout"]["every"] == updates and bound[0] == ANSWERS
    assert exact == {
        ("rollout/drawn/lengths", "all_gather", "int64"): [1, 8 * size, 8 * (size - 1)],
        ("rollout/drawn", "all_gather", "uint8"): [1, 15 * size, 15 * (size - 1)],
        ("rollout/answers/lengths", "all_gather", "int64"): [1, 8 * size, 8 * (size - 1)],
    }
    for rank in range(size):
        for step in (3, 4, 5):
            told, others = split(recorded(tmp_path, rank, step))
            ends = {key for key in others if key[0].startswith(("save", "end"))}  # of the last step
            assert {key: row for key, row in others.items() if key not in ends} == table(planned["step"])
            if (step - 1) % updates:
                assert told == {}
                continue
            count, payload, wire = told.pop(ANSWERS)
            assert told == exact
            assert count == 1 and payload <= bound[1][1] and wire == payload // size * (size - 1) <= bound[1][2]
            if step == 5:  # the answers that are still there
                assert payload == size * longest(lengths, rewards=2, scores=4 if updates > 1 else 0)


@pytest.mark.parametrize("updates, max_tokens", [pytest.param(1, 100, marks=pytest.mark.slow), (2, 11)])
def test_where_every_answer_fills_the_window_the_most_that_was_planned_is_sent(
    prompts, tmp_path, monkeypatch, updates, max_tokens
):
    """A model that never ends, behind prompts of 5 tokens: the bound is no looser than it has to be."""
    changes = QUIET | dict(
        parallel__mode="ddp", strategy__max_tokens=max_tokens, model__max_position_embeddings=16, train__out=str(tmp_path),
        strategy__updates=updates,
    )  # fmt: skip

    def rank():
        trainer = Trainer(tiny_config(**ONLINE | changes | {"data__path": str(prompts), "optim__lr": 1e-6}))
        given, end = trainer.setup.model.head, torch.tensor(sorted(trainer.setup.tokenizer.stop_ids))
        never = torch.zeros(259).index_fill(0, end, -50.0)
        monkeypatch.setattr(trainer.setup.model, "head", lambda hidden: given(hidden) + never)
        trainer.train()

    run_ranks(rank, 2)
    planned = json.loads((tmp_path / "ledger/plan.json").read_text())
    assert split(recorded(tmp_path, 0, 3))[0] == table(planned["rollout"]["rows"])


def test_the_command_predicts_what_the_run_writes_down(prompts, tmp_path):
    """The same rows as the run's own plan, without data; no mode that grpo refuses."""
    changes = QUIET | dict(parallel__mode="zero1", strategy__updates=2)
    run_ranks(lambda: run(prompts, tmp_path, **changes)[0].state.step, 2)
    written = json.loads((tmp_path / "ledger/plan.json").read_text())
    config = tiny_config(**ONLINE | changes | {"model__vocab_size": 259})
    modes = plan_facts(config, 2, [])["modes"]
    assert modes["zero1"]["rollout"] == written["rollout"] and modes["zero1"]["step"] == written["step"]
    assert modes.keys() == {"ddp", "zero1", "zero2", "torch_ddp"}
    assert "rollout" not in plan_facts(config, 1, [])["modes"]["none"], "alone nothing is sent"


def test_a_trace_compares_rollouts_with_their_plan(prompts, tmp_path):
    run_ranks(lambda: run(prompts, tmp_path, parallel__mode="zero1", strategy__updates=2, **QUIET)[0].state.step, 2)
    for step, there in ((3, True), (4, False)):
        trace = read_trace(tmp_path, step)
        page, _ = build_trace(trace)
        assert ("≤ " in page.read_text(encoding="utf-8")) == there
        rows = {row["tag"]: row for row in trace.summary["bytes"]}
        assert trace.summary["bytes_match"] is True and ("rollout/answers" in rows) == there
        assert [tag for tag, row in rows.items() if row["at_most"]] == ["rollout/answers"] * there
    path = tmp_path / "ledger/plan.json"
    plan = json.loads(path.read_text())
    got = {row["tag"]: row["recorded"][0] for row in read_trace(tmp_path, 3).summary["bytes"]}["rollout/answers"]
    plan["rollout"]["rows"][-1]["payload_bytes"] = got["payload_bytes"] - 1
    path.write_text(json.dumps(plan))
    wrong = [row["tag"] for row in read_trace(tmp_path, 3).summary["bytes"] if row["matches"] is False]
    assert wrong == ["rollout/answers"]
    plan["rollout"]["every"] = 1  # then step 4 lacks what was foretold
    path.write_text(json.dumps(plan))
    wrong = [row["tag"] for row in read_trace(tmp_path, 4).summary["bytes"] if row["matches"] is False]
    assert wrong == [row["tag"] for row in plan["rollout"]["rows"]]


def test_how_much_stored_answers_are_is_left_open_and_the_rest_is_as_planned(tmp_path):
    changes = QUIET | dict(parallel__mode="zero1", strategy__updates=2, model__max_position_embeddings=16)
    run_ranks(lambda: run(None, tmp_path, data=rollouts(24), **changes)[0].state.step, 2)
    planned = json.loads((tmp_path / "ledger/plan.json").read_text())
    expected = table(planned["rollout"]["rows"])
    assert expected.pop(ANSWERS) == [1, None, None]
    told, others = split(recorded(tmp_path, 1, 3))
    assert told.pop(ANSWERS)[0] == 1 and told == expected and others == table(planned["step"])
    trace = read_trace(tmp_path, 3).summary
    assert trace["bytes_match"] is True
    assert {row["tag"]: row["matches"] for row in trace["bytes"]}["rollout/answers"] is None


def test_where_one_rank_cannot_draw_the_others_are_told_before_they_tell_their_answers(prompts, tmp_path, capfd):
    """The failure travels in the row that is always there, so that nobody waits in a gather that never comes."""

    def rank():
        settings = ONLINE | {"data__path": str(prompts), "parallel__mode": "ddp", "train__out": str(tmp_path)}
        trainer = Trainer(tiny_config(**settings))
        if comm.rank() == 1:
            trainer.setup.strategy._answers = lambda window, step: 1 / 0
        trainer.train()

    statuses, _ = try_ranks(rank, 2)
    said = capfd.readouterr().err
    assert statuses == [1, 1] and "rank 1: ZeroDivisionError: division by zero" in said
    assert not any(key[0].startswith("rollout/answers") for key in recorded(tmp_path, 0, 1))
