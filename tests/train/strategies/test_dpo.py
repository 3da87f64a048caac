"""DPO runs: the loss by hand, ln 2 at the start, the same in every mode, resumed bit for bit."""

import json
import math

import pytest
import torch
from records import pairs
from support import TINY, Seen, digest, run_ranks, tensors_of, tiny_config, whole_weights

from pellucid import save_model
from pellucid.config import ModelConfig
from pellucid.data.batches import Loader
from pellucid.errors import CheckpointError, ConfigError
from pellucid.model import Transformer
from pellucid.model.lora import is_adapter_weight
from pellucid.train import Trainer
from pellucid.train.strategies import Dpo, DpoOptions

MODES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp")
LORA = {"r": 2, "alpha": 8.0, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    save_model(folder, Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1)))
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "other"
    shape = TINY | {"hidden_size": 24, "num_hidden_layers": 3}
    save_model(folder, Transformer(ModelConfig(**shape), generator=torch.Generator().manual_seed(2)))
    return folder


def run(out="", *, resume=False, stop_at=None, data=None, val_data=None, **changes):
    settings = dict(
        strategy__name="dpo", train__steps=4, train__global_batch=6, train__micro_batch=1, train__val_every=2,
        train__save_every=2, train__keep_last=0, optim__warmup_steps=0, optim__schedule="constant",
    )  # fmt: skip
    if "optim__name" not in changes:
        settings["optim__eps"] = 1e-4
    seen = Seen(stop_at)
    trainer = Trainer(
        tiny_config(out, **(settings | changes)),
        train_data=data or pairs(21),
        val_data=val_data or pairs(7, seed=5),
        callbacks=[seen],
    )
    trainer.train(resume=resume)
    return trainer, seen


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    run(train__steps=1, train__val_every=0)


def log_prob(model, ids, prompt):
    """Of the tokens after the first ``prompt`` ones, of a sequence on its own, without padding."""
    tokens = torch.tensor(ids)[None]
    log_probs = model(tokens[:, :-1]).logits[0].double().log_softmax(-1)
    return log_probs.gather(1, tokens[0, 1:, None])[prompt - 1 :].sum(), len(ids) - prompt


def by_hand(policy, reference, data, numbers, *, beta, normalised=False, ipo=False):
    """The mean loss of pairs one by one, each answer alone."""
    total = 0.0
    for number in numbers:
        prompt, chosen, rejected = (part.ids.tolist() for part in data.split.record(number).parts)
        ratios = []
        for answer in (chosen, rejected):
            (ours, n), (theirs, _) = (log_prob(m, prompt + answer, len(prompt)) for m in (policy, reference))
            ratios.append((ours - theirs.detach()) / (n if normalised else 1))
        h = ratios[0] - ratios[1]
        total = total + ((h - 1 / (2 * beta)) ** 2 if ipo else -torch.nn.functional.logsigmoid(beta * h))
    return total / len(numbers)


VARIANTS = {
    "sigmoid": ({}, {}),
    "normalised": ({"strategy__length_normalised": True}, {"normalised": True}),
    "ipo": ({"strategy__variant": "ipo"}, {"ipo": True}),
    "ipo, normalised": (
        {"strategy__variant": "ipo", "strategy__length_normalised": True},
        {"ipo": True, "normalised": True},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_are_those_of_a_plain_loop_over_single_answers(name):
    """Packed into 2 P padded rows, with a reference computed ahead: the same weights after three steps of SGD."""
    changes, options = VARIANTS[name]
    rate = 0.3 if "ipo" not in name else 0.005
    trainer, seen = run(
        optim__name="sgd", optim__lr=rate, strategy__beta=0.5, optim__max_grad_norm="none", train__steps=3, train__val_every=0,
        **changes,
    )  # fmt: skip
    policy, reference = (Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    start = [p.detach().clone() for p in policy.parameters()]
    data = pairs(21)
    loader = Loader(data, global_batch=6, micro_batch=6, seed=3)
    for info in seen.infos:
        (batch,) = loader.next_window()
        loss = by_hand(policy, reference, data, batch.pair_ids.tolist(), beta=0.5, **options)
        assert info.loss == pytest.approx(loss.item(), rel=1e-4)
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in policy.parameters():
                p.sub_(rate * p.grad)
    for ours, theirs, before in zip(trainer.model.parameters(), policy.parameters(), start, strict=True):
        moved = (theirs - before).norm()
        assert moved > 0 and (ours - theirs).norm() < 2e-3 * moved


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, math.log(2)),
        ({"strategy__label_smoothing": 0.2}, math.log(2)),
        ({"strategy__length_normalised": True}, math.log(2)),
        ({"strategy__reference": "live"}, math.log(2)),
        ({"strategy__variant": "ipo", "strategy__beta": 0.25}, 4.0),
        ({"train__dtype": "bfloat16"}, math.log(2)),
    ],
)
def test_the_first_loss_is_that_of_a_policy_that_equals_its_reference(changes, expected):
    _, seen = run(train__steps=2, **changes)
    first, second = seen.infos
    tolerance = 1e-6 if "train__dtype" not in changes else 5e-3
    assert first.loss == pytest.approx(expected, rel=tolerance)
    for name in ("margin", "chosen_reward", "rejected_reward"):
        assert first.metrics[name] == pytest.approx(0.0, abs=tolerance)
        assert abs(second.metrics[name]) > 1e-4
    assert second.loss != first.loss


def test_metrics_are_means_over_pairs_and_validation_has_them():
    trainer, seen = run(train__steps=6, optim__lr=0.03)
    assert {*seen.infos[0].metrics} == {"accuracy", "margin", "chosen_reward", "rejected_reward"}
    for info in [*seen.infos, *seen.validations]:
        m = info.metrics
        assert 0 <= m["accuracy"] <= 1
        assert m["margin"] == pytest.approx(m["chosen_reward"] - m["rejected_reward"], abs=1e-6)
    assert [info.tokens for info in seen.validations] == [7] * 3 and seen.validations[0].unit == "pairs"
    assert seen.infos[-1].metrics["margin"] > 0.05 and seen.infos[-1].loss < 0.68
    # by hand: what the model says now, against what it was
    reference = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3))
    data = pairs(7, seed=5)
    with torch.no_grad():
        expected = by_hand(trainer.model.eval(), reference, data, range(7), beta=0.1).item()
    assert seen.validations[-1].loss == pytest.approx(expected, rel=1e-5)


def test_validation_has_no_label_smoothing():
    plain, smoothed = (
        run(optim__lr=0.03, strategy__label_smoothing=s, optim__name="sgd", train__steps=2)[1] for s in (0.0, 0.3)
    )
    assert smoothed.infos[1].loss != plain.infos[1].loss
    trainer, seen = run(train__steps=2, optim__lr=0.03, strategy__label_smoothing=0.3)
    reference = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = by_hand(trainer.model.eval(), reference, pairs(7, seed=5), range(7), beta=0.1).item()
    assert seen.validations[-1].loss == pytest.approx(expected, rel=1e-5)


# -- modes --------------------------------------------------------------------------------------------------

STEP = dict(
    optim__name="sgd", optim__lr=1.0, train__steps=1, train__val_every=1, optim__max_grad_norm="none", strategy__beta=0.5,
)  # fmt: skip


def outcome(**changes):
    trainer, seen = run(**(STEP | changes))
    info, validation = seen.infos[-1], seen.validations[-1]
    names = list(trainer.setup.executor.weight_shapes())
    logged = [info.loss, info.supervised, validation.loss, *info.metrics.values(), *validation.metrics.values()]
    return [dict(zip(names, whole_weights(trainer.setup.executor), strict=True)), logged]


@pytest.fixture(scope="module")
def alone():
    """One process, by what was changed: all pairs of a step in one forward."""
    known = {}

    def get(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            known[key] = outcome(train__micro_batch=6, **changes)
        return known[key]

    return get


def check(ranks, expected):
    """One step of SGD moved every weight as on one process; losses and metrics are the same."""
    start = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(3))
    for weights, logged in ranks:
        assert logged == pytest.approx(expected[1], rel=1e-5, abs=1e-6)
        for name, parameter in start.named_parameters():
            ours, theirs = (torch.tensor(w[name]) for w in (weights, expected[0]))
            moved = (theirs - parameter.detach()).norm()
            tolerance = 1e-4 * moved + 3e-7 * parameter.norm()
            assert (ours - theirs).norm() <= tolerance < moved / 10, name


@pytest.mark.parametrize(
    "mode, size, reference",
    [
        pytest.param(mode, size, reference, marks=[] if (size == 3) == (reference == "live") else pytest.mark.slow)
        for mode in MODES for size in (2, 3) for reference in ("precomputed", "live")
    ],
)  # fmt: skip
def test_a_step_on_ranks_is_that_of_one_process(alone, mode, size, reference):
    """21 pairs, 6 a step; and a validation of 7, which no number of ranks divides."""
    ranks = run_ranks(lambda: outcome(parallel__mode=mode, strategy__reference=reference), size)
    check(ranks, alone())


def test_live_and_precomputed_references_say_the_same(alone):
    live = outcome(train__micro_batch=6, train__steps=3, optim__lr=0.1, strategy__reference="live")
    ahead = outcome(train__micro_batch=6, train__steps=3, optim__lr=0.1)
    check([live], ahead)
    assert live[1][0] != pytest.approx(math.log(2), abs=1e-4), "by the third step the policy is another"


@pytest.mark.parametrize("mode", ["ddp", "zero3", "fsdp2"])
@pytest.mark.parametrize("reference", ["precomputed", "live"])
def test_a_reference_of_its_own_is_sharded_like_the_model(tmp_path, alone, other, mode, reference):
    """Another shape, the same vocabulary. Of a live one each rank gathers weights in every forward and holds its rows."""
    changes = dict(strategy__reference_model=str(other), strategy__reference=reference)

    def rank():
        trainer, seen = run(tmp_path / "run", parallel__mode=mode, **(STEP | changes))
        live = trainer.setup.strategy._live
        held = 0 if live is None else sum(p.numel() for p in _local(live.model))
        return [held, [seen.infos[-1].loss, seen.validations[-1].loss]]

    size = sum(
        p.numel() for p in Transformer(ModelConfig(**TINY | {"hidden_size": 24, "num_hidden_layers": 3})).parameters()
    )
    expected = alone(**changes)[1]
    assert expected[0] != pytest.approx(math.log(2), abs=1e-3), "the reference is another model"
    results = run_ranks(rank, 2)
    for _, losses in results:
        assert losses == pytest.approx([expected[0], expected[2]], rel=1e-5)
    held = [n for n, _ in results]
    if reference == "precomputed":
        assert held == [0, 0]
    elif mode == "ddp":
        assert held == [size, size]
    else:
        assert sum(held) < 1.1 * size and max(held) < 0.6 * size
    lines = [json.loads(text) for text in (tmp_path / "run/ledger/rank00000.jsonl").read_text().splitlines()]
    gathers = [line for line in lines if line["step"] == 1 and line["tag"].startswith("reference/")]
    assert bool(gathers) == (reference == "live" and mode != "ddp")


def _local(model):
    return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


# -- adapters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["precomputed", "live"])
def test_with_an_adapter_the_reference_is_the_base_below_it(base, reference):
    trainer, seen = run(train__init=str(base), lora=LORA, strategy__reference=reference, optim__lr=0.05)
    assert seen.infos[0].loss == pytest.approx(math.log(2), rel=1e-6)
    live = trainer.setup.strategy._live
    assert live is None or live.model is trainer.model, "no second model"
    bare = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = by_hand(trainer.model.eval(), bare, pairs(7, seed=5), range(7), beta=0.1).item()
    assert abs(expected - math.log(2)) > 1e-3, "the adapter does something"
    assert seen.validations[-1].loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "mode, reference",
    [
        ("zero3", "live"), ("zero1", "precomputed"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("zero1", "live"), ("zero3", "precomputed"), ("fsdp2", "live"), ("fsdp2", "precomputed")
        )),
    ],
)  # fmt: skip
def test_an_adapter_on_ranks_is_trained_as_on_one_process(base, mode, reference):
    changes = dict(train__init=str(base), lora=LORA, train__steps=3, optim__lr=0.3, strategy__reference=reference)
    names, weights, _ = _adapter(train__micro_batch=6, **changes)
    for _, got, loss in run_ranks(lambda: _adapter(parallel__mode=mode, **changes), 2):
        for name, ours, theirs in zip(names, got, weights, strict=True):
            if is_adapter_weight(name):
                torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=1e-3)
        assert loss < 0.6931


def _adapter(**changes):
    trainer, seen = run(**(STEP | changes))
    executor = trainer.setup.executor
    return [list(executor.weight_shapes()), whole_weights(executor), seen.infos[-1].loss]


# -- stopping and resuming ----------------------------------------------------------------------------------


def log_of(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for key in ("time", "seconds", "tokens_per_s"):
            line.pop(key, None)
    return [line for line in lines if line["event"] != "save"]


@pytest.mark.parametrize(
    "mode, size, reference",
    [
        ("none", 1, "precomputed"), ("zero3", 2, "live"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("none", 1, "live"), ("zero1", 2, "precomputed"), ("zero1", 2, "live"), ("zero3", 3, "precomputed"),
            ("zero3", 3, "live"), ("ddp", 3, "live"), ("zero2", 2, "precomputed"), ("fsdp2", 2, "live"),
        )),
    ],
)  # fmt: skip
def test_a_stopped_run_ends_with_the_bits_of_an_unbroken_one(tmp_path, mode, size, reference):
    changes = dict(parallel__mode=mode, strategy__reference=reference, train__steps=6)

    def unbroken():
        run(tmp_path / "a", **changes)

    def broken():
        first, _ = run(tmp_path / "b", stop_at=3, **changes)
        assert first.state.step == 3 and first.stop_reason == "SIGTERM"
        again, _ = run(tmp_path / "b", resume=True, **changes)
        return [again.state.step, digest(again.model)]

    if size == 1:
        unbroken()
        broken()
    else:
        run_ranks(unbroken, size)
        run_ranks(broken, size)
    a, b = (tensors_of(tmp_path / name / "checkpoints/step_00000006") for name in ("a", "b"))
    assert a.keys() == b.keys() and not [key for key in a if not torch.equal(a[key], b[key])]
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")


def test_what_the_reference_said_is_read_and_not_computed_again(tmp_path, monkeypatch):
    from pellucid.train import reference

    run(tmp_path, stop_at=2)
    asked = []
    whole = reference.Reference.__call__
    monkeypatch.setattr(reference.Reference, "__call__", lambda self, batch: asked.append(1) or whole(self, batch))
    trainer, _ = run(tmp_path, resume=True)
    assert trainer.state.step == 4 and asked == []


def test_what_the_reference_said_of_other_data_is_not_read(tmp_path, monkeypatch):
    from pellucid.train import reference

    asked = []
    whole = reference.Reference.__call__
    monkeypatch.setattr(reference.Reference, "__call__", lambda self, batch: asked.append(1) or whole(self, batch))
    for data, number in (("a", 21 + 7), ("a", 0), ("b", 7)):
        held_out = pairs(7, seed=5)
        monkeypatch.setattr(held_out.split, "identity", {"data": data}, raising=False)
        run(tmp_path, resume=True, val_data=held_out, train__steps=1)
        assert len(asked) == number
        asked.clear()


def test_a_run_that_was_killed_while_its_reference_spoke_goes_on_where_it_was(tmp_path, monkeypatch):
    from pellucid.train import reference

    monkeypatch.setattr(reference, "FLUSH_SECONDS", 0.0)
    whole, asked = reference.Reference.__call__, []

    def dies(self, batch):
        asked.append(batch.pair_ids.tolist())
        if len(asked) == 6:
            raise KeyboardInterrupt
        return whole(self, batch)

    monkeypatch.setattr(reference.Reference, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a")
    trainer, _ = run(tmp_path / "a", resume=True)
    assert [ids[0] for ids in asked[:28]] == [*range(6), *range(5, 21), *range(6)], "the sixth is asked again, no other"
    monkeypatch.setattr(reference.Reference, "__call__", whole)
    unbroken, _ = run(tmp_path / "b")
    assert digest(trainer.model) == digest(unbroken.model)


def test_resuming_with_another_reference_is_refused(tmp_path, base):
    changes = dict(train__init=str(base))
    copy = tmp_path / "base"
    save_model(copy, Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(1)))
    run(tmp_path / "run", stop_at=2, train__init=str(copy))
    save_model(copy, Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(8)))
    with pytest.raises(CheckpointError, match="reference has weights of hash"):
        run(tmp_path / "run", resume=True, train__init=str(copy))
    run(tmp_path / "run", resume=True, **changes)  # at another place, but the same


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(beta=0.0), "strategy.beta must be positive"),
        (dict(label_smoothing=0.5), r"strategy.label_smoothing must be in \[0, 0.5\)"),
        (dict(variant="ipo", label_smoothing=0.1), "set it to 0, or the variant"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DpoOptions(**options)


@pytest.mark.parametrize("changes", [{"model__dropout": 0.1}, {"lora": LORA | {"dropout": 0.1}}])
def test_dropout_is_refused_since_the_reference_has_none(base, changes):
    key = "model.dropout" if "model__dropout" in changes else "lora.dropout"
    init = {} if "model__dropout" in changes else {"train__init": str(base)}
    with pytest.raises(ConfigError, match=f"{key} is not 0"):
        run(**changes, **init)


@pytest.mark.parametrize(
    "shape, message",
    [
        ({"vocab_size": 60}, "has a vocabulary of 60 and the data one of 61"),
        ({"max_position_embeddings": 8}, "has a window of 8 tokens and the run one of 16"),
    ],
)
def test_a_reference_that_cannot_read_the_pairs_is_refused(tmp_path, shape, message):
    save_model(tmp_path / "small", Transformer(ModelConfig(**TINY | shape)))
    with pytest.raises(ConfigError, match=message):
        run(strategy__reference_model=str(tmp_path / "small"))


def test_filler_pairs_weigh_nothing_and_a_model_with_experts_is_balanced_over_both_answers():
    experts = dict(
        model__n_routed_experts=4, model__num_experts_per_tok=2, model__moe_intermediate_size=8, model__router_aux_loss_coef=0.01,
    )  # fmt: skip
    strategy = Dpo(DpoOptions())
    batch = pairs(21).batch([1, 2], 5)
    assert strategy.weight(batch) == 2 and len(batch.tokens) == 10
    whole, split = (run(train__micro_batch=m, **(STEP | experts))[1].infos[-1] for m in (6, 1))
    assert split.loss == pytest.approx(whole.loss, rel=1e-5)
    assert split.router.loss == pytest.approx(whole.router.loss, rel=1e-5) and whole.router.loss > 0
