"""A folder that appears whole or not at all.

It is filled beside its place as ``DIR.tmp-<pid>`` and renamed at the end. Its writer holds a lock on it that the kernel
drops when the writer dies, however it dies; the next run for the same place clears such leftovers away.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pellucid.data.index import storage_error
from pellucid.errors import ConfigError


@contextmanager
def staged_folder(out: str | Path) -> Iterator[Path]:
    """A new folder to write into, which becomes ``out`` if the block ends without an exception, else disappears.

    Files written through it are made durable before the rename.

    Raises:
        ConfigError: ``out`` is there already and not an empty folder.
        StorageError: the place cannot be written.
    """
    place = Path(os.path.realpath(out))
    _refuse_used(place)
    temporary = place.with_name(f"{place.name}.tmp-{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(place)
        temporary.mkdir()
        lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(temporary, error) from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the pid in the name has to do
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield temporary
        _publish(temporary, place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _refuse_used(place: Path) -> None:
    if place.is_dir() and not any(place.iterdir()):
        return
    if place.exists():
        what = "has files in it" if place.is_dir() else "is a file"
        raise ConfigError(f"--out {place} {what}; choose another --out or remove it")


def _publish(temporary: Path, place: Path) -> None:
    try:
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        temporary.rename(place)
        _sync(place.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ConfigError(f"--out {place} was filled by another run meanwhile; choose another --out") from error
        raise storage_error(place, error) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clear_leftovers(place: Path) -> None:
    for path in place.parent.iterdir():
        name, _, pid = path.name.rpartition(".tmp-")
        if name == place.name and pid.isdecimal() and path.is_dir() and _abandoned(path, int(pid)):
            shutil.rmtree(path)


def _abandoned(path: Path, pid: int) -> bool:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists()
    finally:
        os.close(handle)
