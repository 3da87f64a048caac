"""Bodies as clients send them: bytes to a JSON object, and an object read field by field.

Null is the same as absent, everywhere. A field of the wrong type or out of range is an `ApiError` that names its path;
fields that nobody reads are ignored, and `ignored_fields` names them.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pellucid.server.errors import ApiError, invalid, too_large

MAX_DEPTH = 64
"""Lists and objects inside each other."""
MAX_BYTES = 16_000_000

D = TypeVar("D")


def decode_body(data: bytes, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The JSON object in a body. Of a key that is given twice the last value counts, as everywhere.

    Raises:
        ApiError: 413, it is larger than ``max_bytes``; 400, it is not UTF-8, not JSON, not an object, nested deeper than
            ``max_depth``, or holds NaN, an infinity or half a surrogate pair, whose field is named.
    """
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    try:
        body = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start} cannot stand there") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError as error:  # a JSONDecodeError, or a number of thousands of digits
        raise invalid(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid(f"the body must be a JSON object, got {_kind(body)}")
    _check_tree("", body, max_depth)
    return body


def object_in_text(text: str, path: str) -> dict[str, Any]:
    """The JSON object that a string field holds; an empty string is an empty object. ApiError with the field's path."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise invalid_value(path, f"must hold a JSON object as text: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise invalid_value(path, f"must hold a JSON object as text, got {_kind(value)}")
    _check_tree(path, value, MAX_DEPTH)
    return value


def _check_tree(path: str, body: dict[str, Any], max_depth: int) -> None:
    """Refuse what JSON's grammar lets through but text and numbers cannot be. Not recursive."""
    left: list[tuple[str, Any, int]] = [(path, body, 1)]
    while left:
        path, value, depth = left.pop()
        if isinstance(value, str):
            _check_text(value, path)
        elif isinstance(value, float):
            _check_finite(value, path)
        elif isinstance(value, dict | list):
            if depth > max_depth:
                raise _too_deep(max_depth)
            if isinstance(value, dict):
                for key in value:
                    _check_text(key, path)
            left += [(inner, item, depth + 1) for inner, item in _items(path, value)]


def _items(path: str, value: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        return ((join(path, key), item) for key, item in value.items() if _worth_a_look(item))
    return ((f"{path}[{i}]", item) for i, item in enumerate(value) if _worth_a_look(item))


def _worth_a_look(value: Any) -> bool:
    return isinstance(value, str | float | dict | list)


def _check_text(text: str, path: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise invalid(
                f"{path or 'a key'} holds half a surrogate pair, which is no character; send both halves",
                "invalid_value",
                path or None,
            ) from None


def _check_finite(value: float, path: str) -> None:
    if not math.isfinite(value):
        code = "decimal_below_min_value" if value < 0 else "decimal_above_max_value"
        raise invalid(f"{path} must be a finite number, got {value}", code, path)


def _too_deep(max_depth: int) -> ApiError:
    return invalid(f"the body is nested deeper than {max_depth} levels; make it flatter")


def join(path: str, name: str) -> str:
    """``name`` inside ``path``, as errors write it; the name cut where it is long."""
    return f"{path}.{name[:64]}" if path else name[:64]


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
    return "an array"


def wrong_type(path: str, wanted: str, value: Any) -> ApiError:
    return invalid(f"{path} must be {wanted}, got {_kind(value)}", "invalid_type", path)


def invalid_value(path: str, message: str) -> ApiError:
    """``message`` goes on where the path ends."""
    return invalid(f"{path} {message}", "invalid_value", path)


def shown(value: Any, size: int = 80) -> str:
    """A value for a message, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= size else text[:size] + "..."


def ignored_fields(body: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The names in ``body`` that are not known, in its order."""
    return [name for name in body if name not in known]


class Fields:
    """One object of a body.

    Methods give the field's value, or ``default`` where it is absent.

    Raises:
        ApiError: the value is of another type, code invalid_type; or out of range, with the code of OpenAI's for it.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, Mapping):
            raise wrong_type(path or "the body", "an object", value)
        self._object, self._path = value, path

    def path(self, name: str) -> str:
        return join(self._path, name)

    def raw(self, name: str) -> Any:
        """As it was sent; None where absent."""
        return self._object.get(name)

    def has(self, name: str) -> bool:
        return self._object.get(name) is not None

    def require(self, *names: str) -> None:
        """ApiError missing_required_parameter for the first that is absent."""
        for name in names:
            if not self.has(name):
                path = self.path(name)
                raise invalid(f"{path} is missing; give it", "missing_required_parameter", path)

    def refuse(self, name: str, why: str) -> None:
        """ApiError where ``name`` is given, and not as an empty or false value, which asks for nothing."""
        if self.raw(name):
            path = self.path(name)
            raise invalid(f"{path} is not supported; {why}", "unsupported_parameter", path)

    def text(self, name: str, default: D, *, empty: bool = True) -> str | D:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong_type(self.path(name), "a string", value)
        if not value and not empty:
            raise invalid_value(self.path(name), "is an empty string; leave it out or give text")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_type(self.path(name), "true or false", value)
        return value

    def whole(self, name: str, default: D, low: int, high: int | None = None) -> int | D:
        """In [low, high]. 3.0 is 3, as in JSON schema."""
        value = self.raw(name)
        if value is None:
            return default
        path = self.path(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(path, "a whole number", value)
        if value < low:
            raise invalid(f"{path} must be at least {low}, got {shown(value)}", "integer_below_min_value", path)
        if high is not None and value > high:
            raise invalid(f"{path} must be at most {high}, got {shown(value)}", "integer_above_max_value", path)
        return value

    def number(self, name: str, default: D, low: float, high: float) -> float | D:
        """In [low, high]."""
        value = self.raw(name)
        return default if value is None else check_number(value, self.path(name), low, high)

    def choice(self, name: str, default: D, options: Sequence[str]) -> str | D:
        value = self.text(name, None)
        if value is None:
            return default
        if value not in options:
            raise invalid_value(self.path(name), f"must be one of {', '.join(options)}, got {shown(value)}")
        return value

    def array(self, name: str, *, empty: bool = True) -> list[Any]:
        """An absent one is the empty list. ``empty``: whether one that is given may be."""
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise wrong_type(self.path(name), "an array", value)
        if not value and not empty:
            raise invalid(f"{self.path(name)} is an empty array; give at least one", "empty_array", self.path(name))
        return list(value)

    def objects(self, name: str, *, empty: bool = True) -> list["Fields"]:
        """An array whose items are objects."""
        return [Fields(item, f"{self.path(name)}[{i}]") for i, item in enumerate(self.array(name, empty=empty))]

    def object(self, name: str) -> "Fields | None":
        value = self.raw(name)
        return None if value is None else Fields(value, self.path(name))

    def table(self, name: str) -> dict[str, Any]:
        """An object as it was sent; an absent one is empty."""
        value = self.object(name)
        return {} if value is None else dict(value._object)


def check_number(value: Any, path: str, low: float, high: float) -> float:
    """``value`` as a float, where it is a number in [low, high]."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(path, "a number", value)
    if value != value:  # math.isnan cannot take an integer of hundreds of digits
        raise invalid(f"{path} must be a finite number, got NaN", "decimal_above_max_value", path)
    if value < low:
        raise invalid(f"{path} must be at least {low:g}, got {shown(value)}", "decimal_below_min_value", path)
    if value > high:
        raise invalid(f"{path} must be at most {high:g}, got {shown(value)}", "decimal_above_max_value", path)
    return float(value)


def check_ids(value: Any, path: str) -> tuple[int, ...]:
    """Token ids, at least one; whether the vocabulary has them is known where the model is."""
    if not isinstance(value, list | tuple):
        raise wrong_type(path, "an array of token ids", value)
    if not value:
        raise invalid(f"{path} is an empty array; give at least one token id", "empty_array", path)
    ids = []
    for i, id_ in enumerate(value):
        if isinstance(id_, bool) or not isinstance(id_, int | float) or id_ != id_ // 1:
            raise wrong_type(f"{path}[{i}]", "a token id", id_)
        if not 0 <= id_ < 2**31:
            raise invalid_value(f"{path}[{i}]", f"must be a token id, got {shown(id_)}")
        ids.append(int(id_))
    return tuple(ids)
