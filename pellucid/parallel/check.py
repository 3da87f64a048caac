"""Before a collective, ranks compare what they are about to do, over the store that they met in.

Ranks that issue different collectives hang or take each other down inside the backend. Here they find out first,
and every one of them raises with both sides of the disagreement.

A check is O(1) store operations a rank, whatever their number W. Keys of the n-th one, under ``check/NAME/OPENING/n``:

    first     what the first rank to come is about to do; a rank that would do the same counts itself in `arrived`
    arrived   when it reaches W all agree; whoever brings it there deletes the keys of n - 1, which all have passed
    verdict   "agree" or "stop", written once; what ranks wait for
    sides     after "stop" only: one line from each rank that is here; the keys stay for those who come late
    said      how many lines those are
    complete  is there once they are W
    read      how many ranks have read them: the process of rank 0, often the store itself, ends only then
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pellucid.errors import RankError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MAX_GROUPS_SHOWN = 8

BRANCH_ADVICE = (
    "All ranks must take the same branch: decide from a value that every rank holds (the step, the configuration, "
    "a sum over ranks), not from a rank's own data, clock or files."
)
LEFT_ADVICE = "All ranks must run the same number of steps and batches. Where a rank failed, its own error is the cause of this one."


@dataclass(frozen=True, slots=True)
class Intent:
    """What a rank is about to do. All of it but the site must be the same on every rank."""

    op: str
    """ "all_reduce", "reduce_scatter", "all_to_all", "all_gather", "broadcast", "gather", "barrier" or "decide"."""
    tag: str
    dtype: str
    numel: int
    value: str = ""
    """Of a decision, as "save=True"."""
    site: str = ""
    """Where it is called, as "file:line"; shown, not compared."""

    def compared(self) -> str:
        return json.dumps([self.op, self.tag, self.dtype, self.numel, self.value])

    def __str__(self) -> str:
        named = self.value if self.value.startswith(f"{self.tag}=") else f"{self.tag} {self.value}".strip()
        moved = f" {self.dtype} x {self.numel:,}" if self.op not in ("barrier", "decide") else ""
        return f"{self.op} {named}{moved}" + (f" at {self.site}" if self.site else "")


class CollectiveCheck:
    """One rank's part in comparing the collectives of a group.

    Every rank of the group opens it, in the same order where several have the same name. A rank that takes long is
    waited for as long as it takes, cheaply. A rank that died without `leave` is for the launcher to notice; when the
    process that serves the store dies, the others raise.

    Args:
        store: of the group's ranks, of any kind. A FileStore keeps what is deleted on disk: about 0.1 kB a check and rank.
        patience_s: once ranks are known to disagree, how long to wait for the others' sides before raising without them.

    Raises:
        RankError: the store cannot be reached.
    """

    def __init__(self, store: "Store", rank: int, size: int, *, name: str = "world", patience_s: float = 1.5) -> None:
        self._store, self._rank, self._size, self._patience_s = store, rank, size, patience_s
        # waiting ranks ask at most 5,000 times a second, all together, once they have waited a while
        self._max_pause_s = max(0.02, size / 5000)
        self._next = 0
        """Number of the collective that comes next."""
        self._ended = ""
        """Why this rank takes no further part."""
        with self._store_needed("it could compare its first collective"):
            # a check opened a second time over the same store must not meet the keys of the first
            self._root = f"check/{name}/{store.add(f'check/{name}/openings/{rank}', 1)}"

    def before(self, intent: Intent) -> None:
        """Return once every rank is about to do the same as this one.

        Raises:
            RankError: ranks disagree, one has left, the store is gone, or this rank itself has left before.
        """
        if self._ended:
            raise RankError(f"rank {self._rank} {self._ended}, and may not go on to {intent}")
        with self._store_needed(str(intent)):
            if self._agreed(intent):
                self._next += 1
                return
            self._ended = "disagreed with other ranks"
            sides = self._exchange_sides({"intent": asdict(intent)})
        raise _disagreement(self._next, self._size, sides)

    def leave(self, reason: str) -> None:
        """Issue no more collectives. Ranks that wait for this one, now or later, raise with ``reason``.

        Does nothing a second time, or after `before` has raised. Never raises: others may be gone with the store.
        """
        if self._ended:
            return
        self._ended = f"left ({reason})"
        with suppress(RuntimeError):
            # interrupted while it waited, this rank may be counted in for the next one: then the one after is marked
            for number in (self._next, self._next + 1):
                self._say(self._key(number), {"left": reason})
                self._store.compare_set(f"{self._key(number)}/verdict", "", "stop")

    def _key(self, number: int) -> str:
        return f"{self._root}/{number}"

    def _agreed(self, intent: Intent) -> bool:
        """Announce ``intent``, wait for the verdict."""
        key, mine = self._key(self._next), intent.compared()
        if self._store.compare_set(f"{key}/first", "", mine) != mine.encode():
            self._store.compare_set(f"{key}/verdict", "", "stop")
            return False
        if self._store.add(f"{key}/arrived", 1) < self._size:
            self._wait_for(f"{key}/verdict")
            return self._store.get(f"{key}/verdict") == b"agree"
        if self._store.compare_set(f"{key}/verdict", "", "agree") != b"agree":
            return False  # somebody was interrupted after it had arrived, and left
        if self._next:
            for name in ("first", "arrived", "verdict"):
                self._store.delete_key(f"{self._key(self._next - 1)}/{name}")
        return True

    def _say(self, key: str, side: dict[str, object]) -> None:
        """Add this rank's side to the others'."""
        line = json.dumps({"rank": self._rank} | side) + "\n"
        self._store.append(f"{key}/sides", line)  # type: ignore[attr-defined]  # torch's stub lacks it
        if self._store.add(f"{key}/said", 1) == self._size:
            self._store.set(f"{key}/complete", "yes")

    def _exchange_sides(self, mine: dict[str, object]) -> list[dict[str, object]]:
        """Every rank's side of the collective at hand; without those of ranks that do not come in time."""
        key = self._key(self._next)
        self._say(key, mine)
        self._wait_for(f"{key}/complete", self._patience_s)
        sides = [json.loads(line) for line in self._store.get(f"{key}/sides").decode().splitlines()]
        num_read, num_here = self._store.add(f"{key}/read", 1), sum("intent" in side for side in sides)
        end = time.monotonic() + self._patience_s
        while self._rank == 0 and num_read < num_here and time.monotonic() < end:
            time.sleep(self._max_pause_s)
            num_read = self._store.add(f"{key}/read", 0)
        return sides

    def _wait_for(self, key: str, limit_s: float = math.inf) -> None:
        """Until ``key`` is there or the limit is over. Asks: the store's own wait keeps signals and other users out."""
        end, pause = time.monotonic() + limit_s, self._max_pause_s / 200
        while not self._store.check([key]) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(pause * 1.5, self._max_pause_s)

    @contextmanager
    def _store_needed(self, intent: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what every store raises, torch's DistError included
            self._ended = "lost the store"
            raise RankError(
                f"rank {self._rank} lost the store that ranks meet in before {intent} ({str(error).partition(chr(10))[0]}). "
                "The process that serves it, rank 0 or the launcher, has ended: its own error is the cause of this one."
            ) from error


def _disagreement(num_agreed: int, size: int, sides: list[dict[str, object]]) -> RankError:
    """The error that each rank raises: equal sides in one line, at most `MAX_GROUPS_SHOWN` of them, and what to do."""
    groups: dict[str, list[int]] = defaultdict(list)
    left = []
    for side in sides:
        rank, intent = side["rank"], side.get("intent")
        assert isinstance(rank, int)
        if isinstance(intent, dict):
            groups[str(Intent(**intent))].append(rank)
        else:
            groups[f"left: {side['left']}"].append(rank)
            left.append(rank)
    missing = set(range(size)).difference(*groups.values())
    if missing:
        groups["has not come this far" if len(missing) == 1 else "have not come this far"] = sorted(missing)
    shown = sorted(groups.items(), key=lambda group: min(group[1]))
    lines = [f"  {_ranks(ranks)}: {what}" for what, ranks in shown[:MAX_GROUPS_SHOWN]]
    if len(shown) > MAX_GROUPS_SHOWN:
        lines.append(f"  and {len(shown) - MAX_GROUPS_SHOWN} more sides, each different")
    lines.append(LEFT_ADVICE if left else BRANCH_ADVICE)
    head = f"ranks disagree about their next collective, after {num_agreed:,} in agreement:"
    return RankError("\n".join([head, *lines]), rank=left[0] if len(left) == 1 else None)


def _ranks(ranks: list[int]) -> str:
    """ "rank 3", or "ranks 0-2, 5"."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    named = ", ".join(str(a) if a == b else f"{a}{', ' if b == a + 1 else '-'}{b}" for a, b in ranges)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
