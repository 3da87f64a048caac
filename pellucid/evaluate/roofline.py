"""What a decode step has to read, and how fast this machine reads: together a bound on tokens a second.

A step reads every weight once, however many sequences it continues, and each sequence's own keys and values. On a CPU the
time of small batches goes there, so `Roofline.share` says how much of the machine an engine makes use of. What fits into the
last-level cache is read faster than memory, and the share of a small model can pass 1.
"""

import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pellucid.inference import StepRecord
from pellucid.model import Transformer
from pellucid.model.moe import MixtureOfExperts
from pellucid.model.quantize import memory_bytes

BUFFER_BYTES = 256 * 2**20
"""Several times what last-level caches hold."""
PASSES = 8


@dataclass(slots=True)
class DecodeSteps:
    """Sums over the steps in which no prompt was read."""

    steps: int = 0
    sequences: int = 0
    contexts: int = 0
    """Tokens that those sequences saw."""
    tokens: int = 0
    """Drawn."""
    seconds: float = 0.0

    def add(self, record: StepRecord, prompts: Mapping[str, int], tokens: int) -> None:
        """Count a step that drew so many tokens, unless a prompt (its length by request) was read in it."""
        if any(start < prompts[name] for name, _, start, _ in record.chunks):
            return
        self.steps, self.sequences = self.steps + 1, self.sequences + len(record.chunks)
        self.contexts += sum(start + count for _, _, start, count in record.chunks)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + record.seconds


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes a token, the bound that follows, and what was reached."""

    weight_bytes_per_step: int
    """As `weight_bytes`, at the mean batch."""
    kv_bytes_per_sequence: int
    """As `kv_bytes`, at the mean context."""
    mean_batch: float
    """Sequences a step."""
    mean_context: float
    """Tokens that a sequence saw in a step."""
    bytes_per_token: float
    """Read for each token that was drawn."""
    read_gb_per_s: dict[int, float]
    """10^9 bytes a second, by threads; the greatest counts."""
    bound_tokens_per_s: float
    tokens_per_s: float
    """Measured, of the same steps."""
    share: float
    """Of the bound that was reached: the model bandwidth utilisation."""


def roofline(model: Transformer, decode: DecodeSteps, read_gb_per_s: Mapping[int, float]) -> Roofline | None:
    """The roofline of such steps; None where there were none.

    Args:
        read_gb_per_s: from `read_bandwidth`, by threads.
    """
    if not decode.tokens:
        return None
    batch, context = decode.sequences / decode.steps, decode.contexts / decode.sequences
    weights, kv = weight_bytes(model, batch), kv_bytes(model, context)
    per_token = (decode.steps * weights + decode.sequences * kv) / decode.tokens
    bound, reached = max(read_gb_per_s.values()) * 1e9 / per_token, decode.tokens / decode.seconds
    return Roofline(weights, kv, batch, context, per_token, dict(read_gb_per_s), bound, reached, reached / bound)


def weight_bytes(model: Transformer, tokens: float = 1) -> int:
    """Bytes of weights that a forward of ``tokens`` tokens reads, as they lie in memory.

    Every weight counts once, a tied embedding as the head; the look-up of ids counts for nothing. Of E routed experts, K a
    token, those that some token goes to where all are equally likely: E (1 - (1 - K/E)^tokens).
    """
    total = float(memory_bytes(model))
    if model.lm_head is not None:
        total -= model.model.embed_tokens.weight.nbytes
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            idle = (1 - model.config.num_experts_per_tok / model.config.n_routed_experts) ** tokens
            total -= idle * memory_bytes(module.experts)
    return round(total)


def kv_bytes(model: Transformer, context: float, dtype: torch.dtype | None = None) -> int:
    """Bytes of keys and values that one sequence's next token reads after ``context`` tokens, of all layers.

    A layer with a sliding window reads no more than that.

    Args:
        dtype: of the cache; None: of the model's weights.
    """
    dtype = dtype or model.model.embed_tokens.weight.dtype
    layers = zip(model.kv_specs(), model.layer_windows(), strict=True)
    elements = sum(spec.elements_per_token() * min(context, window or context) for spec, window in layers)
    return round(elements * dtype.itemsize)


def read_bandwidth(threads: int, *, size: int = BUFFER_BYTES) -> float:
    """10^9 bytes a second that ``threads`` threads read from memory: the best of a few sums over a buffer.

    Args:
        size: of the buffer in bytes, a multiple of 8. It lies on pages of 2 MiB where the system gives them.
    """
    before = torch.get_num_threads()
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.int64).fill_(1)  # a page that nobody wrote to is not in memory
    best = 0.0
    torch.set_num_threads(threads)
    try:
        for _ in range(PASSES):
            start = time.perf_counter()
            buffer.sum()
            best = max(best, size / (time.perf_counter() - start) / 1e9)
    finally:
        torch.set_num_threads(before)
    return best
