"""Jinja for templates from anywhere: sandboxed, immutable, bounded in output, loops and time."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from pellucid.errors import DataError, RequestError
from pellucid.tokenizer.bounds import (
    EscapeFormatter,
    Exceeded,
    Formatter,
    bounded,
    current,
    growth,
    power,
    printf,
    product,
)


class Refused(Exception):
    """The template called ``raise_exception``."""


def compile_template(source: str, origin: str) -> Template:
    """The template as transformers would compile it; DataError names the line where it is no valid Jinja."""
    try:
        with bounded():  # constants are computed at once
            return _Environment().from_string(source)
    except TemplateSyntaxError as error:
        raise DataError(f"{origin}: the chat template is broken in line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise DataError(f"{origin}: the chat template is nested too deeply") from None


def render(template: Template, variables: Mapping[str, Any], *, input_size: int, origin: str) -> str:
    """What the template makes of ``variables``.

    Args:
        input_size: characters in the messages; output, and each value on the way, may be 16 times as long plus a million.

    Raises:
        RequestError: the template refuses the messages, fails on them, or goes over a bound.
    """
    parts: list[str] = []
    try:
        with bounded(input_size) as bounds:
            size = 0
            for part in template.generate(variables):
                bounds.tick()
                size += len(part)
                bounds.expect(size)
                parts.append(part)
    except Refused as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from None
    except Exceeded as error:
        raise RequestError(f"{origin}: the chat template was stopped at {error}") from None
    except Exception as error:  # whatever a foreign template does to messages that it was not written for
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise RequestError(f"{origin}: the chat template fails on these messages: {kind}{error}") from None
    return "".join(parts)


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


class _Weighed(NodeTransformer):
    """Has a template say what it makes where Jinja would not: in loops, by ``~``, and in lists of what is no constant."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("pellucid_concat", node.nodes)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        weighed = getattr(node, "ctx", "load") == "load" and node.find(nodes.Name) is not None
        return _call("pellucid_made", [node]) if weighed else node

    visit_Tuple = visit_Dict = visit_List

    def visit_For(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("pellucid_tick", [])).set_lineno(node.lineno))
        return node

    visit_Macro = visit_For


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    """Of the environment's own, which no variable of a template can stand before."""
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=self.pellucid_made,
        )  # fmt: skip
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, filter_) for name, filter_ in self.filters.items()}
        self.globals["raise_exception"] = _raise
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Weighed().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call of anything, by a template."""
        bounds, method = current(), getattr(obj, "__wrapped__", obj)
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, str) and name in ("format", "format_map"):
            formatter = EscapeFormatter(self, escape=owner.escape) if isinstance(owner, Markup) else Formatter(self)
            given = (args, kwargs) if name == "format" else ((), *args)
            return bounds.made(type(owner)(formatter.vformat(owner, *given)))
        if isinstance(owner, str | bytes | int):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            bounds.expect(growth(name, owner, args, kwargs))
        return bounds.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A binary operation of `intercepted_binops`."""
        if operator == "*":
            product(left, right)
        elif operator == "**":
            power(left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            current().expect(printf(left, right))
        return current().made(super().call_binop(context, operator, left, right))

    def pellucid_tick(self) -> None:
        current().tick()

    def pellucid_made(self, value: Any) -> Any:
        return current().made(value)

    def pellucid_concat(self, *values: Any) -> str:
        return "".join(map(str, map(current().made, values)))


_ONE_BY_ONE = frozenset({"map", "reject", "rejectattr", "select", "selectattr", "unique"})


def _bounded_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is asked for and weighed."""

    @functools.wraps(filter_)  # what it is to be given beside the value, too
    def asked(*args: Any, **kwargs: Any) -> Any:
        bounds, start = current(), int(isinstance(args[0], Environment | EvalContext | Context))
        value, given = args[start], args[start + 1 :]
        if name in _ONE_BY_ONE and isinstance(value, list | tuple | range):
            value = bounds.each(value)
        elif name in ("join", "sum") and isinstance(value, Iterator):
            value = list(value)
        bounds.expect(growth(name, value, given, kwargs))
        return bounds.made(filter_(*args[:start], value, *given, **kwargs))

    return asked


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    if indent is None and separators is None:
        return json.dumps(value, **options)  # type: ignore[arg-type]
    if isinstance(indent, int):
        current().expect(indent)
    parts, size = [], 0
    for part in json.JSONEncoder(**options).iterencode(value):  # type: ignore[arg-type]
        size += len(part)
        current().expect(size)
        parts.append(part)
    return "".join(parts)


def _raise(message: str) -> None:
    raise Refused(message)
