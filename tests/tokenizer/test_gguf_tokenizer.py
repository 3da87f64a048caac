"""Tokenizers in GGUF keys: the ids of the tokenizer that the keys were made from, both ways; what is refused."""

import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import TEXT, llama3, sentencepiece, unigram, wordpiece, write
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HF
from transformers import AutoTokenizer

from pellucid.data.encode import framed
from pellucid.errors import DataError
from pellucid.text import encode_prompt
from pellucid.tokenizer import Tokenizer
from pellucid.tokenizer.chat import CHATML
from pellucid.tokenizer.gguf import from_gguf, merges_of
from pellucid.tokenizer.gguf_write import to_gguf

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLES = [
    TEXT, "", " ", "  two  spaces\n\n\tand\ttabs ", "IT'S I'LL don't", "1234567 3.14159", "e\u0301 \u00e9", "日本語テキスト👋🏽",
    "\r\n\r\nx\r",
    "<|a|> is text here, <pad>", "▁ is a character",
]  # fmt: skip
CONTROLS = ["<|end|>", "<|a|>", "<|im_start|>", "<|im_end|>"]


def byte_level(pre: str) -> HF:
    """A tokenizer of a pre-type, made with `tokenizers` as models of it have it."""
    if pre == "llama-bpe":
        hf = llama3()
        description = json.loads(hf.to_str())
        description["model"]["ignore_merges"] = True
        return HF.from_str(json.dumps(description))
    hf = HF(models.BPE())
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pre == "qwen2":
        hf.normalizer = normalizers.NFC()
        steps = [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    hf.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=CONTROLS, min_frequency=2, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    hf.train_from_iterator([TEXT] * 4, trainer)
    hf.add_tokens([AddedToken("<think>", normalized=False)])
    return hf


PRES = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def keys_of(hf: HF, pre: str, **more: Any) -> dict[str, Any]:
    """What a converter writes about a byte-level BPE."""
    description = json.loads(hf.to_str())
    vocab = hf.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [NORMAL] * len(tokens)
    for token in description["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER
    keys = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types,
        "merges": [" ".join(merge) for merge in description["model"]["merges"]],
    } | more  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def made(keys: dict[str, Any]) -> Tokenizer:
    tokenizer = from_gguf(keys, origin="m.gguf")
    assert tokenizer is not None
    return tokenizer


# -- byte-level BPE -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", PRES)
def test_a_byte_level_tokenizer_comes_back_with_the_same_ids(pre: str) -> None:
    hf = byte_level(pre)
    ours = made(keys_of(hf, pre))
    hf.encode_special_tokens = True
    for text in SAMPLES:
        expected = hf.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected
        assert ours.decode(expected) == hf.decode(expected)
    assert len(ours.encode(TEXT)) < len(TEXT.encode()) / 2, "merges were used"
    assert ours.vocab_size == hf.get_vocab_size()


@pytest.mark.parametrize("pre", PRES)
@given(text=st.text(max_size=60))
@settings(max_examples=60)
def test_any_text_gets_the_same_ids(pre: str, text: str) -> None:
    hf, ours = pair(pre)
    assert ours.encode(text) == hf.encode(text, add_special_tokens=False).ids


_pairs: dict[str, tuple[HF, Tokenizer]] = {}


def pair(pre: str) -> tuple[HF, Tokenizer]:
    if pre not in _pairs:
        hf = byte_level(pre)
        _pairs[pre] = (hf, made(keys_of(hf, pre)))
        hf.encode_special_tokens = True
    return _pairs[pre]


def test_pre_types_differ_where_they_should() -> None:
    """The same tokens and merges cut in four ways: a wrong regex cannot pass for a right one."""
    keys = keys_of(byte_level("gpt-2"), "gpt-2")
    text = "I'LL say\n\n  12345 hello"
    pieces = {
        pre: [
            piece
            for piece, _ in HF.from_str(made(keys | {"tokenizer.ggml.pre": pre}).files()["tokenizer.json"].decode())
            .pre_tokenizer.pre_tokenize_str(text)
        ]
        for pre in PRES
    }  # fmt: skip
    assert "Ġ12345" in pieces["gpt-2"]
    assert {"1", "5"} < set(pieces["smollm"]) and "'LL" not in pieces["smollm"]
    assert "123" in pieces["llama-bpe"] and "45" in pieces["llama-bpe"] and "'LL" in pieces["llama-bpe"]
    assert "1" in pieces["qwen2"] and "'LL" in pieces["qwen2"]
    assert len({tuple(value) for value in pieces.values()}) == 4
    ids = {pre: made(keys | {"tokenizer.ggml.pre": pre}).encode("e\u0301") for pre in PRES}
    assert ids["qwen2"] == made(keys).encode("\u00e9") != ids["gpt-2"], "Qwen2 composes characters"


def test_tokens_that_merges_do_not_lead_to_are_found_where_merges_are_ignored() -> None:
    keys = keys_of(byte_level("gpt-2"), "gpt-2")
    tokens = [*keys["tokenizer.ggml.tokens"], "zqzq"]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*keys["tokenizer.ggml.token_type"], NORMAL]}
    assert made(keys | {"tokenizer.ggml.pre": "llama-bpe"}).encode("zqzq") == [len(tokens) - 1]
    assert len(made(keys).encode("zqzq")) == 4


def test_control_tokens_are_no_text_and_user_defined_ones_are_cut_out() -> None:
    ours = made(keys_of(byte_level("smollm"), "smollm", bos_token_id=0, eos_token_id=3))
    assert ours.special_tokens == {token: id_ for id_, token in enumerate(CONTROLS)}
    assert not set(ours.encode("a<|im_end|>b")) & set(range(4))
    think = ours.vocab_size - 1
    assert ours.encode("a<think>b") == [*ours.encode("a"), think, *ours.encode("b")]
    assert ours.decode([think]) == "<think>" and ours.decode([3]) == ""


def test_a_chat_goes_through_the_template_of_the_file() -> None:
    keys = keys_of(byte_level("smollm"), "smollm", bos_token_id=2, eos_token_id=3, add_bos_token=False)
    ours = made(keys | {"tokenizer.chat_template": CHATML})
    ids = ours.encode_chat([{"role": "user", "content": "the fox <|im_end|>"}])
    assert ids[0] == 2 and ids.count(3) == 1, "what a user says is no control token"
    assert ours.stop_ids == (3,)
    with pytest.raises(DataError, match=r"chat_template in tokenizer_config\.json must be text"):
        made(keys | {"tokenizer.chat_template": 7})


@pytest.mark.parametrize(
    ("pre", "said", "prefix"),
    [("gpt-2", None, False), ("smollm", None, False), ("smollm", True, True), ("smollm", False, False),
     ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False)],
)  # fmt: skip
def test_text_begins_with_the_beginning_token_where_the_file_or_its_pre_type_says_so(
    pre: str, said: bool | None, prefix: bool, tmp_path: Path
) -> None:
    hf = byte_level(pre)
    bos = hf.token_to_id("<|begin_of_text|>" if pre == "llama-bpe" else "<|a|>")
    ours = made(keys_of(hf, pre, bos_token_id=bos, eos_token_id=bos, add_bos_token=said))
    assert ours.bos_id == bos and ours.prefix_id == (bos if prefix else None)
    front = [bos] if prefix else []
    assert ours.encode_document("fox") == framed(ours, ours.encode("fox")) == [*front, *ours.encode("fox"), bos]
    assert encode_prompt(ours, "fox") == [*front, *ours.encode("fox")]
    ours.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("fox")["input_ids"] == [*front, *ours.encode("fox")]


# -- SentencePiece --------------------------------------------------------------------------------------------


def pieces() -> tuple[list[str], list[int], list[float]]:
    """A SentencePiece vocabulary as models have it: unk, bos, eos, bytes, merged pieces by rank, then characters."""
    words = re.findall(r"\w+|[^\w\s]", TEXT)
    counts: dict[str, int] = {}
    for word in words:
        for size in range(2, 6):
            for start in range(len(word) + 2 - size):
                piece = f"▁{word}"[start : start + size]
                counts[piece] = counts.get(piece, 0) + 1
    merged = sorted((piece for piece, count in counts.items() if count > 1), key=lambda piece: (-counts[piece], piece))
    characters = sorted({character for word in words for character in word if character.isascii()} | {"▁", "é"})
    merged = [piece for piece in merged if set(piece) <= set(characters)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters, "[user]"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(merged) + len(characters)), USER]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(characters))] + [0.0]
    return tokens, types, scores


def sentencepiece_keys(**more: Any) -> dict[str, Any]:
    tokens, types, scores = pieces()
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores} | more
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def join_best(text: str, prefix: bool) -> list[int]:
    """SentencePiece's BPE as its paper and its source have it: join the neighbours whose text has the best score."""
    tokens, types, scores = pieces()
    score_of = {token: scores[i] for i, token in enumerate(tokens) if types[i] == NORMAL}
    symbols = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        pairs = [(score_of[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in score_of]
        if not pairs:
            break
        i = -max(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids = {token: i for i, token in enumerate(tokens)}
    return [
        id_
        for symbol in symbols
        for id_ in ([ids[symbol]] if symbol in score_of else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_joins_what_its_algorithm_joins(prefix: bool) -> None:
    ours = made(sentencepiece_keys(add_space_prefix=prefix))
    for text in [*SAMPLES, *TEXT.split(), "the fox ran over the hill " * 3, "aaaa bbb ooooo"]:
        assert ours.encode(text) == join_best(text, prefix), text
        assert ours.decode(ours.encode(text)) == text.replace("▁", " "), "SentencePiece's own blind spot"
    assert len(ours.encode("the fox ran over the hill")) < 15
    assert (ours.bos_id, ours.eos_id, ours.prefix_id) == (1, 2, 1), "ids that llama.cpp takes where none are named"


@given(text=st.text(alphabet="the foxran1é 👋▁", max_size=40))
@settings(max_examples=150)
def test_any_text_is_joined_like_sentencepiece(text: str) -> None:
    global _spm
    if _spm is None:
        _spm = made(sentencepiece_keys())
    assert _spm.encode(text) == join_best(text, True)


_spm: Tokenizer | None = None


def test_the_order_of_scores_decides() -> None:
    tokens, types = ["a", "b", "c", "ab", "bc"], [NORMAL] * 5
    assert merges_of(tokens, types, [0, 0, 0, -1, -2]) == [("a", "b"), ("b", "c")]
    assert merges_of(tokens, types, [0, 0, 0, -2, -1]) == [("b", "c"), ("a", "b")]
    assert merges_of(tokens, [1, 1, 1, CONTROL, 1], [0, 0, 0, -1, -2]) == [("b", "c")], (
        "no text joins to a control token"
    )


def test_sentencepiece_marks_its_tokens() -> None:
    ours = made(sentencepiece_keys())
    assert ours.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    last = ours.vocab_size - 1
    assert ours.encode("a[user]")[-1] == last
    assert not {0, 1, 2} & set(ours.encode("<s> </s> <unk>"))
    assert ours.encode("<0x41>") != [ours.encode("A")[-1]] and len(ours.encode("<0x41>")) > 1, "a byte is no text"


# -- there and back -------------------------------------------------------------------------------------------


def same(ours: Tokenizer, again: Tokenizer) -> None:
    for text in SAMPLES:
        ids = ours.encode(text)
        assert again.encode(text) == ids and again.decode(ids) == ours.decode(ids), text
    for name in (
        "special_tokens",
        "bos_id",
        "eos_id",
        "pad_id",
        "prefix_id",
        "stop_ids",
        "chat_template",
        "vocab_size",
    ):
        assert getattr(again, name) == getattr(ours, name), name


def test_a_tokenizer_that_we_trained_comes_back(own: Tokenizer) -> None:
    keys = to_gguf(own, rows=own.vocab_size)
    assert keys["tokenizer.ggml.pre"] == "smollm"
    same(own, made(keys))
    assert made(keys)._fast is not None, "and is as fast"


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_tokenizers_come_back(pre: str) -> None:
    bos = {"bos_token_id": 1, "eos_token_id": 2} if pre != "llama-bpe" else {}
    keys = keys_of(byte_level(pre), pre, **bos)
    ours = made(keys)
    again = to_gguf(ours, rows=ours.vocab_size)
    assert {key: again[key] for key in keys} == keys
    same(ours, made(again))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers_come_back(prefix: bool) -> None:
    ours = made(sentencepiece_keys(add_space_prefix=prefix, padding_token_id=0))
    keys = to_gguf(ours, rows=ours.vocab_size)
    for name in ("tokens", "token_type", "model"):
        assert keys[f"tokenizer.ggml.{name}"] == sentencepiece_keys()[f"tokenizer.ggml.{name}"]
    same(ours, made(keys))


def test_rows_without_a_token_are_unused_ones(own: Tokenizer) -> None:
    keys = to_gguf(own, rows=own.vocab_size + 3)
    assert keys["tokenizer.ggml.token_type"][-4:] == [NORMAL, UNUSED, UNUSED, UNUSED]
    again = made(keys)
    assert again.vocab_size == own.vocab_size + 3 and again.encode(TEXT) == own.encode(TEXT)


def test_the_token_that_ends_an_answer_is_named(own: Tokenizer) -> None:
    keys = to_gguf(own, rows=own.vocab_size)
    assert [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")] == list(own.stop_ids)
    assert "tokenizer.ggml.eom_token_id" not in keys


def test_further_ends_go_along(own: Tokenizer) -> None:
    more = Tokenizer(own._text, own._config, end_ids=[9])
    again = made(to_gguf(more, rows=own.vocab_size))
    assert again.stop_ids == more.stop_ids == (*own.stop_ids, 9)
    assert pickle.loads(pickle.dumps(more)).stop_ids == more.stop_ids
    with pytest.raises(DataError, match=r"tokenizer\.ggml\.eot_token_id is 10000000, and there are"):
        made(to_gguf(own, rows=own.vocab_size) | {"tokenizer.ggml.eot_token_id": 10**7})


def test_the_usual_spellings_of_a_pre_type_are_known(tmp_path: Path) -> None:
    """Folders of others: Digits spelt as a split, or a Sequence of one."""
    hf = byte_level("smollm")
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert to_gguf(Tokenizer.load(write(tmp_path / "a", hf)), rows=600)["tokenizer.ggml.pre"] == "smollm"
    hf.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)])
    assert to_gguf(Tokenizer.load(write(tmp_path / "b", hf)), rows=600)["tokenizer.ggml.pre"] == "gpt-2"
    same_ids = Tokenizer.load(
        write(tmp_path / "c", llama3())
    )  # does not ignore merges, but each token is what they make
    assert to_gguf(same_ids, rows=700)["tokenizer.ggml.pre"] == "llama-bpe"


# -- what is refused ------------------------------------------------------------------------------------------

SMALL = {"tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"], "model": "gpt2", "pre": "gpt-2"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; only 'gpt2' (byte-level BPE) and 'llama'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', which is unknown"),
        ({"pre": "smolm"}, "did you mean smollm"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"tokens": ["a", "b", "ab", "a"], "token_type": [1] * 4}, "has 'a' twice, as 0 and 3"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries and tokenizer.ggml.tokens 3"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b", "b a"]}, "tokenizer.ggml.merges has 'b a' at 1, which joins no two tokens to one"),
        ({"merges": ["ab"]}, "has 'ab' at 0"),
        ({"bos_token_id": 3}, "tokenizer.ggml.bos_token_id is 3, and there are 3 tokens"),
        ({"model": "llama", "scores": None}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "tokens": ["a", "ab", "c"], "scores": [0.0] * 3}, "has 'ab' and not its character 'b'"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores has 1 entries and tokenizer.ggml.tokens 3"),
    ],
    ids=str,
)
def test_keys_that_we_cannot_read_are_named(keys: dict[str, Any], words: str) -> None:
    table = {f"tokenizer.ggml.{name}": value for name, value in (SMALL | keys).items() if value is not None}
    with pytest.raises(DataError, match=re.escape(words)):
        from_gguf(table, origin="m.gguf")


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_a_file_may_have_no_tokenizer(model: str | None) -> None:
    assert from_gguf({"tokenizer.ggml.model": model} if model else {}, origin="m.gguf") is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (unigram, "model.type 'Unigram' has no place"),
        (wordpiece, "model.type 'WordPiece' has no place"),
        (sentencepiece, "model.merges are not SentencePiece's"),
    ],
)
def test_kinds_that_a_gguf_file_cannot_hold_are_refused(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(words)):
        to_gguf(Tokenizer.load(write(tmp_path, make())), rows=2000)


def _edited(tmp_path: Path, hf: HF, **changes: Any) -> Tokenizer:
    description = json.loads(hf.to_str())
    for key, value in changes.items():
        inner, name = (
            (description["model"], key.removeprefix("model_")) if key.startswith("model_") else (description, key)
        )
        inner[name] = value
    return Tokenizer(json.dumps(description), {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalizer": {"type": "NFKC"}}, "pre_tokenizer and normalizer are none that a GGUF file has a name for"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
         "pre_tokenizer and normalizer are none"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer and normalizer are none"),
        ({"model_dropout": 0.1}, "model.dropout 0.1 has no place"),
    ],
)  # fmt: skip
def test_what_no_pre_type_does_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(words)):
        to_gguf(_edited(tmp_path, byte_level("gpt-2"), **changes), rows=600)


def test_an_added_token_that_swallows_spaces_is_refused(tmp_path: Path) -> None:
    hf = byte_level("gpt-2")
    hf.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    with pytest.raises(DataError, match="the added token '<mask>' has lstrip"):
        to_gguf(_edited(tmp_path, hf), rows=600)


def test_merges_that_are_heeded_here_and_ignored_there_are_refused_where_it_shows(tmp_path: Path) -> None:
    hf = llama3()
    description = json.loads(hf.to_str())
    vocab = description["model"]["vocab"] | {"zqzq": hf.get_vocab_size() + 5}
    with pytest.raises(DataError, match="the token 'zqzq' is not what the merges make of its text"):
        to_gguf(_edited(tmp_path, hf, model_vocab=vocab), rows=700)
