"""`AsyncEngine`: many streams at once, each with its own events; whoever leaves frees what was held."""

import asyncio
import gc
import threading

import pytest
from tiny_engine import engine, prompt, random_requests, tiny

from pellucid.errors import RequestError
from pellucid.inference.async_engine import AsyncEngine
from pellucid.inference.engine import EngineError
from pellucid.inference.request import Request, SamplingParams

LIMIT = 30


@pytest.fixture(scope="module")
def model():
    return tiny()


def request(name="a", seed=1, length=10, new=8, **params):
    return Request(name, tuple(prompt(seed, length)), SamplingParams(max_tokens=new, seed=seed, **params))


def within(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT))


async def collect(front, wanted):
    return [event async for event in front.stream(wanted)]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def idle(one):
    one.pool.check()
    return not one.has_work and one.stats().held == 0


def test_concurrent_streams_give_what_the_engine_gives(model):
    requests = random_requests(5, 30)
    expected = engine(model).generate([t for t, _ in requests], [p for _, p in requests])
    one = engine(model, blocks=24, token_budget=16, max_running=8)

    async def run():
        front = AsyncEngine(one)
        streams = [collect(front, Request(str(i), tuple(t), p)) for i, (t, p) in enumerate(requests)]
        found = await asyncio.gather(*streams)
        assert (await front.stats()).decoded == sum(len(r.ids) for r in expected)
        await front.close()
        return found

    results = iter(expected)
    for events, (_, params) in zip(within(run()), requests, strict=True):
        for sample in range(params.n):
            mine, result = [e for e in events if e.sample == sample], next(results)
            drawn = [e for e in mine if e.token is not None]
            assert [e.token for e in drawn] == result.ids and [e.logprob for e in drawn] == result.logprobs
            assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + [result.finish_reason]
    assert idle(one) and one.stats().preemptions > 0


def test_leaving_the_iterator_frees_the_blocks_and_the_others_go_on(model):
    one = engine(model)

    async def run():
        front = AsyncEngine(one)
        other = asyncio.create_task(collect(front, request("b", new=60)))
        async for _ in front.stream(request("a", new=200, n=3)):
            break
        gc.collect()
        await until(lambda: "a" not in one._open)
        events = await other
        await front.close()
        return events

    assert len(within(run())) == 60 and idle(one)


def test_a_task_that_is_cancelled_takes_its_request_with_it_whenever_that_happens(model):
    one = engine(model)

    async def run():
        front = AsyncEngine(one)
        for turns in range(12):  # before the request is taken, just as it is, and later
            task = asyncio.create_task(collect(front, request(str(turns), new=200)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await front.stats()
            assert not one.has_work and not front._queues
        await front.close()

    within(run())
    assert idle(one)


def test_cancelling_ends_the_stream_in_the_middle(model):
    one = engine(model)

    async def run():
        front = AsyncEngine(one)
        task = asyncio.create_task(collect(front, request("a", new=200)))
        await until(lambda: one.stats().decoded > 3)
        assert await front.cancel("a") and not await front.cancel("a") and not await front.cancel("nobody")
        events = await task  # which ends, and is not itself cancelled
        again = await collect(front, request("a", new=5))
        await front.close()
        return events, again

    events, again = within(run())
    assert 0 < len(events) < 200 and {e.finish_reason for e in events} == {None}
    assert len(again) == 5 and idle(one)


def test_a_slow_reader_is_not_disturbed_by_a_later_request_of_its_name(model):
    async def run():
        front = AsyncEngine(engine(model))
        slow = front.stream(request("a", seed=1, new=6))
        first = [await anext(slow)]
        await until(lambda: not front.engine.has_work)  # all drawn, most not read
        later = front.stream(request("a", seed=2, new=30))
        second = [await anext(later)]
        first += [event async for event in slow]
        second += [event async for event in later]
        await front.close()
        return len(first), len(second)

    assert within(run()) == (6, 30)


def test_a_request_that_is_refused_raises_in_its_own_stream(model):
    async def run():
        front = AsyncEngine(engine(model))
        good = asyncio.create_task(collect(front, request("a", new=30)))
        await until(lambda: front.engine.has_work)
        for bad in (Request("b", (), SamplingParams()), request("a")):
            with pytest.raises(RequestError):
                await collect(front, bad)
        events = await good
        await front.close()
        return events

    assert len(within(run())) == 30


def test_what_a_step_raises_reaches_every_stream_and_the_next_request_runs(model):
    one = engine(model)
    step = one.step

    async def run():
        front = AsyncEngine(one)
        tasks = [asyncio.create_task(collect(front, request(name, new=200))) for name in "abc"]
        await until(lambda: one.stats().decoded > 6)
        one.step = broken
        late = asyncio.create_task(collect(front, request("late", new=200)))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        one.step = step
        assert isinstance(await asyncio.gather(late, return_exceptions=True), list)
        events = await collect(front, request("d"))
        await front.close()
        return found, events

    def broken():
        raise ZeroDivisionError("of the engine's own")

    found, events = within(run())
    assert [type(error) for error in found] == [ZeroDivisionError] * 3
    assert len(events) == 8 and idle(one)


def test_an_engine_that_gives_up_ends_every_stream_with_an_error(model):
    one = engine(model, max_running=2)

    def broken(*_, **__):
        raise RuntimeError("broken")

    one.runner.forward_hidden = broken

    async def run():
        front = AsyncEngine(one)
        found = await asyncio.gather(*(collect(front, request(str(i))) for i in range(10)), return_exceptions=True)
        await front.close()
        return found

    for outcome in within(run()):
        assert isinstance(outcome, EngineError) or [e.finish_reason for e in outcome] == ["error"]
    assert idle(one)


def test_closing_ends_the_streams_and_the_thread_and_refuses_what_comes_later(model):
    one = engine(model)

    async def run():
        front = AsyncEngine(one)
        tasks = [asyncio.create_task(collect(front, request(name, new=200))) for name in "ab"]
        await until(lambda: one.stats().decoded > 3)
        await front.close()
        await front.close()
        ended = await asyncio.gather(*tasks)
        with pytest.raises(EngineError, match="closed"):
            await collect(front, request("c"))
        return ended

    assert all(0 < len(events) < 200 for events in within(run()))
    assert idle(one) and not [t for t in threading.enumerate() if t.name.startswith("pellucid-engine")]


def test_closing_before_a_request_was_taken_ends_it_too(model):
    async def run():
        front = AsyncEngine(engine(model))
        first = asyncio.create_task(collect(front, request("a", new=200)))
        await until(lambda: front.engine.stats().decoded > 1)
        task = asyncio.create_task(collect(front, request("b")))
        await asyncio.sleep(0)
        await front.close()
        return await asyncio.gather(first, task, return_exceptions=True)

    _, second = within(run())
    assert isinstance(second, EngineError) or second == []


def test_another_event_loop_may_follow_even_where_the_first_was_left_in_a_step(model):
    one = engine(model)
    front, left = AsyncEngine(one), []

    async def abandoned():
        left.append(asyncio.create_task(collect(front, request("a", new=200))))
        await until(lambda: one.stats().decoded > 1)

    for _ in range(3):
        within(abandoned())
        assert len(within(collect(front, request("b")))) == 8
    within(front.close())
    assert idle(one)


def test_a_second_loop_at_the_same_time_is_refused(model):
    front = AsyncEngine(engine(model))
    outcome = []

    def elsewhere():
        try:
            outcome.append(asyncio.run(collect(front, request("b"))))
        except RuntimeError as error:
            outcome.append(str(error))

    async def run():
        task = asyncio.create_task(collect(front, request("a", new=200)))
        await until(lambda: front.engine.has_work)
        await asyncio.to_thread(elsewhere)
        assert len(await task) == 200
        await front.close()

    within(run())
    assert outcome == ["this AsyncEngine belongs to another event loop, which still runs"]


def test_the_event_loop_stays_free_while_steps_run(model):
    async def run():
        front = AsyncEngine(engine(model))
        task, turns = asyncio.create_task(collect(front, request("a", new=100))), 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        await front.close()
        return turns

    assert within(run()) > 500  # far more than steps


# -- many requests of one reader ----------------------------------------------------------------------------


def test_a_reader_wakes_once_a_step_with_all_that_its_requests_got(model):
    one, records = engine(model), []
    one.on_step = records.append

    async def run():
        front, found = AsyncEngine(one), []
        async with front.running([request("a", seed=1, n=3), request("b", seed=2, length=12)]) as batches:
            async for events in batches:
                found.append(events)
        await front.close()
        return found

    found = within(run())
    expected = one.generate([prompt(1, 10), prompt(2, 12)], [request(seed=1, n=3).params, request(seed=2).params])
    assert len(found) == 8 == len([r for r in records[:8] if r.chunks]) and all(len(batch) == 4 for batch in found)
    for name, sample, result in zip("aaab", (0, 1, 2, 0), expected, strict=True):
        assert [e.token for batch in found for e in batch if (e.request_id, e.sample) == (name, sample)] == result.ids
    assert idle(one)


def test_requests_that_belong_together_are_taken_together_or_not_at_all(model):
    one = engine(model)

    async def run():
        front = AsyncEngine(one)
        other = asyncio.create_task(collect(front, request("c", new=50)))
        await until(lambda: one.has_work)
        for bad in (request("c"), Request("b", (), SamplingParams())):
            with pytest.raises(RequestError):
                async with front.running([request("a", new=200), bad]):
                    raise AssertionError("it must not get here")
            assert "a" not in one._open and set(front._queues) == {"c"}
        events = await other
        await front.close()
        return events

    assert len(within(run())) == 50 and idle(one)


def test_leaving_frees_all_requests_of_a_reader(model):
    one = engine(model)

    async def run():
        front = AsyncEngine(one)
        async with front.running([request(name, new=200) for name in "abc"]) as batches:
            await anext(batches)
            assert set(one._open) == set("abc")
        await front.stats()
        assert not one.has_work and not front._queues
        await front.close()

    within(run())
    assert idle(one)


def test_one_sample_can_be_cancelled_and_the_others_are_as_without(model):
    one = engine(model)

    async def run():
        front, found = AsyncEngine(one), []
        async with front.running([request("a", new=30, n=3)]) as batches:
            async for events in batches:
                found += events
                if len(found) == 6:
                    front.cancel_soon("a", 1)
        assert not await front.cancel("a", 1) and not await front.cancel("a")
        await front.close()
        return found

    found = within(run())
    expected = one.generate([prompt(1, 10)], request(new=30, n=3).params)
    tokens = [[e.token for e in found if e.sample == i] for i in range(3)]
    assert tokens[0] == expected[0].ids and tokens[2] == expected[2].ids
    assert 2 <= len(tokens[1]) <= 4 and tokens[1] == expected[1].ids[: len(tokens[1])]
    assert idle(one)


def test_a_sample_that_still_reads_the_common_prompt_cannot_leave_it(model):
    one = engine(model, token_budget=8, max_running=4)
    one.submit(request("a", length=40, new=5, n=3))
    one.step()
    assert not any(one.cancel("a", sample) for sample in (0, 1, 2, 7))
    while one.has_work:
        one.step()
    assert one.stats().decoded == 15


def test_an_engine_with_a_problem_says_so(model):
    one = engine(model)
    one.step = broken_step

    async def run():
        front = AsyncEngine(one)
        assert front.problem is None
        for name in "abc":
            with pytest.raises(ZeroDivisionError):
                await collect(front, request(name))
        assert "given up" in front.problem
        with pytest.raises(EngineError):
            await collect(front, request("d"))
        await front.close()
        assert "closed" in front.problem

    within(run())


def broken_step():
    raise ZeroDivisionError("of the engine's own")
