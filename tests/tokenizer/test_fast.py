"""The fast encoder against `tokenizers` itself, and that it is really the one that answers."""

import json
import random
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_kinds import TEXT
from tokenizers import Tokenizer as HF

from pellucid.errors import DataError
from pellucid.tokenizer import Tokenizer, fast, train_bpe
from pellucid.tokenizer.fast import FastEncoder

FRAGMENTS = [
    *" \t\n\x0b\x0c\x1c\x1f\x85\xa0\u1680\u180e\u2003\u2028\u3000\u200b\ufeff", *"07\x00\x7f\ud7ff\ue000\ufffd\uffff\U0010ffff",
    *"12½²Ⅷ٣१𝟘一aZéßяשعकก你あ한_'", "  ", "\r\n", "e\u0301", "👋🏽", "👨‍👩‍👧", "🇫🇷",
    "'s", "'ll", "'LL", "’s", "don't", "--", "...", "<|im_end|>",
]  # fmt: skip


def expected(hf: HF, text: str) -> list[int]:
    ids: list[int] = hf.encode(text, add_special_tokens=False).ids
    return ids


def description_of(hf: HF) -> dict[str, Any]:
    return json.loads(hf.to_str())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def encoder(reference: HF) -> FastEncoder:
    built = FastEncoder.build(description_of(reference))
    assert built is not None
    return built


texts = st.one_of(
    st.text(),
    st.lists(st.sampled_from(FRAGMENTS), max_size=60).map("".join),
    st.lists(st.tuples(st.sampled_from(FRAGMENTS), st.integers(1, 40)), max_size=12).map(
        lambda x: "".join(c * n for c, n in x)
    ),
    st.binary(max_size=200).map(lambda data: data.decode("utf-8", "replace")),
    st.binary(max_size=200).map(lambda data: data.decode("latin-1")),
)


@settings(max_examples=600, deadline=None)
@given(text=texts)
@example(text="  1")
@example(text=" \n 12 x")
@example(text="a  b   1  ")
@example(text="it's 'tis '1 's1 ''s")
@example(text="\u30001\u3000x")
def test_ids_equal_those_of_tokenizers_on_any_text(own: Tokenizer, reference: HF, text: str) -> None:
    ids = own.encode(text)
    assert ids == expected(reference, text)
    assert own.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60))
def test_invalid_utf8_kept_as_surrogates_is_refused_and_all_other_text_is_not(
    own: Tokenizer, reference: HF, data: bytes
) -> None:
    text = data.decode("utf-8", "surrogateescape")
    if any("\ud800" <= character <= "\udfff" for character in text):
        with pytest.raises(DataError, match="lone surrogate U\\+DC"):
            own.encode(text)
    else:
        assert own.encode(text) == expected(reference, text)


def in_contexts(points: list[int]) -> str:
    return "".join(f"{chr(p)}a {chr(p)}1{chr(p)}  {chr(p)}'s" for p in points)


def compare_code_points(encoder: FastEncoder, reference: HF, points: list[int]) -> None:
    agreed = [p for p in points if fast._engines_agree(chr(p))]
    assert len(points) - len(agreed) < 100, (
        "the engines' versions of Unicode are far apart: is the comparison of classes right?"
    )
    for start in range(0, len(agreed), 500):
        text = in_contexts(agreed[start : start + 500])
        assert encoder.encode(text) == expected(reference, text), f"near U+{agreed[start]:04X}"


def test_assigned_code_points_of_every_script_give_the_same_ids_in_every_context(
    encoder: FastEncoder, reference: HF
) -> None:
    points = [p for p in range(0x32000) if unicodedata.category(chr(p)) not in ("Cs", "Cn", "Co")]
    fast._engines_agree("".join(map(chr, points)))
    points = [p for p in points if p % 16 == 0 or not (0x3400 <= p < 0xD7A4 or 0x17000 <= p < 0x19000 or p >= 0x20000)]
    compare_code_points(
        encoder, reference, points + list(range(0xE0000, 0xE0200)) + list(range(0xE000, 0x110000, 1009))
    )


@pytest.mark.slow
def test_every_code_point_gives_the_same_ids_in_every_context(encoder: FastEncoder, reference: HF) -> None:
    points = [p for p in range(sys.maxunicode + 1) if not 0xD800 <= p < 0xE000]
    fast._engines_agree("".join(map(chr, points)))
    compare_code_points(encoder, reference, points)


def test_characters_that_the_engines_class_differently_are_left_to_tokenizers(
    own: Tokenizer, reference: HF, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = fast._verdicts.copy()
    verdicts[ord("ẞ")] = fast._DISPUTED
    monkeypatch.setattr(fast, "_verdicts", verdicts)
    encoder = FastEncoder.build(description_of(reference))
    assert encoder is not None
    assert encoder.encode("STRAẞE 1") is None
    assert encoder.encode("STRASSE 1") is not None
    assert own.encode("STRAẞE 1") == expected(reference, "STRAẞE 1")


def test_a_disagreement_between_engines_is_found_when_a_character_is_first_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs, ours = fast._probes(r"\p{N}")
    without_five = fast.tiktoken.Encoding(
        "x", pat_str="[0-46-9]", mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={}
    )
    monkeypatch.setattr(fast, "_verdicts", fast._verdicts * 0)
    monkeypatch.setattr(fast, "_probes", lambda kind: (theirs, without_five) if kind == r"\p{N}" else (theirs, ours))
    assert fast._engines_agree("0123")
    assert not fast._engines_agree("4567")
    assert fast._engines_agree("0123467")


@pytest.mark.parametrize("unit", ["a", " \n", "é", "\u3000", "1"])
def test_a_megabyte_without_a_break_is_encoded_alike_and_in_time(own: Tokenizer, reference: HF, unit: str) -> None:
    text = unit * ((300_000 if unit == "1" else 1_000_000) // len(unit.encode())) + "x"
    assert own.encode(text) == expected(reference, text)


def test_white_space_just_below_the_limit_does_not_overflow_the_matcher(encoder: FastEncoder, reference: HF) -> None:
    text = "a" + " " * 49_400 + "b"
    assert encoder.encode(text) == expected(reference, text)
    assert encoder.encode("a" + " " * 60_000 + "b") is None


def test_a_vocabulary_whose_merges_a_byte_merger_would_see_differently_is_declined(reference: HF) -> None:
    description = description_of(reference)
    vocab = {token: id_ for token, id_ in description["model"]["vocab"].items() if len(token) == 1}
    for pair in (merges := [["b", "c"], ["a", "b"], ["ab", "c"]]):
        vocab["".join(pair)] = len(vocab) + 10
    description["model"] |= {"vocab": vocab, "merges": merges}
    hf = HF.from_str(json.dumps(description))
    assert expected(hf, "abc") == [vocab["a"], vocab["bc"]], "tiktoken would say abc here"
    assert FastEncoder.build(description) is None
    description["model"]["merges"] = merges[:2]
    assert FastEncoder.build(description) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}},
        {"model": {"dropout": 0.1}},
        {"model": {"ignore_merges": True}},
        {"added_tokens": [{"id": 0, "content": "the", "special": False}]},
    ],
)
def test_only_our_own_kind_is_encoded_fast(reference: HF, change: dict[str, Any]) -> None:
    description = description_of(reference)
    for key, value in change.items():
        description[key] = description[key] | value if key == "model" else value
    assert FastEncoder.build(description) is None


def test_random_vocabularies_of_repetitive_text_agree() -> None:
    rng = random.Random(0)
    for _ in range(25):
        alphabet = rng.choice(["ab", "a- ", "aé世", "-=|#", " \n\tx"])

        def draw(size: int, alphabet: str = alphabet) -> str:
            return "".join(rng.choice(alphabet) * rng.choice([1, 1, 2, 3, 5, 8, 13]) for _ in range(size))

        tokenizer = train_bpe([draw(200) for _ in range(10)], rng.choice([300, 600, 2000]))
        assert tokenizer._fast is not None
        for text in (draw(300) for _ in range(10)):
            assert tokenizer._fast.encode(text) == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


def test_batches_and_threads_give_the_ids_of_single_texts(own: Tokenizer) -> None:
    batch = [TEXT[i : i + 40] for i in range(0, len(TEXT), 40)]
    single = [own.encode(text) for text in batch]
    assert own.encode_batch(batch) == own.encode_batch(batch, num_threads=2) == single
    assert own.encode_batch([]) == []


def test_digits_stay_apart_even_where_the_vocabulary_joins_them(reference: HF) -> None:
    description = description_of(reference)
    vocab = {token: id_ for token, id_ in description["model"]["vocab"].items() if len(token) == 1}
    for pair in (merges := [["1", "2"], ["Ġ", "1"], ["Ġ", "Ġ"], ["A", "1"]]):
        vocab["".join(pair)] = len(vocab) + 10
    description["model"] |= {"vocab": vocab, "merges": merges}
    encoder, hf = FastEncoder.build(description), HF.from_str(json.dumps(description))
    assert encoder is not None
    for text in ("12", " 1", "  1", "A1", "   12  A"):
        assert encoder.encode(text) == expected(hf, text)
    assert encoder.encode("12") == [vocab["1"], vocab["2"]]
