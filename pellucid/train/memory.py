"""How much memory there is, and whether a model can be built in it."""

import os

import torch

from pellucid.config import ModelConfig
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.parallel import comm

GIB = 2**30


def available_bytes(device: torch.device) -> int | None:
    """Free bytes for this rank: the ranks of a machine share its memory, and each has its own GPU. None: nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _free_bytes()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", comm.world_size())) if comm.world_size() > 1 else 1
    return None if free is None else free // here


def refuse_unbuildable(shape: ModelConfig) -> None:
    """`ConfigError` where the weights alone do not fit: a model is built whole and in float32, on every rank.

    Ranks build at their own time, so that what others have taken is not free any more; each is measured against all that is.
    """
    free = _free_bytes()
    need = 4 * Transformer(shape, device="meta").num_parameters()
    if free is not None and need > free:
        raise ConfigError(
            f"the weights of this model alone need {need / GIB:,.1f} GiB in float32, and {free / GIB:,.1f} GiB are free; take a "
            "smaller one: model.hidden_size, model.intermediate_size, model.num_hidden_layers"
        )


def _free_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            table = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(table["MemAvailable"].split()[0]) * 1024
