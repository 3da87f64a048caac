"""GRPO's pieces against values worked out by hand, finite differences and invariances."""

import math

import pytest
import torch

from pellucid.train.grpo_losses import (
    clipped_policy_loss,
    group_advantages,
    k3,
    sum_tokens,
    token_entropies,
    token_log_probs,
)


def advantages(rewards, groups, variant="grpo", **options):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), variant=variant, **options)


# -- advantages ---------------------------------------------------------------------------------------------


def test_advantages_by_hand_with_groups_in_any_order():
    rewards, groups = [1.0, 10.0, 0.0, 0.0, 14.0], [4, 9, 4, 4, 9]
    third = 1 / math.sqrt(3)  # the sample deviation of 1, 0, 0; that of 10, 14 is the root of 8
    expected = [2 / 3 / third, -2 / math.sqrt(8), -1 / 3 / third, -1 / 3 / third, 2 / math.sqrt(8)]
    assert advantages(rewards, groups, epsilon=0.0).tolist() == pytest.approx(expected, rel=1e-6)
    assert advantages(rewards, groups).tolist() == pytest.approx([e / (1 + 1e-4 / d) for e, d in zip(
        expected, [third, math.sqrt(8), third, third, math.sqrt(8)], strict=True)], rel=1e-6)  # fmt: skip
    plain = advantages(rewards, groups, "dr_grpo").tolist()
    assert plain == pytest.approx([2 / 3, -2.0, -1 / 3, -1 / 3, 2.0], rel=1e-6)


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo"])
def test_equal_rewards_and_a_group_of_one_give_exactly_nothing(variant):
    got = advantages([0.1, 0.1, 0.1, 5.0, 0.3, 0.7, 1e30], [0, 0, 0, 1, 2, 2, 3], variant)
    assert got[:4].tolist() == [0.0] * 4 and got[6] == 0.0
    assert got[4] < 0 < got[5] and torch.isfinite(got).all()


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo"])
def test_a_constant_added_to_a_groups_rewards_changes_nothing(variant):
    rewards = torch.tensor([0.25, 1.0, 0.5, 2.0, -1.0, 0.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    moved = rewards + torch.tensor([1024.0, 1024, 1024, -3, -3, -3], dtype=torch.float64)  # exact sums
    plain = group_advantages(rewards, groups, variant=variant)
    assert torch.equal(plain, group_advantages(moved, groups, variant=variant))
    assert not torch.equal(plain, group_advantages(moved, torch.zeros_like(groups), variant=variant))


def test_rows_that_fill_up_get_nothing_though_they_share_an_id():
    assert advantages([1.0, 2.0, 0.0, 1.0], [-1, -1, 5, 5], "dr_grpo").tolist() == [0.0, 0.0, -0.5, 0.5]


# -- tokens -------------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_at_the_temperature():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 3, 6], [1, 1, 2]])
    for temperature in (1.0, 0.5, 2.0):
        expected = torch.distributions.Categorical(logits=logits / temperature)
        torch.testing.assert_close(
            token_log_probs(logits, targets, temperature=temperature), expected.log_prob(targets)
        )
        torch.testing.assert_close(token_entropies(logits, temperature=temperature), expected.entropy())
    half = token_log_probs(logits.bfloat16(), targets)
    assert half.dtype == torch.float32


def surrogate(ratio, advantage, low=0.2, high=0.3):
    log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, cut = clipped_policy_loss(
        log_probs, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool),
        clip_low=low, clip_high=high,
    )  # fmt: skip
    loss.sum().backward()
    return loss.item(), log_probs.grad.item(), cut.item()


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient, cut",
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.25, 2.0, -2.5, -2.5, False),
        (1.5, 2.0, -2.6, 0.0, True),  # better and likelier than allowed: 1.3 * 2, and no pull
        (0.5, 2.0, -1.0, -1.0, False),  # better and unlikelier: pulled back
        (0.5, -2.0, 1.6, 0.0, True),  # worse and unlikelier than allowed: 0.8 * 2
        (1.5, -2.0, 3.0, 3.0, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_the_clipped_surrogate_by_hand(ratio, advantage, loss, gradient, cut):
    assert surrogate(ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient), cut)


def test_k3_by_hand_is_never_negative_and_estimates_the_divergence():
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert k3(torch.zeros(1, 1), torch.tensor([[math.log(2)]]), mask).item() == pytest.approx(2 - math.log(2) - 1)
    assert k3(torch.ones(1, 1), torch.ones(1, 1), mask).item() == 0.0
    policy, reference = (
        torch.distributions.Categorical(logits=torch.tensor(x)) for x in ([0.0, 1.0, -1.0], [0.5, 0.0, 0.3])
    )
    tokens = torch.arange(3)[None]
    each = k3(policy.log_prob(tokens), reference.log_prob(tokens), torch.ones(1, 3, dtype=torch.bool))
    assert (each >= 0).all()
    expected = torch.distributions.kl_divergence(policy, reference)
    assert (policy.probs * each).sum().item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_stands_outside_of_the_mask_is_never_looked_at():
    mask = torch.tensor([[True, False, True]])
    values = torch.tensor([[-1.0, float("inf"), -2.0]], requires_grad=True)
    old = torch.tensor([[-1.5, float("nan"), -1.0]])
    loss, cut = clipped_policy_loss(values, old, torch.tensor([1.0]), mask, clip_low=0.2, clip_high=0.2)
    total = sum_tokens(loss + k3(values, old, mask), mask, "sequence", constant=1)
    total.backward()
    assert torch.isfinite(total) and values.grad[0, 1] == 0 and not cut[0, 1] and torch.isfinite(values.grad).all()


def test_ratios_beyond_all_measure_stay_finite_even_where_the_advantage_is_nothing():
    far = torch.tensor([[500.0]])
    loss, _ = clipped_policy_loss(
        far, -far, torch.tensor([0.0]), torch.ones(1, 1, dtype=torch.bool), clip_low=0.2, clip_high=0.2
    )
    assert loss.item() == 0.0 and torch.isfinite(k3(-far, far, torch.ones(1, 1, dtype=torch.bool))).all()


def test_denominators_by_hand():
    values = torch.tensor([[1.0, 2.0, 3.0, 99.0], [4.0, 99.0, 99.0, 99.0], [99.0] * 4])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    assert sum_tokens(values, mask, "sequence", constant=8).item() == 2.0 + 4.0  # an empty answer adds 0
    assert sum_tokens(values, mask, "token", constant=8).item() == 10.0
    assert sum_tokens(values, mask, "constant", constant=8).item() == 10.0 / 8


# -- together -----------------------------------------------------------------------------------------------


def objective(
    logits, targets, mask, old, reference, rewards, groups, *, variant="grpo", denominator="sequence", temperature=0.7
):
    log_probs = token_log_probs(logits, targets, temperature=temperature)
    each = group_advantages(rewards, groups, variant=variant).to(logits.dtype)
    losses, _ = clipped_policy_loss(log_probs, old, each, mask, clip_low=0.2, clip_high=0.3)
    return sum_tokens(losses + 0.1 * k3(log_probs, reference, mask), mask, denominator, constant=5)


@pytest.fixture
def case():
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 3, 5, generator=g, dtype=torch.float64)
    targets = torch.randint(0, 5, (4, 3), generator=g)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 0]]).bool()
    now = token_log_probs(logits, targets, temperature=0.7)
    old, reference = (now + 0.3 * torch.randn(4, 3, generator=g, dtype=torch.float64) for _ in range(2))
    return logits, targets, mask, old, reference, torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("denominator", ["sequence", "token", "constant"])
def test_gradients_are_finite_differences(case, variant, denominator):
    logits, *rest = case
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: objective(x, *rest, variant=variant, denominator=denominator), logits)
    (gradient,) = torch.autograd.grad(objective(logits, *rest, variant=variant, denominator=denominator), logits)
    assert gradient.abs().sum() > 0.1


def test_equal_rewards_give_no_policy_gradient_and_others_do(case):
    logits, targets, mask, old, _, rewards, groups = case
    logits.requires_grad_()

    def gradient(rewards):
        reference = token_log_probs(logits, targets, temperature=0.7).detach()  # the divergence pulls nowhere
        return torch.autograd.grad(objective(logits, targets, mask, old, reference, rewards, groups), logits)[0]

    assert (gradient(torch.tensor([0.1, 0.1, 7.0, 7.0])) == 0).all()
    assert gradient(rewards).abs().sum() > 0.1
