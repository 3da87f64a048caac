"""docs/guides/data_for_posttraining.md: every example it shows is read, and its conversion of a corpus works."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pellucid.data.batches import Loader
from pellucid.data.examples import example
from pellucid.data.packing import best_fit
from pellucid.data.prepare import PrepareOptions
from pellucid.data.prepare_records import prepare_records
from pellucid.data.record_files import RecordData
from pellucid.data.records import open_records
from pellucid.tokenizer import Tokenizer, train_bpe

TEXT = (Path(__file__).resolve().parents[2] / "docs/guides/data_for_posttraining.md").read_text(encoding="utf-8")


def documented() -> list[tuple[str, str]]:
    """(kind, line) of each example; those tokenised before come in the order sft, dpo, grpo."""
    found = []
    for section in re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        lines = [
            line
            for block in re.findall(r"^```jsonl\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
            for line in block.splitlines()
        ]
        kinds = ["sft", "dpo", "grpo"] if name == "Tokenised before" else [name] * len(lines)
        found += list(zip(kinds, lines, strict=True))
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], 400)


def test_each_shape_of_each_kind_is_documented() -> None:
    assert [kind for kind, _ in documented()].count("sft") == 6
    assert {kind for kind, _ in documented()} == {"sft", "dpo", "grpo"}


@pytest.mark.parametrize(("kind", "line"), documented())
def test_each_documented_example_is_read_and_has_something_to_learn(kind: Any, line: str, tokenizer: Tokenizer) -> None:
    record = example(json.loads(line), kind, tokenizer, "here")
    learnt = [int(part.learnt.sum()) for part in record.parts]
    answers = {"sft": learnt, "dpo": learnt[1:], "grpo": learnt[1:]}[kind]
    assert all(answers) and (kind == "sft" or learnt[0] == 0)


CORPUS = """\
categories:
- small talk
conversations:
- - What is this?
  - A ball.
  - Is it red?
  - 'Yes: red.'
- - How many?
  - 12
"""


def test_the_conversion_of_a_corpus_makes_conversations_and_the_loop_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "chatterbot_corpus/data/english").mkdir(parents=True)
    (tmp_path / "chatterbot_corpus/data/english/talk.yml").write_text(CORPUS)
    monkeypatch.chdir(tmp_path)
    convert, loop = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    exec(compile(convert, "convert", "exec"), {})
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["messages"]) for line in lines] == [4, 2]
    prepare_records(
        PrepareOptions(
            inputs=("chats.jsonl",),
            out=tmp_path / "data/chats",
            records="sft",
            vocab_size=300,
            workers=1,
            val_fraction=0,
        )
    )
    exec(compile(loop, "loop", "exec"), {})
    assert "torch.Size([8, 512])" in capsys.readouterr().out


@pytest.mark.parametrize("context", [256, 512])
def test_rows_of_the_built_in_chats_are_filled_to_95_in_100(tmp_path: Path, context: int) -> None:
    options = PrepareOptions(
        inputs=("sample:chats",),
        out=tmp_path / "data",
        records="sft",
        size="400KB",
        vocab_size=2000,
        context=context,
        workers=1,
    )
    summary = prepare_records(options)
    assert summary.filled is not None and summary.filled >= 0.95
    samples = open_records(RecordData.open(tmp_path / "data"), "train", context=context)
    loader = Loader(samples, global_batch=8, micro_batch=8, seed=0)
    useful = total = 0
    for _ in range(loader.steps_per_epoch):
        for batch in loader.next_window():
            rows = batch.document_ids[batch.sample_ids >= 0]
            useful, total = useful + int((rows >= 0).sum()), total + rows.numel()
    assert useful / total >= 0.95
    assert useful / total <= samples.split.num_tokens / total, "a token counts once"
    sizes = samples.split.lengths - 1
    assert len(samples) == len(best_fit(sizes, context).ends)
