"""Little runs of GRPO, for tests of several files: sums, rewards of their bytes, a model of a few thousand parameters."""

import json

import numpy as np
from records import MemoryRecords, part
from support import Seen, tiny_config

from pellucid.cli import main
from pellucid.data.record_files import Record
from pellucid.data.records import Rollouts
from pellucid.train import Trainer

REWARDS = """
import os

def even(prompt, completion, record):
    "Half of the bytes, and so of what a new model says, are even."
    codes = completion.encode()
    return sum(c % 2 == 0 for c in codes) / len(codes) if codes else 0.0

def same(prompt, completion, record):
    return 0.1

def late(prompt, completion, record):
    while True:
        pass

def nan(prompt, completion, record):
    return float("nan")

def raises(prompt, completion, record):
    raise KeyError(record["answer"])

def seen(prompt, completion, record):
    with open(os.environ["SEEN"], "a") as file:
        file.write(repr((prompt, completion, record)) + "\\n")
    return 0.0
"""


def prepare_sums(root):
    """60 sums with a byte-level vocabulary, prepared; returns the folder."""
    lines = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(6)]
    (root / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["prepare", str(root / "sums.jsonl"), "--for", "grpo", "--vocab-size", "259", "--chat-template", "none"]
    assert main([*arguments, "--out", str(root / "data"), "--val-fraction", "0.1"]) == 0
    return root / "data"


ONLINE = dict(
    strategy__name="grpo", strategy__rewards=["grpo_rewards:even"], strategy__completions=3, strategy__max_tokens=5,
    strategy__reward_workers=1, model__vocab_size=0, model__max_position_embeddings=32, model__initializer_range=0.3,
    train__steps=4, train__global_batch=6, train__micro_batch=1, train__val_every=0, train__save_every=2, train__keep_last=0,
    optim__warmup_steps=0, optim__schedule="constant",
)  # fmt: skip


def run(
    prompts=None, out="", *, resume=False, stop_at=None, data=None, val_data=None, strategy=None, callbacks=(), **changes
):  # fmt: skip
    """A run of `ONLINE` with ``changes``: over ``prompts``, or over stored answers in ``data``. Returns trainer and `Seen`."""
    settings = dict(ONLINE)
    if prompts is not None:
        settings["data__path"] = str(prompts)
    else:
        settings |= {"strategy__rewards": [], "model__vocab_size": 61}
    if "optim__name" not in changes:
        settings["optim__eps"] = 1e-4
    seen = Seen(stop_at)
    trainer = Trainer(
        tiny_config(out, **(settings | changes)),
        train_data=data,
        val_data=val_data,
        callbacks=[seen, *callbacks],
        strategy=strategy,
    )
    trainer.train(resume=resume)
    return trainer, seen


def rollouts(num=9, *, seed=0, old=False, answers=(2, 5)):
    """Stored groups of 2 to 4 answers with tokens in between that do not count."""
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(num):
        many = int(rng.integers(*answers))
        said = [rng.integers(0, 61, int(rng.integers(1, 8))) for _ in range(many)]
        table = {"rewards": rng.integers(0, 4, many).tolist()}
        if old:
            table["old_logprobs"] = [(-4 + rng.normal(0, 0.3, len(ids))).tolist() for ids in said]
        parts = [part(ids, rng.random(len(ids)) < 0.8) for ids in said]
        records.append(Record((part(rng.integers(0, 61, int(rng.integers(1, 6))), False), *parts), table))
    return Rollouts(MemoryRecords(records), 16, "right")  # type: ignore[arg-type]
