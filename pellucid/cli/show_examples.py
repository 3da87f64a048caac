"""What is in prepared data, to look at: `pellucid inspect DATA --show N`."""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.data.index import read_index

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

LEARNT = "bold green"
"""How tokens that are learnt stand out on a terminal; elsewhere they stand in `BRACKETS`."""
BRACKETS = "⟦", "⟧"


def examples(path: Path, count: int) -> list[dict[str, Any]]:
    """The first ``count`` examples of the training split.

    Returns:
        Of each: "split", "number", "parts" ({"name", "ids", "learnt", "runs"}, where "runs" are [text, learnt] pairs), and for
        grpo "record". Text has one part, of which every token but the first is learnt.
    """
    kind = read_index(path).kind
    return _documents(path, count) if kind == "tokens" else _records(path, count)


def _documents(path: Path, count: int) -> list[dict[str, Any]]:
    from pellucid.data.shards import TokenData

    data = TokenData.open(path)
    tokenizer, split = data.tokenizer(), data.split(data.split_names[0])
    found, start = [], 0
    for number in range(min(count, split.num_documents)):
        stop = int(split.document_spans(start, start + 1)[1][0])
        ids = split.read(start, stop).tolist()
        part = _part("document", ids, [False] + [True] * (len(ids) - 1), tokenizer)
        found.append({"split": split.name, "number": number, "parts": [part]})
        start = stop
    return found


def _records(path: Path, count: int) -> list[dict[str, Any]]:
    from pellucid.data.record_files import RecordData

    data = RecordData.open(path)
    tokenizer, split = data.tokenizer(), data.split(next(iter(data.index.splits)))
    found = []
    for number in range(min(count, len(split))):
        record = split.record(number)
        names = {"sft": ["conversation"], "dpo": ["prompt", "chosen", "rejected"]}.get(data.kind)
        if names is None:
            rewards = (record.table or {}).get("rewards", [])
            names = ["prompt", *(f"answer, reward {reward:g}" for reward in rewards)]
        parts = [
            _part(name, part.ids.tolist(), part.learnt.tolist(), tokenizer)
            for name, part in zip(names, record.parts, strict=True)
        ]
        shown = {"record": record.table} if record.table is not None else {}
        found.append({"split": split.name, "number": number, "parts": parts, **shown})
    return found


def _part(name: str, ids: list[int], learnt: list[bool], tokenizer: "Tokenizer") -> dict[str, Any]:
    runs = [
        [tokenizer.decode([id_ for id_, _ in run], skip_special=False), is_learnt]
        for is_learnt, run in itertools.groupby(zip(ids, learnt, strict=True), key=lambda pair: pair[1])
    ]
    return {"name": name, "ids": ids, "learnt": learnt, "runs": runs}


def print_examples(found: list[dict[str, Any]]) -> None:
    """Each part under its name, the learnt tokens coloured, or in brackets where there are no colours."""
    from rich.console import Console
    from rich.text import Text

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, no_color=not coloured)
    for example in found:
        console.print()
        console.print(Text(f"{example['split']} {example['number']}", style="bold" if coloured else ""))
        for part in example["parts"]:
            num_learnt = sum(part["learnt"])
            console.print(Text(f"{part['name']}: {len(part['ids']):,} tokens, {num_learnt:,} learnt"))
            text = Text()
            for run, is_learnt in part["runs"]:
                if coloured:
                    text.append(_harmless(run), style=LEARNT if is_learnt else "dim")
                else:
                    text.append(_harmless(run).join(BRACKETS) if is_learnt else _harmless(run))
            console.print(text)
        if "record" in example:
            console.print(Text(_harmless(f"record: {json.dumps(example['record'], ensure_ascii=False)}")))


def _harmless(text: str) -> str:
    """Without what would command a terminal."""
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "�" for c in text)
