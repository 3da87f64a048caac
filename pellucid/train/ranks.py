"""What ranks have to agree on in a run, beside gradients. Each function is collective; alone, it is what it says."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from safetensors.torch import load, save
from torch import Tensor

from pellucid.errors import PellucidError, RankError
from pellucid.parallel import comm

T = TypeVar("T")


def of_first_rank(value: str, *, tag: str) -> str:
    """The first rank's ``value``, on every rank."""
    return comm.all_gather_bytes(value.encode(), tag=tag)[0].decode()


def on_first_rank(function: Callable[[], T], *, tag: str) -> T | None:
    """What ``function`` gives on the first rank, None elsewhere; if it fails there, it fails everywhere.

    Raises:
        Exception: on the first rank what ``function`` raised.
        RankError: on the others, with its message and exit code.
    """
    result: T | None = None
    failure: Exception | None = None
    said: dict[str, Any] = {}
    if comm.rank() == 0:
        try:
            result = function()
        except PellucidError as error:
            failure, said = error, {"message": str(error), "exit_code": error.exit_code}
        except Exception as error:
            failure, said = error, {"message": f"{type(error).__name__}: {error}", "exit_code": 1}
    heard = json.loads(comm.all_gather_bytes(json.dumps(said).encode(), tag=tag)[0])
    if failure is not None:
        raise failure
    if heard:
        raise RankError(f"rank 0: {heard['message']}", rank=0, exit_code=heard["exit_code"])
    return result


def stop_reason(mine: str | None, *, by_callback: bool) -> tuple[str | None, bool]:
    """Why the run ends after this step, if any rank wants that: the first such rank's reason, and whether a callback's."""
    if comm.world_size() == 1:
        return mine, by_callback
    if comm.all_reduce(float(mine is not None), tag="stop") == 0:
        return None, False
    said = comm.all_gather_bytes(json.dumps([mine, by_callback]).encode(), tag="stop/reason")
    reason, called = next((r, c) for r, c in map(json.loads, said) if r is not None)
    return reason, called


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


def rng_of_rank(states: dict[str, Tensor], rank: int) -> dict[str, Tensor] | None:
    """This rank's part of what `gather_rng` gave; None where the run had fewer ranks."""
    prefix = f"rank{rank:05d}/" if rank else ""
    mine = {
        n.removeprefix(prefix): v for n, v in states.items() if n.startswith(prefix) and ("rank" in n) == (rank > 0)
    }
    return mine or None
