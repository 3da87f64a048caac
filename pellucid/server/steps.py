"""What an engine's steps tell while they run: who has been begun, how fast tokens come, and the last steps."""

import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from pellucid.inference.engine import Engine
from pellucid.inference.records import StepRecord

KEPT = 512
"""Steps that are remembered."""
RATE_S = 5.0
"""Tokens a second are those of so many seconds."""


@dataclass(slots=True)
class Running:
    """One request of the engine, while a client waits for it."""

    id: str
    prompt: int
    """Its tokens."""
    reused: int = 0
    """Prompt tokens that were in the cache."""
    begun: bool = False
    """It has left the queue."""
    generated: int = 0

    @property
    def state(self) -> str:
        """ "waiting", "reading" its prompt, or "answering"."""
        return "answering" if self.generated else "reading" if self.begun else "waiting"


class StepLog:
    """The last steps of an engine and the requests that it works on.

    `on_step` is called in the engine's thread and only appends or sets; everything else belongs to the event loop.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Running] = {}
        self.records: deque[StepRecord] = deque(maxlen=KEPT)
        self._counts: deque[tuple[float, int, float]] = deque(maxlen=KEPT)
        """When a step ended, the tokens that the engine has drawn by then, and the step's seconds."""
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        """Listen to an engine."""
        self._engine, engine.on_step = engine, self.on_step

    def on_step(self, record: StepRecord) -> None:
        """One step has been made."""
        assert self._engine is not None
        for name, *_ in record.chunks:
            if (request := self.requests.get(name)) is not None:
                request.begun = True
        for name, tokens in record.reused.items():
            if (request := self.requests.get(name)) is not None and not request.generated:
                request.reused = max(request.reused, tokens)
        self.records.append(record)
        self._counts.append((time.monotonic(), self._engine.stats().decoded, record.seconds))

    def tokens_per_s(self) -> float:
        """Tokens drawn in the last seconds, over them; 0 where nothing happens."""
        since = time.monotonic() - RATE_S
        counts = list(self._counts)
        recent = [(when, count) for when, count, _ in counts if when >= since]
        if not recent:
            return 0.0
        before = [count for when, count, _ in counts if when < since]
        drawn = recent[-1][1] - (before[-1] if before else 0)
        return drawn / RATE_S

    def busy_tokens_per_s(self) -> float:
        """Tokens drawn in the last steps, over the time that these took; 0 where there was none."""
        counts = list(self._counts)[-64:]
        drawn = sum(max(0, b[1] - a[1]) for a, b in pairwise(counts))
        seconds = sum(count[2] for count in counts[1:])
        return drawn / seconds if seconds else 0.0
