"""`pellucid demo-align`: four stages of training on two-digit arithmetic, and what each of them is worth."""

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import notice
from pellucid.config import load_config
from pellucid.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from pellucid.cli.align_problems import Problems
    from pellucid.data.examples import Kind
    from pellucid.train.callbacks import Callback

CONFIGS = Path(__file__).parent.parent / "configs" / "align"
BASE = Path("runs/demo")
"""Where `pellucid demo` leaves its model."""
NUM_RANKS = 2
"""Processes that a stage is divided over, where there are as many cores."""
PRETRAIN_STEPS = 1000
"""Fewer than `make demo` takes: sums ask for less than whole stories do."""
NUM_HELD_OUT = 500
NUM_VALIDATION = 200
STOP_AT = 0.4
"""Share of the validation problems at which the supervised stage ends: there has to be something left to reinforce."""
NUM_ASKED = 3000
"""Training problems that the model answers once, for what it gets wrong to be rejected."""
NUM_SAMPLES = 8
"""Held-out problems that the report shows the answers to, of each stage."""
LOOK_EVERY = {"sft": 5, "dpo": 10, "grpo": 20, "further-sft": 50}
"""Optimizer steps between two looks at the validation problems."""
SHORTER: dict[str, Any] = {}
"""Settings of every stage, over those of its file; tests make them small."""
START, RISE = (0.2, 0.6), 0.2
"""Where the share of right answers may be before reinforcement, and how far it has to rise over the supervised stage."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo-align",
        help="pretraining, sft, dpo and grpo in a row, on arithmetic",
        description="Takes the model of `pellucid demo` (trains one if it is not there) through sft, dpo and grpo on sums and "
        "differences of two-digit numbers, asks each for 500 problems that no stage has seen, and writes a report. "
        "Interrupted, it goes on where it was.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo-align"), metavar="DIR", help="folder (default runs/demo-align)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of problems, pretraining, order and sampling")
    parser.add_argument("--base", type=Path, metavar="MODEL", help=f"start here (default {BASE}, if it is there)")
    parser.add_argument("--fresh", action="store_true", help="delete what is in DIR first")
    parser.set_defaults(run=run, allocator="training")


@dataclass(frozen=True, slots=True)
class Score:
    """What a stage came to."""

    exact_match: float
    """Share of the held-out problems whose likeliest answer is right."""
    steps: int
    token_passes: int
    """Tokens through a forward, a backward counting as two, answers drawn and a reference's forwards included; what answers of
    a micro-batch begin with alike goes through once."""
    seconds: float
    """Of optimizer steps, drawing included."""


def run(args: argparse.Namespace) -> int:
    """All stages, then the report."""
    began = time.monotonic()
    flow = _Flow(args.out, args.seed, quiet=args.quiet, log_level=args.log_level)
    if args.fresh and args.out.exists():
        shutil.rmtree(args.out)
    flow.write_problems()
    base = flow.base(args.base)
    if base is None or not flow.stages(base):
        notice("the demo was interrupted; the same command goes on from here")
        return 0
    print(f"report: {flow.report()}")
    print(f"demo-align took {time.monotonic() - began:.0f} s")
    sft, dpo, grpo = (flow.scores[name].exact_match for name in ("sft", "dpo", "grpo"))
    print(
        f"accuracy: sft {sft:.2f} -> grpo {grpo:.2f} ({len(flow.problems.held_out)} held-out problems, seed {args.seed})"
    )
    if not (START[0] <= min(sft, dpo) and max(sft, dpo) <= START[1] and grpo >= sft + RISE):
        raise TrainingError(
            f"expected were {START[0]:.0%} to {START[1]:.0%} before grpo, and {100 * RISE:.0f} points more than sft after it"
        )
    return 0


class _Flow:
    """The stages in a folder, one after the other, each from the model that the one before has left."""

    def __init__(self, out: Path, seed: int, *, quiet: bool, log_level: str) -> None:
        from pellucid.cli.align_problems import divide

        self.out, self.seed, self.quiet, self.log_level = out, seed, quiet, log_level
        self.problems: Problems = divide(seed, num_held_out=NUM_HELD_OUT, num_validation=NUM_VALIDATION)
        self.scores: dict[str, Score] = {}
        self._samples: list[dict[str, Any]] = []

    def write_problems(self) -> None:
        """OUT/problems, for people to look at; `ConfigError` where they are another seed's."""
        from pellucid.cli.align_problems import write_lines

        folder = self.out / "problems"
        for name, problems in self.problems._asdict().items():
            path = folder / f"{name}.jsonl"
            before = path.read_bytes() if path.is_file() else None
            write_lines(path, problems)
            if before not in (None, path.read_bytes()):
                path.write_bytes(before)
                raise ConfigError(
                    f"{self.out} is of another seed than {self.seed}; choose another --out, or give --fresh"
                )

    def base(self, given: Path | None) -> Path | None:
        """The pretrained model; None where its training was interrupted."""
        from pellucid.checkpoint.model_folder import find_model

        if given is None and (BASE / "model" / "config.json").is_file():
            given = BASE
        if given is None:
            from pellucid.cli.demo import pretrain

            given = self.out / "pretrain"
            settings = {"train.seed": str(self.seed), "train.steps": str(PRETRAIN_STEPS)}
            pretrain(given, settings, quiet=self.quiet, log_level=self.log_level)
            if not (given / "model" / "config.json").is_file():
                return None
        model = find_model(given)
        print(f"pretrain: {given}")
        self._ask("base", model, None)
        return model

    def stages(self, base: Path) -> bool:
        """sft, dpo, grpo, and further sft from where sft ended; False where one was interrupted."""
        problems = self.problems
        sft = self._train("sft", base, self._prepare("sft", base, problems.train), stop_at=STOP_AT)
        if sft is None:
            return False
        dpo = self._train("dpo", sft, self._prepare("dpo", sft, self._pairs(sft)))
        grpo = self._train("grpo", dpo, self._prepare("grpo", sft, problems.train)) if dpo is not None else None
        if grpo is None:
            return False
        wanted = sum(self.scores[name].token_passes for name in ("dpo", "grpo"))
        a_step = self.scores["sft"].token_passes / self.scores["sft"].steps
        more = {"train.steps": max(1, round(wanted / a_step)), "optim.schedule": "linear", "train.seed": self.seed + 1}
        return self._train("further-sft", sft, self.out / "data" / "sft", more) is not None

    def _prepare(self, kind: "Kind", tokenizer: Path, records: Sequence[dict[str, str]]) -> Path:
        """OUT/data/KIND from OUT/problems/KIND.jsonl; problems stand as they are, without a chat around them."""
        from pellucid.cli.align_problems import write_lines
        from pellucid.data.prepare import PrepareOptions
        from pellucid.data.prepare_records import prepare_records

        data, source = self.out / "data" / kind, self.out / "problems" / f"{kind}.jsonl"
        if not (data / "index.json").is_file():
            write_lines(source, records)
            prepare_records(
                PrepareOptions(
                    inputs=(str(source),), out=data, tokenizer=tokenizer, records=kind, chat_template="none",
                    val_fraction=0.0, workers=1,
                )
            )  # fmt: skip
        return data

    def _pairs(self, sft: Path) -> list[dict[str, str]]:
        from pellucid.checkpoint.model_folder import load_model
        from pellucid.cli.align_problems import pairs

        if (self.out / "data" / "dpo" / "index.json").is_file():
            return []
        model, tokenizer, _ = load_model(sft, dtype="float32")
        assert tokenizer is not None
        return pairs(self.problems.train[:NUM_ASKED], model, tokenizer, self.seed)

    def _train(
        self, name: str, init: Path, data: Path, settings: dict[str, Any] | None = None, *, stop_at: float | None = None
    ) -> Path | None:
        """OUT/NAME from the model ``init``; its model, or None where it was interrupted."""
        from pellucid.checkpoint.model_folder import read_config
        from pellucid.cli.align_problems import WatchAccuracy
        from pellucid.cli.train import train, train_on_ranks

        run = self.out / name
        if not (run / "model" / "config.json").is_file():
            here: dict[str, Any] = {
                "train.out": str(run), "train.init": str(init), "data.path": str(data), "train.seed": self.seed,
            } | ({"parallel.mode": "zero1"} if (os.cpu_count() or 1) >= NUM_RANKS > 1 else {})  # fmt: skip
            file = CONFIGS / f"{name.removeprefix('further-')}.toml"
            config = load_config(file, here | SHORTER | (settings or {}), base_model=read_config(init))
            watch: Callback = WatchAccuracy(self.problems.validation, every=LOOK_EVERY[name], stop_at=stop_at)
            options: dict[str, Any] = {"resume": True, "quiet": self.quiet, "callbacks": [watch]}
            if config.parallel.mode == "none":
                train(config, **options)
            else:
                train_on_ranks(config, NUM_RANKS, options, self.log_level)
        model = run / "model"
        if not (model / "config.json").is_file():
            return None
        self._ask(name, model, run)
        return model

    def _ask(self, name: str, model: Path, run: Path | None) -> None:
        """Put the held-out problems to a stage's model, and keep what came of it."""
        from pellucid.checkpoint.model_folder import load_model
        from pellucid.cli.align_problems import answers_to, right, share_right

        loaded = load_model(model, dtype="float32")
        assert loaded.tokenizer is not None
        problems = self.problems.held_out
        answers = answers_to(problems, loaded.model, loaded.tokenizer)
        score = Score(share_right(problems, answers), *(_cost(run) if run is not None else (0, 0, 0.0)))
        self.scores[name] = score
        for problem, answer in list(zip(problems, answers, strict=True))[:NUM_SAMPLES]:
            ok = right(problem, answer)
            self._samples.append(
                {
                    "kind": name,
                    "prompt": problem["prompt"],
                    "text": answer,
                    "verdict": "ok" if ok else problem["answer"],
                }
            )
        cost = (
            f"{score.steps} steps, {score.token_passes / 1e6:.1f}M token passes, {score.seconds:.0f} s; " if run else ""
        )
        print(f"{name}: {cost}{score.exact_match:.1%} of {len(problems)} held-out problems right", flush=True)

    def report(self) -> Path:
        """OUT/report.html, from what the stages have left and the held-out problems."""
        from pellucid.cli.align_problems import write_lines
        from pellucid.report import build_stages_report

        write_lines(self.out / "samples.jsonl", self._samples)
        table = {name: asdict(score) for name, score in self.scores.items()}
        (self.out / "evaluation.json").write_text(json.dumps(table) + "\n", encoding="utf-8")
        return build_stages_report(self.out, {"sft": None, "dpo": "sft", "grpo": "dpo", "further-sft": "sft"})


def _cost(run: Path) -> tuple[int, int, float]:
    """Optimizer steps, token passes and seconds of a run, from its log."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    config = load_config(run / "config.toml")
    tokens = steps[-1]["tokens"]
    passes = 3 * tokens
    options = config.strategy.options
    if config.strategy.name == "dpo":  # the reference reads every pair once
        passes += tokens // (config.train.epochs or 1)
    if config.strategy.name == "grpo":
        drawn = sum(round(line["answers"] * line["response_tokens"]) for line in lines if line["event"] == "rollout")
        computed = sum(round(line["sequences"] * line["computed_tokens"]) for line in steps)
        passes = (4 if options.kl_coef else 3) * computed
        passes += drawn + (tokens - drawn) // options.completions  # a prompt is read once for its answers
    return len(steps), passes, sum(line["seconds"] for line in steps)
