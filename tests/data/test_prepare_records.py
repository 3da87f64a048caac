"""From files of examples to a folder of records: what is in it, what was left out, and that it is all or nothing."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pellucid.data import encode_records as encode_module
from pellucid.data.prepare import PrepareOptions
from pellucid.data.prepare_records import RecordSummary, prepare_records
from pellucid.data.record_files import RecordData, RecordSplit
from pellucid.data.records import open_records
from pellucid.data.samples import arithmetic
from pellucid.errors import ConfigError, DataError, PellucidError
from pellucid.tokenizer import Tokenizer, train_bpe

ASK = {"role": "user", "content": "What is this?"}
WORDS = "red blue green ball house tree one two three of in on What is this? It is"


def say(i: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"It is the {WORDS.split()[i % 9]} one, number {i}."}


def chats(num: int) -> list[dict[str, Any]]:
    return [{"messages": [ASK, say(i)]} for i in range(num)]


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([WORDS, *(say(i)["content"] for i in range(40))], 300).save(folder)
    return folder


def run(out: Path, *inputs: str | Path, kind: str = "sft", **options: Any) -> RecordSummary:
    return prepare_records(
        PrepareOptions(inputs=tuple(map(str, inputs)), out=out, **{"workers": 1, "records": kind, **options})
    )


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def learnt(split: RecordSplit, tokenizer: Tokenizer, part: int = 0) -> list[str]:
    found = (split.record(number).parts[part] for number in range(len(split)))
    return [tokenizer.decode(each.ids[each.learnt].tolist()) for each in found]


# -- what is in the folder ----------------------------------------------------------------------------------


def test_every_example_is_in_one_split_once_and_in_order(tmp_path: Path, tokenizer: Path) -> None:
    summary = run(tmp_path / "data", jsonl(tmp_path / "a.jsonl", chats(300)), tokenizer=tokenizer, val_fraction=0.1)
    data = RecordData.open(tmp_path / "data")
    data.verify()
    own = data.tokenizer()
    said = {name: learnt(data.split(name), own) for name in ("train", "val")}
    wanted = [say(i)["content"] for i in range(300)]
    assert sorted(said["train"] + said["val"]) == sorted(wanted)
    for texts in said.values():
        assert texts == [text for text in wanted if text in set(texts)]
    assert 10 < len(said["val"]) < 60
    assert {name: split["records"] for name, split in summary.splits.items()} == {k: len(v) for k, v in said.items()}
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    assert (index["kind"], index["format_version"]) == ("sft", 1)
    assert {"tokens", "documents", "files"} <= index["splits"]["train"].keys()


def test_the_same_input_gives_the_same_bytes_on_any_number_of_workers(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "BATCH_BYTES", 2000)
    records = chats(60) + [{"messages": [ASK]}] + chats(40)
    pairs = [{"prompt": "What is this?", "chosen": say(i)["content"], "rejected": "No."} for i in range(50)]
    problems = [{"messages": [ASK, say(i)], "nr": i} for i in range(50)]
    for kind, table in (("sft", records), ("dpo", pairs), ("grpo", problems)):
        source = jsonl(tmp_path / f"{kind}.jsonl", table)
        summaries = [
            run(
                tmp_path / f"{kind}{w}",
                source,
                kind=kind,
                tokenizer=tokenizer,
                workers=w,
                on_error="skip",
                val_fraction=0.1,
            )
            for w in (1, 2)
        ]
        assert files(tmp_path / f"{kind}1") == files(tmp_path / f"{kind}2")
        assert summaries[0].first_skipped == summaries[1].first_skipped
        assert summaries[0].num_skipped == (kind == "sft")


def test_a_worker_that_dies_is_an_error_and_leaves_nothing(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "a.jsonl", chats(20))
    monkeypatch.setattr(encode_module, "_BOOT", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(PellucidError, match="an encoding worker died"):
        run(tmp_path / "data", source, tokenizer=tokenizer, workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_two_records_are_one_in_each_split_and_one_is_trained_on(tmp_path: Path, tokenizer: Path) -> None:
    two = run(tmp_path / "two", jsonl(tmp_path / "2.jsonl", chats(2)), tokenizer=tokenizer)
    assert {name: split["records"] for name, split in two.splits.items()} == {"train": 1, "val": 1}
    one = run(tmp_path / "one", jsonl(tmp_path / "1.jsonl", chats(1)), tokenizer=tokenizer)
    assert list(one.splits) == ["train"] and "only one record" in " ".join(one.notes)
    none = run(tmp_path / "none", jsonl(tmp_path / "3.jsonl", chats(30)), tokenizer=tokenizer, val_fraction=0.0)
    assert list(none.splits) == ["train"]


def test_problems_that_are_held_out_are_the_validation_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = arithmetic.two_digit_problems()[::60]
    monkeypatch.setattr(arithmetic, "two_digit_problems", lambda: problems)
    run(tmp_path / "data", "sample:arithmetic", kind="grpo", vocab_size=270, val_fraction=0.5)
    data = RecordData.open(tmp_path / "data")
    sizes = {}
    for name in ("train", "val"):
        split = data.split(name)
        sizes[name] = len(split)
        for number in range(len(split)):
            table = split.record(number).table
            assert table is not None and arithmetic.is_held_out(table["prompt"][8:-1]) == (name == "val")
    assert sum(sizes.values()) == len(problems) and 10 < sizes["val"] < 40


# -- formats ------------------------------------------------------------------------------------------------


def test_parquet_and_jsonl_of_the_same_examples_give_the_same_records(tmp_path: Path, tokenizer: Path) -> None:
    records = [*chats(20), {"prompt": "What is this?", "completion": "Blue."}]
    rows = [dict.fromkeys(("messages", "prompt", "completion")) | record for record in records]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    run(tmp_path / "one", jsonl(tmp_path / "a.jsonl", records), tokenizer=tokenizer)
    run(tmp_path / "two", tmp_path / "a.parquet", tokenizer=tokenizer)
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(one[name] == two[name] for name in one if name != "index.json")


def test_stored_rollouts_come_from_hdf5_and_from_jsonl_alike(tmp_path: Path, tokenizer: Path) -> None:
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(12):
        responses = rng.integers(0, 200, (3, 5))
        groups.append({
            "prompts": rng.integers(0, 200, 4).tolist(), "responses": responses.tolist(),
            "masks": (np.arange(5) < rng.integers(1, 6, (3, 1))).astype(int).tolist(), "rewards": rng.random(3).tolist(),
        })  # fmt: skip
    with h5py.File(tmp_path / "r.h5", "w") as file:
        for key in groups[0]:
            for i, group in enumerate(groups):
                file.create_dataset(f"{key}/data_{i}", data=np.asarray(group[key]))
    run(tmp_path / "one", jsonl(tmp_path / "r.jsonl", groups), kind="grpo", tokenizer=tokenizer, val_fraction=0)
    run(tmp_path / "two", tmp_path / "r.h5", kind="grpo", tokenizer=tokenizer, val_fraction=0)
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert all(one[name] == two[name] for name in one if name != "index.json")
    samples = open_records(RecordData.open(tmp_path / "two"), "train", context=32)
    batch: Any = samples.batch([3])
    assert batch.rewards.tolist() == pytest.approx(groups[3]["rewards"])
    assert int(batch.response_mask.sum()) == int(np.sum(groups[3]["masks"]))


def test_prompts_and_rollouts_do_not_share_a_folder(tmp_path: Path, tokenizer: Path) -> None:
    rollout = {"prompts": [1], "responses": [[2]], "masks": [[1]], "rewards": [1.0]}
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "y"}, rollout])
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: prompts, stored rollouts .* cannot be in one folder"):
        run(tmp_path / "data", source, kind="grpo", tokenizer=tokenizer)


def test_a_folder_is_read_for_its_examples_and_files_of_text_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    jsonl(folder / "a.jsonl", chats(3))
    (folder / "b.txt").write_text("words")
    (folder / "c.png").write_bytes(b"x")
    summary = run(tmp_path / "data", folder, tokenizer=tokenizer)
    assert summary.num_ignored == 2 and summary.splits["train"]["records"] == 2
    (folder / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"no examples in files of text; known: \.jsonl, \.parquet"):
        run(tmp_path / "other", folder, tokenizer=tokenizer)


# -- what is left out, and said -----------------------------------------------------------------------------


def test_bad_examples_stop_with_their_place_or_are_counted_out_loud(tmp_path: Path, tokenizer: Path) -> None:
    bad = [{"messages": [ASK]}, {"messages": [ASK, {"role": "assistant", "content": ""}]}, {"messages": [say(1), ASK]}]
    source = jsonl(tmp_path / "a.jsonl", [*chats(5), *bad, "no object", *chats(5)])
    with pytest.raises(DataError, match=r"a\.jsonl:6: no assistant turn in messages"):
        run(tmp_path / "data", source, tokenizer=tokenizer)
    assert not (tmp_path / "data").exists()
    summary = run(tmp_path / "data", source, tokenizer=tokenizer, on_error="skip")
    assert summary.num_skipped == 4
    places = [message.split(": ")[0].rpartition(":")[2] for message in summary.first_skipped]
    assert sorted(places) == ["6", "7", "8", "9"]
    assert sum(split["records"] for split in summary.splits.values()) == 10


def test_chosen_equal_to_rejected_is_counted(tmp_path: Path, tokenizer: Path) -> None:
    pairs = [{"prompt": "x", "chosen": f"{i}", "rejected": f"{i % 4}"} for i in range(8)]
    summary = run(
        tmp_path / "data", jsonl(tmp_path / "a.jsonl", pairs), kind="dpo", tokenizer=tokenizer, on_error="skip"
    )
    assert summary.num_skipped == 4 and "chosen and rejected are the same" in summary.first_skipped[0]


def test_nothing_usable_is_an_error_that_says_why(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"messages": [ASK]}] * 3)
    with pytest.raises(DataError, match=r"3 skipped; first: .*a\.jsonl:1: no assistant turn"):
        run(tmp_path / "data", source, tokenizer=tokenizer, on_error="skip")
    assert not (tmp_path / "data").exists()


def test_the_summary_says_how_long_records_are_and_how_full_rows_will_be(tmp_path: Path, tokenizer: Path) -> None:
    long = {"messages": [ASK, {"role": "assistant", "content": "It is " * 60}]}
    source = jsonl(tmp_path / "a.jsonl", [*chats(50), long, {"messages": [ASK, say(1), ASK]}])
    summary = run(tmp_path / "data", source, tokenizer=tokenizer, context=64, val_fraction=0)
    split = RecordData.open(tmp_path / "data").split("train")
    assert summary.row_tokens["100"] == summary.splits["train"]["longest"] == int(split.lengths.max()) > 65
    assert summary.row_tokens["50"] == sorted(split.lengths)[len(split) // 2]
    assert (summary.num_longer, summary.unanswered) == (1, 1)
    samples: Any = open_records(RecordData.open(tmp_path / "data"), "train", context=64)
    filled = sum(int((batch.document_ids >= 0).sum()) for batch in samples.batches(1)) / (64 * len(samples))
    assert summary.filled == pytest.approx(filled) and 0.5 < filled < 1


# -- tokenizers and templates -------------------------------------------------------------------------------


def test_a_chat_template_of_ones_own_makes_the_data_and_goes_with_it(tmp_path: Path, tokenizer: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant] "
        "{% endif %}"
    )
    source = jsonl(tmp_path / "a.jsonl", chats(4))
    run(tmp_path / "data", source, tokenizer=tokenizer, chat_template=str(template), val_fraction=0)
    data = RecordData.open(tmp_path / "data")
    own = data.tokenizer()
    assert own.chat_template == template.read_text()
    assert own.sha256 == Tokenizer.load(tokenizer).sha256, "a model with this tokenizer can be trained on it"
    text = own.decode(data.split("train").record(0).parts[0].ids.tolist(), skip_special=False)
    assert text.startswith("[user] What is this?<|im_end|>[assistant] It is")
    assert learnt(data.split("train"), own)[1] == say(1)["content"]


def test_texts_can_stay_as_they_are(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"prompt": "2 + 2 = ", "answer": 4}] * 2)
    summary = run(tmp_path / "data", source, tokenizer=tokenizer, chat_template="none", val_fraction=0)
    data = RecordData.open(tmp_path / "data")
    assert data.tokenizer().chat_template is None
    ids = data.split("train").record(0).parts[0].ids.tolist()
    assert data.tokenizer().decode(ids, skip_special=False) == "<|endoftext|>2 + 2 = 4<|endoftext|>"
    assert any("no chat template" in note for note in summary.notes)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{% for m in messages %}", DataError, r"t\.jinja: the chat template is broken in line 1"),
        ("{{ raise_exception('never') }}", DataError, r"a\.jsonl:1: the chat template refuses these messages: never"),
        ("{{ messages[7].content }}", DataError, r"a\.jsonl:1: .*the chat template fails on these messages"),
    ],
)
def test_a_template_that_cannot_work_stops_before_anything_is_made(
    tmp_path: Path, tokenizer: Path, template: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    source = jsonl(tmp_path / "a.jsonl", chats(4))
    with pytest.raises(error, match=message):
        run(tmp_path / "data", source, tokenizer=tokenizer, chat_template=str(tmp_path / "t.jinja"))
    assert not (tmp_path / "data").exists()


def test_without_a_tokenizer_one_is_trained_on_what_is_said_and_ids_are_refused(tmp_path: Path) -> None:
    summary = run(tmp_path / "data", jsonl(tmp_path / "a.jsonl", chats(40)), vocab_size=300)
    assert any("a tokenizer of" in note and "--tokenizer MODEL" in note for note in summary.notes)
    trained = Tokenizer.load(tmp_path / "data")
    assert len(trained.encode("It is the")) <= 4
    ids = jsonl(tmp_path / "b.jsonl", [{"sequence": [1, 2], "loss_mask": [0, 1]}])
    with pytest.raises(ConfigError, match=r"token ids need the tokenizer that made them; give --tokenizer PATH"):
        run(tmp_path / "other", ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_key": "body"}, "--text-key body is for text"),
        ({"context": 1}, "--context must be at least 2"),
        ({"chat_template": "gone.jinja"}, r"--chat-template gone\.jinja: cannot be read \(No such file"),
        ({"records": None, "chat_template": "none"}, "--chat-template is for records; give --for"),
        ({"records": None, "context": 64}, "--context is for records; give --for"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, tokenizer: Path, options: Any, message: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", chats(4))
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "data", source, **({"tokenizer": tokenizer} | options))


def test_a_source_of_text_has_no_examples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sample:python is text and has no examples for sft; sample:chats \(sft\)"):
        run(tmp_path / "data", "sample:python")


def test_weights_mix_examples(tmp_path: Path, tokenizer: Path) -> None:
    one = jsonl(tmp_path / "1.jsonl", chats(200))
    two = jsonl(tmp_path / "2.jsonl", chats(200))
    summary = run(tmp_path / "data", one, two, tokenizer=tokenizer, weights=(1.0, 3.0))
    shares = [source["bytes"] for source in summary.sources]
    assert shares[1] / shares[0] == pytest.approx(3, abs=0.2)
