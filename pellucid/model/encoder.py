"""Encoders: every token sees its whole text, and a text becomes one vector.

Shapes: B texts, T tokens a row, S texts packed into N tokens, D model width. What is padding, and where a text ends, is
told by lengths alone: no token id has a meaning here, so a text may hold the padding token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid.config import ModelConfig
from pellucid.errors import ConfigError, RequestError
from pellucid.model.attend import of_one_width
from pellucid.model.attention import Attend
from pellucid.model.transformer import Decoder, init_weights

POOLINGS = ("cls", "mean", "last")
Side = Literal["right", "left"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedConfig:
    """How the hidden states of a text become one vector, and how long a text may be."""

    pooling: str = "mean"
    """"cls": of the first token; "mean": over all tokens; "last": of the last token."""
    normalize: bool = False
    """Divide each vector by its L2 norm, so that a dot product is the cosine."""
    max_seq_length: int = 0
    """The longest text in tokens, the added ones included; 0: all positions that the model has."""

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ConfigError(f"pooling {self.pooling!r} is unknown; known: {', '.join(POOLINGS)}")
        if self.max_seq_length < 0:
            raise ConfigError(f"max_seq_length must not be negative, got {self.max_seq_length}")


class EncoderOutput(NamedTuple):
    """One vector a text ``[B, D]`` (float32 at least), and the hidden states ``[B, T, D]`` or ``[N, D]``.

    Hidden states of padding mean nothing.
    """

    embedding: Tensor
    hidden: Tensor


class TextEncoder(nn.Module):
    """What both kinds of encoder share: layout, mask, pooling. A child gives ``hidden_states``.

    Args:
        width: D.
        num_positions: the longest text that the child can take, in tokens.
        vocab_size: ids are below it.
        embed: pooling, normalisation and the longest text; may be replaced at any time.
    """

    def __init__(self, *, width: int, num_positions: int, vocab_size: int, embed: EmbedConfig) -> None:
        super().__init__()
        if embed.max_seq_length > num_positions:
            raise ConfigError(
                f"max_seq_length {embed.max_seq_length} is more than max_position_embeddings {num_positions}; lower it"
            )
        self.embed = embed
        self.width, self.vocab_size = width, vocab_size
        self._num_positions = num_positions

    @property
    def max_tokens(self) -> int:
        """The longest text in tokens, the added ones included."""
        return self.embed.max_seq_length or self._num_positions

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, attend: Attend, token_types: Tensor | None
    ) -> Tensor:
        """``[..., D]`` of tokens ``[...]``; lengths, of each token's text, broadcast against them."""
        raise NotImplementedError

    def forward(
        self, tokens: Tensor, lengths: Tensor, *, padding: Side = "right", token_types: Tensor | None = None
    ) -> EncoderOutput:
        """The vectors of texts.

        Args:
            tokens: ids, int64: ``[B, T]``, a text a row, padded with any valid id; or packed ``[N]``, one text after the
                other.
            lengths: tokens of each text, int64 ``[B]`` or ``[S]``, at least 1; packed ones sum to N.
            padding: the side of a row on which padding is; the vectors do not depend on it.
            token_types: the segment of each token, shaped as tokens, for BERT-type models; None: all 0.
        """
        layout = lay_out(tokens, lengths, padding)
        attend = BothSides(layout.mask)
        hidden = self.hidden_states(tokens, layout.positions, layout.lengths, attend, token_types)
        rows, starts = (hidden, layout.starts) if tokens.dim() == 2 else _unpacked(hidden, lengths)
        embedding = pool(rows, starts, lengths, self.embed.pooling)
        return EncoderOutput(F.normalize(embedding, dim=-1) if self.embed.normalize else embedding, hidden)

    @torch.no_grad()
    def embed_ids(self, texts: Sequence[Sequence[int]], *, batch_size: int = 32) -> Tensor:
        """The vectors ``[len(texts), D]`` of ids, on the CPU, in the order given.

        Texts of similar length run together. A vector does not depend on its batch but for rounding (1e-6 of its norm
        in float32).

        Raises:
            RequestError: a text is empty, too long or has an id outside the vocabulary; names it by its number from 0.
        """
        for i, ids in enumerate(texts):
            self.check(ids, f"text {i}")
        device = next(self.parameters()).device
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors: dict[int, Tensor] = {}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            lengths = torch.tensor([len(texts[i]) for i in batch])
            tokens = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)
            for row, i in enumerate(batch):
                tokens[row, : len(texts[i])] = torch.tensor(texts[i])
            vectors |= zip(batch, self(tokens.to(device), lengths.to(device)).embedding.cpu(), strict=True)
        return torch.stack([vectors[i] for i in range(len(texts))]) if texts else torch.empty(0, self.width)

    def check(self, ids: Sequence[int], what: str) -> None:
        """RequestError, beginning with ``what``, if the encoder cannot take the ids of a text."""
        if not ids:
            raise RequestError(f"{what} is empty; a vector needs a token at least")
        if len(ids) > self.max_tokens:
            raise RequestError(
                f"{what} has {len(ids):,} tokens and the encoder takes {self.max_tokens:,}; shorten it or truncate it (--truncate)"
            )
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise RequestError(f"{what} has an id outside [0, {self.vocab_size:,}): {min(ids)} to {max(ids)}")


class Encoder(TextEncoder):
    """An encoder of our own kind: the blocks of `Transformer` with an attention that sees both sides, and no head.

    Its parameters are those of a `Transformer` of the same config, so a decoder's weights can be put into it.

    Args:
        config: its shape; ``tie_word_embeddings`` has no meaning without a head.
        embed: pooling, normalisation and the longest text.
        generator: draws the initial weights; None: torch's global generator.
        device: where the weights live; on "meta" they are not initialised.

    Raises:
        ConfigError: the config asks for what only a causal model has.
    """

    def __init__(
        self,
        config: ModelConfig,
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
        if config.vocab_size < 1:
            raise ConfigError("model.vocab_size is 0; an encoder needs the vocabulary of its tokenizer")
        if config.sliding_window is not None:
            raise ConfigError(f'model.sliding_window is {config.sliding_window}; an encoder sees all: set it to "none"')
        if config.attend != "sdpa":
            raise ConfigError(f'model.attend is {config.attend!r}, which is causal; an encoder needs "sdpa"')
        self.config = config
        self.model = Decoder(config, "meta")
        target = torch.device(device) if device is not None else torch.get_default_device()
        if target.type != "meta":
            self.to_empty(device=target)
            init_weights(self, generator)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, attend: Attend, token_types: Tensor | None
    ) -> Tensor:
        """The normed hidden states ``[..., D]``; ValueError for token types, which this kind has not."""
        if token_types is not None:
            raise ValueError("token_types are for BERT-type encoders; this one has no segments")
        cos, sin = self.model.rotary(positions, lengths)
        x = self.model.embed_tokens(tokens)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        for block in self.model.layers:
            x, _ = block(x, cos, sin, attend)
        hidden: Tensor = self.model.norm(x)
        return hidden


class Layout(NamedTuple):
    """Where the texts of a batch are."""

    positions: Tensor
    """Of each token in its text, from 0, shaped as tokens; of padding: some valid one."""
    starts: Tensor
    """Of each text: the column or, packed, the index of its first token."""
    lengths: Tensor
    """``[B]``, or of each packed token's text ``[N]``."""
    mask: Tensor | None
    """True where a query sees a key: ``[B, 1, 1, T]`` or packed ``[N, N]``; None: everywhere."""


def lay_out(tokens: Tensor, lengths: Tensor, padding: Side) -> Layout:
    """Positions and mask of a batch; ValueError where lengths do not fit the tokens."""
    if tokens.dim() not in (1, 2) or lengths.dim() != 1 or int(lengths.min()) < 1:
        raise ValueError(f"tokens [B, T] or [N] with lengths >= 1 of each text, got {tokens.shape} and {lengths}")
    if tokens.dim() == 1:
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"lengths sum to {int(lengths.sum())}, but {len(tokens)} tokens are packed")
        texts = torch.arange(len(lengths), device=tokens.device).repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(len(tokens), device=tokens.device) - starts[texts]
        mask = texts[:, None] == texts if len(lengths) > 1 else None
        return Layout(positions, starts, lengths[texts], mask)
    rows, width = tokens.shape
    if len(lengths) != rows or int(lengths.max()) > width:
        raise ValueError(f"{rows} rows of {width} tokens need as many lengths, {width} at most; got {lengths}")
    if padding not in ("right", "left"):
        raise ValueError(f'padding is "right" or "left", got {padding!r}')
    starts = torch.zeros_like(lengths) if padding == "right" else width - lengths
    offset = torch.arange(width, device=tokens.device) - starts[:, None]
    real = (offset >= 0) & (offset < lengths[:, None])
    positions = offset.clamp(min=0).minimum(lengths[:, None] - 1)
    return Layout(positions, starts, lengths, None if bool(real.all()) else real[:, None, None])


class BothSides:
    """An `Attend` in which a token sees all of its text: rows ``[B, T, H, d]`` or packed ``[N, H, d]``.

    Args:
        mask: as `Layout` has it. No query may be without a key: softmax would give NaN.
        dropout: probability of dropping a weight.
    """

    def __init__(self, mask: Tensor | None, dropout: float = 0.0) -> None:
        self.mask, self.dropout = mask, dropout

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        packed, width = q.dim() == 3, v.shape[-1]
        q, k, v = (x[None].transpose(1, 2) if packed else x.transpose(1, 2) for x in of_one_width(q, k, v))
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, dropout_p=self.dropout, scale=scale, enable_gqa=gqa
        ).transpose(1, 2)[..., :width]
        return out[0] if packed else out


def pool(hidden: Tensor, starts: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Hidden states ``[B, T, D]`` -> ``[B, D]``, float32 at least.

    Args:
        starts: the column of each text's first token, ``[B]``.
        lengths: tokens of each text, ``[B]``.
    """
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    row = torch.arange(len(wide), device=wide.device)
    if pooling == "cls":
        return wide[row, starts]
    if pooling == "last":
        return wide[row, starts + lengths - 1]
    assert pooling == "mean", pooling
    offset = torch.arange(wide.shape[1], device=wide.device) - starts[:, None]
    real = (offset >= 0) & (offset < lengths[:, None])
    # not a product: padding may be infinite
    return wide.masked_fill(~real[..., None], 0.0).sum(1) / lengths[:, None]


def _unpacked(hidden: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Packed ``[N, D]`` as rows ``[S, T, D]`` padded on the right, and where they start."""
    rows = nn.utils.rnn.pad_sequence(hidden.split(lengths.tolist()), batch_first=True)
    return rows, torch.zeros_like(lengths)
