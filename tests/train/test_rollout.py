"""Completions between two steps: the model's own likeliest, the same in every mode, and no state of training is changed."""

import json
import os
import signal

import pytest
import torch
from records import conversations, pairs
from support import digest, run_ranks, tiny_config, windows

from pellucid.errors import ConfigError
from pellucid.inference import SamplingParams, generate
from pellucid.parallel import comm
from pellucid.train import Callback, Trainer
from pellucid.train.rollout import TEXT_PROMPT_TOKENS, validation_prompts


@pytest.fixture(scope="module")
def tokenizer(data_folder):
    from pellucid.data.shards import TokenData

    return TokenData.open(data_folder).tokenizer()


class Stop(Callback):
    def on_optimizer_step(self, trainer, info):
        if info.step == 3 and comm.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def run(out, tokenizer, *, resume=False, callbacks=(), **changes):
    settings = dict(
        model__vocab_size=tokenizer.vocab_size, train__steps=4, train__global_batch=6, train__micro_batch=1, train__val_every=0,
        train__save_every=2, train__sample_every=2, model__dropout=0.1,
    )  # fmt: skip
    config = tiny_config(out, **(settings | changes))
    from pellucid.train import setup

    given = setup._check_sampling
    setup._check_sampling = lambda *_: None  # data in memory comes without a tokenizer
    try:
        trainer = Trainer(
            config, train_data=windows(30), val_data=windows(5, seed=9, score_once=True), callbacks=callbacks
        )
    finally:
        setup._check_sampling = given
    trainer.setup.tokenizer = tokenizer
    trainer.train(resume=resume)
    return trainer


def samples(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_samples_are_the_likeliest_completions_of_the_model_at_that_step(tmp_path, tokenizer):
    trainer = run(tmp_path, tokenizer)
    lines = samples(tmp_path)
    assert [line["step"] for line in lines] == [2] * 4 + [4] * 4 and lines[-1]["kind"] == "step 4"
    prompts = validation_prompts(trainer.setup)
    for prompt, line in zip(prompts, lines[4:], strict=True):
        (alone,) = generate(
            trainer.model.eval(), [prompt], SamplingParams(temperature=0.0, max_tokens=16 - len(prompt), stop_ids=tokenizer.stop_ids)
        )  # fmt: skip
        assert line["text"] == tokenizer.decode(alone.ids) and line["prompt"] == tokenizer.decode(prompt)
    assert any(a["text"] != b["text"] for a, b in zip(lines[:4], lines[4:], strict=True)) or lines[0]["text"]


def test_sampling_changes_no_training(tmp_path, tokenizer):
    with_samples = run(tmp_path / "a", tokenizer)
    without = run(tmp_path / "b", tokenizer, train__sample_every=0)
    assert digest(with_samples.model) == digest(without.model)
    assert not (tmp_path / "b/samples.jsonl").exists()


@pytest.mark.parametrize("mode, size", [("zero1", 2), ("zero3", 2), ("fsdp2", 2)])
def test_every_mode_writes_each_sample_once(tmp_path, tokenizer, mode, size):
    run(tmp_path / "alone", tokenizer, model__dropout=0.0)
    run_ranks(lambda: run(tmp_path / mode, tokenizer, parallel__mode=mode, model__dropout=0.0).state.step, size)
    assert samples(tmp_path / mode) == samples(tmp_path / "alone")


def test_a_resumed_run_has_each_sample_once(tmp_path, tokenizer):
    run(tmp_path, tokenizer, callbacks=[Stop()])
    with open(tmp_path / "samples.jsonl", "a") as file:  # of steps that a killed run did not save
        file.write('{"step": 4, "kind": "step 4", "prompt": "lost", "text": ""}\n{"torn')
    run(tmp_path, tokenizer, resume=True)
    lines = samples(tmp_path)
    assert [line["step"] for line in lines] == [2] * 4 + [4] * 4
    assert all(line["prompt"] != "lost" for line in lines)


def test_prompts_end_where_learning_begins(tmp_path, tokenizer):
    def prompts(data):
        setup = run(tmp_path, tokenizer, train__sample_every=0, train__steps=1, train__out="").setup
        setup.val_data = data
        return validation_prompts(setup)

    for data in (conversations(9, seed=5), pairs(9, seed=5)):
        got = prompts(data)
        assert len(got) == 4
        for i, prompt in enumerate(got):
            number = int(data.batch([i]).document_ids[0, 0])
            parts = data.split.record(number).parts
            ids, learnt = parts[0].ids.tolist(), parts[0].learnt
            assert prompt == ids[: int(learnt[1:].argmax()) + 1 if len(parts) == 1 else len(ids)]
    text = prompts(windows(5, seed=9, score_once=True))
    assert all(1 <= len(prompt) <= TEXT_PROMPT_TOKENS for prompt in text)


def test_sampling_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match=r"train.sample_every is 2 and the data has not got a tokenizer"):
        Trainer(tiny_config(train__sample_every=2), train_data=windows(30))


def test_torch_draws_nothing_for_samples(tmp_path, tokenizer):
    trainer = run(tmp_path, tokenizer, train__sample_every=0)
    before = torch.get_rng_state()
    trainer.setup.model.train()
    from pellucid.train.rollout import complete_prompts

    assert len(complete_prompts(trainer.setup, 1)) == 4
    assert torch.equal(before, torch.get_rng_state()) and trainer.model.training
