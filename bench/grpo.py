"""How fast does GRPO draw answers, beside transformers' generate, and does a rollout hold the weights twice?

    python bench/grpo.py [--prompts 8] [--completions 8] [--new-tokens 64] [--preset small] [--dtype float32] [--rounds 3] [--threads 2]

Prompts of 24 to 40 random tokens, each answered `--completions` times at temperature 1, without an end token, so that all
draw equally many. Both sides have the same weights and dtype and know their prompts at once: transformers gets them padded
on the left, each as often as it has answers; the engine shares a prompt's pages among its answers. A fresh engine is made in
each round, as each rollout of a training run makes one. Rounds alternate; a ratio is the median of the ratios within rounds.

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


def ours(model: Transformer, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of one rollout, and the bytes of weights that its engine holds beside the model's."""
    began = time.perf_counter()
    pages = sum(args.completions * -(-(len(p) + args.new_tokens) // 16) + 1 for p in prompts) + 1
    kv_gb = pages * 16 * bytes_per_token(model.kv_specs(), next(model.parameters()).dtype) / 1e9  # as rollouts have it
    engine = Engine(model, kv_gb=kv_gb, page_size=16, exact=False)
    params = SamplingParams(max_tokens=args.new_tokens, n=args.completions, seed=0)
    results = engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    assert all(len(result.ids) == args.new_tokens for result in results)
    held = {p.data_ptr() for p in model.parameters()}
    copied = sum(p.nbytes for p in engine.model.parameters() if p.data_ptr() not in held)
    return {"tokens_per_s": len(results) * args.new_tokens / seconds, "copied_bytes": copied}


def theirs(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of one call of generate."""
    longest = max(map(len, prompts))
    rows = [p for p in prompts for _ in range(args.completions)]
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in rows])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in rows])
    began = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None,
        max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    assert out.shape[1] == longest + args.new_tokens
    return {"tokens_per_s": len(rows) * args.new_tokens / seconds}


def main() -> None:
    """Print a line of JSON for each side and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 8), ("completions", 8), ("new-tokens", 64), ("rounds", 3), ("threads", 2)):
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
    rounds: list[tuple[dict[str, float], dict[str, float] | None]] = []
    for number in range(args.rounds + 1):
        pair = ours(model, prompts, args), theirs(other, prompts, args) if other is not None else None
        if number:  # the first one warms up
            rounds.append(pair)
    mine = [a["tokens_per_s"] for a, _ in rounds]
    line = {"pellucid": statistics.median(mine), "copied_bytes": rounds[0][0]["copied_bytes"]}
    if other is not None:
        line["transformers"] = statistics.median(b["tokens_per_s"] for _, b in rounds if b is not None)
        line["ratio"] = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in rounds if b is not None)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
