"""The engine's step log as lines for a person."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pellucid.inference import StepRecord


def step_line(record: "StepRecord") -> str:
    """Who got what in a step: "prompt[choice] first..last" for each sequence, then what else happened.

    ``step 3  20 tokens: 0 17, 1[2] 9, 2 0..17 | reused 2: 64 | blocks 5 held, 1 cached, 26 free | 4.1 ms``
    """
    chunks = [_chunk(*chunk) for chunk in record.chunks]
    num_tokens = sum(count for *_, count in record.chunks)
    parts = [f"step {record.step}  {num_tokens} token{'s' if num_tokens != 1 else ''}: {', '.join(chunks)}"]
    parts += [f"reused {name}: {tokens}" for name, tokens in record.reused.items()]
    parts += [f"copied {record.copied}"] if record.copied else []
    parts += [f"evicted {record.evicted}"] if record.evicted else []
    parts += [f"pre-empted {name}" for name in record.preempted]
    parts += [f"finished {_name(name, choice)} ({reason})" for name, choice, reason in record.finished]
    parts += [f"{record.waiting} wait"] if record.waiting else []
    parts.append(f"blocks {record.held} held, {record.cached} cached, {record.free} free")
    parts.append(f"{record.seconds * 1e3:.1f} ms")
    return " | ".join(parts)


def _chunk(name: str, choice: int, start: int, count: int) -> str:
    return f"{_name(name, choice)} {start}" + (f"..{start + count - 1}" if count > 1 else "")


def _name(name: str, choice: int) -> str:
    return f"{name}[{choice}]" if choice else name
