"""The kernels as other processors would have them: compiled for pairs of bfloat16, emulated, and for any processor at all."""

import subprocess
from contextlib import contextmanager

import pytest

from pellucid.kernels import attention, build, experts, linear

VARIANTS = {
    "this processor": None,
    "pairs of bfloat16, emulated": ("-march=native", "-DPELLUCID_EMULATE_PAIRS"),
    "any processor": (),
}


def compiled(name, folder):
    """The library of a variant."""
    flags = VARIANTS[name]
    if flags is None:
        return build.library()
    path = folder / "kernels.so"
    if not path.exists():
        fixed = [f for f in build.FLAGS if f not in ("-march=native", "-O3")]
        subprocess.run(["c++", "-O1", *fixed, *flags, "-shared", *map(str, build.SOURCES), "-o", str(path)], check=True)
    return build.load(path)


@contextmanager
def using(library):
    """Everything calls it meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, experts, linear):
            patch.setattr(module, "library", lambda: library)
        patch.setattr("pellucid.inference.fused.library", lambda: library)
        yield
