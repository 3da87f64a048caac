"""What an engine's options amount to for a model on this machine."""

import logging
import math
import os

import torch

from pellucid.errors import ConfigError
from pellucid.inference.paged import bytes_per_token
from pellucid.inference.probe import exactness_problem
from pellucid.model import Transformer

logger = logging.getLogger("pellucid")

BOOKS = 64
"""Bytes of the books that are kept of a block, about."""


def num_blocks(model: Transformer, kv_gb: float, page_size: int, dtype: torch.dtype) -> int:
    """Blocks of so many tokens in the budget; `ConfigError` where there is no room for one, or the machine has less memory."""
    block = page_size * bytes_per_token(model.kv_specs(), dtype)
    blocks = int(kv_gb * 1e9) // block if 0 < kv_gb < math.inf else 0
    if blocks < 1:
        raise ConfigError(f"kv_gb {kv_gb} has no room for a block of {page_size} tokens ({block:,} bytes); raise it")
    memory = _memory(model.model.embed_tokens.weight.device)
    if memory is not None and blocks * (block + BOOKS) > memory:
        raise ConfigError(
            f"a cache of {kv_gb:,.1f} GB for keys and values was asked for, and the machine has {memory / 1e9:,.1f} GB; lower "
            "kv_gb, or where the model's window makes it so large, max_position_embeddings in its config.json"
        )
    return blocks


def _memory(device: torch.device) -> int | None:
    """Bytes that a device has; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_options(
    page_size: int, max_running: int, token_budget: int, max_waiting: int, preempt: str, speculate: int
) -> None:
    """`ConfigError` that names the first value out of range."""
    whole = {
        "page_size": page_size,
        "max_running": max_running,
        "token_budget": token_budget,
        "max_waiting": max_waiting,
    }
    for name, value in whole.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if speculate < 0:
        raise ConfigError(f"speculate must not be negative, got {speculate}")
    if preempt not in ("copy", "recompute"):
        raise ConfigError(f'preempt must be "copy" or "recompute", got {preempt!r}')


def can_be_exact(model: Transformer, kv_dtype: torch.dtype, page_size: int) -> bool:
    """Whether this machine and model hold what ``exact`` promises; says so where not."""
    device = model.model.embed_tokens.weight.device
    on_cpu = device.type == "cpu"
    problem = (
        exactness_problem(model, kv_dtype=kv_dtype, page_size=page_size) if on_cpu else f"the model is on {device}"
    )
    if problem is not None:
        logger.warning("exact=True does not hold here, and the engine runs with exact=False: %s", problem)
    return problem is None
