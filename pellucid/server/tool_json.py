"""A tool call, read character by character: strict JSON whose arguments are known while they are written."""

import json
import re
from collections.abc import Callable

SPACE = " \t\n\r"
"""White space, for JSON."""
_NUMBER_CHARACTERS = "0123456789+-.eE"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_BEGINNING = re.compile(r"-?((0|[1-9][0-9]*)((\.[0-9]*)?|(\.[0-9]+)?[eE][+-]?[0-9]*))?")
_LITERALS = ("true", "false", "null")
_HEX = "0123456789abcdefABCDEF"


class NotJson(Exception):
    """The text is no JSON, or no call."""


class JsonReader:
    """One JSON value, strictly by RFC 8259. `push` takes a character, or raises `NotJson` where none such may stand.

    Attributes:
        depth: open objects and arrays.
        done: the value is complete; for a number, which ends with what follows it, only then.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._step: Callable[[str], None] = self._value
        self._word = ""  # of a number or literal so far
        self._is_key = False
        self._hex_left = 0
        self.done = False

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def wants_key(self) -> bool:
        """Whether a key may stand here."""
        return self._step in (self._key, self._first_key)

    @property
    def wants_value(self) -> bool:
        """Whether a value must stand here."""
        return self._step == self._value

    @property
    def between(self) -> bool:
        """Whether a key or value has just ended, or white space after it."""
        return self._step in (self._after, self._colon) or self.done

    def push(self, character: str) -> None:
        self._step(character)

    def _value(self, c: str) -> None:
        if c in SPACE:
            return
        if c in "{[":
            self._open.append(c)
            self._step = self._first_key if c == "{" else self._first_item
        elif c == '"':
            self._is_key, self._step = False, self._string
        elif c in "-0123456789":
            self._word, self._step = c, self._number
        elif c in "tfn":
            self._word, self._step = c, self._literal
        else:
            raise NotJson

    def _first_item(self, c: str) -> None:
        if c == "]":
            self._close(c)
        else:
            if c not in SPACE:
                self._step = self._value
            self._value(c)

    def _first_key(self, c: str) -> None:
        if c == "}":
            self._close(c)
        else:
            self._key(c)

    def _key(self, c: str) -> None:
        if c == '"':
            self._is_key, self._step = True, self._string
        elif c not in SPACE:
            raise NotJson

    def _colon(self, c: str) -> None:
        if c == ":":
            self._step = self._value
        elif c not in SPACE:
            raise NotJson

    def _string(self, c: str) -> None:
        if c == '"':
            self._step = self._colon if self._is_key else self._after
            self.done = not self._is_key and not self._open
        elif c == "\\":
            self._step = self._escape
        elif c < " ":
            raise NotJson

    def _escape(self, c: str) -> None:
        if c == "u":
            self._hex_left, self._step = 4, self._hex
        elif c in '"\\/bfnrt':
            self._step = self._string
        else:
            raise NotJson

    def _hex(self, c: str) -> None:
        if c not in _HEX:
            raise NotJson
        self._hex_left -= 1
        if not self._hex_left:
            self._step = self._string

    def _number(self, c: str) -> None:
        if c in _NUMBER_CHARACTERS:
            self._word += c
            if not _NUMBER_BEGINNING.fullmatch(self._word):
                raise NotJson
            return
        if not _NUMBER.fullmatch(self._word):
            raise NotJson
        self._step, self.done = self._after, not self._open
        self._after(c)

    def _literal(self, c: str) -> None:
        self._word += c
        if not any(literal.startswith(self._word) for literal in _LITERALS):
            raise NotJson
        if self._word in _LITERALS:
            self._step, self.done = self._after, not self._open

    def _after(self, c: str) -> None:
        if c in SPACE:
            return
        if c in "}]":
            self._close(c)
        elif c == "," and self._open:
            self._step = self._key if self._open[-1] == "{" else self._value
        else:
            raise NotJson

    def _close(self, c: str) -> None:
        if not self._open or self._open.pop() + c not in ("{}", "[]"):
            raise NotJson
        self._step, self.done = self._after, not self._open


class CallReader:
    """``{"name": ..., "arguments": {...}}``, the keys in any order; ``parameters`` is another word for ``arguments``.

    Args:
        names: the functions that may be called; another name is no call.
        strict: another key before the name makes it no call.

    Attributes:
        name: as soon as it is known.
        start, end: of the arguments' text among the characters pushed; ``end`` is None while they go on, and both are
            where there are none.
        done: the call's last brace has come.
    """

    def __init__(self, names: frozenset[str], *, strict: bool) -> None:
        self._names, self._strict = names, strict
        self._json = JsonReader()
        self._count = 0
        self._member = ""  # the key whose value is read
        self._text = ""  # of a key, or of a name
        self._reading: str | None = None  # "key", or the member's value
        self.name: str | None = None
        self.start: int | None = None
        self.end: int | None = None

    @property
    def done(self) -> bool:
        return self._json.done

    def push(self, character: str) -> None:
        """Raises `NotJson` where this is no call, or none of these functions."""
        json_, top = self._json, self._json.depth == 1
        key, value = top and json_.wants_key, top and json_.wants_value
        if not self._count and character != "{":
            raise NotJson
        json_.push(character)
        self._count += 1
        if (key or value) and character not in SPACE and not json_.done:
            self._begin("key" if key else self._member, character)
        elif self._reading in ("key", "name"):
            self._text += character
        if self._reading is not None and json_.depth == 1 and json_.between:
            self._ended()

    def _begin(self, what: str, character: str) -> None:
        self._reading, self._text = what, character
        if what == "name" and (self.name is not None or character != '"'):
            raise NotJson
        if what in ("arguments", "parameters"):
            if self.start is not None or character not in "{n":
                raise NotJson
            self.start = self._count - 1

    def _ended(self) -> None:
        what, self._reading = self._reading, None
        if what == "key":
            self._member = json.loads(self._text)
            if self._strict and self.name is None and self._member not in _MEMBERS:
                raise NotJson
        elif what == "name":
            self.name = json.loads(self._text)
            if self.name not in self._names:
                raise NotJson
        elif what in ("arguments", "parameters"):
            self.end = self._count
            if self._text[0] == "n":
                self.start = self.end


_MEMBERS = frozenset({"name", "arguments", "parameters", "type", "id"})
