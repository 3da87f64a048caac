"""What a person sees: results on stdout, progress and notices on stderr."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def notice(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One object on stdout."""
    print(json.dumps(value, ensure_ascii=False))


class Progress:
    """A bar on a terminal, a plain line every few seconds elsewhere, nothing if quiet. Use as a context manager.

    Args:
        label: what goes on.
        total: how far to go, or None if unknown.
    """

    EVERY_S = 5.0

    def __init__(self, label: str, total: float | None, *, quiet: bool = False) -> None:
        self.label, self.total, self.quiet = label, total, quiet
        self._update: Callable[[float, str], None] = lambda done, text: None
        self._stop: Callable[[], None] = lambda: None
        self._last = time.monotonic()

    def __enter__(self) -> "Progress":
        if not self.quiet:
            self._start_bar() if sys.stderr.isatty() else self._start_lines()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def update(self, done: float, text: str = "") -> None:
        """Show that ``done`` of ``total`` is reached; ``text`` holds further figures."""
        self._update(done, text)

    def _start_lines(self) -> None:
        def line(done: float, text: str) -> None:
            now = time.monotonic()
            if now - self._last >= self.EVERY_S or done == self.total:
                self._last = now
                share = f" {100 * done / self.total:3.0f} %" if self.total else ""
                notice(f"{self.label}{share} {text}".rstrip())

        self._update = line

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn(self.label), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(), console=Console(stderr=True),
        )  # fmt: skip
        bar.start()
        task = bar.add_task(self.label, total=self.total, text="")
        self._update = lambda done, text: bar.update(task, completed=done, text=text)
        self._stop = bar.stop
