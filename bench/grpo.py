"""How fast does GRPO draw answers, beside transformers' generate, and does a rollout hold the weights twice?

    python bench/grpo.py [--prompts 8] [--completions 8] [--new-tokens 128] [--mean-tokens 32] [--preset small] [--dtype float32]
                         [--rounds 3] [--threads 2]

Prompts of 24 to 40 random tokens, each answered `--completions` times at temperature 1. Two questions: answers that end by
themselves, as those of training do, after `--mean-tokens` on average and `--new-tokens` at most (the weights are random, so
that every 32nd id ends an answer with a probability of about 1/32 a token); and answers of equally many tokens,
`--mean-tokens` each. Tokens up to an answer's end count, padding does not.

Both sides have the same weights and dtype and know their prompts at once: transformers gets them padded on the left, each as
often as it has answers; the engine shares a prompt's pages among its answers. A fresh engine is made in each round, as each
rollout of a training run makes one. Rounds alternate; a ratio is the median of the ratios within rounds.

transformers is no dependency: `pip install transformers`. Without it Pellucid runs alone.
"""

import argparse
import json
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from machine import machine_line

from pellucid import save_model
from pellucid.config import load_config
from pellucid.inference import Engine, SamplingParams
from pellucid.inference.paged import bytes_per_token
from pellucid.model import Transformer

VOCABULARY = 4096


Figures = dict[str, float]


def ours(model: Transformer, prompts: list[list[int]], num: int, new: int, ends: list[int], seed: int) -> Figures:
    """Tokens a second of one rollout, and the bytes of weights that its engine holds beside the model's."""
    began = time.perf_counter()
    pages = sum(num * -(-(len(p) + new) // 16) + 1 for p in prompts) + 1
    kv_gb = pages * 16 * bytes_per_token(model.kv_specs(), next(model.parameters()).dtype) / 1e9  # as rollouts have it
    engine = Engine(model, kv_gb=kv_gb, page_size=16, exact=False)
    results = engine.generate(prompts, SamplingParams(max_tokens=new, n=num, seed=seed, stop_ids=tuple(ends)))
    seconds = time.perf_counter() - began
    assert ends or all(len(result.ids) == new for result in results)
    drawn = sum(len(result.ids) for result in results)
    held = {p.data_ptr() for p in model.parameters()}
    copied = sum(p.nbytes for p in engine.model.parameters() if p.data_ptr() not in held)
    return {"tokens_per_s": drawn / seconds, "tokens": drawn / len(results), "copied_bytes": copied}


def theirs(model: Any, prompts: list[list[int]], num: int, new: int, ends: list[int], seed: int) -> Figures:
    """Tokens a second of one call of generate."""
    torch.manual_seed(seed)
    longest = max(map(len, prompts))
    rows = [p for p in prompts for _ in range(num)]
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in rows])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows])
    began = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
        eos_token_id=ends or None, max_new_tokens=new,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    answers = out[:, longest:].tolist()
    assert ends or all(len(answer) == new for answer in answers)
    stops = set(ends)
    drawn = sum(next((i + 1 for i, token in enumerate(a) if token in stops), len(a)) for a in answers)
    return {"tokens_per_s": drawn / seconds, "tokens": drawn / len(rows)}


def main() -> None:
    """Print a line of JSON for each side and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    counts = {"prompts": 8, "completions": 8, "new-tokens": 128, "mean-tokens": 32, "rounds": 3, "threads": 2}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine_line())
    config = load_config(None, {"model.preset": args.preset, "model.vocab_size": VOCABULARY}).model
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).to(getattr(torch, args.dtype))
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(24, 41, (args.prompts,), generator=generator).tolist()
    prompts = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    other = None
    if find_spec("transformers") is not None:
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model", model)
            other = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=getattr(torch, args.dtype))
    every = list(range(args.mean_tokens - 1, VOCABULARY, args.mean_tokens))
    questions = {"answers that end": (args.new_tokens, every), "equally many tokens": (args.mean_tokens, [])}
    for question, (new, ends) in questions.items():
        rounds: list[tuple[Figures, Figures | None]] = []
        for number in range(args.rounds + 1):
            settings = args.completions, new, ends, number
            pair = ours(model, prompts, *settings), theirs(other, prompts, *settings) if other is not None else None
            if number:  # the first one warms up
                rounds.append(pair)
        mine = [a for a, _ in rounds]
        line: dict[str, Any] = {"question": question, "dtype": args.dtype, "copied_bytes": mine[0]["copied_bytes"]}
        line |= {"pellucid": median(mine, "tokens_per_s"), "tokens_each": median(mine, "tokens")}
        if other is not None:
            others = [b for _, b in rounds if b is not None]
            ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(mine, others, strict=True)]
            line |= {"transformers": median(others, "tokens_per_s"), "their_tokens_each": median(others, "tokens")}
            line |= {"ratio": round(statistics.median(ratios), 2), "ratios": [round(ratio, 2) for ratio in ratios]}
        print(json.dumps(line), flush=True)


def median(figures: list[Figures], name: str) -> float:
    """Of one of them."""
    return round(statistics.median(figure[name] for figure in figures), 1)


if __name__ == "__main__":
    main()
