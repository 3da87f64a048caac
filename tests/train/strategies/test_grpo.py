"""GRPO runs: the loss by hand, sampler and trainer agreeing to the bit, the same on ranks, resumed among its updates."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from grpo_runs import ONLINE, rollouts, run
from records import part
from safetensors.torch import load_file
from support import TINY, digest, run_ranks, tensors_of, tiny_config, try_ranks, whole_weights

from pellucid import save_model
from pellucid.cli import main
from pellucid.config import ModelConfig, load_config
from pellucid.data.record_files import Record
from pellucid.errors import ConfigError, TrainingError
from pellucid.inference import Engine, SamplingParams
from pellucid.model import Transformer
from pellucid.train import Trainer
from pellucid.train.grpo_losses import token_log_probs

pytestmark = pytest.mark.usefixtures("rewards")


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    run(data=rollouts(), train__steps=1)


def log_of(out, event=None):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for key in ("time", "seconds", "tokens_per_s", "update_tokens_per_s"):
            line.pop(key, None)
    return [line for line in lines if event in (None, line["event"])]


# -- the loss -----------------------------------------------------------------------------------------------


def by_hand(policy, reference, data, numbers, *, old=None, denominator, advantage, kl_coef, temperature=1.0, longest=5):
    """The loss of stored groups, each answer in a forward of its own; with what the policy said of it, by answer."""
    terms, tokens, sequences, said = [], 0, 0, {}
    for number in numbers:
        record = data.split.record(number)
        prompt, *answers = record.parts
        rewards = np.array(record.table["rewards"], float)
        advantages = rewards - rewards.mean()
        if advantage == "grpo":
            advantages = advantages / (rewards.std(ddof=1) + 1e-4)
        for i, answer in enumerate(answers):
            ids = torch.tensor([*prompt.ids, *answer.ids])
            places = [len(prompt.ids) - 1 + k for k in range(len(answer.ids)) if answer.learnt[k]]

            def log_probs(model, ids=ids, places=places):
                every = (model(ids[None, :-1]).logits[0].double() / temperature).log_softmax(-1)
                return every.gather(1, ids[1:, None])[places, 0]

            now, anchor = log_probs(policy), log_probs(reference).detach()
            said[number, i] = now.detach()
            before = now.detach() if old is None else old[number, i]
            ratio = (now - before).exp()
            loss = -torch.minimum(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
            loss = loss + kl_coef * ((anchor - now).exp() - (anchor - now) - 1)
            terms.append(loss)
            tokens, sequences = tokens + len(places), sequences + 1
    if denominator == "sequence":
        return sum(t.mean() for t in terms if len(t)) / sequences, said
    return sum(t.sum() for t in terms) / (tokens if denominator == "token" else sequences * longest), said


@pytest.mark.parametrize("denominator", ["sequence", "token", "constant"])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo"])
def test_offline_steps_are_those_of_a_plain_loop_over_single_answers(denominator, advantage):
    """Two windows of five groups, two updates of SGD on each: ratios are to the policy before the first of the two."""
    rate, options = 0.5, dict(denominator=denominator, advantage=advantage, kl_coef=0.1, temperature=0.8)
    data = rollouts()
    trainer, seen = run(
        data=data, optim__name="sgd", optim__lr=rate, optim__max_grad_norm="none", train__global_batch=5,
        model__max_position_embeddings=16, strategy__updates=2, **{f"strategy__{name}": value for name, value in options.items()},
    )  # fmt: skip
    shape = ModelConfig(**TINY | {"initializer_range": 0.3})
    policy, reference = (Transformer(shape, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    start = [p.detach().clone() for p in policy.parameters()]
    loader = replace_loader(trainer)
    for step, info in enumerate(seen.infos):
        numbers = list(dict.fromkeys(n for batch in loader.next_window() for n in batch.group_ids.tolist() if n >= 0))
        old = None if step % 2 == 0 else said  # noqa: F821 - of the step before
        loss, now = by_hand(policy, reference, data, numbers, old=old, **options)
        said = now  # noqa: F841
        assert info.loss == pytest.approx(loss.item(), rel=2e-3, abs=2e-5)
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in policy.parameters():
                p.sub_(rate * p.grad)
    assert any(info.metrics["clip_fraction"] > 0 for info in seen.infos) and seen.infos[-1].metrics["kl"] > 1e-4
    for ours, theirs, before in zip(trainer.model.parameters(), policy.parameters(), start, strict=True):
        moved = (theirs - before).norm()
        # a ratio next to the clip may fall on either side of it: the steps are large
        assert moved > 0 and (ours - theirs).norm() < 1e-2 * moved


def replace_loader(trainer):
    from pellucid.data.batches import Loader

    given = trainer.setup.loader
    return Loader(
        given.windows,
        global_batch=given.global_batch,
        micro_batch=given.micro_batch,
        seed=given.seed,
        repeats=given.repeats,
    )


def test_ratios_of_stored_log_probabilities_are_to_these():
    data = rollouts(old=True)
    trainer, seen = run(
        data=data, train__steps=1, train__global_batch=9, strategy__kl_coef=0.0, model__max_position_embeddings=16
    )
    shape = ModelConfig(**TINY | {"initializer_range": 0.3})
    policy = Transformer(shape, generator=torch.Generator().manual_seed(3))
    old = {
        (n, i): torch.tensor(logprobs)[torch.from_numpy(answer.learnt)]
        for n in range(9)
        for i, (logprobs, answer) in enumerate(
            zip(data.split.record(n).table["old_logprobs"], data.split.record(n).parts[1:], strict=True)
        )
    }
    options = dict(denominator="sequence", advantage="grpo", kl_coef=0.0)
    expected, _ = by_hand(policy, policy, data, range(9), old=old, **options)
    fresh, _ = by_hand(policy, policy, data, range(9), **options)
    assert seen.infos[0].loss == pytest.approx(expected.item(), rel=1e-4) and abs(expected - fresh) > 1e-3
    assert seen.infos[0].metrics["kl_sampler"] > 0.01 and "kl" not in seen.infos[0].metrics
    assert trainer.setup.strategy._reference is None, "nothing is held for a weight of 0"


# -- sampler and trainer ------------------------------------------------------------------------------------


@pytest.fixture
def ratios(monkeypatch):
    """Those of each training forward, and whether its old log-probabilities were kept from before."""
    from pellucid.train.strategies import grpo

    seen, given = [], grpo.clipped_policy_loss

    def watched(log_probs, old, advantages, mask, **clips):
        if torch.is_grad_enabled():
            seen.append(((log_probs.detach() - old).exp()[mask], old is not log_probs and old.data_ptr() != 0))
        return given(log_probs, old, advantages, mask, **clips)

    monkeypatch.setattr(grpo, "clipped_policy_loss", watched)
    return seen


CANONICAL = dict(
    model__attend="canonical",
    model__intermediate_size=32,
    train__steps=6,
    strategy__updates=2,
    strategy__max_tokens=12,
    optim__lr=3e-2,
)


@pytest.mark.parametrize(
    "dtype, temperature",
    [("float32", 1.0), ("bfloat16", 1.0), ("float32", 0.7), pytest.param("bfloat16", 0.7, marks=pytest.mark.slow)],
)
def test_with_canonical_attention_the_first_ratio_is_exactly_one(prompts, ratios, dtype, temperature):
    """And the engine told, token by token and all answers together, what the trainer's forward says, to the bit."""
    trainer, seen = run(prompts, train__dtype=dtype, strategy__temperature=temperature, **CANONICAL)
    answers = [a for group in trainer.setup.strategy.answers.values() for a in group]
    assert all((a.old == a.sampler) == (temperature == 1.0) for a in answers)
    assert all(a.trainer == a.sampler for a in answers) and len({a.reward for a in answers}) > 2
    for step, info in enumerate(seen.infos):
        every = torch.cat([r for r, _ in ratios[6 * step : 6 * step + 6]])
        assert info.metrics["kl_sampler"] == 0.0
        if step % 2 == 0:
            assert (every == 1.0).all() and len(every) > 50
        else:
            assert (every != 1.0).float().mean() > 0.9, "the weights have moved"


def test_with_bfloat16_weights_too_the_engine_says_what_the_trainers_forward_says():
    shape = ModelConfig(**TINY | {"attend": "canonical", "max_position_embeddings": 64, "initializer_range": 0.3})
    model = Transformer(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    engine = Engine(model, kv_gb=0.01, page_size=16)
    prompts = [[1, 2, 3], list(range(20)), [5]]
    results = engine.generate(prompts, SamplingParams(max_tokens=30, n=3, seed=1))
    rows = [prompt + result.ids for prompt, result in zip([p for p in prompts for _ in range(3)], results, strict=True)]
    tokens = torch.tensor([row + [0] * (64 - len(row)) for row in rows])
    said = token_log_probs(model(tokens[:, :-1]).logits, tokens[:, 1:])
    for prompt, result, row in zip([p for p in prompts for _ in range(3)], results, said, strict=True):
        first = len(prompt) - 1
        assert row[first : first + len(result.ids)].tolist() == result.logprobs


@pytest.mark.parametrize("updates", [1, 2])
def test_elsewhere_the_trainer_supplies_old_log_probabilities_and_the_mismatch_is_logged(
    prompts, ratios, updates, monkeypatch
):
    monkeypatch.setattr("pellucid.model.linear._processor_emulates", lambda: False)  # else they agree almost to the bit
    trainer, seen = run(prompts, train__dtype="bfloat16", strategy__updates=updates, model__initializer_range=0.5)
    first = torch.cat([r for r, _ in ratios[:6]])
    assert (first - 1).abs().max() < 1e-5
    assert all(info.metrics["kl_sampler"] > 1e-7 for info in seen.infos), "bfloat16 in another order rounds otherwise"
    answers = [a for group in trainer.setup.strategy.answers.values() for a in group]
    assert all(len(a.trainer) == (a.num_learnt if updates > 1 else 0) for a in answers)


def test_rollouts_read_the_weights_in_training_themselves(prompts, monkeypatch):
    from pellucid.train import rollout

    models = []

    def engine(model, **options):
        models.append(model)
        return Engine(model, **options)

    monkeypatch.setattr(rollout, "Engine", engine)
    trainer, _ = run(prompts, train__steps=2)
    assert len(models) == 2 and all(model is trainer.setup.model for model in models)
    assert trainer.setup.model.training


def test_answers_to_a_prompt_share_its_pages(prompts, monkeypatch):
    from pellucid.train import rollout

    engines = []

    def engine(model, **options):
        engines.append(Engine(model, **options))
        return engines[-1]

    monkeypatch.setattr(rollout, "Engine", engine)
    trainer, _ = run(prompts, train__steps=1, strategy__completions=8)
    lengths = [len(a.ids) - a.num_learnt for group in trainer.setup.strategy.answers.values() for a in group[:1]]
    assert engines[0].stats().prefilled + engines[0].stats().reused == sum(lengths), "each prompt is computed once"


def test_answers_are_drawn_together_as_far_as_their_logits_have_room(prompts, monkeypatch):
    from pellucid.train import rollout

    engines = []
    monkeypatch.setattr(rollout, "Engine", lambda *a, **k: engines.append(Engine(*a, **k)) or engines[-1])
    more = dict(train__steps=1, strategy__completions=16)
    run(prompts, **more)
    monkeypatch.setattr(rollout, "DRAWN_LOGITS", 70 * 259)
    run(prompts, **more)
    assert [engine.scheduler.max_running for engine in engines] == [96, 70]
    assert engines[0].stats().forwards <= 6 < engines[1].stats().forwards, (
        "the prompts, then five tokens of all answers"
    )


def test_only_what_is_learnt_has_logits(prompts, monkeypatch):
    """In the update and of the reference: of 18 answers of some four tokens behind four of a prompt."""
    seen, given = [], Transformer.head
    monkeypatch.setattr(Transformer, "head", lambda model, hidden: seen.append(len(hidden)) or given(model, hidden))
    trainer, _ = run(prompts, train__steps=1, train__micro_batch=6)
    learnt = sum(a.num_learnt for group in trainer.setup.strategy.answers.values() for a in group)
    assert 18 <= learnt <= 90 and seen[-2:] == [learnt, learnt]


def test_what_rewards_are_given_is_what_was_said(prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    trainer, seen = run(prompts, train__steps=1, strategy__rewards=["grpo_rewards:seen", "grpo_rewards:same"])
    lines = [eval(line) for line in (tmp_path / "seen").read_text().splitlines()]
    answers = [a for group in trainer.setup.strategy.answers.values() for a in group]
    said = sorted(trainer.setup.tokenizer.decode(a.ids[-a.num_learnt :]) for a in answers)
    assert sorted(completion for _, completion, _ in lines) == said and len(lines) == 18
    assert all(prompt == record["prompt"] and eval(prompt[:-1]) == int(record["answer"]) for prompt, _, record in lines)
    assert seen.infos[0].metrics["reward"] == pytest.approx(0.1), "rewards add up"


# -- a step of the whole ------------------------------------------------------------------------------------


def test_rewards_rise(prompts, tmp_path):
    _, seen = run(
        prompts, tmp_path, train__steps=25, optim__lr=0.03, strategy__kl_coef=0.0, strategy__completions=8, train__micro_batch=6,
        train__val_every=25,
    )  # fmt: skip
    lines = log_of(tmp_path, "rollout")
    first, last = (np.mean([line["reward"] for line in some]) for some in (lines[:5], lines[-5:]))
    assert first < 0.65 and last > first + 0.2
    assert (
        seen.validations[-1].loss == pytest.approx(-seen.validations[-1].metrics["reward"])
        and seen.validations[-1].loss < -0.7
    )
    assert seen.validations[-1].unit == "sequences" and seen.validations[-1].tokens == 7


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_finished_run_can_be_validated_again(prompts, temperature):
    trainer, seen = run(prompts, train__val_every=4, strategy__temperature=temperature)
    again = trainer.validate()
    assert again == seen.validations[-1] and again.metrics["kl_sampler"] < 1e-9 and trainer.model.training
    trainer.setup.strategy.close()


def test_equal_rewards_leave_the_policy_alone(prompts, tmp_path):
    trainer, seen = run(
        prompts, tmp_path, strategy__rewards=["grpo_rewards:same"], strategy__kl_coef=0.0, optim__weight_decay=0.0
    )
    assert all(info.grad_norm == 0 and info.loss == 0 for info in seen.infos)
    assert all(line["equal_groups"] == 1 and line["reward_spread"] == 0 for line in log_of(tmp_path, "rollout"))
    assert digest(trainer.model) == digest(Trainer(trainer.config).model)


def test_a_line_of_each_rollout_stands_in_the_log(prompts, tmp_path):
    _, seen = run(prompts, tmp_path, strategy__updates=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["event"] == "rollout"]
    assert [line["step"] for line in lines] == [1, 3] and all(line["answers"] == 18 for line in lines)
    keys = {"reward", "reward_spread", "equal_groups", "response_tokens", "unended"}
    for line in lines:
        assert {*line} >= keys and line["seconds"] > 0 and line["tokens_per_s"] > 0 and line["update_tokens_per_s"] > 0
        assert line["reward"] == pytest.approx(seen.infos[line["step"] - 1].metrics["reward"])
        assert 0 < line["reward_spread"] < 1 and 1 <= line["response_tokens"] <= 5
    assert seen.infos[0].metrics["entropy"] > 1


# -- modes --------------------------------------------------------------------------------------------------

STEP = dict(
    optim__name="sgd", optim__lr=1.0, train__steps=2, optim__max_grad_norm="none", strategy__updates=2,
    model__attend="canonical", strategy__denominator="token",
)  # fmt: skip


def outcome(prompts, **changes):
    trainer, seen = run(prompts, **(STEP | changes))
    answers = [[a.group, a.ids, a.reward] for group in trainer.setup.strategy.answers.values() for a in group]
    infos = [*seen.infos, *seen.validations]
    for info in infos:
        info.metrics.pop("computed_tokens")  # what is shared within a micro-batch depends on its size
    logged = [value for info in infos for value in (info.loss, *info.metrics.values())]
    return [whole_weights(trainer.setup.executor), logged, sorted(answers)]


@pytest.mark.parametrize(
    "mode, size",
    [("ddp", 2), ("zero1", 3), ("zero2", 2), *(pytest.param(m, s, marks=pytest.mark.slow) for m, s in (
        ("ddp", 3), ("zero1", 2), ("zero2", 3), ("torch_ddp", 2)))],
)  # fmt: skip
def test_steps_on_ranks_are_those_of_one_process(prompts, mode, size):
    """The same answers, to the bit, are drawn on ranks; two updates of SGD then move weights alike."""
    alone = outcome(prompts, train__micro_batch=6, train__val_every=2)
    start = [p.detach() for p in Trainer(tiny_config(**ONLINE | {"data__path": str(prompts)})).model.parameters()]
    for weights, logged, answers in run_ranks(lambda: outcome(prompts, parallel__mode=mode, train__val_every=2), size):
        assert answers == alone[2]
        assert logged == pytest.approx(alone[1], rel=1e-4, abs=1e-6)
        for before, ours, theirs in zip(start, map(torch.tensor, weights), map(torch.tensor, alone[0]), strict=True):
            moved = (theirs - before).norm()
            assert (ours - theirs).norm() < 1e-3 * moved + 1e-6 * before.norm() < moved / 10


def test_ranks_with_more_and_fewer_stored_answers_step_as_one_process():
    def outcome(**changes):
        trainer, seen = run(data=rollouts(9), model__max_position_embeddings=16, **(STEP | changes))
        return [whole_weights(trainer.setup.executor), [info.loss for info in seen.infos]]

    alone = outcome(train__micro_batch=6)
    for weights, losses in run_ranks(lambda: outcome(parallel__mode="ddp"), 3):
        assert losses == pytest.approx(alone[1], rel=1e-4, abs=1e-6)
        for ours, theirs in zip(weights, alone[0], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["zero3", "fsdp2"])
def test_modes_that_shard_weights_are_refused_with_the_way_out(prompts, mode, capfd):
    statuses, _ = try_ranks(lambda: run(prompts, parallel__mode=mode)[0].state.step, 2)
    said = capfd.readouterr().err
    assert statuses == [1, 1] and f"parallel.mode is {mode}, which shards weights" in said and 'choose "zero2"' in said


# -- stopping and resuming ----------------------------------------------------------------------------------

HALF = dict(
    train__steps=11, strategy__updates=3, strategy__reference_every=6, train__save_every=20, train__val_every=4, optim__lr=3e-2,
    strategy__advantage="dr_grpo",
)  # fmt: skip


@pytest.mark.parametrize("stop", [2, 8, pytest.param(9, marks=pytest.mark.slow)])
def test_a_run_stopped_among_its_updates_goes_on_to_the_bit(prompts, tmp_path, stop):
    """Stopped after the second update of a rollout (2, 8), with a reference that has changed (8, 9), and between two (9)."""
    whole, _ = run(prompts, tmp_path / "whole", **HALF)
    half, _ = run(prompts, tmp_path / "half", stop_at=stop, **HALF)
    assert half.state.step == stop
    extra = load_file(tmp_path / f"half/checkpoints/step_{stop:08d}/extra/grpo.safetensors")
    assert any(name.startswith("answers/") for name in extra) == (stop % 3 != 0)
    assert any(name.startswith("reference/") for name in extra) == (stop > 6)
    rest, _ = run(prompts, tmp_path / "half", resume=True, **HALF)
    assert rest.state.step == 11 and digest(rest.model) == digest(whole.model)
    ours, theirs = (tensors_of(tmp_path / name / "checkpoints/step_00000011") for name in ("half", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    saves = [[line for line in log_of(tmp_path / name) if line["event"] != "save"] for name in ("half", "whole")]
    assert saves[0] == saves[1]
    state = [
        load_file(tmp_path / name / "checkpoints/step_00000011/extra/grpo.safetensors") for name in ("half", "whole")
    ]
    assert all(torch.equal(state[0][key], state[1][key]) for key in state[1]) and state[0].keys() == state[1].keys()


def test_a_run_stopped_among_its_updates_goes_on_on_other_ranks(prompts, tmp_path):
    """Two ranks stop after the second of three updates, one process goes on: the same answers are learnt from."""
    changes = HALF | {"model__attend": "canonical", "optim__name": "sgd", "optim__lr": 0.5, "train__val_every": 0}
    changes = changes | {"optim__max_grad_norm": "none"}
    whole, _ = run(prompts, tmp_path / "whole", **changes | {"train__micro_batch": 6, "train__steps": 3})
    run_ranks(
        lambda: (
            run(prompts, tmp_path / "half", stop_at=2, parallel__mode="zero2", **changes | {"train__steps": 3})[
                0
            ].state.step
        ),
        2,
    )
    rest, seen = run(prompts, tmp_path / "half", resume=True, **changes | {"train__micro_batch": 6, "train__steps": 3})
    assert [info.step for info in seen.infos] == [3]
    ours, theirs = (
        [a.ids for g in sorted(t.setup.strategy.answers) for a in t.setup.strategy.answers[g]] for t in (rest, whole)
    )
    assert ours == theirs
    for a, b in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_stored_rollouts_resume_among_their_updates(tmp_path):
    changes = HALF | {"train__steps": 5, "train__val_every": 0, "model__max_position_embeddings": 16}
    whole, _ = run(None, tmp_path / "whole", data=rollouts(), **changes)
    run(None, tmp_path / "half", data=rollouts(), stop_at=2, **changes)
    rest, _ = run(None, tmp_path / "half", data=rollouts(), resume=True, **changes)
    assert digest(rest.model) == digest(whole.model) and log_of(tmp_path / "half", "step") == log_of(
        tmp_path / "whole", "step"
    )


# -- the reference ------------------------------------------------------------------------------------------


def test_below_an_adapter_the_reference_is_the_base_and_no_second_model(prompts, tmp_path):
    plain, _ = run(prompts, train__steps=1)
    save_model(tmp_path / "base", plain.model, plain.setup.tokenizer)
    lora = {"r": 2, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    changes = {"train__init": str(tmp_path / "base"), "lora": lora, "optim__lr": 0.1}
    trainer, seen = run(prompts, **changes)
    assert trainer.setup.strategy._reference.model is trainer.model
    assert seen.infos[0].metrics["kl"] < 1e-9 < 1e-5 < seen.infos[-1].metrics["kl"]


def test_a_refreshed_reference_is_the_model_of_that_step(prompts):
    _, fixed = run(prompts, train__steps=6, optim__lr=3e-2)
    _, moved = run(prompts, train__steps=6, optim__lr=3e-2, strategy__reference_every=3)
    kl = [[info.metrics["kl"] for info in seen.infos] for seen in (fixed, moved)]
    assert kl[0][:3] == kl[1][:3] and kl[1][3] < 1e-9 < 1e-5 < kl[0][3] and kl[1][5] > 1e-6


# -- what goes wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reward, words",
    [("raises", "raised KeyError"), ("nan", "returned nan"), ("late", "did not return within 0.3 s")],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_reward_that_fails_ends_the_run_on_every_rank_with_its_name(prompts, tmp_path, reward, words, size, capfd):
    changes = dict(strategy__rewards=[f"grpo_rewards:{reward}"], strategy__reward_timeout_s=0.3)
    if size == 1:
        with pytest.raises(TrainingError, match=f"reward grpo_rewards:{reward} {words}"):
            run(prompts, tmp_path, **changes)
        return
    statuses, _ = try_ranks(lambda: run(prompts, tmp_path, parallel__mode="ddp", **changes)[0].state.step, size)
    assert statuses == [1, 1] and f"reward grpo_rewards:{reward} {words}" in capfd.readouterr().err


def test_completions_that_never_end_are_cut_and_counted(prompts, tmp_path):
    trainer, _ = run(prompts, tmp_path, train__steps=1, strategy__max_tokens=7)
    answers = [a for group in trainer.setup.strategy.answers.values() for a in group]
    cut = [a for a in answers if not a.ended]
    assert cut and all(a.num_learnt == 7 for a in cut)
    assert len(cut) > 9 and log_of(tmp_path, "rollout")[0]["unended"] == pytest.approx(len(cut) / len(answers))


def test_the_window_ends_a_completion_too(prompts):
    trainer, _ = run(prompts, train__steps=1, strategy__max_tokens=100, model__max_position_embeddings=16)
    answers = [a for group in trainer.setup.strategy.answers.values() for a in group]
    assert max(len(a.ids) for a in answers) == 16 and {len(a.ids) for a in answers if not a.ended} == {16}


def test_an_empty_completion_is_one_token_that_counts(prompts, monkeypatch, tmp_path):
    """A model that says nothing but the end."""
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    config = tiny_config(
        **ONLINE | {"data__path": str(prompts), "strategy__rewards": ["grpo_rewards:seen"], "train__steps": 2}
    )
    trainer = Trainer(config)
    (end, *_) = trainer.setup.tokenizer.stop_ids
    with torch.no_grad():
        trainer.model.model.embed_tokens.weight[end] = 0
        trainer.model.model.norm.weight.zero_()  # all logits are 0
    given = trainer.setup.model.head
    monkeypatch.setattr(
        trainer.setup.model,
        "head",
        lambda hidden: given(hidden) + 50 * torch.nn.functional.one_hot(torch.tensor(end), 259),
    )
    trainer.train()
    answers = [a for group in trainer.setup.strategy.answers.values() for a in group]
    assert all(a.num_learnt == 1 and a.ended for a in answers)
    assert {eval(line)[1] for line in (tmp_path / "seen").read_text().splitlines()} == {""}


def test_a_constant_added_to_stored_rewards_changes_nothing_even_a_large_one():
    norms = []
    for constant in (0, 2**40):
        data = rollouts(6)
        for record in data.split.records:
            record.table["rewards"] = [round(reward) + constant for reward in record.table["rewards"]]
        assert any(len(set(record.table["rewards"])) > 1 for record in data.split.records)
        _, seen = run(data=data, train__steps=1, model__max_position_embeddings=16)
        norms.append(seen.infos[0].grad_norm)
    assert norms[0] == norms[1] > 0


def test_stored_answers_of_which_nothing_counts_add_nothing(tmp_path):
    data = rollouts(6)
    record = data.split.records[0]
    data.split.records[0] = Record((record.parts[0], *(part(p.ids, False) for p in record.parts[1:])), record.table)
    _, seen = run(data=data, train__steps=1, train__global_batch=6, model__max_position_embeddings=16)
    assert np.isfinite(seen.infos[0].loss) and np.isfinite(seen.infos[0].grad_norm) and seen.infos[0].grad_norm > 0


def test_a_stored_group_of_one_teaches_nothing_and_stays_finite():
    data = rollouts(6, answers=(1, 2))
    _, seen = run(data=data, train__steps=1, model__max_position_embeddings=16, strategy__kl_coef=0.0)
    assert seen.infos[0].loss == 0 and seen.infos[0].grad_norm == 0 and seen.infos[0].metrics["entropy"] > 0


def test_a_prompt_longer_than_the_window_is_left_out_or_refused(prompts, tmp_path, data_folder):
    lines = [{"prompt": "1+1=", "answer": "2"}] * 8 + [{"prompt": "1+" * 40 + "1=", "answer": "41"}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [
        "prepare",
        str(tmp_path / "long.jsonl"),
        "--for",
        "grpo",
        "--tokenizer",
        str(prompts),
        "--chat-template",
        "none",
    ]
    assert main([*arguments, "--out", str(tmp_path / "data"), "--val-fraction", "0"]) == 0
    trainer, _ = run(tmp_path / "data", train__steps=2, train__global_batch=4)
    assert len(trainer.setup.loader.windows) == 8 and any("left out" in note for note in trainer.setup.notes)
    from pellucid.errors import DataError

    with pytest.raises(DataError, match=r"and 31 have room.*raise data.context"):
        run(tmp_path / "data", data__truncate="refuse")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rewards": ["exact_mach"]}, "unknown reward 'exact_mach'; did you mean exact_match"),
        ({"rewards": ["mine:"]}, "'mine:' is neither a registered name nor module:function"),
        ({"completions": 1}, "strategy.completions is 1.*take at least 2"),
        ({"updates": 0}, "strategy.updates must be at least 1"),
        ({"temperature": 0.0}, "strategy.temperature must be positive"),
        ({"clip_low": 1.5}, "strategy.clip_low must be in"),
        ({"kl_coef": -1.0}, "strategy.kl_coef must be finite and not negative"),
        ({"updates": 2, "reference_every": 3}, "reference_every is 3 and must be a multiple of strategy.updates"),
        ({"reference_every": 2, "kl_coef": 0.0}, "reference_every is 2 and strategy.kl_coef is 0.0"),
        ({"denominator": "tokens"}, "strategy.denominator must be one of"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(changes, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, {"strategy.name": "grpo", **{f"strategy.{name}": value for name, value in changes.items()}})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"strategy__rewards": []}, "strategy.rewards is empty"),
        ({"model__dropout": 0.1}, "model.dropout is not 0"),
        ({"strategy__rewards": ["grpo_rewards:evn"]}, "no function 'evn'"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_its_first_step(prompts, changes, words):
    with pytest.raises(ConfigError, match=words):
        run(prompts, **changes)


def test_rewards_for_stored_answers_are_refused():
    with pytest.raises(ConfigError, match="the data has answers with rewards of their own"):
        run(data=rollouts(), strategy__rewards=["exact_match"])


def test_validation_of_stored_answers_is_their_loss():
    trainer, seen = run(
        data=rollouts(),
        val_data=rollouts(5, seed=4),
        train__val_every=2,
        train__steps=2,
        model__max_position_embeddings=16,
    )
    assert np.isfinite(seen.validations[0].loss) and seen.validations[0].tokens == sum(
        len(record.parts) - 1 for record in rollouts(5, seed=4).split.records
    )
    assert trainer.model.training


def test_a_preview_of_memory_counts_every_answer(prompts):
    from pellucid.train.estimate import estimate

    few, many = (
        estimate(Trainer(tiny_config(**ONLINE | {"data__path": str(prompts), "strategy__completions": n})).setup)
        for n in (2, 8)
    )
    assert many.activation_bytes > 3 * few.activation_bytes and many.tokens_per_step == 4 * few.tokens_per_step
    assert replace(few, where="") != many
