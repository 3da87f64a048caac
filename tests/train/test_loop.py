import json
import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from support import TINY, MemorySplit, run_ranks, tiny_config, windows

from pellucid.config import ModelConfig
from pellucid.data.batches import Loader, Windows
from pellucid.errors import ConfigError, TrainingError
from pellucid.model import Transformer
from pellucid.train import Callback, StopTraining, Trainer
from pellucid.train.strategies import LossOutput, Pretrain, PretrainOptions


def train(config, **kwargs):
    kwargs.setdefault("train_data", windows(30))
    trainer = Trainer(config, **kwargs)
    trainer.train()
    return trainer


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def read_log(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_the_loop_equals_a_plain_torch_loop_over_whole_batches():
    config = tiny_config(optim__max_grad_norm=0.5, optim__schedule="constant", optim__warmup_steps=0)
    trainer = train(config)

    model = Transformer(ModelConfig(**TINY), generator=torch.Generator().manual_seed(config.train.seed))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    plain = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    loader = Loader(windows(30), global_batch=4, micro_batch=4, seed=config.train.seed)
    for _ in range(config.train.steps):
        (batch,) = loader.next_window()
        attend = model.make_attend(batch.document_ids)
        logits = model(batch.tokens, batch.positions, attend).logits[batch.loss_mask]
        F.cross_entropy(logits, batch.targets[batch.loss_mask]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    ours = weights(trainer)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-4, atol=1e-5)
        assert not torch.equal(parameter, start[name]), name


class Gradients(Callback):
    def __init__(self):
        self.losses, self.norms = [], []
        self.first = None

    def on_before_step(self, trainer, info):
        if self.first is None:
            self.first = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
        self.losses.append(info.loss)
        self.norms.append(info.grad_norm)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_any_split_into_micro_batches_gives_the_same_gradient(micro):
    whole, split = Gradients(), Gradients()
    for recorder, size in ((whole, 8), (split, micro)):
        config = tiny_config(
            train__global_batch=8, train__micro_batch=size, train__steps=3, optim__max_grad_norm="none"
        )
        train(config, callbacks=[recorder])
    for name, grad in whole.first.items():
        torch.testing.assert_close(split.first[name], grad, rtol=1e-4, atol=1e-6)
        assert grad.abs().max() > 0
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_trailing_partial_window_is_stepped_and_weighted_by_what_it_holds():
    data = windows(30)
    assert len(data) % 4, "the case needs a remainder"
    recorder = Gradients()
    trainer = train(tiny_config(train__steps=None, train__epochs=1), callbacks=[recorder], train_data=data)
    assert trainer.state.step == trainer.setup.total_steps == math.ceil(len(data) / 4) == len(recorder.losses)
    assert trainer.state.tokens_seen == data.split.num_tokens - _unread(data)


def _unread(data):
    """The very last token is only a target, unless the last window has room for it."""
    return 1 if (data.split.num_tokens - 1) % data.context == 0 else 0


@pytest.mark.parametrize("documents", [5, 13, 30])
@pytest.mark.parametrize("global_batch, micro_batch", [(1, 1), (4, 2), (6, 3), (64, 4)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_planned_steps_are_taken_for_every_epoch_and_accumulation(documents, global_batch, micro_batch, epochs):
    config = tiny_config(
        train__steps=None, train__epochs=epochs, train__global_batch=global_batch, train__micro_batch=micro_batch
    )
    trainer = Trainer(config, train_data=windows(documents))
    seen = []

    class Seen(Callback):
        def on_batch_end(self, trainer, info):
            seen.extend(i for i in info.batch.sample_ids.tolist() if i >= 0)

    trainer.setup.callbacks.append(Seen())
    trainer.train()
    assert trainer.state.step == trainer.setup.total_steps
    assert sorted(seen) == sorted(list(range(len(trainer.setup.loader.windows))) * epochs)


def test_a_micro_batch_without_supervised_tokens_adds_nothing_and_a_step_without_one_is_refused():
    alone = MemorySplit([1] * 64)  # documents of one token predict nothing
    with pytest.raises(TrainingError, match="no supervised token"):
        train(tiny_config(), train_data=Windows(alone, 16))
    mixed = MemorySplit([1] * 64 + [40])
    trainer = train(
        tiny_config(train__global_batch=6, train__micro_batch=1, train__steps=3), train_data=Windows(mixed, 16)
    )
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_the_learning_rate_depends_on_the_step_alone():
    def rates(**changes):
        seen = []

        class Rates(Callback):
            def on_before_step(self, trainer, info):
                seen.append((info.lr, trainer.optimizer.param_groups[0]["lr"]))

        train(tiny_config(**changes), callbacks=[Rates()])
        assert all(a == b for a, b in seen)
        return [a for a, _ in seen]

    assert rates(train__micro_batch=1) == rates(train__micro_batch=4)
    assert rates()[:3] == pytest.approx([0.005, 0.01, 0.01])


class Poison:
    """A strategy whose loss is NaN at one step."""

    def __init__(self, at):
        self.inner, self.at, self.calls = Pretrain(PretrainOptions()), at, 0

    def weight(self, batch):
        return self.inner.weight(batch)

    def __call__(self, model, batch):
        self.calls += 1
        out = self.inner(model, batch)
        return LossOutput(out.sum * math.nan, {}) if self.calls == self.at else out

    def validate(self, model, batch):
        return self.inner.validate(model, batch)


def test_a_nan_loss_stops_at_that_step_with_the_weights_of_the_one_before(tmp_path):
    config = tiny_config(tmp_path / "run")
    trainer = Trainer(config, strategy=Poison(at=6), train_data=windows(30))  # step 3, second micro-batch
    before = {}
    errors = []

    class Remember(Callback):
        def on_optimizer_step(self, trainer, info):
            before.update(weights(trainer), step=info.step)

        def on_error(self, trainer, info):
            errors.append(info)

    trainer.setup.callbacks.append(Remember())
    with pytest.raises(TrainingError, match=r"step 3: non-finite loss of micro-batch 1.*step 2.*Documents in it: \d+"):
        trainer.train()
    assert before.pop("step") == 2 and len(errors) == 1
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name]), name
    assert not (tmp_path / "run" / "checkpoints" / "step_00000003").exists()


def test_a_non_finite_gradient_stops_too_although_the_loss_is_finite():
    class Infinite(Poison):
        def __call__(self, model, batch):
            loss = self.inner(model, batch).sum
            first = next(model.parameters())
            bad = (first - first.detach()).abs().sqrt().sum()  # value 0, gradient infinite
            return LossOutput(loss + bad, {})

    with pytest.raises(
        TrainingError, match=r"non-finite gradient norm \(nan\), first in model\.embed_tokens\.weight; .* noth"
    ):
        train(tiny_config(), strategy=Infinite(at=0))

    def rank(mode, where):
        with pytest.raises(TrainingError, match=r"first in model\.embed_tokens\.weight" + where):
            train(tiny_config(parallel__mode=mode), strategy=Infinite(at=0))

    run_ranks(lambda: rank("ddp", "; "), 2)  # where all have it
    run_ranks(lambda: rank("zero3", " on rank 0; "), 2)


def test_validation_is_the_mean_over_all_tokens_and_changes_nothing(tmp_path):
    data = windows(11, seed=5, score_once=True)
    runs = {}
    for every in (0, 3):
        config = tiny_config(
            tmp_path / str(every), train__val_every=every, model__dropout=0.1, strategy__label_smoothing=0.1
        )
        runs[every] = train(config, val_data=data)
    for name, value in weights(runs[0]).items():
        assert torch.equal(value, weights(runs[3])[name]), name
    model = runs[3].model.eval()
    batch = data.batch(list(range(len(data))))
    logits = model(batch.tokens, batch.positions, model.make_attend(batch.document_ids)).logits
    expected = F.cross_entropy(logits[batch.loss_mask], batch.targets[batch.loss_mask]).item()
    last = [r for r in read_log(tmp_path / "3") if r["event"] == "validation"][-1]
    assert last["step"] == 12 and last["tokens"] == int(batch.loss_mask.sum())
    assert last["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_log_has_the_contract_fields_and_label_smoothing_shows_in_the_training_loss_only(tmp_path):
    train(tiny_config(tmp_path / "a", strategy__label_smoothing=0.0), val_data=windows(9, score_once=True))
    train(tiny_config(tmp_path / "b", strategy__label_smoothing=0.3), val_data=windows(9, score_once=True))
    a, b = read_log(tmp_path / "a"), read_log(tmp_path / "b")
    assert set(a[0]) == {
        "event", "step", "epoch", "tokens", "loss", "lr", "grad_norm", "time", "seconds", "tokens_per_s", "supervised",
    }  # fmt: skip
    assert [r["step"] for r in a if r["event"] == "step"] == list(range(1, 13))
    assert [(r["event"], r["step"]) for r in a if r["event"] != "step"] == [
        (event, step) for step in (4, 8, 12) for event in ("validation", "save")
    ]
    assert a[0]["loss"] != pytest.approx(b[0]["loss"], rel=1e-6)
    assert a[0]["loss"] == pytest.approx(math.log(61), rel=0.05)


def test_callbacks_are_called_in_the_documented_order(tmp_path):
    calls = []

    class Order(Callback):
        pass

    for hook in [name for name in vars(Callback) if name.startswith("on_")]:
        setattr(Order, hook, lambda self, trainer, info, hook=hook: calls.append((hook, trainer.state.step)))
    data = windows(30)
    config = tiny_config(
        tmp_path / "run", train__steps=2, train__save_every=2, train__val_every=2, train__global_batch=len(data),
        train__micro_batch=len(data), train__async_save=False,
    )  # fmt: skip
    train(config, callbacks=[Order()], train_data=data, val_data=windows(5))
    step = ["on_epoch_begin", "on_batch_begin", "on_batch_end", "on_before_step"]
    assert [name for name, _ in calls] == (
        ["on_train_begin", *step, "on_optimizer_step", "on_epoch_end"]
        + [*step, "on_validation", "on_optimizer_step", "on_epoch_end", "on_save", "on_train_end"]
    )
    assert dict(calls)["on_optimizer_step"] == 2 and ("on_before_step", 0) in calls


def test_stop_training_ends_after_the_step_with_a_checkpoint_and_stays_ended(tmp_path):
    class Stop(Callback):
        def on_optimizer_step(self, trainer, info):
            if info.step == 5:
                raise StopTraining("enough")

    trainer = train(tiny_config(tmp_path / "run"), callbacks=[Stop()])
    assert trainer.state.step == 5 and trainer.stop_reason == "enough"
    assert (tmp_path / "run/checkpoints/step_00000005/manifest.json").exists()
    assert (tmp_path / "run/model/model.safetensors").exists()
    again = Trainer(tiny_config(tmp_path / "run"), train_data=windows(30))
    assert again.train(resume=True).step == 5


def test_early_stopping_waits_for_its_patience_and_its_state_is_saved(tmp_path):
    config = tiny_config(
        tmp_path / "run", callbacks={"early_stopping": {"patience": 2, "min_delta": 100.0}}, train__val_every=2
    )
    trainer = train(config, val_data=windows(5))
    assert trainer.state.step == 6  # the first validation is the best; two more do not beat it by 100 nats
    state = json.loads((tmp_path / "run/checkpoints/step_00000006/extra/early_stopping.json").read_text())
    assert state["bad"] == 2


def test_gradient_statistics_equal_those_of_the_gradients(tmp_path):
    recorder = Gradients()
    config = tiny_config(tmp_path / "run", callbacks={"gradient_statistics": {"every": 1}}, train__steps=1)
    train(config, callbacks=[recorder])
    (line,) = [r for r in read_log(tmp_path / "run") if r["event"] == "gradients"]
    assert set(line["parameters"]) == set(recorder.first)
    for name, grad in recorder.first.items():
        expected = [grad.norm(), grad.mean(), grad.std(correction=0), grad.min(), grad.max()]
        got = [line["parameters"][name][key] for key in ("norm", "mean", "std", "min", "max")]
        assert got == pytest.approx([float(x) for x in expected], rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_returns(tmp_path, number):
    class Send(Callback):
        def on_batch_begin(self, trainer, info):
            if info.step == 3 and info.micro == 0:
                os.kill(os.getpid(), number)

    trainer = train(tiny_config(tmp_path / "run"), callbacks=[Send()])
    assert trainer.state.step == 3 and trainer.stop_reason == number.name
    assert (tmp_path / "run/checkpoints/step_00000003/manifest.json").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_signal_interrupts_at_once(tmp_path):
    class Twice(Callback):
        def on_batch_begin(self, trainer, info):
            if info.step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(tmp_path / "run", train__micro_batch=1), callbacks=[Twice()])


def test_max_seconds_ends_the_run_after_a_step(tmp_path):
    trainer = train(tiny_config(tmp_path / "run", train__max_seconds=1e-9))
    assert trainer.state.step == 1 and "max_seconds" in trainer.stop_reason


def test_dropout_acts_in_training_and_is_seeded():
    losses = []
    for _ in range(2):
        recorder = Gradients()
        train(tiny_config(model__dropout=0.5, train__steps=3), callbacks=[recorder])
        losses.append(recorder.losses)
    plain = Gradients()
    train(tiny_config(train__steps=3), callbacks=[plain])
    assert losses[0] == losses[1] and losses[0] != plain.losses


def test_activation_checkpointing_changes_no_gradient():
    runs = []
    for on in (False, True):
        recorder = Gradients()
        train(tiny_config(train__activation_checkpointing=on, model__dropout=0.2, train__steps=2), callbacks=[recorder])
        runs.append(recorder)
    for name, grad in runs[0].first.items():
        assert torch.equal(grad, runs[1].first[name]), name


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_an_eager_one():
    losses = []
    for on in (False, True):
        recorder = Gradients()
        train(tiny_config(train__compile=on, train__steps=3, model__num_hidden_layers=1), callbacks=[recorder])
        losses.append(recorder.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_compiling_without_a_compiler_is_refused_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"train\.compile needs a C\+\+ compiler"):
        Trainer(tiny_config(train__compile=True), train_data=windows())


def test_bfloat16_runs_learn_and_keep_float32_weights():
    trainer = train(tiny_config(train__dtype="bfloat16"))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    state = trainer.optimizer.state[next(trainer.model.parameters())]
    assert state["exp_avg"].dtype == torch.float32


def test_a_run_without_a_length_is_refused():
    with pytest.raises(ConfigError, match=r"train\.steps or train\.epochs"):
        Trainer(tiny_config(train__steps=None), train_data=windows())
