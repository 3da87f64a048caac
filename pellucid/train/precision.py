"""Which number type the matrix products run in."""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from pellucid.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """A number type by name; "auto" is bfloat16 where the device is fast at it, else float32."""
    if name == "auto":
        return torch.bfloat16 if bf16_is_fast(device) else torch.float32
    if name == "float16" and device.type == "cpu":
        raise ConfigError('train.dtype "float16" is for GPUs; on cpu use "bfloat16", "float32" or "auto"')
    return DTYPES[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Run matrix products in ``dtype``; weights stay float32."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


@cache
def bf16_is_fast(device: torch.device) -> bool:
    """Whether a bfloat16 matrix product beats a float32 one by a clear margin; measured on cpu, 0.1 s."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    return matmul_gflops(torch.bfloat16) > 1.2 * matmul_gflops(torch.float32)


def matmul_gflops(dtype: torch.dtype, size: int = 512) -> float:
    """Best of a few square products on the CPU, in GFLOP/s."""
    a = torch.ones(size, size, dtype=dtype)
    best = math.inf
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9
