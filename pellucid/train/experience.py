"""Answers with their rewards: from prompts or stored rollouts, into the rows that a policy learns from, and into checkpoints.

R rows, T tokens of a row.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.data.record_rows import RowTable
from pellucid.data.records import RolloutBatch
from pellucid.train.grpo_losses import Advantage, group_advantages
from pellucid.train.prefixes import Prefixes, find_prefixes

SCORES = ("sampler", "trainer", "old", "reference")
"""Log-probabilities that an answer may have, each a list over its learnt tokens, empty where unknown."""


@dataclass(slots=True)
class Answer:
    """One answer to a prompt."""

    group: int
    """The prompt's number in its split."""
    ids: list[int]
    """Prompt and answer."""
    learnt: list[bool]
    """Of ``ids``: tokens of the answer that count."""
    rewards: list[float]
    """One for each reward function; of a stored answer its one."""
    ended: bool
    """By itself, not because no more tokens were to be had."""
    advantage: float = 0.0
    """`group_advantages` of its reward."""
    sampler: list[float] = field(default_factory=list)
    """Nats, as whoever drew the answer told it: the engine at temperature 1; a stored one as it is stored."""
    trainer: list[float] = field(default_factory=list)
    """What the trainer's forward said at once for the same tokens, at the temperature of ``sampler``."""
    old: list[float] = field(default_factory=list)
    """At the sampling temperature, of the policy before the first update: what ratios are taken to."""
    reference: list[float] = field(default_factory=list)
    """At the sampling temperature, of the frozen reference."""

    @property
    def num_learnt(self) -> int:
        """Tokens that count; the first of a row is nobody's target."""
        return sum(self.learnt[1:])

    @property
    def reward(self) -> float:
        """All rewards together."""
        return sum(self.rewards)


@dataclass(frozen=True, slots=True)
class ExperienceBatch:
    """Rows to learn from: a rollout and what is known of each of its tokens."""

    rollout: RolloutBatch
    advantages: Tensor
    """float32 ``[R]``."""
    sampler: Tensor | None
    """float32 ``[R, T]``, as the other three; see `Answer`. 0 outside of the answers, None where unknown."""
    trainer: Tensor | None
    old: Tensor | None
    reference: Tensor | None
    prefixes: Prefixes
    """Of the rows."""
    scale: float
    """Multiplies sums over tokens; makes of the step's sequences its tokens where those divide."""

    @property
    def loss_mask(self) -> Tensor:
        """bool ``[R, T]``."""
        return self.rollout.response_mask

    @property
    def document_ids(self) -> Tensor:
        """int64 ``[R, T]``."""
        return self.rollout.document_ids

    @property
    def sample_ids(self) -> Tensor:
        """int64 ``[R]``, the prompts."""
        return self.rollout.group_ids

    def to(self, device: torch.device) -> "ExperienceBatch":
        """The same batch on another device."""
        moved: dict[str, Any] = {
            f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, rollout=self.rollout.to(device), prefixes=self.prefixes.to(device), **moved)


def stored_answers(batch: RolloutBatch) -> list[Answer]:
    """The answers of stored rollouts; rows that fill up are left out."""
    answers = []
    for row, group in enumerate(batch.group_ids.tolist()):
        if group < 0:
            continue
        length = int((batch.document_ids[row] >= 0).sum())
        ids = [*batch.tokens[row, :length].tolist(), int(batch.targets[row, length - 1])]
        mask = batch.response_mask[row]
        known = [] if batch.old_logprobs is None else batch.old_logprobs[row][mask].tolist()
        learnt = [False, *mask[:length].tolist()]
        answers.append(Answer(group, ids, learnt, [float(batch.rewards[row])], True, sampler=known, old=known))
    return answers


def compare(answers: Sequence[Answer], variant: Advantage) -> None:
    """Give answers, of whole groups in any order, their advantages."""
    rewards = torch.tensor([answer.reward for answer in answers], dtype=torch.float64)
    groups = torch.tensor([answer.group for answer in answers], dtype=torch.int64)
    for answer, advantage in zip(answers, group_advantages(rewards, groups, variant=variant).tolist(), strict=True):
        answer.advantage = advantage


def experience(answers: Sequence[Answer], *, scale: float) -> ExperienceBatch:
    """Answers as rows as long as the longest, or one empty row where there is none."""
    rows = [(np.array(a.ids, np.int64), np.array(a.learnt, bool)) for a in answers]
    table = RowTable(max(len(rows), 1), max((len(a.ids) - 1 for a in answers), default=1))
    for row, (ids, learnt) in enumerate(rows):
        table.put(row, [(answers[row].group, ids, learnt)])
    tensors = table.tensors()
    mask = tensors.pop("loss_mask")
    fill = [] if answers else [0]
    rollout = RolloutBatch(
        response_mask=mask,
        **tensors,
        rewards=torch.tensor([a.reward for a in answers] or [0.0], dtype=torch.float64),
        group_ids=torch.tensor([a.group for a in answers] + [-1 for _ in fill], dtype=torch.int64),
        old_logprobs=None,
    )
    scores = {name: _spread(answers, name, mask) for name in SCORES}
    advantages = torch.tensor([a.advantage for a in answers] or [0.0], dtype=torch.float32)
    prefixes = find_prefixes(rollout.tokens, rollout.document_ids >= 0)
    return ExperienceBatch(rollout, advantages, **scores, prefixes=prefixes, scale=scale)


def _spread(answers: Sequence[Answer], name: str, mask: Tensor) -> Tensor | None:
    """A score at the places of its tokens; None unless every answer with tokens has it."""
    values = [getattr(answer, name) for answer in answers]
    if any(len(v) != a.num_learnt for v, a in zip(values, answers, strict=True)) or not any(map(len, values)):
        return None
    out = torch.zeros(mask.shape)
    out[mask] = torch.tensor([x for v in values for x in v])
    return out


def keep_scores(answers: Sequence[Answer], name: str, values: Tensor) -> None:
    """Write down a score ``[n]`` of the learnt tokens of ``answers``, one answer behind the other."""
    parts = values.float().cpu().split([answer.num_learnt for answer in answers])
    for answer, part in zip(answers, parts, strict=True):
        setattr(answer, name, part.tolist())


def summary(answers: Sequence[Answer], names: Sequence[str]) -> dict[str, float]:
    """What a rollout was like, for the log.

    Args:
        names: of the reward functions; none of stored answers.

    Returns:
        ``reward``, a mean over answers; ``reward_spread``, the sample standard deviation within a group, mean over groups;
        ``equal_groups``, the share of groups whose rewards are all equal, which teach nothing; ``response_tokens``, a mean;
        ``unended``, the share of answers cut off; of several rewards ``reward/NAME`` each.
    """
    groups: dict[int, list[float]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer.reward)
    spreads = [statistics.stdev(rewards) if len(rewards) > 1 else 0.0 for rewards in groups.values()]
    several = {f"reward/{name}": _mean(a.rewards[i] for a in answers) for i, name in enumerate(names)}
    return {
        "reward": _mean(a.reward for a in answers),
        "reward_spread": _mean(spreads),
        "equal_groups": _mean(min(rewards) == max(rewards) for rewards in groups.values()),
        "response_tokens": _mean(a.num_learnt for a in answers),
        "unended": _mean(not a.ended for a in answers),
        **(several if len(names) > 1 else {}),
    }


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(map(float, values))


def to_bytes(answers: Iterable[Answer], *, scores: bool) -> bytes:
    """For other ranks: how many numbers each tensor of `to_tensors` has, then the tensors; numbers keep their bits.

    Args:
        scores: with log-probabilities.
    """
    kept = [a if scores else replace(a, sampler=[], trainer=[], old=[], reference=[]) for a in answers]
    tensors = to_tensors(kept).values()
    numels = np.array([tensor.numel() for tensor in tensors], np.int64)
    return b"".join([numels.tobytes(), *(tensor.numpy().tobytes() for tensor in tensors)])


def num_bytes(*, answers: int, rewards: int, tokens: int, scores: int) -> int:
    """Of `to_bytes`.

    Args:
        rewards: of each answer.
        tokens: of all prompts and answers.
        scores: log-probabilities of all answers together.
    """
    columns, lengths = len(_PLAIN) + 2 * len(_RAGGED), 8 * len(_RAGGED)
    each = sum(dtype.itemsize for dtype in _PLAIN.values()) + lengths + _RAGGED["rewards"].itemsize * rewards
    return (
        8 * columns
        + each * answers
        + (_RAGGED["ids"].itemsize + _RAGGED["learnt"].itemsize) * tokens
        + _RAGGED["sampler"].itemsize * scores
    )


def from_bytes(data: bytes) -> list[Answer]:
    """What `to_bytes` gave."""
    dtypes = {name: tensor.numpy().dtype for name, tensor in to_tensors([]).items()}
    numels = np.frombuffer(data, np.int64, len(dtypes))
    tensors, start = dict[str, Tensor](), numels.nbytes
    for (name, dtype), numel in zip(dtypes.items(), numels.tolist(), strict=True):
        tensors[name] = torch.from_numpy(np.frombuffer(data, dtype, numel, start).copy())
        start += numel * dtype.itemsize
    return from_tensors(tensors)


def to_tensors(answers: Sequence[Answer]) -> dict[str, Tensor]:
    """For a checkpoint: each field behind one another, with the lengths of those that vary."""
    tensors = {name: torch.tensor([getattr(a, name) for a in answers], dtype=dtype) for name, dtype in _PLAIN.items()}
    for name, dtype in _RAGGED.items():
        values = [getattr(a, name) for a in answers]
        tensors[name] = torch.tensor([x for v in values for x in v], dtype=dtype)
        tensors[f"{name}/lengths"] = torch.tensor([len(v) for v in values], dtype=torch.int64)
    return tensors


def from_tensors(tensors: dict[str, Tensor]) -> list[Answer]:
    """What `to_tensors` gave."""
    ragged = {
        name: [part.tolist() for part in tensors[name].split(tensors[f"{name}/lengths"].tolist())] for name in _RAGGED
    }
    plain = {name: tensors[name].tolist() for name in _PLAIN}
    columns = plain | ragged
    return [Answer(**{name: column[i] for name, column in columns.items()}) for i in range(len(plain["group"]))]


_PLAIN = {"group": torch.int64, "ended": torch.bool, "advantage": torch.float32}
_RAGGED = {
    "ids": torch.int64, "learnt": torch.bool, "rewards": torch.float64, **dict.fromkeys(SCORES, torch.float32),
}  # fmt: skip
