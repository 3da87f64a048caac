"""A step drawn in characters: a line a lane and a line a bucket, as wide as the terminal."""

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from pellucid.report.chart import ticks
from pellucid.report.trace_ledger import Collective, RankStep, Span
from pellucid.report.trace_step import Interval, format_time, parts, standstill, totals

if TYPE_CHECKING:
    from rich.text import Text

NO_TERMINAL_WIDTH = 100
MAX_TAGS = 12
"""Lines of communication a rank; more tags than that share the lines of their first parts."""


class Marks(NamedTuple):
    """The characters of computation, and of communication by what the rank does meanwhile (`trace_step.parts`)."""

    work: str
    hidden: str
    behind: str
    exposed: str


BLOCKS = Marks("▆", "░", "▒", "█")
ASCII = Marks("=", ".", "+", "#")
"""Where the output cannot carry blocks."""
COLOURS = {
    "forward": "blue",
    "backward": "magenta",
    "optimizer": "green",
    "hidden": "yellow",
    "behind": "red",
    "exposed": "bold red",
}


def print_picture(ranks: Sequence[RankStep], file: TextIO) -> None:
    """Draw the ranks below each other over the same stretch of time.

    Colour only helps: a figure in a lane is the micro-batch that begins there, and characters tell hidden from exposed.
    """
    from rich.console import Console

    columns = shutil.get_terminal_size((NO_TERMINAL_WIDTH, 24)).columns
    console = Console(file=file, highlight=False, width=columns)
    marks = BLOCKS
    try:
        "".join(BLOCKS).encode(file.encoding or "utf-8")
    except UnicodeEncodeError:
        marks = ASCII
    for line in draw(ranks, columns, marks):
        console.print(line)


def draw(ranks: Sequence[RankStep], columns: int, marks: Marks) -> "list[Text]":
    """The lines of the picture; those of the drawing are no longer than ``columns``, words may be folded."""
    from rich.text import Text

    window = min(rank.begin for rank in ranks), max(rank.end for rank in ranks)
    lanes = [_lanes(rank) for rank in ranks]
    margin = min(max(len(name) for lane in lanes for name in lane) + 2, max(2, columns // 3))
    canvas = Canvas(window, max(8, columns - margin), marks)
    axis = Text(" " * margin + canvas.axis(), style="dim")
    lines: list[Text] = []
    for rank, lane in zip(ranks, lanes, strict=True):
        lines += [Text(_heading(rank), style="bold"), axis]
        still = standstill(rank)
        for name, items in lane.items():
            lines.append(Text(f"{name[: margin - 2]:<{margin}}") + canvas.lane(items, still))
        lines.append(Text())
    key = (
        f"{marks.hidden} hidden: the rank goes on   {marks.behind} behind: it stands still for another   "
        f"{marks.exposed} exposed: it stands still for this one"
    )
    return [*lines, Text(key, style="dim")]


class Canvas:
    """A stretch of time laid over columns of characters."""

    def __init__(self, window: Interval, columns: int, marks: Marks) -> None:
        self.begin, self.length = window[0], (window[1] - window[0]) or 1.0
        self.columns, self.marks = columns, marks

    def lane(self, items: Sequence[Span | Collective], still: Sequence[Interval]) -> "Text":
        """One line; where collectives share a column, what the rank stood still for is seen."""
        from rich.text import Text

        cells = [(" ", "")] * self.columns
        for item in items:
            if isinstance(item, Span):
                start, stop = self._range(item.t_begin, item.t_end)
                cells[start:stop] = [(self.marks.work, COLOURS.get(item.phase, ""))] * (stop - start)
                if item.phase != "optimizer":
                    cells[start] = (str(item.micro % 10), COLOURS.get(item.phase, ""))
            else:
                self._collective(item, still, cells)
        return Text.assemble(*cells)

    def axis(self) -> str:
        """Round times above their columns."""
        line = ""
        for at in ticks(self.begin, self.begin + self.length, max(2, self.columns // 14)):
            column, text = self._column(at), format_time(at)
            if column >= len(line) + 2 * bool(line) and column + len(text) <= self.columns:
                line = f"{line:<{column}}{text}"
        return line

    def _collective(self, event: Collective, still: Sequence[Interval], cells: list[tuple[str, str]]) -> None:
        start, stop = self._range(*event.life)
        cut = parts(event, still) or [("hidden", event.life)]
        for column in range(start, stop):
            left = self.begin + column * self.length / self.columns
            right = left + self.length / self.columns
            # a column shows what it holds most of
            kind = max(cut, key=lambda part: min(right, part[1][1]) - max(left, part[1][0]))[0]
            mark = getattr(self.marks, kind)
            if cells[column][0] not in self.marks or self.marks.index(mark) > self.marks.index(cells[column][0]):
                cells[column] = mark, COLOURS[kind]

    def _range(self, begin: float, end: float) -> tuple[int, int]:
        start = self._column(begin)
        return start, max(start + 1, min(self.columns, round((end - self.begin) / self.length * self.columns)))

    def _column(self, time: float) -> int:
        return min(self.columns - 1, max(0, int((time - self.begin) / self.length * self.columns)))


def _lanes(rank: RankStep) -> dict[str, list[Span | Collective]]:
    """Computation by phase, then communication by tag, in the order in which each began."""
    lanes: dict[str, list[Span | Collective]] = {"forward": [], "backward": [], "optimizer": []}
    for span in rank.spans:
        lanes.setdefault(span.phase, []).append(span)
    events = sorted(rank.collectives, key=lambda event: event.t_issue)
    many = len({event.tag for event in events}) > MAX_TAGS
    for event in events:
        lanes.setdefault(event.tag.split("/")[0] if many else event.tag, []).append(event)
    return {name: items for name, items in lanes.items() if items}


def _heading(rank: RankStep) -> str:
    sums = totals(rank)
    return (
        f"rank {rank.rank}  step {rank.step}  {format_time(sums.step_s)}, communication {format_time(sums.communication_s)}, "
        f"exposed {format_time(sums.exposed_s)} ({sums.exposed_share:.0%})"
    )
