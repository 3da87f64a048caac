"""Losses against values worked out by hand, finite differences, and what must not change them."""

import math

import numpy as np
import pytest
import torch

from pellucid.data.batches import mix64
from pellucid.train.losses import (
    cross_entropy_sum,
    dpo_loss,
    entropy_sum,
    neftune_noise,
    response_log_probs,
    z_loss_sum,
)

MASK = torch.tensor([[True, False, True], [False, True, True]])
TARGETS = torch.tensor([[0, 3, 1], [2, 2, 3]])


def logits(seed=0, dtype=torch.float64):
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def probabilities(x):
    """With numpy: no softmax of torch's."""
    exp = np.exp(x.numpy())
    return exp / exp.sum(-1, keepdims=True)


def supervised():
    return [(i, j) for i in range(2) for j in range(3) if MASK[i, j]]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_is_the_sum_over_supervised_targets(smoothing):
    p = probabilities(logits())
    expected = 0.0
    for i, j in supervised():
        expected -= (1 - smoothing) * math.log(p[i, j, TARGETS[i, j]]) + smoothing * np.log(p[i, j]).mean()
    assert cross_entropy_sum(logits(), TARGETS, MASK, label_smoothing=smoothing).item() == pytest.approx(expected)


def test_z_loss_is_the_squared_log_of_the_denominator():
    expected = sum(math.log(np.exp(logits()[i, j].numpy()).sum()) ** 2 for i, j in supervised())
    assert z_loss_sum(logits(), MASK).item() == pytest.approx(expected)
    # logits of which all are 2 higher give the same probabilities, and log Z two higher
    higher = sum((math.log(np.exp(logits()[i, j].numpy()).sum()) + 2) ** 2 for i, j in supervised())
    assert z_loss_sum(logits() + 2, MASK).item() == pytest.approx(higher)
    assert cross_entropy_sum(logits() + 2, TARGETS, MASK).item() == pytest.approx(
        cross_entropy_sum(logits(), TARGETS, MASK).item()
    )


def test_entropy_is_that_of_supervised_positions_and_ln_v_where_all_is_as_likely():
    p = probabilities(logits())
    expected = -sum((p[i, j] * np.log(p[i, j])).sum() for i, j in supervised())
    assert entropy_sum(logits(), MASK).item() == pytest.approx(expected)
    assert entropy_sum(torch.zeros(2, 3, 4), MASK).item() == pytest.approx(4 * math.log(4))


def test_log_probabilities_of_a_response_are_summed_and_0_without_a_token():
    p = probabilities(logits())
    mask = torch.stack([MASK[0], torch.zeros(3, dtype=torch.bool)])
    expected = math.log(p[0, 0, 0]) + math.log(p[0, 2, 1])
    assert response_log_probs(logits(), TARGETS, mask).tolist() == pytest.approx([expected, 0.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_with_in_float32(dtype):
    narrow = logits().to(dtype)
    for function in (z_loss_sum, entropy_sum):
        assert function(narrow, MASK).dtype == torch.float32
    assert response_log_probs(narrow, TARGETS, MASK).dtype == torch.float32
    got, wide = response_log_probs(narrow, TARGETS, MASK), response_log_probs(narrow.double(), TARGETS, MASK)
    torch.testing.assert_close(got.double(), wide, rtol=1e-5, atol=1e-6)


# -- preferences --------------------------------------------------------------------------------------------

CHOSEN, REJECTED = torch.tensor([0.0, 1.5, -2.0]).double(), torch.tensor([0.0, -0.5, 1.0]).double()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_dpo_by_hand():
    expected = [-math.log(sigmoid(0.2 * h)) for h in (0.0, 2.0, -3.0)]
    assert dpo_loss(CHOSEN, REJECTED, beta=0.2).tolist() == pytest.approx(expected)
    assert expected[0] == math.log(2)


def test_label_smoothing_is_the_loss_of_pairs_that_may_be_the_wrong_way_round():
    right, wrong = dpo_loss(CHOSEN, REJECTED, beta=0.2), dpo_loss(REJECTED, CHOSEN, beta=0.2)
    smoothed = dpo_loss(CHOSEN, REJECTED, beta=0.2, label_smoothing=0.1)
    torch.testing.assert_close(smoothed, 0.9 * right + 0.1 * wrong)
    assert smoothed[0].item() == pytest.approx(math.log(2))
    # its least value is where the policy says 0.9
    h = torch.tensor(math.log(9) / 0.2, dtype=torch.float64, requires_grad=True)
    dpo_loss(h, torch.zeros(()).double(), beta=0.2, label_smoothing=0.1).backward()
    assert h.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_ipo_by_hand():
    expected = [(h - 1 / 0.4) ** 2 for h in (0.0, 2.0, -3.0)]
    assert dpo_loss(CHOSEN, REJECTED, beta=0.2, variant="ipo").tolist() == pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"variant": "ipo"}])
def test_only_the_difference_of_the_two_answers_counts(options):
    moved = dpo_loss(CHOSEN + 7, REJECTED + 7, beta=0.3, **options)
    torch.testing.assert_close(moved, dpo_loss(CHOSEN, REJECTED, beta=0.3, **options))


def losses():
    half = torch.tensor([1.0, -2.0]).double()
    return {
        "cross entropy": lambda x: cross_entropy_sum(x, TARGETS, MASK, label_smoothing=0.1),
        "z": lambda x: z_loss_sum(x, MASK),
        "dpo": lambda x: dpo_loss(response_log_probs(x, TARGETS, MASK), half, beta=0.3, label_smoothing=0.1).sum(),
        "ipo": lambda x: dpo_loss(response_log_probs(x, TARGETS, MASK), half, beta=0.3, variant="ipo").sum(),
    }


@pytest.mark.parametrize("name", losses())
def test_gradients_are_those_of_finite_differences(name):
    function = losses()[name]
    x = logits(1).requires_grad_()
    function(x).backward()
    assert x.grad.abs().max() > 1e-3
    assert x.grad[0, 1].abs().max() == 0, "what is not supervised has none"
    direction = logits(2)
    with torch.no_grad():
        slope = (function(x + 1e-6 * direction) - function(x - 1e-6 * direction)) / 2e-6
    assert slope.item() == pytest.approx((x.grad * direction).sum().item(), rel=1e-6)


# -- noise --------------------------------------------------------------------------------------------------


def noise(documents, positions, *, width=8, alpha=5.0, seed=3, step=4):
    tensors = (torch.tensor(each) for each in (positions, documents))
    return neftune_noise(*tensors, width, alpha=alpha, seed=seed, step=step)


def test_noise_is_uniform_and_of_the_size_that_the_paper_gives():
    n, width = 400, 64
    values = noise([[7] * n], [list(range(n))], width=width)
    bound = 5.0 / math.sqrt(n * width)
    assert values.shape == (1, n, width) and values.dtype == torch.float32
    assert values.abs().max() <= bound and values.abs().max() > 0.999 * bound
    assert abs(values.mean().item()) < 4 * bound / math.sqrt(3 * n * width)
    assert values.var().item() == pytest.approx(bound**2 / 3, rel=0.02)
    # neighbours in either direction know nothing of each other
    for a, b in ((values[0, 1:], values[0, :-1]), (values[0, :, 1:], values[0, :, :-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()) < 0.03


def test_noise_follows_a_document_wherever_it_is_packed():
    packed = noise([[5, 5, 5, 9, 9, -1]], [[0, 1, 2, 0, 1, 0]])
    apart = noise([[9, 9, -1], [5, 5, 5]], [[0, 1, 0], [0, 1, 2]])
    assert torch.equal(packed[0, :3], apart[1]) and torch.equal(packed[0, 3:5], apart[0, :2])
    assert packed[0, 5].abs().max() == 0, "padding has none"
    assert packed[0, 3].abs().max() > 5 / math.sqrt(3 * 8), "a short document has more than a long one can have"


@pytest.mark.parametrize("change", [{"seed": 4}, {"step": 5}])
def test_another_seed_or_step_gives_other_noise(change):
    before, after = noise([[5, 5]], [[0, 1]]), noise([[5, 5]], [[0, 1]], **change)
    assert (before != after).float().mean() > 0.95


def test_the_hash_is_splitmix64_s():
    from pellucid.train.losses import _mix64

    values = torch.tensor([0, 1, -1, 2**62, -(2**63), 12345678901234567])
    with np.errstate(over="ignore"):
        # that of the data adds the golden ratio first
        expected = mix64(values.numpy().astype(np.uint64) - np.uint64(0x9E3779B97F4A7C15))
    assert _mix64(values).numpy().astype(np.uint64).tolist() == expected.tolist()
