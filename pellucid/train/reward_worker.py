"""A process that judges completions: JSON lines in, JSON lines out, and gone when its parent is.

It is handed its rewards in the first line, then one completion a line. A reward that overstays ends the whole process: nothing
else stops a function that hangs.
"""

import ctypes
import json
import math
import os
import signal
import sys
from typing import Any

from pellucid.registry import load_plugins
from pellucid.train.rewards import Reward, find_reward

MAX_MESSAGE = 2000
"""Characters of an error."""


def main() -> None:
    """Serve until the input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a reward prints is no reply

    def reply(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    for number in (signal.SIGINT, signal.SIGTERM):  # the whole group may get them; the parent finishes its step first
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    first = sys.stdin.readline()
    if not first:  # another worker could not start, and this one is not needed
        return
    given = json.loads(first)
    sys.path[:] = given["path"]
    try:
        load_plugins(tuple(given["plugins"]))
        rewards = [find_reward(name) for name in given["rewards"]]
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"[:MAX_MESSAGE]})
        return
    reply({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, given["timeout_s"])  # SIGALRM ends the process
        answer = _judge(rewards[asked["reward"]], asked)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(answer)


def _die_with_parent() -> None:
    """End when the process that asks does, even if it is killed while a reward runs; elsewhere than on Linux the alarm has to do."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _judge(reward: Reward, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        value = float(reward(asked["prompt"], asked["completion"], asked["record"]))
    except (SystemExit, Exception) as error:
        return {"error": f"raised {type(error).__name__}: {error}"[:MAX_MESSAGE]}
    if not math.isfinite(value):
        return {"error": f"returned {value}"}
    return {"value": value}


if __name__ == "__main__":
    main()
