"""Which machine is this, and how fast does it multiply?

    python bench/machine.py

Every benchmark prints this line above its figures: a figure without its machine says little.
"""

import os
import platform


def machine_line(threads: int = 2) -> str:
    """Processor, cores, memory, versions, and the speed of matrix products in both number types."""
    import torch

    from pellucid.train.precision import matmul_gflops

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        speeds = {kind: matmul_gflops(kind, 1024) for kind in (torch.float32, torch.bfloat16)}
    finally:
        torch.set_num_threads(before)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{processor_name()}, {os.cpu_count()} cores, {memory:.0f} GiB; Python {platform.python_version()}, "
        f"torch {torch.__version__}; matrix products with {threads} threads: float32 {speeds[torch.float32]:.0f}, "
        f"bfloat16 {speeds[torch.bfloat16]:.0f} GFLOP/s; load {os.getloadavg()[0]:.1f}"
    )


def processor_name() -> str:
    """What the kernel calls it, with the two number formats that decide the speed of bfloat16."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            table = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return platform.processor() or platform.machine()
    table = {key.strip(): value.strip() for key, value in table.items()}
    flags = table.get("flags", "").split()
    special = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    name = table.get("model name", platform.machine())
    numbers = "/".join(table[key] for key in ("cpu family", "model", "stepping") if key in table)
    return f"{name} ({numbers}; {', '.join(special) or 'no AVX-512'})"


if __name__ == "__main__":
    print(machine_line())
