"""One call of a kernel for a whole forward on the CPU.

It stands in for the model's own forward, of which torch would run some 1,700 operators for a token. Activations are float32
throughout; with packed weights a token has the same bits alone, beside others, and however its sequence is cut. They are not
those of the model's own forward: of weights that a trainer has too, only an engine that need not be exact uses it, and there
many rows are added up in another order than few. Keys are kept turned, so that
16 of them are read at a time: its blocks are not those of `PagedAttend`.

Shapes: N packed tokens, D model width, V vocabulary.
"""

import ctypes
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid import kernels
from pellucid.inference.paged import PagedCache, Span
from pellucid.kernels.build import check, library
from pellucid.kernels.linear import GROUP, LANES, LinearStruct, plain_struct
from pellucid.model import Transformer
from pellucid.model.attention import Attention
from pellucid.model.linear import Linear
from pellucid.model.mlp import SwiGLU
from pellucid.model.quantize import PackedLinear
from pellucid.model.transformer import Block


class _Layer(ctypes.Structure):
    """`Layer` of kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, LinearStruct) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("cache", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class _Decoder(ctypes.Structure):
    """`Decoder` of kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "width", "inner")),
        *((name, ctypes.c_int64) for name in ("block_size", "cache_is_bfloat16", "embedding_is_bfloat16")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("embedding", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("head", LinearStruct),
        ("layer", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    """`Step` of kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "wanted", "longest", "threads")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "cos", "sin", "tables", "blocks", "chosen")),
        ("hidden", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


def can_be_fused(model: Transformer, cache_dtype: torch.dtype, block_size: int, *, exact: bool) -> bool:
    """Whether the kernel knows every part of the model; with ``exact`` its weights must be packed for the kernel."""
    config, embedding = model.config, model.model.embed_tokens.weight
    widths = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    kinds = {_is_packed(linear) for linear in _linears(model)}
    return (
        embedding.device.type == "cpu"
        and embedding.is_contiguous()
        and {embedding.dtype, cache_dtype} <= {torch.float32, torch.bfloat16}
        and block_size % LANES == config.head_dim % LANES == 0
        and not any(width % GROUP for width in widths)
        and None not in kinds
        and not (exact and False in kinds)
        and kernels.available()
    )


def _linears(model: Transformer) -> Iterator[nn.Module | Tensor | None]:
    """Every linear layer of the decoder, joined ones once; None for what the kernel has no code for."""
    yield model.model.embed_tokens.weight if model.lm_head is None else model.lm_head
    for block in cast(list[Block], model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        if type(attention) is not Attention or type(mlp) is not SwiGLU or attention.gate_proj is not None:
            yield None
            continue
        for module in (attention, mlp):
            yield from (
                (getattr(module, name) for name in module.joinable) if module.joined is None else (module.joined,)
            )
        yield from (attention.o_proj, mlp.down_proj)


def _is_packed(linear: nn.Module | Tensor | None) -> bool | None:
    """None: the kernel cannot read it."""
    if isinstance(linear, PackedLinear):
        return None if linear.weights is None else True
    weight = linear.weight if type(linear) is Linear else linear
    if not isinstance(weight, Tensor) or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    return False if weight.is_contiguous() and weight.device.type == "cpu" else None


class FusedDecoder:
    """A forward on a cache. Make another one after the model's weights have changed, in place or otherwise: some are copies.

    Args:
        model, cache: for which `can_be_fused` holds.
        layers: only the first so many.
    """

    def __init__(self, model: Transformer, cache: PagedCache, *, layers: int | None = None) -> None:
        config, embedding = model.config, model.model.embed_tokens.weight
        self.model, self.cache, self.vocabulary = model, cache, config.vocab_size
        self._held: list[Tensor] = []
        """What the kernel has addresses of."""
        blocks = cast(list[Block], list(model.model.layers))[:layers]
        self._held += [embedding.detach(), *(tensor for layer in cache.stored for tensor in layer)]
        self._layers = (_Layer * len(blocks))(*map(self._layer, blocks, range(len(blocks)), model.layer_windows()))
        self._decoder = _Decoder(
            len(blocks), config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
            config.intermediate_size, cache.block_size, cache.stored[0][0].dtype == torch.bfloat16, embedding.dtype == torch.bfloat16,
            config.rms_norm_eps, config.head_dim**-0.5, embedding.data_ptr(), self._floats(model.model.norm.weight),
            self._linear(embedding if model.lm_head is None else model.lm_head), ctypes.addressof(self._layers),
        )  # fmt: skip

    def _layer(self, block: Block, number: int, window: int | None) -> _Layer:
        attention, mlp = block.self_attn, block.mlp
        assert isinstance(attention, Attention) and isinstance(mlp, SwiGLU)
        norms = block.input_layernorm, block.post_attention_layernorm, attention.q_norm, attention.k_norm
        config = self.model.config
        heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        return _Layer(
            *(None if norm is None else self._floats(norm.weight) for norm in norms),
            *self._parts(attention, (heads, kv_heads, kv_heads)),
            self._linear(attention.o_proj),
            *self._parts(mlp, (config.intermediate_size,) * 2),
            self._linear(mlp.down_proj),
            self.cache.stored[number][0].data_ptr(),
            window or 0,
        )

    def _parts(self, module: Attention | SwiGLU, sizes: tuple[int, ...]) -> list[LinearStruct]:
        """The layers of ``module.joinable``, which may be one."""
        if module.joined is None:
            return [self._linear(getattr(module, name)) for name in module.joinable]
        starts = accumulate(sizes, initial=0)
        return [self._linear(module.joined, *part) for part in zip(starts, sizes, strict=False)]

    def _linear(self, linear: nn.Module | Tensor, start: int = 0, outputs: int | None = None) -> LinearStruct:
        if isinstance(linear, Tensor):
            self._held.append(linear.detach())
            return plain_struct(linear)
        assert isinstance(linear, PackedLinear | nn.Linear)
        padded = None
        if linear.bias is not None:
            padded = F.pad(linear.bias.detach().float(), (0, -linear.out_features % LANES))
            self._held.append(padded)
        if isinstance(linear, nn.Linear):
            self._held.append(linear.weight.detach())
            return plain_struct(linear.weight, padded)
        assert linear.weights is not None
        self._held += linear.weights.packed, linear.weights.scales
        return linear.weights.struct(padded, start=start, outputs=outputs)

    def _floats(self, weight: Tensor) -> int:
        self._held.append(weight.detach().float().contiguous())
        return self._held[-1].data_ptr()

    def __call__(
        self, tokens: Tensor, positions: Tensor, admitted: Tensor, spans: SequenceOf[Span], chosen: SequenceOf[int]
    ) -> tuple[Tensor, Tensor]:
        """The normed hidden states ``[N, D]`` and the logits ``[len(chosen), V]`` of rows ``chosen``, float32.

        Args:
            tokens, positions, admitted: ``[N]``, as in `ScheduledBatch`.
        """
        count, rotary = len(tokens), self.model.model.rotary
        if rotary.dynamic:  # torch rounds the last numel % 32 elements of a power by another routine
            cos, sin = rotary(*(F.pad(x, (0, -count % 32), value=1) for x in (positions, admitted)))
        else:
            cos, sin = rotary(positions, admitted)
        tables: list[int] = []
        starts: list[int] = []
        for span in spans:
            starts += [len(tables)] * span.count
            tables += span.blocks
        assert len(chosen) <= count
        at = [torch.tensor(x, dtype=torch.int64, device="cpu") for x in (starts, tables, chosen)]
        hidden = cos.new_empty(count, self.model.config.hidden_size)
        logits = cos.new_empty(len(chosen), self._decoder.head.tiles * LANES)
        step = _Step(
            count, len(chosen), max(span.start + span.count for span in spans), torch.get_num_threads(),
            *(x.data_ptr() for x in (tokens, positions, cos, sin, *at, hidden, logits)),
        )  # fmt: skip
        check(library().pellucid_decode(ctypes.addressof(self._decoder), ctypes.addressof(step)))
        return hidden, logits[:, : self.vocabulary]
