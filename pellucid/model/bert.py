"""BERT-type encoders, computed as transformers' ``BertModel`` without its pooler.

Devlin et al. 2018, arXiv:1810.04805: learned positions, token types, LayerNorm after each residual sum, biases. Parameter
names are Hugging Face's. Shapes as in `pellucid.model.encoder`; H heads of d.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.errors import ConfigError
from pellucid.model.attention import Attend
from pellucid.model.encoder import BothSides, EmbedConfig, TextEncoder
from pellucid.model_config import MAX_LAYERS
from pellucid.registry import nearest


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
"""By the name that transformers has for them; "gelu" is the exact one, with erf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig:
    """The shape of a BERT-type encoder. Keys and defaults are those of a Hugging Face ``config.json``."""

    vocab_size: int = 30_522
    """Rows of the embedding."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_hidden_layers: int = 12
    """Blocks."""
    num_attention_heads: int = 12
    """Heads; they divide hidden_size."""
    intermediate_size: int = 3072
    """Width inside the feed-forward."""
    hidden_act: str = "gelu"
    """Its activation, one of `ACTIVATIONS`."""
    max_position_embeddings: int = 512
    """Learned positions: the longest text, in tokens."""
    type_vocab_size: int = 2
    """Token types (segments)."""
    layer_norm_eps: float = 1e-12
    """Added to the variance inside each LayerNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    hidden_dropout_prob: float = 0.1
    """Probability of dropping elements of the embedding and of each residual branch in training."""
    attention_probs_dropout_prob: float = 0.1
    """Probability of dropping attention weights in training."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        for name in (*sizes, "max_position_embeddings", "type_vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_hidden_layers > MAX_LAYERS:
            raise ConfigError(f"num_hidden_layers must be at most {MAX_LAYERS:,}, got {self.num_hidden_layers}")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(
                f"hidden_act {self.hidden_act!r} is unknown{nearest(self.hidden_act, list(ACTIVATIONS))}; "
                f"known: {', '.join(ACTIVATIONS)}"
            )
        for name in ("layer_norm_eps", "initializer_range"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")


class BertEncoder(TextEncoder):
    """A BERT-type encoder.

    Args:
        config: its shape.
        embed: pooling, normalisation and the longest text.
        generator: draws the initial weights: matrices normal, biases 0, norms 1; None: torch's global generator.
        device: where the weights live; on "meta" they are not initialised.
    """

    def __init__(
        self,
        config: BertConfig,
        embed: EmbedConfig | None = None,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            width=config.hidden_size,
            num_positions=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            embed=embed or EmbedConfig(),
        )
        self.config = config
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": _table(config.vocab_size, config.hidden_size),
                "position_embeddings": _table(config.max_position_embeddings, config.hidden_size),
                "token_type_embeddings": _table(config.type_vocab_size, config.hidden_size),
                "LayerNorm": _norm(config),
            }
        )
        layers = nn.ModuleList(BertLayer(config, i) for i in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})
        target = torch.device(device) if device is not None else torch.get_default_device()
        if target.type != "meta":
            self.to_empty(device=target)
            self._init_weights(generator)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, attend: Attend, token_types: Tensor | None
    ) -> Tensor:
        """The hidden states ``[..., D]`` of the last block; positions say all that lengths would."""
        types = torch.zeros_like(tokens) if token_types is None else token_types
        parts = self.embeddings
        x: Tensor = parts["word_embeddings"](tokens) + parts["token_type_embeddings"](types)
        x = parts["LayerNorm"](x + parts["position_embeddings"](positions))
        x = F.dropout(x, self.config.hidden_dropout_prob, self.training)
        if self.training and self.config.attention_probs_dropout_prob and isinstance(attend, BothSides):
            attend = BothSides(attend.mask, self.config.attention_probs_dropout_prob)
        for layer in self.encoder["layer"].children():
            x = layer(x, attend)
        return x

    @torch.no_grad()
    def _init_weights(self, generator: torch.Generator | None) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                drawn = torch.empty(parameter.shape, device=generator.device if generator else parameter.device)
                parameter.copy_(drawn.normal_(0.0, self.config.initializer_range, generator=generator))


class BertLayer(nn.Module):
    """One block: attention, then the feed-forward, each followed by a LayerNorm of the residual sum."""

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.num_attention_heads
        self.dropout, self.act = config.hidden_dropout_prob, ACTIVATIONS[config.hidden_act]
        width, inner = config.hidden_size, config.intermediate_size
        projections = {name: _linear(width, width) for name in ("query", "key", "value")}
        mixed = {"dense": _linear(width, width), "LayerNorm": _norm(config)}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(projections), "output": nn.ModuleDict(mixed)})
        self.intermediate = nn.ModuleDict({"dense": _linear(width, inner)})
        self.output = nn.ModuleDict({"dense": _linear(inner, width), "LayerNorm": _norm(config)})

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x ``[..., D]`` -> ``[..., D]``."""
        project = self.attention["self"]
        q, k, v = (project[name](x).unflatten(-1, (self.heads, -1)) for name in ("query", "key", "value"))  # type: ignore[index]
        mixed = attend(self.layer, q, k, v, scale=q.shape[-1] ** -0.5).flatten(-2)
        x = self._add(x, mixed, self.attention["output"])
        return self._add(x, self.act(self.intermediate["dense"](x)), self.output)

    def _add(self, x: Tensor, branch: Tensor, output: nn.Module) -> Tensor:
        dense, norm = output.get_submodule("dense"), output.get_submodule("LayerNorm")
        added: Tensor = norm(x + F.dropout(dense(branch), self.dropout, self.training))
        return added


def _table(rows: int, width: int) -> nn.Embedding:
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width, device="meta"), freeze=False)
    return table


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, device="meta")


def _norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps, device="meta")
