"""Naive references are written here with loops or one dense softmax, in float64 where it matters."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.model import Transformer
from pellucid.model.attend import WindowAttend, causal_mask, explicit_attention, fused_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip


def make_model(**changes: Any) -> Transformer:
    return Transformer(ModelConfig(**SHAPE | changes), generator=torch.Generator().manual_seed(0)).eval()


def naive(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float) -> Tensor:
    """One dense softmax in float64; sees [B, T, T]."""
    group = q.shape[-2] // k.shape[-2]
    q, k, v = q.double(), k.double().repeat_interleave(group, -2), v.double().repeat_interleave(group, -2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).float()


def heads(seed: int = 0, tokens: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, tokens, n, 16, generator=g) for n in (6, 2, 2))  # type: ignore[return-value]


def document_ids(tokens: int) -> Tensor:
    ids = torch.zeros(2, tokens, dtype=torch.long)
    ids[0, 9:], ids[0, 20:], ids[1, 1:] = 1, 2, 7
    return ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_every_kernel_equals_a_dense_softmax(
    dtype: torch.dtype, written_out: bool, with_documents: bool, window: int | None
) -> None:
    q, k, v = heads()
    ids = document_ids(37)
    distance = torch.arange(37)[:, None] - torch.arange(37)
    sees = (distance >= 0) & (distance < (window or 37))
    sees = sees & (ids[:, :, None] == ids[:, None] if with_documents else torch.ones(2, 1, 1, dtype=torch.bool))
    attend = WindowAttend((window,), ids if with_documents else None, written_out=written_out)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    out = attend(0, q, k, v, scale=0.3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), naive(q, k, v, sees, 0.3), rtol=tolerance, atol=tolerance)


def test_gradients_of_the_explicit_kernel_equal_those_of_the_fused_one() -> None:
    gradients = []
    for kernel in (fused_attention, explicit_attention):
        leaves = [x.clone().requires_grad_() for x in heads()]
        kernel(*leaves, None, 0.25).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for fused, explicit in zip(*gradients, strict=True):
        assert fused is not None and fused.abs().max() > 0.1
        torch.testing.assert_close(explicit, fused, rtol=1e-4, atol=1e-5)


def test_the_mask_of_a_window_counts_the_token_itself() -> None:
    assert causal_mask(5, 2).sum(-1).tolist() == [1, 2, 2, 2, 2]


def test_the_first_layers_keep_full_attention() -> None:
    assert make_model(sliding_window=4, max_window_layers=2).layer_windows() == (None, None, 4)
    assert make_model(sliding_window=4).layer_windows() == (4, 4, 4)


@pytest.mark.parametrize("attend", ["sdpa", "canonical"])
@pytest.mark.parametrize("window", [None, 6])
def test_a_later_token_changes_no_earlier_logit(attend: str, window: int | None) -> None:
    model = make_model(attend=attend, sliding_window=window)
    tokens = torch.randint(0, 40, (2, 30), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 17] = (changed[:, 17] + 1) % 40
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :17], after[:, :17])
    assert not torch.isclose(before[:, 17:], after[:, 17:]).all(-1).any()


def test_a_sliding_window_forgets_what_lies_before_it() -> None:
    model = make_model(sliding_window=6, num_hidden_layers=1)
    tokens = torch.randint(0, 40, (1, 30), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 40
    with torch.no_grad():
        same = torch.isclose(model(tokens).logits, model(changed).logits, atol=1e-6).all(-1)[0]
    assert same.tolist() == [i < 10 or i >= 16 for i in range(30)]


def token_losses(model: Transformer, tokens: Tensor, ids: Tensor, written_out: bool) -> Tensor:
    """Loss of each next token; positions restart with each document."""
    starts = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1)
    index = torch.arange(ids.shape[1]).expand_as(ids)
    positions = index - torch.where(starts, index, 0).cummax(1).values
    logits = model(tokens, positions, model.make_attend(ids, written_out=written_out)).logits
    flat = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return flat.view(tokens.shape[0], -1)


@pytest.mark.parametrize("kernel", ["sdpa", "written-out sdpa", "canonical"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changing_one_document_leaves_the_losses_of_its_neighbours_bit_identical(
    kernel: str, window: int | None, dtype: torch.dtype
) -> None:
    model = make_model(attend=kernel.split()[-1], sliding_window=window).to(dtype)
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (2, 37), generator=g)
    ids = document_ids(37)
    changed = torch.where(ids == 1, torch.randint(0, 40, (2, 37), generator=g), tokens)
    with torch.no_grad():
        before = token_losses(model, tokens, ids, kernel.startswith("written-out"))
        after = token_losses(model, changed, ids, kernel.startswith("written-out"))
    others = (ids[:, :-1] != 1) & (ids[:, 1:] != 1)
    assert torch.equal(before[others], after[others])
    assert (before[~others] != after[~others]).float().mean() > 0.8


@pytest.mark.parametrize("kernel", ["sdpa", "canonical"])
def test_a_packed_document_has_the_logits_that_it_has_alone(kernel: str) -> None:
    model = make_model(attend=kernel)
    tokens = torch.randint(0, 40, (1, 30), generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[3] * 9 + [4] * 21])
    positions = torch.cat([torch.arange(9), torch.arange(21)])[None]
    with torch.no_grad():
        packed = model(tokens, positions, model.make_attend(ids)).logits
        alone = torch.cat([model(tokens[:, :9]).logits, model(tokens[:, 9:]).logits], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "canonical"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_the_logits_of_real_tokens_alone(kernel: str, side: str) -> None:
    """F.5: masks go by length, so the padding id may be any token, even one that the text holds."""
    model = make_model(attend=kernel)
    g = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 40, (n,), generator=g) for n in (20, 11, 4)]
    pad_id = int(rows[0][3])
    tokens = torch.full((3, 20), pad_id)
    ids = torch.full((3, 20), -1)
    positions = torch.zeros(3, 20, dtype=torch.long)
    places = []
    for i, row in enumerate(rows):
        start = 20 - len(row) if side == "left" else 0
        place = slice(start, start + len(row))
        tokens[i, place], ids[i, place], positions[i, place] = row, i, torch.arange(len(row))
        places.append(place)
    with torch.no_grad():
        padded = model(tokens, positions, model.make_attend(ids)).logits
        for i, row in enumerate(rows):
            alone = model(row[None]).logits[0]
            torch.testing.assert_close(padded[i, places[i]], alone, rtol=1e-5, atol=1e-5)
    assert padded.isfinite().all()


def test_rows_of_one_document_each_take_the_causal_kernel() -> None:
    model = make_model()
    attend = model.make_attend(torch.tensor([[4] * 8, [9] * 8]))
    assert isinstance(attend, WindowAttend) and not attend.document_masks
    packed = model.make_attend(torch.tensor([[4] * 8, [9] * 7 + [1]]))
    assert isinstance(packed, WindowAttend) and packed.document_masks
