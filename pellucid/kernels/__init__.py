"""Kernels of our own for the CPU, in C++, compiled on first use where there is a compiler.

Without one, or with ``PELLUCID_KERNELS=off``, everything that uses them has a way through torch's operators; `missing` says
why they are not used. Each has a reference in torch beside it, which tests compare with.
"""

from pellucid.kernels.build import available, missing
from pellucid.kernels.linear import GROUP, KernelWeights, pack4, pack8, unpacked

__all__ = ["GROUP", "KernelWeights", "available", "missing", "pack4", "pack8", "unpacked"]
