"""GRPO from prompts with a mixture of experts, and with sums whose order is fixed."""

import json

import pytest
import torch
from experts import EXPERTS, LATENT
from experts import changes as of_model
from grpo_runs import ONLINE, rollouts, run
from safetensors.torch import load_file
from support import digest, run_ranks, tensors_of, tiny_config, whole_weights

from pellucid.model.moe import BALANCING_BIAS
from pellucid.train import Trainer

pytestmark = pytest.mark.usefixtures("rewards")
MIXTURE = of_model(EXPERTS) | {"model__attend": "canonical"}


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    run(data=rollouts(), train__steps=1, **of_model(EXPERTS))


def log_of(out):
    """All lines, without times and without where saves went."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = ("time", "seconds", "tokens_per_s", "update_tokens_per_s")
    return [{k: v for k, v in line.items() if k not in times} for line in lines if line["event"] != "save"]


def answers_of(trainer):
    return sorted([a.group, a.ids, a.reward] for group in trainer.setup.strategy.answers.values() for a in group)


# -- a mixture of experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(EXPERTS, id="experts"),
        pytest.param(EXPERTS | LATENT, id="and latent attention", marks=pytest.mark.slow),
    ],
)
def test_a_mixture_draws_what_its_trainer_says_and_is_balanced(prompts, tmp_path, table):
    """The engine and the trainer send each token to the same experts, to the bit; biases move as in any other run."""
    changes = MIXTURE | of_model(table) | {"strategy__updates": 2, "optim__lr": 3e-2}
    trainer, seen = run(prompts, tmp_path, **changes)
    answers = [a for group in trainer.setup.strategy.answers.values() for a in group]
    assert all(a.trainer == a.sampler == a.old for a in answers)
    assert all(info.metrics["kl_sampler"] == 0.0 for info in seen.infos) and seen.infos[1].metrics["kl"] > 1e-3
    lines = [line for line in log_of(tmp_path) if line["event"] == "step"]
    assert all(line["router_loss"] > 0 and line["router_load"] >= 1 and line["router_dead"] == 0 for line in lines)
    biases = [p for name, p in trainer.model.named_parameters() if name.endswith(BALANCING_BIAS)]
    assert len(biases) == 2 and all(bias.abs().max() > 0.5 * EXPERTS["router_bias_update_speed"] for bias in biases)


def test_answers_that_are_all_worth_the_same_move_a_mixture_by_its_balancing_loss_alone(prompts):
    """Without it nothing moves, with it the routers do."""
    same = {"strategy__rewards": ["grpo_rewards:same"], "strategy__kl_coef": 0.0, "train__steps": 1}
    moved = []
    for coefficient in (0.0, 0.1):
        changes = MIXTURE | same | {"model__router_aux_loss_coef": coefficient, "optim__weight_decay": 0.0}
        trainer, seen = run(prompts, **changes)
        start = dict(Trainer(trainer.config).model.named_parameters())
        moved.append({n for n, p in trainer.model.named_parameters() if not torch.equal(p, start[n])})
        assert seen.infos[0].loss == 0 and (seen.infos[0].router.loss > 0) == (coefficient > 0)
        assert (seen.infos[0].grad_norm > 0) == (coefficient > 0)
    balanced = {name for name in moved[0] if name.endswith(BALANCING_BIAS)}
    assert moved[0] == balanced and len(balanced) == 2
    assert any(name.endswith("gate.weight") for name in moved[1]) and not any("lm_head" in name for name in moved[1])


STEP = dict(
    optim__name="sgd", optim__lr=1.0, train__steps=2, optim__max_grad_norm="none", strategy__updates=2,
    strategy__denominator="token",
)  # fmt: skip


@pytest.mark.parametrize(
    "mode, size", [("zero2", 2), *(pytest.param(m, 3, marks=pytest.mark.slow) for m in ("ddp", "zero1"))]
)
def test_a_mixture_on_ranks_steps_as_in_one_process_and_sends_what_was_planned(prompts, tmp_path, mode, size):
    def outcome(out="", **changes):
        trainer, seen = run(prompts, out, **(MIXTURE | STEP | {"train__save_every": 0} | changes))
        logged = [v for i in seen.infos for v in (i.loss, i.router.loss, i.router.entropy, i.router.load)]
        return [whole_weights(trainer.setup.executor), logged, answers_of(trainer)]

    alone = outcome(train__micro_batch=6)
    settings = ONLINE | MIXTURE | {"data__path": str(prompts)}
    start = [p.detach() for p in Trainer(tiny_config(**settings)).model.parameters()]
    for weights, logged, answers in run_ranks(lambda: outcome(tmp_path, parallel__mode=mode), size):
        assert answers == alone[2] and logged == pytest.approx(alone[1], rel=1e-4, abs=1e-6)
        for before, ours, theirs in zip(start, map(torch.tensor, weights), map(torch.tensor, alone[0]), strict=True):
            moved = (theirs - before).norm()
            assert (ours - theirs).norm() < 1e-3 * moved + 1e-6 * before.norm() < moved / 10
    planned = json.loads((tmp_path / "ledger/plan.json").read_text())
    expected = {row["tag"]: row["payload_bytes"] for row in planned["step"]}
    assert expected["router"] == 8 * (2 * 6 + 2) and expected["tokens"] == 8 * 4
    got = {}
    for line in (tmp_path / "ledger/rank00000.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["step"] == 1 and not event["tag"].startswith("rollout"):
            got[event["tag"]] = got.get(event["tag"], 0) + event["payload_bytes"]
    assert got == expected


def test_a_mixture_stopped_among_its_updates_goes_on_to_the_bit_with_the_biases_of_its_reference(prompts, tmp_path):
    changes = MIXTURE | dict(
        train__steps=8, strategy__updates=2, strategy__reference_every=4, train__save_every=20, optim__lr=3e-2
    )
    whole, _ = run(prompts, tmp_path / "whole", **changes)
    run(prompts, tmp_path / "half", stop_at=5, **changes)
    extra = load_file(tmp_path / "half/checkpoints/step_00000005/extra/grpo.safetensors")
    biases = [t for name, t in extra.items() if name.startswith("reference/") and name.endswith(BALANCING_BIAS)]
    assert len(biases) == 2 and all(bias.abs().max() > 0 for bias in biases)
    rest, _ = run(prompts, tmp_path / "half", resume=True, **changes)
    assert digest(rest.model) == digest(whole.model) and log_of(tmp_path / "half") == log_of(tmp_path / "whole")


# -- ordered sums -------------------------------------------------------------------------------------------

ORDERED = dict(
    parallel__reduction="ordered", model__attend="canonical", train__global_batch=8, train__micro_batch=1, train__steps=4,
    strategy__updates=2, train__val_every=2, optim__lr=3e-2,
)  # fmt: skip


@pytest.mark.parametrize(
    "mode, size, changes",
    [
        ("ddp", 2, {"strategy__denominator": "token"}),
        pytest.param("zero1", 2, {}, marks=pytest.mark.slow),
        pytest.param("zero1", 4, {}, marks=pytest.mark.slow),
        pytest.param("ddp", 4, MIXTURE, marks=pytest.mark.slow),
    ],
)
def test_with_ordered_sums_ranks_learn_to_the_bit_what_one_process_learns(prompts, tmp_path, mode, size, changes):
    """Answers, weights, moments and every line of the log; with sums as they come the weights are not the same."""
    changes = ORDERED | changes
    alone, _ = run(prompts, tmp_path / "alone", **changes)

    def rank():
        return answers_of(run(prompts, tmp_path / "ranks", parallel__mode=mode, **changes)[0])

    assert run_ranks(rank, size) == [answers_of(alone)] * size
    ours, theirs = (tensors_of(tmp_path / name / "checkpoints/step_00000004") for name in ("ranks", "alone"))
    parts = [key for key in theirs if key[0] != "rng"]
    assert all(torch.equal(ours[key], theirs[key]) for key in parts)
    assert log_of(tmp_path / "ranks") == log_of(tmp_path / "alone") and len(log_of(tmp_path / "alone")) == 8
    start = dict(Trainer(alone.config).model.named_parameters())
    assert all(not torch.equal(p, start[name]) for name, p in alone.model.named_parameters() if p.requires_grad)
    if MIXTURE.keys() - ORDERED.keys() <= changes.keys():
        return
    if size == 2:
        plain = run_ranks(
            lambda: digest(run(prompts, parallel__mode=mode, **changes | {"parallel__reduction": "sum"})[0].model), size
        )
        assert plain[0] != digest(alone.model)


# -- the end of an epoch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["zero2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_without_a_prompt_at_the_end_of_an_epoch_do_their_part(prompts, tmp_path, mode):
    """Of 53 prompts the second step of 48 has 5, all of them the first rank's; the third begins anew."""
    changes = STEP | dict(
        train__global_batch=48, train__micro_batch=4, train__steps=3, strategy__updates=1, model__attend="canonical",
        strategy__completions=2, strategy__max_tokens=3, optim__lr=0.3, train__save_every=0,
    )  # fmt: skip

    def outcome(out="", **more):
        trainer, seen = run(prompts, out, **(changes | more))
        logged = [
            value for info in seen.infos for value in (info.loss, info.metrics["reward"], info.metrics["entropy"])
        ]
        return [whole_weights(trainer.setup.executor), logged, answers_of(trainer)]

    alone = outcome(tmp_path / "alone", train__micro_batch=12)
    counts = [line["answers"] for line in log_of(tmp_path / "alone") if line["event"] == "rollout"]
    assert counts == [96, 10, 96]
    for weights, logged, answers in run_ranks(lambda: outcome(tmp_path / "ranks", parallel__mode=mode), 3):
        assert answers == alone[2] and logged == pytest.approx(alone[1], rel=1e-4, abs=1e-6)
        for ours, theirs in zip(map(torch.tensor, weights), map(torch.tensor, alone[0]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
