"""Tables and quantities for the terminal. Colour only where there is a terminal and NO_COLOR is not set."""

import sys
from collections.abc import Sequence
from typing import TextIO

PIPE_WIDTH = 10_000
"""Columns where there is no terminal: a table that another program reads must not be cut."""


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None, file: TextIO | None = None
) -> None:
    """Print rows under column heads; columns that hold only numbers are aligned to the right.

    Cells are text as it is, never markup. ``file`` is standard output unless given.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = file if file is not None else sys.stdout
    console = Console(file=out, highlight=False, width=None if out.isatty() else PIPE_WIDTH)
    table = Table(title=title and Text(title), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        table.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(format_cell(value)) for value in row))
    console.print(table)


def format_cell(value: object) -> str:
    """A value as a person reads it: grouped digits, six significant ones of a float, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def format_count(count: float) -> str:
    """12600000 as "12.6M"."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size * 0.9995:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def format_bytes(size: float) -> str:
    """1572864 as "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def format_seconds(seconds: float) -> str:
    """3725 as "1 h 02 min", 65 as "1 min 05 s", 3.21 as "3.2 s"."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"
