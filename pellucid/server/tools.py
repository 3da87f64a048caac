"""Tool calls in an answer's text, in the form that the model's chat template teaches."""

import re
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pellucid.server.parts import Part, begun, spaced
from pellucid.server.tool_json import SPACE, CallReader, NotJson


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a call: a JSON object, and what stands around it."""

    open: str
    close: str | None
    """None: the call ends with its last brace."""
    arguments: str
    """The key of the arguments."""
    separator: str
    """Between calls."""
    bare: bool = False
    """An answer may begin with a call, without ``open``."""
    in_template: bool = True
    """The chat template tells the tools, the calls and their results to the model; else `tool_prompt` does."""


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments", "\n")
"""``<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>``: Hermes 2 and 3, Qwen 2.5 and 3."""
LLAMA = ToolFormat("<|python_tag|>", None, "parameters", "; ", bare=True)
"""``{"name": ..., "parameters": {...}}``, several with a semicolon between them: Llama 3.1 and later."""
OURS = ToolFormat("<tool_call>", "</tool_call>", "arguments", "\n", in_template=False)
"""As Hermes, for templates that know of no tools, or tell them in a form that is not read here."""

_OTHER_FORMS = ("<function=", "<arg_key>", "<tool_calls>")


def find_format(template: str | None) -> ToolFormat:
    """The format that a chat template teaches; `OURS` where it is none of those above."""
    if template is None or any(form in template for form in _OTHER_FORMS):
        return OURS
    if HERMES.open in template and _has_key(template, "arguments"):
        return HERMES
    return LLAMA if "ipython" in template and _has_key(template, "parameters") else OURS


def _has_key(template: str, key: str) -> bool:
    return f'"{key}"' in template or f'\\"{key}\\"' in template


def new_call_id() -> str:
    """``call_`` and 24 letters and digits that nobody can guess."""
    return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(24))


_LETTERS = string.ascii_letters + string.digits
_LEAD = re.compile(r"\s*")
_LEAD_BARE = re.compile(r"\s*;?\s*")
"""Before a further call."""


class ToolReader:
    """Text in, parts out: content, and calls as they are written.

    A call is told as soon as its name is known, its arguments as they come. What is no call, or calls a function that the
    client did not name, is content. Where a call turns out broken after it was told, what was not told of it is content
    too. White space around markers is dropped. Held back are: white space, what may become a marker, and a call up to its
    name.

    Args:
        names: of the functions that may be called.
        parallel: several calls may stand in one answer; else the first ends it.

    Attributes:
        num_complete: calls whose arguments are complete.
        finished: the answer ends here, since there may be one call only.
        num_held: characters held back.
    """

    def __init__(self, form: ToolFormat, names: Iterable[str], *, parallel: bool) -> None:
        self._form, self._names, self._parallel = form, frozenset(names), parallel
        self._state: Literal["text", "call", "closing"] = "text"
        self._text, self._start = "", 0  # what is not decided, and where it begins
        self._fresh = True  # at the beginning, or behind a call: white space is not decided
        self._num_told = 0
        self.num_complete = 0
        self.finished = False
        self._call, self._bare = CallReader(self._names, strict=False), False
        self._body = self._scanned = 0  # where the object begins, and the next character of it that was not looked at
        self._told = self._told_arguments = False

    @property
    def num_held(self) -> int:
        return len(self._text)

    def push(self, content: Part) -> list[Part]:
        if not self._text:
            self._start = content.start
        self._text += content.text
        parts: list[Part] = []
        steps = {"text": self._read_text, "call": self._read_call, "closing": self._read_closing}
        while not self.finished and steps[self._state](parts):
            pass
        return [part for part in parts if part.text or part.kind == "tool_start"]

    def finish(self) -> list[Part]:
        """What was held back: the answer has ended."""
        unread = self._state == "text" and not (self._fresh and self._num_told and not self._text.strip())
        untold = self._state == "call" and not self._told
        if self._state == "call" and self._told_arguments and self._call.end is not None:
            self.num_complete += 1  # a brace is missing
        part = self._take(len(self._text) if unread or untold else 0)
        self._skip(len(self._text))
        return [part] if part.text else []

    # -- each returns whether something else may follow in the text that is there ---------------------------

    def _read_text(self, parts: list[Part]) -> bool:
        form = self._form
        if self._fresh:
            lead = _LEAD_BARE if form.bare and self._num_told else _LEAD
            found = lead.match(self._text)
            assert found is not None
            rest = self._text[found.end() :]
            if rest.startswith("{") and form.bare:
                return self._begin_call(found.end(), bare=True)
            if rest.startswith(form.open):
                return self._begin_call(found.end() + len(form.open))
            if form.open.startswith(rest):
                return False
            self._fresh = False
            if self._num_told:
                self._skip(len(self._text) - len(self._text.lstrip()))
        at = self._text.find(form.open)
        end = len(self._text) - begun(self._text, form.open) if at < 0 else at
        size = spaced(self._text, end)
        parts.append(self._take(size))
        return at >= 0 and self._begin_call(at - size + len(form.open))

    def _begin_call(self, body: int, *, bare: bool = False) -> bool:
        """A call's object begins ``body`` characters on, or white space before it."""
        self._state, self._bare = "call", bare
        self._call = CallReader(self._names, strict=bare)
        self._body = self._scanned = self._start + body
        self._told = self._told_arguments = False
        return True

    def _read_call(self, parts: list[Part]) -> bool:
        call = self._call
        for character in self._text[self._scanned - self._start :]:
            if self._scanned == self._body and character in SPACE:
                self._body = self._scanned = self._scanned + 1
                continue
            try:
                call.push(character)
            except NotJson:
                self._tell_arguments(parts)
                return self._reject(parts)
            self._scanned += 1
            if call.name is not None and not self._told:
                self._told = True
                at = self._scanned
                parts.append(Part("tool_start", "", at, at, self._num_told, call.name))
                self._num_told += 1
            if call.done:
                break
        self._tell_arguments(parts)
        if not call.done:
            return False
        if not self._told:  # no name
            return self._reject(parts)
        if call.start == call.end:
            parts.append(Part("tool_arguments", "{}", self._scanned, self._scanned, self._num_told - 1))
        self._skip_to(self._scanned)
        return self._complete()

    def _tell_arguments(self, parts: list[Part]) -> None:
        """What has come of the arguments and is not told."""
        call = self._call
        if not self._told or call.start is None or call.start == call.end or self._call_is_null():
            return
        start = max(self._start, self._body + call.start)
        end = self._scanned if call.end is None else self._body + call.end
        if start < end:
            self._skip_to(start)
            part = self._take(end - start)
            parts.append(part._replace(kind="tool_arguments", tool_index=self._num_told - 1))
            self._told_arguments = True

    def _call_is_null(self) -> bool:
        assert self._call.start is not None
        at = self._body + self._call.start - self._start
        return not self._told_arguments and self._text[at : at + 1] == "n"

    def _reject(self, parts: list[Part]) -> bool:
        """Not a call after all."""
        if self._told_arguments and self._call.end is not None:
            self._skip_to(self._scanned)  # a brace is missing: the call is complete all the same
            return self._complete()
        if self._told_arguments:
            self._skip_to(self._scanned)
        else:
            parts.append(self._take(self._body - self._start + self._bare))
        self._state, self._fresh = "text", False
        return True

    def _complete(self) -> bool:
        self.num_complete += 1
        self.finished = not self._parallel
        self._state = "closing"
        return True

    def _read_closing(self, parts: list[Part]) -> bool:
        close, rest = self._form.close or "", self._text.lstrip()
        if close and close.startswith(rest) and rest != close:
            return False
        if close and rest.startswith(close):
            self._skip(len(self._text) - len(rest) + len(close))
        self._state, self._fresh = "text", True
        return True

    # -- the text -------------------------------------------------------------------------------------------

    def _take(self, size: int) -> Part:
        part = Part("content", self._text[:size], self._start, self._start + size)
        self._skip(size)
        return part

    def _skip(self, size: int) -> None:
        self._text, self._start = self._text[size:], self._start + size

    def _skip_to(self, position: int) -> None:
        self._skip(position - self._start)
