"""A configuration made so small that every mode runs it in a second, and data that is as awkward as data can be.

W ranks, k micro-batches a rank in an optimizer step, T tokens of context.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from pellucid.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig, flat_table, to_table
from pellucid.data.batches import Windows, permute
from pellucid.data.shards import IntArray, Split
from pellucid.optim import MuonOptions

LAYERS, HIDDEN, VOCABULARY, CONTEXT, STEPS, MICRO_BATCHES, ROWS = 2, 128, 509, 64, 3, 2, 2
"""At most. The vocabulary is no multiple of 2, 3 or 4 ranks; rows are sequences of a micro-batch."""
HEADS, HEAD_DIM, WINDOW, WARMUP, EXPERTS = 4, 32, 24, 1, 8
BUCKET_MB = 0.25
"""So that gradients travel in several buckets although the model is small."""
MAX_GRAD_NORM = 0.1
"""Below the norm of a fresh model's gradients, so that clipping acts where it is configured."""
MAX_STEP = 0.01
"""Of an update, relative to the weights. AdamW turns the rounding of a small gradient into one of the whole step, which a
high rate would blow up until not even two correct runs agree."""
TIMEOUT_S = 60.0


def shrink(config: RunConfig, ranks: int) -> RunConfig:
    """What is left of ``config`` at this size, for ``ranks`` ranks with `MICRO_BATCHES` micro-batches each.

    Shape features (grouped heads, latents, experts, tied head, norms, gate, biases, windows, rotary scaling), objective, optimizer,
    schedule, clipping, activation checkpointing, seed and options of modes stay. Dropout is off: with it ranks draw other
    masks than one process. Nothing is read or written: no data, initial weights, callbacks, run folder.
    """
    return replace(
        config,
        model=_shrink_model(config.model),
        data=replace(config.data, path="", context=CONTEXT, stride=0),
        optim=_shrink_optim(config.optim, config.model.initializer_range),
        parallel=_shrink_parallel(config.parallel),
        train=_shrink_train(config.train, ranks),
        callbacks={},
    )


def one_process(config: RunConfig) -> RunConfig:
    """The same steps on one process that takes each global batch in one forward and backward."""
    return replace(
        config,
        parallel=replace(config.parallel, mode="none"),
        train=replace(config.train, micro_batch=config.train.global_batch),
    )


def changes(before: RunConfig, after: RunConfig) -> list[tuple[str, Any, Any]]:
    """The keys in which two configurations differ, as ``(dotted key, before, after)``."""
    old, new = flat_table(to_table(before)), flat_table(to_table(after))
    return [
        (key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    ]


def _shrink_model(model: ModelConfig) -> ModelConfig:
    group = min(model.num_attention_heads // model.num_key_value_heads, 2 * HEADS)
    kv_heads = min(model.num_key_value_heads, max(1, HEADS // group))
    hidden = min(model.hidden_size, HIDDEN)
    return replace(
        model,
        vocab_size=min(model.vocab_size or VOCABULARY, VOCABULARY),
        hidden_size=hidden,
        intermediate_size=max(1, model.intermediate_size * hidden // model.hidden_size),
        num_hidden_layers=min(model.num_hidden_layers, LAYERS),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=0 if model.is_latent else min(model.head_dim, HEAD_DIM),
        **_shrink_latent(model),
        **_shrink_experts(model, hidden),
        max_position_embeddings=CONTEXT,
        sliding_window=None if model.sliding_window is None else min(model.sliding_window, WINDOW),
        max_window_layers=min(model.max_window_layers, LAYERS - 1),
        dropout=0.0,
    )


def _shrink_latent(model: ModelConfig) -> dict[str, Any]:
    if not model.is_latent:
        return {}
    widths = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: width and min(width, HEAD_DIM) for name in widths if (width := getattr(model, name)) is not None}


def _shrink_experts(model: ModelConfig, hidden: int) -> dict[str, Any]:
    """Few experts, in as many groups as there were up to 2, with half of them or fewer for each token.

    Two where there were two or more: one alone, with ``norm_topk_prob``, would leave its router without a gradient.
    """
    if not model.n_routed_experts:
        return {}
    experts = min(model.n_routed_experts, EXPERTS)
    groups = min(model.n_group, 2) if experts % 2 == 0 else 1
    allowed = 1 if model.topk_group < model.n_group else groups
    available = experts // groups * allowed
    return {
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": allowed,
        "num_experts_per_tok": min(model.num_experts_per_tok, available, max(2, available // 2)),
        "moe_intermediate_size": max(1, min(model.moe_intermediate_size * hidden // model.hidden_size, HIDDEN)),
        "n_shared_experts": min(model.n_shared_experts, 1),
        "first_k_dense_replace": min(model.first_k_dense_replace, LAYERS - 1),
    }


def _shrink_optim(optim: OptimConfig, weight_scale: float) -> OptimConfig:
    clip, options = optim.max_grad_norm, optim.options
    if isinstance(options, MuonOptions):
        options = replace(options, newton_schulz_dtype="auto")  # that of the weights
    return replace(
        optim,
        options=options,
        lr=min(optim.lr, weight_scale * MAX_STEP),
        warmup_steps=min(optim.warmup_steps, WARMUP),
        max_grad_norm=None if clip is None else min(clip, MAX_GRAD_NORM),
    )


def _shrink_parallel(parallel: ParallelConfig) -> ParallelConfig:
    return replace(
        parallel,
        bucket_size_mb=min(parallel.bucket_size_mb, BUCKET_MB),
        backend="gloo",
        timeout_s=min(parallel.timeout_s, TIMEOUT_S),
        ledger=True,
        emulate="",
        modes={mode: _shrink_options(options) for mode, options in parallel.modes.items()},
    )


def _shrink_options(options: Any) -> Any:
    """Small buckets and gradients reduced in their own type, where a mode has these options."""
    names = {f.name for f in fields(options)}
    small = {
        name: min(getattr(options, name), BUCKET_MB)
        for name in names & {"bucket_size_mb", "bucket_cap_mb"}
        if getattr(options, name) is not None
    }
    exact = dict.fromkeys(names & {"reduce_dtype", "compute_dtype"})
    return replace(options, **small, **exact)


def _shrink_train(train: TrainConfig, ranks: int) -> TrainConfig:
    return replace(
        train,
        out="",
        init="",
        steps=STEPS,
        epochs=None,
        global_batch=ROWS * MICRO_BATCHES * ranks,
        micro_batch=ROWS,
        dtype="float32",
        device="cpu",
        compile=False,
        save_every=0,
        val_every=0,
        hash_every=0,
        max_seconds=None,
    )


# -- data ---------------------------------------------------------------------------------------------------


class GeneratedSplit(Split):
    """Documents of given lengths and random tokens, in memory.

    Args:
        lengths: tokens of each document.
        vocab_size: small ids are the more frequent, as in text.
    """

    def __init__(self, lengths: list[int], vocab_size: int, seed: int) -> None:
        self.name = "generated"
        self._ends = np.cumsum(lengths)
        self.num_tokens, self.num_documents = int(self._ends[-1]), len(lengths)
        drawn = np.random.default_rng(seed).random(self.num_tokens) ** 2
        self._tokens = (drawn * vocab_size).astype(np.int64)

    def read(self, start: int, stop: int) -> IntArray:
        """Tokens ``[start, stop)``, as a new array."""
        return self._tokens[start:stop].copy()

    def document_spans(self, start: int, stop: int) -> tuple[int, IntArray]:
        """As `Split.document_spans`."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        return first, self._ends[first : last + 1]


def generated_windows(config: RunConfig, ranks: int, *, steps: int = STEPS) -> Windows:
    """One epoch of ``steps`` steps of a shrunk configuration, the same for every process that asks.

    Documents of very different lengths supervise a different number of tokens on each rank. In each step one micro-batch
    of one of ``ranks`` ranks, another one each time, has no supervised token at all: its documents are of one token.
    """
    train, context = config.train, config.data.context
    num = steps * train.global_batch
    share = train.global_batch // ranks
    empty: set[int] = set()
    for step in range(steps):
        micro = step % max(1, share // train.micro_batch)
        first = step * train.global_batch + (ranks - 1 - step) % ranks * share + micro * train.micro_batch
        order = np.arange(first, first + train.micro_batch)
        empty |= set(permute(order, num, train.seed << 32).tolist())
    draw = np.random.default_rng(train.seed)
    lengths: list[int] = []
    for window in range(num):
        longest = 1 if window in empty else int(draw.integers(2, context))
        left = context
        while left:
            lengths.append(min(left, int(draw.integers(1, longest + 1))))
            left -= lengths[-1]
    return Windows(GeneratedSplit([*lengths, 1], config.model.vocab_size, train.seed), context)
