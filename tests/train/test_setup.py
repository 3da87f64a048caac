"""What is refused before the first step, and what a run starts from."""

import shutil
import sys

import pytest
import torch
from support import TINY, tiny_config

from pellucid.checkpoint.model_folder import load_model, save_model
from pellucid.config import ModelConfig
from pellucid.data.prepare import PrepareOptions, prepare
from pellucid.errors import ConfigError, DataError
from pellucid.model import Transformer
from pellucid.train import Trainer
from pellucid.train.estimate import estimate
from pellucid.train.precision import resolve_dtype


def config(data, out="", **changes):
    return tiny_config(out, **({"data__path": str(data), "model__vocab_size": 0} | changes))


def test_the_vocabulary_is_that_of_the_data_and_training_on_it_learns(data_folder, tmp_path):
    trainer = Trainer(config(data_folder, tmp_path / "run", train__steps=30, model__max_position_embeddings=32))
    assert trainer.model.config.vocab_size == trainer.setup.data.vocab_size > 259
    losses = []
    original = trainer.log
    trainer.log = lambda record: (losses.append(record.get("loss")), original(record))
    trainer.train()
    assert losses[-1] < losses[0] - 0.5
    loaded = load_model(tmp_path / "run")
    assert loaded.tokenizer.sha256 == trainer.setup.data.tokenizer_sha256
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, dict(trainer.model.named_parameters())[name]), name


def test_a_run_starts_from_the_weights_that_init_names(data_folder, tmp_path):
    first = Trainer(config(data_folder, tmp_path / "a"))
    first.train()
    second = Trainer(config(data_folder, tmp_path / "b", train__init=str(tmp_path / "a"), model__dropout=0.1))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.model.config.dropout == 0.1 and all(p.requires_grad for p in second.model.parameters())
    second.train()
    moved = [not torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True)]
    assert all(moved)
    with pytest.raises(ConfigError, match=r"model\.hidden_size is 32, but .* has 16"):
        Trainer(config(data_folder, train__init=str(tmp_path / "a"), model__hidden_size=32))


def test_init_with_another_tokenizer_is_refused(data_folder, tmp_path):
    other = tmp_path / "other"
    prepare(PrepareOptions(inputs=("sample:stories",), out=other, vocab_size=300, size="50kB", workers=1))
    Trainer(config(other, tmp_path / "a", train__steps=1)).train()
    with pytest.raises(DataError, match=r"different tokenizers.*--tokenizer"):
        Trainer(config(data_folder, train__init=str(tmp_path / "a")))


def test_a_model_with_fewer_rows_than_the_data_has_ids_is_refused(data_folder):
    with pytest.raises(ConfigError, match=r"model\.vocab_size 61 is smaller than the vocabulary of .* \(\d+\)"):
        Trainer(config(data_folder, model__vocab_size=61))


def test_a_corpus_shorter_than_one_window_is_refused(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("too short")
    prepare(PrepareOptions(inputs=(str(text),), out=tmp_path / "data", vocab_size=300, workers=1))
    with pytest.raises(DataError, match=r"fewer than one window of 16.*prepare more text or lower data\.context"):
        Trainer(config(tmp_path / "data"))


def test_a_context_beyond_the_window_is_refused(data_folder):
    with pytest.raises(ConfigError, match=r"data\.context 64 is longer than model\.max_position_embeddings 16"):
        Trainer(config(data_folder, data__context=64))


def test_canonical_attention_is_not_compiled(data_folder, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)  # something that is there
    with pytest.raises(ConfigError, match=r'model\.attend "canonical" promises bits .* leave train\.compile off'):
        Trainer(config(data_folder, model__attend="canonical", train__compile=True))


def test_a_bit_flip_in_a_shard_is_found_before_the_first_step(data_folder, tmp_path):
    shutil.copytree(data_folder, tmp_path / "data")
    shard = tmp_path / "data" / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"train-00000\.bin is damaged"):
        Trainer(config(tmp_path / "data"))


def test_no_data_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        Trainer(tiny_config())
    with pytest.raises(DataError, match="nowhere"):
        Trainer(config(tmp_path / "nowhere"))


def test_a_stride_gives_overlapping_windows_and_as_many_more_steps(data_folder):
    steps = [
        Trainer(config(data_folder, data__stride=stride, train__steps=None, train__epochs=1)).setup.total_steps
        for stride in (0, 8)
    ]
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.01)


def test_float16_on_a_cpu_and_an_unknown_device_are_refused():
    with pytest.raises(ConfigError, match="float16"):
        resolve_dtype("float16", torch.device("cpu"))
    with pytest.raises(ConfigError, match="device 'nonsense'"):
        Trainer(tiny_config(train__device="nonsense"))


def test_the_estimate_counts_state_and_refuses_what_cannot_fit(data_folder):
    setup = Trainer(config(data_folder)).setup
    forecast = estimate(setup)
    assert forecast.state_bytes == 16 * setup.model.num_parameters()
    assert (
        f"{setup.model.num_parameters():,} parameters" in forecast.line() and "12 steps of 64 tokens" in forecast.line()
    )
    forecast.refuse_if_too_large()
    import dataclasses

    with pytest.raises(ConfigError, match=r"GiB are free; lower train\.micro_batch"):
        dataclasses.replace(forecast, available_bytes=1000).refuse_if_too_large()


def test_activation_checkpointing_lowers_the_estimate(data_folder):
    plain = Trainer(config(data_folder, model__num_hidden_layers=8)).setup
    sparing = Trainer(config(data_folder, model__num_hidden_layers=8, train__activation_checkpointing=True)).setup
    assert estimate(sparing).activation_bytes < 0.7 * estimate(plain).activation_bytes


def test_a_saved_model_comes_back_as_itself_and_replaces_only_models(tmp_path):
    model = Transformer(ModelConfig(**TINY, qk_norm=True, dropout=0.1))
    save_model(tmp_path / "m", model)
    save_model(tmp_path / "m", model)
    loaded = load_model(tmp_path / "m")
    assert loaded.config == model.config and loaded.tokenizer is None and not loaded.model.training
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no model folder"):
        save_model(tmp_path / "mine", model)
    assert (tmp_path / "mine" / "thesis.tex").exists()
