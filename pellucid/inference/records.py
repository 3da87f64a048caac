"""What an engine tells of itself: its numbers, and the log of its steps."""

from dataclasses import dataclass

from pellucid.inference.request import FinishReason


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine holds and has done."""

    running: int
    waiting: int
    blocks: int
    free: int
    cached: int
    held: int
    steps: int
    forwards: int
    prefilled: int
    """Prompt tokens that were computed."""
    reused: int
    """Prompt tokens that were in the cache."""
    decoded: int
    """Tokens drawn."""
    drafted: int
    """Tokens guessed by prompt lookup."""
    accepted: int
    """Guesses that were right."""
    evictions: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, for `Engine.on_step`."""

    step: int
    chunks: tuple[tuple[str, int, int, int], ...]
    """(request, choice, first position, tokens), in the order of the forward."""
    reused: dict[str, int]
    """Prompt tokens of requests that began in this step and were in the cache."""
    copied: int
    """Blocks copied before they were written to."""
    evicted: int
    preempted: tuple[str, ...]
    finished: tuple[tuple[str, int, FinishReason], ...]
    free: int
    cached: int
    held: int
    waiting: int
    seconds: float
