"""Layers, the decoder language model and encoders."""

from pellucid.model.attention import Attend, KVSpec
from pellucid.model.bert import BertConfig, BertEncoder
from pellucid.model.encoder import EmbedConfig, Encoder, EncoderOutput
from pellucid.model.transformer import ModelOutput, Transformer, init_weights

__all__ = [
    "Attend",
    "BertConfig",
    "BertEncoder",
    "EmbedConfig",
    "Encoder",
    "EncoderOutput",
    "KVSpec",
    "ModelOutput",
    "Transformer",
    "init_weights",
]
