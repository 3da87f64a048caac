"""Several sources as one row of documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pellucid.data.documents import Document, ReadLog
from pellucid.data.sources import Source


@dataclass(slots=True)
class Used:
    """How much of one source went in."""

    source: Source
    num_bytes: int = 0
    num_documents: int = 0
    exhausted: bool = False


def mix(
    sources: Sequence[Source], weights: Sequence[float] | None, log: ReadLog, used: list[Used]
) -> Iterator[Document]:
    """The documents of all sources in one order; fills ``used``, one entry a source, as it goes.

    Without weights: all of each source, one after another. With weights, positive and one a source: the next document
    comes from the source whose share of the text bytes is furthest behind its weight, so that the shares hold at every
    point to within one document; it ends where the next source in turn has no more, and nothing is repeated.
    """
    used[:] = [Used(source) for source in sources]
    if weights is None:
        for entry in used:
            for document in entry.source.documents(log):
                _count(entry, document)
                yield document
            entry.exhausted = True
        return
    streams = [source.documents(log) for source in sources]
    while True:
        turn = min(range(len(used)), key=lambda i: used[i].num_bytes / weights[i])
        following = next(streams[turn], None)
        if following is None:
            used[turn].exhausted = True
            return
        _count(used[turn], following)
        yield following


def _count(entry: Used, document: Document) -> None:
    entry.num_bytes += document.num_bytes
    entry.num_documents += 1
