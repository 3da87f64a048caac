"""Our own byte-level BPE on `tiktoken`: the ids of `tokenizers`, several times as fast.

Why the ids are equal. Both libraries cut text into pieces and merge each piece, lowest rank first, leftmost on ties.

*Merging.* `tokenizers` may join two neighbours only if that pair is a merge; `tiktoken` joins any two whose bytes
are a token. A first difference would need neighbours x, y that are not the merge of token xy while every merge below
xy's rank is done. What happens inside the bytes xy does not depend on what stands around them as long as nothing
crosses their borders, so the bytes xy alone would then also stop at x, y and `tokenizers` would not encode the token
xy as itself. `FastEncoder.build` encodes every token once and declines where one does not come back.

*Cutting.* The one pattern below does what Digits and then ByteLevel do. The two regex engines may carry different
versions of Unicode; characters are compared when first seen (`_classify`), and text with one they class differently
is left to `tokenizers`, as is a run of white space long enough to overflow the matcher's stack.
"""

import re
from functools import cache
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""GPT-2's split with each numeric character a piece of its own. Digits cuts first, so white space before a digit
ends its piece: the look-ahead treats a digit like the end of the text."""

PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}

_SPACE_STRIDE = 500
_LONG_SPACE = re.compile(r"\s{100}")
"""Finds, among every 500th character, any run of 50,500 white-space characters; the matcher holds 1,000,000."""

_UNSEEN, _AGREED, _DISPUTED = 0, 1, 2


class FastEncoder:
    """Encodes with `tiktoken`; made by `build`, which declines what it cannot prove equal to `tokenizers`."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        encoding = tiktoken.Encoding("pellucid", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._encode = encoding.encode_ordinary

    @classmethod
    def build(cls, description: dict[str, Any]) -> "FastEncoder | None":
        """The encoder for a parsed tokenizer.json, or None if that is not of our own kind."""
        if not _is_own_kind(description):
            return None
        ranks = _ranks(description)
        if ranks is None or not _every_token_encodes_to_itself(description["model"]):
            return None
        return cls(ranks) if _engines_agree("".join(map(chr, range(128)))) else None

    def encode(self, text: str) -> list[int] | None:
        """The ids, or None where only `tokenizers` is known to be right. UnicodeEncodeError: a lone surrogate."""
        if not text.isascii() and not _engines_agree(text):
            return None
        if len(text) > 100 * _SPACE_STRIDE and _LONG_SPACE.search(text[::_SPACE_STRIDE]):
            return None
        return self._encode(text)


@cache
def byte_symbols() -> dict[str, int]:
    """The printable character by which byte-level vocabularies write each byte -> that byte.

    Source: Radford et al. 2019, the GPT-2 encoder: printable Latin-1 stands for itself, the rest follows from 256 on.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


# -- is this tokenizer ours, and is the other library's BPE the same on it? ---------------------------------------


def _is_own_kind(description: dict[str, Any]) -> bool:
    model = description["model"]
    neutral = (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    )
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in neutral)
        and description.get("normalizer") is None
        and description.get("pre_tokenizer") == PRE_TOKENIZER
        and all(token["special"] for token in description["added_tokens"])
    )


def _ranks(description: dict[str, Any]) -> dict[bytes, int] | None:
    """Token bytes -> id, None unless each merge makes a new token from earlier ones and ids rise with the merges."""
    vocab, symbols = description["model"]["vocab"], byte_symbols()
    if not symbols.keys() <= vocab.keys():
        return None
    known = set(symbols)
    special = {token["content"] for token in description["added_tokens"]}
    last = -1
    for left, right in _pairs(description["model"]):
        token = left + right
        if (
            left not in known
            or right not in known
            or token in known
            or token in special
            or vocab.get(token, -1) <= last
        ):
            return None
        known.add(token)
        last = vocab[token]
    return {bytes(symbols[symbol] for symbol in token): vocab[token] for token in known}


def _pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]


def _every_token_encodes_to_itself(model: dict[str, Any]) -> bool:
    merges = _pairs(model)
    bare = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges))
    tokens = [left + right for left, right in merges]
    encodings = bare.encode_batch_fast(tokens, add_special_tokens=False)
    return all(encoding.ids == [model["vocab"][token]] for token, encoding in zip(tokens, encodings, strict=True))


# -- do both regex engines class these characters alike? ----------------------------------------------------------

_verdicts: NDArray[np.uint8] = np.zeros(0x110000, dtype=np.uint8)
"""What is known of each code point, in this process. Only ever goes from unseen to a final verdict."""


def _engines_agree(text: str) -> bool:
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    found = _verdicts[points]
    if not found.all():
        _classify("".join(map(chr, np.unique(points[found == _UNSEEN]))))
        found = _verdicts[points]
    return bool((found == _AGREED).all())


def _classify(characters: str) -> None:
    """Records whether letter, number and white space mean the same to both libraries for these characters."""
    disputed: set[str] = set()
    for kind in (r"\p{L}", r"\p{N}", r"\s"):
        theirs, ours = _probes(kind)
        there = set(theirs.normalize_str(characters))
        disputed |= there ^ set(ours.decode(ours.encode_ordinary(characters)))
        if kind == r"\p{N}":
            # Digits asks Rust's standard library, ByteLevel the regex: all three must say the same.
            padded = f"a{'a'.join(characters)}a"
            pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(padded)
            disputed |= there ^ {piece for piece, _ in pieces if len(piece) == 1 and piece != "a"}
    for character in characters:
        _verdicts[ord(character)] = _DISPUTED if character in disputed else _AGREED


@cache
def _probes(kind: str) -> tuple[normalizers.Normalizer, tiktoken.Encoding]:
    """Two filters that keep exactly the characters of a class: by `tokenizers`' regex engine and by `tiktoken`'s."""
    theirs = normalizers.Replace(Regex(rf"[^{kind}]"), "")
    ours = tiktoken.Encoding(
        kind, pat_str=kind, mergeable_ranks={bytes([byte]): byte for byte in range(256)}, special_tokens={}
    )
    return theirs, ours
