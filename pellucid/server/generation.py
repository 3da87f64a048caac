"""What a client asks and what goes back, in no vendor's words. Protocols parse into `Generation` and encode `Piece`s."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pellucid.inference.constraints import GrammarKind
from pellucid.inference.request import SamplingParams

EndReason = Literal["stop", "stop_string", "length", "context", "tool_calls", "error", "cancelled"]
"""Why a choice ended: an end token; a stop string or stop id of the client's; ``max_tokens``; the window; an end token after
at least one complete tool call; what `Ending.error` says; the server is closing."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments; empty: any object."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call a tool; ``name``: it must be this one."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True
    """Several calls in one answer are allowed."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer must satisfy, as `pellucid.text_constraints.make_constraint` takes it."""

    kind: GrammarKind
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A request for text, checked in itself; what depends on a model is checked at admission."""

    model: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    """A conversation in the chat template's form: role, content (text), and for tools ``tool_calls`` ({"id", "type",
    "function": {"name", "arguments": object}}), ``tool_call_id`` and ``name``, ``reasoning_content``."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Texts or ids to continue, where there are no messages."""
    params: SamplingParams
    """Without constraint; ``stop_ids`` are the client's own. The end tokens of the model are added at admission."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    grammar: Grammar | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template, such as ``enable_thinking``."""
    echo: bool = False
    logprobs: bool = False
    """Tell log-probabilities; how many alternatives stands in ``params.top_logprobs``."""
    stream: bool = False
    include_usage: bool = False
    """A last chunk with the usage ends the stream (OpenAI)."""
    cache_salt: str = ""
    limit_given: bool = True
    """The client named a limit of tokens; else ``params.max_tokens`` is the protocol's default or the rest of the window."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as clients see it."""

    id: int
    text: str
    """Alone, as the tokenizer decodes it; half characters as U+FFFD."""
    data: bytes
    logprob: float
    top: tuple[tuple[int, str, bytes, float], ...] = ()
    """Id, text, its bytes and log-probability of the most probable tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bit of one choice, its tokens with it: those whose text has been told in full by now, in this piece or before it.

    ``content`` and ``reasoning``: text. ``tool_start``: call ``tool_index`` has begun, with ``tool_id`` and ``tool_name``.
    ``tool_arguments``: the next fragment of its arguments in ``text``; all fragments together are a JSON object, where
    the call is complete. ``end``: `ending`; nothing follows for this choice.
    """

    choice: int
    kind: Literal["content", "reasoning", "tool_start", "tool_arguments", "end"]
    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    tool_index: int = 0
    tool_id: str = ""
    tool_name: str = ""
    ending: "Ending | None" = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended."""

    reason: EndReason
    stop: str | int | None = None
    """The client's stop string, or stop id, that ended it."""
    error: str | None = None
    num_tokens: int = 0
    """Tokens drawn for this choice, the end token and hidden ones included."""
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one request; ``completion`` is summed over its choices."""

    prompt: int
    completion: int = 0
    cached: int = 0
    """Prompt tokens that were not computed again."""
    reasoning: int = 0


@dataclass(slots=True)
class ToolCall:
    """A call, put together; ``arguments`` is a JSON object as text, where the call is complete."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One choice, put together. ``tokens``: those of the content, and those that became whole as it ended."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, piece: Piece) -> None:
        match piece.kind:
            case "content":
                self.content += piece.text
            case "reasoning":
                self.reasoning += piece.text
            case "tool_start":
                assert piece.tool_index == len(self.calls), "calls begin in order"
                self.calls.append(ToolCall(piece.tool_id, piece.tool_name))
            case "tool_arguments":
                self.calls[piece.tool_index].arguments += piece.text
            case "end":
                self.ending = piece.ending
        if piece.kind in ("content", "end"):
            self.tokens += piece.tokens


def gather(pieces: Iterable[Piece], num_choices: int = 1) -> list[Choice]:
    """The choices that pieces make, in order of their index; `Choice.ending` is None where the end is missing."""
    choices = [Choice() for _ in range(num_choices)]
    for piece in pieces:
        choices[piece.choice].add(piece)
    return choices
