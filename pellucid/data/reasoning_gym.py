"""The tasks of the package reasoning-gym, as a source of problems and as what judges answers. Loads without torch."""

import dataclasses
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pellucid.data.documents import Document, RawRecord, ReadLog, raw_record
from pellucid.errors import ConfigError, DataError
from pellucid.registry import nearest, register


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningGymOptions:
    """Which task, and which of its problems."""

    task: str = ""
    """A task by its name there, and settings of its own: "chain_sum" or "chain_sum,max_terms=2,size=2000"."""
    seed: int = 0
    """Another seed gives other problems."""


@register("source", "reasoning-gym", config=ReasoningGymOptions)
class ReasoningGym:
    """Problems of one task, its setting ``size`` of them (500 unless set). For grpo, and for sft where there is one answer.

    A record has the task's own ``metadata``, so that answers can be judged elsewhere: `judge`.
    """

    licence = "Apache-2.0"
    attribution = ""

    def __init__(self, options: ReasoningGymOptions) -> None:
        self.name = f"reasoning-gym:{options.task}"
        self._task, self._seed = options.task, options.seed
        self._problems = open_task(options.task, options.seed)

    @property
    def total_bytes(self) -> int:
        return len(self._problems) * self._record(0).num_bytes

    def documents(self, log: ReadLog) -> Iterator[Document]:
        raise ConfigError(f"{self.name} holds problems and no text; prepare it with --for grpo or --for sft")

    def records(self, log: ReadLog) -> Iterator[RawRecord]:
        for number in range(len(self._problems)):
            record = self._record(number)
            log.done_bytes += record.num_bytes
            yield record

    def _record(self, number: int) -> RawRecord:
        """Problem ``number``; `DataError` where JSON loses what its answer is judged by."""
        entry, location = self._problems[number], f"{self.name}:{number}"
        try:
            metadata = json.loads(json.dumps(entry["metadata"]))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{location}: its metadata is no JSON ({error}); choose another task") from error
        table = {"prompt": entry["question"], "task": self._task, "metadata": metadata}
        if not isinstance(entry["answer"], str):  # whatever fits will do
            return raw_record(table, location)
        table["answer"] = entry["answer"]
        worth = self._problems.score_answer(entry["answer"], entry)
        if judge(entry["answer"], table) != worth:
            table["tuples"] = True
            if judge(entry["answer"], table) != worth:
                raise DataError(f"{location}: JSON loses what its answer is judged by; choose another task")
        return raw_record(table, location)


def judge(answer: str, record: dict[str, Any]) -> float:
    """What the task says that ``answer`` is worth, mostly 0 to 1; 0 where its judge cannot read the answer and raises.

    Args:
        record: as `ReasoningGym.records` has them.

    Raises:
        ConfigError: the package is missing.
        DataError: the record is of another source.
    """
    if missing := {"prompt", "task", "metadata"} - record.keys():
        raise DataError(
            f"reward reasoning_gym: the record lacks {', '.join(sorted(missing))}; prepare data from reasoning-gym:TASK"
        )
    metadata = _as_tuples(record["metadata"]) if record.get("tuples") else record["metadata"]
    entry = {"question": record["prompt"], "answer": record.get("answer"), "metadata": metadata}
    task = open_task(record["task"], 0)
    try:
        return float(task.score_answer(answer, entry))
    except Exception:  # judges take what a model says for granted: int("no idea")
        return 0.0


@cache
def open_task(text: str, seed: int) -> Any:
    """A task of the package as its name and settings say, ``"NAME,key=value,..."``.

    Raises:
        ConfigError: the package is missing; there is no such task, the nearest is named; a setting that it has not got or
            refuses.
    """
    tasks = load_package()
    name, *settings = text.split(",")
    if name not in tasks:
        raise ConfigError(f"reasoning-gym has no task {name!r}{nearest(name, sorted(tasks))}; it has {len(tasks)}")
    make, options = tasks[name]
    known = [f.name for f in dataclasses.fields(options) if f.name != "seed"]
    given: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known:
            raise ConfigError(
                f"reasoning-gym:{name} has no setting {key!r}{nearest(key, known)}; known: {', '.join(known)}"
            )
        try:
            given[key] = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            given[key] = value
    try:
        config = options(**given, seed=seed)
        if hasattr(config, "validate"):
            config.validate()
        return make(config)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"reasoning-gym:{text} is refused by the task: {error or type(error).__name__}") from error


@cache
def load_package() -> dict[str, Any]:
    """Its tasks by name, (class, config class) each; seconds the first time. `ConfigError` where it is not installed."""
    try:
        import reasoning_gym  # noqa: F401 - registers all tasks
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"reasoning-gym cannot be imported ({error}); it comes with the extra: pip install 'pellucid[reasoning]'"
        ) from error
    return dict(DATASETS)


def _as_tuples(value: Any) -> Any:
    """Lists as tuples, throughout: JSON has no tuples, and some judges compare with them."""
    if isinstance(value, list):
        return tuple(map(_as_tuples, value))
    return {key: _as_tuples(inner) for key, inner in value.items()} if isinstance(value, dict) else value
