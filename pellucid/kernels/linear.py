"""Linear layers as the kernels read them: packed to 4 and 8 bits, or plain.

Shapes: O outputs, I inputs, G groups of `GROUP` inputs, T tiles of `LANES` outputs. Sizes that do not fit are padded: outputs
with weights of zero, inputs by zeros that come in.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.kernels.build import check, library

GROUP = 32
"""Inputs that share a scale and a zero in 4 bits; the fewest that torch's kernel takes, too."""
LANES = 16
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The inputs, of 8, whose levels of 4 bits stand one after the other in a word, lowest bits first."""


class LinearStruct(ctypes.Structure):
    """`Linear` of kernels.cpp."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    )


@dataclass(frozen=True)
class KernelWeights:
    """Packed by `pack4` or `pack8`."""

    packed: Tensor
    """uint8 ``[T, G, 320]`` of 4 bits, levels, scales and zeros; ``[T, G, 512]`` of 8 bits, levels alone."""
    scales: Tensor
    """Of 8 bits, float32 ``[16 T]``; else empty."""
    outputs: int
    inputs: int

    @property
    def bits(self) -> int:
        """4 or 8."""
        return 8 if len(self.scales) else 4

    @property
    def nbytes(self) -> int:
        """Of weights and scales."""
        return self.packed.nbytes + self.scales.nbytes

    def struct(self, bias: Tensor | None = None, *, start: int = 0, outputs: int | None = None) -> LinearStruct:
        """For the kernels. Whoever holds it must hold the tensors.

        Args:
            bias: float32 ``[16 T]``.
            start, outputs: only these outputs, multiples of `LANES`.
        """
        tiles, groups, size = self.packed.shape
        if outputs is not None:
            tiles = outputs // LANES
        return LinearStruct(
            self.packed.data_ptr() + start // LANES * groups * size,
            self.scales.data_ptr() + 4 * start if len(self.scales) else None,
            None if bias is None else bias.data_ptr() + 4 * start,
            self.bits, groups, tiles, self.outputs if outputs is None else outputs,
        )  # fmt: skip

    def multiply(self, x: Tensor) -> Tensor:
        """``[N, I]`` -> ``[N, O]`` float32. Each row has the bits that it has alone."""
        out: Tensor = torch.ops.pellucid.packed_linear(x, self.packed, self.scales, self.outputs)
        return out


def pack4(levels: Tensor, scale_zero: Tensor, inputs: int) -> KernelWeights:
    """Of levels int32 ``[O, 32 G]`` of 0 ... 15 and bfloat16 ``[G, O, 2]``: ``(levels - 8) * scale + zero``."""
    outputs, groups = len(levels), len(scale_zero)
    padding = -outputs % LANES
    levels, scale_zero = F.pad(levels, (0, 0, 0, padding)), F.pad(scale_zero, (0, 0, 0, padding))
    nibbles = levels.view(-1, LANES, groups, 4, 8)[..., list(ORDER)]
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32)
    for i in range(8):
        words |= nibbles[..., i] << (4 * i)
    content = words.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)  # [T, G, 256]
    scales = scale_zero.view(groups, -1, LANES, 2).permute(1, 0, 3, 2).contiguous().view(torch.uint8).flatten(2)
    return KernelWeights(torch.cat([content, scales], -1), torch.empty(0), outputs, inputs)


def pack8(levels: Tensor, scale: Tensor) -> KernelWeights:
    """Of levels int8 ``[O, I]`` and scale ``[O]``: ``levels * scale``."""
    outputs, inputs = levels.shape
    padding = -outputs % LANES
    levels = F.pad(levels, (0, -inputs % GROUP, 0, padding))
    packed = levels.view(len(levels) // LANES, LANES, -1, 8, 4).permute(0, 2, 3, 1, 4).contiguous()
    return KernelWeights(packed.view(torch.uint8).flatten(2), F.pad(scale.float(), (0, padding)), outputs, inputs)


def unpacked(weights: KernelWeights) -> Tensor:
    """The numbers that packed ones stand for, float32 ``[O, I]``."""
    tiles, groups, _ = weights.packed.shape
    if weights.bits == 8:
        levels = weights.packed.view(torch.int8).view(tiles, groups, 8, LANES, 4).permute(0, 3, 1, 2, 4)
        whole = levels.reshape(tiles * LANES, -1).float() * weights.scales[:, None]
        return whole[: weights.outputs, : weights.inputs]
    words = weights.packed[..., :256].contiguous().view(torch.int32).view(tiles, groups, 4, LANES)
    scale, zero = (
        weights.packed[..., 256:].contiguous().view(torch.bfloat16).view(tiles, groups, 2, LANES).float().unbind(2)
    )
    nibbles = torch.stack([words >> 4 * ORDER.index(i) & 15 for i in range(8)], -1).permute(0, 3, 1, 2, 4)
    scale, zero = (x.permute(0, 2, 1)[..., None, None] for x in (scale, zero))
    whole = ((nibbles - 8) * scale + zero).reshape(tiles * LANES, -1)
    return whole[: weights.outputs, : weights.inputs]


def plain_struct(weight: Tensor, bias: Tensor | None = None) -> LinearStruct:
    """For the kernels: float32 or bfloat16 rows ``[O, I]`` as they stand, I a multiple of `GROUP`; ``bias`` float32 ``[16 T]``."""
    outputs, inputs = weight.shape
    assert weight.is_contiguous() and inputs % GROUP == 0 and weight.dtype in (torch.float32, torch.bfloat16)
    tiles = -(-outputs // LANES)
    at = None if bias is None else bias.data_ptr()
    return LinearStruct(weight.data_ptr(), None, at, 8 * weight.itemsize, inputs // GROUP, tiles, outputs)


def disagreement(library: ctypes.CDLL) -> str | None:
    """What a library computes otherwise than torch, in words: a small product of each kind of weights."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    x, plain, levels = drawn(13, 64), drawn(48, 64), torch.randint(16, (48, 64), generator=generator, dtype=torch.int32)
    plains = plain, plain.bfloat16()
    packed = pack4(levels, drawn(2, 48, 2).bfloat16(), 64), pack8(levels.to(torch.int8) - 8, drawn(48).bfloat16())
    kinds = [(p.bits, p.struct(), unpacked(p)) for p in packed]
    kinds += [(8 * w.itemsize, plain_struct(w), w.float()) for w in plains]
    for bits, layer, weight in kinds:
        rounded = x.bfloat16().float() if library.pellucid_pairs() and bits in (4, 16) else x
        rows, out = x.clone(), x.new_empty(13, 48)
        status = library.pellucid_linear(ctypes.addressof(layer), rows.data_ptr(), 13, out.data_ptr(), 1)
        expected = rounded.double() @ weight.double().T
        if status or not bool((out - expected).abs().max() < 1e-4 * expected.abs().max()):
            return f"products of weights of {bits} bits are not torch's"
    return None


torch.library.define("pellucid::packed_linear", "(Tensor x, Tensor packed, Tensor scales, int outputs) -> Tensor")


@torch.library.impl("pellucid::packed_linear", "CPU")
def _packed_linear(x: Tensor, packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    tiles, groups, _ = packed.shape
    rows = F.pad(x.float(), (0, groups * GROUP - x.shape[1])).contiguous()
    out = rows.new_empty(len(rows), tiles * LANES)
    layer, threads = KernelWeights(packed, scales, outputs, x.shape[1]).struct(), torch.get_num_threads()
    check(library().pellucid_linear(ctypes.addressof(layer), rows.data_ptr(), len(rows), out.data_ptr(), threads))
    return out[:, :outputs]


torch.library.define("pellucid::bfloat16_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.impl("pellucid::bfloat16_linear", "CPU")
def _bfloat16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows ``[N, I]``, ``weight [O, I]``, I a multiple of `GROUP`, and ``bias [O]``, added up in float32, rounded: ``[N, O]``."""
    x, weight = x.contiguous(), weight.contiguous()
    outputs = len(weight)
    out: Tensor = _bfloat16_shape(x, weight, bias)
    padded = None if bias is None else F.pad(bias.float(), (0, -outputs % LANES))
    layer, threads = plain_struct(weight, padded), torch.get_num_threads()
    check(library().pellucid_linear_bfloat16(ctypes.addressof(layer), x.data_ptr(), len(x), out.data_ptr(), threads))
    return out


@torch.library.register_fake("pellucid::bfloat16_linear")  # type: ignore[untyped-decorator]
def _bfloat16_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert x.dtype == weight.dtype == torch.bfloat16
    return x.new_empty(len(x), len(weight))


@torch.library.register_fake("pellucid::packed_linear")  # type: ignore[untyped-decorator]
def _shape(x: Tensor, packed: Tensor, scales: Tensor, outputs: int) -> Tensor:
    return x.new_empty(len(x), packed.shape[0] * LANES, dtype=torch.float32)[:, :outputs]
