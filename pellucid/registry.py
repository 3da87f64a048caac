"""The extension points, by name.

Each kind has a home module that registers Pellucid's own entries; it is imported when the kind is first
looked up, so that nothing optional loads before it is used. An entry comes with a frozen config dataclass:
an option that it does not declare is an error, never dropped.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pellucid.errors import ConfigError

HOMES = {
    "strategy": "pellucid.train.strategies",
    "callback": "pellucid.train.callbacks",
    "optimizer": "pellucid.optim",
    "schedule": "pellucid.optim.schedules",
    "mode": "pellucid.parallel",
    "source": "pellucid.data.sources",
    "reward": "pellucid.train.rewards",
    "task": "pellucid.evaluate",
}


@dataclass(frozen=True)
class NoOptions:
    """The config of an entry that has nothing to set."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered thing: its name, the class or function itself, and its config dataclass."""

    name: str
    target: Any
    config: type


_entries: dict[str, dict[str, Entry]] = {kind: {} for kind in HOMES}
_Target = TypeVar("_Target", bound=Callable[..., Any])


def register(kind: str, name: str, *, config: type = NoOptions) -> Callable[[_Target], _Target]:
    """Class or function decorator that makes ``name`` available as an entry of ``kind``.

    Args:
        kind: one of `HOMES`.
        config: a dataclass whose fields are the options a person can write beside the name.

    Raises:
        ConfigError: the kind does not exist, the name is taken by another object, or ``config`` is no dataclass.
    """
    _check_kind(kind)
    if not isinstance(config, type) or not is_dataclass(config):
        raise ConfigError(f"{kind} {name!r}: config must be a dataclass, got {config!r}")

    def add(target: _Target) -> _Target:
        known = _entries[kind].get(name)
        if known is not None and _identity(known.target) != _identity(target):
            owner = known.target.__module__
            raise ConfigError(f"{kind} {name!r} is already registered by {owner}; choose another name")
        _entries[kind][name] = Entry(name, target, config)
        return target

    return add


def lookup(kind: str, name: str) -> Entry:
    """The entry ``name`` of ``kind``; `ConfigError` names the nearest known one."""
    known = names(kind)
    if name not in known:
        raise ConfigError(f"unknown {kind} {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return _entries[kind][name]


def names(kind: str) -> list[str]:
    """The names registered for ``kind``, sorted."""
    _check_kind(kind)
    importlib.import_module(HOMES[kind])
    return sorted(_entries[kind])


def load_plugins(modules: tuple[str, ...]) -> None:
    """Import modules that register entries of their own; `ConfigError` names one that cannot be imported."""
    here = str(Path.cwd())
    if modules and not {"", here} & set(sys.path):
        sys.path.append(here)  # the console script does not look in the current folder by itself
    for module in modules:
        if not module or module.startswith("."):
            raise ConfigError(f"plugins: {module!r} is not the full name of a module")
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"plugins: cannot import {module!r} ({error}); it must be in the current folder or on PYTHONPATH"
            ) from error


def nearest(word: str, known: list[str]) -> str:
    """``"; did you mean x?"`` for the closest known word, or nothing."""
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _check_kind(kind: str) -> None:
    if kind not in HOMES:
        raise ConfigError(f"unknown kind {kind!r}{nearest(kind, sorted(HOMES))}; known: {', '.join(sorted(HOMES))}")


def _identity(target: Any) -> tuple[str, str]:
    return target.__module__, target.__qualname__
