"""File formats: what is a document, and what each kind of bad input is told."""

import gzip
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data import readers, tables
from pellucid.data.documents import Document, ReadLog
from pellucid.data.readers import kind_of, read_file
from pellucid.errors import ConfigError, DataError


def read(path: Path, key: str = "text", *, skip: bool = False) -> tuple[list[Document], ReadLog]:
    log = ReadLog(skip=skip)
    return list(read_file(path, key, log)), log


def contents(path: Path, key: str = "text") -> list[Any]:
    return [d.content.tolist() if isinstance(d.content, np.ndarray) else d.content for d in read(path, key)[0]]


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "A.TXT"])
def test_a_text_file_is_one_document_as_it_is(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "one\r\n\r\ntwo\u00e9\n")
    documents, log = read(path)
    assert [(d.content, d.location, d.num_bytes) for d in documents] == [("one\r\n\r\ntwoé\n", str(path), 13)]
    assert log.done_bytes == 13


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    assert contents(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]
    assert contents(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hello"}\n')) == ["hello"]


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from("ab\n\r é€🙂"), min_size=1, max_size=300).filter(lambda t: not t.isspace()),
    piece=st.integers(8, 64),
)
def test_pieces_of_a_large_file_join_to_the_file_and_are_small(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int
) -> None:
    path = write(tmp_path_factory.mktemp("text") / "a.txt", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_BYTES", piece)
        patch.setattr(readers, "text_document", lambda text, location: Document(text, location, len(text.encode())))
        documents, _ = read(path)
    assert "".join(str(d.content) for d in documents) == text
    assert all(0 < d.num_bytes <= piece for d in documents)


def test_a_large_file_is_cut_at_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 20)
    path = write(tmp_path / "a.txt", "first\nline\n\nsecond one\n\nthird paragraph\n\nx")
    documents, _ = read(path)
    assert [d.content for d in documents] == ["first\nline\n\n", "second one\n\n", "third paragraph\n\nx"]
    assert [d.location for d in documents] == [f"{path}: byte {n}" for n in (0, 12, 24)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compressed_files_read_as_plain_ones(tmp_path: Path, suffix: str) -> None:
    lines = "".join(json.dumps({"text": f"document {i} " + "é" * (i % 50)}) + "\n" for i in range(3000)).encode()
    half = lines.index(b"\n", len(lines) // 2) + 1
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = write(tmp_path / f"a.jsonl{suffix}", pack(lines[:half]) + pack(lines[half:]))  # two frames, as `cat` makes
    documents, log = read(path)
    assert [d.content for d in documents] == [f"document {i} " + "é" * (i % 50) for i in range(3000)]
    assert documents[-1].location == f"{path}:3000"
    assert log.done_bytes == path.stat().st_size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "flipped"])
def test_a_damaged_archive_is_named_and_never_read_as_if_it_were_whole(
    tmp_path: Path, suffix: str, damage: str
) -> None:
    text = b"some text, again and again. " * 5000
    packed = gzip.compress(text) if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress(text)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0x55
    data = {"truncated": packed[:-6], "garbage": b"no archive at all", "flipped": bytes(flipped)}[damage]
    path = write(tmp_path / f"a.txt{suffix}", data)
    with pytest.raises(DataError, match=r"a\.txt.*cannot be read"):
        read(path)
    _, log = read(path, skip=True)
    assert log.num_skipped == 1


def test_a_line_of_jsonl_is_text_a_conversation_or_ids(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    records = [{"text": "plain", "x": 1}, {"messages": chat}, {"ids": [1, 2, 3]}, {"text": [7, 8]}, {"text": chat}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
    assert contents(path) == ["plain", chat, [1, 2, 3], [7, 8], chat]
    body = write(tmp_path / "b.jsonl", '{"body": "under another key", "text": "not this"}')
    assert contents(body, "body") == ["under another key"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "broken"', r"a\.jsonl:2: not JSON"),
        (b"[1, 2]", r"a\.jsonl:2: a line must be a JSON object, got list"),
        (b'{"txt": "a", "n": 1}', r"a\.jsonl:2: no key 'text'; the record has: 'txt', 'n'.*--text-key"),
        (b'{"text": 5}', r"a\.jsonl:2: expected text, .* got int"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: invalid UTF-8 at byte offset 30 \(0xff\)"),
        (b'{"text": "\x00"}', r"a\.jsonl:2: NUL byte at byte offset 30"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:2: character 0 is half of a surrogate pair"),
        (b'{"ids": [1, -2]}', r"a\.jsonl:2: token ids must be"),
        (b'{"ids": [1, 2.5]}', r"a\.jsonl:2: token ids must be"),
        (b'{"ids": [1, "a"]}', r"a\.jsonl:2: token ids must be"),
        (b'{"ids": [[1], [2, 3]]}', r"a\.jsonl:2: a list of ids"),
        (b'{"ids": [99999999999999999999999]}', r"a\.jsonl:2: token ids must be"),
        (b'{"messages": [{"role": "user"}]}', r'a\.jsonl:2: messages\[0\] must be an object with the strings "role"'),
        (b'{"messages": [{"role": "user", "content": ["x"]}]}', r"a\.jsonl:2: messages\[0\]"),
        (b'{"text": ' + b"[" * 100_000, r"a\.jsonl:2: not JSON"),
    ],
)
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path: Path, line: bytes, message: str) -> None:
    first = b'{"text": "the first"}'
    path = write(tmp_path / "a.jsonl", first + b"\n" + line + b'\n\n{"text": "the last"}')
    if "offset 30" in message:
        message = message.replace("30", str(len(first) + 1 + 10))
    with pytest.raises(DataError, match=message):
        read(path)
    documents, log = read(path, skip=True)
    assert [d.content for d in documents] == ["the first", "the last"]
    assert (log.num_skipped, log.num_empty, len(log.first_skipped)) == (1, 1, 1)
    assert "a.jsonl:2" in log.first_skipped[0]


def test_skipped_lines_are_all_counted_and_the_first_twenty_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "bad\n" * 50 + '{"text": "good"}\n')
    documents, log = read(path, skip=True)
    assert (len(documents), log.num_skipped, len(log.first_skipped)) == (1, 50, 20)
    assert log.first_skipped[19].startswith(f"{path}:20:")


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "a.jsonl", '{"text": "ok"}\n' + "x" * 5000)
    with pytest.raises(DataError, match="line 2 is longer than"):
        read(path)
    assert [d.content for d in read(path, skip=True)[0]] == ["ok"]


def test_binary_junk_and_invalid_utf8_are_named_with_the_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"a\.txt: NUL byte at byte offset 4; this is a binary file"):
        read(write(tmp_path / "a.txt", b"\x7fELF\x00\x01"))
    with pytest.raises(DataError, match=r"b\.txt: invalid UTF-8 at byte offset 3 \(0xe9\)"):
        read(write(tmp_path / "b.txt", b"caf\xe9 au lait"))
    with pytest.raises(DataError, match=r"c\.txt: invalid UTF-8 at byte offset 3"):
        read(write(tmp_path / "c.txt", b"cut\xe2\x82"))
    monkeypatch.setattr(readers, "PIECE_BYTES", 50)
    with pytest.raises(DataError, match=r"d\.txt: invalid UTF-8 at byte offset 130 \(0xff\)"):
        read(write(tmp_path / "d.txt", b"abcdefghi\n" * 13 + b"\xff"))


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    assert [log.num_empty for _, log in [read(write(tmp_path / "a.txt", b""))]] == [1]
    assert [log.num_empty for _, log in [read(write(tmp_path / "b.txt", b" \n\n"))]] == [1]
    documents, log = read(write(tmp_path / "a.jsonl", '{"text": ""}\n{"ids": []}\n{"text": null}\n{"text": "x"}\n'))
    assert ([d.content for d in documents], log.num_empty) == (["x"], 3)


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read \(No such file"):
        read(tmp_path / "gone.txt")


def test_which_kinds_are_read() -> None:
    known = {
        "a.txt": ".txt",
        "a.b.MD": ".md",
        "x.py.gz": ".py",
        "x.jsonl.zst": ".jsonl",
        "x.h5": ".h5",
        "x.hdf5": ".hdf5",
    }
    assert {name: kind_of(Path(name)) for name in known} == known
    assert [kind_of(Path(name)) for name in ("a.docx", "a.gz", "a.parquet.gz", "txt", "a.json", ".txt")] == [None] * 6


# -- tables -------------------------------------------------------------------------------------------------


def parquet(path: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=700)
    return path


def test_a_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(2500)]
    path = parquet(tmp_path / "a.parquet", text=texts, other=list(range(2500)))
    documents, log = read(path)
    assert [d.content for d in documents] == texts
    assert documents[2400].location == f"{path}: row 2401"
    assert 0.9 * path.stat().st_size <= log.done_bytes <= path.stat().st_size
    assert contents(parquet(tmp_path / "b.parquet", ids=[[1, 2], [3]])) == [[1, 2], [3]]
    chat = [{"role": "user", "content": "hi"}]
    assert contents(parquet(tmp_path / "c.parquet", messages=[chat])) == [chat]
    documents, log = read(parquet(tmp_path / "d.parquet", text=["a", None, ""]))
    assert (len(documents), log.num_empty) == (1, 2)


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: no key 'text'; the record has: 'body', 'n'"):
        read(parquet(tmp_path / "a.parquet", body=["x"], n=[1]))
    with pytest.raises(DataError, match=r"b\.parquet: row 1: expected text"):
        read(parquet(tmp_path / "b.parquet", text=[1]))
    with pytest.raises(DataError, match=r"c\.parquet: cannot be read as parquet"):
        read(write(tmp_path / "c.parquet", b"PAR1 nothing"))
    good = parquet(tmp_path / "d.parquet", text=[f"some text {i}" for i in range(2000)]).read_bytes()
    with pytest.raises(DataError, match=r"d\.parquet: cannot be read as parquet"):
        read(write(tmp_path / "d.parquet", good[:-100]))


def hdf5(path: Path, groups: dict[str, dict[str, Any]]) -> Path:
    with h5py.File(path, "w") as file:
        for name, segments in groups.items():
            for segment, values in segments.items():
                file.create_dataset(f"{name}/{segment}", data=np.asarray(values))
    return path


def test_segments_come_in_numeric_order(tmp_path: Path) -> None:
    path = hdf5(tmp_path / "a.h5", {"sequence": {f"data_{i}": [i, i + 1] for i in range(12)}})
    assert contents(path) == [[i, i + 1] for i in range(12)]  # by name, data_10 would come after data_1
    assert read(path)[0][10].location == f"{path}: sequence/data_10"


def test_the_group_is_chosen_by_key(tmp_path: Path) -> None:
    path = hdf5(tmp_path / "a.h5", {"a": {"data_0": [1]}, "b": {"data_0": [2]}})
    assert contents(path, "b") == [[2]]
    with pytest.raises(DataError, match=r"a\.h5: no group 'text'; it has: 'a', 'b'.*--text-key"):
        read(path)


def test_long_segments_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SEGMENT_IDS", 4)
    path = hdf5(tmp_path / "a.h5", {"ids": {"data_0": range(10), "data_1": range(4)}})
    assert contents(path) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_bad_hdf5_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.h5: ids/data_0: a segment must be one row of whole numbers"):
        read(hdf5(tmp_path / "a.h5", {"ids": {"data_0": [0.5]}}))
    with pytest.raises(DataError, match=r"b\.h5: ids/part: segments are named data_0"):
        read(hdf5(tmp_path / "b.h5", {"ids": {"part": [1]}}))
    with pytest.raises(DataError, match=r"c\.h5: cannot be read as HDF5"):
        read(write(tmp_path / "c.h5", b"no HDF5"))
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["ids"] = [1, 2]
    with pytest.raises(DataError, match=r"d\.h5: 'ids' is not a group"):
        read(tmp_path / "d.h5")
    _, log = read(hdf5(tmp_path / "e.h5", {"ids": {"data_0": [0.5], "data_1": [3]}}), skip=True)
    assert log.num_skipped == 1


@pytest.mark.parametrize(
    ("name", "module"), [("a.parquet", "pyarrow.parquet"), ("a.h5", "h5py"), ("a.txt.zst", "zstandard")]
)
def test_a_missing_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    path = write(tmp_path / name, b"x")
    with pytest.raises(ConfigError, match=rf'{module}.*pip install "pellucid\[formats\]"'):
        read(path)
    with pytest.raises(ConfigError):  # not something to skip
        read(path, skip=True)
