"""Jinja for templates from anywhere: sandboxed, immutable, bounded in output, loops and time."""

import json
import time
from collections.abc import Mapping
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pellucid.errors import DataError, RequestError

MAX_SECONDS = 10.0
MAX_LOOPS = 1_000_000
MAX_REPEAT = 1_000_000
"""Longest text or list that ``*`` may make, and largest power."""


class Refused(Exception):
    """The template called ``raise_exception``."""


class _Exceeded(Exception):
    """The template went over one of the bounds."""


def compile_template(source: str, origin: str) -> Template:
    """The template as transformers would compile it; DataError names the line where it is no valid Jinja."""
    try:
        return _Environment().from_string(source)
    except TemplateSyntaxError as error:
        raise DataError(f"{origin}: the chat template is broken in line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise DataError(f"{origin}: the chat template is nested too deeply") from None


def render(template: Template, variables: Mapping[str, Any], *, input_size: int, origin: str) -> str:
    """What the template makes of ``variables``.

    Args:
        input_size: characters in the messages; output may be 16 times as long plus a million.

    Raises:
        RequestError: the template refuses the messages, fails on them, or goes over a bound.
    """
    bounds = _Bounds()
    limit, size, parts = 1_000_000 + 16 * input_size, 0, []
    try:
        for part in template.generate({**variables, "pellucid_tick": bounds.tick}):
            bounds.tick()
            size += len(part)
            if size > limit:
                raise _Exceeded(f"more than {limit:,} characters")
            parts.append(part)
    except Refused as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from None
    except _Exceeded as error:
        raise RequestError(f"{origin}: the chat template was stopped at {error}") from None
    except Exception as error:  # whatever a foreign template does to messages that it was not written for
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise RequestError(f"{origin}: the chat template fails on these messages: {kind}{error}") from None
    return "".join(parts)


class _Bounds:
    def __init__(self) -> None:
        self._loops = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        self._loops += 1
        if self._loops > MAX_LOOPS:
            raise _Exceeded(f"{MAX_LOOPS:,} loops")
        if time.monotonic() > self._deadline:
            raise _Exceeded(f"{MAX_SECONDS:.0f} seconds")


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` puts ``pellucid_open`` and ``pellucid_close`` around its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own protocol)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Name(name, "load") for name in ("pellucid_open", "pellucid_close")]
        return nodes.CallBlock(self.call_method("_mark", list(marks)), [], [], body).set_lineno(line)

    def _mark(self, opening: str, closing: str, caller: Macro) -> str:
        return f"{opening}{caller()}{closing}"


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        loops: list[nodes.For | nodes.Macro] = [*template.find_all(nodes.For), *template.find_all(nodes.Macro)]
        for loop in loops:
            call = nodes.Call(nodes.Name("pellucid_tick", "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
        if (
            operator == "*"
            and any(hasattr(side, "__len__") for side in (left, right))
            and sizes[0] * sizes[1] > MAX_REPEAT
        ):
            raise _Exceeded(f"a repetition longer than {MAX_REPEAT:,}")
        if operator == "**" and max(abs(left), abs(right)) > 1000:
            raise _Exceeded("a power of a number above 1,000")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise Refused(message)
