"""`Scheduler`: who gets how much of a step, who waits, and whose blocks are taken. Without a model: a loop of a few lines."""

import random
from itertools import pairwise

import pytest
from tiny_engine import prompt

from pellucid.errors import RequestError
from pellucid.inference.blocks import BlockPool
from pellucid.inference.request import Request, SamplingParams
from pellucid.inference.scheduler import READ_TOGETHER, QueueFullError, Scheduler
from pellucid.inference.sequence import Sequence


class Loop:
    """Computes what the scheduler plans, and draws the token 7 whenever one is due.

    A slot holds the text up to its token, as keys and values do; what a chunk sees must be its sequence's own.
    """

    def __init__(
        self, blocks=50, size=4, *, max_running=8, budget=16, max_waiting=1000, reuse=True, copy=False, draft=None
    ):
        self.pool = BlockPool(blocks, size, reuse=reuse)
        self.scheduler = Scheduler(
            self.pool, max_running=max_running, max_waiting=max_waiting, budget=budget,
            save=self._save if copy else None, draft=draft,
        )  # fmt: skip
        self.content = [[None] * size for _ in range(blocks + 1)]
        self.saved = 0
        self.plans, self.ended = [], []
        self.drawn = {}
        self._number = 0

    def add(self, name, tokens, new=3, *, n=1, **params):
        self._number += 1
        request = Request(name, tuple(tokens), SamplingParams(max_tokens=new, n=n, **params))
        samples = [Sequence(request, c, 0, new, self._number, list(tokens)) for c in range(n)]
        samples[0].forks = samples[1:]
        self.scheduler.add(samples[0])
        return samples[0]

    def step(self):
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self.pool.check()
        assert sum(c.count for c in plan.chunks) <= self.scheduler.budget
        assert len(self.scheduler.running) <= self.scheduler.max_running
        for saved, blocks in plan.restored:
            for block, content in zip(blocks, saved, strict=True):
                self.content[block] = list(content)
        for source, target in plan.copies:
            self.content[target] = list(self.content[source])
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.num_computed == chunk.start
            assert len(sequence.blocks) * self.pool.block_size >= chunk.start + chunk.count
            written = range(
                chunk.start // self.pool.block_size, -(-(chunk.start + chunk.count) // self.pool.block_size)
            )
            assert not any(self.pool.is_shared(sequence.blocks[i]) for i in written)
            self._compute(sequence, chunk.start, chunk.count)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed = min(chunk.start + chunk.count, len(sequence.tokens))
            self.scheduler.publish(sequence)
            if chunk.samples:
                for one in [sequence, *self.scheduler.fork(sequence)]:
                    self._draw(one)
            self.pool.check()
        return plan

    def _compute(self, sequence, start, count):
        size, text = self.pool.block_size, (sequence.tokens + sequence.draft)[: start + count]
        for p in range(start, start + count):
            self.content[sequence.blocks[p // size]][p % size] = tuple(text[: p + 1])
        for p in range(start):
            assert self.content[sequence.blocks[p // size]][p % size] == tuple(text[: p + 1])

    def _save(self, blocks):
        self.saved += 1
        return [list(self.content[block]) for block in blocks]

    def _draw(self, sequence):
        sequence.tokens.append(7)
        self.drawn.setdefault((sequence.request.id, sequence.choice), []).append(len(self.plans))
        if len(sequence.output) == sequence.max_new:
            self.scheduler.remove(sequence)
            self.ended.append((sequence.request.id, sequence.choice))

    def run(self, limit=10_000):
        while self.scheduler.running or self.scheduler.waiting:
            assert len(self.plans) < limit, "somebody starves"
            assert self.step().chunks
        assert self.pool.num_held == 0
        return self


def shape(plan):
    return [(c.sequence.request.id, c.start, c.count) for c in plan.chunks]


def test_prompts_are_read_in_chunks_of_the_budget_and_decoding_sequences_come_first():
    loop = Loop(budget=8)
    loop.add("a", prompt(1, 3))
    assert shape(loop.step()) == [("a", 0, 3)]
    loop.add("b", prompt(2, 20))
    assert shape(loop.step()) == [("a", 3, 1), ("b", 0, 7)]
    assert shape(loop.step()) == [("a", 4, 1), ("b", 7, 7)]
    assert shape(loop.step()) == [("b", 14, 6)]


def test_a_stream_gets_a_token_in_every_step_of_anothers_long_prefill():
    loop = Loop(blocks=200, budget=16)
    loop.add("stream", prompt(1, 4), new=40)
    loop.step()
    loop.add("long", prompt(2, 300), new=1)
    loop.run()
    steps = loop.drawn["stream", 0]
    assert [b - a for a, b in pairwise(steps)] == [1] * 39  # in steps
    assert max(sum(c.count for c in p.chunks) for p in loop.plans) <= 16  # and so in tokens
    assert loop.drawn["long", 0][0] <= steps[0] + -(-300 // 15)  # nor is the prefill put off


def test_a_short_prompt_is_not_kept_waiting_by_a_long_one():
    loop = Loop(blocks=400, budget=16)
    loop.add("long", prompt(1, 800), new=1)
    loop.step()
    loop.add("short", prompt(2, 24), new=1)
    loop.run()
    assert loop.drawn["short", 0][0] <= 1 + 3  # half of the budget each
    assert loop.drawn["long", 0][0] >= 50


def test_what_a_short_prompt_leaves_goes_to_the_others():
    loop = Loop(blocks=100, budget=16)
    for name, length in (("a", 2), ("b", 100)):
        loop.add(name, prompt(name, length), new=1)
    assert shape(loop.step()) == [("a", 0, 2), ("b", 0, 14)]


@pytest.mark.parametrize("seed", range(60))
def test_everybody_ends_with_random_arrivals_and_a_tiny_pool(seed):
    rng = random.Random(seed)
    blocks, size = rng.randint(6, 20), rng.randint(1, 4)
    room = blocks * size
    loop = Loop(
        blocks, size, max_running=rng.randint(3, 6), budget=rng.randint(6, 12), reuse=rng.random() < 0.7,
        copy=rng.random() < 0.5,
    )  # fmt: skip
    loop.scheduler.draft = rng.choice([None, lambda s: [7] * rng.randint(0, min(3, s.admitted - len(s.tokens) - 1))])
    names, left = [], 40
    while left or loop.scheduler.running or loop.scheduler.waiting:
        if left and rng.random() < 0.6:
            length = rng.randint(1, max(1, room // 2))
            new = rng.randint(1, max(1, min(room - length, 20)))
            n = rng.choice([1, 1, 2, 3])
            loop.add(str(left), [rng.randrange(2) for _ in range(length)], new, n=n)
            names += [(str(left), c) for c in range(n)]
            left -= 1
        loop.step()
        assert len(loop.plans) < 20_000, "somebody starves"
    assert sorted(loop.ended) == sorted(names)
    assert loop.pool.num_held == 0
    assert all(len(steps) == len(set(steps)) for steps in loop.drawn.values())


def test_prompts_are_read_a_few_at_a_time_and_each_in_its_turn():
    loop = Loop(blocks=100, size=4, budget=32, reuse=False)
    for name in "abcdefgh":
        loop.add(name, prompt(name, 40), new=1)
    steps = [{chunk.sequence.request.id for chunk in loop.step().chunks} for _ in range(4)]
    assert [len(names) for names in steps] == [READ_TOGETHER] * 4
    assert steps[0] == set("abcd") and steps[1] == set("efgh")  # nobody twice before everybody once
    assert steps[2:] == steps[:2]
    loop.run()
    assert len(loop.ended) == 8


def test_the_youngest_gives_its_blocks_and_the_oldest_never_does():
    loop = Loop(blocks=6, size=4, reuse=False)
    for name in "abc":
        loop.add(name, prompt(name, 4), new=16)
    loop.run()
    gone = [name for plan in loop.plans for name in plan.preempted]
    assert gone and "a" not in gone
    assert loop.ended == [("a", 0), ("b", 0), ("c", 0)]


def test_a_sequence_sent_away_comes_back_before_those_that_came_later():
    loop = Loop(blocks=6, size=4, max_running=2, reuse=False)
    for name in "abc":
        loop.add(name, prompt(name, 4), new=16)
    loop.run()
    starts = [name for plan in loop.plans for name, start, _ in shape(plan) if start == 0]
    assert starts[:4] == ["a", "b", "b", "c"]


def test_a_sequence_sent_away_is_copied_out_and_goes_on_where_it_was():
    loop = Loop(blocks=6, size=4, reuse=False, copy=True)
    loop.add("a", prompt(1, 4), new=16)
    loop.add("b", prompt(2, 4), new=16)
    loop.run()
    assert sum(len(p.restored) for p in loop.plans) == loop.saved > 0
    assert all(start > 0 for plan in loop.plans[1:] for _, start, _ in shape(plan))  # nothing is read again


def test_samples_share_the_prompts_blocks_and_copy_only_the_one_they_write_into():
    loop = Loop(size=4)
    loop.add("a", prompt(1, 10), new=2, n=4)
    loop.step()
    assert loop.pool.num_held == 3  # 4 + 4 + 2 tokens, of all four
    plan = loop.step()
    assert len(plan.copies) == 3 and {source for source, _ in plan.copies} == {plan.copies[0][0]}
    assert loop.ended == [("a", c) for c in range(4)]
    full = Loop(size=5)
    full.add("a", prompt(1, 10), new=3, n=4)
    full.step()
    assert full.step().copies == [] and full.pool.num_held == 2 + 4


def test_places_of_samples_that_have_not_started_are_kept():
    loop = Loop(max_running=4, budget=4, blocks=100)
    loop.add("a", prompt(1, 12), n=3)
    for name in "bcde":
        loop.add(name, prompt(name, 2))
    loop.run()  # which looks at the limit after each step
    assert len(loop.ended) == 7


def test_a_guess_never_sends_another_sequence_away():
    def preemptions(draft):
        loop = Loop(blocks=6, size=2, reuse=False, budget=16, draft=draft)
        loop.add("a", prompt(1, 3), new=5)
        for _ in range(3):
            loop.step()
        loop.add("b", prompt(2, 1), new=6)
        loop.run()
        return loop.scheduler.preemptions

    assert preemptions(None) == 0
    assert preemptions(lambda s: [9] * max(0, s.admitted - len(s.tokens) - 1)) == 0


def test_a_guess_takes_no_more_than_the_budget_leaves():
    loop = Loop(budget=8, blocks=100, draft=lambda s: [9] * 20)
    for name in "ab":
        loop.add(name, prompt(name, 2), new=30)
    loop.step()
    loop.add("c", prompt(3, 40), new=1)
    plan = loop.step()
    assert sum(c.count for c in plan.chunks) <= 8 and any(c.count > 1 and c.sequence.draft for c in plan.chunks)
    assert "c" in {c.sequence.request.id for c in plan.chunks}


def test_a_prefix_that_is_being_read_is_waited_for_and_then_reused():
    loop = Loop(budget=8, blocks=100)
    shared = prompt(1, 16)
    loop.add("a", shared + [1], new=1)
    loop.add("b", shared + [2], new=1)
    loop.add("other", prompt(9, 3), new=1)
    first = loop.step()
    assert {name for name, _, _ in shape(first)} == {"a", "other"}  # and nobody else is kept waiting
    loop.run()
    assert sum(p.reused.get("b", 0) for p in loop.plans) == 16
    assert sum(c.count for p in loop.plans for c in p.chunks) == 17 + 1 + 3


def test_nobody_reads_the_prefix_of_another_salt():
    loop = Loop()
    loop.add("a", prompt(1, 9)).salt = "x"
    loop.add("b", prompt(1, 9))
    assert [name for name, _, _ in shape(loop.step())] == ["a", "b"]


def test_limits_are_checked_at_the_door():
    loop = Loop(blocks=5, size=4, max_running=3, budget=3, max_waiting=2)
    loop.scheduler.check(20, 3)
    with pytest.raises(RequestError, match="prompt and answer may take 21 tokens and the cache holds 20"):
        loop.scheduler.check(21, 1)
    with pytest.raises(RequestError, match="n is 4 and 3 sequences may run together"):
        loop.scheduler.check(1, 4)
    loop.add("a", [1])
    loop.add("b", [1])
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        loop.add("c", [1])
    loop.run()
    loop.add("c", [1])


def test_a_prompt_that_fills_the_cache_runs_alone():
    loop = Loop(blocks=5, size=4, budget=64)
    loop.add("small", prompt(2, 3), new=2)
    loop.add("whole", prompt(1, 20), new=0)
    assert [name for name, _, _ in shape(loop.step())] == ["small"]
    loop.step()
    assert shape(loop.step()) == [("whole", 0, 20)]


def test_a_step_looks_at_few_of_very_many_that_wait(monkeypatch):
    loop = Loop(budget=8, max_running=4, max_waiting=10**6, blocks=1000)
    shared = prompt(1, 100)
    for i in range(5000):
        loop.add(str(i), [*shared, i % 97, i // 97], new=1)
    looked = []
    reusable = loop.scheduler._reusable
    monkeypatch.setattr(loop.scheduler, "_reusable", lambda s: looked.append(s) or reusable(s))
    loop.step()
    assert len(looked) <= 8
    for sequence in reversed(list(loop.scheduler.waiting)):
        loop.scheduler.remove(sequence)
    assert not loop.scheduler.waiting


def test_the_tree_is_only_walked_where_a_block_has_become_full(monkeypatch):
    loop, walks = Loop(size=4, blocks=50), []
    insert = loop.pool.insert
    monkeypatch.setattr(loop.pool, "insert", lambda *args: walks.append(args) or insert(*args))
    loop.add("a", prompt(1, 4), new=80)
    loop.run()
    assert len(walks) == 20 and loop.pool.num_cached == 20
