"""What ranks have to agree on in a run, beside gradients. Each function is collective; alone, it is what it says."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from safetensors.torch import load, save
from torch import Tensor

from pellucid.errors import PellucidError, RankError
from pellucid.parallel import comm
from pellucid.parallel.parts import SavedTensors

T = TypeVar("T")

NOTHING_BYTES = len(json.dumps({"value": None}))
"""What a rank says in `on_every_rank` where its function returned None."""


def of_first_rank(value: str, *, tag: str) -> str:
    """The first rank's ``value``, on every rank."""
    return comm.all_gather_bytes(value.encode(), tag=tag)[0].decode()


def on_first_rank(function: Callable[[], T], *, tag: str) -> T | None:
    """What ``function`` gives on the first rank, None elsewhere; if it fails there, it fails everywhere.

    Raises:
        Exception, RankError: as `on_every_rank`.
    """
    result: T | None = None

    def run() -> None:
        nonlocal result
        if comm.rank() == 0:
            result = function()

    on_every_rank(run, tag=tag)
    return result


def on_every_rank(function: Callable[[], Any], *, tag: str) -> list[Any]:
    """What ``function`` gives on each rank, which JSON must be able to hold; if it fails on one, it fails on all.

    Raises:
        Exception: on a rank where ``function`` failed, what it raised.
        RankError: on the others, with the message and exit code of the first that failed.
    """
    failure: Exception | None = None
    said: dict[str, Any] = {}
    try:
        said["value"] = function()
    except PellucidError as error:
        failure, said = error, {"message": str(error), "exit_code": error.exit_code}
    except Exception as error:
        failure, said = error, {"message": f"{type(error).__name__}: {error}", "exit_code": 1}
    heard = gather_json(said, tag=tag)
    if failure is not None:
        raise failure
    for rank, other in enumerate(heard):
        if "message" in other:
            raise RankError(f"rank {rank}: {other['message']}", rank=rank, exit_code=other["exit_code"])
    return [other["value"] for other in heard]


def stop_reason(mine: str | None, *, by_callback: bool, writing: bool = False) -> tuple[str | None, bool, bool]:
    """Why the run ends after this step, if any rank wants that, whether a callback's wish, and whether nobody writes.

    Args:
        mine: why this rank wants to end; of several the first rank's reason is everybody's.
        writing: whether this rank is still writing its part of a checkpoint.
    """
    if comm.world_size() == 1:
        return mine, by_callback, not writing
    wants, writers = comm.all_reduce([float(mine is not None), float(writing)], tag="stop")
    if wants == 0:
        return None, False, writers == 0
    said = comm.all_gather_bytes(json.dumps([mine, by_callback]).encode(), tag="stop/reason")
    reason, called = next((r, c) for r, c in map(json.loads, said) if r is not None)
    return reason, called, writers == 0


def gather_json(value: Any, *, tag: str) -> list[Any]:
    """Every rank's ``value``, in rank order."""
    return [json.loads(text) for text in comm.all_gather_bytes(json.dumps(value).encode(), tag=tag)]


def gather_rng(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """The generator states of all ranks: the first rank's under their own names, rank r's under ``rank<r>/``."""
    if comm.world_size() == 1:
        return mine
    everybodys = [load(data) for data in comm.all_gather_bytes(save(mine), tag="save/rng")]
    return {
        f"rank{rank:05d}/{name}" if rank else name: value
        for rank, states in enumerate(everybodys)
        for name, value in states.items()
    }


def rng_of_rank(saved: SavedTensors, rank: int) -> dict[str, Tensor] | None:
    """This rank's part of what `gather_rng` gave; None where the run had fewer ranks."""
    prefix = f"rank{rank:05d}/" if rank else ""
    mine = [n for n in saved.keys() if n.startswith(prefix) and ("rank" in n) == (rank > 0)]  # noqa: SIM118
    return {n.removeprefix(prefix): saved.read(n).view(saved.shape(n)) for n in mine} or None
