"""One grammar for a whole answer: reasoning, then what was asked for."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pellucid.errors import RequestError
from pellucid.inference.constraints import JSON_OPTIONS, GrammarConstraint, GrammarKind
from pellucid.server.generation import Grammar, Tool
from pellucid.server.reasoning import Markers, Where
from pellucid.server.tools import ToolFormat
from pellucid.text_constraints import make_constraint
from pellucid.tokenizer import Tokenizer


def compose(
    answer: Grammar | None,
    calls: Mapping[str, str],
    *,
    separator: str | None,
    reasoning: tuple[Markers, Where] | None,
) -> Grammar:
    """The grammar of an answer that is ``answer``, or calls, after the reasoning.

    Args:
        answer: None: calls only.
        calls: from `call_rules`.
        separator: between calls; None: one call only.
        reasoning: the markers, and where the answer begins; None: none can be written.
    """
    before = ["think"] if reasoning and reasoning[1] == "inside" else ["think?"] if reasoning else []
    ways = [name for name, wanted in (("answer", answer), ("calls", calls)) if wanted]
    rules = [f"start: {' '.join([*before, '(' + ' | '.join(ways) + ')'])}"]
    if reasoning:
        markers, where = reasoning
        opened = [] if where == "inside" else [_quoted(markers.open)]
        rules.append(f"think: {' '.join([*opened, 'thoughts', 'SPACE'])}")
        rules.append(f"thoughts[suffix={_quoted(markers.close)}]: /(.|\\n)*/")
        rules.append(r"SPACE: /[ \t\r\n]{0,8}/")
    if answer is not None:
        rules.append(f"answer: {_inner(answer)}")
    if calls:
        further = "" if separator is None else f" ({_quoted(separator)} call)*"
        rules += [f"calls: call{further}", f"call: {' | '.join(calls)}"]
        rules += [f"{name}: {rule}" for name, rule in calls.items()]
    return Grammar("lark", "\n".join(rules) + "\n")


def call_rules(tools: Sequence[Tool], form: ToolFormat, tokenizer: Tokenizer) -> dict[str, str]:
    """A rule for each function, by the rule's name: a call whose arguments obey the schema.

    Raises:
        RequestError: the parameters of a function are no schema of objects, or one that cannot be enforced.
    """
    rules = {}
    for i, tool in enumerate(tools):
        schema = _object_schema(tool)
        try:
            constraint("json_schema", json.dumps(schema), tokenizer)
        except RequestError as error:
            raise RequestError(f"tools cannot be forced: the parameters of {tool.name}: {error}") from None
        opening = "" if form.bare else f"{form.open}\n"
        closing = "}" if form.close is None or form.bare else f"}}\n{form.close}"
        head = f'{opening}{{"name": {json.dumps(tool.name)}, "{form.arguments}": '
        rules[f"call_{i}"] = f"{_quoted(head)} {_json(schema)} {_quoted(closing)}"
    return rules


@lru_cache(maxsize=64)
def constraint(kind: GrammarKind, text: str | None, tokenizer: Tokenizer) -> GrammarConstraint:
    """`make_constraint`; what it made is kept, since agents send the same tools again and again."""
    return make_constraint(kind, text, tokenizer)


def _object_schema(tool: Tool) -> dict[str, Any]:
    schema = {"type": "object", **tool.parameters}
    if schema["type"] != "object":
        raise RequestError(
            f"tools cannot be forced: the parameters of {tool.name} must be of type object, got {schema['type']!r}"
        )
    return schema


def _inner(grammar: Grammar) -> str:
    """A grammar as a part of another one."""
    match grammar.kind:
        case "json_object":
            return _json({"type": "object"})
        case "json_schema":
            schema = json.loads(grammar.text or "")
            return _json(schema if isinstance(schema, dict) else {"allOf": [schema]})
        case "regex":
            slashes = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", grammar.text or "", flags=re.DOTALL)
            return "/" + slashes.replace("\n", r"\n") + "/"
        case "lark":
            return f"%lark {{\n{grammar.text}\n}}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
