"""Tokenizers of encoders: WordPiece vocabularies, and the tokens that stand around a text."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from pellucid.errors import DataError
from pellucid.tokenizer.bpe import Tokenizer

VOCAB_FILE = "vocab.txt"

_SPECIAL = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


class Frame(NamedTuple):
    """The ids before and after those of a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def around(self, ids: list[int], *, most: int | None = None) -> list[int]:
        """The whole; with ``most``, the text is cut at its end so that there are no more ids in all."""
        if most is not None:
            ids = ids[: max(0, most - len(self.prefix) - len(self.suffix))]
        return [*self.prefix, *ids, *self.suffix]


def frame_of(tokenizer: Tokenizer) -> Frame:
    """What tokenizer.json's post-processor puts around one text, such as ``[CLS]`` and ``[SEP]``.

    Where it puts nothing: the beginning and the end of a document, as `Tokenizer.encode_document` has them.
    """
    raw = tokenizers.Tokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    raw.no_truncation()
    raw.no_padding()
    plain, whole = raw.encode("a", add_special_tokens=False).ids, raw.encode("a").ids
    if plain and plain != whole:
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return Frame(tuple(whole[:start]), tuple(whole[start + len(plain) :]))
    ends = tokenizer.prefix_id, tokenizer.eos_id
    prefix, suffix = (() if id_ is None else (id_,) for id_ in ends)
    return Frame(prefix, suffix)


def load_encoder_tokenizer(folder: Path) -> Tokenizer | None:
    """A folder's tokenizer.json, else the WordPiece tokenizer of its vocab.txt; None where there is neither.

    Raises:
        DataError: one of them is broken; names it.
    """
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.load(folder)
    if not (folder / VOCAB_FILE).is_file():
        return None
    return read_vocab(folder / VOCAB_FILE)


def read_vocab(path: Path) -> Tokenizer:
    """BERT's tokenizer of a vocab.txt: a token a line, its id the number of the line from 0.

    tokenizer_config.json beside it may set ``do_lower_case`` (default true), ``strip_accents``, ``tokenize_chinese_chars``
    and name the special tokens.
    """
    vocab = _vocab(path)
    config = _config(path.with_name("tokenizer_config.json"))
    named: dict[str, str] = {}
    for key, usual in _SPECIAL.items():
        value = config.get(key, usual)
        token = str(value["content"] if isinstance(value, dict) else value)
        if token in vocab:
            named[key] = token
        elif key in config or key not in ("pad_token", "mask_token"):  # which nothing here needs
            raise DataError(
                f"{path}: no line is {token!r}, the {key}; add it, or name another in tokenizer_config.json"
            )
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=named["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    cls, sep = named["cls_token"], named["sep_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
    )
    tokenizer.add_special_tokens(list(named.values()))
    return Tokenizer(tokenizer.to_str(), {"tokenizer_class": "BertTokenizer", **config, **named}, origin=str(path))


def _vocab(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if lines[-1] == "":
        lines.pop()
    vocab: dict[str, int] = {}
    for id_, token in enumerate(line.rstrip("\r") for line in lines):
        if token in vocab:
            raise DataError(
                f"{path}: line {id_ + 1} repeats {token!r} of line {vocab[token] + 1}; every token must differ"
            )
        vocab[token] = id_
    return vocab


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise DataError(f"{path} must hold a JSON object, got {type(table).__name__}")
    return {key: value for key, value in table.items() if key not in _SPECIAL or value is not None}
