"""Perplexity against transformers-free recomputation: one document at a time, token by token."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TINY, random_lengths

from pellucid.config import ModelConfig
from pellucid.data.batches import Batch, Windows
from pellucid.data.index import write_index
from pellucid.data.shards import ShardWriter, Split, TokenData
from pellucid.errors import DataError, PellucidError
from pellucid.evaluate import Score, evaluate, text_split
from pellucid.evaluate.perplexity import batch_nll
from pellucid.model import Transformer
from pellucid.tokenizer import train_bpe

torch.set_num_threads(1)

CONTEXT = 16


def make_model(**changes: Any) -> Transformer:
    config = ModelConfig(**(TINY | {"initializer_range": 0.3} | changes))
    return Transformer(config, generator=torch.Generator().manual_seed(1)).eval()


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return make_split(tmp_path, random_lengths(25))


def make_split(folder: Path, lengths: list[int]) -> Split:
    draw = torch.Generator().manual_seed(3)
    writer = ShardWriter(folder, "val", "uint16", 100)
    for length in lengths:
        writer.add(torch.randint(61, (length,), generator=draw).tolist())
    write_index(folder, dtype="uint16", vocab_size=61, tokenizer_sha256="", splits={"val": writer.finish()}, sources=[])
    return TokenData.open(folder).split("val")


@torch.no_grad()
def one_by_one(model: Transformer, split: Split, stride: int = CONTEXT) -> tuple[float, int]:
    """NLL and tokens, each target predicted on its own from what its window and its document let it see."""
    _, ends = split.document_spans(0, split.num_tokens)
    nll, tokens = 0.0, 0
    for target in range(1, split.num_tokens):
        first_of_document = max([0, *(e for e in ends.tolist() if e <= target)])
        if first_of_document == target:
            continue
        window = max(0, -(-(target - CONTEXT) // stride)) * stride  # the first window that holds this target
        start = max(first_of_document, window)
        logits = model(torch.from_numpy(split.read(start, target))[None]).logits[0, -1].double()
        nll -= float(logits.log_softmax(-1)[int(split.read(target, target + 1)[0])])
        tokens += 1
    return nll, tokens


@pytest.mark.parametrize("stride", [16, 5])
def test_each_token_is_predicted_once_and_from_its_own_document(split: Split, stride: int) -> None:
    model = make_model()
    score = evaluate(model, Windows(split, CONTEXT, stride, score_once=True), batch_size=4)
    nll, tokens = one_by_one(model, split, stride)
    assert score.tokens == tokens == split.num_tokens - split.num_documents
    assert score.documents == 25
    assert score.nll == pytest.approx(nll, rel=1e-6)
    assert score.loss == score.nll / score.tokens and score.perplexity == math.exp(score.loss)
    assert score.perplexity > 61  # a random model at this scale is worse than a uniform one: it has an opinion


def test_perplexity_is_the_same_for_every_batch_size(split: Split) -> None:
    model, windows = make_model(), Windows(split, CONTEXT, score_once=True)
    one, three, eight = (evaluate(model, windows, batch_size=size) for size in (1, 3, 8))
    assert one.tokens == three.tokens == eight.tokens
    assert three.perplexity == pytest.approx(one.perplexity, rel=1e-6)
    assert eight.perplexity == pytest.approx(one.perplexity, rel=1e-6)


def test_padding_on_either_side_changes_nothing() -> None:
    model = make_model()
    draw = torch.Generator().manual_seed(5)
    documents = [torch.randint(61, (n,), generator=draw) for n in (4, 12, 7)]
    plain = sum(batch_nll(model, padded([d], len(d), left=False)) for d in documents)
    for left in (False, True):
        assert batch_nll(model, padded(documents, 14, left=left)) == pytest.approx(plain, rel=1e-6)
    assert plain > 10


def padded(documents: list[torch.Tensor], width: int, *, left: bool) -> Batch:
    shape = (len(documents), width - 1)
    tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    mask, positions, ids = tokens.bool(), torch.zeros_like(tokens), torch.full_like(tokens, -1)
    for row, document in enumerate(documents):
        n = len(document) - 1
        at = slice(width - 1 - n, width - 1) if left else slice(0, n)
        tokens[row, at], targets[row, at], mask[row, at] = document[:-1], document[1:], True
        positions[row, at], ids[row, at] = torch.arange(n), row
    return Batch(tokens, targets, mask, positions, ids, torch.arange(len(documents)), packed=True)


def test_evaluation_leaves_the_model_as_it_was(split: Split) -> None:
    model = make_model(dropout=0.5)
    windows = Windows(split, CONTEXT, score_once=True)
    quiet = evaluate(model, windows)
    assert evaluate(model.train(), windows) == quiet
    assert model.training


def test_bits_per_byte_count_the_bytes_of_the_text(tmp_path: Path) -> None:
    texts = ["a tiny tale of a fox, naïve and 東京", "the fox ran; the hen ran", "x"]
    tokenizer = train_bpe(texts * 4, 290)
    file = tmp_path / "tales.jsonl"
    file.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts), encoding="utf-8")
    model = make_model(vocab_size=tokenizer.vocab_size)
    with text_split(str(file), tokenizer) as split:
        score = evaluate(model, Windows(split, CONTEXT, score_once=True), tokenizer=tokenizer)
        assert split.num_documents == 3
    num_bytes = sum(len(text.encode()) for text in texts)
    assert score.bits_per_byte == pytest.approx(score.nll / math.log(2) / num_bytes)
    ids = [tokenizer.encode_document(text) for text in texts]
    assert score.tokens == sum(map(len, ids)) - 3
    assert not list(tmp_path.glob("pellucid-eval-*"))


def test_a_text_file_scores_as_its_documents_do(tmp_path: Path) -> None:
    text = "once upon a time a fox met a hen. " * 3
    tokenizer = train_bpe([text] * 3, 280)
    file = tmp_path / "tale.txt"
    file.write_text(text)
    model = make_model(vocab_size=tokenizer.vocab_size, max_position_embeddings=256)
    with text_split(str(file), tokenizer) as split:
        score = evaluate(model, Windows(split, 256, score_once=True), tokenizer=tokenizer)
    ids = torch.tensor(tokenizer.encode_document(text))
    with torch.no_grad():
        logprobs = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
    assert score.nll == pytest.approx(-float(logprobs.gather(1, ids[1:, None]).sum()), rel=1e-6)


def test_a_model_without_finite_output_is_refused_by_window(split: Split) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(PellucidError, match="not finite in windows 0 to 3") as caught:
        evaluate(model, Windows(split, CONTEXT, score_once=True), batch_size=4)
    assert caught.value.exit_code == 1


def test_nothing_to_predict_is_an_error(tmp_path: Path) -> None:
    split = make_split(tmp_path, [1, 1, 1])
    with pytest.raises(DataError, match="nothing can be scored"):
        evaluate(make_model(), Windows(split, CONTEXT, score_once=True))


def test_bad_text_is_named(tmp_path: Path) -> None:
    tokenizer = train_bpe(["some text, some more text"], 270)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": \n')
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for path, message in [
        (broken, r"broken.jsonl:2: not JSON"),
        (empty, "holds no text"),
        (tmp_path / "no.txt", "no such file"),
    ]:
        with pytest.raises(DataError, match=message), text_split(str(path), tokenizer):
            pass


def test_a_score_has_the_keys_of_the_contract() -> None:
    keys = ["tokens", "documents", "nll", "loss", "perplexity", "bits_per_byte"]
    assert [field.name for field in fields(Score)] == keys
