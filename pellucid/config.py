"""Every setting that a person can write: frozen dataclasses, read from TOML and dotted flags.

A table becomes a dataclass; a key that the dataclass does not have is refused with the nearest one named, a
value of the wrong type or out of range with the key's path. ``"none"`` stands for None, which TOML lacks.
"""

import ast
import inspect
import json
import math
import re
import tomllib
import types
import typing
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from pellucid.errors import ConfigError
from pellucid.registry import load_plugins, lookup, names, nearest

CONFIG_VERSION = 1

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    },
    "small": {
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    },
    "base": {
        "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    },
}  # fmt: skip
"""About 1M, 12M and 110M parameters with vocabularies of 2,048, 8,192 and 32,768."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Keys are those of a Hugging Face ``config.json``."""

    vocab_size: int = 0
    """Rows of the embedding; 0 takes the vocabulary of the data's tokenizer."""
    hidden_size: int = 384
    """Width of the residual stream."""
    intermediate_size: int = 1024
    """Width inside the SwiGLU feed-forward."""
    num_hidden_layers: int = 6
    """Decoder blocks."""
    num_attention_heads: int = 6
    """Query heads."""
    num_key_value_heads: int = 0
    """Key and value heads, shared by groups of query heads; 0: as many as query heads."""
    head_dim: int = 0
    """Width of one head; 0: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 256
    """The window: the longest sequence the model is made for, in tokens."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square inside each RMSNorm."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] | None = None
    """Stretches the window: {rope_type = "linear" | "ntk" | "dynamic" | "yarn" | "llama3", factor = ..., ...}, with the
    further keys of Hugging Face."""
    tie_word_embeddings: bool = True
    """The output head is the embedding matrix."""
    attention_bias: bool = False
    """Biases on the query, key and value projections; with latent attention on those that narrow."""
    attention_out_bias: bool | None = None
    """Bias on the output projection of attention; "none": as attention_bias."""
    mlp_bias: bool = False
    """Biases on the feed-forward projections."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotary embedding (Qwen3)."""
    attention_gate: bool = False
    """Multiply the attention output by sigmoid(Linear(x)) before its output projection."""
    sliding_window: int | None = None
    """A token sees this many tokens, itself included; none: all before it."""
    max_window_layers: int = 0
    """The first layers that keep full attention although sliding_window is set."""
    kv_lora_rank: int | None = None
    """Width of the latent that keys and values are made of: multi-head latent attention (DeepSeek-V2). "none": ordinary."""
    q_lora_rank: int | None = None
    """Latent attention: width of the latent that queries are made of; "none": made of the residual stream itself."""
    qk_nope_head_dim: int = 0
    """Latent attention: width of a query or key head without rotary embedding."""
    qk_rope_head_dim: int = 0
    """Latent attention: width of the rotary part of a head, whose key all heads share; head_dim is this."""
    v_head_dim: int = 0
    """Latent attention: width of a value head."""
    rope_interleave: bool = False
    """Latent attention: rotary elements stand in the weights as pairs, not in halves (DeepSeek's own)."""
    n_routed_experts: int = 0
    """Feed-forward experts that each token chooses from: a mixture of experts; 0: one dense feed-forward."""
    num_experts_per_tok: int = 0
    """Experts that a token goes to."""
    moe_intermediate_size: int = 0
    """Width inside an expert."""
    n_shared_experts: int = 0
    """Experts that every token goes to, built as one of so many times the width."""
    first_k_dense_replace: int = 0
    """The first layers that keep a dense feed-forward of intermediate_size."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """How a token scores experts."""
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    """How experts are chosen: the best; the best within the groups that have the best expert; "noaux_tc": the best after a
    bias for each expert, within the groups whose two best sum highest (DeepSeek-V3)."""
    n_group: int = 1
    """Groups that the experts form, in order."""
    topk_group: int = 1
    """Groups that a token may choose from."""
    norm_topk_prob: bool = False
    """Divide the chosen scores by their sum."""
    routed_scaling_factor: float = 1.0
    """Multiplies the chosen scores."""
    router_aux_loss_coef: float = 0.0
    """Weight of the balancing loss of each sequence (DeepSeek-V3, eq. 17 to 20); 0: none."""
    router_bias_update_speed: float = 0.0
    """With "noaux_tc": after each step an expert's bias rises by this if it got fewer tokens than the mean, else falls."""
    dropout: float = 0.0
    """Probability of dropping elements of the embedding and of each residual branch in training."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; residual projections get it / sqrt(2 * layers)."""
    embedding_range: float | None = None
    """Standard deviation of the initial embedding; "none": initializer_range. With an untied head, 1.0 lets a small
    model tell tokens apart from the start and copy names much sooner."""
    attend: Literal["sdpa", "canonical"] = "sdpa"
    """Attention kernel: "sdpa" is fast; "canonical" gives the same bits whatever is batched, cached or chunked."""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "max_position_embeddings"):
            _require(getattr(self, name) >= 1, f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("vocab_size", "num_key_value_heads", "head_dim", "max_window_layers"):
            _require(getattr(self, name) >= 0, f"model.{name} must not be negative, got {getattr(self, name)}")
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.attention_out_bias == self.attention_bias:
            object.__setattr__(self, "attention_out_bias", None)
        _check_latent_attention(self)
        _check_experts(self)
        if not self.head_dim:
            _require(
                self.hidden_size % self.num_attention_heads == 0,
                f"model.hidden_size {self.hidden_size} is not divisible by model.num_attention_heads "
                f"{self.num_attention_heads}; change one of them or set model.head_dim",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _require(self.head_dim % 2 == 0, f"model.head_dim must be even for rotary embeddings, got {self.head_dim}")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"model.num_attention_heads {self.num_attention_heads} is not divisible by "
            f"model.num_key_value_heads {self.num_key_value_heads}",
        )
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"model.{name} must be positive and finite, got {value}")
        _require(0 <= self.dropout < 1, f"model.dropout must be in [0, 1), got {self.dropout}")
        _require(
            self.embedding_range is None or self.embedding_range > 0,
            f'model.embedding_range must be positive or "none", got {self.embedding_range}',
        )
        _require(
            self.sliding_window is None or self.sliding_window >= 1,
            f'model.sliding_window must be at least 1 or "none", got {self.sliding_window}',
        )
        if self.rope_scaling is not None:
            _check_rope_scaling(self.rope_scaling)
            kind = self.rope_scaling["rope_type"]
            _require(
                kind not in ("ntk", "dynamic") or self.head_dim > 2,
                f"model.rope_scaling.rope_type {kind!r} needs model.head_dim above 2, got {self.head_dim}",
            )
            _require(
                kind != "yarn" or self.rope_theta > 1,
                f"model.rope_scaling.rope_type 'yarn' needs model.rope_theta above 1, got {self.rope_theta}",
            )

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank is not None

    @property
    def expert_layers(self) -> range:
        """The layers whose feed-forward is a mixture of experts."""
        return range(
            self.first_k_dense_replace if self.n_routed_experts else self.num_hidden_layers, self.num_hidden_layers
        )


def _check_latent_attention(config: ModelConfig) -> None:
    widths = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if not config.is_latent:
        for name in ("q_lora_rank", *widths, "rope_interleave"):
            value = getattr(config, name)
            _require(
                not value,
                f"model.{name} is {value} and belongs to latent attention; set model.kv_lora_rank, or leave it out",
            )
        return
    for name in ("kv_lora_rank", *widths):
        value = getattr(config, name)
        _require(value >= 1, f"model.{name} must be at least 1 where model.kv_lora_rank is set, got {value}")
    _require(
        config.q_lora_rank is None or config.q_lora_rank >= 1,
        f'model.q_lora_rank must be at least 1 or "none", got {config.q_lora_rank}',
    )
    _require(
        config.qk_rope_head_dim % 2 == 0,
        f"model.qk_rope_head_dim must be even for rotary embeddings, got {config.qk_rope_head_dim}",
    )
    _require(
        config.num_key_value_heads == config.num_attention_heads,
        f"model.num_key_value_heads is {config.num_key_value_heads}; latent attention makes keys and values for each of the "
        f"{config.num_attention_heads} query heads, leave it out or set it to 0",
    )
    _require(
        config.head_dim in (0, config.qk_rope_head_dim),
        f"model.head_dim is {config.head_dim}; with latent attention it is model.qk_rope_head_dim ({config.qk_rope_head_dim}), "
        "leave it out or set it to 0",
    )
    object.__setattr__(config, "head_dim", config.qk_rope_head_dim)


def _check_experts(config: ModelConfig) -> None:
    names = (
        "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    )  # fmt: skip
    for name in names:
        _require(getattr(config, name) >= 0, f"model.{name} must not be negative, got {getattr(config, name)}")
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    if not experts:
        defaults = {f.name: f.default for f in fields(ModelConfig)}
        also = (
            "scoring_func", "topk_method", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
            "router_aux_loss_coef", "router_bias_update_speed",
        )  # fmt: skip
        for name in (*names[1:], *also):
            value = getattr(config, name)
            _require(
                value == defaults[name],
                f"model.{name} is {value!r} and belongs to a mixture of experts; set model.n_routed_experts, or leave it out",
            )
        return
    _require(
        1 <= chosen <= experts,
        f"model.num_experts_per_tok must be between 1 and model.n_routed_experts ({experts}), got {chosen}",
    )
    _require(
        config.moe_intermediate_size >= 1,
        "model.moe_intermediate_size must be at least 1 where there are experts, got 0",
    )
    _require(
        config.first_k_dense_replace <= config.num_hidden_layers,
        f"model.first_k_dense_replace {config.first_k_dense_replace} is more than model.num_hidden_layers "
        f"({config.num_hidden_layers})",
    )
    _require(not config.mlp_bias, "model.mlp_bias is true; a mixture of experts has no biases, leave it out")
    _check_routing(config)


def _check_routing(config: ModelConfig) -> None:
    experts, groups, allowed = config.n_routed_experts, config.n_group, config.topk_group
    known = {"scoring_func": ("softmax", "sigmoid"), "topk_method": ("greedy", "group_limited_greedy", "noaux_tc")}
    for name, choices in known.items():  # a value that nobody built from a table would otherwise mean another one
        value = getattr(config, name)
        _require(value in choices, f"model.{name} must be one of {', '.join(choices)}; got {value!r}")
    _require(
        groups >= 1 and experts % groups == 0,
        f"model.n_routed_experts {experts} is not divisible by model.n_group {groups}",
    )
    _require(1 <= allowed <= groups, f"model.topk_group must be between 1 and model.n_group ({groups}), got {allowed}")
    _require(
        config.topk_method != "greedy" or groups == 1,
        f'model.n_group is {groups} and model.topk_method "greedy" knows no groups; choose "group_limited_greedy" or "noaux_tc"',
    )
    _require(
        config.num_experts_per_tok <= allowed * (experts // groups),
        f"model.num_experts_per_tok {config.num_experts_per_tok} is more than the experts of model.topk_group {allowed} groups "
        f"of {experts // groups}",
    )
    _require(
        config.topk_method != "noaux_tc" or allowed == groups or experts // groups >= 2,
        f'model.n_group is {groups} for {experts} experts, and model.topk_method "noaux_tc" compares groups by their two best '
        'experts; lower model.n_group, or choose "group_limited_greedy"',
    )
    for name in ("routed_scaling_factor", "router_aux_loss_coef", "router_bias_update_speed"):
        value = getattr(config, name)
        _require(0 <= value < math.inf, f"model.{name} must be finite and not negative, got {value}")
    _require(config.routed_scaling_factor > 0, "model.routed_scaling_factor must be positive, got 0.0")
    _require(
        config.router_bias_update_speed == 0 or config.topk_method == "noaux_tc",
        f'model.router_bias_update_speed needs the bias of model.topk_method "noaux_tc", which is {config.topk_method!r}',
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Train low-rank adapters of a model that train.init names, and leave its own weights as they are (docs/lora.md)."""

    r: int = 8
    """Rank: rows of A and columns of B."""
    alpha: float = 16.0
    """The adapter is scaled by alpha / r."""
    dropout: float = 0.0
    """Probability of dropping elements of an adapter's input in training."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers that get an adapter, by the end of their names, such as "q_proj"; "all-linear": all but the head."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead."""

    def __post_init__(self) -> None:
        _require(self.r >= 1, f"lora.r must be at least 1, got {self.r}")
        _require(0 < self.alpha < math.inf, f"lora.alpha must be positive and finite, got {self.alpha}")
        _require(0 <= self.dropout < 1, f"lora.dropout must be in [0, 1), got {self.dropout}")
        _require(bool(self.targets), 'lora.targets is empty; name linear layers, such as ["q_proj", "v_proj"]')


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is trained on."""

    path: str = ""
    """A folder made by `pellucid prepare`."""
    context: int = 0
    """Tokens a sequence; 0: model.max_position_embeddings."""
    stride: int = 0
    """Tokens from the start of one training window to the next; 0: the context, so that windows do not overlap."""
    truncate: Literal["left", "right", "refuse"] = "right"
    """Which side of a record longer than the context is cut; "refuse" stops. What then has nothing to learn is left out."""

    def __post_init__(self) -> None:
        _require(self.context >= 0, f"data.context must not be negative, got {self.context}")
        _require(self.stride >= 0, f"data.stride must not be negative, got {self.stride}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyConfig:
    """The training objective, a registered strategy; its own options stand beside its name."""

    name: str = "pretrain"
    """Objective, by its registered name."""
    options: Any = field(default=None, metadata={"kind": "strategy"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate over time, a registered schedule; its own options stand beside its name."""

    name: str = "cosine"
    """Shape after warm-up: constant, linear, cosine, sgdr or wsd."""
    options: Any = field(default=None, metadata={"kind": "schedule"})


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimizer, a registered one; its own options stand beside its name."""

    name: str = "adamw"
    """Optimizer, by its registered name."""
    lr: float = 3e-4
    """Peak learning rate, reached after ``warmup_steps``."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly to ``lr``."""
    min_lr_ratio: float = 0.0
    """The floor of the schedule, as a share of ``lr``."""
    max_grad_norm: float | None = 1.0
    """Clip to this global L2 norm; "none" leaves gradients alone."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    options: Any = field(default=None, metadata={"kind": "optimizer"})

    def __post_init__(self) -> None:
        _require(self.lr > 0 and math.isfinite(self.lr), f"optim.lr must be positive, got {self.lr}")
        _require(self.warmup_steps >= 0, f"optim.warmup_steps must not be negative, got {self.warmup_steps}")
        _require(0 <= self.min_lr_ratio <= 1, f"optim.min_lr_ratio must be in [0, 1], got {self.min_lr_ratio}")
        _require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f'optim.max_grad_norm must be positive or "none", got {self.max_grad_norm}',
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Who holds which part of weights, gradients and optimizer state."""

    mode: str = "none"
    """Parallel mode, by its registered name; what only one mode has is set in a table of its own, [parallel.MODE]."""
    bucket_size_mb: float = 25.0
    """MiB of gradients that travel together; a bucket closes when it reaches this, the first one at 1."""
    reduction: Literal["sum", "ordered"] = "sum"
    """How gradients are added: "sum" as they come; "ordered" in one binary tree over the micro-batches of the step, for the
    same bits on 1, 2, 4, 8, ... ranks in modes none, ddp and zero1 on CPU (docs/reproducibility.md)."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What carries the collectives; "auto": nccl on cuda, else gloo."""
    start_method: Literal["spawn", "fork", "forkserver"] = "spawn"
    """How --nproc starts the ranks."""
    timeout_s: float = 1800.0
    """Seconds after which a collective that a rank never joined is an error."""
    ledger: bool = True
    """Record every collective in RUN/ledger."""
    check: bool = False
    """Compare what ranks are about to do before each collective; otherwise in the first 3 steps only."""
    emulate: str = ""
    """Slow each collective down to a link such as "1Gbit/s,0.2ms" (bandwidth, latency); "": as fast as it is."""
    modes: dict[str, Any] = field(default_factory=dict, metadata={"kind": "mode", "tables": "beside"})
    """Options of single modes, by mode: a table [parallel.MODE] each."""

    def __post_init__(self) -> None:
        for name in ("bucket_size_mb", "timeout_s"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"parallel.{name} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The loop."""

    out: str = ""
    """The run's folder (--out); "" writes nothing."""
    init: str = ""
    """Start from the weights of this model, checkpoint or run (--init); "" draws them."""
    steps: int | None = None
    """Optimizer steps of the whole run; give this or ``epochs``."""
    epochs: int | None = None
    """Passes over the training windows; the number of steps follows and is printed."""
    global_batch: int = 16
    """Sequences an optimizer step."""
    micro_batch: int = 16
    """Sequences a forward; global_batch / micro_batch of them are accumulated."""
    seed: int = 0
    """Seeds initial weights, order of the data and dropout, each with a generator of its own."""
    dtype: Dtype = "auto"
    """Of the matrix products; weights stay float32. "auto": bfloat16 where this device is fast at it, else float32."""
    device: str = "auto"
    """cpu, cuda, mps, cuda:1, ...; "auto": cuda where there is one, else cpu."""
    compile: bool = False
    """Compile model and loss with torch.compile; needs a C++ compiler on CPU."""
    activation_checkpointing: bool = False
    """Recompute each block in backward instead of keeping its activations."""
    save_every: int = 1000
    """Optimizer steps between checkpoints; 0: only the last."""
    keep_last: int = 2
    """Checkpoints kept, newest first; 0: all."""
    keep_every: int = 0
    """Also keep checkpoints at multiples of this step; 0: none."""
    async_save: bool = True
    """Write checkpoints from a copy in the background."""
    val_every: int = 500
    """Optimizer steps between validations; 0: never."""
    log_every: int = 1
    """Optimizer steps between lines of metrics.jsonl."""
    hash_every: int = 0
    """Optimizer steps between lines of metrics.jsonl with a hash of all weights; 0: none."""
    max_seconds: float | None = None
    """Stop and save after this many seconds."""
    ema_decay: float | None = None
    """Keep a moving average of the weights with this decay a step, saved as RUN/model_ema; "none": no average."""
    sample_every: int = 0
    """Optimizer steps between completions of the first validation prompts, for the report; 0: none."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "log_every"):
            _require(getattr(self, name) >= 1, f"train.{name} must be at least 1, got {getattr(self, name)}")
        counts = ("steps", "epochs", "save_every", "keep_last", "keep_every", "val_every", "hash_every", "seed")
        for name in (*counts, "sample_every"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"train.{name} must not be negative, got {value}")
        _require(
            self.steps is None or self.epochs is None,
            f"train.steps ({self.steps}) and train.epochs ({self.epochs}) are both set; give one of them",
        )
        _require(
            self.global_batch % self.micro_batch == 0,
            f"train.global_batch {self.global_batch} is not a multiple of train.micro_batch {self.micro_batch}",
        )
        _require(
            self.max_seconds is None or self.max_seconds > 0,
            f"train.max_seconds must be positive, got {self.max_seconds}",
        )
        _require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f'train.ema_decay must be between 0 and 1, or "none", got {self.ema_decay}',
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run."""

    config_version: int = CONFIG_VERSION
    """Version of this file's format."""
    plugins: tuple[str, ...] = ()
    """Modules to import first; they register strategies, schedules, callbacks, ... of your own."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig | None = None
    """A table [lora] trains an adapter instead of the whole model."""
    callbacks: dict[str, Any] = field(default_factory=dict, metadata={"kind": "callback", "tables": "below"})
    """Registered callbacks to run, each a table of its options: [callbacks.early_stopping] patience = 3."""

    def __post_init__(self) -> None:
        _require(self.config_version >= 1, f"config_version must be at least 1, got {self.config_version}")
        _require(
            self.config_version <= CONFIG_VERSION,
            f"config_version is {self.config_version}, this pellucid reads up to {CONFIG_VERSION}; upgrade pellucid",
        )


ConfigT = TypeVar("ConfigT")


def load_config(
    path: str | Path | None, overrides: dict[str, Any] | None = None, *, base_model: ModelConfig | None = None
) -> RunConfig:
    """The run configuration in a TOML file, changed by dotted overrides.

    Args:
        path: a TOML file; None starts from the defaults.
        overrides: ``{"train.steps": 10}``; a string is taken as it is where the key wants a string, elsewhere as the
            TOML value that it spells.
        base_model: where the ``model`` keys that are not written come from, instead of the defaults.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown (the nearest is named), a value is of the
            wrong type or out of range.
    """
    table = read_toml(Path(path)) if path is not None else {}
    for key, value in (overrides or {}).items():
        _assign(table, key, _FlagText(value) if isinstance(value, str) else value)
    if base_model is not None:
        table["model"] = to_table(base_model) | _with_preset(table.get("model", {}))
    return run_config(table)


def run_config(table: dict[str, Any]) -> RunConfig:
    """A nested table, as TOML gives it, checked and built; loads ``plugins`` first."""
    version = _plain(table.get("config_version", CONFIG_VERSION))
    if isinstance(version, int) and version > CONFIG_VERSION:
        RunConfig(config_version=version)  # raises before unknown keys of a newer format do
    plugins = _plain(table.get("plugins", ()))
    if isinstance(plugins, (list, tuple)) and all(isinstance(p, str) for p in plugins):
        load_plugins(tuple(plugins))
    if isinstance(table.get("model"), dict):
        table = table | {"model": _with_preset(table["model"])}
    return build(RunConfig, table)


def build(cls: type[ConfigT], table: dict[str, Any], path: str = "") -> ConfigT:
    """``table`` as the dataclass ``cls``; ``path`` is the dotted prefix that errors name."""
    assert is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    by_name = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in table.items():
        declared = by_name.get(key)
        if declared is None or declared.name == "options" or declared.metadata.get("tables") == "beside":
            extra[key] = value
        elif declared.metadata.get("tables") == "below":
            values[key] = _named_tables(declared.metadata["kind"], value, path + key + ".")
        else:
            values[key] = _convert(hints[key], value, path + key)
    for f in fields(cls):
        if f.name not in table and is_dataclass(hints[f.name]):  # its options get their defaults too
            values[f.name] = build(hints[f.name], {}, f"{path}{f.name}.")
    options = by_name.get("options")
    if options is not None and options.metadata.get("kind"):
        kind = options.metadata["kind"]
        entry = lookup(kind, values.get("name", by_name["name"].default))
        own = [f.name for f in fields(entry.config)]
        for key in extra:
            if key not in own:
                known = [name for name in by_name if name != "options"] + own
                raise ConfigError(f"unknown key {path}{key}{_suggest(path, key, known, f' of {kind} {entry.name!r}')}")
        values["options"] = build(entry.config, extra, path)
        extra = {}
    for f in fields(cls):
        if f.metadata.get("tables") == "beside":  # [parallel.zero1] beside parallel.mode
            tables = {key: extra.pop(key) for key in list(extra) if key in names(f.metadata["kind"])}
            values[f.name] = _named_tables(f.metadata["kind"], tables, path)
            by_name.pop(f.name)
            by_name |= dict.fromkeys(names(f.metadata["kind"]), f)
    if extra:
        key = next(iter(extra))
        known = list(by_name) + (["preset"] if cls is ModelConfig else [])
        raise ConfigError(f"unknown key {path}{key}{_suggest(path, key, known)}")
    for f in fields(cls):
        if f.init and f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{path}{f.name} has no default; give it a value")
    return cls(**values)


def options_of(kind: str, name: str, options: Any) -> Any:
    """The options of a registered entry: those given, checked for their type, or the entry's defaults."""
    config = lookup(kind, name).config
    if options is None:
        return build(config, {})
    if not isinstance(options, config):
        raise ConfigError(f"options of {kind} {name!r} must be {config.__name__}, got {type(options).__name__}")
    return options


def to_table(config: Any) -> dict[str, Any]:
    """A config dataclass as the nested table that `build` reads back equal."""
    table: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name == "options":
            table |= to_table(value) if value is not None else {}
        elif is_dataclass(value):
            table[f.name] = to_table(value)
        elif f.metadata.get("tables"):
            tables = {name: to_table(options) for name, options in value.items()}
            table |= tables if f.metadata["tables"] == "beside" else {f.name: tables}
        elif isinstance(value, tuple):
            table[f.name] = list(value)
        else:
            table[f.name] = value
    return table


def flat_table(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flat_table(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def to_toml(config: Any, *, docs: bool = False) -> str:
    """A config as TOML text that `load_config` reads back equal; with ``docs`` each key's docstring above it."""
    lines: list[str] = []
    _write_table(config, (), lines, docs)
    return "\n".join(lines).strip() + "\n"


# -- reading ------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a table; ConfigError where it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def _with_preset(model: dict[str, Any]) -> dict[str, Any]:
    if "preset" not in model:
        return model
    preset = model["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"model.preset is {preset!r}{nearest(str(preset), list(PRESETS))}; known: {known}")
    return PRESETS[preset] | {key: value for key, value in model.items() if key != "preset"}


def _assign(table: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for i, key in enumerate(parents):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{dotted}: {'.'.join(parents[: i + 1])} is a value, not a table")
    table[last] = value


class _FlagText(str):
    """The text of a command line flag: only the key's type says whether 2024 is a number or a folder's name."""


def _plain(value: Any) -> Any:
    """A flag's text as the TOML value that it spells, if it spells one; anything else as it is."""
    if not isinstance(value, _FlagText):
        return value
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return str(value)
    return read["value"] if len(read) == 1 else str(value)


def _named_tables(kind: str, value: Any, path: str) -> dict[str, Any]:
    value = _plain(value)
    if isinstance(value, dict):
        value = {name: _plain(options) for name, options in value.items()}
    if not isinstance(value, dict) or not all(isinstance(options, dict) for options in value.values()):
        raise ConfigError(f"{path.rstrip('.')} must be a table of tables, one for each {kind}, got {value!r}")
    return {name: build(lookup(kind, name).config, options, f"{path}{name}.") for name, options in value.items()}


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, _FlagText):
        text = (
            hint is str
            or (origin is Literal and value in args)
            or (origin in (types.UnionType, typing.Union) and str in args)
        )
        value = str(value) if text else _plain(value)
        if isinstance(value, str) and origin in (tuple, list) and args[0] is str:
            value = [part.strip() for part in value.split(",")]  # --lora.targets q_proj,v_proj
    if hint is Any:
        return value
    if is_dataclass(hint):
        if isinstance(value, str) and "name" in {f.name for f in fields(hint)}:
            value = {"name": value}  # optim.schedule = "cosine"
        if not isinstance(value, dict):
            raise ConfigError(f"{path} must be a table, got {value!r}")
        return build(hint, value, path + ".")  # type: ignore[arg-type]
    if origin in (types.UnionType, typing.Union):
        if (value is None or value == "none") and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _convert(inner, value, path)
    if origin is Literal:
        if value not in args:
            known = [str(arg) for arg in args]
            close = nearest(str(value), known)
            raise ConfigError(f"{path} must be one of {', '.join(known)}; got {value!r}{close}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} must be a list, got {value!r}")
        inner_hints = [args[0]] * len(value) if origin is list or args[-1] is Ellipsis else list(args)
        if len(inner_hints) != len(value):
            raise ConfigError(f"{path} must have {len(inner_hints)} values, got {value!r}")
        return origin(_convert(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(zip(inner_hints, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{path} must be a table, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint in (int, float) and isinstance(value, bool)):
        names_of = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{path} must be {names_of.get(hint, hint.__name__)}, got {value!r}")
    return value


def _suggest(path: str, key: str, known: list[str], owner: str = "") -> str:
    close = nearest(key, known)
    return close.replace("did you mean ", f"did you mean {path}") or f"; known keys{owner}: {', '.join(known)}"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "ntk": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_ROPE_OPTIONAL = {
    "yarn": {
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    },
}  # fmt: skip


def _check_rope_scaling(scaling: dict[str, Any]) -> None:
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        known = list(_ROPE_KEYS)
        close = nearest(str(kind), known)
        raise ConfigError(f"model.rope_scaling.rope_type is {kind!r}{close}; known: {', '.join(known)}")
    keys = set(scaling) - {"rope_type"}
    if missing := _ROPE_KEYS[kind] - keys:
        raise ConfigError(f"model.rope_scaling lacks {', '.join(sorted(missing))} for rope_type {kind!r}")
    if unknown := keys - _ROPE_KEYS[kind] - _ROPE_OPTIONAL.get(kind, set()):
        raise ConfigError(f"model.rope_scaling.{min(unknown)} is not known to rope_type {kind!r}")
    for key in sorted(keys - {"truncate"}):
        value, least = scaling[key], 1 if key in ("factor", "original_max_position_embeddings") else 0
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < math.inf:
            raise ConfigError(f"model.rope_scaling.{key} must be a number of at least {least}, got {value!r}")
    if not isinstance(scaling.get("truncate", True), bool):
        raise ConfigError(f"model.rope_scaling.truncate must be true or false, got {scaling['truncate']!r}")
    if kind == "llama3" and not 0 < scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ConfigError(
            f"model.rope_scaling.low_freq_factor {scaling['low_freq_factor']} must be positive and below "
            f"high_freq_factor {scaling['high_freq_factor']}"
        )


# -- writing ------------------------------------------------------------------------------------------------


def _write_table(config: Any, path: tuple[str, ...], lines: list[str], docs: bool) -> None:
    tables: list[tuple[tuple[str, ...], Any]] = []
    commented: list[tuple[str, tuple[str, ...]]] = []
    absences: list[tuple[str, type]] = []
    header = ".".join(part if re.fullmatch(r"[\w-]+", part, re.ASCII) else json.dumps(part) for part in path)
    if path:
        if docs and (config.__doc__ or "").strip():
            lines += ["", *(f"# {line.strip()}" for line in inspect.cleandoc(config.__doc__).splitlines())]
            lines.append(f"[{header}]")
        else:
            lines += ["", f"[{header}]"]
    if docs and isinstance(config, ModelConfig):
        lines += [f"# One of {', '.join(PRESETS)}: fills in the sizes that are not written here.", '# preset = "small"']
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name == "options":
            kind = f.metadata["kind"]
            options = options_of(kind, config.name, value)
            if docs:
                lines.append(f"# {kind}: one of {', '.join(names(kind))}. Options of {config.name!r}:")
            _write_keys(options, [x.name for x in fields(options)], lines, docs)
            if docs:
                _describe_others(kind, config.name, lines)
        elif f.metadata.get("tables"):
            under = () if f.metadata["tables"] == "beside" else (f.name,)
            tables += [((*under, inner), table) for inner, table in value.items()]
            if docs:
                commented += [
                    (f.metadata["kind"], (*path, *under, name))
                    for name in names(f.metadata["kind"])
                    if name not in value
                ]
        elif is_dataclass(value):
            tables.append(((f.name,), value))
        elif (absent := _optional_table(type(config), f.name)) is not None:
            if docs:
                absences.append((f.name, absent))
        else:
            _write_keys(config, [f.name], lines, docs)
    for kind, header_path in commented:
        if fields(lookup(kind, header_path[-1]).config):
            lines += ["", f"# [{'.'.join(header_path)}]"]
            _describe(kind, header_path[-1], lines)
    for name, table in absences:
        note = field_docs(type(config)).get(name, "")
        about = inspect.cleandoc(table.__doc__ or "")
        lines += ["", *(f"# {line}" for line in f"{note}\n{about}".strip().splitlines())]
        lines.append(f"# [{'.'.join((*path, name))}]")
        _describe_keys(table, lines)
    for name_path, value in tables:
        _write_table(value, (*path, *name_path), lines, docs)


def _optional_table(config: type, key: str) -> type | None:
    """The dataclass of a table that need not be there; None for any other key."""
    inner = typing.get_args(typing.get_type_hints(config)[key])
    tables = [arg for arg in inner if is_dataclass(arg) and isinstance(arg, type)]
    return tables[0] if tables and type(None) in inner else None


def _describe_others(kind: str, chosen: str, lines: list[str]) -> None:
    """The options of the entries that are not in use, as comments."""
    for name in names(kind):
        if name != chosen and fields(lookup(kind, name).config):
            lines.append(f"# Options of {name!r} instead:")
            _describe(kind, name, lines)


def _describe(kind: str, name: str, lines: list[str]) -> None:
    _describe_keys(lookup(kind, name).config, lines)


def _describe_keys(config: type, lines: list[str]) -> None:
    notes = field_docs(config)
    for f in fields(config):
        lines += [f"# {line}" for line in notes.get(f.name, "").splitlines()]
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        lines.append(f"# {f.name} = {'... (no default)' if default is MISSING else _toml(default)}")


def _write_keys(config: Any, keys: list[str], lines: list[str], docs: bool) -> None:
    notes = field_docs(type(config)) if docs else {}
    for key in keys:
        if note := notes.get(key):
            lines += [f"# {line}" for line in note.splitlines()]
        lines.append(f"{key} = {_toml(getattr(config, key))}")


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows DEL, TOML does not
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {_toml(v)}' for k, v in value.items())} }}"
    return str(value)


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, which Python itself does not keep."""
    try:
        tree = ast.parse(inspect.cleandoc(inspect.getsource(cls)))
    except (OSError, SyntaxError):
        return {}
    body = tree.body[0].body  # type: ignore[attr-defined]
    return {
        node.target.id: inspect.cleandoc(doc.value.value)
        for node, doc in pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
