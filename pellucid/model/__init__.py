"""Layers and the decoder language model."""

from pellucid.model.attention import Attend, KVSpec
from pellucid.model.transformer import ModelOutput, Transformer, init_weights

__all__ = ["Attend", "KVSpec", "ModelOutput", "Transformer", "init_weights"]
