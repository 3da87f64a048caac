"""What a mixture of experts adds to a run: the balancing loss, who got how many tokens, and the biases that even it out."""

import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from experts import EXPERTS, changes
from safetensors.torch import load_file
from support import MemorySplit, run_ranks, tensors_of, tiny_config, whole_weights, windows

from pellucid.data.batches import Windows
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.model.moe import BALANCING_BIAS, Router
from pellucid.parallel import comm
from pellucid.parallel.executor import LossScaler
from pellucid.registry import NoOptions, register
from pellucid.train import Callback, Trainer
from pellucid.train.routing import balancing_loss, num_sequences, tokens_of_experts
from pellucid.train.strategies import LossOutput, Pretrain, PretrainOptions

MODES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp")
LAYERS, NUM_EXPERTS, CHOSEN = 2, EXPERTS["n_routed_experts"], EXPERTS["num_experts_per_tok"]
SPEED = EXPERTS["router_bias_update_speed"]
QUIET = {"train__save_every": 0, "train__val_every": 0}


@register("optimizer", "plain_sgd_of_experts", config=NoOptions)
def build_sgd(model, lr, options):
    return torch.optim.SGD(model.parameters(), lr=lr)


SGD = {"optim__name": "plain_sgd_of_experts", "optim__lr": 1.0, "optim__warmup_steps": 0, "optim__max_grad_norm": None}


def seven_rows(num_rows=7):
    """The last row is padded."""
    lengths = [11, 5, 1, 9] * 20
    total, kept = 16 * num_rows - 9, []
    while total:
        kept.append(min(total, lengths[len(kept)]))
        total -= kept[-1]
    data = Windows(MemorySplit(kept), 16)
    assert len(data) == num_rows
    return data


def trainer_of(out="", *, data=None, double=True, prepare=lambda model: None, **kwargs):
    """A run of a little mixture of experts, in float64 so that rounding sends no token elsewhere."""
    callbacks, strategy = kwargs.pop("callbacks", ()), kwargs.pop("strategy", None)
    val_data = kwargs.pop("val_data", None)
    config = tiny_config(out, **(changes(EXPERTS) | QUIET | kwargs))
    model = Transformer(config.model, generator=torch.Generator().manual_seed(3))
    model = model.double() if double else model
    prepare(model)
    return Trainer(
        config, model=model, callbacks=callbacks, strategy=strategy, train_data=data or windows(30), val_data=val_data
    )


def train(*args, **kwargs):
    trainer = trainer_of(*args, **kwargs)
    trainer.train()
    return trainer


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    train(train__steps=1)


def biases(executor):
    """On every rank, those of all routers: ``[L, E]``."""
    weights = dict(zip(executor.weight_shapes(), whole_weights(executor), strict=True))
    return [weight for name, weight in weights.items() if name.endswith(BALANCING_BIAS)]


class Kept(Callback):
    """The router of each step, and the biases before and after it."""

    def __init__(self):
        self.routers, self.before, self.after = [], [], []

    def on_before_step(self, trainer, info):
        self.before.append(biases(trainer.setup.executor))

    def on_optimizer_step(self, trainer, info):
        router = info.router
        self.routers.append([router.loss, router.entropy, router.load, router.dead])
        self.after.append(biases(trainer.setup.executor))


# -- the balancing loss -------------------------------------------------------------------------------------


def routed(chosen, probs, real):
    return balancing_loss(probs, tokens_of_experts(chosen, real, probs.shape[-1]), real, chosen.shape[-1])


def test_equal_use_costs_1_and_all_to_the_same_experts_costs_the_most():
    experts, chosen, tokens = 6, 2, 9
    real = torch.ones(1, tokens, dtype=torch.bool)
    even = (torch.arange(tokens * chosen) % experts).view(1, tokens, chosen)
    assert routed(even, torch.full((1, tokens, experts), 1 / experts), real).item() == pytest.approx(1)
    same = torch.tensor([1, 4]).expand(1, tokens, chosen)
    onto = torch.zeros(1, tokens, experts)
    onto[..., [1, 4]] = 0.5
    assert routed(same, onto, real).item() == pytest.approx(experts / chosen)
    # 3 of 4 choices at expert 0: 4 experts, K = 1, probabilities (0.7, 0.1, 0.1, 0.1) -> 4 (0.75 * 0.7 + 0.25 * 0.1)
    skew = torch.tensor([0, 0, 2, 0]).view(1, 4, 1)
    probs = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(1, 4, 4)
    assert routed(skew, probs, torch.ones(1, 4, dtype=torch.bool)).item() == pytest.approx(
        4 * (0.75 * 0.7 + 0.25 * 0.1)
    )


def test_padding_and_empty_rows_count_nowhere_and_get_no_gradient():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(3, 8, 5, generator=generator, dtype=torch.float64).softmax(-1).requires_grad_()
    chosen = torch.rand(3, 8, 5, generator=generator).topk(2).indices
    real = torch.ones(3, 8, dtype=torch.bool)
    real[1, 5:], real[2] = False, False
    losses = routed(chosen, probs, real)
    alone = routed(chosen[1:2, :5], probs[1:2, :5], real[1:2, :5])
    assert losses[1].item() == pytest.approx(alone.item(), rel=1e-12) and losses[2].item() == 0
    losses.sum().backward()
    assert probs.grad[real].abs().min() > 0 and probs.grad[~real].abs().max() == 0
    counts = tokens_of_experts(chosen, real, 5)
    assert counts.sum(1).tolist() == [16, 10, 0]
    assert counts[0].tolist() == torch.bincount(chosen[0].flatten(), minlength=5).tolist()


def test_the_gradient_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64).requires_grad_()
    chosen = torch.rand(2, 5, 4, generator=generator).topk(2).indices
    real = torch.ones(2, 5, dtype=torch.bool)
    real[0, 3:] = False
    assert torch.autograd.gradcheck(lambda x: routed(chosen, x.softmax(-1), real), logits)
    (slope,) = torch.autograd.grad(routed(chosen, logits.softmax(-1), real).sum(), logits)
    assert slope.abs().max() > 1e-3


class Gradients(Callback):
    """Of the first step, whole."""

    def on_before_step(self, trainer, info):
        if info.step == 1:
            self.found = {part.name: part.tensor.clone() for part in trainer.setup.executor.gradients()}
            self.router = info.router


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_of_a_step_does_not_depend_on_the_split(checkpointing):
    """7 rows, the last one padded: 8 x 1 leaves out the eighth, empty row that 1 x 8 and 4 x 2 have."""
    found = {}
    for micro_batch in (8, 2, 1):
        kept = Gradients()
        train(
            data=seven_rows(), callbacks=[kept], train__steps=1, train__global_batch=8, train__micro_batch=micro_batch,
            train__activation_checkpointing=checkpointing, **SGD,
        )  # fmt: skip
        found[micro_batch] = kept
    for micro_batch in (2, 1):
        assert found[micro_batch].router.load == found[8].router.load
        assert found[micro_batch].router.loss == pytest.approx(found[8].router.loss, rel=1e-8)
        for name, gradient in found[8].found.items():
            torch.testing.assert_close(found[micro_batch].found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    without = Gradients()
    train(
        data=seven_rows(),
        callbacks=[without],
        train__steps=1,
        train__global_batch=8,
        model__router_aux_loss_coef=0.0,
        **SGD,
    )
    gate = "model.layers.1.mlp.gate.weight"
    assert found[8].found[gate].norm() > 10 * without.found[gate].norm() > 0, "the balancing loss must pull"
    assert without.router.loss == 0 < found[8].router.loss


@pytest.fixture(scope="module")
def alone():
    """One process, one step of plain SGD: weights, the router, and the weights before."""
    kept = Kept()
    trainer = trainer_of(data=seven_rows(5), callbacks=[kept], train__steps=1, train__global_batch=6, **SGD)
    before = whole_weights(trainer.setup.executor)
    trainer.train()
    return whole_weights(trainer.setup.executor), kept.routers, before


@pytest.mark.parametrize("mode, size", [("ddp", 2), *((mode, 3) for mode in MODES)])
def test_a_step_of_plain_sgd_on_ranks_is_that_of_one_process(alone, mode, size):
    """5 rows for 6 places, so that the last rank has an empty one; the ranks begin with other biases, the first one's count."""

    def differ(model):
        if comm.rank():
            for name, parameter in model.named_parameters():
                if name.endswith(BALANCING_BIAS):
                    parameter.data += comm.rank()

    def rank():
        kept = Kept()
        trainer = train(
            data=seven_rows(5), callbacks=[kept], train__steps=1, train__global_batch=6, train__micro_batch=1,
            parallel__mode=mode, prepare=differ, **SGD,
        )  # fmt: skip
        return [whole_weights(trainer.setup.executor), kept.routers]

    weights, routers, before = alone
    for mine, told in run_ranks(rank, size):
        for got, expected, was in zip(mine, weights, before, strict=True):
            got, expected, was = (torch.tensor(x, dtype=torch.float64) for x in (got, expected, was))
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
            assert not torch.equal(expected, was)
        assert told[0][2:] == routers[0][2:] and told[0][:2] == pytest.approx(routers[0][:2], rel=1e-7)


# -- what a step says of its router -------------------------------------------------------------------------


class Recomputed(Callback):
    """Loss, entropy, load and dead experts of each step, by loops over tokens of a forward before the step."""

    def __init__(self):
        self.steps, self.counts = {}, {}

    @torch.no_grad()
    def on_batch_begin(self, trainer, info):
        batch, model = info.batch, trainer.model
        output = model(batch.tokens, batch.positions, model.make_attend(batch.document_ids))
        sums = self.steps.setdefault(info.step, [0.0, 0.0, 0, 0])  # loss, entropy, sequences, tokens
        counts = self.counts.setdefault(info.step, np.zeros((LAYERS, NUM_EXPERTS), int))
        for row, ids in enumerate(batch.document_ids.tolist()):
            tokens = [t for t, document in enumerate(ids) if document >= 0]
            sums[2] += bool(tokens)
            sums[3] += len(tokens)
            for layer in range(LAYERS):
                probs, chosen = (x[layer][row].tolist() for x in (output.router_probs, output.router_choices))
                mine = [sum(chosen[t].count(e) for t in tokens) for e in range(NUM_EXPERTS)]
                counts[layer] += mine
                mean = [sum(probs[t][e] for t in tokens) / max(1, len(tokens)) for e in range(NUM_EXPERTS)]
                share = [n * NUM_EXPERTS / (CHOSEN * max(1, len(tokens))) for n in mine]
                sums[0] += EXPERTS["router_aux_loss_coef"] * sum(f * p for f, p in zip(share, mean, strict=True))
                sums[1] -= sum(p * math.log(p) for t in tokens for p in probs[t])

    def expected(self, step):
        loss, entropy, sequences, tokens = self.steps[step]
        counts = self.counts[step]
        load = counts.max() / (tokens * CHOSEN / NUM_EXPERTS)
        return [loss / sequences, entropy / (tokens * LAYERS), load, int((counts == 0).sum())]


def read_log(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def router_of(log):
    names = ("router_loss", "router_entropy", "router_load", "router_dead")
    return [[line[name] for name in names] for line in log if line["event"] == "step"]


def test_the_log_says_what_a_forward_by_hand_says_on_one_rank_and_on_two(tmp_path, monkeypatch):
    """And the counts that move the biases are whole numbers, of all ranks."""
    seen = []
    balance_experts = Transformer.balance_experts

    def spy(self, counts):
        seen.append(counts.tolist())
        return balance_experts(self, counts)

    monkeypatch.setattr(Transformer, "balance_experts", spy)

    def rank(mode):
        seen.clear()
        hand = Recomputed()
        train(
            tmp_path / mode, data=seven_rows(15), callbacks=[hand] if mode == "none" else [], train__steps=5,
            train__micro_batch=2, parallel__mode=mode,
        )  # fmt: skip
        if mode == "none":
            for step, got in enumerate(router_of(read_log(tmp_path / mode)), start=1):
                assert got == pytest.approx(hand.expected(step), rel=1e-5), step
                assert seen[step - 1] == hand.counts[step].tolist()
                assert sum(seen[step - 1][0]) == hand.steps[step][3] * CHOSEN
        return list(seen)

    (alone,) = run_ranks(lambda: rank("none"), 1)
    assert len(alone) == 5 and len({json.dumps(counts) for counts in alone}) == 5
    assert run_ranks(lambda: rank("zero1"), 2) == [alone, alone]
    one, two = (router_of(read_log(tmp_path / mode)) for mode in ("none", "zero1"))
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-7) and ours[2:] == theirs[2:]


def test_rows_without_a_token_are_no_sequences():
    batch = seven_rows(2).batch([0, 1], rows=4)
    assert num_sequences(batch) == 2


def test_a_model_without_experts_says_nothing(tmp_path):
    Trainer(tiny_config(tmp_path, train__steps=1, **QUIET), train_data=windows(30)).train()
    (line,) = (line for line in read_log(tmp_path) if line["event"] == "step")
    assert not [key for key in line if key.startswith("router")]


def test_validation_counts_and_moves_nothing(tmp_path):
    quiet, loud = Kept(), Kept()
    first = train(tmp_path / "quiet", callbacks=[quiet], train__steps=4)
    second = train(
        tmp_path / "loud",
        callbacks=[loud],
        train__steps=4,
        train__val_every=1,
        val_data=windows(5, seed=9, score_once=True),
    )
    assert (loud.routers, loud.after) == (quiet.routers, quiet.after)
    assert whole_weights(first.setup.executor) == whole_weights(second.setup.executor)
    validations = [line for line in read_log(tmp_path / "loud") if line["event"] == "validation"]
    assert len(validations) == 4 and "router_loss" not in validations[0]


# -- biases -------------------------------------------------------------------------------------------------


def test_a_bias_moves_by_its_speed_a_step_towards_fewer_and_more_tokens():
    kept, hand = Kept(), Recomputed()
    train(callbacks=[kept, hand], train__steps=4, double=False)
    moved = set()
    for step, (before, after) in enumerate(zip(kept.before, kept.after, strict=True), start=1):
        for layer, counts in enumerate(hand.counts[step]):
            for was, now, count in zip(before[layer], after[layer], counts, strict=True):
                way = int(np.sign(counts.mean() - count))
                assert np.float32(now) == np.float32(was) + np.float32(way * SPEED)
                moved.add(way)
    assert moved >= {-1, 1} and kept.before[1:] == kept.after[:-1] and np.abs(kept.after[-1]).max() > SPEED


def skewed():
    """Half of all tokens are one word, and a few words are most of the rest."""
    data = MemorySplit([16] * 40)
    draw = np.random.default_rng(0)
    data.tokens = np.minimum(draw.zipf(1.7, data.num_tokens) - 1, 60)
    return Windows(data, 16)


class Loads(Callback):
    def __init__(self):
        self.found = []

    def on_optimizer_step(self, trainer, info):
        self.found.append(info.router.load)


def test_biases_even_out_the_load_of_skewed_data():
    """Nothing else learns; 1 would be an equal share."""

    def load(steps, speed):
        loads = Loads()
        train(
            data=skewed(), callbacks=[loads], train__steps=steps, optim__lr=1e-9, model__router_aux_loss_coef=0.0,
            model__router_bias_update_speed=speed, model__num_hidden_layers=1, train__global_batch=8, train__micro_batch=8,
        )  # fmt: skip
        return loads.found

    assert min(load(5, 0.0)) > 1.8, "uneven, and stays so"
    loads = load(100, 0.0005)
    assert loads[0] > 1.8 and np.mean(loads[-20:]) < 1.45


def test_a_skipped_step_moves_no_bias():
    """As float16 has them: the scale is too large at first."""
    kept = Kept()
    trainer = trainer_of(callbacks=[kept], train__steps=4, double=False)
    trainer.setup.executor.scaler = LossScaler(2.0**130)
    trainer.train()
    moved = [before != after for before, after in zip(kept.before, kept.after, strict=True)]
    assert moved[0] is False and moved[-1] is True


def test_an_adapter_moves_no_bias_of_its_base():
    """A base stays as it is, and an adapter's folder would not have them."""
    kept = Kept()
    lora = {"r": 2, "alpha": 8.0, "targets": ["q_proj", "up_proj", "down_proj"]}
    trainer = train(callbacks=[kept], train__steps=3, lora=lora, double=False)
    assert not np.any(kept.after) and kept.routers[0][0] > 0
    moved = [p for name, p in trainer.model.named_parameters() if "experts.0" in name and "lora_B" in name]
    assert moved and any(p.abs().max() > 0 for p in moved)


@pytest.mark.parametrize("mode", ["none", *MODES])
def test_an_expert_that_never_gets_a_token_is_counted_and_holds_nobody_up(mode):
    """Its bias is low; its weights stay, those of others move."""

    def forbid(model):
        for name, parameter in model.named_parameters():
            if name.endswith(BALANCING_BIAS):
                parameter.data[5] = -100.0

    def rank():
        kept = Kept()
        trainer = trainer_of(
            callbacks=[kept], prepare=forbid, train__steps=3, parallel__mode=mode, optim__weight_decay=0.0,
            train__micro_batch=1, double=False,
        )  # fmt: skip
        executor = trainer.setup.executor
        before = whole_weights(executor)
        trainer.train()
        names, after = list(executor.weight_shapes()), whole_weights(executor)
        same = [name for name, one, two in zip(names, before, after, strict=True) if one == two]
        return [kept.routers, same, float(executor.grad_accum_steps)]

    size = 1 if mode == "none" else 2
    for routers, same, _ in run_ranks(rank, size):
        assert [router[3] for router in routers] == [LAYERS] * 3
        assert same and all(".experts.5." in name for name in same) and len(same) == 3 * LAYERS


def test_where_zero3_computes_in_bfloat16_a_bias_stays_what_it_is():
    """Rounded to bfloat16, steps of 0.001 near 1 would be lost."""
    fine = 1.0 + 2**-10

    def rank():
        seen = []

        def look(router, args, out):
            bias = router.e_score_correction_bias
            seen.append([str(router.weight.dtype), str(bias.dtype), float(bias[0])])

        def prepare(model):
            for module in model.modules():
                if isinstance(module, Router):
                    module.e_score_correction_bias.data.fill_(fine)
                    module.register_forward_hook(look)

        train(
            prepare=prepare,
            train__steps=1,
            parallel__mode="zero3",
            parallel__zero3__compute_dtype="bfloat16",
            double=False,
        )
        return seen

    for seen in run_ranks(rank, 2):
        assert len(seen) >= 2 and all(one == ["torch.bfloat16", "torch.float32", fine] for one in seen)


# -- strategies ---------------------------------------------------------------------------------------------


class Silent(Pretrain):
    """Says nothing of where tokens went."""

    def __call__(self, model, batch):
        return LossOutput(super().__call__(model, batch).sum, {})


def test_a_strategy_that_says_nothing_of_routing_is_refused_by_its_name():
    with pytest.raises(
        ConfigError, match=r"the strategy Silent says nothing of where tokens went; let it give LossOutput"
    ):
        train(strategy=Silent(PretrainOptions()), train__steps=1)
    Trainer(
        tiny_config(train__steps=1, **QUIET), strategy=Silent(PretrainOptions()), train_data=windows(30)
    ).train()  # without experts it may


# -- resuming -----------------------------------------------------------------------------------------------

SAVES = {"train__steps": 6, "train__save_every": 3, "train__keep_last": 0, "model__dropout": 0.1, "double": False}


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_optimizer_step(self, trainer, info):
        if info.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class AtBegin(Callback):
    """The biases that a run begins with."""

    def on_train_begin(self, trainer, info):
        self.found = biases(trainer.setup.executor)


def checkpoint(out, step):
    return out / "checkpoints" / f"step_{step:08d}"


def saved_biases(out, step):
    weights = load_file(checkpoint(out, step) / "model.safetensors")
    return [weights[name].tolist() for name in sorted(weights) if name.endswith(BALANCING_BIAS)]


@pytest.mark.parametrize("mode, size", [("none", 1), ("zero1", 2), ("zero3", 2)])
def test_stopped_and_resumed_a_run_ends_with_the_same_bits(tmp_path, mode, size):
    changes = SAVES | {"parallel__mode": mode, "train__global_batch": 6, "train__micro_batch": 1}
    run_ranks(lambda: train(tmp_path / "whole", **changes) and None, size)

    def parts():
        train(tmp_path / "parts", callbacks=[StopAt(3)], **changes)
        trainer_of(tmp_path / "parts", **changes).train(resume=True)

    run_ranks(parts, size)
    got, expected = (tensors_of(checkpoint(tmp_path / out, 6)) for out in ("parts", "whole"))
    assert got.keys() == expected.keys() and not [key for key in got if not torch.equal(got[key], expected[key])]
    logs = []
    for out in ("parts", "whole"):
        lines = [line for line in read_log(tmp_path / out) if line["event"] == "step"]
        logs.append([{k: v for k, v in line.items() if k not in ("time", "seconds", "tokens_per_s")} for line in lines])
    assert logs[0] == logs[1] and len(logs[0]) == 6 and "router_load" in logs[0][0]
    assert np.any(saved_biases(tmp_path / "whole", 3))
    assert saved_biases(tmp_path / "whole", 6) != saved_biases(tmp_path / "whole", 3), (
        "they must move after the stop too"
    )


@pytest.mark.parametrize("mode, size", [("ddp", 2), ("zero3", 3), ("fsdp2", 4)])
def test_in_another_mode_on_other_ranks_a_run_goes_on_with_the_biases_that_were_saved(tmp_path, mode, size):
    """4 ranks hold 6 elements of a bias in twos: the last rank has none."""
    changes = SAVES | {"train__global_batch": 12, "train__micro_batch": 1}
    run_ranks(lambda: train(tmp_path, callbacks=[StopAt(3)], **changes) and None, 1)

    def rank():
        begin = AtBegin()
        trainer = trainer_of(tmp_path, callbacks=[begin], **(changes | {"parallel__mode": mode}))
        trainer.train(resume=True)
        return [trainer.state.step, begin.found]

    saved = saved_biases(tmp_path, 3)
    assert np.any(saved) and run_ranks(rank, size) == [[6, saved]] * size
    steps = np.abs(np.array(saved_biases(tmp_path, 6)) - saved) / SPEED
    assert np.isclose(steps, steps.round(), atol=1e-3).all() and steps.max() > 0.5
