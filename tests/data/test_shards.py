"""Shards against plain numpy arrays, and every way in which a folder can be damaged."""

import json
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pellucid.data.index import FORMAT_VERSION, write_index
from pellucid.data.shards import ShardWriter, TokenData, dtype_for
from pellucid.errors import DataError, StorageError


def write_data(
    folder: Path,
    documents: list[np.ndarray],
    *,
    vocab_size: int = 1000,
    shard_tokens: int = 100,
    at_once: int | None = None,
) -> Path:
    dtype = dtype_for(vocab_size)
    writer = ShardWriter(folder, "train", dtype, shard_tokens)
    if at_once is None:
        for ids in documents:
            writer.add(ids)
    else:
        for chunk in (documents[i : i + at_once] for i in range(0, len(documents), at_once)):
            writer.add_many(np.concatenate(chunk), np.array([len(ids) for ids in chunk]))
    entry = writer.finish()
    write_index(
        folder, dtype=dtype, vocab_size=vocab_size, tokenizer_sha256="0" * 64, splits={"train": entry}, sources=[]
    )
    return folder


def some_documents(count: int = 40, vocab_size: int = 1000, longest: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, int(rng.integers(1, longest))) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    shard_tokens=st.integers(1, 60),
    at_once=st.none() | st.integers(1, 40),
    data=st.data(),
)
@example(lengths=[4, 1], shard_tokens=3, at_once=2, data=None)  # a document longer than a shard is followed by another
def test_reads_and_spans_equal_those_of_one_long_array(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    shard_tokens: int,
    at_once: int | None,
    data: st.DataObject | None,
) -> None:
    rng = np.random.default_rng(len(lengths))
    documents = [rng.integers(0, 1000, n) for n in lengths]
    folder = write_data(tmp_path_factory.mktemp("data"), documents, shard_tokens=shard_tokens, at_once=at_once)
    split = TokenData.open(folder).split("train")
    flat, ends = np.concatenate(documents), np.cumsum(lengths)
    assert (split.num_tokens, split.num_documents) == (len(flat), len(lengths))
    start = data.draw(st.integers(0, len(flat) - 1)) if data else 0
    stop = data.draw(st.integers(start + 1, len(flat))) if data else len(flat)
    got = split.read(start, stop)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, flat[start:stop])
    first, spans = split.document_spans(start, stop)
    owner = np.repeat(np.arange(len(lengths)), lengths)[start:stop]  # the document of each token, by brute force
    np.testing.assert_array_equal(np.arange(first, first + len(spans)), np.unique(owner))
    np.testing.assert_array_equal(spans, ends[owner[0] : owner[-1] + 1])


def test_adding_many_documents_at_once_writes_the_same_files(tmp_path: Path) -> None:
    documents = some_documents()
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    write_data(tmp_path / "one", documents)
    writer = ShardWriter(tmp_path / "many", "train", "uint16", 100)
    for chunk in (documents[:3], documents[3:30], documents[30:]):
        writer.add_many(np.concatenate(chunk), np.array([len(d) for d in chunk]))
    entry = writer.finish()
    assert entry == json.loads((tmp_path / "one" / "index.json").read_text())["splits"]["train"]
    assert len(entry["files"]) > 5
    for path in (tmp_path / "many").iterdir():
        assert path.read_bytes() == (tmp_path / "one" / path.name).read_bytes()


def test_no_file_has_more_tokens_than_asked_unless_one_document_has(tmp_path: Path) -> None:
    documents = some_documents(30, longest=40)
    documents.insert(7, np.arange(250))
    data = TokenData.open(write_data(tmp_path, documents, shard_tokens=100))
    sizes = [(tmp_path / name).stat().st_size // 2 for name in data.index.splits["train"].files]
    assert max(sizes) == 250
    assert sorted(sizes)[-2] <= 100
    starts = np.cumsum([0, *map(len, documents)])
    assert set(np.cumsum(sizes)) <= set(starts), "a file ends inside a document"


@pytest.mark.parametrize(("vocab_size", "dtype", "width"), [(65536, "uint16", 2), (65537, "uint32", 4)])
def test_ids_are_as_narrow_as_the_vocabulary_allows(tmp_path: Path, vocab_size: int, dtype: str, width: int) -> None:
    top = np.array([0, vocab_size - 1])
    data = TokenData.open(write_data(tmp_path, [top], vocab_size=vocab_size))
    assert data.index.dtype == dtype
    assert (tmp_path / "train-00000.bin").stat().st_size == 2 * width
    assert (tmp_path / "train-00000.bin").read_bytes() == top.astype(f"<u{width}").tobytes()
    assert (tmp_path / "train-00000.docs.bin").read_bytes() == (2).to_bytes(8, "little")
    assert data.split("train").read(0, 2).tolist() == top.tolist()
    data.split("train").verify()


def test_many_threads_read_what_one_reads(tmp_path: Path) -> None:
    documents = some_documents(200)
    split = TokenData.open(write_data(tmp_path, documents)).split("train")
    flat = np.concatenate(documents)
    wrong: list[int] = []

    def reader(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            start = int(rng.integers(0, len(flat) - 120))
            if not (split.read(start, start + 120) == flat[start : start + 120]).all():
                wrong.append(start)

    threads = [threading.Thread(target=reader, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []


def test_memory_stays_flat_while_a_large_split_is_read(tmp_path: Path) -> None:
    tokens = 30_000_000
    data = TokenData.open(write_data(tmp_path, [np.zeros(tokens, np.uint16)], shard_tokens=tokens))
    split = data.split("train")
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # noqa: E731
    split.read(0, 1000)
    before = resident()
    for start in range(0, tokens, 100_000):
        split.read(start, start + 100_000)
    assert resident() - before < 20_000_000  # the file has 60


def test_windows_outside_the_split_are_refused(tmp_path: Path) -> None:
    split = TokenData.open(write_data(tmp_path, [np.arange(10)])).split("train")
    for start, stop in ((-1, 3), (4, 3), (0, 11)):
        with pytest.raises(IndexError, match="which has 10"):
            split.read(start, stop)
    with pytest.raises(IndexError):
        split.document_spans(3, 3)
    assert len(split.read(10, 10)) == 0


@pytest.mark.parametrize("victim", ["train-00002.bin", "train-00002.docs.bin"])
@pytest.mark.parametrize("with_sizes", [True, False])
def test_a_truncated_file_is_named(tmp_path: Path, victim: str, with_sizes: bool) -> None:
    write_data(tmp_path, some_documents())
    if not with_sizes:  # an index that has only what the contract asks for
        index = json.loads((tmp_path / "index.json").read_text())
        del index["splits"]["train"]["bytes"], index["splits"]["train"]["sha256"]
        (tmp_path / "index.json").write_text(json.dumps(index))
    TokenData.open(tmp_path)
    path = tmp_path / victim
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=rf"{victim}.*(truncated|damaged)"):
        TokenData.open(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=victim):
        TokenData.open(tmp_path)


@pytest.mark.parametrize("victim", ["train-00001.bin", "train-00003.docs.bin"])
def test_a_flipped_bit_is_found_and_the_file_named(tmp_path: Path, victim: str) -> None:
    split = TokenData.open(write_data(tmp_path, some_documents())).split("train")
    split.verify()
    content = bytearray((tmp_path / victim).read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / victim).write_bytes(content)
    with pytest.raises(DataError, match=victim):
        TokenData.open(tmp_path).split("train").verify()


def test_ids_outside_the_vocabulary_and_ends_that_go_back_are_found_without_hashes(tmp_path: Path) -> None:
    write_data(tmp_path, some_documents())
    index = json.loads((tmp_path / "index.json").read_text())
    del index["splits"]["train"]["sha256"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    ids, ends = tmp_path / "train-00001.bin", tmp_path / "train-00002.docs.bin"
    content = np.fromfile(ids, "<u2")
    content[3] = 1000
    content.tofile(ids)
    with pytest.raises(DataError, match=r"train-00001\.bin holds id 1000"):
        TokenData.open(tmp_path).split("train").verify()
    content[3] = 999
    content.tofile(ids)
    offsets = np.fromfile(ends, "<u8")
    offsets[[0, 1]] = offsets[[1, 0]]
    offsets.tofile(ends)
    with pytest.raises(DataError, match=r"train-00002\.docs\.bin.*do not increase"):
        TokenData.open(tmp_path).split("train").verify()


def test_a_file_that_shrinks_under_the_reader_is_an_error(tmp_path: Path) -> None:
    split = TokenData.open(write_data(tmp_path, [np.arange(1000) % 7], shard_tokens=2000)).split("train")
    with (tmp_path / "train-00000.bin").open("r+b") as file:
        file.truncate(100)
    assert split.read(0, 50).tolist() == [i % 7 for i in range(50)]
    with pytest.raises(DataError, match="truncated while"):
        split.read(0, 51)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not an index"),
        ({"format_version": FORMAT_VERSION + 1}, "newer version.*upgrade"),
        ({"format_version": "x"}, "format_version"),
        ({"kind": "dpo"}, "holds records for dpo, not text; use them with strategy.name dpo"),
        ({"kind": "ppo"}, "kind is 'ppo', known: tokens, sft, dpo, grpo"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"vocab_size": 70000}, "70000 does not fit"),
        ({"vocab_size": None}, "damaged"),
        ({"splits": {"train": {"tokens": 1, "documents": 1, "files": ["../x.bin"]}}}, "not the name"),
        ({"splits": {"train": {"documents": 1, "files": []}}}, "'tokens' is missing"),
        ({"splits": {"train": {"tokens": float("inf"), "documents": 1, "files": []}}}, "damaged: .*infinity"),
        ({"splits": {"train": {"tokens": 3, "documents": 1, "files": []}}}, "should have 3 tokens"),
        ({"splits": []}, "damaged"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_data(tmp_path, some_documents())
    index = json.loads((tmp_path / "index.json").read_text()) | change
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=message):
        TokenData.open(tmp_path)


def test_what_is_no_data_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such folder.*pellucid prepare"):
        TokenData.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no index.json.*pellucid prepare"):
        TokenData.open(tmp_path)
    (tmp_path / "index.json").write_text('{"format": ')
    with pytest.raises(DataError, match="not JSON"):
        TokenData.open(tmp_path)
    (tmp_path / "index.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="not JSON"):
        TokenData.open(tmp_path)
    with pytest.raises(DataError, match="is a file"):
        TokenData.open(tmp_path / "index.json")


def test_a_split_that_is_not_there_is_named(tmp_path: Path) -> None:
    data = TokenData.open(write_data(tmp_path, some_documents()))
    assert data.split_names == ["train"]
    with pytest.raises(DataError, match="no split 'val'; it has: train"):
        data.split("val")


def test_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    data = TokenData.open(write_data(tmp_path, some_documents()))
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read"):
        data.tokenizer()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="does not belong to this data"):
        data.verify()


def test_a_full_disk_is_a_storage_error_that_names_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = ShardWriter(tmp_path, "train", "uint16", 10_000_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageError, match=r"train-00000\.bin"):
            for _ in range(100):
                writer.add(np.zeros(100_000, np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.close()
