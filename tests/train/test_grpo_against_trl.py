"""The loss of TRL's GRPOTrainer on the same tensors; needs trl, which is no part of the test extra."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from pellucid.train.grpo_losses import clipped_policy_loss, group_advantages, k3, sum_tokens, token_log_probs

trl = pytest.importorskip("trl", reason="pip install trl")
pytestmark = pytest.mark.slow

BETA, LOW, HIGH, LONGEST = 0.07, 0.2, 0.28, 9
CASES = {"sequence": "grpo", "token": "bnpo", "constant": "dr_grpo"}


def theirs(loss_type, log_probs, entropies, mask, old, reference, advantages):
    """Their method on our tensors: it asks its trainer for log-probabilities, and for where to log."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropies, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        beta=BETA, loss_type=loss_type, epsilon_low=LOW, epsilon_high=HIGH, use_vllm=False, _entropy_bonus_enabled=False,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None), model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1, max_completion_length=LONGEST, _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x),
    )  # fmt: skip
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask.long(),
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference,
    }  # fmt: skip
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("denominator", CASES)
def test_loss_gradient_and_clip_fraction(denominator):
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 7, 11, generator=g, requires_grad=True)
    targets = torch.randint(0, 11, (6, 7), generator=g)
    mask = torch.arange(7) < torch.tensor([7, 3, 1, 5, 6, 2])[:, None]
    rewards, groups = torch.tensor([1.0, 0, 0, 0.5, 0.5, 3]), torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = group_advantages(rewards, groups, variant="grpo")
    by_group = rewards.view(2, 3)  # as they write it
    expected = (by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(advantages, expected.flatten())
    log_probs = token_log_probs(logits, targets)
    old, reference = (log_probs.detach() + 0.4 * torch.randn(6, 7, generator=g) for _ in range(2))
    loss, metrics = theirs(CASES[denominator], log_probs, torch.zeros(6, 7), mask, old, reference, advantages)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)

    losses, cut = clipped_policy_loss(log_probs, old, advantages, mask, clip_low=LOW, clip_high=HIGH)
    kl = k3(log_probs, reference, mask)
    weight = mask.sum() if denominator == "token" else len(mask)
    ours = sum_tokens(losses + BETA * kl, mask, denominator, constant=LONGEST) / weight
    torch.testing.assert_close(ours, loss)
    torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], gradient)
    assert gradient.abs().sum() > 0.1 and 0 < cut.sum() < mask.sum()
    assert cut.sum().item() / mask.sum().item() == pytest.approx(metrics["clip_ratio/region_mean"])
    assert kl.sum().item() / mask.sum().item() == pytest.approx(metrics["kl"])
