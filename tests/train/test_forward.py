"""What a strategy's forward computes, and how its attention is chosen."""

import pytest
import torch
from support import TINY

from pellucid.config import ModelConfig
from pellucid.data.batches import Batch
from pellucid.model import Transformer, attend
from pellucid.train.forward import WRITTEN_OUT_TOKENS, predict
from pellucid.train.precision import autocast

CPU = torch.device("cpu")


def batch_of(tokens, documents):
    """Two rows of random ids, each of so many documents."""
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(61, (2, tokens), generator=draw)
    owners = (torch.arange(tokens) * documents // tokens).expand(2, -1).contiguous()
    starts = torch.cat([torch.tensor([True]), owners[0, 1:] != owners[0, :-1]])
    places = torch.arange(tokens)
    positions = (places - torch.where(starts, places, 0).cummax(0).values).expand(2, -1)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    return Batch(ids, ids.roll(-1, 1), mask, positions, owners, torch.arange(2), packed=documents > 1)


def model_of(**more):
    return Transformer(
        ModelConfig(**TINY | {"max_position_embeddings": 512} | more), generator=torch.Generator().manual_seed(1)
    )


def kernels(monkeypatch):
    """Which of the two kernels is called, as it happens."""
    called = []
    for name in ("fused_attention", "explicit_attention"):
        real = getattr(attend, name)
        monkeypatch.setattr(attend, name, lambda *a, real=real, name=name: called.append(name) or real(*a))
    return called


@pytest.mark.parametrize(
    ("dtype", "tokens", "expected"),
    [
        (torch.bfloat16, WRITTEN_OUT_TOKENS, "explicit_attention"),
        (torch.bfloat16, WRITTEN_OUT_TOKENS + 16, "fused_attention"),
        (torch.float32, 64, "fused_attention"),
    ],
)
@pytest.mark.parametrize("documents", [1, 3])
def test_short_rows_in_bfloat16_have_their_attention_written_out(monkeypatch, dtype, tokens, expected, documents):
    called, model = kernels(monkeypatch), model_of()
    with autocast(CPU, dtype):
        predict(model, batch_of(tokens, documents))
    assert called == [expected] * model.config.num_hidden_layers


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", [1, 3])
def test_it_gives_the_gradients_of_float32(documents, window):
    """Written out in bfloat16, beside torch's kernel in float32: within bfloat16's rounding, packed or not."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(sliding_window=window)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(5)  # drawn so small, tokens hardly look at each other
        batch = batch_of(48, documents)
        with autocast(CPU, dtype):
            logits = predict(model, batch).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten()).backward()
        found[dtype] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, exact in found[torch.float32].items():
        close = found[torch.bfloat16][name]
        assert exact.norm() > 0 and (close - exact).norm() < 0.06 * exact.norm(), name


def test_what_one_document_says_changes_nothing_in_the_next():
    model, batch = model_of(), batch_of(48, 3)
    other = batch.tokens.clone()
    other[:, :16] = (other[:, :16] + 7) % 61
    with autocast(CPU, torch.bfloat16), torch.no_grad():
        before = predict(model, batch).logits
        after = predict(model, Batch(other, *[getattr(batch, f) for f in (
            "targets", "loss_mask", "positions", "document_ids", "sample_ids", "packed")])).logits  # fmt: skip
    assert not torch.equal(before[:, :16], after[:, :16])
    assert torch.equal(before[:, 16:], after[:, 16:])
