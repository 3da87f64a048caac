"""Attention over whole training windows: causal, within documents, with a sliding window.

Shapes: B rows, T tokens a row, H query heads, K key/value heads, d head width. Masks are bool, True where the query
(rows) sees the key (columns).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.model.attention import Attend
from pellucid.model.linear import is_emulated

EXPLICIT_MAX_TOKENS = 512
"""Longest row for which bfloat16 attention is written out where that is asked for; longer ones use the fused kernel.

With bfloat16 in hardware, compiled, it made a whole training step at 256 tokens 1.08 times as fast as the fused kernel
(2-core Zen 4, torch 2.13). In float32 it is slower (78 against 64 ms forward and backward, 16 rows of 256, one thread).
"""

WORTH_APART = 8
"""How many times fewer scores there have to be for documents of packed rows to be attended each in a row of its own."""


def causal_mask(tokens: int, window: int | None = None, *, device: torch.device | str | None = None) -> Tensor:
    """``[T, T]``: each token sees itself and those before it, ``window`` of them at most (itself included)."""
    index = torch.arange(tokens, device=device)
    distance = index[:, None] - index
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def document_mask(documents: Tensor, window: int | None = None) -> Tensor:
    """``[B, 1, T, T]`` from ids ``[B, T]``: `causal_mask`, and never from one document into another."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & causal_mask(documents.shape[-1], window, device=documents.device)


class WindowAttend:
    """An `Attend` for rows ``[B, T]`` that are attended whole: training and evaluation.

    Masks are made once, here, for all layers; a plain causal layer needs none.

    Args:
        windows: sliding window of each layer, None where it sees everything before it.
        documents: ids ``[B, T]``, or None where each row is one document.
        written_out: compute bfloat16 attention of rows of up to `EXPLICIT_MAX_TOKENS` tokens as two products, which pays under
            torch.compile, and uncompiled for shorter rows.
    """

    def __init__(self, windows: tuple[int | None, ...], documents: Tensor | None = None, *, written_out: bool = False):
        self.windows = windows
        self.written_out = written_out
        self.document_masks: dict[int | None, Tensor] = {}
        if documents is not None:
            self.document_masks = {window: document_mask(documents, window) for window in dict.fromkeys(windows)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        tokens, window = q.shape[-3], self.windows[layer]
        if self.document_masks:
            mask: Tensor | None = self.document_masks[window]
        elif window is not None and window < tokens:
            mask = causal_mask(tokens, window, device=q.device)
        else:
            mask = None
        if self.written_out and q.dtype == torch.bfloat16 and tokens <= EXPLICIT_MAX_TOKENS and not is_emulated(q):
            return explicit_attention(q, k, v, mask, scale)
        return fused_attention(q, k, v, mask, scale)


def rows_of_documents(documents: Tensor) -> tuple[Tensor, Tensor] | None:
    """``rows`` and ``places`` of `RowsAttend`, a row for each document; None where `WORTH_APART` says so.

    Args:
        documents: ids ``[B, T]``, a document is a run of equal ids in a row. Those below 0 are padding, which nobody looks at.
    """
    count, tokens = documents.shape
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    lengths = starts.diff(append=starts.new_tensor([count * tokens]))
    real = documents.flatten()[starts] >= 0
    starts, lengths = starts[real], lengths[real]
    longest = int(lengths.max()) if len(lengths) else 0
    if (
        not longest
        or WORTH_APART * len(lengths) * longest**2 > count * tokens**2
        or len(lengths) * longest > 1.5 * count * tokens
    ):
        return None
    index = torch.arange(longest, device=documents.device)
    inside = index < lengths[:, None]
    rows = starts[:, None] + index.where(inside, 0)
    places = torch.zeros(count * tokens, dtype=torch.int64, device=documents.device)
    places[rows[inside]] = inside.flatten().nonzero()[:, 0]
    return rows, places


class RowsAttend:
    """An `Attend` for tokens ``[..., H, d]`` in any layout, by one for rows ``[R, T, H, d]`` that they are looked up in.

    Args:
        rows: int64 ``[R, T]``, which of the flattened tokens stands at each place; one may stand in several rows that begin alike.
        places: int64, of each of the flattened tokens one place in the flattened rows.
    """

    def __init__(self, attend: Attend, rows: Tensor, places: Tensor) -> None:
        self.attend, self.rows, self.places = attend, rows, places

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        layout = q.shape[:-2]
        q, k, v = (
            x.flatten(0, -3).index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape) for x in (q, k, v)
        )
        out: Tensor = self.attend(layer, q, k, v, scale=scale).flatten(0, 1).index_select(0, self.places)
        return out.view(*layout, *out.shape[1:])


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """torch's own kernel; causal where there is no mask."""
    if is_emulated(q):
        with torch.autocast("cpu", enabled=False):
            return fused_attention(q.float(), k.float(), v.float(), mask, scale).to(torch.bfloat16)
    width = v.shape[-1]
    q, k, v = (x.transpose(-2, -3) for x in of_one_width(q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[-3] != k.shape[-3]
    )
    return out.transpose(-2, -3)[..., :width]


def of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads padded with zeros to the widest of the three.

    torch's fused kernel on the CPU wants one width; without it whole score matrices are computed, 3 to 9 times as slowly.
    """
    width = max(k.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Two batched matrix products, the query heads of a group stacked as rows so that keys are not repeated."""
    rows, tokens, heads, width = q.shape
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    if mask is None:
        mask = causal_mask(tokens, device=q.device)
    bias = torch.zeros(mask.shape, device=q.device).masked_fill(~mask, float("-inf"))
    if bias.dim() == 4:
        bias = bias[:, :, None]  # [B, 1, 1, T, T] over [B, K, G, T, T]
    q = q.view(rows, tokens, kv_heads, group, width).permute(0, 2, 3, 1, 4).reshape(-1, group * tokens, width)
    k = k.transpose(1, 2).reshape(-1, tokens, width)
    v = v.transpose(1, 2).reshape(-1, tokens, v.shape[-1])
    scores = torch.bmm(q, k.transpose(1, 2)).view(rows, kv_heads, group, tokens, tokens)
    weights = (scores.float() * scale + bias).softmax(-1).to(v.dtype)
    out = torch.bmm(weights.view(-1, group * tokens, tokens), v)
    out = out.view(rows, kv_heads, group, tokens, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, tokens, heads, -1)
