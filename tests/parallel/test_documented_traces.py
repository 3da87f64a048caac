"""docs/communication.md shows a recorded step of each mode: it must be the step that runs."""

import json
import re
from pathlib import Path

import pytest
from support import run_ranks, tiny_config, windows

from pellucid.train import Trainer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "communication.md"


def recorded(name: str, out: Path) -> str:
    """The collectives of step 1 on rank 0 of two, with two micro-batches and buckets of 8 KiB."""

    def train() -> None:
        config = tiny_config(
            out,
            parallel__mode=mode,
            parallel__reduction=reduction or "sum",
            parallel__bucket_size_mb=1 / 128,
            train__micro_batch=1,
            train__steps=1,
            train__val_every=0,
        )
        Trainer(config, train_data=windows(30)).train()

    mode, _, reduction = name.partition(" ")
    width = 30 if mode in ("zero3", "fsdp2") else 19 if reduction else 13
    run_ranks(train, 2)
    lines = []
    for line in (out / "ledger" / "rank00000.jsonl").read_text().splitlines():
        e = json.loads(line)
        if e["step"] == 1 and not e["tag"].startswith(("save", "end")):
            columns = f"{e['phase']:9} {e['micro']}  {e['op']:14} {e['tag']:{width}}"
            lines.append(f"{columns} {e['payload_bytes']:6,} {e['wire_bytes']:6,}")
    return "\n".join(lines)


@pytest.mark.parametrize("mode", ["ddp", "ddp ordered", "zero1", "zero2", "zero3", "fsdp2", "torch_ddp"])
def test_the_documented_trace_of_a_mode_is_what_a_run_records(mode: str, tmp_path: Path) -> None:
    match = re.search(rf"<!-- trace: {mode} -->\n```text\n(.*?)\n```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    assert recorded(mode, tmp_path / "run") == match.group(1)
