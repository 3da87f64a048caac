"""Rows that begin alike: each distinct prefix goes through the model once, and nothing else changes."""

import pytest
import torch
from support import TINY

from pellucid.config import ModelConfig
from pellucid.data.records import RolloutBatch
from pellucid.model import Transformer
from pellucid.train.forward import places, predict
from pellucid.train.prefixes import find_prefixes

ROWS = [[7, 8, 9, 1, 2], [7, 8, 9, 1, 3], [7, 8, 9, 4], [7, 8, 9, 1, 2], [5, 8, 9, 1, 2], [7]]
"""The first and the fourth are one; the fifth begins otherwise, and so shares nothing."""


def batch_of(rows):
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    real = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], real[i, : len(row)] = torch.tensor(row), True
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).where(real, 0)
    documents = torch.arange(len(rows))[:, None].expand_as(tokens).where(real, -1)
    return RolloutBatch(
        tokens, tokens.roll(-1, 1), real & (positions >= 2), positions, documents, torch.zeros(len(rows)),
        torch.arange(len(rows)), None,
    )  # fmt: skip


def test_each_distinct_prefix_is_there_once():
    batch = batch_of(ROWS)
    found = find_prefixes(batch.tokens, batch.document_ids >= 0)
    told = {}
    for row, ends in zip(ROWS, found.rows.tolist(), strict=True):
        for i, number in enumerate(ends[: len(row)]):
            assert told.setdefault(number, row[: i + 1]) == row[: i + 1], "one number, one prefix"
            assert found.tokens[number] == row[i] and found.positions[number] == i
            place = int(found.places[number])
            assert found.rows.flatten()[place] == number
    assert len(told) == found.count == len({tuple(row[: i + 1]) for row in ROWS for i in range(len(row))}) == 12
    assert len(found.tokens) == len(found.positions) == len(found.places) == 16, (
        "products of fewer rows round otherwise"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attend": "canonical"},
        {"sliding_window": 2},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4},
    ],
    ids=["sdpa", "canonical", "window", "dynamic"],
)
def test_the_model_says_of_rows_what_it_says_of_each_alone(changes):
    """Logits, with canonical attention to the bit, and gradients, which are the sums over all rows."""
    model = Transformer(
        ModelConfig(**TINY | {"initializer_range": 0.3} | changes), generator=torch.Generator().manual_seed(3)
    )
    batch = batch_of(ROWS)
    at = places(batch.loss_mask)
    prefixes = find_prefixes(batch.tokens, batch.document_ids >= 0)
    weights = torch.randn(len(at), 61, generator=torch.Generator().manual_seed(4))
    found = []
    for shared in (None, prefixes):
        logits = predict(model, batch, at=at, prefixes=shared).logits
        found.append((logits, torch.autograd.grad((logits * weights).sum(), list(model.parameters()))))
    (plain, plain_grads), (mine, grads) = found
    if changes.get("attend"):
        assert torch.equal(mine, plain)
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grads, plain_grads, strict=True):
        assert theirs.norm() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_token_wise_work_is_done_for_distinct_prefixes_alone():
    model, batch, seen = Transformer(ModelConfig(**TINY)), batch_of(ROWS * 3), []
    model.model.layers[0].mlp.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[:-1].numel()))
    prefixes = find_prefixes(batch.tokens, batch.document_ids >= 0)
    predict(model, batch, at=places(batch.loss_mask), prefixes=prefixes)
    assert seen == [16]


def test_no_rows_are_no_prefixes_and_still_have_gradients():
    model, batch = Transformer(ModelConfig(**TINY)), batch_of([[3]])
    prefixes = find_prefixes(batch.tokens, torch.zeros_like(batch.tokens, dtype=torch.bool))
    assert prefixes.count == 0
    at = places(torch.zeros_like(batch.tokens, dtype=torch.bool))
    predict(model, batch, at=at, prefixes=prefixes).logits.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
