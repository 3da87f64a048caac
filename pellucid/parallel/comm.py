"""The only module that calls a collective. Each call names what it moves."""

import torch
import torch.distributed as dist


def all_reduce(value: float, *, tag: str) -> float:
    """The sum of a number over all ranks, in float64; the number itself where there is one process.

    Args:
        value: this rank's share.
        tag: what is summed, as the ledger names it ("tokens", "loss").
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
