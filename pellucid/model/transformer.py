"""The decoder language model. It knows no cache, no loss and no process group.

Parameter names are those of Hugging Face's Llama and Qwen3. Shapes: ``[B, T]`` rows of T tokens, or ``[N]`` tokens of
several sequences packed; D model width, V vocabulary.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pellucid.config import ModelConfig
from pellucid.errors import ConfigError
from pellucid.model.attend import RowsAttend, WindowAttend, rows_of_documents
from pellucid.model.attention import Attend, Attention, KVSpec
from pellucid.model.canonical import MATMUL_ROWS, CanonicalAttend
from pellucid.model.layers import RMSNorm
from pellucid.model.linear import Linear, linear
from pellucid.model.mla import LatentAttention
from pellucid.model.mlp import SwiGLU
from pellucid.model.moe import MixtureOfExperts, Router, Routing, balance
from pellucid.model.rope import Rotary


class ModelOutput(NamedTuple):
    """Logits ``[..., V]`` of the next token, or ``[n, V]`` of n chosen ones, and the normed hidden states ``[..., D]`` of all.

    Of each layer with a mixture of E experts, in order: the router's probabilities ``[..., E]`` and the experts that tokens
    went to ``[..., K]``.
    """

    logits: Tensor
    hidden: Tensor
    router_probs: tuple[Tensor, ...] = ()
    router_choices: tuple[Tensor, ...] = ()


class Block(nn.Module):
    """One decoder layer: pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        kind = LatentAttention if config.is_latent else Attention
        self.self_attn = kind(config, layer, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.mlp = MixtureOfExperts(config, device) if layer in config.expert_layers else SwiGLU(config, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Routing | None]:
        x = x + self._drop(self.self_attn(self.input_layernorm(x), cos, sin, attend))
        inner = self.mlp(self.post_attention_layernorm(x))
        inner, routing = inner if isinstance(inner, tuple) else (inner, None)
        return x + self._drop(inner), routing

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """Everything below the head, named as Hugging Face's ``model.*``."""

    def __init__(self, config: ModelConfig, device: torch.device | str | None = None) -> None:
        super().__init__()
        # nn.Embedding would draw values first; on "meta" that alone makes torch load sympy, 80 MB
        table = torch.empty(config.vocab_size, config.hidden_size, device=device)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, i, device) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device)
        self.rotary = Rotary(config)


class Transformer(nn.Module):
    """A decoder-only language model of the Llama, Qwen3 and DeepSeek families.

    Args:
        config: its shape; ``vocab_size`` must be known.
        generator: draws the initial weights (`init_weights`); None: torch's global generator.
        device: where the weights live. On "meta" they have no storage and are not initialised: for loading with
            ``load_state_dict(..., assign=True)``.

    With a tied head there is no ``lm_head``: the head is the embedding's parameter, listed and saved once.
    """

    activation_checkpointing: bool = False
    """Recompute each block in backward instead of keeping its activations."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ConfigError("model.vocab_size is 0; set it, or take the vocabulary of the data's tokenizer")
        self.config = config
        self.model = Decoder(config, "meta")
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
        )
        target = torch.device(device) if device is not None else torch.get_default_device()
        if target.type != "meta":
            self.to_empty(device=target)
            init_weights(self, generator)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        *,
        rope_length: int | Tensor | None = None,
        embedding_noise: Tensor | None = None,
        at: Tensor | None = None,
    ) -> ModelOutput:
        """Logits for ids ``[B, T]``, or packed ``[N]``; arguments as in `forward_hidden`.

        Args:
            embedding_noise: ``[..., D]``, added to the embeddings of the tokens.
            at: ``[n]`` int64, the places in the flattened tokens after which logits are wanted; None: after each.
        """
        hidden, routings = self._decode(tokens, positions, attend, rope_length, embedding_noise)
        probs, chosen = (tuple(each) for each in zip(*routings, strict=True)) if routings else ((), ())
        return ModelOutput(self.head(hidden) if at is None else self._head_at(hidden, at), hidden, probs, chosen)

    def forward_hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        *,
        rope_length: int | Tensor | None = None,
    ) -> Tensor:
        """The normed hidden states ``[..., D]`` that `head` turns into logits.

        Args:
            tokens: ids, int64, ``[B, T]`` or packed ``[N]``; packed ones need positions and attend.
            positions: of each token in its sequence or document, from 0, shaped as tokens; None: 0, 1, ... in each row.
            attend: what lets tokens see each other; None: `make_attend()`.
            rope_length: the most tokens that a sequence will ever hold (prompt and answer), for "dynamic" rotary
                scaling: one number, ``[B]``, or one per packed token; None: T.
        """
        return self._decode(tokens, positions, attend, rope_length)[0]

    def _decode(
        self, tokens: Tensor, positions: Tensor | None, attend: Attend | None, rope_length: int | Tensor | None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, list[Routing]]:  # fmt: skip
        if tokens.dim() == 1 and (positions is None or attend is None):
            raise ValueError("packed tokens [N] need positions and attend; only [B, T] rows have defaults")
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        if rope_length is None:
            rope_length = tokens.shape[-1]
        attend = attend or self.make_attend()
        cos, sin = self.model.rotary(positions, rope_length)
        x = self.model.embed_tokens(tokens)
        if noise is not None:
            x = x + noise.to(x.dtype)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        routings: list[Routing] = []
        for block in self.model.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x, routing = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x, routing = block(x, cos, sin, attend)
            if routing is not None:
                routings.append(routing)
        return self.model.norm(x), routings

    def head(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` of hidden states ``[..., D]``, in the dtype of the computation."""
        if self.lm_head is None:
            return linear(hidden, self.model.embed_tokens.weight)
        logits: Tensor = self.lm_head(hidden)
        return logits

    def _head_at(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Logits ``[n, V]`` of some hidden states; few of them get zeros beside them, or their bits depended on their number."""
        rows = hidden.flatten(0, -2).index_select(0, at)
        missing = max(0, MATMUL_ROWS - len(rows))
        return self.head(F.pad(rows, (0, 0, 0, missing)))[: len(rows)] if missing else self.head(rows)

    def make_attend(self, document_ids: Tensor | None = None, *, written_out: bool | None = None) -> Attend:
        """The attention of whole rows ``[B, T]``, for one batch: causal, inside each document only.

        Args:
            document_ids: int64 ``[B, T]``; a document is a run of equal ids in a row. Padding gets an id of its own.
                None: each row is one document.
            written_out: as in `WindowAttend`; None: where torch.compile is running right now.
        """
        if written_out is None:
            written_out = torch.compiler.is_compiling()
        if self.config.attend == "canonical":
            return CanonicalAttend(self.layer_windows(), document_ids)
        if document_ids is not None and not torch.compiler.is_compiling():
            if not _splits_rows(document_ids):
                document_ids = None
            elif (apart := rows_of_documents(document_ids)) is not None:  # many short ones
                return RowsAttend(WindowAttend(self.layer_windows(), written_out=written_out), *apart)
        return WindowAttend(self.layer_windows(), document_ids, written_out=written_out)

    def layer_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None where a layer sees everything before it."""
        config = self.config
        return tuple(
            config.sliding_window if i >= config.max_window_layers else None for i in range(config.num_hidden_layers)
        )

    def kv_specs(self) -> list[KVSpec]:
        """What one token leaves in the cache, layer by layer."""
        return [block.self_attn.kv_spec for block in self.model.layers]  # type: ignore[union-attr,misc]

    def balance_experts(self, counts: Tensor) -> dict[str, Tensor]:
        """What to add to the bias of each router after a step, by parameter name; none without ``router_bias_update_speed``.

        Args:
            counts: tokens that each expert got in the step, ``[layers with experts, E]``.
        """
        speed = self.config.router_bias_update_speed
        if not speed:
            return {}
        names = [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in self.config.expert_layers]
        return {name: balance(mine, speed) for name, mine in zip(names, counts, strict=True)}

    def num_parameters(self, *, embedding: bool = True) -> int:
        """Elements of all parameters, tied ones once; without ``embedding`` less those of the input embedding."""
        total = sum(p.numel() for p in self.parameters())
        return total if embedding else total - self.model.embed_tokens.weight.numel()

    def flops_per_token(self, context: int) -> float:
        """Floating-point operations of forward and backward for one token of rows of ``context`` tokens.

        6 for each weight that is multiplied (the head once; of routed experts those that a token goes to; the embedding
        look-up, norms and biases are free), and 6 * heads * (key width + value width) a layer for each key that a token
        sees: context / 2 on average, fewer with a sliding window. Recomputation by activation checkpointing is not counted.
        """
        config = self.config
        experts = [e for m in self.modules() if isinstance(m, MixtureOfExperts) for e in m.experts.parameters()]
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear | Router))
        if experts:
            of_experts = sum(e.numel() for e in experts)
            weights -= of_experts - of_experts * config.num_experts_per_tok // config.n_routed_experts
        if self.lm_head is None:
            weights += self.model.embed_tokens.weight.numel()
        keys = 0.0
        for window in self.layer_windows():
            seen = min(window or context, context)
            keys += seen * (1 - seen / (2 * context))
        widths = config.head_dim + config.head_dim
        if config.is_latent:
            widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return 6 * weights + 6 * keys * config.num_attention_heads * widths


@torch.no_grad()
def init_weights(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draws every weight of a `Transformer` or an `Encoder` anew, in the order of ``named_parameters``.

    Matrices are normal with ``initializer_range``, those that write into the residual stream (``o_proj``,
    ``down_proj``) divided by sqrt(2 * layers), the embedding with ``embedding_range`` where that is set; norms are 1,
    biases 0. A tied head leaves the embedding as drawn.
    """
    config = cast(ModelConfig, model.config)
    std = config.initializer_range
    embedding_std = std if config.embedding_range is None else config.embedding_range
    residual_std = std / (2 * config.num_hidden_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            residual, embedding = "o_proj" in name or "down_proj" in name, "embed_tokens" in name
            drawn = torch.empty(parameter.shape, device=generator.device if generator else parameter.device)
            drawn.normal_(0.0, residual_std if residual else embedding_std if embedding else std, generator=generator)
            parameter.copy_(drawn)


def _splits_rows(document_ids: Tensor) -> bool:
    return bool((document_ids != document_ids[:, :1]).any())
