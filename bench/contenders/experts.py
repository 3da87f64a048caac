"""One contender of bench/models.py's row of experts, in a process of its own, so that nobody's caches are another's.

The arguments: who, folder of the model, type to compute in, threads, rows, tokens. A line on stdin, a seed, asks for forward and
backward of random tokens through the model, and of random hidden states through its mixtures of experts alone, layer by layer; the
seconds of both come back. "logits" asks for those of the tokens of seed 0, in float32, saved beside the model. All answers are
JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


def load(who: str, folder: Path) -> Any:
    """The model that trains."""
    if who == "ours":
        import pellucid

        return pellucid.load_model(folder, device="cpu").model.requires_grad_(True).train()
    from transformers import Qwen3MoeForCausalLM

    chosen = {"experts_implementation": "eager"} if who == "loop" else {}
    return Qwen3MoeForCausalLM.from_pretrained(folder, **chosen).train()


def main() -> None:
    """Answer until stdin ends."""
    who, folder, dtype, threads, rows, tokens = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model, to_type = load(who, Path(folder)), getattr(torch, dtype)
    print('"ready"', flush=True)
    for line in sys.stdin:
        seed = 0 if line.strip() == "logits" else int(line)
        ids = torch.randint(4096, (int(rows), int(tokens)), generator=torch.Generator().manual_seed(seed))
        if line.strip() == "logits":
            with torch.no_grad():
                torch.save(model(ids).logits, Path(folder) / f"{who}.pt")
            print('"saved"', flush=True)
            continue
        began = time.perf_counter()
        with torch.autocast("cpu", to_type, enabled=to_type != torch.float32):
            logits = model(ids).logits
        F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
        model.zero_grad(set_to_none=True)
        whole = time.perf_counter() - began
        print(json.dumps([whole, layers_alone(model, seed, to_type, int(rows), int(tokens))]), flush=True)


def layers_alone(model: Any, seed: int, to_type: torch.dtype, rows: int, tokens: int) -> float:
    """Seconds of forward and backward, down to the hidden states that go in."""
    draw = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, rows, tokens, model.config.hidden_size, generator=draw)
    x.requires_grad_()
    began = time.perf_counter()
    for layer in model.model.layers:
        with torch.autocast("cpu", to_type, enabled=to_type != torch.float32):
            out = layer.mlp(x)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(grad.to(out.dtype))
    seconds = time.perf_counter() - began
    assert x.grad is not None and bool(x.grad.any())
    model.zero_grad(set_to_none=True)
    return seconds


if __name__ == "__main__":
    main()
