"""Threads of OpenMP: gone where they would slow others down, back where they are needed."""

import asyncio
import subprocess
import sys
import threading
from itertools import groupby

import pytest
from tiny_engine import engine, prompt, tiny

from pellucid.inference import async_engine
from pellucid.inference.async_engine import AsyncEngine
from pellucid.inference.request import Request, SamplingParams

COUNT = """
import os, time, torch
from pellucid.inference.threads import end_team

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = threads()
x = torch.ones(2**20).exp()
with_team = threads()
end_team()
for _ in range(200):  # one that has ended is listed for a moment more
    after = threads()
    if after == before:
        break
    time.sleep(0.01)
assert torch.equal(x.exp(), x.exp())
print(before, with_team, after, threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_team_ends_and_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=60, check=True)
    before, with_team, after, again = map(int, done.stdout.split())
    assert with_team == before + 2 and after == before and again == with_team


def test_the_thread_of_the_event_loop_gives_up_its_team_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(async_engine, "end_team", lambda: told.append(threading.current_thread()))
    one = engine(tiny())
    step = one.step
    monkeypatch.setattr(one, "step", lambda: told.append("step") or step())

    async def run() -> None:
        front = AsyncEngine(one)
        for name in "ab":
            request = Request(name, tuple(prompt(1, 5)), SamplingParams(max_tokens=2))
            assert len([event async for event in front.stream(request)]) == 2
            await asyncio.sleep(0.05)  # it rests
        await front.close()

    asyncio.run(run())
    assert [each for each, _ in groupby(told)] == [threading.main_thread(), "step"] * 2
