"""How large the values of a template may become, how often it may loop and how long it may take.

No value of a template weighs more than a limit (`weight`), and all that it makes not more than `MAX_MADE` times as much. What
an operation makes is weighed when it is there; one that could make far more than it is given is asked before (`growth`).
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace

MAX_SECONDS = 10.0
MAX_LOOPS = 1_000_000
MAX_SIZE, PER_CHARACTER = 1_000_000, 16
"""Weight of a value, and length of the output: so much at least, and so much for each character in the messages."""
MAX_REPEAT = 1_000_000
"""The heaviest text or list that ``*`` may make, and the most bits of a number."""
MAX_MADE = 256
"""Times the limit of one value that all together may weigh."""


class Exceeded(Exception):
    """The template went over one of the bounds."""


class Bounds:
    """Of one rendering; of values up to ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit, self._left, self._loops = limit, MAX_MADE * limit, 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        """Once more around a loop."""
        self._loops += 1
        if self._loops > MAX_LOOPS:
            raise Exceeded(f"{MAX_LOOPS:,} loops")
        self._watch()

    def expect(self, size: int) -> None:
        """Something as large as this is about to be made."""
        if size > self.limit:
            raise Exceeded(f"more than {self.limit:,} characters")

    def made(self, value: Any) -> Any:
        """``value``, which has just been made."""
        if isinstance(value, str):
            size = len(value)
        elif value is None or isinstance(value, bool):
            return value
        elif isinstance(value, Iterator):
            return self.each(value)
        else:
            size = weight(value, self.limit)
        self._left -= size
        if size > self.limit:
            self.expect(size)
        if self._left < 0:
            raise Exceeded(f"more than {MAX_MADE * self.limit:,} characters in all that it makes")
        self._watch()
        return value

    def each(self, values: Any) -> Iterator[Any]:
        """What a filter takes or gives one by one."""
        for value in values:
            self.tick()
            yield value

    def _watch(self) -> None:
        if time.monotonic() > self._deadline:
            raise Exceeded(f"{MAX_SECONDS:.0f} seconds")


_current: ContextVar[Bounds] = ContextVar("bounds")
current = _current.get
"""The bounds of the rendering, or of the compilation, in which this is called."""


@contextmanager
def bounded(input_size: int = 0) -> Iterator[Bounds]:
    """Inside, templates are rendered (messages of so many characters) or compiled under new bounds."""
    token = _current.set(Bounds(MAX_SIZE + PER_CHARACTER * input_size))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def weight(value: Any, limit: int) -> int:
    """Characters, elements and digits in a value, however deep; counted up to a little more than ``limit``."""
    total, rest = 0, [value]
    while rest and total <= limit:
        value = rest.pop()
        if isinstance(value, Namespace):
            value = vars_of(value)
        if isinstance(value, str | bytes | range):
            total += len(value)
        elif isinstance(value, int):
            total += 1 + value.bit_length() // 3
        elif isinstance(value, list | tuple | dict):
            total += 1 + len(value)
            if total <= limit:
                rest += value
                rest += value.values() if isinstance(value, dict) else ()
        else:
            total += 1
    return total


def vars_of(namespace: Namespace) -> dict[str, Any]:
    """What a template has put there."""
    return dict(object.__getattribute__(namespace, "_Namespace__attrs"))


def product(left: Any, right: Any) -> None:
    """What ``left * right`` may be asked for."""
    bits = [side.bit_length() for side in (left, right) if isinstance(side, int)]
    if len(bits) == 2 and sum(bits) > MAX_REPEAT:
        raise Exceeded(f"a number of more than {MAX_REPEAT:,} bits")
    for side, times in ((left, right), (right, left)):
        if hasattr(side, "__len__") and isinstance(times, int) and weight(side, MAX_REPEAT) * times > MAX_REPEAT:
            raise Exceeded(f"a repetition longer than {MAX_REPEAT:,}")


def power(left: Any, right: Any) -> None:
    """What ``left ** right`` may be asked for."""
    if max(abs(left), abs(right)) > 1000:
        raise Exceeded("a power of a number above 1,000")


_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")


def printf(text: Any, values: Any) -> int:
    """About the most characters of ``text % values`` beside those that both have."""
    text = text.decode("latin-1") if isinstance(text, bytes) else text
    if re.search(r"%\([^)]*\(", text):
        raise Exceeded("a format with a bracket in a name")
    found = _CONVERSION.findall(text)
    size = sum(int(digits) for pair in found for digits in pair if digits not in ("", "*"))
    if any("*" in pair for pair in found):  # a value is a width
        size += sum(abs(n) for n in (values if isinstance(values, tuple) else (values,)) if isinstance(n, int))
    if isinstance(values, dict):  # which may be said again and again
        size += len(found) * max((weight(value, MAX_REPEAT) for value in values.values()), default=0)
    return size


class _Fields:
    """Weighs each field of a ``str.format``."""

    size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        bounds = current()
        bounds.expect(sum(map(int, re.findall(r"\d+", format_spec))))
        text = super().format_field(value, format_spec)  # type: ignore[misc]
        self.size += len(text)
        bounds.expect(self.size)
        return text


class Formatter(_Fields, SandboxedFormatter):
    """Of ``str.format``."""


class EscapeFormatter(_Fields, SandboxedEscapeFormatter):
    """Of ``Markup.format``."""


_GROWING = {
    "batch", "center", "expandtabs", "format", "indent", "join", "ljust", "pprint", "replace", "rjust", "round", "slice", "sum",
    "to_bytes", "translate", "urlize", "wordwrap", "zfill",
}  # fmt: skip


def growth(name: str, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """About the most that a filter of ``value``, or a method of it, makes beyond a few times what it is given."""
    if name not in _GROWING:
        return 0
    given = [*args, *kwargs.values()]
    number = max((abs(n) for n in given if isinstance(n, int)), default=0)
    text = max((len(t) for t in given if isinstance(t, str | bytes)), default=0)
    match name:
        case "batch" | "center" | "ljust" | "rjust" | "round" | "slice" | "to_bytes" | "zfill":
            return number
        case "expandtabs":
            return _count(value, "\t") * (number or 8)
        case "indent":
            return (_count(value, "\n") + 1) * max(number, text)
        case "replace":
            old, new, *_ = (*args, *(kwargs[key] for key in ("old", "new") if key in kwargs), "", "")
            return _count(value, old) * _length(new)
        case "join":
            return _length(value) * max(map(_length, given), default=0)
        case "translate" | "urlize" | "wordwrap":
            return _length(value) * max((weight(each, MAX_REPEAT) for each in given), default=0)
        case "format":  # the filter
            return printf(value if isinstance(value, str | bytes) else str(value), kwargs or tuple(args))
        case "pprint":
            return 16 * weight(value, MAX_REPEAT)  # it indents
        case "sum" if not all(isinstance(n, int | float | str) for n in given):
            raise Exceeded("a sum of what are no numbers")
    return 0


def _count(value: Any, part: Any) -> int:
    """How often ``part`` stands in a value."""
    if isinstance(value, bytes):
        return value.count(part.encode() if isinstance(part, str) else part)
    return str(value).count(str(part))


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else len(str(value))
