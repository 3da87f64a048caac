"""Whether a JSON schema that refers to itself has an instance that ends."""

from collections.abc import Iterator
from typing import Any

from pellucid.errors import RequestError

MAX_REFERENCES = 5_000
"""Different ones in a schema."""
MAX_LOOKS = 100_000
"""At places that are referred to, until it is known whether the root ends."""


def check_finite(schema: Any) -> None:
    """Refuse a schema whose every instance contains another instance, and so on without an end.

    Looks through ``$ref`` into the same document, ``allOf``, ``anyOf``, ``oneOf``, required properties and the items that an
    array must have. What it does not understand it takes to be finite.

    Raises:
        RequestError: there is such a schema at the root.
    """
    pointers = list(dict.fromkeys(["#", *_references(schema)]))[::-1]  # what is defined last tends to need the least
    if len(pointers) > MAX_REFERENCES:
        raise RequestError(
            f"json_schema refers to {len(pointers):,} places, at most {MAX_REFERENCES:,}; make it simpler"
        )
    finite: set[str] = set()  # grows to the least fixed point
    looks = MAX_LOOKS
    while True:
        before = len(finite)
        for pointer in pointers:
            if pointer not in finite and ((found := _resolve(schema, pointer)) is None or _is_finite(found[0], finite)):
                finite.add(pointer)
            looks -= 1
        if "#" in finite:
            return
        if len(finite) == before:
            raise RequestError("json_schema has no instance that ends: it requires itself over and over")
        if looks < 0:
            raise RequestError("json_schema refers from place to place too often to be checked; make it simpler")


def _is_finite(node: Any, finite: set[str]) -> bool:
    """Whether ``node`` has an instance, if those of the references in ``finite`` are known to."""
    if not isinstance(node, dict):
        return True
    reference = node.get("$ref")
    if isinstance(reference, str) and reference not in finite:
        return False
    if not all(_is_finite(part, finite) for part in _list(node.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        parts = _list(node.get(key))
        if parts and not any(_is_finite(part, finite) for part in parts):
            return False
    if node.get("type") in ("object", ["object"]):
        return all(_is_finite(part, finite) for part in _required_properties(node))
    if node.get("type") in ("array", ["array"]):
        return all(_is_finite(part, finite) for part in _required_items(node))
    return True


def _required_properties(node: dict[str, Any]) -> Iterator[Any]:
    properties = node.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    for name in _list(node.get("required")):
        yield properties.get(name) if isinstance(name, str) and name in properties else node.get("additionalProperties")


def _required_items(node: dict[str, Any]) -> Iterator[Any]:
    count = node.get("minItems", 0)
    if not isinstance(count, int):
        return
    first = _list(node.get("prefixItems"))
    yield from first[:count]
    if count > len(first):
        yield node.get("items")


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from _references(part)


def _resolve(schema: Any, pointer: str) -> tuple[Any] | None:
    """What a JSON pointer into the document names, None where it is another kind of reference or leads nowhere."""
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and part in schema:
            schema = schema[part]
        elif isinstance(schema, list) and part.isdigit() and int(part) < len(schema):
            schema = schema[int(part)]
        else:
            return None
    return (schema,)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
