"""Train and serve language models, and see every byte that moves.

Public names load on first use, so that `import pellucid` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pellucid.version import __version__

if TYPE_CHECKING:
    from pellucid.checkpoint.model_folder import Loaded, load_model, save_model
    from pellucid.config import ModelConfig, RunConfig, load_config
    from pellucid.data.batches import Batch, Loader, Windows
    from pellucid.data.shards import TokenData
    from pellucid.errors import PellucidError
    from pellucid.inference import SamplingParams
    from pellucid.model import Transformer
    from pellucid.registry import register
    from pellucid.text import generate_text
    from pellucid.tokenizer import Tokenizer
    from pellucid.train import Callback, StopTraining, Trainer, TrainState

_HOMES = {
    "Batch": "pellucid.data.batches",
    "Callback": "pellucid.train",
    "Loaded": "pellucid.checkpoint.model_folder",
    "Loader": "pellucid.data.batches",
    "ModelConfig": "pellucid.config",
    "PellucidError": "pellucid.errors",
    "RunConfig": "pellucid.config",
    "SamplingParams": "pellucid.inference",
    "StopTraining": "pellucid.train",
    "TokenData": "pellucid.data.shards",
    "Tokenizer": "pellucid.tokenizer",
    "TrainState": "pellucid.train",
    "Trainer": "pellucid.train",
    "Transformer": "pellucid.model",
    "Windows": "pellucid.data.batches",
    "generate_text": "pellucid.text",
    "load_config": "pellucid.config",
    "load_model": "pellucid.checkpoint.model_folder",
    "register": "pellucid.registry",
    "save_model": "pellucid.checkpoint.model_folder",
}

__all__ = [
    "Batch", "Callback", "Loaded", "Loader", "ModelConfig", "PellucidError", "RunConfig", "SamplingParams", "StopTraining",
    "TokenData", "Tokenizer", "TrainState", "Trainer", "Transformer", "Windows", "__version__", "generate_text",
    "load_config", "load_model", "register", "save_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
