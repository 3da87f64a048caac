"""A network to imitate, so that one machine shows what communication would cost."""

import math
import time
from dataclasses import dataclass

from pellucid.errors import ConfigError


@dataclass(slots=True)
class Link:
    """A connection that carries one collective after the other, each for latency + bytes / bandwidth seconds."""

    bytes_per_s: float
    latency_s: float
    busy_until: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Link":
        """From ``"1Gbit/s,0.2ms"``; the latency may be left out.

        Raises:
            ConfigError: it is not of that form.
        """
        bandwidth, _, latency = text.partition(",")
        try:
            return cls(_quantity(bandwidth, _BANDWIDTHS) / 8, _quantity(latency, _TIMES) if latency else 0.0)
        except ValueError:
            raise ConfigError(
                f'parallel.emulate is {text!r}; write a bandwidth and a latency like "1Gbit/s,0.2ms"'
            ) from None

    def charge(self, num_bytes: int) -> float:
        """When a collective issued now would be over, on the clock of `time.perf_counter`."""
        begin = max(time.perf_counter(), self.busy_until)
        self.busy_until = begin + self.latency_s + num_bytes / self.bytes_per_s
        return self.busy_until


_BANDWIDTHS = {"Gbit/s": 1e9, "Mbit/s": 1e6, "GB/s": 8e9, "MB/s": 8e6}
_TIMES = {"ms": 1e-3, "us": 1e-6, "s": 1.0}


def _quantity(text: str, units: dict[str, float]) -> float:
    unit = next((u for u in units if text.strip().endswith(u)), None)
    if unit is None:
        raise ValueError(text)
    value = float(text.strip().removesuffix(unit)) * units[unit]
    if not 0 <= value < math.inf or (units is _BANDWIDTHS and value == 0):
        raise ValueError(text)
    return value
