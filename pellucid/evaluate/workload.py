"""Load for an engine, made up: random requests, and when they arrive."""

import math
import random
from dataclasses import dataclass

from pellucid.errors import ConfigError
from pellucid.inference import Request, SamplingParams

MAX_REQUESTS = 100_000
MIN_RATE = 0.001
"""A request in a quarter of an hour; rarer ones are no load, and cannot be slept for in the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Random requests that are drawn greedily and never stop before their length. The same seed gives the same ones.

    Raises:
        ConfigError: a value out of range; neither or both of ``concurrency`` and ``rate``.
    """

    requests: int = 64
    """Up to 100,000."""
    concurrency: int | None = None
    """Closed loop: as soon as one of so many ends, the next is sent."""
    rate: float | None = None
    """Open loop: so many arrive a second, at least 0.001, as a Poisson process, whatever the engine does."""
    prompt_tokens: tuple[int, int] = (128, 128)
    """Least and greatest length of a prompt, the shared prefix not counted."""
    max_tokens: tuple[int, int] = (64, 64)
    """Least and greatest length of an answer."""
    shared_prefix: int = 0
    """Tokens with which all prompts of a group begin."""
    groups: int = 1
    """Requests belong to these in turn."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("requests", 1), ("shared_prefix", 0), ("groups", 1), ("seed", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("requests", "concurrency"):
            if (getattr(self, name) or 0) > MAX_REQUESTS:
                raise ConfigError(f"{name} must be at most {MAX_REQUESTS}, got {getattr(self, name)}")
        for name in ("prompt_tokens", "max_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"{name} must be two lengths of at least 1, the lesser first, got {low}:{high}")
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("give one of concurrency (a closed loop) and rate (an open one)")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.rate is not None and not MIN_RATE <= self.rate < math.inf:
            raise ConfigError(f"rate must be finite and at least {MIN_RATE}, got {self.rate}")
        if self.groups > 1 and not self.shared_prefix:
            raise ConfigError(
                f"groups {self.groups} differ in their shared_prefix, which is 0; set it or leave groups out"
            )

    def make_requests(self, vocab_size: int, salt: str = "") -> list[Request]:
        """In order of arrival; their ids are "0", "1", ... Whether a model has room for their lengths is not looked at."""
        draw, ids = random.Random(self.seed), range(vocab_size)
        prefixes = [draw.choices(ids, k=self.shared_prefix) for _ in range(min(self.groups, self.requests))]
        made = []
        for number in range(self.requests):
            own = draw.choices(ids, k=draw.randint(*self.prompt_tokens))
            params = SamplingParams(temperature=0, max_tokens=draw.randint(*self.max_tokens))
            made.append(Request(str(number), (*prefixes[number % self.groups], *own), params, salt))
        return made

    def arrivals(self) -> list[float] | None:
        """When each request of an open loop arrives, in seconds; None for a closed one."""
        if self.rate is None:
            return None
        draw, now = random.Random(f"arrivals {self.seed}"), 0.0
        return [now := now + draw.expovariate(self.rate) for _ in range(self.requests)]
