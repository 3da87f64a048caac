"""Linear layers whose weights are packed for multiplying only, on the CPU: of 16, 8 or 4 bits.

16 bits are bfloat16 in the order in which oneDNN reads them fastest; each result has the bits that
`torch.nn.functional.linear` gives (measured with AVX512-BF16, 1 to 512 rows).

8 and 4 bits are multiplied by kernels of our own where they can be built (`pellucid.kernels`), by torch's elsewhere. Scales are
rounded to bfloat16 first and the weights divided by what they became, so rounding adds no error. With torch's kernels
activations are bfloat16 inside a layer, whatever comes in: they take float32 too, but one number at a time, 10 to 60 times
slower.

A row gets the same bits alone and among others. Our kernels add in an order that does not depend on other rows; torch's were
measured (2.13, AVX2) for 1, 2, 3, 4, 5, 7, 8, 16, 33 and 64 rows, 1 and 2 threads, both kinds, nine shapes. On other processors
it has others, where that is not measured.

Shapes: O outputs, I inputs, G groups of `GROUP` inputs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid import kernels
from pellucid.errors import CheckpointError, ConfigError
from pellucid.kernels import GROUP
from pellucid.model.attention import Attention
from pellucid.model.canonical import in_products, matmul_rows, narrow_rows
from pellucid.model.linear import Linear, is_emulated
from pellucid.model.lora import LoraLinear
from pellucid.model.mlp import SwiGLU
from pellucid.model.transformer import Transformer

OUTPUTS = 16
"""The kernel of 4 bits takes outputs in multiples of this."""
INPUTS = 32
"""Inputs are padded to multiples of this: the kernel of 8 bits reads whole vectors, past the end of a shorter row."""
CHUNK = 2**16
"""Elements that are quantised at a time."""
ALONE = 2**21
"""Weights of a bfloat16 layer from which a row alone may round in another way than among others (`canonical.NARROW_ROWS`)."""
HEAD = "lm_head"
KEPT = "kv_b_proj"
"""The layer of latent attention that stays: its weight is used as a matrix where a cache holds latents."""


class PackedLinear(nn.Module):
    """``[..., I] -> [..., O]`` in the dtype that comes in, without parameters and without gradients.

    Packed weights and their scales are no buffers: nothing moves or casts them.
    """

    nbytes: int
    """Of packed weights and scales."""
    bias: Tensor | None
    weights: kernels.KernelWeights | None = None
    """Where kernels of our own multiply."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.padding = -self.in_features % INPUTS
        self.register_buffer("bias", None if bias is None else bias.detach())

    def multiply(self, rows: Tensor) -> Tensor:
        """bfloat16 rows ``[N, I]``, I padded -> ``[N, O]``, O padded."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.weights is not None:
            out = self.weights.multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.out_features)
            return (out if self.bias is None else out + self.bias).to(x.dtype)
        rows = _rows(x)
        if self.padding:
            rows = F.pad(rows, (0, self.padding))
        out = self.multiply(rows)
        if out.shape[1] != self.out_features:
            out = out[:, : self.out_features]
        if x.dtype != torch.bfloat16 or x.dim() != 2:
            out = out.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _rows(x: Tensor) -> Tensor:
    """``[..., I]`` as bfloat16 ``[N, I]`` in one piece."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    if x.dtype != torch.bfloat16:
        x = x.to(torch.bfloat16)
    return x if x.is_contiguous() else x.contiguous()


class BFloat16Linear(PackedLinear):
    """A linear layer of 16 bits a weight; of float32 weights it takes the nearest."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        # an opaque tensor of oneDNN's
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().bfloat16(), 1)
        self.nbytes = weight.numel() * 2

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows(x)
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        alone = len(rows) == 1 and self.in_features * self.out_features >= ALONE
        if alone:
            rows = F.pad(rows, (0, 0, 0, 1))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, bias, "none", [], "")
        if alone:
            out = out[:1]
        if x.dtype == torch.bfloat16 and x.dim() == 2:
            return out
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


class Int8Linear(PackedLinear):
    """A linear layer of 8 bits a weight, by `to_int8`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        levels, scale = to_int8(weight)
        if kernels.available():
            self.weights = kernels.pack8(levels, scale)
            self.nbytes = self.weights.nbytes
            return
        self.packed, self.scale = F.pad(levels, (0, self.padding)), scale
        self.nbytes = self.packed.nbytes + scale.nbytes

    def multiply(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(rows, self.packed, self.scale)
        return out


class Int4Linear(PackedLinear):
    """A linear layer of 5 bits a weight, by `to_int4`: 4, and a scale and a zero of 16 for each 32 weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        levels, scale_zero = to_int4(weight)
        if kernels.available():
            self.weights = kernels.pack4(levels, scale_zero, self.in_features)
            self.nbytes = self.weights.nbytes
            return
        padding = -self.out_features % OUTPUTS
        levels, scale_zero = F.pad(levels, (0, 0, 0, padding)), F.pad(scale_zero, (0, 0, 0, padding))
        self.packed, self.scale_zero = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1), scale_zero
        self.nbytes = self.packed.nbytes + scale_zero.nbytes

    def multiply(self, rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scale_zero)
        return out


KINDS: dict[str, type[PackedLinear]] = {"bf16": BFloat16Linear, "int8": Int8Linear, "int4": Int4Linear}


def quantize_(model: Transformer, kind: str, *, after: Callable[[Tensor], None] | None = None) -> list[str]:
    """Pack the weights of a decoder's linear layers, in place, one after the other; returns their names.

    The head gets 8 bits in either narrow kind, or 16 where torch's kernels have to do and the processor multiplies bfloat16
    (as fast, and faster for several sequences); where it is tied, it becomes a copy of its own, and the embedding stays for
    looking up ids. Layers that read the same input become one product. Embedding, norms, biases, the routers of experts
    (whose choices flip on small errors) and `KEPT` stay. A merged adapter goes into the weights. Nothing of the model can be
    trained afterwards, nor saved.

    Args:
        kind: "bf16", "int8" or "int4".
        after: called with each weight that is packed and needed no more.

    Raises:
        ConfigError: an unknown kind; a model that is not on the CPU, is packed, or has an adapter that is not merged.
        CheckpointError: a weight is not finite; names it. Layers before it are packed by then.
    """
    embedding = model.model.embed_tokens.weight
    check_kind(kind, embedding.device)
    refuse_quantized(model, "to be quantised")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = {name: layer for name, layer in layers.items() if isinstance(layer, LoraLinear)}
    if any(layer.original is None for layer in adapted.values()):
        raise ConfigError(
            f"weights {kind}: the model has an adapter that is not merged; call merge(model) of pellucid.model.lora first, "
            "or load what `pellucid export ADAPTER --out MODEL` writes"
        )
    inside = tuple(f"{name}." for name in adapted)  # the adapter's own two
    names = [name for name in layers if name.rpartition(".")[2] != KEPT and not name.startswith(inside)]
    del layers, adapted  # each layer is freed when it is replaced
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, Attention | SwiGLU):
            _join(name, module, kind, after)
    for name in names:
        parent, _, last = name.rpartition(".")
        linear = getattr(model.get_submodule(parent), last)
        if linear is not None:
            setattr(model.get_submodule(parent), last, _packed(name, linear.weight, linear.bias, kind))
            if after is not None:
                after(linear.weight)
    if model.lm_head is None:
        model.lm_head = _packed(HEAD, embedding, None, kind)  # type: ignore[assignment]
        names.append(HEAD)
    return names


def _join(name: str, module: Attention | SwiGLU, kind: str, after: Callable[[Tensor], None] | None) -> None:
    """One product instead of those of ``module.joinable``, where all or none of them have a bias."""
    linears = [getattr(module, part) for part in module.joinable]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        return
    for part, linear in zip(module.joinable, linears, strict=True):
        _require_finite(f"{name}.{part}", linear.weight, kind)
    weight = torch.cat([linear.weight for linear in linears])
    module.joined = KINDS[kind](weight, torch.cat(biases) if biases else None)
    for part, linear in zip(module.joinable, linears, strict=True):
        setattr(module, part, None)
        if after is not None:
            after(linear.weight)


def is_quantized(model: nn.Module) -> bool:
    """Whether some of its layers were replaced by `quantize_`."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def least_rows(model: Transformer) -> int:
    """The fewest rows that a forward must have so that no row's bits depend on their number."""
    dtype = model.model.embed_tokens.weight.dtype
    if not in_products(dtype):
        return matmul_rows(dtype)
    if is_quantized(model):
        return 1
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    ours = all(isinstance(m, Linear | LoraLinear) and m.in_features % kernels.GROUP == 0 for m in linears)
    if ours and is_emulated(model.model.embed_tokens.weight):
        return 1
    return narrow_rows(min(linear.in_features * linear.out_features for linear in linears))


def refuse_quantized(model: nn.Module, wish: str) -> None:
    """`ConfigError` for a quantised model, which is not there ``wish``, as in "to be trained"."""
    if is_quantized(model):
        raise ConfigError(
            f"the model's weights are packed, which is for computing with, not {wish}; "
            "load it without weights=..., or without --weights"
        )


def check_kind(kind: str, device: torch.device) -> None:
    """`ConfigError` for a kind that is not known, or a device that it does not run on."""
    if kind not in KINDS:
        raise ConfigError(f"weights {kind!r} are unknown; known: {', '.join(KINDS)}")
    if device.type != "cpu":
        raise ConfigError(
            f'weights "{kind}" run on cpu, and the model\'s device is {device}; set device to cpu, or leave weights out'
        )
    if kind == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ConfigError(
            'weights "bf16" are packed for processors with avx512bw or avx_ne_convert, which this one has not; '
            "leave weights out (dtype bfloat16 alone is computed in float32), or take int8 or int4"
        )


def memory_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, buffers and packed weights, tied ones once."""
    packed = sum(module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    return packed + sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to nearest, ``weight ~ levels * scale``: levels int8 ``[O, I]`` of -127 ... 127, scale bfloat16 ``[O]``.

    The error is half a scale at most.
    """
    levels = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), dtype=torch.bfloat16)
    for rows in _chunks(weight):
        wide = weight[rows].detach().float()
        scale[rows] = wide.abs().amax(1) / 127
        divisor = scale[rows].float().unsqueeze(1)
        levels[rows] = (wide / divisor.where(divisor > 0, 1)).round_().clamp_(-127, 127)
    return levels, scale


def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to nearest, ``weight ~ (levels - 8) * scale + zero``, a scale and a zero for each group of `GROUP` inputs.

    Levels are spread evenly from a group's least weight to its greatest. The error is half a scale at most, or 1/256 of
    ``zero`` where that is more: what rounding it to bfloat16 can cost the weights at the ends.

    Returns:
        Levels int32 ``[O, 32 G]`` of 0 ... 15, the last group padded; scale and zero bfloat16 ``[G, O, 2]``.
    """
    groups = -(-weight.shape[1] // GROUP)
    levels = torch.empty(len(weight), groups * GROUP, dtype=torch.int32)
    scale_zero = torch.empty(groups, len(weight), 2, dtype=torch.bfloat16)
    for rows in _chunks(weight):
        wide = weight[rows].detach().float()
        padding = wide[:, -1:].expand(-1, groups * GROUP - wide.shape[1])  # widens no range
        grouped = torch.cat([wide, padding], 1).view(-1, groups, GROUP)
        low, high = grouped.aminmax(dim=-1)
        scale = ((high - low) / 15).bfloat16()
        zero = ((high + low + scale.float()) / 2).bfloat16()  # the value of level 8, half a step above the middle
        divisor = scale.float().where(scale > 0, 1).unsqueeze(-1)
        nearest = ((grouped - zero.float().unsqueeze(-1)) / divisor).round_().clamp_(-8, 7)
        levels[rows] = nearest.flatten(1).add_(8).int()
        scale_zero[:, rows] = torch.stack([scale, zero], -1).transpose(0, 1)
    return levels, scale_zero


def _chunks(weight: Tensor) -> list[slice]:
    step = max(1, CHUNK // weight.shape[1])
    return [slice(start, start + step) for start in range(0, len(weight), step)]


def _packed(name: str, weight: Tensor, bias: Tensor | None, kind: str) -> PackedLinear:
    _require_finite(name, weight, kind)
    if name == HEAD and kind != "bf16":
        kind = "bf16" if has_bfloat16() and not kernels.available() else "int8"
    return KINDS[kind](weight, bias)


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16; others do it in software, a hundred times as slowly."""
    flags = "avx512_bf16", "amx_bf16"
    return any(torch.cpu.get_capabilities().get(flag, False) for flag in flags)


def _require_finite(name: str, weight: Tensor, kind: str) -> None:
    if kind != "bf16" and not weight.isfinite().all():
        raise CheckpointError(
            f"{name}.weight has values that are not finite, which {kind} has no place for; the file is damaged"
        )
