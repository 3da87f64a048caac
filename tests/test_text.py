"""Text in, text out, on top of ids-only generation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid.checkpoint.model_folder import export_model, load_model, save_model
from pellucid.config import ModelConfig
from pellucid.errors import CheckpointError, PellucidError, RequestError
from pellucid.inference import SamplingParams, generate
from pellucid.model import Transformer
from pellucid.text import decode, encode_prompt, generate_text, stream_text, with_stop_ids
from pellucid.tokenizer import Tokenizer, train_bpe

PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["the fox asked the hen for tea, naïve and 東京 " * 3], 300)


def make_model(tokenizer: Tokenizer, **changes: Any) -> Transformer:
    sizes = {
        "vocab_size": tokenizer.vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    }  # fmt: skip
    return Transformer(ModelConfig(**(sizes | changes)), generator=torch.Generator().manual_seed(0)).eval()


def test_a_prompt_begins_as_a_training_document_does(tokenizer: Tokenizer) -> None:
    text = "the fox <|im_start|>"
    assert encode_prompt(tokenizer, text) == tokenizer.encode_document(text)[:-1]
    assert encode_prompt(tokenizer, "") == [tokenizer.bos_id]
    without = Tokenizer(tokenizer._text, {})
    assert without.bos_id is None
    with pytest.raises(RequestError, match="prompt is empty and the tokenizer has no beginning token"):
        encode_prompt(without, "")


def test_texts_are_those_of_the_ids(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    params = SamplingParams(n=2, seed=1, max_tokens=12)
    texts = generate_text(model, tokenizer, ["the fox", "tea"], params)
    ids = [encode_prompt(tokenizer, text) for text in ("the fox", "tea")]
    results = generate(model, ids, with_stop_ids(params, tokenizer))
    assert texts == [tokenizer.decode(result.ids) for result in results]
    assert len(set(texts)) == 4
    assert generate_text(model, tokenizer, "tea", params) == texts[2:]


def test_streamed_pieces_make_up_the_text(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer)
    for seed in range(6):
        params = SamplingParams(seed=seed, temperature=2.0, max_tokens=20)
        pieces = list(stream_text(model, tokenizer, encode_prompt(tokenizer, "tea"), params))
        assert "".join(pieces) == generate_text(model, tokenizer, "tea", params)[0]


def test_the_tokenizer_says_where_an_answer_ends(tokenizer: Tokenizer) -> None:
    assert with_stop_ids(PARAMS, tokenizer).stop_ids == tokenizer.stop_ids == (0, 2)
    assert with_stop_ids(SamplingParams(stop_ids=(9,)), tokenizer).stop_ids == (9,)


def edited(folder: Path, name: str, eos: Any) -> Path:
    """The folder, with another ``eos_token_id`` in one of its files."""
    table = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(table | {"eos_token_id": eos}))
    return folder


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_the_ends_that_a_model_folder_names_end_an_answer(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    model = make_model(tokenizer)
    ids = generate(model, [encode_prompt(tokenizer, "tea")], with_stop_ids(PARAMS, tokenizer))[0].ids
    end = next(id_ for id_ in ids[3:] if ids.index(id_) >= 3)
    save_model(tmp_path / "model", model, tokenizer)
    assert load_model(tmp_path / "model").tokenizer.stop_ids == (0, 2)  # type: ignore[union-attr]
    edited(tmp_path / "model", name, [0, end])
    export_model(tmp_path / "model", tmp_path / "again")
    edited(tmp_path / "model", name, end)
    for folder in (tmp_path / "model", tmp_path / "again"):
        _, theirs, _ = load_model(folder)
        assert theirs is not None and theirs.stop_ids == (0, 2, end)
        assert generate_text(model, theirs, "tea", PARAMS) == [decode(tokenizer, ids[: ids.index(end) + 1])]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("bad", [-1, 10**6, "</s>", True, [0, 1.5]])
def test_an_end_that_is_no_id_is_refused(tokenizer: Tokenizer, tmp_path: Path, name: str, bad: Any) -> None:
    save_model(tmp_path, make_model(tokenizer), tokenizer)
    edited(tmp_path, name, bad)
    with pytest.raises(CheckpointError) as error:
        load_model(tmp_path)
    assert f"/{name}: eos_token_id is {bad!r}, and " in str(error.value) and "is none of the" in str(error.value)


def test_ids_of_padding_rows_have_no_text(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, vocab_size=tokenizer.vocab_size + 500)
    params = SamplingParams(seed=0, temperature=5.0, max_tokens=40)
    text = generate_text(model, tokenizer, "tea", params)[0]
    assert text == "".join(stream_text(model, tokenizer, encode_prompt(tokenizer, "tea"), params))
    ids = generate(model, [encode_prompt(tokenizer, "tea")], with_stop_ids(params, tokenizer))[0].ids
    assert max(ids) >= tokenizer.vocab_size
    assert decode(tokenizer, ids) == text


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=f"has {tokenizer.vocab_size} ids and the model's embedding 100 rows"):
        generate_text(make_model(tokenizer, vocab_size=100), tokenizer, "tea", PARAMS)


def test_logits_that_are_not_finite_name_the_prompt(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, tie_word_embeddings=False)
    row = tokenizer.encode("Q")[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[row] = torch.nan
    with pytest.raises(
        PellucidError,
        match=r"^prompt 1: the model's logits are not finite \(a NaN, \+inf, or nothing but -inf\) after 0 new tokens",
    ) as caught:
        generate_text(model, tokenizer, ["tea", "Q", "fox"], PARAMS)
    assert caught.value.exit_code == 1
    with pytest.raises(PellucidError, match="the answer: the model's logits are not finite"):
        list(stream_text(model, tokenizer, [row], PARAMS))
