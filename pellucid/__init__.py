"""Train and serve language models, and see every byte that moves.

Public names load on first use, so that `import pellucid` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pellucid.version import __version__

if TYPE_CHECKING:
    from pellucid.checkpoint.encoder_folder import LoadedEncoder, load_encoder, save_encoder
    from pellucid.checkpoint.model_folder import Loaded, load_model, save_model
    from pellucid.config import RunConfig, load_config
    from pellucid.data.batches import Batch, Loader, Windows
    from pellucid.data.shards import TokenData
    from pellucid.errors import CheckpointError, ConfigError, DataError, PellucidError, RankError, RequestError
    from pellucid.inference import AsyncEngine, Engine, Request, SamplingParams
    from pellucid.model import BertEncoder, EmbedConfig, Encoder, Transformer
    from pellucid.model_config import ModelConfig
    from pellucid.parallel import (
        DDP,
        FSDP,
        Executor,
        OptimizerProtocol,
        SchedulerProtocol,
        ShardedOptimizer,
        create_executor,
    )
    from pellucid.parallel.launch import launch
    from pellucid.parallel.world import get_current_device, get_rank, get_world_size, only_on_rank
    from pellucid.registry import register
    from pellucid.text import generate_text
    from pellucid.tokenizer import Tokenizer
    from pellucid.train import Callback, StopTraining, Trainer, TrainState

_HOMES = {
    "AsyncEngine": "pellucid.inference",
    "Batch": "pellucid.data.batches",
    "Callback": "pellucid.train",
    "BertEncoder": "pellucid.model",
    "CheckpointError": "pellucid.errors",
    "ConfigError": "pellucid.errors",
    "DDP": "pellucid.parallel",
    "FSDP": "pellucid.parallel",
    "DataError": "pellucid.errors",
    "EmbedConfig": "pellucid.model",
    "Encoder": "pellucid.model",
    "Engine": "pellucid.inference",
    "Executor": "pellucid.parallel",
    "Loaded": "pellucid.checkpoint.model_folder",
    "LoadedEncoder": "pellucid.checkpoint.encoder_folder",
    "Loader": "pellucid.data.batches",
    "ModelConfig": "pellucid.model_config",
    "OptimizerProtocol": "pellucid.parallel",
    "PellucidError": "pellucid.errors",
    "RankError": "pellucid.errors",
    "Request": "pellucid.inference",
    "RequestError": "pellucid.errors",
    "RunConfig": "pellucid.config",
    "SamplingParams": "pellucid.inference",
    "SchedulerProtocol": "pellucid.parallel",
    "ShardedOptimizer": "pellucid.parallel",
    "StopTraining": "pellucid.train",
    "TokenData": "pellucid.data.shards",
    "Tokenizer": "pellucid.tokenizer",
    "TrainState": "pellucid.train",
    "Trainer": "pellucid.train",
    "Transformer": "pellucid.model",
    "Windows": "pellucid.data.batches",
    "create_executor": "pellucid.parallel",
    "generate_text": "pellucid.text",
    "get_current_device": "pellucid.parallel.world",
    "get_rank": "pellucid.parallel.world",
    "get_world_size": "pellucid.parallel.world",
    "launch": "pellucid.parallel.launch",
    "load_config": "pellucid.config",
    "load_encoder": "pellucid.checkpoint.encoder_folder",
    "load_model": "pellucid.checkpoint.model_folder",
    "only_on_rank": "pellucid.parallel.world",
    "register": "pellucid.registry",
    "save_encoder": "pellucid.checkpoint.encoder_folder",
    "save_model": "pellucid.checkpoint.model_folder",
}

__all__ = [
    "DDP",
    "FSDP",
    "AsyncEngine",
    "Batch",
    "BertEncoder",
    "Callback",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EmbedConfig",
    "Encoder",
    "Engine",
    "Executor",
    "Loaded",
    "LoadedEncoder",
    "Loader",
    "ModelConfig",
    "OptimizerProtocol",
    "PellucidError",
    "RankError",
    "Request",
    "RequestError",
    "RunConfig",
    "SamplingParams",
    "SchedulerProtocol",
    "ShardedOptimizer",
    "StopTraining",
    "TokenData",
    "Tokenizer",
    "TrainState",
    "Trainer",
    "Transformer",
    "Windows",
    "__version__",
    "create_executor",
    "generate_text",
    "get_current_device",
    "get_rank",
    "get_world_size",
    "launch",
    "load_config",
    "load_encoder",
    "load_model",
    "only_on_rank",
    "register",
    "save_encoder",
    "save_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
