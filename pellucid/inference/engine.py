"""Continuous batching: requests come and go at any time, and every step runs what there is in one forward.

Ids in, ids out; synchronous, without threads. `Engine.step` is the whole of it:

    schedule    which tokens of which sequences, and the blocks for them
    forward     the model over all of them, packed
    sample      the next token of each sequence whose known tokens are all computed
    commit      tokens, finish reasons, events, blocks of what ended
"""

import itertools
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from pellucid.errors import PellucidError, RequestError
from pellucid.inference.blocks import BlockPool
from pellucid.inference.drawing import Drawing, advance, event_of, first_wanted, judge_prompt, row_of, start_constraint
from pellucid.inference.options import can_be_exact, check_options, num_blocks
from pellucid.inference.records import EngineStats, StepRecord
from pellucid.inference.request import (
    Alternatives,
    FinishReason,
    Request,
    Result,
    Row,
    SamplingParams,
    TokenEvent,
    check_request,
)
from pellucid.inference.runner import Logits, ModelRunner
from pellucid.inference.sample import NOT_FINITE, sample
from pellucid.inference.scheduler import Scheduler
from pellucid.inference.sequence import Chunk, Sequence, StepPlan
from pellucid.inference.speculate import PromptLookup
from pellucid.model import Transformer

logger = logging.getLogger("pellucid")

MAX_KEPT = 64
"""Finished results that may wait for one before them, times the requests that are taken ahead."""
MAX_FAILURES = 3
"""Requests, one after the other, whose forwards may raise, and none's not, before the engine gives up."""


class EngineError(PellucidError):
    """The model raises whatever it is given; every request has been ended, and no new one is taken."""


class Engine:
    """Continues prompts on one model.

    Args:
        kv_gb: for keys and values, 10^9 bytes.
        page_size: tokens a block of the cache.
        max_running: sequences that run together.
        exact: the same request gives the same ids and log-probabilities to the bit, alone or in any batch, cached, chunked
            or pre-empted, and those of the trainer's forward with ``model.attend = "canonical"``. On CPU; a probe checks
            the machine, and where it does not hold the engine says so and goes on without.
        token_budget: tokens a step, at least ``max_running``; the longest that a stream waits is a step.
        max_waiting: requests that may wait; more are refused.
        prefix_cache: keep what was computed for requests that begin alike.
        preempt: what is done with a sequence whose blocks are needed: "copy" its keys and values aside, or "recompute" them.
        kv_dtype: of keys and values; None: of the model's weights.
        speculate: tokens to guess from the sequence's own text, where the same few tokens stood before; 0: none. Changes
            speed, never a result.
        on_step: called with a `StepRecord` after each step.

    Raises:
        ConfigError: a value out of range, or no room for a single block.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        kv_gb: float = 1.0,
        page_size: int = 64,
        max_running: int = 64,
        exact: bool = True,
        token_budget: int = 512,
        max_waiting: int = 100_000,
        prefix_cache: bool = True,
        preempt: str = "copy",
        kv_dtype: torch.dtype | None = None,
        speculate: int = 0,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        weight = model.model.embed_tokens.weight
        dtype = kv_dtype or weight.dtype
        self.model, self.on_step = model, on_step
        check_options(page_size, max_running, token_budget, max_waiting, preempt, speculate)
        self.exact = exact and can_be_exact(model, dtype, page_size)
        blocks = num_blocks(model, kv_gb, page_size, dtype)
        self.pool = BlockPool(blocks, page_size, reuse=prefix_cache)
        self.runner = ModelRunner(model, blocks, page_size, dtype=dtype, exact=self.exact)
        self.scheduler = Scheduler(
            self.pool,
            max_running=max_running,
            max_waiting=max_waiting,
            budget=max(token_budget, max_running),
            save=self.runner.cache.save if preempt == "copy" else None,
            draft=PromptLookup(speculate) if speculate else None,
        )
        self.broken: BaseException | None = None
        """What every forward raised; the engine takes no request any more."""
        self._open: dict[str, dict[int, Sequence]] = {}
        """The choices of each request that have not ended."""
        self._kept: dict[str, dict[int, Result]] = {}
        """By request and choice, of those that `generate` waits for."""
        self._numbers = itertools.count()
        self._steps = self._forwards = self._prefilled = self._reused = 0
        self._decoded = self._drafted = self._accepted = self._failures = 0
        self._works = True
        """Whether a forward of the current step has not raised."""
        self._raised: Exception | None = None

    # -- requests -------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> str:
        """Take a request; its events come from `step` under its id.

        Raises:
            RequestError: the model, or the cache, cannot do it, or its id is in use.
            QueueFullError: as many wait as may.
            EngineError: the engine has given up.
        """
        if self.broken is not None:
            raise EngineError(f"the engine has given up, since every forward raised: {self.broken}") from self.broken
        if request.id in self._open:
            raise RequestError(f"a request with id {request.id!r} is running; give another id")
        max_new, params, number = self.check(request), request.params, next(self._numbers)
        seed, salt = secrets.randbits(64) if params.seed is None else params.seed, self._salt(request, max_new)
        samples = [
            Sequence(
                request, choice, seed, max_new, number, list(request.tokens), salt, constraint=start_constraint(params)
            )
            for choice in range(params.n)
        ]
        samples[0].forks = samples[1:]
        self.scheduler.add(samples[0])
        self._open[request.id] = dict(enumerate(samples))
        return request.id

    def check(self, request: Request) -> int:
        """The new tokens that a request can get; errors as in `submit`, but for a full queue."""
        max_new = check_request(request, self.model.config)
        self.scheduler.check(len(request.tokens) + max_new, request.params.n)
        return max_new

    def _salt(self, request: Request, max_new: int) -> str:
        """Of what must not be shared: with dynamic rotary scaling keys also depend on how long a sequence may become."""
        if not self.model.model.rotary.dynamic:
            return request.salt
        return f"{max(len(request.tokens) + max_new, self.model.config.max_position_embeddings)} {request.salt}"

    def cancel(self, request_id: str, sample: int | None = None) -> bool:
        """End a request, or one of its samples, now, without further events; False where it is unknown or has ended.

        A sample ends alone once it has drawn a token; before that all of its request read one prompt.
        """
        open_ = self._open.get(request_id, {})
        doomed = list(open_.values()) if sample is None else [open_[sample]] if sample in open_ else []
        if sample is not None and any(s.forks or len(s.tokens) == s.num_prompt for s in doomed):
            return False
        for sequence in doomed:
            del open_[sequence.choice]
            self.scheduler.remove(sequence)
        if not open_:
            self._open.pop(request_id, None)
        return bool(doomed)

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._open)

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams],
        *,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Result]:
        """Continue each prompt; ``n`` results for each, in order.

        Args:
            params: for all prompts, or one for each.
            on_event: called with each token as it is drawn; ``request_id`` is "0", "1", ... by prompt.

        Raises:
            RequestError: a prompt cannot be continued; names it. Nothing has run then.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        prefix = f"generate-{next(self._numbers)}-"
        pairs = zip(prompts, each, strict=True)
        requests = [Request(f"{prefix}{i}", tuple(tokens), p) for i, (tokens, p) in enumerate(pairs)]
        for request in requests:
            self.check(request)

        def renamed(event: TokenEvent) -> None:
            if event.request_id.startswith(prefix) and on_event is not None:
                on_event(replace(event, request_id=event.request_id.removeprefix(prefix)))

        return [result for results in self.results(requests, on_event=renamed) for result in results]

    def results(
        self, requests: Iterable[Request], *, on_event: Callable[[TokenEvent], None] | None = None
    ) -> Iterator[list[Result]]:
        """Run requests, and give the ``n`` results of each, in their order; twice as many as run together are taken ahead.

        Closing the iterator cancels what is left. Errors as in `submit`, when it is a request's turn.
        """
        source, ahead = iter(requests), 2 * self.scheduler.max_running
        names: deque[str] = deque()
        try:
            while True:
                # those that have ended behind a long one take no place, as long as they are not too many to keep
                room = min(ahead - sum(name in self._open for name in names), MAX_KEPT * ahead - len(names))
                for request in itertools.islice(source, max(0, room)):
                    self._kept[self.submit(request)] = {}
                    names.append(request.id)
                if not names:
                    return
                while names and names[0] not in self._open:
                    kept = self._kept.pop(names.popleft())
                    yield [kept[choice] for choice in sorted(kept)]
                for event in self.step() if names else ():
                    if on_event is not None:
                        on_event(event)
        finally:
            for name in names:
                self.cancel(name)
                self._kept.pop(name, None)

    def stream(self, request: Request) -> Iterator[TokenEvent]:
        """The tokens of one request as they are drawn; errors as in `submit`. Closing the iterator cancels it.

        Other requests of the engine go on meanwhile; their events are lost, so let one loop call `step` where there are any.
        """
        self.submit(request)
        try:
            while request.id in self._open:
                yield from [event for event in self.step() if event.request_id == request.id]
        finally:
            self.cancel(request.id)

    def stats(self) -> EngineStats:
        """Now."""
        pool, scheduler = self.pool, self.scheduler
        return EngineStats(
            running=len(scheduler.running), waiting=len(scheduler.waiting), blocks=pool.num_blocks, free=pool.num_free,
            cached=pool.num_cached, held=pool.num_held, steps=self._steps, forwards=self._forwards, prefilled=self._prefilled,
            reused=self._reused, decoded=self._decoded, drafted=self._drafted, accepted=self._accepted,
            evictions=pool.evictions, preemptions=scheduler.preemptions,
        )  # fmt: skip

    # -- the step -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """One forward for all; the tokens that it gave. Nothing where there is nothing to do."""
        began, evictions = time.perf_counter(), self.pool.evictions
        plan = self.scheduler.schedule()
        assert plan.chunks or not self.has_work, "somebody waits, and nobody runs"
        for saved, blocks in plan.restored:
            self.runner.cache.restore(saved, blocks)
        for source, target in plan.copies:
            self.runner.cache.copy(source, target)
        self._reused += sum(plan.reused.values())
        events: list[TokenEvent] = []
        if plan.chunks:
            self._steps, self._works = self._steps + 1, False
            events = self._run(plan.chunks)
            if self._works:
                self._failures = 0
            elif self._failures >= MAX_FAILURES:
                events += self._give_up()
            self._tell(plan, events, evictions, time.perf_counter() - began)
        return events

    def _run(self, chunks: list[Chunk]) -> list[TokenEvent]:
        """Forward, sample and commit; where the forward raises, each chunk on its own, so that one cannot harm the others."""
        try:
            self._forwards += 1
            logits = self.runner.forward(self.runner.batch(chunks), [first_wanted(c) for c in chunks])
        except Exception as error:
            if len(chunks) == 1:
                return self._fail(chunks[0].sequence, error)
            alone = ([chunk] for chunk in chunks)
            return [e for one in alone if one[0].sequence.finish_reason is None for e in self._run(one)]
        self._works = True
        return self._commit(chunks, logits)

    def _commit(self, chunks: list[Chunk], logits: Logits) -> list[TokenEvent]:
        """What was computed counts; the tokens that follow are drawn, and drafts that they agree with need no forward."""
        events: list[TokenEvent] = []
        drawing: list[Drawing] = []
        for chunk, rows, finite in zip(chunks, logits.rows, logits.finite, strict=True):
            sequence = chunk.sequence
            if not finite:  # before anybody can find its blocks
                events += [self._finish(s, "error", error=NOT_FINITE) for s in [sequence, *sequence.forks]]
                continue
            computed = min(chunk.start + chunk.count, len(sequence.tokens))
            self._prefilled += max(0, min(computed, sequence.num_prompt) - chunk.start)
            self._drafted += len(sequence.draft)
            sequence.num_computed = computed
            self.scheduler.publish(sequence)
            if sequence.lacks_prompt_logprobs:
                judge_prompt(chunk, logits.values[rows.start : rows.stop])
            if chunk.samples:
                rows = rows[len(rows) - 1 - len(sequence.draft) :]
                drawing += [Drawing(s, rows) for s in [sequence, *self.scheduler.fork(sequence)]]
        return events + self._draw(logits.values, drawing)

    def _draw(self, logits: Tensor, drawing: SequenceOf[Drawing]) -> list[TokenEvent]:
        """Position by position of the drafts, for all sequences at once."""
        # a request for no token ends when its prompt has been read
        events = [self._finish(d.sequence, "length") for d in drawing if d.sequence.max_new == 0]
        drawing = [d for d in drawing if d.sequence.max_new > 0]
        position = 0
        while drawing:
            index = [d.rows[position] for d in drawing]
            rows = logits if index == list(range(len(logits))) else logits[torch.tensor(index, device=logits.device)]
            told = _sampled(rows, [row_of(d.sequence) for d in drawing])
            new = [self._accept(d.sequence, *one) for d, one in zip(drawing, told, strict=True)]
            events += new
            drawing = [d for d, event in zip(drawing, new, strict=True) if self._goes_on(d.sequence, event, position)]
            position += 1
        return events

    def _goes_on(self, sequence: Sequence, event: TokenEvent, position: int) -> bool:
        """Whether the draft foresaw the token, so that the logits after it are there too."""
        if event.finish_reason is not None or sequence.draft[position : position + 1] != [event.token]:
            return False
        self._accepted += 1
        sequence.num_computed += 1
        return True

    def _accept(
        self, sequence: Sequence, token: int, logprob: float, top: Alternatives, error: str | None
    ) -> TokenEvent:
        ended = token in sequence.request.params.stop_ids
        if error is None and sequence.constraint is not None and not ended:
            ended, error = advance(sequence.constraint, token)
        if error is not None:
            return self._finish(sequence, "error", error=error)
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.top_logprobs.append(top)
        self._decoded += 1
        if ended:
            return self._finish(sequence, "stop", token)
        if len(sequence.tokens) == sequence.admitted:
            return self._finish(sequence, "length", token)
        return event_of(sequence, token)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, token: int | None = None, error: str | None = None
    ) -> TokenEvent:
        sequence.finish_reason = reason
        if reason == "error":
            self.runner.cache.clear([b for b in sequence.blocks if not self.pool.is_shared(b)])
        self.scheduler.remove(sequence, keep=reason != "error")
        name, params = sequence.request.id, sequence.request.params
        left = self._open.get(name, {})
        left.pop(sequence.choice, None)
        if not left:
            self._open.pop(name, None)
        if name in self._kept:
            tops = sequence.top_logprobs if params.top_logprobs else None
            self._kept[name][sequence.choice] = Result(
                sequence.output, sequence.logprobs, reason, tops, sequence.prompt_logprobs, error
            )
        return event_of(sequence, token, reason, error)

    def _fail(self, sequence: Sequence, error: Exception) -> list[TokenEvent]:
        """A forward for this sequence alone has raised: its request ends."""
        logger.error("request %s: the forward raised %s: %s", sequence.request.id, type(error).__name__, error)
        self._failures, self._raised = self._failures + 1, error
        doomed = list(self._open[sequence.request.id].values())
        return [self._finish(s, "error", error=f"the forward raised {type(error).__name__}: {error}") for s in doomed]

    def _give_up(self) -> list[TokenEvent]:
        """Requests one after the other have failed, and none has gone on meanwhile: all that run and wait end too."""
        logger.error("the forwards of %s requests in a row have raised; the engine gives up", self._failures)
        self.broken = self._raised
        message = f"the engine gives up, since every forward raises {type(self.broken).__name__}: {self.broken}"
        doomed = [s for samples in self._open.values() for s in samples.values()]
        return [self._finish(s, "error", error=message) for s in doomed]

    def _tell(self, plan: StepPlan, events: list[TokenEvent], evictions: int, seconds: float) -> None:
        if self.on_step is None:
            return
        pool = self.pool
        ended = [(e.request_id, e.sample, e.finish_reason) for e in events if e.finish_reason is not None]
        self.on_step(
            StepRecord(
                self._steps,
                tuple((c.sequence.request.id, c.sequence.choice, c.start, c.count) for c in plan.chunks),
                plan.reused, len(plan.copies), pool.evictions - evictions, tuple(plan.preempted), tuple(ended),
                pool.num_free, pool.num_cached, pool.num_held, len(self.scheduler.waiting), seconds,
            )
        )  # fmt: skip


_Told = tuple[int, float, Alternatives, str | None]
"""Of one row: token, logprob, alternatives, and why there is none."""


def _sampled(logits: Tensor, rows: SequenceOf[Row]) -> list[_Told]:
    """What is drawn of each row; where that raises, of each on its own, so that one cannot harm the others."""
    try:
        drawn = sample(logits, rows)
    except Exception as error:
        if len(rows) > 1:
            return [told for i, row in enumerate(rows) for told in _sampled(logits[i : i + 1], [row])]
        logger.exception("a token could not be drawn")
        return [(0, math.nan, (), f"the sampling raised {type(error).__name__}: {error}")]
    return list(zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.top, drawn.errors, strict=True))
