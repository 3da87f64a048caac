"""Streaming gives exactly what decoding everything gives, as soon as it may."""

import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import FOREIGN, TEXT, sentencepiece, write
from tokenizers import decoders

from pellucid.errors import RequestError
from pellucid.tokenizer import Tokenizer
from pellucid.tokenizer.stream import IncrementalDecoder


@pytest.fixture(scope="module")
def every(own: Tokenizer, foreign: dict[str, Path]) -> dict[str, Tokenizer]:
    return {"own": own} | {name: Tokenizer.load(folder) for name, folder in foreign.items()}


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
    return [*(decoder.push(id_) for id_ in ids), decoder.finish()]


@pytest.mark.parametrize("kind", ["own", *FOREIGN])
def test_text_streams_to_what_decoding_gives(kind: str, every: dict[str, Tokenizer]) -> None:
    tokenizer = every[kind]
    for text in (TEXT, " leading", "   three", "▁", "", " ", "👋🏽", "a👋🏽 b"):
        ids = tokenizer.encode_document(text)
        for skip in (True, False):
            assert "".join(streamed(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("kind", ["own", *FOREIGN])
def test_any_ids_stream_to_what_decoding_gives(kind: str, every: dict[str, Tokenizer]) -> None:
    tokenizer, rng = every[kind], random.Random(kind)
    size = tokenizer.vocab_size
    kinds = [range(size), range(min(300, size)), range(max(0, size - 256), size)]
    for _ in range(600):
        ids = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(0, 40))]
        skip = rng.random() < 0.5
        assert "".join(streamed(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip), ids


@settings(max_examples=400, deadline=None)
@given(data=st.binary(max_size=40))
def test_any_bytes_stream_without_half_characters(own: Tokenizer, every: dict[str, Tokenizer], data: bytes) -> None:
    own_bytes = [own._tokenizer.token_to_id(symbol) for symbol in map(SYMBOLS.__getitem__, data)]
    fallback = every["sentencepiece"]
    for tokenizer, ids in (
        (own, own_bytes),
        (fallback, [fallback._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]),
    ):
        parts = streamed(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids)
    assert "".join(streamed(own, own_bytes)) == data.decode("utf-8", "replace")


def _symbols() -> list[str]:
    from pellucid.tokenizer.fast import byte_symbols

    return [symbol for symbol, _ in sorted(byte_symbols().items(), key=lambda item: item[1])]


SYMBOLS = _symbols()


def test_a_character_comes_with_its_last_byte_and_words_come_at_once(every: dict[str, Tokenizer]) -> None:
    own = every["own"]
    ids = [own._tokenizer.token_to_id(SYMBOLS[byte]) for byte in "x👋y".encode()]
    assert streamed(own, ids) == ["x", "", "", "", "👋", "y", ""]
    for kind in ("wordpiece", "unigram", "sentencepiece", "llama3"):
        tokenizer = every[kind]
        parts = streamed(tokenizer, tokenizer.encode("the fox ran over"))
        assert parts[-1] == "" and sum(bool(part) for part in parts) >= 4, kind


def test_the_cost_of_a_token_does_not_grow_with_the_text(every: dict[str, Tokenizer]) -> None:
    for kind, tokenizer in every.items():
        decoder = IncrementalDecoder(tokenizer)
        ids = tokenizer.encode(TEXT) * 40

        def seconds(ids: list[int], decoder: IncrementalDecoder = decoder) -> float:
            start = time.perf_counter()
            for id_ in ids:
                decoder.push(id_)
            return time.perf_counter() - start

        seconds(ids[:1000])
        first = min(seconds(ids[:2000]) for _ in range(3))
        seconds(ids)
        last = min(seconds(ids[:2000]) for _ in range(3))
        assert last < 5 * first + 0.01, kind


def test_a_decoder_that_we_do_not_know_gives_its_text_at_the_end(tmp_path: Path) -> None:
    hf = sentencepiece()
    hf.decoder = decoders.BPEDecoder("▁")
    tokenizer = Tokenizer.load(write(tmp_path, hf))
    ids = tokenizer.encode("the fox ran")
    parts = streamed(tokenizer, ids)
    assert parts[-1] == tokenizer.decode(ids) != ""
    assert set(parts[:-1]) == {""}


def test_a_finished_decoder_starts_anew_and_refuses_foreign_ids(own: Tokenizer) -> None:
    decoder = IncrementalDecoder(own)
    half = own._tokenizer.token_to_id(SYMBOLS[0xF0])
    assert (decoder.push(half), decoder.finish(), decoder.finish()) == ("", "\ufffd", "")
    assert decoder.push(own.encode("a")[0]) == "a"
    with pytest.raises(RequestError):
        decoder.push(own.vocab_size)


@pytest.mark.parametrize("kind", ["own", *FOREIGN])
def test_tokens_whose_text_is_held_back_are_counted(kind: str, every: dict[str, Tokenizer]) -> None:
    tokenizer, rng = every[kind], random.Random(kind)
    special = set(tokenizer.special_tokens.values())
    ids = [i for i in range(tokenizer.vocab_size) if i not in special]
    for _ in range(200):
        decoder, drawn, text = IncrementalDecoder(tokenizer), [], ""
        for _ in range(rng.randint(1, 12)):
            drawn.append(rng.choice(ids) if rng.random() < 0.5 else ids[-1 - rng.randrange(min(256, len(ids)))])
            text += decoder.push(drawn[-1])
            told = drawn[: len(drawn) - decoder.num_held]
            assert text.startswith(tokenizer.decode(told).rstrip("\ufffd")), (drawn, decoder.num_held)
            if not decoder.num_held:
                assert text == tokenizer.decode(drawn)
        decoder.finish()
        assert decoder.num_held == 0


def test_of_two_tokens_that_share_a_character_both_are_held_back(own: Tokenizer) -> None:
    decoder = IncrementalDecoder(own)
    bytes_ = [own._tokenizer.token_to_id(SYMBOLS[byte]) for byte in "x👋".encode()]
    held = [(decoder.push(id_), decoder.num_held) for id_ in bytes_]
    assert held == [("x", 0), ("", 1), ("", 2), ("", 3), ("👋", 0)]


@pytest.mark.parametrize("kind", ["own", *FOREIGN])
def test_the_bytes_of_tokens_make_the_text(kind: str, every: dict[str, Tokenizer]) -> None:
    tokenizer = every[kind]
    decoder = IncrementalDecoder(tokenizer)
    ids = tokenizer.encode("the fox ran 👋🏽 over Größe")
    text = b"".join(decoder.token_bytes(id_) for id_ in ids).decode("utf-8", "replace")
    assert text.strip() == tokenizer.decode(ids, skip_special=False).strip()
    for token, id_ in tokenizer.special_tokens.items():
        assert decoder.token_bytes(id_).decode().strip() == token
    with pytest.raises(RequestError):
        decoder.token_bytes(tokenizer.vocab_size)


def test_a_text_that_goes_on_keeps_the_space_that_a_beginning_loses(every: dict[str, Tokenizer]) -> None:
    tokenizer = every["sentencepiece"]
    before, after = tokenizer.encode("the fox"), tokenizer.encode("ran over")
    for prompt in (before, [*before, *(tokenizer._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "東".encode())]):
        decoder = IncrementalDecoder(tokenizer)
        decoder.follow(prompt)
        assert "".join([*map(decoder.push, after), decoder.finish()]) == " ran over"
    own_decoder = IncrementalDecoder(every["own"])
    own_decoder.follow(every["own"].encode("the"))
    assert own_decoder.push(every["own"].encode("x")[0]) == "x"
