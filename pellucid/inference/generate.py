"""Continue prompts: prefill a batch, then one forward a token. Ids in, ids out.

Shapes: R rows, one for each sample of each prompt that is still running; T the longest prompt.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pellucid.inference.cache import CachedAttend
from pellucid.inference.request import FinishReason, Request, Result, SamplingParams, TokenEvent, check_request
from pellucid.inference.sample import Sampled, sample, uniform
from pellucid.model import Transformer
from pellucid.model.canonical import MATMUL_ROWS


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    batch_size: int = 16,
    on_event: Callable[[TokenEvent], None] | None = None,
) -> list[Result]:
    """Continue each prompt.

    Args:
        params: for all prompts, or one for each.
        batch_size: samples that run together; changes speed and memory, never a result.
        on_event: called with each token as it is drawn; ``request_id`` is the prompt's index as text.

    Returns:
        ``n`` results for each prompt, in the order of the prompts. One whose logits were not finite has
        ``finish_reason`` "error" and the ids before that; the others are not affected.

    Raises:
        RequestError: a prompt is empty, too long for the model's window, or holds an unknown id. Nothing has run then.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    requests = [Request(str(i), tuple(tokens), p) for i, (tokens, p) in enumerate(zip(prompts, each, strict=True))]
    sequences = [sequence for request in requests for sequence in _sequences(model, request)]
    for group in _groups(sequences, batch_size):
        for event in _run(model, group):
            if on_event is not None:
                on_event(event)
    return [s.result() for s in sequences]


def stream(model: Transformer, prompt: Sequence[int], params: SamplingParams) -> Iterator[TokenEvent]:
    """The tokens of one prompt as they are drawn (of several samples, in turn); errors as in `generate`.

    Closing the iterator stops the computation.
    """
    return _run(model, _sequences(model, Request("0", tuple(prompt), params)))


@dataclass(slots=True)
class _Sequence:
    """One sample of a request on its way."""

    request: Request
    sample: int
    seed: int
    max_new: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.ids)

    @property
    def admitted(self) -> int:
        """The longest that it can become; dynamic rotary frequencies are fixed from it."""
        return len(self.request.tokens) + self.max_new

    def accept(self, token: int, logprob: float, ok: bool) -> TokenEvent:
        if not ok:
            self.finish_reason = "error"
            return TokenEvent(self.request.id, None, logprob, "error", self.sample)
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self.request.params.stop_ids:
            self.finish_reason = "stop"
        elif len(self.ids) == self.max_new:
            self.finish_reason = "length"
        return TokenEvent(self.request.id, token, logprob, self.finish_reason, self.sample)

    def result(self) -> Result:
        assert self.finish_reason is not None
        return Result(self.ids, self.logprobs, self.finish_reason)


def _sequences(model: Transformer, request: Request) -> list[_Sequence]:
    max_new = check_request(request, model.config)
    seed = request.params.seed
    seed = secrets.randbits(64) if seed is None else seed
    return [_Sequence(request, i, seed, max_new) for i in range(request.params.n)]


def _groups(sequences: list[_Sequence], batch_size: int) -> Iterator[list[_Sequence]]:
    return (sequences[i : i + batch_size] for i in range(0, len(sequences), batch_size))


def _run(model: Transformer, rows: list[_Sequence]) -> Iterator[TokenEvent]:
    canonical = model.config.attend == "canonical"
    min_rows = MATMUL_ROWS if canonical else 1
    capacity = max(s.admitted for s in rows) + min_rows - 1
    attend = CachedAttend(len(rows), capacity, model.layer_windows(), model.kv_specs(), canonical=canonical)
    new = [list(s.request.tokens) for s in rows]
    while rows:
        logits = _forward(model, attend, rows, new, min_rows)
        drawn = _draw(rows, logits)
        for s, token, logprob, ok in zip(rows, *(column.tolist() for column in drawn), strict=True):
            yield s.accept(token, logprob, ok)
        running = [i for i, s in enumerate(rows) if s.finish_reason is None]
        if len(running) < len(rows):
            rows = [rows[i] for i in running]
            attend.keep(running)
        new = [s.ids[-1:] for s in rows]


@torch.no_grad()
def _forward(
    model: Transformer, attend: CachedAttend, rows: list[_Sequence], new: list[list[int]], min_rows: int
) -> Tensor:
    """The logits [R, V] after the last of each row's ``new`` tokens, which are the last of the row so far.

    ``min_rows``: matrix products get at least so many, by padding.
    """
    device = model.model.embed_tokens.weight.device
    at_least = -(-min_rows // len(rows))
    width = max(at_least, *map(len, new))
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in new], device=device)
    starts = torch.tensor([[s.length - len(ids)] for s, ids in zip(rows, new, strict=True)], device=device)
    positions = starts + torch.arange(width, device=device)
    attend.at(positions)
    admitted = torch.tensor([s.admitted for s in rows], device=device)
    training = model.training
    model.eval()
    try:
        hidden = model.forward_hidden(tokens, positions, attend, rope_length=admitted)
        last = torch.tensor([len(ids) - 1 for ids in new], device=device)
        chosen = hidden[torch.arange(len(rows), device=device), last]  # [R, D]
        return model.head(chosen[:, None].expand(-1, at_least, -1))[:, 0]
    finally:
        model.train(training)


def _draw(rows: list[_Sequence], logits: Tensor) -> Sampled:
    noise = uniform([s.seed for s in rows], [s.sample for s in rows], [s.length for s in rows])
    return sample(logits, [s.request.params for s in rows], noise)
