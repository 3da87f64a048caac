"""The built-in sources of examples for post-training: conversations, preferences and problems with checkable answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from pellucid.data.documents import Document, RawRecord, ReadLog, document_from, parse_size, raw_record
from pellucid.errors import ConfigError
from pellucid.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedOptions:
    """How much to generate, from which seed."""

    size: str = "2MB"
    """Bytes of JSON: 2MB, 512KiB, ..."""
    seed: int = 0
    """Another seed gives other examples."""

    def __post_init__(self) -> None:
        parse_size(self.size)


@register("source", "sample:chats", config=SizedOptions)
class Chats:
    """Conversations of one to three questions: two in five about stories, the others sums. For sft, or as text."""

    name = "sample:chats"
    licence = "CC0-1.0"
    attribution = ""

    def __init__(self, options: SizedOptions) -> None:
        self._seed = options.seed
        self.total_bytes = parse_size(options.size)

    def documents(self, log: ReadLog) -> Iterator[Document]:
        yield from _as_documents(self.records(log))

    def records(self, log: ReadLog) -> Iterator[RawRecord]:
        from pellucid.data.samples.chats import arithmetic_chat, story_chat

        rng = Random(f"{self.name}/{self._seed}")

        def draw() -> dict[str, Any]:
            messages, _ = (story_chat if rng.random() < 0.4 else arithmetic_chat)(rng)
            return {"messages": messages}

        return _until(self.total_bytes, draw, self.name, log)


@register("source", "sample:preferences", config=SizedOptions)
class Preferences:
    """Pairs of a right and a wrong answer, about stories and sums. For dpo."""

    name = "sample:preferences"
    licence = "CC0-1.0"
    attribution = ""

    def __init__(self, options: SizedOptions) -> None:
        self._seed = options.seed
        self.total_bytes = parse_size(options.size)

    def documents(self, log: ReadLog) -> Iterator[Document]:
        raise ConfigError(f"{self.name} holds pairs of answers and no text; prepare it with --for dpo")

    def records(self, log: ReadLog) -> Iterator[RawRecord]:
        from pellucid.data.samples.preferences import preference

        rng = Random(f"{self.name}/{self._seed}")
        return _until(self.total_bytes, lambda: preference(rng)._asdict(), self.name, log)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffledOptions:
    """In which order."""

    seed: int = 0
    """Another seed gives another order."""


_PROBLEM_BYTES = 46
"""Of most problems as JSON."""


@register("source", "sample:arithmetic", config=ShuffledOptions)
class ArithmeticProblems:
    """Every sum and difference of two two-digit numbers once, with its answer. For grpo, sft, or as text.

    One problem in ten, the same for a + b and b + a, is in the split "val" and nowhere else: no built-in source has it.
    """

    name = "sample:arithmetic"
    licence = "CC0-1.0"
    attribution = ""

    def __init__(self, options: ShuffledOptions) -> None:
        self._seed = options.seed

    @property
    def total_bytes(self) -> int:
        return _PROBLEM_BYTES * 12_195

    def documents(self, log: ReadLog) -> Iterator[Document]:
        yield from _as_documents(record for record in self.records(log) if record.split == "train")

    def records(self, log: ReadLog) -> Iterator[RawRecord]:
        for record in self._problems():
            log.done_bytes += record.num_bytes
            yield record

    def _problems(self) -> Iterator[RawRecord]:
        from pellucid.data.samples.arithmetic import is_held_out, two_digit_problems

        problems = two_digit_problems()
        rng = Random(f"{self.name}/{self._seed}")
        keys = [rng.random() for _ in problems]  # shuffle() is not promised to stay the same
        for number in sorted(range(len(problems)), key=keys.__getitem__):
            expression, value = problems[number]
            table = {"prompt": f"What is {expression}?", "answer": str(value)}
            yield raw_record(table, f"{self.name}:{number}", "val" if is_held_out(expression) else "train")


def _until(size: int, draw: Callable[[], dict[str, Any]], name: str, log: ReadLog) -> Iterator[RawRecord]:
    """Examples until their sizes add up to ``size``; the last one may go beyond it."""
    number = 0
    while size > 0:
        record = raw_record(draw(), f"{name}:{number}")
        size, number = size - record.num_bytes, number + 1
        log.done_bytes += record.num_bytes
        yield record


def _as_documents(records: Iterator[RawRecord]) -> Iterator[Document]:
    """Conversations as text: what `pellucid prepare` makes of them without --for."""
    for record in records:
        table = record.table
        messages = table.get("messages") or [
            {"role": "user", "content": table["prompt"]},
            {"role": "assistant", "content": table["answer"]},
        ]
        document = document_from(messages, record.location)
        assert document is not None
        yield document
