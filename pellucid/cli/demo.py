"""`pellucid demo`: from text to a model that talks, in a few minutes on two cores."""

import argparse
import json
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import notice
from pellucid.config import RunConfig, load_config
from pellucid.errors import TrainingError

if TYPE_CHECKING:
    from pellucid.checkpoint.model_folder import Loaded

CONFIG = Path(__file__).parent.parent / "configs" / "demo.toml"
SIZE = "14MB"
VOCAB_SIZE = 2560
NUM_RANKS = 2
NUM_STORIES = 50
MAX_TOKENS = 220
TEMPERATURE = 0.3
GOAL = 0.8
"""Share of sampled stories that must be whole stories of the grammar, about the right people and things."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="generate text, train a small model on it and let it talk",
        description="Generates the built-in corpus, prepares it, trains, evaluates on held-out text, samples stories about "
        "people and things that never met in training, chats, and writes a report. Interrupted, it goes on where it was.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="RUN", help="folder of the run (default runs/demo)"
    )
    parser.add_argument("--fresh", action="store_true", help="delete an earlier demo in RUN first")
    parser.set_defaults(run=run, takes_settings=True, allocator="training")


def run(args: argparse.Namespace) -> int:
    """The whole life of a small model."""
    began = time.monotonic()
    out: Path = args.out
    if args.fresh and out.exists():
        shutil.rmtree(out)
    pretrain(out, args.settings, quiet=args.quiet, log_level=args.log_level)
    if not (out / "model" / "config.json").is_file():
        notice("the demo was interrupted; the same command goes on from here")
        return 0

    from pellucid.checkpoint.model_folder import load_model

    loaded = load_model(out)
    _evaluate(loaded, out / "data", out)
    good = _tell_stories(loaded, out)
    _chat(loaded, out)

    from pellucid.report import build_report

    print(f"report: {build_report(out)}")
    if good < GOAL * NUM_STORIES:
        raise TrainingError(f"only {good} of {NUM_STORIES} stories are right; {GOAL:.0%} were expected")
    print(f"demo finished in {time.monotonic() - began:.0f} s (install not counted)")
    return 0


def pretrain(out: Path, settings: dict[str, str], *, quiet: bool, log_level: str) -> None:
    """The data and the training of the demo, in ``out``; interrupted before, it goes on. Shared with `demo-align`."""
    data = out / "data"
    if not (data / "index.json").is_file():
        _prepare(data, quiet=quiet)
    config = load_config(CONFIG, {"train.out": str(out), "data.path": str(data)} | _ranks(settings) | settings)
    _train(config, quiet=quiet, log_level=log_level)


def _ranks(settings: dict[str, str]) -> dict[str, Any]:
    """Settings that divide the work over `NUM_RANKS` processes, unless the machine is small or the mode is given."""
    if "parallel.mode" in settings or (os.cpu_count() or 1) < NUM_RANKS:
        return {}
    table = load_config(CONFIG).train
    return {"parallel.mode": "zero1", "train.micro_batch": table.global_batch // NUM_RANKS}


def _train(config: RunConfig, *, quiet: bool, log_level: str) -> None:
    from pellucid.cli.train import train, train_on_ranks

    options: dict[str, Any] = {"resume": True, "dry_run": False, "quiet": quiet}
    if config.parallel.mode == "none":
        train(config, **options)
    else:
        train_on_ranks(config, NUM_RANKS, options, log_level)


def _prepare(data: Path, *, quiet: bool) -> None:
    from pellucid.cli.prepare import PrepareProgress, print_summary
    from pellucid.data.prepare import PrepareOptions, prepare

    with PrepareProgress(quiet=quiet) as progress:
        summary = prepare(
            PrepareOptions(inputs=("sample:stories",), out=data, vocab_size=VOCAB_SIZE, size=SIZE), progress
        )
    print_summary(summary)


def _evaluate(loaded: "Loaded", data: Path, out: Path) -> None:
    from pellucid.data.batches import Windows
    from pellucid.data.shards import TokenData
    from pellucid.evaluate import evaluate

    windows = Windows(TokenData.open(data).split("val"), loaded.config.max_position_embeddings, score_once=True)
    score = evaluate(loaded.model, windows, tokenizer=loaded.tokenizer)
    (out / "evaluation.json").write_text(json.dumps(asdict(score)) + "\n", encoding="utf-8")
    print(
        f"held-out text: {score.loss:.3f} nats/token, perplexity {score.perplexity:.2f}, {score.bits_per_byte:.3f} bits/byte"
    )


def _tell_stories(loaded: "Loaded", out: Path) -> int:
    """Continue openings that name a hero and a thing which never met in training; returns how many stories are right."""
    from pellucid.data.samples import check_story, held_out_prompts
    from pellucid.inference import SamplingParams, generate
    from pellucid.text import decode, encode_prompt, with_stop_ids

    assert loaded.tokenizer is not None
    prompts = [(prompt, prompt.text) for prompt in held_out_prompts(2 * NUM_STORIES) if prompt.text is not None]
    params = with_stop_ids(SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS), loaded.tokenizer)
    seeded = [replace(params, seed=i) for i in range(NUM_STORIES)]
    results = generate(
        loaded.model,
        [encode_prompt(loaded.tokenizer, opening) for _, opening in prompts],
        seeded,
        batch_size=NUM_STORIES,
    )
    records: list[dict[str, Any]] = []
    for (prompt, opening), result in zip(prompts, results, strict=True):
        answer = decode(loaded.tokenizer, result.ids)
        verdict = check_story(opening + answer, prompt)
        records.append(
            {
                "kind": "story",
                "prompt": opening,
                "text": answer,
                "verdict": "ok" if verdict.ok else verdict.reason,
                "ok": verdict.ok,
            }
        )
    _append_samples(out, records)
    good = sum(1 for record in records if record["ok"])
    for record in records[:3]:
        print(f"\n> {record['prompt']}\n{record['text'].strip()}")
    print(f"\nstories about held-out pairs: {good} of {NUM_STORIES} are whole, with every name and thing right")
    return good


def _chat(loaded: "Loaded", out: Path) -> None:
    """Two questions, each a conversation of its own: a story on request, then a sum."""
    from pellucid.inference import SamplingParams
    from pellucid.text import stream_text

    assert loaded.tokenizer is not None
    records = []
    for question in ("Tell me a story about Mia and a red ball.", "What is 23 + 41?"):
        ids = loaded.tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)
        print(f"\nyou: {question}\nmodel: ", end="", flush=True)
        pieces = []
        for piece in stream_text(
            loaded.model, loaded.tokenizer, ids, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        ):
            print(piece, end="", flush=True)
            pieces.append(piece)
        print()
        records.append({"kind": "chat", "prompt": question, "text": "".join(pieces)})
    _append_samples(out, records)
    print()


def _append_samples(out: Path, records: list[dict[str, Any]]) -> None:
    """After those of training, which removes them when it goes on."""
    with open(out / "samples.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
