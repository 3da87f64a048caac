"""Everything that can go wrong and that a caller may want to catch.

    PellucidError
    ├── ConfigError        a setting, a flag or a combination of them             exit 2
    ├── DataError          text, token shards or a tokenizer                      exit 2
    ├── CheckpointError    a model folder or a checkpoint that cannot be read     exit 2
    ├── RequestError       a prompt or sampling parameters                        exit 2
    ├── StorageError       the disk is full or refuses to be written              exit 1
    ├── TrainingError      a run that failed: a non-finite loss, nothing to learn exit 1
    └── RankError          a rank that failed, or ranks that disagree             exit 1

The first four are what a person did; each message names the key, the value and the way out.
A broken invariant of our own is an ``assert``, never one of these.
"""


class PellucidError(Exception):
    """Base of every error that Pellucid raises on purpose."""

    exit_code = 1


class ConfigError(PellucidError):
    """A setting is unknown, out of range, or contradicts another."""

    exit_code = 2


class DataError(PellucidError):
    """Input text, token shards or a tokenizer cannot be used; names the file and the place in it."""

    exit_code = 2


class CheckpointError(PellucidError):
    """A model folder or a checkpoint is missing, damaged or of another kind; names the first bad file."""

    exit_code = 2


class RequestError(PellucidError):
    """A prompt or its sampling parameters cannot be served."""

    exit_code = 2


class StorageError(PellucidError):
    """A file could not be written. What was complete before is still complete."""


class TrainingError(PellucidError):
    """Training cannot go on. Weights are those of the last finished step."""


class RankError(PellucidError):
    """A rank raised or was killed, or ranks were about to issue different collectives.

    Attributes:
        rank: the rank that failed first; None where it is not one rank's fault.
        traceback: of that rank, as text; empty where there is none.
        error: the name of its exception's class or of the signal that killed it.
        interrupted: whether the launcher got a signal as well; set by it.
    """

    interrupted = False

    def __init__(
        self, message: str, *, rank: int | None = None, traceback: str = "", error: str = "", exit_code: int = 1
    ) -> None:
        super().__init__(message)
        self.rank, self.traceback, self.error, self.exit_code = rank, traceback, error, exit_code


def require(ok: bool, message: str) -> None:
    """`ConfigError` with this message unless ``ok``."""
    if not ok:
        raise ConfigError(message)
