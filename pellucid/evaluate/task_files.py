"""Tasks: files of examples in JSONL, and registered ones that give the same. Checked here, scored in `tasks`.

An example has one of two forms, and a task one form only:

    multiple choice   {"prompt": text, "choices": [text, ...], "answer": index}
    generation        {"prompt": text} or {"messages": [...]}, and {"answer": text or [text, ...]}

"id" may stand beside them, and so may other keys that are not near one of these.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from pellucid.config_tables import assign, build
from pellucid.data.documents import ReadLog
from pellucid.data.readers import kind_of, read_objects
from pellucid.data.samples.arithmetic import is_held_out, two_digit_problems
from pellucid.errors import ConfigError, DataError
from pellucid.registry import lookup, names, nearest, register

KEYS = ("prompt", "messages", "choices", "answer")
BETWEEN_SHOTS = "\n\n"
"""What stands between worked examples, and ends an answer that follows them."""


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several continuations of a prompt is right."""

    location: str
    """For messages: "FILE:LINE"."""
    prompt: str
    choices: tuple[str, ...]
    answer: int
    """Which of them."""

    def solved(self) -> str:
        """The example as text, with its answer."""
        return self.prompt + self.choices[self.answer]


@dataclass(frozen=True, slots=True)
class Question:
    """Something to be answered in the model's own words."""

    location: str
    prompt: str | list[dict[str, Any]]
    """Text to be continued, or the messages of a conversation."""
    answers: tuple[str, ...]
    """Any of them is right; without space around them."""

    def solved(self) -> str:
        """The example as text, with its first answer."""
        assert isinstance(self.prompt, str)
        return self.prompt + ("" if self.prompt[-1:].isspace() else " ") + self.answers[0]


@dataclass(frozen=True, slots=True)
class Task:
    """Examples under a name."""

    name: str
    examples: tuple[Choices, ...] | tuple[Question, ...]
    """At least one."""
    end: str | None = None
    """Text with which an answer ends, besides the model's own stop tokens; what follows is not looked at."""

    @property
    def generates(self) -> bool:
        """Whether its answers are the model's own words."""
        return isinstance(self.examples[0], Question)


class ExampleSource(Protocol):
    """What a registered task makes of its options."""

    def examples(self) -> Iterator[dict[str, Any]]:
        """Objects as they would stand in a file."""


def open_tasks(texts: Iterable[str]) -> list[Task]:
    """Tasks by file or by registered name, "NAME" or "NAME,option=value,..."; no two of one name.

    Raises:
        ConfigError: no such task, an option that it does not have, or a name that comes twice.
        DataError: a file that cannot be read, or an example of no known form; names the line and the key.
    """
    tasks: dict[str, tuple[str, Task]] = {}
    for text in texts:
        task = open_task(text)
        if task.name in tasks:
            raise ConfigError(
                f"{text} and {tasks[task.name][0]} would both be called {task.name!r}; rename one of them"
            )
        tasks[task.name] = text, task
    return [task for _, task in tasks.values()]


def open_task(text: str) -> Task:
    """One task; errors as in `open_tasks`."""
    name, *settings = text.split(",")
    known, path = names("task"), Path(text)
    if name not in known:
        if path.is_file() or path.name != text or kind_of(path) is not None:
            return read_task(path)
        raise ConfigError(
            f"{text}: no such file, and no task of that name{nearest(name, known)}; known: {', '.join(known)}"
        )
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{text}: {setting!r} is no option=value")
        assign(options, key, value)
    entry = lookup("task", name)
    source: ExampleSource = entry.target(build(entry.config, options, f"{name}."))
    return _task(text, ((table, f"{text}:{number}") for number, table in enumerate(source.examples(), start=1)))


def read_task(path: Path) -> Task:
    """The task in a .jsonl file, plain or compressed; its name is the file's up to there. DataError as in `open_tasks`."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a task as a .jsonl file, or the name of a registered one")
    if kind_of(path) != ".jsonl":
        raise DataError(f"{path}: a task is read from a .jsonl file, one example a line")
    records = read_objects(path, ReadLog())
    return _task(path.name[: path.name.lower().rindex(".jsonl")], ((r.table, r.location) for r in records))


def with_shots(task: Task, number: int) -> Task:
    """Before each prompt the first ``number`` other examples with their answers, a blank line between.

    Almost all prompts begin alike then, and what they share is computed once.

    Raises:
        ConfigError: the task has too few examples, or asks in messages.
    """
    if number == 0:
        return task
    if number >= len(task.examples):
        raise ConfigError(
            f"--shots {number} needs more than {number} examples, and {task.name} has {len(task.examples)}; lower it"
        )
    for example in task.examples:
        if not isinstance(example.prompt, str):
            raise ConfigError(f"{example.location}: --shots go before a prompt, not before messages; leave it out")
    texts = [example.solved() for example in task.examples[: number + 1]]

    def before(i: int) -> str:
        others = [text for j, text in enumerate(texts) if j != i][:number]
        return BETWEEN_SHOTS.join([*others, ""])

    plain: tuple[Any, ...] = task.examples
    examples = tuple(replace(example, prompt=before(i) + example.prompt) for i, example in enumerate(plain))
    return replace(task, examples=examples, end=BETWEEN_SHOTS)


# -- examples -----------------------------------------------------------------------------------------------


def _task(name: str, tables: Iterable[tuple[Any, str]]) -> Task:
    examples: list[Any] = []
    for table, location in tables:
        example = _example(table, location)
        if examples and type(example) is not type(examples[0]):
            raise DataError(
                f"{location}: {_form(example)}, and {examples[0].location} is {_form(examples[0])}; a task has one form: "
                "divide it in two"
            )
        examples.append(example)
    if not examples:
        raise DataError(f"{name} holds no example")
    return Task(name, tuple(examples))


def _form(example: Choices | Question) -> str:
    return "multiple choice" if isinstance(example, Choices) else "generation"


def _example(table: Any, location: str) -> Choices | Question:
    if not isinstance(table, dict):
        raise DataError(f"{location}: an example must be an object, got {type(table).__name__}")
    for key in table:
        if key not in (*KEYS, "id") and (close := nearest(str(key), list(KEYS))):
            raise DataError(f"{location}: unknown key {key!r}{close}")
    id_ = table.get("id", 0)
    if not isinstance(id_, (str, int)) or isinstance(id_, bool):
        raise DataError(f'{location}: "id" must be text or a whole number, got {id_!r}')
    if "answer" not in table:
        raise DataError(f'{location}: the example has no "answer", it has {", ".join(map(str, table)) or "no key"}')
    return _choices(table, location) if "choices" in table else _question(table, location)


def _choices(table: dict[str, Any], location: str) -> Choices:
    prompt, choices, answer = table.get("prompt"), table["choices"], table["answer"]
    if not isinstance(prompt, str) or "messages" in table:
        raise DataError(f'{location}: beside "choices" there must be a "prompt" that is text, and no "messages"')
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise DataError(f'{location}: "choices" must be a list of two texts or more, none empty, got {choices!r}')
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(
            f'{location}: "answer" must be the index of a choice, 0 to {len(choices) - 1}, got {answer!r}; '
            'without "choices" it would be text'
        )
    return Choices(location, prompt, tuple(choices), answer)


def _question(table: dict[str, Any], location: str) -> Question:
    given = [key for key in ("prompt", "messages") if key in table]
    if len(given) != 1:
        raise DataError(
            f'{location}: give one of "prompt" and "messages"; the example has {", ".join(map(str, table))}'
        )
    prompt, answers = table[given[0]], table["answer"]
    if given == ["prompt"] and not isinstance(prompt, str):
        raise DataError(f'{location}: "prompt" must be text, got {prompt!r}')
    if given == ["messages"] and not (isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt)):
        raise DataError(f'{location}: "messages" must be a list of objects with "role" and "content"')
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise DataError(
            f'{location}: "answer" must be text, or a list of texts, none blank, got {table["answer"]!r}; '
            'an index goes with "choices"'
        )
    return Question(location, prompt, tuple(a.strip() for a in answers))


# -- our own ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticOptions:
    """Which problems."""

    size: int = 500
    """Problems; there are some 1,200."""
    seed: int = 0
    """Another seed gives others of them, in another order."""


@register("task", "arithmetic", config=ArithmeticOptions)
class Arithmetic:
    """Sums and differences of two-digit numbers that are held out of every built-in source; asked as `pellucid demo-align` does.

    Raises:
        ConfigError: there are not so many.
    """

    def __init__(self, options: ArithmeticOptions) -> None:
        problems = [(expression, value) for expression, value in two_digit_problems() if is_held_out(expression)]
        if not 1 <= options.size <= len(problems):
            raise ConfigError(f"arithmetic.size must be in [1, {len(problems)}], got {options.size}")
        rng = Random(f"arithmetic/{options.seed}")
        keys = [rng.random() for _ in problems]
        self._problems = [problems[i] for i in sorted(range(len(problems)), key=keys.__getitem__)[: options.size]]

    def examples(self) -> Iterator[dict[str, Any]]:
        for expression, value in self._problems:
            yield {"prompt": f"{expression} = ", "answer": str(value)}
