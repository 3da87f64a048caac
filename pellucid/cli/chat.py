"""`pellucid chat`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import notice
from pellucid.cli.sampling import (
    add_engine_flags,
    add_model_flags,
    add_sampling_flags,
    engine_options,
    load_with_tokenizer,
    sampling_params,
)
from pellucid.errors import PellucidError, RequestError

if TYPE_CHECKING:
    from pellucid.inference import Engine, SamplingParams
    from pellucid.model import Transformer
    from pellucid.tokenizer import Tokenizer

Message = dict[str, str]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model, a line a turn. /reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer. "
        "Lines may also come from a file or a pipe: answers go to stdout, all else to stderr.",
    )
    add_model_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run, allocator="inference")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends. Without a terminal, a turn that failed makes the exit code."""
    params = sampling_params(args)
    loaded, tokenizer = load_with_tokenizer(args, needed_for="a chat")
    chat = Chat(loaded.model, tokenizer, params, args.system, engine_options(args))
    if not chat.has_template:
        if args.system is not None:
            raise RequestError("--system needs a chat template, and this model's tokenizer has none")
        notice("this model has no chat template: completion mode, each line is continued as text")
    interactive = sys.stdin.isatty()
    code = 0
    while True:
        try:
            line = read_line(interactive)
            if line is None or (command := line.strip()) == "/exit":
                break
            if command == "/reset":
                chat.reset()
                notice("the conversation starts over")
            elif command:
                chat.say(line, write)
        except PellucidError as error:
            notice(f"pellucid: {error}")
            code = error.exit_code
    return 0 if interactive else code


@dataclass(slots=True)
class Chat:
    """A conversation with a model. In completion mode nothing is remembered from line to line."""

    model: "Transformer"
    tokenizer: "Tokenizer"
    params: "SamplingParams"
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine, which remembers the conversation, so that a turn only reads what is new."""
    messages: list[Message] = field(default_factory=list)
    engine: "Engine" = field(init=False)

    def __post_init__(self) -> None:
        from pellucid.inference import Request, SamplingParams, engine_for, window_of

        longest = Request("longest", (0,), SamplingParams(max_tokens=window_of(self.model.config)))
        self.engine = engine_for(self.model, [longest], 1, **self.options)
        self.reset()

    @property
    def has_template(self) -> bool:
        """Whether turns are marked; else text is simply continued."""
        return self.tokenizer.chat_template is not None

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str, write: Callable[[str], None]) -> None:
        """Answer one turn, piece by piece to ``write``. Ctrl-C ends the answer; what was said so far stays said.

        Raises:
            RequestError: the turn alone does not fit into the window.
            PellucidError: the model's logits were not finite.
        Either way the turn is forgotten.
        """
        from pellucid.text import encode_prompt

        if not self.has_template:
            self.answer(encode_prompt(self.tokenizer, text), write)
            return
        before = list(self.messages)
        self.messages = [*before, {"role": "user", "content": text}]
        try:
            answer = self.answer(self.prompt(), write)
        except PellucidError:
            self.messages = before
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def prompt(self) -> list[int]:
        """The ids of the conversation so far. The oldest turns are dropped where they do not fit, with a notice."""
        from pellucid.inference import window_of

        window = window_of(self.model.config)
        room = window - min(self.params.max_tokens, window // 4)  # the rest is for the answer
        first = 1 if self.system is not None else 0
        dropped = 0
        while len(ids := self.tokenizer.encode_chat(self.messages)) > room and len(self.messages) > first + 1:
            oldest = self.messages[first : first + 2]  # a question and its answer
            del self.messages[first : first + len(oldest)]
            dropped += len(oldest)
        if dropped:
            notice(
                f"the conversation is longer than the model's window of {window:,} tokens: dropped the {dropped} oldest messages"
            )
        return ids

    def answer(self, prompt: list[int], write: Callable[[str], None]) -> str:
        """Draw and write one answer; returns it."""
        from pellucid.text import stream_text

        pieces: list[str] = []
        try:
            for piece in stream_text(self.model, self.tokenizer, prompt, self.params, engine=self.engine):
                pieces.append(piece)
                write(piece)
        except KeyboardInterrupt:
            notice("\n(stopped)")
        finally:
            write("\n")
        return "".join(pieces)


def write(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def read_line(interactive: bool) -> str | None:
    """The next turn without its line end; None at the end of the input. `RequestError` for one that is no text."""
    try:
        if not interactive:
            line = sys.stdin.buffer.readline()  # bytes, so that a bad line is one bad turn and not the end of all
            return line.decode(sys.stdin.encoding).rstrip("\r\n") if line else None
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and editing
        return input("> ")
    except EOFError:
        print()
        return None
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the line is no {error.encoding} text (byte {error.start + 1}: 0x{error.object[error.start]:02x}); it is left out"
        ) from None
