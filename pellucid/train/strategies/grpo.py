"""Group relative policy optimisation: answers that beat the others to the same prompt become likelier.

R answers, T tokens of a row. Online the data holds prompts, and the model being trained answers them; offline it holds
answers with their rewards. `Grpo.make_batches` turns either into the rows that a step learns from.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid.config import RunConfig
from pellucid.data.batches import Batch
from pellucid.data.records import PromptBatch, Prompts, RolloutBatch
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.parallel.plan import Rollout
from pellucid.registry import register
from pellucid.train.experience import (
    Answer,
    ExperienceBatch,
    compare,
    experience,
    from_bytes,
    from_tensors,
    keep_scores,
    stored_answers,
    to_bytes,
    to_tensors,
)
from pellucid.train.forward import bare_model, places, predict, spread
from pellucid.train.grpo_losses import (
    Denominator,
    clipped_policy_loss,
    k3,
    sum_tokens,
    token_entropies,
    token_log_probs,
)
from pellucid.train.precision import autocast
from pellucid.train.prefixes import all_apart
from pellucid.train.ranks import on_every_rank
from pellucid.train.reference import Reference
from pellucid.train.reward_pool import Judged, RewardPool
from pellucid.train.rollout import answer_prompts
from pellucid.train.routing import routing_sums
from pellucid.train.strategies.base import LossOutput
from pellucid.train.strategies.grpo_options import GrpoOptions
from pellucid.train.strategies.grpo_run import GrpoState, check_run, plan_rollout

if TYPE_CHECKING:
    from pellucid.train.setup import Setup


@register("strategy", "grpo", config=GrpoOptions)
class Grpo:
    """`clipped_policy_loss` and, weighed by ``kl_coef``, `k3` of each token; weighs answers.

    The trainer's own forward over fresh answers gives the log-probabilities that ratios are taken to: that of the first update,
    or with several one before it. With ``model.attend = "canonical"`` the engine's are the same to the bit, and the first ratio
    is exactly 1; how far they are apart otherwise is logged as ``kl_sampler``.
    """

    unit = "sequences"
    reads = "grpo"
    whole_weights = True

    def __init__(self, options: GrpoOptions) -> None:
        self.options = options
        self.updates = options.updates
        self.rows_each = options.completions
        tokens = ("clip_fraction", "entropy", "kl_sampler", *(("kl",) if options.kl_coef else ()))
        self.metrics = ("reward", "computed_tokens", *tokens)
        """Means over answers; of all but the first two over the mean of each answer's tokens, or over all tokens alike with
        denominator "token". ``kl`` is of the policy from the reference, ``kl_sampler`` of the sampler from the trainer's forward
        over its answers. ``computed_tokens`` went through the model: what several rows of a batch begin with counts once."""
        self._setup: Setup | None = None
        self._reference: Reference | None = None
        self._pool: RewardPool | None = None
        self._online = False
        self.answers: dict[int, list[Answer]] = {}
        """Of the step under way, or of the last one, to the prompts of all ranks."""
        self.rollout_seconds: float | None = None
        """What they took to get; None where this step has learnt from them before."""
        self.refreshed = False
        """The reference is no longer the model that the run began with."""

    @property
    def live_reference(self) -> str | None:
        """As `Dpo` has it."""
        return self.options.reference_model if self.options.kl_coef else None

    # -- the run --------------------------------------------------------------------------------------------

    def begin(self, setup: "Setup", folder: Path | None) -> None:
        self._setup, self._online = setup, isinstance(setup.loader.windows, Prompts)
        check_run(setup, self.options, online=self._online)
        if self.options.kl_coef:
            self._reference = Reference(setup, self.options.reference_model, live=True, folder=folder)
        if self._online:
            self._open_pool()
        setup.callbacks.append(GrpoState(self))

    def make_batches(
        self, window: Sequence[PromptBatch | RolloutBatch], *, step: int, fresh: bool
    ) -> list[ExperienceBatch]:
        """Answers, their rewards and advantages; ranks tell each other their answers, so that all can save and log them. ★"""
        self.rollout_seconds = None
        if fresh:
            self._refresh_reference(step)
            began = time.perf_counter()
            mine: list[Answer] = []
            on_every_rank(lambda: mine.extend(self._answers(window, step)), tag="rollout/drawn")  # ★
            compare(mine, self.options.advantage)
            self.rollout_seconds = time.perf_counter() - began
            self.take(mine)
            self._score(window)
            self._share(mine)  # ★
        return [self._rows(batch) for batch in window]

    def annotate(self, batch: Any, *, step: int, validation: bool) -> ExperienceBatch:
        """In validation the likeliest answer to each prompt, or what is stored, with what its tokens' metrics need."""
        if not validation:
            assert isinstance(batch, ExperienceBatch)
            return batch
        answers = stored_answers(batch) if isinstance(batch, RolloutBatch) else self._draw(batch, step, best=True)
        compare(answers, self.options.advantage)
        rows = experience(answers, scale=1.0)
        if self._reference is not None:
            keep_scores(answers, "reference", self._reference_scores(rows))
        if self._online and self.options.temperature != 1:
            self._keep_trainer_scores(answers, rows)
        return experience(answers, scale=1.0).to(batch.group_ids.device)

    def take(self, answers: Sequence[Answer]) -> None:
        """Learn from these answers, of all ranks, until others come."""
        self.answers = {answer.group: [] for answer in answers}
        for answer in answers:
            self.answers[answer.group].append(answer)

    # -- the loss -------------------------------------------------------------------------------------------

    def weight(self, batch: PromptBatch | RolloutBatch | ExperienceBatch) -> int:
        return int((batch.sample_ids >= 0).sum())

    def __call__(self, model: Transformer, batch: ExperienceBatch) -> LossOutput:
        return self._loss(model, batch, self.options.denominator)

    def validate(self, model: Transformer, batch: ExperienceBatch) -> LossOutput:
        """Of prompts: minus the reward of the likeliest answer. Of stored answers: the loss, a mean of each answer's mean."""
        output = self._loss(model, batch, "sequence")
        return output if not self._online else output._replace(sum=-output.metrics["reward"])

    def example(self, batch: Batch) -> ExperienceBatch:
        """Groups of the shape of ``batch``, whose values nobody reads."""
        num = self.options.completions
        names = ("tokens", "targets", "positions", "document_ids")
        rows: dict[str, Any] = {name: getattr(batch, name).repeat(num, 1) for name in names}
        zeros = torch.zeros(rows["tokens"].shape, device=batch.tokens.device)
        rollout = RolloutBatch(
            **rows, response_mask=batch.loss_mask.repeat(num, 1), rewards=zeros[:, 0],
            group_ids=batch.sample_ids.repeat(num), old_logprobs=None,
        )  # fmt: skip
        reference = zeros if self.options.kl_coef else None
        prefixes = all_apart(rollout.tokens, rollout.positions)
        return ExperienceBatch(rollout, zeros[:, 0], zeros, zeros, zeros, reference, prefixes, 1.0)

    def _loss(self, model: Transformer, batch: ExperienceBatch, denominator: Denominator) -> LossOutput:
        options, rollout, mask = self.options, batch.rollout, batch.loss_mask
        at = places(mask)
        output = predict(model, rollout, at=at, prefixes=batch.prefixes)
        said = token_log_probs(output.logits, rollout.targets.flatten()[at], temperature=options.temperature)
        log_probs = spread(said, at, mask)
        now = log_probs.detach()
        losses, cut = clipped_policy_loss(
            log_probs, now if batch.old is None else batch.old, batch.advantages, mask,
            clip_low=options.clip_low, clip_high=options.clip_high,
        )  # fmt: skip
        tokens = {
            "clip_fraction": cut.to(now.dtype),
            "entropy": spread(token_entropies(output.logits, temperature=options.temperature), at, mask),
            "kl_sampler": torch.zeros_like(now),
        }
        if batch.sampler is not None:
            tokens["kl_sampler"] = k3(batch.sampler, now if batch.trainer is None else batch.trainer, mask)
        if batch.reference is not None:
            divergence = k3(log_probs, batch.reference, mask)
            losses, tokens["kl"] = losses + options.kl_coef * divergence, divergence.detach()
        elif options.kl_coef:  # no answer has a token
            tokens["kl"] = torch.zeros_like(now)
        each: Denominator = "token" if denominator == "token" else "sequence"
        metrics = {name: sum_tokens(values, mask, each, constant=1) * batch.scale for name, values in tokens.items()}
        total = sum_tokens(losses, mask, denominator, constant=options.max_tokens) * batch.scale
        routing = routing_sums(bare_model(model).config, output, rollout)
        passed = torch.tensor(float(batch.prefixes.count), device=total.device)
        return LossOutput(total, {"reward": rollout.rewards.sum(), "computed_tokens": passed, **metrics}, routing)

    # -- answers --------------------------------------------------------------------------------------------

    def _answers(self, window: Sequence[PromptBatch | RolloutBatch], step: int) -> list[Answer]:
        """This rank's, of the whole step at once."""
        stored = [answer for batch in window if isinstance(batch, RolloutBatch) for answer in stored_answers(batch)]
        prompts = [batch for batch in window if isinstance(batch, PromptBatch)]
        if not prompts:
            return stored
        joined = PromptBatch(
            [prompt for batch in prompts for prompt in batch.prompts],
            [record for batch in prompts for record in batch.records],
            torch.cat([batch.group_ids for batch in prompts]),
        )
        return self._draw(joined, step, best=False)

    def _draw(self, batch: PromptBatch, step: int, *, best: bool) -> list[Answer]:
        """Answers of the model as it is, with their rewards; the likeliest one to each prompt, or a group."""
        assert self._setup is not None, "begin() comes first"
        options = self.options
        real = [i for i, group in enumerate(batch.group_ids.tolist()) if group >= 0]
        groups = [int(batch.group_ids[i]) for i in real]
        prompts = [batch.prompts[i] for i in real]
        texts, drawn = answer_prompts(
            self._setup, list(zip(groups, prompts, strict=True)), num=1 if best else options.completions,
            temperature=0.0 if best else options.temperature, max_tokens=options.max_tokens, kv_gb=options.kv_gb, step=step,
        )  # fmt: skip
        judged, answers = [], []
        for i, group, prompt, text, several in zip(real, groups, prompts, texts, drawn, strict=True):
            record = batch.records[i]
            asked = record["prompt"] if isinstance(record.get("prompt"), str) else text
            for one in several:
                judged.append(Judged(asked, one.text, record))
                learnt = [False] * len(prompt) + [True] * len(one.ids)
                answers.append(Answer(group, [*prompt, *one.ids], learnt, [], one.ended, sampler=one.logprobs))
        for answer, rewards in zip(answers, self._open_pool().score(judged), strict=True):
            answer.rewards = rewards
        return answers

    def _rows(self, batch: PromptBatch | RolloutBatch) -> ExperienceBatch:
        """The answers of a micro-batch."""
        scale = 1.0
        if self.options.denominator == "token":
            everybodys = [answer for group in self.answers.values() for answer in group]
            scale = len(everybodys) / max(1, sum(answer.num_learnt for answer in everybodys))
        return experience(self._of(batch), scale=scale).to(batch.group_ids.device)

    def _of(self, batch: PromptBatch | RolloutBatch) -> list[Answer]:
        groups = [group for group in dict.fromkeys(batch.group_ids.tolist()) if group >= 0]
        return [answer for group in groups for answer in self.answers[group]]

    @torch.no_grad()
    def _score(self, window: Sequence[PromptBatch | RolloutBatch]) -> None:
        """Write down what the trainer's forward and the reference say of this rank's answers, before the first update."""
        assert self._setup is not None
        keeps = self.options.updates > 1 or (self._online and self.options.temperature != 1)
        for batch in window:
            answers, rows = self._of(batch), self._rows(batch)
            if self._reference is not None:
                keep_scores(answers, "reference", self._reference_scores(rows))
            if keeps:
                self._keep_trainer_scores(answers, rows)

    def _share(self, mine: list[Answer]) -> None:
        """Take the answers of all ranks, with log-probabilities where a checkpoint among updates needs them. ★"""
        if comm.world_size() == 1:
            return
        parts = comm.all_gather_bytes(to_bytes(mine, scores=self.options.updates > 1), tag="rollout/answers")
        self.take([a for rank, part in enumerate(parts) for a in (mine if rank == comm.rank() else from_bytes(part))])

    def rollout(self, config: RunConfig, *, prompts: int) -> Rollout:
        """As `PlansRollouts` has it."""
        return plan_rollout(self.options, config, prompts)

    def _keep_trainer_scores(self, answers: Sequence[Answer], rows: ExperienceBatch) -> None:
        """Write down what the model says of rows now, and as the old policy's word unless there is one."""
        assert self._setup is not None
        setup, rollout = self._setup, rows.rollout.to(self._setup.device)
        at = places(rollout.response_mask)
        with autocast(setup.device, setup.dtype):
            logits = predict(setup.model, rollout, at=at, prefixes=rows.prefixes.to(setup.device)).logits
            targets = rollout.targets.flatten()[at]
            now = token_log_probs(logits, targets, temperature=self.options.temperature)
            as_sampled = token_log_probs(logits, targets) if self._online else now
        keep_scores(answers, "trainer", as_sampled)
        if rows.old is None:
            keep_scores(answers, "old", now)

    def _reference_scores(self, rows: ExperienceBatch) -> Tensor:
        """``[n]``, of what is learnt, row by row."""
        assert self._reference is not None and self._setup is not None
        rollout = rows.rollout.to(self._setup.device)
        at = places(rollout.response_mask)
        logits = self._reference.logits(rollout, at=at, prefixes=rows.prefixes.to(self._setup.device))
        return token_log_probs(logits, rollout.targets.flatten()[at], temperature=self.options.temperature)

    @torch.no_grad()
    def _refresh_reference(self, step: int) -> None:
        """Make the reference the model as it is, where that is due."""
        if self._reference is None or not self.options.reference_every or step == 1:
            return
        if (step - 1) % self.options.reference_every == 0:
            assert self._setup is not None
            self._reference.model.load_state_dict(self._setup.model.state_dict())
            self.refreshed = True

    # -- what a checkpoint keeps ----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The answers, where steps are still to learn from them, and a reference that has changed."""
        assert self._setup is not None
        tensors: dict[str, Tensor] = {}
        if self._setup.loader.repeat:
            everybodys = [answer for group in self.answers.values() for answer in group]
            tensors |= {f"answers/{name}": tensor for name, tensor in to_tensors(everybodys).items()}
        if self.refreshed and self._reference is not None:
            tensors |= {f"reference/{name}": tensor for name, tensor in self._reference.model.named_parameters()}
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what `state` gave."""
        answers = {n.removeprefix("answers/"): t for n, t in tensors.items() if n.startswith("answers/")}
        if answers:
            self.take(from_tensors(answers))
        weights = {n.removeprefix("reference/"): t for n, t in tensors.items() if n.startswith("reference/")}
        if weights and self._reference is not None:
            for name, parameter in self._reference.model.named_parameters():
                parameter.copy_(weights[name])
            self.refreshed = True

    def close(self) -> None:
        """End the processes that rewards run in."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _open_pool(self) -> RewardPool:
        """The processes that rewards run in; new ones where they have been ended: a finished run may be validated again."""
        if self._pool is None:
            assert self._setup is not None
            self._pool = RewardPool(
                self.options.rewards,
                plugins=self._setup.config.plugins,
                timeout_s=self.options.reward_timeout_s,
                workers=self.options.reward_workers,
            )
        return self._pool
