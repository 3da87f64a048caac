"""From a configuration to the objects of a run, with every check that can be made before the first step."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pellucid.checkpoint.model_folder import find_model, load_model, read_config
from pellucid.config import ModelConfig, RunConfig, load_config, options_of, to_table
from pellucid.data.batches import Loader, Samples, Windows
from pellucid.data.index import read_index
from pellucid.data.record_files import RecordData
from pellucid.data.records import open_records
from pellucid.data.shards import TokenData
from pellucid.errors import ConfigError, DataError
from pellucid.model import Transformer
from pellucid.model.lora import add_lora, lora_of
from pellucid.model.quantize import refuse_quantized
from pellucid.optim import MuonOptions, build_schedule
from pellucid.optim.schedules import Schedule
from pellucid.parallel import Executor, comm, create_executor
from pellucid.parallel.check import CollectiveCheck
from pellucid.parallel.executor import LossScaler
from pellucid.parallel.layout import ParameterInfo, parameter_infos
from pellucid.parallel.ledger import CommLedger
from pellucid.parallel.link import Link
from pellucid.parallel.plan import ModePlan, plan
from pellucid.parallel.world import World, store
from pellucid.registry import lookup
from pellucid.tokenizer import Tokenizer
from pellucid.train.callbacks import Callback
from pellucid.train.ema import WeightAverage
from pellucid.train.memory import refuse_unbuildable
from pellucid.train.precision import DTYPES, resolve_dtype
from pellucid.train.ranks import of_first_rank, on_first_rank
from pellucid.train.run_folder import CONFIG
from pellucid.train.state import seed_everything
from pellucid.train.strategies import PlansRollouts, Strategy, metrics_of, reads_of, unit_of

VERIFIED_BYTES = 2 * 2**30
"""Data up to this size is checked against its hashes before the first step, about a second a GiB; `inspect` checks any."""


@dataclass(slots=True)
class Setup:
    """Everything that a run is made of."""

    config: RunConfig
    """Resolved: vocabulary, dtype and number of steps are known."""
    model: Transformer
    wrapped: nn.Module
    """What the loop calls; the model itself in mode none."""
    optimizer: torch.optim.Optimizer
    executor: Executor
    schedule: Schedule
    strategy: Strategy
    loader: Loader[Any]
    val_data: Samples[Any] | None
    tokenizer: Tokenizer | None
    data: TokenData | RecordData | None
    callbacks: list[Callback]
    device: torch.device
    dtype: torch.dtype
    total_steps: int
    ema: WeightAverage | None
    notes: list[str]
    """On the data, for whoever starts the run: what was cut or left out."""


def prepare(
    config: RunConfig,
    model: Transformer | None = None,
    strategy: Strategy | None = None,
    callbacks: Sequence[Callback] = (),
    train_data: Samples[Any] | None = None,
    val_data: Samples[Any] | None = None,
) -> Setup:
    """Build and check a run; arguments as `Trainer` has them."""
    device = World.current(config.train.device).device
    _watch_collectives(config)
    config = _resolve_dtype(config, device)
    if config.train.compile and device.type == "cpu":
        _require_compiler()
    strategy = strategy or build_strategy(config)
    metrics_of(strategy)  # refuses names that the log has
    data = _open_data(config, strategy) if train_data is None else None
    tokenizer = data.tokenizer() if data is not None else None
    model, config = _build_model(config, model, data)
    if config.train.compile and config.model.attend == "canonical":
        raise ConfigError(
            'model.attend "canonical" promises bits that a compiler does not keep; leave train.compile off, or set '
            'model.attend to "sdpa"'
        )
    if data is not None:
        train_data, val_data = _samples(config, data, val_data)
    assert train_data is not None
    _check_sampling(config, tokenizer, val_data)
    loader = Loader(
        train_data,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        seed=config.train.seed,
        rank=comm.rank(),
        world_size=comm.world_size(),
        repeats=getattr(strategy, "updates", 1),
    )
    total_steps = _total_steps(config, loader)
    seed_everything(config.train.seed, rank=comm.rank())
    model.to(device)
    model.activation_checkpointing = config.train.activation_checkpointing
    entry = lookup("optimizer", config.optim.name)
    options = options_of("optimizer", config.optim.name, config.optim.options)
    optimizer: torch.optim.Optimizer = entry.target(model, config.optim.lr, options)
    if config.parallel.reduction == "ordered":
        _refuse_order(config, device)
    executor = _executor(config)
    dtype = resolve_dtype(config.train.dtype, device)
    if dtype == torch.float16:
        executor.scaler = LossScaler()
    wrapped, *_ = executor.prepare(model, optimizer)
    decay = config.train.ema_decay
    return Setup(
        config=config,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        executor=executor,
        schedule=build_schedule(config.optim, total_steps),
        strategy=strategy,
        loader=loader,
        val_data=val_data,
        tokenizer=tokenizer,
        data=data,
        callbacks=_callbacks(config) + list(callbacks),
        device=device,
        dtype=dtype,
        total_steps=total_steps,
        ema=WeightAverage(executor, decay) if decay is not None else None,
        notes=[note for samples in (train_data, val_data) for note in getattr(samples, "notes", ())],
    )


def build_strategy(config: RunConfig) -> Strategy:
    """The registered strategy that a configuration names."""
    options = options_of("strategy", config.strategy.name, config.strategy.options)
    strategy: Strategy = lookup("strategy", config.strategy.name).target(options)
    return strategy


def context_of(config: RunConfig) -> int:
    """Tokens a training sequence."""
    return config.data.context or config.model.max_position_embeddings


def _resolve_dtype(config: RunConfig, device: torch.device) -> RunConfig:
    """Settle "auto", so that a resumed run computes as it began: a run's own choice stands."""
    name: str = config.train.dtype
    own = Path(config.train.out) / CONFIG
    if name == "auto" and config.train.out and own.is_file():
        name = load_config(own).train.dtype
    name = str(resolve_dtype(name, device)).removeprefix("torch.")
    name = of_first_rank(name, tag="init/dtype")  # "auto" is measured, and ranks could measure differently
    options = options_of("optimizer", config.optim.name, config.optim.options)
    if isinstance(options, MuonOptions) and options.newton_schulz_dtype == "auto":
        narrow = name == "bfloat16"
        options = replace(options, newton_schulz_dtype="bfloat16" if narrow else "float32")
        config = replace(config, optim=replace(config.optim, options=options))
    return replace(config, train=replace(config.train, dtype=name))  # type: ignore[arg-type]


def _open_data(config: RunConfig, strategy: Strategy) -> TokenData | RecordData:
    if not config.data.path:
        raise ConfigError("data.path is not set; give a folder made by `pellucid prepare`")
    path, wanted = Path(config.data.path), reads_of(strategy)
    kind = read_index(path).kind
    if wanted not in (None, kind):
        how = "" if wanted == "tokens" else f" --for {wanted}"
        suited = "pretrain" if kind == "tokens" else kind
        raise DataError(
            f"{path} holds {_KINDS[kind]} and strategy.name is {config.strategy.name}, which reads {_KINDS[str(wanted)]}; choose "
            f"--strategy.name {suited}, or prepare the data again with `pellucid prepare INPUT{how} --out DATA`"
        )
    data = TokenData.open(path) if kind == "tokens" else RecordData.open(path)
    size = sum(file.stat().st_size for file in data.folder.glob("*.bin"))
    if size <= VERIFIED_BYTES:
        on_first_rank(data.verify, tag="init/data")
    return data


_KINDS = {
    "tokens": "text (kind tokens)", "sft": "conversations (kind sft)", "dpo": "pairs of answers (kind dpo)",
    "grpo": "prompts with what judges answers (kind grpo)",
}  # fmt: skip

CHECKED_STEPS = 3
"""In the first steps ranks compare each collective before it is issued."""


def _watch_collectives(config: RunConfig) -> None:
    """Record, check and slow down this process's collectives as the configuration says."""
    comm.begin_step(0)
    shared, parallel = store(), config.parallel
    check = CollectiveCheck(shared, comm.rank(), comm.world_size()) if shared is not None else None
    comm.use(
        ledger=CommLedger() if parallel.ledger and comm.world_size() > 1 else None,
        check=check,
        check_until=None if parallel.check else CHECKED_STEPS,
        link=Link.parse(parallel.emulate) if parallel.emulate else None,
    )


def _executor(config: RunConfig) -> Executor:
    parallel, train = config.parallel, config.train
    entry = lookup("mode", parallel.mode)
    options = to_table(parallel.modes[parallel.mode]) if parallel.mode in parallel.modes else {}
    size = next((f.name for f in fields(entry.config) if f.name in ("bucket_size_mb", "bucket_cap_mb")), None)
    if size is not None and options.get(size) is None:
        options[size] = parallel.bucket_size_mb
    micro_batches = max(1, train.global_batch // (train.micro_batch * comm.world_size()))
    return create_executor(parallel.mode, micro_batches, average=False, reduction=parallel.reduction, **options)


def _refuse_order(config: RunConfig, device: torch.device) -> None:
    """`ConfigError` where the same bits on any number of ranks cannot be had; what depends on the mode, its executor refuses."""
    ordered, threads = 'parallel.reduction "ordered"', torch.get_num_threads()
    if device.type != "cpu":
        raise ConfigError(
            f"{ordered} holds on cpu, and train.device is {device}; "
            'set train.device to "cpu", or parallel.reduction to "sum"'
        )
    if threads != 1:
        raise ConfigError(
            f"{ordered} needs one thread a rank, since kernels share work out by it, and this process has {threads}; "
            "set OMP_NUM_THREADS=1 in the environment, for one process too"
        )


def _build_model(
    config: RunConfig, model: Transformer | None, data: TokenData | RecordData | None
) -> tuple[Transformer, RunConfig]:
    """The model to train, in float32, and the configuration with the model's own shape in it."""
    if config.lora is not None and model is None and not config.train.init:
        raise ConfigError("the table [lora] trains an adapter on a model that is there; name it with --init MODEL")
    vocab_size = data.vocab_size if data is not None else config.model.vocab_size
    if model is None and config.train.init:
        model = _initial_model(config, data)
    elif model is None:
        shape = config.model if config.model.vocab_size else replace(config.model, vocab_size=vocab_size)
        refuse_unbuildable(shape)
        generator = torch.Generator().manual_seed(config.train.seed)
        model = Transformer(shape, generator=generator)
    refuse_quantized(model, "to be trained")
    if config.lora is not None:
        add_lora(model, config.lora, generator=torch.Generator().manual_seed(config.train.seed))
    if data is not None and model.config.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size {model.config.vocab_size} is smaller than the vocabulary of {config.data.path} "
            f"({data.vocab_size}); use the tokenizer of this data, or a larger model.vocab_size"
        )
    config = replace(config, model=model.config)
    if context_of(config) > config.model.max_position_embeddings:
        raise ConfigError(
            f"data.context {config.data.context} is longer than model.max_position_embeddings "
            f"{config.model.max_position_embeddings}; shorten it or raise the window"
        )
    return model, config


BALANCING = ("router_aux_loss_coef", "router_bias_update_speed")
"""How a model's experts are balanced in training is the run's own choice; 0 leaves it as the model says."""


def _initial_model(config: RunConfig, data: TokenData | RecordData | None) -> Transformer:
    loaded = load_model(config.train.init, device="cpu", dtype="float32")
    if lora_of(loaded.model) is not None:
        raise ConfigError(
            f"train.init {config.train.init} has an adapter, and a run starts from a model without one; merge it first: "
            f"`pellucid export {config.train.init} --out MODEL`, then --init MODEL"
        )
    if data is not None and loaded.tokenizer is not None and loaded.tokenizer.sha256 != data.tokenizer_sha256:
        raise DataError(
            f"{config.train.init} and {config.data.path} have different tokenizers; "
            f"prepare the data with --tokenizer {config.train.init}"
        )
    theirs_too = {key: value for key in BALANCING if (value := getattr(config.model, key))}
    kept = replace(loaded.config, dropout=config.model.dropout, attend=config.model.attend, **theirs_too)
    if config.model != ModelConfig():
        theirs, ours = (
            to_table(kept),
            to_table(replace(config.model, vocab_size=config.model.vocab_size or kept.vocab_size)),
        )
        for key, value in ours.items():
            if value != theirs[key]:
                raise ConfigError(
                    f"model.{key} is {value!r}, but {config.train.init} has {theirs[key]!r}; "
                    "leave the [model] table out, or start without --init"
                )
    model = Transformer(kept, device="meta")
    model.load_state_dict(loaded.model.state_dict(), assign=True)
    return model


def _samples(
    config: RunConfig, data: TokenData | RecordData, val_data: Samples[Any] | None
) -> tuple[Samples[Any], Samples[Any] | None]:
    """The splits of a folder, as an epoch and a validation visit them."""
    context = context_of(config)
    if isinstance(data, RecordData):
        if config.data.stride:
            raise ConfigError(
                f"data.stride is {config.data.stride} and {config.data.path} holds records, each seen once an epoch; leave it out"
            )
        train, *val = (
            open_records(data, name, context=context, truncate=config.data.truncate)
            for name in ("train", "val")[: 1 + ("val" in data.index.splits and val_data is None)]
        )
        return train, val[0] if val else val_data
    text = data.split("train")
    if text.num_tokens <= context:
        raise DataError(
            f"{config.data.path} has {text.num_tokens:,} training tokens, fewer than one window of {context:,}; "
            "prepare more text or lower data.context"
        )
    if val_data is None and "val" in data.index.splits:
        val_data = Windows(data.split("val"), context, score_once=True)
    return Windows(text, context, config.data.stride), val_data


def _check_sampling(config: RunConfig, tokenizer: Tokenizer | None, val_data: Samples[Any] | None) -> None:
    if not config.train.sample_every:
        return
    lacks = "a tokenizer" if tokenizer is None else "a validation split" if val_data is None else None
    if lacks is not None:
        raise ConfigError(
            f"train.sample_every is {config.train.sample_every} and the data has not got {lacks}; set it to 0, or give data "
            "that has"
        )


def plan_mode(
    config: RunConfig,
    parameters: Sequence[ParameterInfo],
    mode: str,
    *,
    world_size: int,
    micro_batches: int,
    strategy: Strategy | None = None,
) -> ModePlan:
    """`plan` with the options that ``config.parallel`` has for a mode; arguments as there.

    Args:
        strategy: None builds ``config.strategy``.
    """
    strategy = strategy or build_strategy(config)
    options = config.parallel.modes.get(mode)
    size = getattr(options, "bucket_size_mb", None) or getattr(options, "bucket_cap_mb", None)
    reduce_dtype, compute_dtype = (getattr(options, key, None) for key in ("reduce_dtype", "compute_dtype"))
    prompts = micro_batches * config.train.micro_batch
    return plan(
        parameters,
        mode=mode,
        world_size=world_size,
        micro_batches=micro_batches,
        bucket_size_mb=size or config.parallel.bucket_size_mb,
        reduction=config.parallel.reduction,
        reduce_dtype=DTYPES[reduce_dtype] if reduce_dtype else None,
        compute_dtype=DTYPES[compute_dtype] if compute_dtype else None,
        reshard_after_forward=getattr(options, "reshard_after_forward", True),
        expert_layers=len(config.model.expert_layers),
        experts=config.model.n_routed_experts,
        metrics=len(metrics_of(strategy)),
        counts_supervised=unit_of(strategy) != "tokens",
        reference=_planned_reference(config, parameters, strategy),
        averages_weights=config.train.ema_decay is not None,
        rollout=strategy.rollout(config, prompts=prompts) if isinstance(strategy, PlansRollouts) else None,
    )


def _planned_reference(
    config: RunConfig, parameters: Sequence[ParameterInfo], strategy: Strategy
) -> Sequence[ParameterInfo] | Literal["own"] | None:
    """The frozen model that runs in each micro-batch, as `plan` has it."""
    path: str | None = getattr(strategy, "live_reference", None)
    if path is None:
        return None
    if not path:
        return "own" if config.lora is not None else parameters
    return parameter_infos(Transformer(read_config(find_model(path)), device="meta"))


def _total_steps(config: RunConfig, loader: Loader[Any]) -> int:
    if config.train.steps is not None:
        return config.train.steps
    if config.train.epochs is not None:
        return config.train.epochs * loader.steps_per_epoch
    raise ConfigError("set train.steps or train.epochs: how long the run is")


def _callbacks(config: RunConfig) -> list[Callback]:
    return [lookup("callback", name).target(options) for name, options in config.callbacks.items()]


def _require_compiler() -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        raise ConfigError(
            f"train.compile needs a C++ compiler and {compiler} is not on PATH; install g++, set CXX, or leave train.compile off"
        )
