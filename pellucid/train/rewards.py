"""What a completion is worth: functions of a prompt, what was said, and the record that the prompt came from.

This module and what it imports load without torch, since each worker process imports it.
"""

import importlib
from collections.abc import Callable
from typing import Any

from pellucid.data.reasoning_gym import judge, load_package
from pellucid.errors import ConfigError, DataError
from pellucid.registry import load_plugins, lookup, register

Reward = Callable[[str, str, dict[str, Any]], float]
"""(prompt, completion, record) -> its worth; any finite number."""


@register("reward", "exact_match")
def exact_match(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """1 where the completion, without space around it, is ``record["answer"]``; else 0.

    Raises:
        DataError: the record has no answer.
    """
    if "answer" not in record:
        raise DataError(
            f'reward exact_match: the record has no "answer", it has {", ".join(sorted(record)) or "nothing"}'
        )
    return float(completion.strip() == str(record["answer"]).strip())


@register("reward", "reasoning_gym")
class ReasoningGymReward:
    """What a task of reasoning-gym says of the completion, without space around it; 0 to 1 in most.

    Raises:
        ConfigError: when it is made: the package is not installed.
        DataError: the record is not of `pellucid prepare reasoning-gym:TASK`.
    """

    def __init__(self) -> None:
        load_package()  # takes seconds, which no completion has

    def __call__(self, prompt: str, completion: str, record: dict[str, Any]) -> float:
        return judge(completion.strip(), record)


def check_reward(name: str) -> None:
    """`ConfigError` for what is neither a registered name, naming the nearest, nor of the form ``module:function``."""
    module, colon, function = name.partition(":")
    if not colon:
        lookup("reward", name)
    elif not module or not function:
        raise ConfigError(f"strategy.rewards: {name!r} is neither a registered name nor module:function")


def find_reward(name: str) -> Reward:
    """A registered reward by its name, or a function by ``module:function``. A class is made here, once for all completions.

    Raises:
        ConfigError: there is none; names the nearest registered one.
    """
    module, colon, function = name.partition(":")
    if not colon:
        found: Reward = lookup("reward", name).target
        return found() if isinstance(found, type) else found
    load_plugins((module,))
    own = getattr(importlib.import_module(module), function, None)
    if not callable(own):
        raise ConfigError(f"strategy.rewards: module {module!r} has no function {function!r}")
    return own  # type: ignore[no-any-return]
