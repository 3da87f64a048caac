"""Training, saving, loading and what a tokenizer promises, beside `tokenizers` and `transformers`."""

import hashlib
import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import TEXT, write
from tokenizers import Tokenizer as HF
from transformers import AutoTokenizer

from pellucid.errors import ConfigError, DataError, RequestError, StorageError
from pellucid.tokenizer import Tokenizer, train_bpe
from pellucid.tokenizer.bpe import LONG_TEXT, MIN_VOCAB_SIZE

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42"},
    {"role": "tool", "content": '{"x": 1}'},
    {"role": "user", "content": "  Thanks \n"},
]


def test_training_gives_the_promised_ids_and_round_trips_what_it_never_saw(own: Tokenizer) -> None:
    assert own.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert (own.bos_id, own.eos_id, own.pad_id, own.stop_ids) == (0, 0, 0, (0, 2))
    assert own.vocab_size == 480
    assert len(own.encode(TEXT)) < 0.6 * len(TEXT.encode())
    for text in ("", "\x00\x01", "ᚠᛇᚻ ꙮ 𓂀 \U0010ffff", " \t 9\n"):
        assert own.decode(own.encode(text)) == text


def test_each_digit_is_a_token_of_its_own(own: Tokenizer) -> None:
    digits = own.encode("1234567890")
    assert len(digits) == 10
    assert own.encode("x 12") == own.encode("x ") + digits[:2]


def test_training_twice_gives_the_same_file() -> None:
    assert train_bpe([TEXT], 280).sha256 == train_bpe(iter([TEXT]), 280).sha256 != train_bpe([TEXT], 281).sha256


def test_a_corpus_too_small_for_the_vocabulary_gives_a_smaller_one() -> None:
    assert train_bpe(["low lower lowest"], 5000).vocab_size < 300
    assert train_bpe([], 5000).vocab_size == MIN_VOCAB_SIZE
    assert train_bpe([], 5000).encode("é1") == train_bpe(["é1"], MIN_VOCAB_SIZE).encode("é1")


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size 258 is too small; it needs at least 259"):
        train_bpe([TEXT], 258)


def test_text_that_no_encoding_can_hold_is_refused_in_training_and_encoding(
    own: Tokenizer, foreign: dict[str, Path]
) -> None:
    with pytest.raises(DataError, match="U\\+D83D at character 2"):
        train_bpe(["ab\ud83d"], 300)
    for tokenizer in (own, Tokenizer.load(foreign["llama3"])):
        with pytest.raises(DataError, match="U\\+D83D at character 2"):
            tokenizer.encode("ab\ud83d")
        with pytest.raises(DataError, match="U\\+D83D at character 2"):
            tokenizer.encode_batch(["fine", "ab\ud83d"])


def test_a_document_has_one_beginning_and_one_end(own: Tokenizer, foreign: dict[str, Path]) -> None:
    assert own.encode_document("the fox") == [0, *own.encode("the fox"), 0]
    llama = Tokenizer.load(foreign["llama3"])
    ids = llama.encode_document("<|begin_of_text|>the fox")
    assert [ids.count(llama.special_tokens[f"<|{name}_of_text|>"]) for name in ("begin", "end")] == [1, 1]
    assert (ids[0], ids[-1]) == (llama.bos_id, llama.eos_id)


def test_ids_outside_the_vocabulary_are_refused(own: Tokenizer) -> None:
    for bad in (own.vocab_size, -1):
        with pytest.raises(RequestError, match=f"token id {bad} is outside the vocabulary of 480"):
            own.decode([5, bad])
        with pytest.raises(RequestError):
            own.token_of(bad)
    assert own.decode([]) == ""


def test_decoding_leaves_special_tokens_out_unless_asked(own: Tokenizer) -> None:
    ids = own.encode_document("hi")
    assert own.decode(ids) == "hi"
    assert own.decode(ids, skip_special=False) == "<|endoftext|>hi<|endoftext|>"


def test_what_is_saved_loads_equal_and_opens_alike_in_transformers(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path, model_max_length=256)
    again = Tokenizer.load(tmp_path)
    assert again.sha256 == own.sha256 == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id, auto.model_max_length) == (0, 0, 0, 256)
    assert len(auto) == own.vocab_size
    assert auto(TEXT).input_ids == own.encode(TEXT) == again.encode(TEXT)
    assert auto.decode(own.encode(TEXT)) == TEXT
    for prompt in (True, False):
        assert auto.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt) == again.render_chat(
            CHAT, add_generation_prompt=prompt
        )
        ids = auto.apply_chat_template(CHAT, add_generation_prompt=prompt)["input_ids"]
        assert (
            ids
            == own.encode_chat(CHAT, add_generation_prompt=prompt)
            == again.encode_chat(CHAT, add_generation_prompt=prompt)
        )


def test_loading_from_the_file_itself_and_through_pickle(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path)
    for copy in (Tokenizer.load(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(own))):
        assert copy.sha256 == own.sha256
        assert copy.encode_chat(CHAT) == own.encode_chat(CHAT)


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "unigram", "llama3"])
def test_foreign_folders_encode_and_decode_as_tokenizers_does(
    kind: str, foreign: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(foreign[kind])
    hf = HF.from_file(str(foreign[kind] / "tokenizer.json"))
    hf.no_truncation()
    hf.no_padding()
    ids = hf.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) > 50
    assert tokenizer.encode(TEXT) == ids
    assert tokenizer.encode_batch([TEXT, "", "fox"])[0] == ids
    assert tokenizer.decode(ids) == hf.decode(ids)
    assert tokenizer.vocab_size == max(hf.get_vocab().values()) + 1
    tokenizer.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (foreign[kind] / "tokenizer.json").read_bytes()
    assert Tokenizer.load(tmp_path).special_tokens == tokenizer.special_tokens


@pytest.mark.parametrize("kind", ["own", "wordpiece", "sentencepiece", "unigram", "llama3"])
def test_text_never_becomes_a_control_token_however_it_is_spelt(
    kind: str, own: Tokenizer, foreign: dict[str, Path]
) -> None:
    tokenizer = own if kind == "own" else Tokenizer.load(foreign[kind])
    unknown = {"[UNK]", "<unk>"}
    controls = {id_ for token, id_ in tokenizer.special_tokens.items() if token not in unknown}
    assert controls
    for token in tokenizer.special_tokens:
        for text in (token, f"a{token}b", f" {token} ", token * 3, token[0] + token):
            assert controls.isdisjoint(tokenizer.encode(text)), text
            assert controls.isdisjoint(tokenizer.encode_batch([text])[0]), text


def test_a_long_text_lets_other_threads_run_and_has_the_ids_of_a_short_one(foreign: dict[str, Path]) -> None:
    """A server tokenises what clients send while its other answers go on."""
    tokenizer = Tokenizer.load(foreign["llama3"])
    words = "the fox asked 12 hens; " * 400
    assert len(words) > LONG_TEXT > len("the fox asked 12 hens; ")
    hf = HF.from_str((foreign["llama3"] / "tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer.encode(words) == hf.encode(words, add_special_tokens=False).ids
    text, gaps, ended = words * 100, [0.0], threading.Event()

    def tick() -> None:
        while not ended.is_set():
            began = time.monotonic()
            time.sleep(0.001)
            gaps.append(time.monotonic() - began)

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.monotonic()
    tokenizer.encode(text)
    seconds = time.monotonic() - began
    ended.set()
    ticking.join()
    assert seconds > 0.05 and max(gaps) < seconds / 2  # held back, the other thread would have had one long gap


def test_a_token_named_in_the_config_is_a_control_token_though_the_vocabulary_calls_it_plain(
    foreign: dict[str, Path], tmp_path: Path
) -> None:
    hf = HF.from_file(str(foreign["llama3"] / "tokenizer.json"))
    hf.add_tokens(["<|stop|>", "<tool>"])
    tokenizer = Tokenizer.load(write(tmp_path, hf, eos_token="<|stop|>"))
    assert tokenizer.eos_id == hf.token_to_id("<|stop|>")
    assert tokenizer.eos_id not in tokenizer.encode("a<|stop|>")
    assert tokenizer.encode("<tool>") == [hf.token_to_id("<tool>")]  # an ordinary word of this vocabulary
    assert tokenizer.decode([tokenizer.eos_id]) == ""


def test_a_tokenizer_json_alone_finds_its_usual_beginning_and_end(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    alone = Tokenizer.load(tmp_path)
    assert (alone.bos_id, alone.eos_id, alone.pad_id, alone.chat_template) == (0, 0, None, None)


def test_a_template_file_wins_over_the_config_and_survives_saving(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    changed = Tokenizer.load(tmp_path / "a")
    changed.save(tmp_path / "b")
    for tokenizer in (changed, Tokenizer.load(tmp_path / "b")):
        assert tokenizer.render_chat([{"role": "user", "content": "hey"}]) == "hey!"
    own.save(tmp_path / "a")
    assert Tokenizer.load(tmp_path / "a").chat_template == own.chat_template


def with_config(own: Tokenizer, folder: Path, **config: Any) -> Path:
    own.save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_named_templates_take_the_default(own: Tokenizer, tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert Tokenizer.load(with_config(own, tmp_path / "a", chat_template=templates)).chat_template == "D"
    assert Tokenizer.load(with_config(own, tmp_path / "b", chat_template=templates[:1])).chat_template == "T"
    with pytest.raises(DataError, match='tool_use, rag is named "default"'):
        Tokenizer.load(with_config(own, tmp_path / "c", chat_template=[templates[0], {"name": "rag", "template": "R"}]))
    with pytest.raises(DataError, match=r"chat_template in tokenizer_config.json must be text"):
        Tokenizer.load(with_config(own, tmp_path / "d", chat_template=3))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", "no such tokenizer folder"),
        ("README", b"", "has no tokenizer.json; give a folder"),
        ("tokenizer.model", b"\x00", "SentencePiece.*save_pretrained"),
        ("tokenizer.pkl", b"\x80\x04.", "a pickle, which is never loaded"),
        ("tokenizer.json", b"\x80\x04\x95\xff.", "tokenizer.json is not text"),
        ("tokenizer.json", b'{"model": {', "tokenizer.json is not valid JSON.*damaged"),
        ("tokenizer.json", b"[" * 100_000, "tokenizer.json is not valid JSON"),
        ("tokenizer.json", b"[1, 2]", "must hold a JSON object, got list"),
        ("tokenizer.json", b'{"vocab": {}}', "is JSON but no tokenizer"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE"}}', "cannot be read by tokenizers"),
        (
            "tokenizer.json",
            b'{"version": "9.0", "model": {"type": "New"}}',
            "cannot be read by tokenizers",
        ),
        ("tokenizer_config.json", b"{}", "has no tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_an_error_that_names_the_file(
    tmp_path: Path, name: str | None, content: bytes, message: str
) -> None:
    folder = tmp_path / "model"
    if name is not None:
        folder.mkdir()
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){folder}.*{message}" if "SentencePiece" not in message else message):
        Tokenizer.load(folder)


def test_a_broken_config_and_a_token_that_does_not_exist_are_named(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"names bos_token \['a'\], which the vocabulary lacks; add it"):
        Tokenizer.load(with_config(own, tmp_path, bos_token=["a"]))
    with pytest.raises(DataError, match="names eos_token '<end>', which the vocabulary lacks; add it"):
        Tokenizer.load(with_config(own, tmp_path, eos_token={"content": "<end>"}))


def test_a_folder_that_cannot_be_written_is_a_storage_error(own: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/x: the tokenizer cannot be written"):
        own.save(tmp_path / "file" / "x")
