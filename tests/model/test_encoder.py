"""Encoders see both sides; padding, packing and batch mates change nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pellucid.config import ModelConfig
from pellucid.errors import ConfigError, RequestError
from pellucid.model import BertConfig, BertEncoder, EmbedConfig, Encoder, Transformer
from pellucid.model.encoder import TextEncoder, lay_out

SHAPE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
OWN: dict[str, Any] = SHAPE | {"num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
}  # fmt: skip
"""Latent attention and a mixture of experts."""
KINDS = ["own", "dynamic", "experts", "bert"]
TEXTS = [[3, 7, 0, 9, 11], [5], [0, 0, 21, 33, 4, 8, 2, 49, 1], [17, 0]]
"""Ids; 0 is what they are padded with."""


def make(kind: str, embed: EmbedConfig | None = None, **changes: Any) -> TextEncoder:
    """Large random weights everywhere, norms and biases too."""
    generator = torch.Generator().manual_seed(0)
    model: TextEncoder
    if kind == "bert":
        model = BertEncoder(BertConfig(**(SHAPE | changes)), embed, generator=generator)
    else:
        own = OWN | {"qk_norm": True, "attention_bias": True} | changes
        if kind == "experts":
            own |= EXPERTS
        if kind == "dynamic":
            own |= {"max_position_embeddings": 4, "rope_scaling": DYNAMIC}
            embed = EmbedConfig(pooling=(embed or EmbedConfig()).pooling)
        model = Encoder(ModelConfig(**own), embed, generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def padded(side: str, fill: int = 0) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(ids) for ids in TEXTS])
    rows = torch.full((len(TEXTS), int(lengths.max()) + 2), fill)
    for row, ids in zip(rows, TEXTS, strict=True):
        row[slice(len(ids)) if side == "right" else slice(-len(ids), None)] = torch.tensor(ids)
    return rows, lengths


def alone(model: TextEncoder) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids]), torch.tensor([len(ids)])).embedding for ids in TEXTS])


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_sees_the_last(kind: str) -> None:
    model, tokens, length = make(kind), torch.tensor([[3, 7, 9, 11]]), torch.tensor([4])
    other = tokens.clone()
    other[0, -1] = 12
    with torch.no_grad():
        first, changed = (model(x, length).hidden[0, 0] for x in (tokens, other))
    assert (first - changed).abs().max() > 1e-3


def test_own_kind_is_the_decoder_with_an_attention_over_everything() -> None:
    config = ModelConfig(**OWN, qk_norm=True, attention_gate=True)
    decoder = Transformer(config, generator=torch.Generator().manual_seed(1)).double()
    encoder = Encoder(config).double()
    encoder.load_state_dict(decoder.state_dict())

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    tokens = torch.tensor([[3, 7, 0, 9, 11], [8, 1, 2, 40, 5]])
    expected = decoder.forward_hidden(tokens, attend=attend)
    out = encoder(tokens, torch.tensor([5, 5]))
    torch.testing.assert_close(out.hidden, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.embedding, expected.mean(1), rtol=0, atol=1e-12)
    assert (expected - decoder.forward_hidden(tokens)).abs().max() > 1e-3  # not the causal one


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_and_packing_give_the_vectors_of_texts_alone(kind: str, pooling: str) -> None:
    model = make(kind, EmbedConfig(pooling=pooling))
    expected = alone(model)
    assert (expected[0] - expected[1]).abs().max() > 0.1
    with torch.no_grad():
        for side in ("right", "left"):
            for fill in (0, 21):
                rows, lengths = padded(side, fill)
                torch.testing.assert_close(model(rows, lengths, padding=side).embedding, expected, rtol=0, atol=2e-6)
        packed, lengths = torch.tensor([id_ for ids in TEXTS for id_ in ids]), torch.tensor([len(ids) for ids in TEXTS])
        torch.testing.assert_close(model(packed, lengths).embedding, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_poolings_take_the_hidden_states_that_they_name(kind: str) -> None:
    rows, lengths = padded("left")
    for pooling in ("cls", "mean", "last"):
        with torch.no_grad():
            out = make(kind, EmbedConfig(pooling=pooling))(rows, lengths, padding="left")
        for text, vector in enumerate(out.embedding):
            states = out.hidden[text, rows.shape[1] - len(TEXTS[text]) :]
            expected = {"cls": states[0], "mean": states.mean(0), "last": states[-1]}[pooling]
            torch.testing.assert_close(vector, expected, rtol=0, atol=1e-6)


def test_normalised_vectors_have_length_one_and_the_same_direction() -> None:
    plain = alone(make("bert"))
    unit = alone(make("bert", EmbedConfig(normalize=True)))
    torch.testing.assert_close(unit, plain / plain.norm(dim=1, keepdim=True))
    assert (plain.norm(dim=1) - 1).abs().min() > 0.1


@pytest.mark.parametrize("kind", ["own", "bert"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 32])
def test_embed_ids_keeps_the_order_whatever_the_batches(kind: str, batch_size: int) -> None:
    model = make(kind, EmbedConfig(normalize=True))
    texts = [TEXTS[i % 4] for i in range(9)]
    expected = alone(model)
    found = model.embed_ids(texts, batch_size=batch_size)
    torch.testing.assert_close(found, torch.stack([expected[i % 4] for i in range(9)]), rtol=0, atol=1e-6)
    assert not found.requires_grad


def test_texts_of_similar_length_share_a_batch() -> None:
    model, shapes = make("bert"), []
    model.register_forward_pre_hook(lambda module, arguments: shapes.append(tuple(arguments[0].shape)))
    model.embed_ids([[1] * length for length in (2, 9, 3, 9, 2, 3)], batch_size=2)
    assert sorted(shapes) == [(2, 2), (2, 3), (2, 9)]


def test_no_texts_give_no_vectors() -> None:
    assert make("bert").embed_ids([]).shape == (0, 24)


def test_vectors_of_narrow_weights_are_float32() -> None:
    wide, narrow = make("bert", EmbedConfig(normalize=True)), make("bert", EmbedConfig(normalize=True)).bfloat16()
    found = narrow.embed_ids(TEXTS)
    assert found.dtype == torch.float32
    assert 0 < (found - wide.embed_ids(TEXTS)).abs().max() < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_weight(kind: str) -> None:
    model = make(kind).train()
    rows, lengths = padded("right")
    model(rows, lengths).embedding[:, 0].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # keys' biases shift all scores of a query alike, so softmax drops them, but for rotation and norm
        assert parameter.grad.abs().max() > 0 or name.endswith("key.bias"), name


@pytest.mark.parametrize(("hidden", "attention", "random"), [(0.0, 0.0, False), (0.5, 0.0, True), (0.0, 0.5, True)])
def test_berts_dropouts_act_in_training_only(hidden: float, attention: float, random: bool) -> None:
    model = make("bert", hidden_dropout_prob=hidden, attention_probs_dropout_prob=attention)
    rows, lengths = padded("right")
    with torch.no_grad():
        calm = model(rows, lengths).embedding
        assert torch.equal(calm, model(rows, lengths).embedding)
        assert (not torch.allclose(model.train()(rows, lengths).embedding, calm)) == random


def test_token_types_are_berts_alone() -> None:
    rows, lengths = padded("right")
    types = torch.ones_like(rows)
    with torch.no_grad():
        model = make("bert")
        zeros = model(rows, lengths, token_types=torch.zeros_like(rows)).embedding
        assert torch.equal(zeros, model(rows, lengths).embedding)
        assert (zeros - model(rows, lengths, token_types=types).embedding).abs().max() > 1e-2
        with pytest.raises(ValueError, match="BERT-type"):
            make("own")(rows, lengths, token_types=types)


def test_fresh_weights_follow_the_generator_and_the_range() -> None:
    config = BertConfig(**(SHAPE | {"hidden_size": 128, "initializer_range": 0.1}))
    one, two = (BertEncoder(config, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    for (name, first), second in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(first, second)
        if name.endswith("bias"):
            assert not first.any()
        elif first.dim() == 1:
            assert (first == 1).all()
    weight = one.get_parameter("embeddings.word_embeddings.weight")
    assert 0.09 < float(weight.detach().std()) < 0.11


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "text 1 is empty"),
        ([1] * 17, "text 1 has 17 tokens and the encoder takes 16"),
        ([50], "outside"),
        ([-1], "outside"),
    ],
)
def test_ids_that_cannot_be_embedded_are_named(ids: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make("bert").embed_ids([[1], ids])


def test_the_longest_text_can_be_set_lower() -> None:
    model = make("bert", EmbedConfig(max_seq_length=3))
    assert model.embed_ids([[1, 2, 3]]).shape == (1, 24)
    with pytest.raises(RequestError, match="takes 3"):
        model.embed_ids([[1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("tokens", "lengths", "padding"),
    [
        ([[1, 2]], [0], "right"),
        ([[1, 2]], [3], "right"),
        ([[1, 2]], [1, 1], "right"),
        ([1, 2, 3], [1, 1], "right"),
        ([[1, 2]], [2], "middle"),
        ([[[1]]], [1], "right"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(tokens: Any, lengths: list[int], padding: Any) -> None:
    with pytest.raises(ValueError, match=r"lengths|right"):
        lay_out(torch.tensor(tokens), torch.tensor(lengths), padding)


def test_configs_that_cannot_work_are_refused_by_name() -> None:
    for message, make_it in {
        "pooling 'max' is unknown; known: cls, mean, last": lambda: EmbedConfig(pooling="max"),
        "max_seq_length must not be negative": lambda: EmbedConfig(max_seq_length=-1),
        "max_seq_length 17 is more than max_position_embeddings 16": lambda: make(
            "bert", EmbedConfig(max_seq_length=17)
        ),
        "sliding_window is 4": lambda: make("own", sliding_window=4),
        "attend is 'canonical'": lambda: make("own", attend="canonical"),
        "vocab_size is 0": lambda: make("own", vocab_size=0),
        "hidden_act 'geluu' is unknown; did you mean gelu": lambda: make("bert", hidden_act="geluu"),
        "hidden_size 24 is not divisible by num_attention_heads 5": lambda: make("bert", num_attention_heads=5),
        "num_hidden_layers must be at most 10,000": lambda: make("bert", num_hidden_layers=10**9),
        "type_vocab_size must be at least 1": lambda: make("bert", type_vocab_size=0),
        "layer_norm_eps must be positive": lambda: make("bert", layer_norm_eps=0.0),
        "hidden_dropout_prob must be in": lambda: make("bert", hidden_dropout_prob=1.0),
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_it()
