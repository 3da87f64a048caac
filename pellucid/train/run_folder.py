"""The folder of a run: who may write it, its configuration and its log."""

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from pellucid.checkpoint import files
from pellucid.config import RunConfig, flat_table, load_config, to_table, to_toml
from pellucid.errors import ConfigError, DataError, StorageError

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"

FIXED = (
    "model", "data", "strategy", "optim", "lora", "train.seed", "train.global_batch", "train.dtype", "train.ema_decay",
)  # fmt: skip
"""What a resumed run may not change. Other keys may, at the price of bit-exactness where they alter the arithmetic."""


class RunFolder:
    """An open run folder. One process holds it at a time; the lock goes with the process.

    Raises:
        ConfigError: the folder cannot be written, is used by a running process, or was used before and
            ``resume`` was not asked for.
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held until close
        except OSError as error:
            raise ConfigError(
                f"run folder {self.path} cannot be written ({error.strerror}); choose another --out"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"run folder {self.path} is in use by another process; choose another --out") from None
        used = [name for name in (CONFIG, METRICS, "checkpoints", "model") if (self.path / name).exists()]
        if used and not resume:
            self._lock.close()
            raise ConfigError(
                f"run folder {self.path} was used before (it has {used[0]}); add --resume or choose another --out"
            )
        self._log: TextIO | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    def check_unchanged(self, config: RunConfig) -> None:
        """`ConfigError` if ``config`` differs from the run's own in a key that resuming cannot change; names it."""
        if not (self.path / CONFIG).exists():
            return
        old, new = flat_table(to_table(load_config(self.path / CONFIG))), flat_table(to_table(config))
        for key in sorted(old.keys() | new.keys()):
            fixed = any(key == name or key.startswith(name + ".") for name in FIXED)
            if fixed and old.get(key) != new.get(key) and key != "data.path":
                raise ConfigError(
                    f"{key} was {old.get(key)!r} in {self.path / CONFIG} and is {new.get(key)!r} now; "
                    "resume with the same value, or start a new run with --init"
                )

    def write_config(self, config: RunConfig) -> None:
        """Record the resolved configuration."""
        replace_text(self.path / CONFIG, to_toml(config))

    def open_log(self, step: int) -> None:
        """Open the log for appending after cutting away what came after ``step``, and a torn last line; samples too."""
        path = self.path / METRICS
        _cut(path, step)
        _cut(self.path / SAMPLES, step, stepless=math.inf)  # what was added to a finished run goes
        self._log = open(path, "a", encoding="utf-8")  # noqa: SIM115 - held until close

    def log(self, record: dict[str, Any]) -> None:
        """Append one line; a non-finite number becomes a string, None is left out."""
        assert self._log is not None, "open_log() comes first"
        try:
            self._log.write(json.dumps(_plain(record), ensure_ascii=False) + "\n")
            self._log.flush()
        except OSError as error:
            raise StorageError(f"cannot write {self.path / METRICS}: {error.strerror}") from error

    def keep_samples(self, records: list[dict[str, Any]]) -> None:
        """Append lines to samples.jsonl; each has a "step"."""
        path = self.path / SAMPLES
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error

    def sync_log(self) -> None:
        """On disk, before a checkpoint that relies on it is."""
        files.sync(self.path / METRICS)

    def close(self) -> None:
        """Give the folder up."""
        if self._log is not None:
            self._log.close()
        self._lock.close()


def replace_text(path: Path, text: str) -> None:
    """Write a small file at once."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _cut(path: Path, step: int, *, stepless: float | None = None) -> None:
    """Remove the lines of later steps, and a torn last one; lines without a step count as of ``stepless``."""
    if not path.exists():
        return
    keep = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") or _step(line, path, number, stepless) > step:
                break
            keep += len(line)
    os.truncate(path, keep)


def _step(line: bytes, path: Path, number: int, stepless: float | None) -> float:
    try:
        record = json.loads(line)
        if stepless is not None and "step" not in record:
            return stepless
        return int(record["step"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise DataError(f"{path}:{number} is no line of a run's log; remove it and resume again") from None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return value
