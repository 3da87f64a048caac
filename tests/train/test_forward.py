"""What a strategy's forward computes, and how its attention is chosen."""

import pytest
import torch
from support import TINY
from torch._subclasses.fake_tensor import FakeTensorMode

from pellucid.config import ModelConfig
from pellucid.data.batches import Batch
from pellucid.model import Transformer, attend
from pellucid.model.attend import RowsAttend, WindowAttend
from pellucid.model.linear import as_elsewhere
from pellucid.train.forward import WRITTEN_OUT_TOKENS, places, predict, spread
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
    with as_elsewhere(), autocast(CPU, dtype):  # where bfloat16 is emulated, torch's kernel in float32 is taken
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


@pytest.mark.parametrize("attend", ["sdpa", "canonical"])
@pytest.mark.parametrize("num", [0, 1, 3, 40])
def test_logits_at_some_places_are_those_of_all_places_there(attend, num):
    """To the bit, and with the same gradients; the head computes no others (at least 16)."""
    model, batch = model_of(attend=attend), batch_of(48, 1)
    mask = torch.zeros(96, dtype=torch.bool)
    mask[torch.randperm(96, generator=torch.Generator().manual_seed(3))[:num]] = True
    mask = mask.view(2, 48)
    weights = torch.randn(num, 61, generator=torch.Generator().manual_seed(4))
    every = predict(model, batch).logits
    wanted = torch.autograd.grad((every[mask] * weights).sum(), list(model.parameters()))
    rows = []
    given = model.head
    model.head = lambda hidden: rows.append(len(hidden)) or given(hidden)
    at = places(mask)
    some = predict(model, batch, at=at).logits
    assert rows == [max(16, num)] and torch.equal(some, every[mask])
    for mine, theirs in zip(torch.autograd.grad((some * weights).sum(), list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    back = spread(some[:, 0], at, mask)
    assert torch.equal(back, every[..., 0].where(mask, 0))


def test_without_values_and_in_a_compiled_graph_all_places_count():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert places(mask).tolist() == [0, 2]
    with FakeTensorMode():
        assert places(torch.zeros(2, 3, dtype=torch.bool)).shape == (6,)
    compiled = torch.compile(places, dynamic=False, backend="eager", fullgraph=True)
    assert compiled(mask).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("window", [None, 5])
def test_many_short_documents_are_attended_each_in_a_row_of_its_own(window):
    """With the outputs and gradients of the masked rows, where those see the whole window of 48 tokens; padding aside."""
    model, batch = model_of(sliding_window=window), batch_of(48, 12)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)  # drawn so small, tokens hardly look at each other
    documents = batch.document_ids.clone()
    documents[1, 40:] = -1
    seen, weights = [], torch.randn(2, 48, 61, generator=torch.Generator().manual_seed(4))
    apart = model.make_attend(documents)
    masked = WindowAttend(model.layer_windows(), documents)
    for attend_ in (apart, masked):
        logits = model(batch.tokens, batch.positions, attend_).logits.where((documents >= 0)[..., None], 0)
        seen.append([logits, *torch.autograd.grad((logits * weights).sum(), list(model.parameters()))])
    assert isinstance(apart, RowsAttend) and apart.rows.shape == (22, 4)
    for ours, theirs in zip(*seen, strict=True):
        assert theirs.norm() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert isinstance(model.make_attend(batch_of(48, 6).document_ids), WindowAttend), "would save too little"
    assert isinstance(model.make_attend(torch.arange(48)[None] // 47), WindowAttend)
