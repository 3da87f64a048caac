"""Continue prompts with an engine made for them. Ids in, ids out."""

from collections.abc import Callable, Iterator, Sequence

from pellucid.inference.engine import Engine
from pellucid.inference.paged import bytes_per_token
from pellucid.inference.request import Request, Result, SamplingParams, TokenEvent, check_request
from pellucid.model import Transformer

PAGE_SIZE = 64


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
        ``n`` results for each prompt, in the order of the prompts. One whose logits were not finite, or whose processor or
        constraint failed, has ``finish_reason`` "error" and the ids before that; the others are not affected.

    Raises:
        RequestError: a prompt is empty, too long for the model's window, or holds an unknown id. Nothing has run then.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    pairs = zip(prompts, each, strict=True)
    requests = [Request(str(i), tuple(tokens), p) for i, (tokens, p) in enumerate(pairs)]
    if not requests:
        return []
    return engine_for(model, requests, batch_size).generate(prompts, each, on_event=on_event)


def stream(model: Transformer, prompt: Sequence[int], params: SamplingParams) -> Iterator[TokenEvent]:
    """The tokens of one prompt as they are drawn (of several samples, in turn); errors as in `generate`.

    Closing the iterator stops the computation.
    """
    request = Request("0", tuple(prompt), params)
    return engine_for(model, [request], params.n).stream(request)


def engine_for(model: Transformer, requests: Sequence[Request], together: int, **options: object) -> Engine:
    """An engine with room for ``together`` samples of these requests, or all if fewer, and for ``n`` of any one.

    Args:
        options: further ones of `Engine`.

    Raises:
        RequestError: the model cannot do one of the requests.
    """
    needs = [(len(r.tokens) + check_request(r, model.config), r.params.n) for r in requests]
    counts = [n for _, n in needs]
    running = max([min(together, sum(counts) or 1), *counts])  # room for more would never be used
    blocks = [-(-tokens // PAGE_SIZE) for tokens, n in needs for _ in range(min(n, running))]
    most = sum(sorted(blocks, reverse=True)[:running]) + running
    dtype = options.get("kv_dtype") or model.model.embed_tokens.weight.dtype
    size = most * PAGE_SIZE * bytes_per_token(model.kv_specs(), dtype)  # type: ignore[arg-type]
    # a hair more, since gigabytes are divided again
    settings = {"kv_gb": size * (1 + 1e-9) / 1e9, "page_size": PAGE_SIZE, "max_running": running} | options
    return Engine(model, **settings)  # type: ignore[arg-type]
