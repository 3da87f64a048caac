"""Several sources as one row of documents."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pellucid.data.documents import Document, ReadLog
from pellucid.data.sources import Source


@dataclass(slots=True)
class Used:
    """How much of one source went in."""

    source: Source
    num_bytes: int = 0
    num_documents: int = 0
    exhausted: bool = False


class Measured(Protocol):
    """Anything a source yields."""

    @property
    def num_bytes(self) -> int: ...


Item = TypeVar("Item", bound=Measured)


def mix(
    sources: Sequence[Source], weights: Sequence[float] | None, log: ReadLog, used: list[Used]
) -> Iterator[Document]:
    """`mixed` of the documents of all sources."""
    return mixed(sources, weights, used, lambda source: source.documents(log))


def mixed(
    sources: Sequence[Source],
    weights: Sequence[float] | None,
    used: list[Used],
    read: Callable[[Source], Iterator[Item]],
) -> Iterator[Item]:
    """What ``read`` finds in all sources, in one order; fills ``used``, one entry a source, as it goes.

    Without weights: all of each source, one after another. With weights, positive and one a source: the next item
    comes from the source whose share of the bytes is furthest behind its weight, so that the shares hold at every
    point to within one item; it ends where the next source in turn has no more, and nothing is repeated.
    """
    used[:] = [Used(source) for source in sources]
    if weights is None:
        for entry in used:
            for item in read(entry.source):
                _count(entry, item)
                yield item
            entry.exhausted = True
        return
    streams = [read(source) for source in sources]
    while True:
        turn = min(range(len(used)), key=lambda i: used[i].num_bytes / weights[i])
        following = next(streams[turn], None)
        if following is None:
            used[turn].exhausted = True
            return
        _count(used[turn], following)
        yield following


def _count(entry: Used, item: Measured) -> None:
    entry.num_bytes += item.num_bytes
    entry.num_documents += 1
