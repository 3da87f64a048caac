"""One contender of bench/posttrain.py, in a process of its own, with the protocol of `training.py`: a turn is one epoch.

The first line says ``{"steps" (of an epoch), "before_seconds" (spent on the reference before the first step), "rows"}``;
each answer adds ``"tokens"`` and ``"processor_seconds"``: what the contender says it has seen since the start, without
padding, and what it has spent.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import fmean
from typing import IO, Any

import torch
from torch import Tensor
from training import Turns

ENDLESS = 10**5
LR = 1e-4


class Epochs(Turns):
    """Turns of one epoch, whose answers say what was seen and spent since the start."""

    tokens = 0

    def __init__(self, replies: IO[str]) -> None:
        super().__init__(replies)
        self._losses: list[float] = []

    def step_done(self, loss: float | Tensor) -> None:
        """Answers have the mean over the turn's steps."""
        self._losses.append(float(loss))
        mean = fmean(self._losses)
        if self._left == 1:
            self._losses = []
        super().step_done(mean)

    def say(self, **record: Any) -> None:
        super().say(tokens=self.tokens, processor_seconds=time.process_time(), **record)


def records_of(folder: Path, count: int, context: int) -> list[list[tuple[list[int], list[bool]]]]:
    """The first records whose rows fit into the window whole: ids and marks of what is learnt, part by part."""
    from pellucid.data.record_files import RecordData
    from pellucid.data.record_rows import longest_row

    split = RecordData.open(folder).split("train")
    fit = (record for i in range(len(split)) if longest_row(record := split.record(i)) <= context)
    return [[(p.ids.tolist(), p.learnt.tolist()) for p in next(fit).parts] for _ in range(count)]


def pellucid(turns: Epochs, options: argparse.Namespace) -> None:
    """Our Trainer as `pellucid train` runs it, with a run folder, its log and its progress lines."""
    import numpy as np

    from pellucid.cli.progress import TrainProgress
    from pellucid.config import load_config
    from pellucid.data.record_files import Part, Record
    from pellucid.data.records import PackedRecords, Pairs
    from pellucid.train import Callback, Trainer

    class Split:
        """Some records of a split."""

        name, folder = "train", options.data

        def __init__(self) -> None:
            self.records = [
                Record(tuple(Part(np.array(ids), np.array(learnt, bool)) for ids, learnt in parts))
                for parts in records_of(options.data, options.records, options.context)
            ]
            self.lengths = np.array([record.num_tokens for record in self.records])
            self.num_tokens, self.num_documents = int(self.lengths.sum()), len(self.records)

        def __len__(self) -> int:
            return self.num_documents

        def record(self, number: int) -> Record:
            return self.records[number]

    class Hold(Callback):
        def on_train_begin(self, trainer: Any, info: Any) -> None:
            turns.say(steps=steps, before_seconds=time.perf_counter() - begun, rows=len(samples))
            turns.begin()

        def on_optimizer_step(self, trainer: Any, info: Any) -> None:
            turns.tokens = info.tokens + info.step // steps * untold
            turns.step_done(info.loss)

    split: Any = Split()
    samples: Any = (PackedRecords if options.what == "sft" else Pairs)(split, options.context, "right")
    untold = len(split) * (1 if options.what == "sft" else 2)
    """The last token of a row is a target only, and our count has the others."""
    settings: dict[str, Any] = {  # AdamW's are TRL's
        "train.init": str(options.model), "strategy.name": options.what, "train.epochs": ENDLESS, "optim.lr": LR,
        "train.global_batch": options.batch, "train.micro_batch": options.batch, "train.dtype": options.dtype,
        "train.device": "cpu", "train.compile": options.setting.get("compile", False), "train.out": f"{options.scratch}/run",
        "train.save_every": 0, "train.val_every": 0, "optim.schedule": "constant", "optim.betas": [0.9, 0.999],
        "optim.weight_decay": 0.0,
    }  # fmt: skip
    if options.what == "dpo":
        settings["strategy.reference"] = options.setting["reference"]
    trainer = Trainer(load_config(None, settings), train_data=samples, callbacks=[TrainProgress(), Hold()])
    steps = trainer.setup.loader.steps_per_epoch
    begun = time.perf_counter()
    trainer.train()


def trl(turns: Epochs, options: argparse.Namespace) -> None:
    """SFTTrainer or DPOTrainer, told to log and save nothing."""
    import trl as theirs
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    setting = options.setting
    batch = setting.get("batch", options.batch)
    micro = setting.get("micro", batch)
    common = dict(
        output_dir=f"{options.scratch}/trl", use_cpu=True, bf16=options.dtype == "bfloat16", fp16=False, report_to="none",
        num_train_epochs=ENDLESS, logging_strategy="no", save_strategy="no", per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro, learning_rate=LR, lr_scheduler_type="constant", max_length=options.context,
        gradient_checkpointing=False, disable_tqdm=True, dataloader_pin_memory=False, torch_compile=setting.get("compile", False),
        dataloader_num_workers=setting.get("workers", 0), train_sampling_strategy=setting.get("sampling", "random"),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    records = records_of(options.data, options.records, options.context)
    losses: list[Any] = []
    before = 0.0

    class Noting:
        """The losses of a step's forwards, which a Trainer shows only where it logs them."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
            losses.append((result[0] if isinstance(result, tuple) else result).detach())
            return result

    class Pairs(Noting, theirs.DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset  # it is ids already

        def _precompute_ref_logps(self, *args: Any) -> Any:
            nonlocal before
            begin = time.perf_counter()
            result = super()._precompute_ref_logps(*args)
            before += time.perf_counter() - begin
            return result

    class Conversations(Noting, theirs.SFTTrainer):  # type: ignore[misc]
        pass

    class Hold(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            steps = -(-len(trainer.get_train_dataloader()) // (batch // micro))
            turns.say(steps=steps, before_seconds=before, rows=len(trainer.train_dataset))
            turns.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.tokens = trainer._total_train_tokens
            shares = 1 if options.what == "sft" else len(losses)  # a mean over the step already, or over a forward
            loss = torch.stack(losses).sum() / shares
            losses.clear()
            turns.step_done(loss)

    trainer: Any
    if options.what == "sft":
        rows = [
            {"input_ids": ids, "labels": [i if on else -100 for i, on in zip(ids, learnt, strict=True)]}
            for ((ids, learnt),) in records
        ]
        packing = setting.get("packing")
        chosen = dict(packing=True, packing_strategy=packing) if packing else dict(packing=False)
        if setting.get("padding_free"):
            common["max_length"] = None  # it wants that, and nothing is longer
            chosen["padding_free"] = True
        arguments = theirs.SFTConfig(**common, **chosen)
        trainer = Conversations(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    else:
        keys = ("prompt_ids", "chosen_ids", "rejected_ids")
        rows = [dict(zip(keys, (ids for ids, _ in parts), strict=True)) for parts in records]
        arguments = theirs.DPOConfig(**common, precompute_ref_log_probs=setting["reference"] == "precomputed", beta=0.1)
        trainer = Pairs(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.add_callback(Hold())
    trainer.train()


CONTENDERS = {"pellucid": pellucid, "trl": trl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--what", choices=["sft", "dpo"], required=True)
    parser.add_argument(
        "--setting", type=json.loads, default={}, help="a JSON object of what this contender does otherwise"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder of records")
    parser.add_argument("--model", type=Path, required=True, help="the model to start from")
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows or pairs an optimizer step")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder to write into")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    CONTENDERS[options.contender](Epochs(replies), options)


if __name__ == "__main__":
    main()
