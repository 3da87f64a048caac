"""Answers on their way into rows, to other ranks and through checkpoints."""

import numpy as np
import pytest
import torch
from records import MemoryRecords, part

from pellucid.data.record_files import Record
from pellucid.data.records import Rollouts
from pellucid.train.experience import (
    Answer,
    compare,
    experience,
    from_bytes,
    from_tensors,
    num_bytes,
    stored_answers,
    summary,
    to_bytes,
    to_tensors,
)

THIRD = float(np.float32(1 / 3))


def answers():
    return [
        Answer(7, [1, 2, 3, 4], [False, False, True, True], [1.0, 0.5], True, sampler=[-THIRD, -1.0], old=[-0.5, -2.0]),
        Answer(2, [1, 5], [False, True], [0.0, 0.0], False, sampler=[-2.0], old=[-2.5]),
        Answer(7, [1, 2, 6], [False, False, False], [0.0, 0.5], True),  # a stored one of which nothing counts
    ]


def test_rows_hold_each_token_once_with_its_score_at_its_target():
    mine = answers()
    compare(mine, "dr_grpo")
    batch = experience(mine, scale=2.0)
    assert batch.rollout.tokens.shape == (3, 3) and batch.scale == 2.0
    assert batch.rollout.tokens[0, :3].tolist() == [1, 2, 3] and batch.rollout.targets[0, :3].tolist() == [2, 3, 4]
    assert batch.loss_mask.nonzero().tolist() == [[0, 1], [0, 2], [1, 0]]
    assert batch.sampler[0].tolist() == [0.0, -THIRD, -1.0] and batch.old[1, 0] == -2.5
    assert batch.trainer is None and batch.reference is None
    assert batch.advantages.tolist() == [0.5, 0.0, -0.5] and batch.rollout.rewards.tolist() == [1.5, 0.0, 0.5]
    assert batch.sample_ids.tolist() == [7, 2, 7] and (batch.document_ids[0] >= 0).sum() == 3


def test_rows_are_as_long_as_the_longest():
    mine = [Answer(0, [1] * n, [False] + [True] * (n - 1), [0.0], True) for n in (20, 3)]
    assert experience(mine, scale=1.0).rollout.tokens.shape == (2, 19)


def test_no_answers_are_one_empty_row():
    batch = experience([], scale=1.0)
    assert batch.sample_ids.tolist() == [-1] and not batch.loss_mask.any() and batch.old is None


@pytest.mark.parametrize("way", ["bytes", "tensors"])
def test_answers_come_back_to_the_bit(way):
    mine = answers()
    compare(mine, "grpo")
    if way == "bytes":
        back = from_bytes(to_bytes(mine, scores=True))
    else:
        back = from_tensors({name: tensor.clone() for name, tensor in to_tensors(mine).items()})
    assert back == mine and mine[0].advantage != 0


def test_answers_without_scores_are_told_in_fewer_bytes_and_none_are_too():
    mine = answers()
    back = from_bytes(to_bytes(mine, scores=False))
    assert [a.ids for a in back] == [a.ids for a in mine] and not any(a.sampler or a.old for a in back)
    assert mine[0].sampler, "only what is told has none"
    assert from_bytes(to_bytes([], scores=True)) == []


@pytest.mark.parametrize("scores, known", [(True, 6), (False, 0)])
def test_the_bytes_of_answers_are_known_from_their_lengths(scores, known):
    mine = answers()
    assert len(to_bytes(mine, scores=scores)) == num_bytes(answers=3, rewards=2, tokens=9, scores=known)
    assert len(to_bytes([], scores=scores)) == num_bytes(answers=0, rewards=2, tokens=0, scores=0)
    assert (
        num_bytes(answers=1, rewards=2, tokens=4, scores=3) - num_bytes(answers=1, rewards=2, tokens=3, scores=2) == 13
    )


def test_stored_rollouts_become_the_rows_that_they_were():
    table = {"rewards": [1.0, 0.0], "old_logprobs": [[-1.0, -2.0, -3.0], [-0.5]]}
    first = Record((part([1, 2], False), part([3, 4, 5], [True, False, True]), part([6], True)), table)
    data = Rollouts(MemoryRecords([first]), 64, "right")  # type: ignore[arg-type]
    batch = data.batch([0], 2)
    mine = stored_answers(batch)
    assert [a.ids for a in mine] == [[1, 2, 3, 4, 5], [1, 2, 6]] and mine[0].learnt == [False, False, True, False, True]
    assert mine[0].old == [-1.0, -3.0] and [a.reward for a in mine] == [1.0, 0.0]
    rows = experience(mine, scale=1.0).rollout
    for name in ("tokens", "targets", "response_mask", "positions", "document_ids"):
        stored = getattr(batch, name)
        assert torch.equal(getattr(rows, name), stored[:2, :4]), name
        assert not (stored[:2, 4:] + (name == "document_ids")).any(), "only what fills up is left out"


def test_the_summary_by_hand():
    mine = answers()
    mine.append(Answer(2, [1, 5, 6, 6], [False, True, True, True], [0.0, 0.0], False))
    got = summary(mine, ["a", "b"])
    assert got["reward"] == 0.5 and got["reward/a"] == 0.25 and got["reward/b"] == 0.25
    assert got["reward_spread"] == pytest.approx(0.5**0.5 / 2) and got["equal_groups"] == 0.5
    assert got["response_tokens"] == 1.5 and got["unended"] == 0.5
    assert "reward/a" not in summary(mine, ["a"])
