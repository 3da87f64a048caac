"""Who gets which part of the next forward.

A step has a budget of tokens. Sequences that decode come first, one token each, so that a stream never waits longer than one
step; what is left is shared among the prompts that are being read, in equal chunks and in turn, so that a short one is not kept
waiting by a long one. Blocks that run out are taken from the sequence that came last.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from torch import Tensor

from pellucid.errors import RequestError
from pellucid.inference.blocks import BlockPool
from pellucid.inference.sequence import Chunk, Sequence, StepPlan

READ_TOGETHER = 4
"""Prompts that share the budget of a step: a chunk costs as much again in calls as some tens of tokens."""


class QueueFullError(RequestError):
    """As many requests wait as may; try again later."""


class Scheduler:
    """Waiting and running sequences.

    Args:
        budget: tokens a step; at least ``max_running``.
        save: copies the content of blocks out of a sequence that is pre-empted, to put it back later; None recomputes.
        draft: guesses the next tokens of a sequence that decodes; None: no guesses.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        max_waiting: int,
        budget: int,
        save: Callable[[list[int]], list[Tensor]] | None = None,
        draft: Callable[[Sequence], list[int]] | None = None,
    ) -> None:
        assert budget >= max_running
        self.pool, self.max_running, self.max_waiting, self.budget = pool, max_running, max_waiting, budget
        self.save, self.draft = save, draft
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        """In order; a dict, so that one of many thousands leaves at once."""
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._turns = 0

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait that `check` allows.

        Raises:
            QueueFullError: as many wait as may.
        """
        if len(self.waiting) >= self.max_waiting:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting, which is the limit; try again later")
        self.waiting[sequence] = None

    def check(self, tokens: int, n: int) -> None:
        """RequestError where ``n`` samples, or one of so many tokens, could never run."""
        if n > self.max_running:
            raise RequestError(
                f"n is {n} and {self.max_running} sequences may run together; lower n or raise max_running"
            )
        if self._blocks_for(tokens) > self.pool.num_blocks:
            room = self.pool.num_blocks * self.pool.block_size
            raise RequestError(
                f"prompt and answer may take {tokens:,} tokens and the cache holds {room:,}; lower max_tokens, "
                "shorten the prompt, or raise kv_gb"
            )

    def schedule(self) -> StepPlan:
        """The next step; without chunks where there is nothing to do."""
        plan = StepPlan()
        self._admit(plan)
        budget = self.budget
        for sequence in [s for s in self.running if s.decodes]:
            if sequence in self.running:  # not pre-empted by one before it
                budget -= self._decode(sequence, budget, plan)
        reading = sorted((s for s in self.running if not s.decodes), key=lambda s: s.last_turn)
        for left, sequence in zip(range(len(reading), 0, -1), reading, strict=True):
            if sequence in self.running:
                share = max(-(-budget // left), self.budget // READ_TOGETHER)
                budget -= self._read(sequence, min(budget, share), plan)
        plan.chunks = [c for c in plan.chunks if c.sequence in self.running]  # others may have been pre-empted since
        return plan

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """A sequence ends, or leaves before: the one place where its blocks go back.

        Args:
            keep: let later requests reuse what was computed.
        """
        if sequence in self.running:
            self.running.remove(sequence)
        self.waiting.pop(sequence, None)
        self._release(sequence, keep=keep)
        sequence.saved = None

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The prompt has been read: its further samples run too, on the same blocks."""
        forks, sequence.forks = sequence.forks, []
        for other in forks:
            other.blocks, other.num_computed = list(sequence.blocks), sequence.num_computed
            other.num_published, other.prompt_logprobs = sequence.num_published, sequence.prompt_logprobs
            self.pool.hold(other.blocks)
            self.running.append(other)
        return forks

    def publish(self, sequence: Sequence) -> None:
        """Blocks that have become full are there for others from now on."""
        if sequence.num_computed // self.pool.block_size > sequence.num_published:
            self.pool.insert(sequence.tokens[: sequence.num_computed], sequence.blocks, sequence.salt)
            sequence.num_published = sequence.num_computed // self.pool.block_size

    # -- inside ---------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan) -> None:
        """From the front of the queue, while there are places, and blocks for the whole of what is known."""
        taken = sum(s.places for s in self.running)
        for sequence in list(islice(self.waiting, 2 * self.max_running)):  # bounds the work where many are passed over
            if taken + sequence.places > self.max_running:
                return
            found = self._reusable(sequence)
            if self._is_being_read(sequence, len(found)):
                self.pool.release(found)
                continue
            length = min(len(sequence.tokens) + 1, sequence.admitted)
            spare = len(self.running)  # a block for each to grow into, or it would soon be sent away again
            if self._blocks_for(length) - len(found) + spare > self.pool.num_available:
                self.pool.release(found)
                return
            del self.waiting[sequence]
            self.running.append(sequence)
            taken += sequence.places
            if sequence.saved is not None:
                self._restore(sequence, sequence.saved, plan)
                continue
            sequence.blocks, sequence.num_published = found, len(found)
            sequence.num_computed = len(found) * self.pool.block_size
            if sequence.num_computed:
                plan.reused[sequence.request.id] = min(sequence.num_computed, sequence.num_prompt)

    def _is_being_read(self, sequence: Sequence, found: int) -> bool:
        """Whether a running sequence is about to compute more of this one's prefix than is cached: worth waiting for."""
        if not self.pool.reuse or sequence.saved is not None or sequence.lacks_prompt_logprobs:
            return False
        size, usable = self.pool.block_size, (len(sequence.tokens) - 1) // self.pool.block_size
        for other in self.running:
            if other.num_computed >= len(other.tokens) - 1 or other.salt != sequence.salt:
                continue
            shared = 0
            while shared < min(usable, len(other.tokens) // size) and (
                other.tokens[shared * size : (shared + 1) * size]
                == sequence.tokens[shared * size : (shared + 1) * size]
            ):
                shared += 1
            if shared > found and other.num_computed < shared * size:
                return True
        return False

    def _reusable(self, sequence: Sequence) -> list[int]:
        """At least one token is computed anew, for its logits; all of them where the prompt's own are asked for."""
        if sequence.saved is not None or sequence.lacks_prompt_logprobs:
            return []
        return self.pool.match(sequence.tokens[: len(sequence.tokens) - 1], sequence.salt)

    def _restore(self, sequence: Sequence, saved: list[Tensor], plan: StepPlan) -> None:
        blocks = self.pool.allocate(self._blocks_for(sequence.num_computed))
        assert blocks is not None, "there was room a moment ago"
        sequence.blocks, sequence.saved = blocks, None
        plan.restored.append((saved, list(blocks)))  # more are added to its own

    def _decode(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        sequence.draft = []
        if self.draft is not None:  # from what nobody else needs: a guess must not send a sequence away
            spare = self.pool.num_available - len(self.running)
            room = (len(sequence.blocks) + max(0, spare)) * self.pool.block_size - len(sequence.tokens)
            sequence.draft = self.draft(sequence)[: max(0, min(budget - len(self.running), room))]
        return self._chunk(sequence, 1 + len(sequence.draft), plan)

    def _read(self, sequence: Sequence, share: int, plan: StepPlan) -> int:
        sequence.draft = []
        count = self._chunk(sequence, min(share, len(sequence.tokens) - sequence.num_computed), plan)
        if count:
            self._turns += 1
            sequence.last_turn = self._turns
        return count

    def _chunk(self, sequence: Sequence, count: int, plan: StepPlan) -> int:
        """Blocks for ``count`` more tokens, pre-empting those that came later; the tokens that it got."""
        if count < 1 or not self._make_room(sequence, sequence.num_computed + count, plan):
            return 0
        plan.chunks.append(Chunk(sequence, sequence.num_computed, count))
        return count

    def _make_room(self, sequence: Sequence, length: int, plan: StepPlan) -> bool:
        first = sequence.num_computed // self.pool.block_size
        while True:
            shared = [
                i for i in range(first, len(sequence.blocks)) if self.pool.is_shared(sequence.blocks[i])
            ]  # written into, and somebody else's too
            new = self.pool.allocate(self._blocks_for(length) - len(sequence.blocks) + len(shared))
            if new is not None:
                break
            victim = max(self.running, key=lambda s: (s.number, s.choice))
            if victim is sequence:
                self._preempt(victim, plan)
                return False
            self._preempt(victim, plan)
        for i in shared:
            target = new.pop()
            plan.copies.append((sequence.blocks[i], target))
            self.pool.release([sequence.blocks[i]])
            sequence.blocks[i] = target
        sequence.blocks += new
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Back to the front of the queue, without blocks."""
        self.preemptions += 1
        plan.preempted.append(victim.request.id)
        self.running.remove(victim)
        pending = {source for source, _ in plan.copies} | {t for _, t in plan.copies}
        if self.save is not None and victim.num_computed and not pending & set(victim.blocks) and not plan.restored:
            victim.saved = self.save(victim.blocks[: self._blocks_for(victim.num_computed)])
            self._release(victim, keep=True)
        else:
            self._release(victim, keep=not (pending & set(victim.blocks) or plan.restored))
            victim.num_computed = 0
        victim.draft, victim.last_turn = [], 0
        self.waiting[victim] = None
        self.waiting.move_to_end(victim, last=False)

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        if keep:
            self.publish(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_published = [], 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)
