"""How fast are fine-tuning and preferences beside TRL's trainers, and Muon's step beside torch's?

    python bench/posttrain.py [--what sft dpo muon packing] [--dtype bfloat16|float32] [--rounds 3] [--search]

sft      one epoch over generated conversations (`sample:chats`): useful tokens a second, which are the tokens of the records,
         context and answers, without padding. Both sides train the same records, about as many tokens a step.
dpo      the same over generated pairs (`sample:preferences`), both answers with their prompt; with the reference asked in
         each step, and with what it says computed beforehand, which both sides do before the first step: its seconds stand
         beside.
muon     a step of our optimizer on `small` (vocabulary 8192) beside torch.optim.Muon on the same matrices and fused AdamW on
         the rest, with as many Newton-Schulz iterations; torch's are always in bfloat16, ours as `train.dtype` is.
packing  how full rows are, beside TRL's best-fit packing; asked: at least 95 % of the places hold a token of a record.

The model is `small` with the vocabulary of the data, the same weights for all; AdamW with 1e-4, clipped to 1.0. Every
contender is a process of its own that lives for the whole run (`contenders/posttraining.py`); they take turns of one epoch,
each round in another order, and a ratio is the median of the ratios within rounds. Ours runs as `pellucid train` does: run
folder, log, progress lines, its allocator, everything not named a default. TRL neither logs nor saves nor checkpoints
activations, and "memory kept" gives it our allocator's settings, which it does not come with.

TRL packs for kernels that take sequences one behind another; without one, transformers masks rows that are joined to a
single one, so that few rows a forward are best for it (`packed, 1 row`: 1, accumulated). "wrapped" packing lets
conversations look at each other and cuts them: it computes something else, and is shown for orientation. Which setting is
best for TRL was looked for with --search, which runs all of SEARCHED for a round or more; the best of them race.

`pip install -e '.[bench]'` brings TRL; without it Pellucid runs alone. That both compute the same losses and gradients is
shown by tests/train/strategies/test_against_trl.py.
"""

import argparse
import io
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import machine_line
from racer import Racer

from pellucid.cli import allocator

CONTEXT, BATCH = 256, 8
"""Tokens of a row at most; rows (sft) or pairs (dpo) an optimizer step."""
PADDED_BATCH = 18
"""Conversations an optimizer step where they are not packed: about as many tokens as 8 full rows."""
SOURCES = {"sft": "sample:chats", "dpo": "sample:preferences"}
RECORDS = {"sft": 142, "dpo": 64}
"""Of an epoch: conversations that fill 64 of our rows, so that no step is short; pairs."""
ASKED = {"sft": 1.2, "dpo": 1.2, "muon": 1.0, "packing": 0.95}


@dataclass(frozen=True)
class Entry:
    """A contender of ``contenders/posttraining.py`` and what it does otherwise."""

    name: str
    contender: str
    setting: dict[str, Any] = field(default_factory=dict)
    our_allocator: bool = False
    counts: bool = True
    """It computes the same and is what one gets, so the ratio to the fastest of these is judged."""


def packed(micro: int, **more: Any) -> dict[str, Any]:
    """TRL's best-fit packing with so many rows a forward."""
    return {"packing": "bfd", "micro": micro, **more}


OURS = {
    "sft": [Entry("pellucid", "pellucid", our_allocator=True)],
    "dpo": [
        Entry(f"pellucid, {reference}", "pellucid", {"reference": reference}, our_allocator=True)
        for reference in ("live", "precomputed")
    ],
}
RACED = {
    "sft": [
        Entry("trl packed, 1 row", "trl", packed(1)),
        Entry("trl packed, 1 row, 1 worker", "trl", packed(1, workers=1)),
        Entry("trl packed, 1 row, memory kept", "trl", packed(1), our_allocator=True, counts=False),
        Entry("trl wrapped", "trl", {"packing": "wrapped"}, counts=False),
    ],
    "dpo": [
        Entry("trl, live", "trl", {"reference": "live"}),
        Entry("trl, precomputed", "trl", {"reference": "precomputed"}),
        Entry("trl, live, memory kept", "trl", {"reference": "live"}, our_allocator=True, counts=False),
        Entry("trl, precomputed, memory kept", "trl", {"reference": "precomputed"}, our_allocator=True, counts=False),
    ],
}
SEARCHED = {
    "sft": [
        *(Entry(f"trl packed, {micro} rows", "trl", packed(micro)) for micro in (1, 2, 4, 8)),
        Entry("trl packed, 1 row, 1 worker", "trl", packed(1, workers=1)),
        Entry("trl wrapped", "trl", {"packing": "wrapped"}, counts=False),
        Entry("trl padded", "trl", {"batch": PADDED_BATCH}),
        Entry("trl padded, 9 rows", "trl", {"batch": PADDED_BATCH, "micro": 9}),
        Entry("trl padded, by length", "trl", {"batch": PADDED_BATCH, "sampling": "group_by_length"}),
        Entry("trl padding-free", "trl", {"batch": PADDED_BATCH, "micro": 2, "padding_free": True}),
    ],
    "dpo": [
        *(Entry(f"trl, live, {micro} pairs", "trl", {"reference": "live", "micro": micro}) for micro in (2, 4, 8)),
        Entry("trl, live, 1 worker", "trl", {"reference": "live", "workers": 1}),
    ],
}


class TuningRacer(Racer):
    """A running contender and its turns."""

    def __init__(self, entry: Entry, what: str, root: Path, options: argparse.Namespace) -> None:
        added = allocator.settings()  # which this process has, see main
        environment = {name: value for name, value in os.environ.items() if name not in added}
        environment |= {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
        environment |= added if entry.our_allocator else {}
        words = [
            entry.contender, "--what", what, "--setting", json.dumps(entry.setting), "--dtype", options.dtype,
            "--threads", options.threads, "--records", options.records or RECORDS[what], "--data", root / what,
            "--model", root / f"model-{what}", "--scratch", tempfile.mkdtemp(dir=root), "--context", CONTEXT, "--batch", BATCH,
        ]  # fmt: skip
        self.entry, self.turns = entry, list[dict[str, Any]]()
        super().__init__(entry.name, "posttraining.py", words, environment)
        self._last: dict[str, Any] = self.first

    def epoch(self) -> int:
        """Run one; the tokens that it saw."""
        before, after = self._last, self.ask(self.first["steps"])
        self._last = after
        self.turns.append(after | {"processor_seconds": after["processor_seconds"] - before["processor_seconds"]})
        return int(after["tokens"] - before["tokens"])


def make(root: Path, what: str) -> None:
    """Data and a model to start from, once for all contenders."""
    import torch

    from pellucid import save_model
    from pellucid.cli import main
    from pellucid.config import load_config
    from pellucid.data.record_files import RecordData
    from pellucid.model import Transformer

    arguments = [
        "prepare",
        SOURCES[what],
        "--size",
        "2MB",
        "--for",
        what,
        "--vocab-size",
        "2048",
        "--out",
        str(root / what),
    ]
    with redirect_stdout(io.StringIO()):
        assert main([*arguments, "--quiet"]) == 0
    tokenizer = RecordData.open(root / what).tokenizer()
    config = load_config(None, {"model.preset": "small", "model.vocab_size": tokenizer.vocab_size}).model
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    save_model(root / f"model-{what}", model, tokenizer)


def useful_tokens(root: Path, what: str, count: int) -> int:
    """Of all rows of the records that are trained on, the prompt of a pair once for each answer."""
    sys.path.insert(0, str(Path(__file__).with_name("contenders")))
    from posttraining import records_of

    total = 0
    for parts in records_of(root / what, count, CONTEXT):
        prompt, *answers = (len(ids) for ids, _ in parts)
        total += prompt if not answers else sum(prompt + answer for answer in answers)
    return total


def race(entries: list[Entry], what: str, root: Path, options: argparse.Namespace) -> None:
    """Epochs in turn, and the tables."""
    records = options.records or RECORDS[what]
    tokens = useful_tokens(root, what, records)
    racers: list[TuningRacer] = []
    try:
        for entry in entries:
            racers.append(TuningRacer(entry, what, root, options))
        for turn in range(-1, options.rounds):
            for racer in racers[turn % len(racers) :] + racers[: turn % len(racers)]:
                seen = racer.epoch()
                cuts = racer.entry.setting.get("packing") == "wrapped"
                assert cuts or seen == tokens, f"{racer.entry.name} says {seen} tokens, not {tokens}"
    finally:
        for racer in racers:
            racer.stop()
    for racer in racers:
        del racer.turns[0]  # warms up
    print(f"\n## {what}: {records} records of {tokens:,} useful tokens, {options.dtype}\n")
    print(
        "| | useful tokens/s, median (range) | processor s | rows | steps | faults a step | before the first step, s "
        "| mean loss of the last turn |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for racer in racers:
        speeds = [tokens / turn["seconds"] for turn in racer.turns]
        steps, last = racer.first["steps"], racer.turns[-1]
        print(
            f"| {racer.entry.name} | {spread(speeds, 0)} "
            f"| {statistics.median(turn['processor_seconds'] for turn in racer.turns):.1f} | {racer.first['rows']} | {steps} "
            f"| {statistics.median(turn['faults'] for turn in racer.turns) / steps:,.0f} "
            f"| {racer.first['before_seconds']:.1f} | {last['loss']:.3f} |"
        )
    print("\n| ratio | median of rounds (range) | asked of the fastest |\n|---|---|---|")
    for ours in racers:
        if ours.entry.contender != "pellucid":
            continue
        rivals = [r for r in racers if r.entry.contender == "trl" and _alike(ours.entry, r.entry)]
        ratios = {
            r.entry.name: [b["seconds"] / a["seconds"] for a, b in zip(ours.turns, r.turns, strict=True)]
            for r in rivals
        }
        judged = [statistics.median(ratios[r.entry.name]) for r in rivals if r.entry.counts]
        for racer in rivals:
            middle, verdict = statistics.median(ratios[racer.entry.name]), ""
            if racer.entry.counts and middle == min(judged):
                verdict = f"{ASKED[what]:.2f}: {'met' if middle >= ASKED[what] else 'missed'}"
            print(f"| {ours.entry.name} / {racer.entry.name} | {spread(ratios[racer.entry.name], 2)} | {verdict} |")


def _alike(ours: Entry, theirs: Entry) -> bool:
    return ours.setting.get("reference") == theirs.setting.get("reference")


def race_muon(options: argparse.Namespace) -> None:
    """Both optimizers in one process, on models of their own with the same gradients."""
    import torch

    from pellucid.config import load_config
    from pellucid.model import Transformer
    from pellucid.optim.muon import MuonOptions, build_muon

    torch.set_num_threads(options.threads)
    config = load_config(None, {"model.preset": "small", "model.vocab_size": 8192}).model
    models = [Transformer(config, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    draw = torch.Generator().manual_seed(1)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        ours.grad = torch.randn(ours.shape, generator=draw) * 1e-3
        theirs.grad = ours.grad.clone()
    muon = build_muon(models[0], 0.02, MuonOptions(weight_decay=0.1, newton_schulz_dtype=options.dtype))
    names = {name for group in muon.param_groups if group["muon"] for name in group["param_names"]}
    hidden = torch.optim.Muon([p for n, p in models[1].named_parameters() if n in names], lr=0.02, weight_decay=0.1)
    rest = [p for n, p in models[1].named_parameters() if n not in names]
    others = torch.optim.AdamW(rest, lr=0.005, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    steps = {"pellucid": (muon.step,), "torch.optim.Muon + AdamW": (hidden.step, others.step)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(6 * options.rounds + 1):
        for name in sorted(steps, reverse=turn % 2 == 1):
            began = time.perf_counter()
            for step in steps[name]:
                step()
            if turn:  # the first warms up
                times[name].append(time.perf_counter() - began)
    print(f"\n## muon: a step of `small`, ours in {options.dtype}\n\n| | ms, median (range) |\n|---|---|")
    for name, of in times.items():
        print(f"| {name} | {spread([t * 1e3 for t in of], 0)} |")
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    verdict = "met" if statistics.median(ratios) <= ASKED["muon"] else "missed"
    print(f"\nours / theirs: {spread(ratios, 2)}; asked: at most {ASKED['muon']:.2f}: {verdict}")


def show_packing(root: Path) -> None:
    """Rows that all records of the training split take."""
    from pellucid.data.record_files import RecordData
    from pellucid.data.records import PackedRecords

    split = RecordData.open(root / "sft").split("train")
    print(f"\n## packing: {len(split):,} records, {split.num_tokens:,} tokens\n")
    print("| context | rows | filled | asked | rows of TRL | filled |")
    print("|---|---|---|---|---|---|")
    for context in (256, 512, 1024, 2048):
        ours = PackedRecords(split, context, "right")
        places = int(split.lengths.sum()) - len(split)  # the last token of a record is a target only
        filled = places / (len(ours) * context)
        verdict = f"{ASKED['packing']:.0%}: {'met' if filled >= ASKED['packing'] else 'missed'}"
        print(f"| {context:,} | {len(ours):,} | {filled:.1%} | {verdict} | {theirs_packed(split, context)} |")


def theirs_packed(split: Any, context: int) -> str:
    """Rows and how full they are, of TRL's best fit."""
    if not find_spec("trl"):
        return " | "
    from datasets import Dataset
    from trl import pack_dataset

    ids = [split.record(i).parts[0].ids.tolist() for i in range(len(split))]
    rows = len(pack_dataset(Dataset.from_dict({"input_ids": ids}), context, "bfd", {}))
    return f"{rows:,} | {sum(map(len, ids)) / (rows * context):.1%}"


def spread(values: list[float], digits: int) -> str:
    """Median, and the range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def main() -> None:
    if (
        allocator.MARK not in os.environ
    ):  # both of Muon's sides are in this process: with the allocator of the command line
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | allocator.settings())
    import torch

    from pellucid.train.precision import bf16_is_fast

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=list(ASKED), default=list(ASKED))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help='default: what "auto" is here')
    parser.add_argument("--records", type=int, help=f"of an epoch; default {RECORDS}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--search", action="store_true", help="race all of TRL's settings")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if bf16_is_fast(torch.device("cpu")) else "float32")
    print(machine_line(options.threads), flush=True)
    has_trl = bool(find_spec("trl") and find_spec("datasets"))
    if not has_trl:
        print("skipped: TRL, for want of it; pip install -e '.[bench]'")
    with tempfile.TemporaryDirectory(prefix="pellucid-bench-") as folder:
        root = Path(folder)
        for what in options.what:
            if what == "muon":
                race_muon(options)
                continue
            kind = "sft" if what == "packing" else what
            if not (root / kind).exists():
                make(root, kind)
            if what == "packing":
                show_packing(root)
                continue
            entries = OURS[what] + (SEARCHED if options.search else RACED)[what]
            race([e for e in entries if has_trl or e.contender != "trl"], what, root, options)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
