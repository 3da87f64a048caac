"""One contender of bench/serve.py, in a process of its own: it loads its model, then does what it is told.

The first argument says as JSON who it is: ``{"kind", "model", "threads", ...}`` with further settings by kind. On stdin come jobs,
one JSON object a line, and each is answered with one. Tokens are drawn greedily, and no end token ends an answer:

decode   ``{"prompts", "new"}``: all prompts together, ``new`` tokens each; the seconds and tokens after everybody's first one.
prefill  ``{"prompts"}``: the seconds until everybody has the first token.
serve    ``{"prompts", "new": [...], "together"}``: requests that come and go (ours only); seconds, tokens, prompt tokens computed.
memory   what the process holds (ours only).

The end of stdin ends the process.
"""

import json
import resource
import sys
import time
from typing import Any, Protocol

import numpy as np
import torch

Prompts = list[list[int]]
Answer = dict[str, Any]


class Contender(Protocol):
    """What every kind does."""

    def decode(self, prompts: Prompts, new: int) -> Answer: ...
    def prefill(self, prompts: Prompts) -> Answer: ...


class Pellucid:
    """Our engine. ``dtype``, ``weights`` (None, "int8", "int4"), and ``engine``: options of `Engine`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from pellucid.checkpoint.model_folder import load_model
        from pellucid.cli.sampling import pack_bfloat16
        from pellucid.inference import Engine

        self.baseline = peak_bytes()  # all that Python and torch take
        torch.set_num_threads(spec["threads"])
        self.kv_gb = spec["engine"]["kv_gb"]
        self.model = load_model(spec["model"], device="cpu", dtype=spec["dtype"], weights=spec["weights"]).model
        pack_bfloat16(self.model, fast=not spec["engine"]["exact"])  # as the commands do
        self.engine = Engine(self.model, **spec["engine"])

    def decode(self, prompts: Prompts, new: int) -> Answer:
        waiting = self._submit(prompts, new)
        while waiting:
            waiting -= {event.request_id for event in self.engine.step()}
        began, tokens = time.perf_counter(), 0
        while self.engine.has_work:
            tokens += len(self.engine.step())
        seconds = time.perf_counter() - began
        self.engine.pool.forget()
        return {"seconds": seconds, "tokens": tokens}

    def prefill(self, prompts: Prompts) -> Answer:
        began = time.perf_counter()
        self._submit(prompts, 1)
        while self.engine.has_work:
            self.engine.step()
        seconds = time.perf_counter() - began
        self.engine.pool.forget()
        return {"seconds": seconds, "tokens": sum(map(len, prompts))}

    def serve(self, prompts: Prompts, new: list[int], together: int) -> Answer:
        from pellucid.evaluate.serving import Limits, drive, report

        run = drive(self.engine, self._requests(prompts, new), concurrency=together)
        self.engine.pool.forget()
        figures = report(run, Limits())
        assert not figures.failed
        return {
            "seconds": figures.seconds, "tokens": figures.output_tokens, "prefilled": figures.prefilled_tokens,
            "steps": figures.steps,
        }  # fmt: skip

    def memory(self) -> Answer:
        from pellucid.evaluate.roofline import kv_bytes, weight_bytes
        from pellucid.model.quantize import memory_bytes

        return {
            "growth": peak_bytes() - self.baseline, "weights": memory_bytes(self.model), "read": weight_bytes(self.model),
            "kv_budget": round(self.kv_gb * 1e9), "kv_of_a_token": kv_bytes(self.model, 1),
        }  # fmt: skip

    def _submit(self, prompts: Prompts, new: int) -> set[str]:
        return {self.engine.submit(request) for request in self._requests(prompts, [new] * len(prompts))}

    def _requests(self, prompts: Prompts, new: list[int]) -> list[Any]:
        from pellucid.inference import Request, SamplingParams

        pairs = enumerate(zip(prompts, new, strict=True))
        return [Request(str(i), tuple(p), SamplingParams(temperature=0, max_tokens=n)) for i, (p, n) in pairs]


class Transformers:
    """``generate`` of Hugging Face transformers as it comes. ``dtype``."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(spec["threads"])
        self.model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]))
        self.model.eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def decode(self, prompts: Prompts, new: int) -> Answer:
        times = self._generate(prompts, new)
        return {"seconds": times[-1] - times[0], "tokens": len(prompts) * (new - 1)}

    def prefill(self, prompts: Prompts) -> Answer:
        began = time.perf_counter()
        return {"seconds": self._generate(prompts, 1)[0] - began, "tokens": sum(map(len, prompts))}

    def _generate(self, prompts: Prompts, new: int) -> list[float]:
        """When each step's tokens were drawn."""
        times: list[float] = []

        def stamp(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, stopping_criteria=[stamp]
        )
        assert out.shape == (len(prompts), ids.shape[1] + new) and len(times) == new
        return times


class LlamaCpp:
    """llama.cpp through the C functions that llama-cpp-python wraps; ``model`` is a GGUF file, ``sequences`` the most together."""

    CONTEXT = 1024

    def __init__(self, spec: dict[str, Any]) -> None:
        import llama_cpp.llama_cpp as low

        self.low = low
        low.llama_backend_init()
        options = low.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = low.llama_model_load_from_file(spec["model"].encode(), options)
        settings = low.llama_context_default_params()
        settings.n_seq_max = spec["sequences"]
        settings.n_ctx = self.CONTEXT * spec["sequences"]
        settings.n_batch, settings.n_ubatch = 2048, 512
        settings.n_threads = settings.n_threads_batch = spec["threads"]
        self.context = low.llama_init_from_model(self.model, settings)
        assert self.model and self.context, "llama.cpp could not load the model"
        self.vocabulary = low.llama_vocab_n_tokens(low.llama_model_get_vocab(self.model))
        self.batch = low.llama_batch_init(2048, 0, 1)

    def decode(self, prompts: Prompts, new: int) -> Answer:
        drawn = self._read(prompts)
        began = time.perf_counter()
        for step in range(new - 1):
            drawn = self._forward(
                [(t, len(p) + step, i, True) for i, (t, p) in enumerate(zip(drawn, prompts, strict=True))]
            )
        return {"seconds": time.perf_counter() - began, "tokens": len(prompts) * (new - 1)}

    def prefill(self, prompts: Prompts) -> Answer:
        began = time.perf_counter()
        self._read(prompts)
        return {"seconds": time.perf_counter() - began, "tokens": sum(map(len, prompts))}

    def _read(self, prompts: Prompts) -> list[int]:
        """Forget everything, read the prompts, and draw everybody's first token."""
        self.low.llama_memory_clear(self.low.llama_get_memory(self.context), True)
        return [
            self._forward([(t, at, i, at == len(p) - 1) for at, t in enumerate(p)])[0] for i, p in enumerate(prompts)
        ]

    def _forward(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Token, position, sequence and whether its logits are wanted, of each row; the best tokens after the wanted ones."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        status = self.low.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode gave {status}"
        drawn = []
        for i, (*_, wanted) in enumerate(rows):
            if wanted:
                logits = np.ctypeslib.as_array(self.low.llama_get_logits_ith(self.context, i), (self.vocabulary,))
                drawn.append(int(logits.argmax()))
        return drawn


KINDS: dict[str, type[Contender]] = {"pellucid": Pellucid, "transformers": Transformers, "llama.cpp": LlamaCpp}


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    replies = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints
    spec = json.loads(sys.argv[1])
    contender = KINDS[spec["kind"]](spec)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = getattr(contender, job.pop("do"))(**job)
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
