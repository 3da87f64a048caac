"""How fast are fine-tuning and preferences, beside TRL's trainers, on the same model, records and machine?

    python bench/posttrain.py [--what sft dpo] [--records 256] [--rounds 3] [--threads 2]

One epoch over generated conversations (`sample:chats`) or preferences (`sample:preferences`), float32, AdamW, the configuration
`tiny` with a window of 256 tokens: 8 rows or pairs a step. Each contender is a process of its own; they take turns, and a
ratio is the median of the ratios within rounds. Pellucid packs conversations into rows without looking across; TRL pads
them, since its packing wants FlashAttention to keep them apart, which no CPU has. DPO's first loss is ln 2 for both, and
SFT's about the same: the order of the records is another one. Pellucid asks its reference before the first step, which is
timed, TRL in each step. That both compute the same is shown by tests/train/strategies/test_against_trl.py.

TRL is no dependency: `pip install trl datasets`. Without it Pellucid runs alone.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import machine_line

CONTEXT, BATCH = 256, 8
SIZES = {"sft": ("sample:chats", "2MB"), "dpo": ("sample:preferences", "2MB")}


def make(root: Path, what: str) -> None:
    """Data and a model to start from, once for all contenders."""
    import torch

    from pellucid import save_model
    from pellucid.cli import main
    from pellucid.config import load_config
    from pellucid.data.record_files import RecordData
    from pellucid.model import Transformer

    source, size = SIZES[what]
    arguments = ["prepare", source, "--size", size, "--for", what, "--vocab-size", "2048", "--out", str(root / what)]
    with redirect_stdout(io.StringIO()):
        assert main([*arguments, "--quiet"]) == 0
    tokenizer = RecordData.open(root / what).tokenizer()
    config = load_config(None, {"model.preset": "tiny", "model.vocab_size": tokenizer.vocab_size}).model
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    save_model(root / f"model-{what}", model, tokenizer)


def records_of(root: Path, what: str, count: int) -> list[list[list[int]]]:
    """The first records that fit into the window whole: ids and marks of each part."""
    from pellucid.data.record_files import RecordData

    split = RecordData.open(root / what).split("train")
    fit = [i for i, n in enumerate(split.lengths) if n <= CONTEXT][:count]
    return [[[p.ids.tolist(), p.learnt.tolist()] for p in split.record(i).parts] for i in fit]


def pellucid(root: Path, what: str, count: int) -> dict[str, Any]:
    """One epoch of our Trainer."""
    import numpy as np

    from pellucid.config import load_config
    from pellucid.data.record_files import Part, Record
    from pellucid.data.records import PackedRecords, Pairs
    from pellucid.train import Callback, Trainer

    class Split:
        def __init__(self) -> None:
            self.records = [
                Record(tuple(Part(np.array(ids), np.array(learnt, bool)) for ids, learnt in parts))
                for parts in records_of(root, what, count)
            ]
            self.lengths = np.array([record.num_tokens for record in self.records])
            self.num_tokens, self.num_documents = int(self.lengths.sum()), len(self.records)
            self.name, self.folder = "train", root

        def __len__(self) -> int:
            return self.num_documents

        def record(self, number: int) -> Record:
            return self.records[number]

    class Losses(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_optimizer_step(self, trainer: Any, info: Any) -> None:
            self.seen.append(info.loss)

    samples: Any = (PackedRecords if what == "sft" else Pairs)(Split(), CONTEXT, "right")  # type: ignore[arg-type]
    settings = {
        "train.init": str(root / f"model-{what}"), "strategy.name": what, "train.epochs": 1, "train.global_batch": BATCH,
        "train.micro_batch": BATCH, "train.dtype": "float32", "train.device": "cpu", "optim.lr": 1e-4, "train.val_every": 0,
        "optim.schedule": "constant",
    }  # fmt: skip
    losses = Losses()
    trainer = Trainer(load_config(None, settings), train_data=samples, callbacks=[losses])
    begin = time.perf_counter()
    trainer.train()
    return {"seconds": time.perf_counter() - begin, "records": count, "first_loss": losses.seen[0]}


def trl(root: Path, what: str, count: int) -> dict[str, Any]:
    """One epoch of SFTTrainer or DPOTrainer."""
    import trl as theirs
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = root / f"model-{what}"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    records = records_of(root, what, count)
    common = dict(
        output_dir=str(root / "trl"), use_cpu=True, bf16=False, fp16=False, report_to="none", num_train_epochs=1, logging_steps=1,
        per_device_train_batch_size=BATCH, learning_rate=1e-4, lr_scheduler_type="constant", gradient_checkpointing=False,
        save_strategy="no", max_length=CONTEXT, disable_tqdm=True,
    )  # fmt: skip
    trainer: Any
    if what == "sft":
        rows = [
            {"input_ids": ids, "labels": [i if on else -100 for i, on in zip(ids, learnt, strict=True)]}
            for ((ids, learnt),) in records
        ]
        config = theirs.SFTConfig(**common)
        trainer = theirs.SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    else:
        keys = ("prompt_ids", "chosen_ids", "rejected_ids")
        rows = [dict(zip(keys, (ids for ids, _ in parts), strict=True)) for parts in records]
        text = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])  # it wants to make ids itself
        config = theirs.DPOConfig(**common, precompute_ref_log_probs=False, remove_unused_columns=False)
        trainer = theirs.DPOTrainer(model, args=config, train_dataset=text, processing_class=tokenizer)
        trainer.train_dataset = Dataset.from_list(rows)
    begin = time.perf_counter()
    trainer.train()
    first = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
    return {"seconds": time.perf_counter() - begin, "records": count, "first_loss": float(first)}


CONTENDERS = {"pellucid": pellucid, "trl": trl}


def main() -> None:
    """Run all contenders in turn and print records a second."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", nargs=3, metavar=("NAME", "WHAT", "ROOT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, what, root = args.one
        print(json.dumps(CONTENDERS[name](Path(root), what, args.records)))
        return
    print(machine_line(args.threads))
    names = [name for name in CONTENDERS if name == "pellucid" or (find_spec("trl") and find_spec("datasets"))]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryDirectory() as folder:
        for what in args.what:
            make(Path(folder), what)
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for turn in range(args.rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    command = [sys.executable, __file__, "--records", str(args.records), "--one", name, what, folder]
                    done = subprocess.run(command, capture_output=True, text=True, env=environment)
                    assert done.returncode == 0, done.stderr
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
            for name in names:
                speed = statistics.median(args.records / one["seconds"] for one in found[name])
                pairs = zip(found["pellucid"], found[name], strict=True)
                ratio = statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
                print(
                    f"{what} {name:<10} {speed:8.1f} records/s   {ratio:5.2f} x Pellucid's time   first loss "
                    f"{found[name][0]['first_loss']:.4f}"
                )


if __name__ == "__main__":
    main()
