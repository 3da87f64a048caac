"""`pellucid inspect DATA --show N`: the examples as a person reads them, with the tokens that are learnt."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pellucid.cli import main
from pellucid.cli.show_examples import examples, print_examples
from pellucid.data.prepare import PrepareOptions, prepare
from pellucid.data.prepare_records import prepare_records

CHAT = [{"role": "user", "content": "Say \x1b[31mred."}, {"role": "assistant", "content": "Red\x07 it is."}]
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "sft": [{"messages": [*CHAT, {"role": "user", "content": "More?"}, {"role": "assistant", "content": "No."}]}],
    "dpo": [{"prompt": "Which?", "chosen": "This one.", "rejected": "That one."}],
    "grpo": [{"prompt": "1 + 1", "answer": "2"}],
}


def folder(tmp_path: Path, kind: str, table: list[dict[str, Any]]) -> Path:
    source, out = tmp_path / "examples.jsonl", tmp_path / kind
    source.write_text("".join(json.dumps(each) + "\n" for each in table * 3))
    prepare_records(
        PrepareOptions(inputs=(str(source),), out=out, records=kind, vocab_size=300, val_fraction=0, workers=1)  # type: ignore[arg-type]
    )
    return out


def shown(out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["inspect", str(out), "--show", "2", *flags]) == 0
    return capsys.readouterr().out


def test_what_is_learnt_stands_in_brackets_where_there_are_no_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(folder(tmp_path, "sft", EXAMPLES["sft"]), capsys)
    assert "train 0\n" in text and "train 1\n" in text and "train 2\n" not in text
    assert "<|im_start|>assistant\n⟦Red\ufffd it is.<|im_end|>⟧\n" in text
    assert "user\nMore?<|im_end|>\n<|im_start|>assistant\n⟦No.<|im_end|>⟧" in text
    assert "\x1b" not in text, "what an example says commands no terminal"


def test_the_parts_of_a_pair_and_the_record_of_a_prompt_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(folder(tmp_path, "dpo", EXAMPLES["dpo"]), capsys)
    prompt, _, rest = text.partition("chosen: ")
    chosen, _, rejected = rest.partition("rejected: ")
    assert "Which?" in prompt and "⟦This one.<|im_end|>⟧" in chosen and "⟦That one.<|im_end|>⟧" in rejected
    text = shown(folder(tmp_path, "grpo", EXAMPLES["grpo"]), capsys)
    assert "⟦" not in text and 'record: {"prompt": "1 + 1", "answer": "2"}' in text


def test_answers_of_stored_groups_come_with_their_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path, "sft", EXAMPLES["sft"])
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text(
        json.dumps(
            {"prompts": [40], "responses": [[41, 42], [43, 44]], "masks": [[1, 0], [1, 1]], "rewards": [0.5, -1]}
        )
    )
    options = PrepareOptions(inputs=(str(rollouts),), out=tmp_path / "out", records="grpo", tokenizer=source, workers=1)
    prepare_records(options)
    text = shown(tmp_path / "out", capsys)
    assert "answer, reward 0.5: 1 tokens, 1 learnt" in text and "answer, reward -1: 2 tokens, 2 learnt" in text
    assert "rollouts" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_colours_unless_it_wants_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    found = examples(folder(tmp_path, "dpo", EXAMPLES["dpo"]), 1)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    print_examples(found)
    text = screen.getvalue()
    assert ("⟦This one.<|im_end|>⟧" in text) == no_color
    assert ("\x1b[1;32mThis one.<|im_end|>\x1b[0m" in text) == (not no_color)
    assert ("\x1b[2m" in text) == (not no_color)


def test_json_has_ids_and_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(shown(folder(tmp_path, "dpo", EXAMPLES["dpo"]), capsys, "--json"))
    assert facts["records_for"] == "dpo" and len(facts["examples"]) == 2
    prompt, chosen, rejected = facts["examples"][0]["parts"]
    assert [part["name"] for part in (prompt, chosen, rejected)] == ["prompt", "chosen", "rejected"]
    assert not any(prompt["learnt"]) and all(chosen["learnt"]) and len(chosen["ids"]) == len(chosen["learnt"])


def test_documents_of_text_are_shown_too_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("A first document.")
    (tmp_path / "b.txt").write_text("Another document.")
    prepare(PrepareOptions(inputs=(str(tmp_path),), out=tmp_path / "text", vocab_size=300, val_fraction=0, workers=1))
    assert "<|endoftext|>⟦A first document.<|endoftext|>⟧" in shown(tmp_path / "text", capsys)
    (tmp_path / "text" / "train-00000.bin").write_bytes(b"")
    assert main(["inspect", str(tmp_path / "text"), "--show", "1"]) == 2
    assert main(["inspect", str(tmp_path / "text"), "--show", "-1"]) == 2
    assert "--show -1: shows examples of prepared data" in capsys.readouterr().err
