"""From a step's chunks to logits: packs tokens, runs the model, picks the rows that the next tokens are drawn from.

Shapes: N packed tokens, D model width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.inference.fused import FusedDecoder, can_be_fused
from pellucid.inference.paged import PagedAttend, PagedCache, Span
from pellucid.inference.sequence import Chunk
from pellucid.model import Transformer
from pellucid.model.lora import lora_of
from pellucid.model.moe import MixtureOfExperts
from pellucid.model.quantize import least_rows


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One forward."""

    chunks: tuple[Chunk, ...]
    tokens: Tensor
    """``[N]`` int64, chunk after chunk."""
    positions: Tensor
    """``[N]``, of each token in its sequence."""
    admitted: Tensor
    """``[N]``, the longest that its sequence can become."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Logits:
    """What one forward gave, of the rows that were asked for."""

    values: Tensor
    """``[rows, V]``, chunk after chunk."""
    rows: tuple[range, ...]
    """Where those of each chunk stand in ``values``."""
    finite: tuple[bool, ...]
    """Whether each chunk's hidden states are; where not, NaN may stand in the keys and values that it wrote."""


class ModelRunner:
    """Owns the cache, and runs the model on it.

    Args:
        num_blocks, block_size: of the cache.
        dtype: of cached keys and values.
        exact: every token gets the same bits whatever else is in the forward.
    """

    def __init__(
        self, model: Transformer, num_blocks: int, block_size: int, *, dtype: torch.dtype, exact: bool
    ) -> None:
        self.model, self.exact = model, exact
        self.device = model.model.embed_tokens.weight.device
        self.cache = PagedCache(model.kv_specs(), num_blocks, block_size, dtype=dtype, device=self.device)
        self.windows, self.experts = model.layer_windows(), experts_of(model)
        self.fused = FusedDecoder(model, self.cache) if can_be_fused(model, dtype, block_size, exact=exact) else None
        """The whole forward as one kernel."""
        # torch rounds the last numel % 32 elements of a power by another routine
        self.row_multiple = 32 if model.model.rotary.dynamic and self.fused is None else 1
        self.min_rows = least_rows(model) if self.fused is None else 1
        self.forward_hidden: Callable[..., Tensor] = model.forward_hidden

    def batch(self, chunks: SequenceOf[Chunk]) -> ScheduledBatch:
        """Pack chunks; with ``exact`` there are at least `min_rows` rows, the last of them padding."""
        tokens: list[int] = []
        positions: list[int] = []
        admitted: list[int] = []
        spans: list[Span] = []
        for chunk in chunks:
            sequence = chunk.sequence
            spans.append(Span(len(tokens), chunk.start, chunk.count, sequence.blocks))
            known = sequence.tokens[chunk.start : chunk.start + chunk.count]
            tokens += known + sequence.draft[: chunk.count - len(known)]
            positions += range(chunk.start, chunk.start + chunk.count)
            admitted += [sequence.admitted] * chunk.count
        padding = max(0, self.min_rows - len(tokens), -len(tokens) % self.row_multiple) if self.exact else 0
        return ScheduledBatch(
            tuple(chunks),
            self._column(tokens, 0, padding),
            self._column(positions, 0, padding),
            self._column(admitted, 1, padding),
            tuple(spans),
        )

    def _column(self, values: list[int], fill: int, padding: int) -> Tensor:
        return torch.tensor(values + [fill] * padding, device=self.device)

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch, first: SequenceOf[int]) -> Logits:
        """Logits after the tokens ``first ...`` of each chunk, counted within it; the cache holds its keys and values then."""
        wanted = [range(s.row + f, s.row + s.count) for s, f in zip(batch.spans, first, strict=True)]
        index = [i for rows in wanted for i in rows]
        if self.fused is not None:
            hidden, logits = self.fused(batch.tokens, batch.positions, batch.admitted, batch.spans, index)
        else:
            hidden, logits = self._forward(batch, index)
        ends = list(accumulate(map(len, wanted), initial=0))
        return Logits(logits, tuple(map(range, ends, ends[1:])), _finite(hidden, batch.spans))

    def _forward(self, batch: ScheduledBatch, index: list[int]) -> tuple[Tensor, Tensor]:
        attend = PagedAttend(self.cache, batch.spans, self.windows, exact=self.exact)
        with evaluating(self.model, self.experts, exact=self.exact):
            hidden = self.forward_hidden(batch.tokens, batch.positions, attend, rope_length=batch.admitted)
            chosen = hidden[torch.tensor(index, dtype=torch.int64, device=self.device)]
            return hidden, self._head(chosen) if index else hidden.new_empty(0, self.model.config.vocab_size)

    def _head(self, hidden: Tensor) -> Tensor:
        missing = self.min_rows - len(hidden)
        if self.exact and missing > 0:
            return self.model.head(F.pad(hidden, (0, 0, 0, missing)))[: len(hidden)]
        return self.model.head(hidden)


@contextmanager
def evaluating(model: Transformer, experts: Iterable[MixtureOfExperts], *, exact: bool) -> Iterator[None]:
    """Without dropout; with ``exact``, experts compute each token alike whatever else is in the call."""
    lora = lora_of(model)
    training = model.training and bool(
        model.config.dropout or (lora is not None and lora.dropout)
    )  # else it is all the same
    with ExitStack() as stack:
        for module in experts:
            stack.enter_context(module.computing(exact=exact))
        try:
            if training:
                model.eval()
            yield
        finally:
            if training:
                model.train()


def experts_of(model: Transformer) -> list[MixtureOfExperts]:
    """In order of the layers."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def _finite(hidden: Tensor, spans: SequenceOf[Span]) -> tuple[bool, ...]:
    fine = hidden.isfinite()
    if fine.all():
        return (True,) * len(spans)
    each: list[bool] = fine.all(-1).tolist()
    return tuple(all(each[span.row : span.row + span.count]) for span in spans)
