"""How full are rows of packed conversations, and how fast do they come?

    python bench/packing.py [CHATS.jsonl ...] [--size 2MB] [--vocab-size 2000]

Prepares `sample:chats`, and each file of examples that is given (docs/guides/data_for_posttraining.md says how to make one of
chatterbot-corpus), with a tokenizer of its own, and packs them into windows of several sizes. Asked: at least 95 % of the
places of rows hold a token of a record.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from machine import machine_line

from pellucid.data.batches import Loader
from pellucid.data.prepare import PrepareOptions
from pellucid.data.prepare_records import RecordSummary, prepare_records
from pellucid.data.record_files import RecordData
from pellucid.data.records import PackedRecords, open_records

CONTEXTS = (128, 256, 512, 1024, 2048)
ASKED = 0.95


def prepared(source: str, out: Path, size: str, vocab_size: int) -> RecordSummary:
    """A folder of sft records with a tokenizer trained on them; bad examples are left out."""
    options = PrepareOptions(
        inputs=(source,), out=out, records="sft", vocab_size=vocab_size, val_fraction=0, on_error="skip",
        size=size if source.startswith("sample:") else None, workers=1,
    )  # fmt: skip
    return prepare_records(options)


def epoch(samples: PackedRecords) -> tuple[float, float]:
    """Share of the places that hold a token, as batches have them, and tokens a second of one epoch of the loader."""
    loader = Loader(samples, global_batch=16, micro_batch=16, seed=0)
    held = places = 0
    begin = time.perf_counter()
    for _ in range(loader.steps_per_epoch):
        for batch in loader.next_window():
            real = batch.sample_ids >= 0
            held += int((batch.document_ids[real] >= 0).sum())
            places += int(real.sum()) * samples.context
    return held / places, held / (time.perf_counter() - begin)


def main() -> None:
    """Print a table for each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="CHATS.jsonl")
    parser.add_argument("--size", default="2MB")
    parser.add_argument("--vocab-size", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(machine_line())
    with tempfile.TemporaryDirectory() as folder:
        for number, source in enumerate(["sample:chats", *args.files]):
            out = Path(folder) / str(number)
            summary = prepared(source, out, args.size, args.vocab_size)
            split = RecordData.open(out).split("train")
            halves = ", ".join(f"{q} % within {summary.row_tokens[q]}" for q in ("50", "90", "99"))
            print(f"\n{source}: {len(split):,} records, {summary.num_skipped} left out; tokens: {halves}\n")
            print("| context | longer | rows | filled | tokens/s | asked 95 % |\n|---|---|---|---|---|---|")
            for context in CONTEXTS:
                samples = open_records(RecordData.open(out), "train", context=context)
                assert isinstance(samples, PackedRecords)
                filled, speed = epoch(samples)
                longer = int(np.sum(split.lengths > context + 1))
                verdict = "met" if filled >= ASKED else "not met"
                print(
                    f"| {context:,} | {longer:,} | {len(samples):,} | {100 * filled:.1f} % | {speed:,.0f} | {verdict} |"
                )


if __name__ == "__main__":
    main()
