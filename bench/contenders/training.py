"""One contender of bench/train.py, in a process of its own: it builds its model, then trains when it is told to.

On stdin come numbers of steps, one a line; after each turn one JSON object goes to stdout:
``{"seconds", "faults" (minor page faults), "loader_seconds" (ours only), "loss"}``. The end of stdin ends the process.
Every contender trains `small` of bench/train.py on the same random tokens with AdamW, clipping and one loss a step
brought to the host.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.config import RunConfig, run_config
from pellucid.data.batches import Windows
from pellucid.data.shards import TokenData

VOCAB, CONTEXT, BATCH = 8192, 256, 16
LR, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
ENDLESS = 10**6


class Turns:
    """Holds a training loop at the border of a step until the next turn."""

    def __init__(self, replies: TextIO) -> None:
        self._replies = replies
        self._left = 0
        self.loader_seconds = 0.0

    def begin(self) -> None:
        """Wait for the next turn; the end of input ends the process, without saving anything."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        self._left = int(line)
        self.loader_seconds = 0.0
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._began = time.perf_counter()

    def step_done(self, loss: float | Tensor) -> None:
        """Call after each step; at the end of a turn it answers and waits for the next."""
        self._left -= 1
        if self._left:
            return
        seconds = time.perf_counter() - self._began
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        self.say(seconds=seconds, faults=faults, loader_seconds=self.loader_seconds, loss=float(loss))
        self.begin()

    def say(self, **record: Any) -> None:
        """One line to the parent."""
        print(json.dumps(record), file=self._replies, flush=True)

    def timed(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """``function``, its time counted as the loader's."""

        def call() -> Any:
            begin = time.perf_counter()
            result = function()
            self.loader_seconds += time.perf_counter() - begin
            return result

        return call


def small_run(dtype: str, *, compile: bool = False, out: str = "") -> RunConfig:
    """`small` as a run of ours: everything that is not named is our default."""
    return run_config(
        {
            "model": {"preset": "small", "vocab_size": VOCAB},
            "optim": {
                "lr": LR, "max_grad_norm": CLIP, "schedule": {"name": "constant"}, "betas": list(BETAS), "weight_decay": DECAY,
            },
            "train": {
                "steps": ENDLESS, "global_batch": BATCH, "micro_batch": BATCH, "dtype": dtype, "device": "cpu",
                "compile": compile, "out": out, "save_every": 0, "val_every": 0,
            },
        }
    )  # fmt: skip


def pellucid_trainer(turns: Turns, options: argparse.Namespace, *, compile: bool) -> None:
    """Our Trainer as `pellucid train` runs it: with a run folder, its log and its progress lines."""
    from pellucid.cli.progress import TrainProgress
    from pellucid.train import Callback, Trainer, TrainState
    from pellucid.train.callbacks import StepInfo

    class Hold(Callback):
        def on_train_begin(self, trainer: Trainer, info: TrainState) -> None:
            turns.begin()

        def on_optimizer_step(self, trainer: Trainer, info: StepInfo) -> None:
            turns.step_done(info.loss)

    config = small_run(options.dtype, compile=compile, out=f"{options.scratch}/run")
    trainer = Trainer(config, callbacks=[TrainProgress(), Hold()], train_data=_windows(options))
    trainer.setup.loader.next_window = turns.timed(trainer.setup.loader.next_window)  # type: ignore[method-assign]
    turns.say(ready=True)
    trainer.train()


def pellucid_bare(turns: Turns, options: argparse.Namespace, *, compile: bool) -> None:
    """The shortest loop over our model that trains it alike."""
    from pellucid.model import Transformer
    from pellucid.optim.adamw import AdamWOptions, build_adamw

    model = Transformer(small_run(options.dtype).model)
    optimizer = build_adamw(model, LR, AdamWOptions(betas=BETAS, weight_decay=DECAY))

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    _plain_loop(turns, options, model, optimizer, torch.compile(loss_of, dynamic=False) if compile else loss_of)


def litgpt_loop(turns: Turns, options: argparse.Namespace, *, compile: bool) -> None:
    """litgpt's model, loss and optimizer settings in the plain loop of its ``pretrain.py``, which compiles the model."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    model: Any = GPT(
        Config(
            block_size=CONTEXT, vocab_size=VOCAB, padded_vocab_size=VOCAB, n_layer=6, n_head=6, n_query_groups=2, n_embd=384,
            head_size=64, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
            norm_eps=1e-5, mlp_class_name="LLaMAMLP", intermediate_size=1024,
        )
    )  # fmt: skip
    model.apply(model._init_weights)
    model.transformer.wte.weight = model.lm_head.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=False)
    called = torch.compile(model) if compile else model

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = chunked_cross_entropy(called(tokens), targets)
        return loss

    _plain_loop(turns, options, model, optimizer, loss_of)


def transformers_trainer(turns: Turns, options: argparse.Namespace, *, compile: bool) -> None:
    """The transformers Trainer with its defaults, except that it neither logs nor saves."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    windows = _windows(options)

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(windows)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            ids = torch.from_numpy(windows.split.read(index * CONTEXT, (index + 1) * CONTEXT))
            return {"input_ids": ids, "labels": ids}

    last: list[Any] = [float("nan")]

    class Noting(Trainer):  # the Trainer shows a loss only where it logs one
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            last[0] = (result[0] if isinstance(result, tuple) else result).detach()
            return result

    class Hold(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.step_done(last[0])

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=f"{options.scratch}/transformers", max_steps=ENDLESS, per_device_train_batch_size=BATCH, learning_rate=LR,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=DECAY, max_grad_norm=CLIP, bf16=options.dtype == "bfloat16",
        use_cpu=True, torch_compile=compile, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Noting(model=model, args=arguments, train_dataset=Rows(), callbacks=[Hold()])
    turns.say(ready=True)
    trainer.train()


def _plain_loop(
    turns: Turns,
    options: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> None:
    windows = _windows(options)
    draw = torch.Generator().manual_seed(0)
    model.train()
    turns.say(ready=True)
    turns.begin()
    while True:
        rows = torch.randint(len(windows) - 1, (BATCH,), generator=draw).tolist()
        ids = torch.stack([torch.from_numpy(windows.split.read(r * CONTEXT, (r + 1) * CONTEXT + 1)) for r in rows])
        narrow = torch.autocast("cpu", torch.bfloat16) if options.dtype == "bfloat16" else nullcontext()
        with narrow:
            loss = loss_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.step_done(loss.item())


def _windows(options: argparse.Namespace) -> Windows:
    return Windows(TokenData.open(options.data).split("train"), CONTEXT)


CONTENDERS: dict[str, Callable[..., None]] = {
    "pellucid": pellucid_trainer,
    "bare": pellucid_bare,
    "transformers": transformers_trainer,
    "litgpt": litgpt_loop,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder of tokens")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder to write into")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    CONTENDERS[options.contender](Turns(replies), options, compile=options.compile)


if __name__ == "__main__":
    main()
