"""Conversations in a chat template's form, with every part's origin known.

Templates come from model folders, so they run in a sandbox with bounded output, loops and time. What the messages say
is kept apart from what the template says: an unused character is put into each control token that a message spells,
stays through whatever the template does with the text, and is taken out when the rendering has been cut at the
control tokens that are left. Two more such characters mark what an assistant says.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from pellucid.errors import DataError, RequestError
from pellucid.tokenizer.sandbox import compile_template, render

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and whatever else the template reads."""

CHATML = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('a role is system, user, assistant or tool; got ' ~ message['role']) }}
    {%- elif message['content'] is not string %}
        {{- raise_exception('the content of each message must be text') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""The template of tokenizers that we train."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_OURS = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"})
_USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})


class Segment(NamedTuple):
    """A stretch of a rendering: one control token or plain text; ``learn``: an assistant says it."""

    text: str
    control: bool
    learn: bool


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja, as in Hugging Face's ``chat_template``.
        controls: the control tokens as text.
        variables: ``bos_token`` and the like, given to the template.
        origin: the file it comes from, for messages.

    Raises:
        DataError: the template is not valid Jinja.
    """

    def __init__(self, source: str, *, controls: Sequence[str], variables: Mapping[str, str], origin: str) -> None:
        self._source, self._variables, self._origin = source, dict(variables), origin
        self._template = compile_template(source, origin)
        self._has_markers = _GENERATION.search(source) is not None
        self._controls = _Controls(controls)

    def segments(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        *,
        continue_last: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """The rendering in order, no two plain texts of the same kind side by side. RequestError: it is refused.

        Arguments are those of `Tokenizer.encode_chat`.
        """
        conversation = _Conversation(self, messages, tools, options)
        if continue_last:
            return list(conversation.cut(conversation.render_open()))
        return list(conversation.cut(conversation.render(len(messages), add_generation_prompt)))

    def learnt_segments(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Segment]:
        """`segments` of a finished conversation with what an assistant says marked; DataError where that is unclear."""
        try:
            conversation = _Conversation(self, messages, tools)
            rendering = conversation.render(len(messages), False)
            return list(conversation.cut(rendering if self._has_markers else conversation.mark_answers(rendering)))
        except RequestError as error:
            raise DataError(str(error)) from error

    def end_of_turn(self) -> str | None:
        """The control token that follows an assistant's words, None where the template puts none there."""
        words = "An answer, to see what follows it."
        try:
            segments = self.segments(
                [{"role": "user", "content": "A question."}, {"role": "assistant", "content": words}], False
            )
        except RequestError:
            return None  # it wants more than a question and an answer: only the end token is known
        tail = "".join(segment.text for segment in segments).rpartition(words)
        if not tail[1]:
            return None
        rest = self._controls.pattern().match(tail[2].lstrip())
        return rest.group() if rest else None


class _Controls:
    """The control tokens, and how to keep text from spelling one."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._alternatives = [re.escape(token) for token in sorted(tokens, key=len, reverse=True)]
        self._tokens = [token for token in tokens if len(token) > 1]
        self.single_characters = [token for token in tokens if len(token) == 1]
        self._heads = {token[:n] for token in tokens for n in range(1, len(token))}
        self._tails = {token[n:] for token in tokens for n in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)

    def pattern(self, *more: str) -> re.Pattern[str]:
        """Matches the longest control token, or one of ``more``."""
        return re.compile("|".join([*self._alternatives, *map(re.escape, more)]) or r"(?!)")

    def disarm(self, text: str, breaker: str) -> str:
        """``text`` with ``breaker`` inside each control token of several characters."""
        for token in self._tokens:
            while token in text:  # again: one may overlap the next
                text = text.replace(token, token[0] + breaker + token[1:])
        return text

    def guard(self, text: str, breaker: str) -> str:
        """``text`` with ``breaker`` at an edge where the template's words beside it could complete a control token.

        Edges are those without white space, which templates trim.
        """
        core = text.strip()
        inside = any(core in token for token in self._tokens)
        sizes = range(1, min(self._longest, len(core) + 1))
        before = breaker if core and (inside or any(core[:n] in self._tails for n in sizes)) else ""
        after = breaker if core and (inside or any(core[-n:] in self._heads for n in sizes)) else ""
        start = len(text) - len(text.lstrip())
        return text[:start] + before + core + after + text[start + len(core) :]


class _Conversation:
    """One conversation while it is rendered: its own unused characters and one clock."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        options = options or {}
        _check(messages)
        _check_options(options, template._variables)
        self._template = template
        self._controls = template._controls
        texts = _strings([messages, tools, options])
        used = set(template._source).union(*texts)
        singles = self._controls.single_characters
        self._breaker, self._open, self._close, self._end, *stand_ins = _unused_characters(used, 4 + len(singles))
        self._hide = str.maketrans(dict(zip(singles, stand_ins, strict=True)))
        self._restore = str.maketrans({self._breaker: "", **dict(zip(stand_ins, singles, strict=True))})
        self._messages = [self._disarm(message) for message in messages]
        self._tools, self._options = self._disarm(tools), self._disarm(options)
        self._size = sum(map(len, texts))
        self._now = datetime.now()

    def render(self, count: int, add_generation_prompt: bool) -> str:
        """The first ``count`` messages, with this conversation's unused characters still in."""
        variables = {
            "documents": None,
            **self._options,
            **self._template._variables,
            "messages": self._messages[:count],
            "tools": self._tools,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": self._now.strftime,
            "pellucid_open": self._open,
            "pellucid_close": self._close,
        }
        return render(self._template._template, variables, input_size=self._size, origin=self._template._origin)

    def render_open(self) -> str:
        """All messages, up to where the content of the last one ends."""
        last = self._messages[-1]
        if not isinstance(last.get("content"), str):
            raise RequestError("the last message has no text that could be continued")
        self._messages[-1] = {**last, "content": last["content"] + self._end}
        rendering = self.render(len(self._messages), False)
        end = rendering.rfind(self._end)
        if end < 0:
            raise RequestError("the chat template does not show the last message as it is, so it cannot be continued")
        return rendering[:end]

    def cut(self, rendering: str) -> Iterator[Segment]:
        """Plain texts and control tokens, without the unused characters."""
        depth = end = 0
        for match in self._controls.pattern(self._open, self._close).finditer(rendering):
            if plain := rendering[end : match.start()].translate(self._restore):
                yield Segment(plain, False, depth > 0)
            end = match.end()
            if match.group() == self._open:
                depth += 1
            elif match.group() == self._close:
                depth -= 1
            else:
                yield Segment(match.group(), True, depth > 0)
        if plain := rendering[end:].translate(self._restore):
            yield Segment(plain, False, depth > 0)

    def mark_answers(self, rendering: str) -> str:
        """Puts the two marks around each answer: from where a generation prompt ends to its end-of-turn token."""
        marked, end = "", 0
        for i, message in enumerate(self._messages):
            if message["role"] == "assistant":
                start, stop = self._answer(rendering, i, end)
                marked += rendering[end:start] + self._open + rendering[start:stop] + self._close
                end = stop
        return marked + rendering[end:]

    def _answer(self, rendering: str, i: int, end: int) -> tuple[int, int]:
        before, after = self.render(i, True), self.render(i + 1, False)
        if not rendering.startswith(before) or len(before) < end:
            raise DataError(
                f"{self._template._origin}: the chat template renders the start of a conversation differently from the "
                f"whole (message {i}), so its answers cannot be told apart; put {{% generation %}} ... "
                "{% endgeneration %} around what the assistant says"
            )
        control = self._controls.pattern()
        if rendering.startswith(after):
            stop = len(after.rstrip())
            ends_turn = any(match.end() == stop for match in control.finditer(after, len(before)))
            return len(before), stop if ends_turn else len(after)
        # Templates that shorten earlier answers (reasoning is dropped) still end them with a control token.
        turn_end = control.search(rendering, len(before))
        return len(before), turn_end.end() if turn_end else len(rendering)

    def _disarm(self, value: Any, key: Any = None) -> Any:
        if isinstance(value, str):
            text = self._controls.disarm(value.translate(self._hide), self._breaker)
            # Templates compare these, and may write <|role|>.
            structural = key == "type" or (key == "role" and value in _USUAL_ROLES)
            return text if structural else self._controls.guard(text, self._breaker)
        if isinstance(value, Mapping):
            return {self._disarm_key(name): self._disarm(item, name) for name, item in value.items()}
        return [self._disarm(item, key) for item in value] if isinstance(value, (list, tuple)) else value

    def _disarm_key(self, key: Any) -> Any:
        return self._controls.disarm(key.translate(self._hide), self._breaker) if isinstance(key, str) else key


def _check_options(options: Mapping[str, Any], named: Mapping[str, str]) -> None:
    for name in options:
        if name in named or name in _OURS or name.startswith("pellucid_"):
            raise RequestError(f"the chat template's variable {name} is set here and cannot be given; leave it out")


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError('messages must be a list of {"role": ..., "content": ...}')
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f'messages[{i}] has no "role"; give it one such as "user"')
        if not isinstance(message.get("content"), (str, list, tuple, type(None))):
            raise RequestError(f"messages[{i}].content must be text, got {type(message['content']).__name__}")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, item in value.items() for text in (*_strings(key), *_strings(item))]
    return [text for item in value for text in _strings(item)] if isinstance(value, (list, tuple)) else []


def _unused_characters(used: set[str], count: int) -> list[str]:
    """Characters that no text should hold (noncharacters, then private use) and this conversation does not."""
    candidates = (
        chr(point) for first, last in ((0xFDD0, 0xFDEF), (0xE000, 0xF8FF)) for point in range(first, last + 1)
    )
    found = list(islice((character for character in candidates if character not in used), count))
    if len(found) < count:
        raise RequestError("the messages use every private-use character; remove some of them")
    return found
