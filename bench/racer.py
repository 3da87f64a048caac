"""A contender in a process of its own: a line to it, a line back, so that contenders take turns and nobody's caches are another's."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Racer:
    """A script of `contenders/` that runs, and says at first that it is ready.

    Args:
        name: for messages.
        script: in `contenders/`.
        words: its arguments.
        environment: of the process.
    """

    def __init__(
        self, name: str, script: str, words: Sequence[object], environment: Mapping[str, str] = os.environ
    ) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        command = [sys.executable, str(Path(__file__).with_name("contenders") / script), *map(str, words)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.first = self._answer()
        """What it said before it was asked anything."""

    def ask(self, line: object) -> Any:
        """What it says to a line, as JSON; SystemExit with the end of what it wrote to stderr if it died."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """The end of its input ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._errors.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            tail = self._errors.read()[-2000:]
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}:\n{tail}")
        return json.loads(line)
