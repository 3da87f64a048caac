"""The inspector: what engines hold and do at this moment, as JSON."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pellucid.inference.records import EngineStats, StepRecord
from pellucid.server.steps import Running

MAP_LETTERS = 4096
"""The longest map; where a cache has more blocks, one letter stands for several."""


def model_state(
    stats: EngineStats, page_size: int, tokens_per_s: float, blocks: str, requests: Iterable[Running]
) -> dict[str, Any]:
    """One model of `/debug/state`.

    Args:
        blocks: a letter for each, as `BlockPool.states` gives them.
    """
    seen = stats.reused + stats.prefilled
    letters, per_letter = page_map(blocks)
    return {
        "running": stats.running, "waiting": stats.waiting, "blocks": stats.blocks, "free": stats.free,
        "cached": stats.cached, "held": stats.held, "page_size": page_size, "tokens_per_s": round(tokens_per_s, 2),
        "prefix_hits": round(stats.reused / seen, 4) if seen else 0.0, "preemptions": stats.preemptions,
        "evictions": stats.evictions, "steps": stats.steps, "map": letters, "blocks_per_letter": per_letter,
        "requests": [
            {"id": r.id, "state": r.state, "prompt": r.prompt, "generated": r.generated, "reused": r.reused} for r in requests
        ],
    }  # fmt: skip


def page_map(blocks: str) -> tuple[str, int]:
    """At most `MAP_LETTERS` letters, and for how many blocks each stands: held if one of them is, else cached, else free."""
    per_letter = -(-len(blocks) // MAP_LETTERS)
    if per_letter <= 1:
        return blocks, 1
    groups = (blocks[i : i + per_letter] for i in range(0, len(blocks), per_letter))
    return "".join("h" if "h" in group else "c" if "c" in group else "f" for group in groups), per_letter


def step_lines(records: Iterable[StepRecord], since: int) -> list[dict[str, Any]]:
    """The steps after number ``since``."""
    return [asdict(record) for record in records if record.step > since]
