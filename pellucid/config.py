"""Every setting of a training run that a person can write: frozen dataclasses, read from TOML and dotted flags.

The parts stand beside this module and are names of it as well: `model_config` has the shape of a model, `config_tables`
how a table becomes a dataclass, `config_text` how TOML is read and written.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pellucid.config_tables import assign, build, flat_table, options_of, plain, to_table
from pellucid.config_text import field_docs, read_toml, to_toml
from pellucid.errors import require
from pellucid.model_config import PRESETS, ModelConfig, with_preset
from pellucid.registry import load_plugins

__all__ = [
    "CONFIG_VERSION", "PRESETS", "DataConfig", "Dtype", "LoraConfig", "ModelConfig", "OptimConfig", "ParallelConfig",
    "RunConfig", "ScheduleConfig", "StrategyConfig", "TrainConfig", "build", "field_docs", "flat_table", "load_config",
    "options_of", "read_toml", "run_config", "to_table", "to_toml",
]  # fmt: skip

CONFIG_VERSION = 1

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


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
        require(self.r >= 1, f"lora.r must be at least 1, got {self.r}")
        require(0 < self.alpha < math.inf, f"lora.alpha must be positive and finite, got {self.alpha}")
        require(0 <= self.dropout < 1, f"lora.dropout must be in [0, 1), got {self.dropout}")
        require(bool(self.targets), 'lora.targets is empty; name linear layers, such as ["q_proj", "v_proj"]')


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
        for name in ("context", "stride"):
            value = getattr(self, name)
            require(0 <= value < 2**31, f"data.{name} must not be negative, and less than 2**31, got {value}")


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
        require(self.lr > 0 and math.isfinite(self.lr), f"optim.lr must be positive, got {self.lr}")
        require(self.warmup_steps >= 0, f"optim.warmup_steps must not be negative, got {self.warmup_steps}")
        require(0 <= self.min_lr_ratio <= 1, f"optim.min_lr_ratio must be in [0, 1], got {self.min_lr_ratio}")
        require(
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
            require(0 < value < math.inf, f"parallel.{name} must be positive, got {value}")


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
            value = getattr(self, name)
            require(1 <= value < 2**31, f"train.{name} must be at least 1, and less than 2**31, got {value}")
        counts = ("steps", "epochs", "save_every", "keep_last", "keep_every", "val_every", "hash_every", "seed")
        for name in (*counts, "sample_every"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"train.{name} must not be negative, got {value}")
        # the order of the data takes it modulo that: two seeds would have one order
        require(self.seed < 2**32, f"train.seed must be less than 2**32, got {self.seed}")
        require(
            self.steps is None or self.epochs is None,
            f"train.steps ({self.steps}) and train.epochs ({self.epochs}) are both set; give one of them",
        )
        require(
            self.global_batch % self.micro_batch == 0,
            f"train.global_batch {self.global_batch} is not a multiple of train.micro_batch {self.micro_batch}",
        )
        require(
            self.max_seconds is None or self.max_seconds > 0,
            f"train.max_seconds must be positive, got {self.max_seconds}",
        )
        require(
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
        require(self.config_version >= 1, f"config_version must be at least 1, got {self.config_version}")
        require(
            self.config_version <= CONFIG_VERSION,
            f"config_version is {self.config_version}, this pellucid reads up to {CONFIG_VERSION}; upgrade pellucid",
        )


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
        assign(table, key, value)
    if base_model is not None:
        table["model"] = to_table(base_model) | with_preset(table.get("model", {}))
    return run_config(table)


def run_config(table: dict[str, Any]) -> RunConfig:
    """A nested table, as TOML gives it, checked and built; loads ``plugins`` first."""
    version = plain(table.get("config_version", CONFIG_VERSION))
    if isinstance(version, int) and version > CONFIG_VERSION:
        RunConfig(config_version=version)  # raises before unknown keys of a newer format do
    plugins = plain(table.get("plugins", ()))
    if isinstance(plugins, (list, tuple)) and all(isinstance(p, str) for p in plugins):
        load_plugins(tuple(plugins))
    if isinstance(table.get("model"), dict):
        table = table | {"model": with_preset(table["model"])}
    return build(RunConfig, table)
