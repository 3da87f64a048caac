"""The tokenizer in a GGUF file's ``tokenizer.*`` keys as ours; `gguf_write` goes the other way.

Two kinds. "gpt2" is byte-level BPE: tokens and merges stand in the file, and a *pre-type* names how text is cut before
merging. "llama" is SentencePiece BPE: tokens and scores; any two neighbours whose text is a token may join, the best
score first, which is a BPE with a merge for each way to cut each token, in the order of the scores.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pellucid.errors import DataError
from pellucid.registry import nearest
from pellucid.tokenizer.bpe import Tokenizer
from pellucid.tokenizer.fast import PRE_TOKENIZER

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of ``tokenizer.ggml.token_type``. A control token is never text, a user-defined one is cut out of text."""

NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Our names of special tokens -> the middle of ``tokenizer.ggml.*_token_id``."""
ENDS = ("eot", "eom")
"""Of ids that end a generation besides: of an assistant's turn, and of a message that others follow."""
_SENTENCEPIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
"""What "llama" takes where the file names none."""
_NO_TOKENIZER = (None, "none", "no_vocab")

Description = dict[str, Any]


def _byte_level(*, use_regex: bool) -> Description:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Description:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _split_then_bytes(digits: str) -> Description:
    """The split of Llama 3 and Qwen2, which differ in how many digits a piece may have."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    return {"type": "Sequence", "pretokenizers": [_split(pattern), _byte_level(use_regex=False)]}


@dataclass(frozen=True, slots=True)
class PreType:
    """How a pre-type treats text before merging."""

    pre_tokenizer: Description
    """As tokenizer.json has it."""
    normalizer: Description | None = None
    ignore_merges: bool = False
    """A piece that is a token is that token, whatever the merges would make of it."""
    add_bos: bool = False
    """Text begins with the beginning token where the file does not say."""
    same: tuple[Description, ...] = ()
    """Other pre_tokenizers that cut alike."""

    def fits(self, description: Description) -> bool:
        """Whether a tokenizer.json treats text so."""
        given = _essence(description.get("pre_tokenizer"))
        known = [_essence(pre_tokenizer) for pre_tokenizer in (self.pre_tokenizer, *self.same)]
        return given in known and _essence(description.get("normalizer")) == _essence(self.normalizer)


def _essence(step: Description | None) -> list[Any]:
    """Steps of a normalizer or pre_tokenizer without what changes offsets only."""
    if step is None:
        return []
    inner = step.get("pretokenizers", step.get("normalizers"))
    if inner is not None:
        return [part for item in inner for part in _essence(item)]
    if step["type"] == "ByteLevel":
        step = {"use_regex": True, **step, "trim_offsets": True}
    return [step]


_LLAMA3 = PreType(_split_then_bytes(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_DIGITS = {"type": "Sequence", "pretokenizers": [_split(r"\p{N}"), _byte_level(use_regex=True)]}
PRE_TYPES = {
    "gpt-2": PreType(_byte_level(use_regex=True)),
    "smollm": PreType(PRE_TOKENIZER, same=(_DIGITS,)),
    "llama-bpe": _LLAMA3,
    "qwen2": PreType(_split_then_bytes(r"\p{N}"), normalizer={"type": "NFC"}),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
"""Of "gpt2" tokenizers, by the value of ``tokenizer.ggml.pre``."""

PREFIX = {"type": "Prepend", "prepend": "▁"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPACES_BACK = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_PREFIX_OFF = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def from_gguf(metadata: Mapping[str, Any], *, origin: str) -> Tokenizer | None:
    """The tokenizer that a GGUF file's keys describe; None where the file has none.

    Args:
        origin: the file, for messages.

    Raises:
        DataError: another kind of tokenizer, a missing key, or keys that contradict each other; names the key.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in _NO_TOKENIZER:
        return None
    if kind not in ("gpt2", "llama"):
        raise DataError(
            f"{origin}: tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are read"
        )
    tokens: list[str] = _list(metadata, "tokens", str, origin)
    types = _types(metadata, tokens, origin)
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        second = next(id_ for id_, token in enumerate(tokens) if vocab[token] != id_)
        raise DataError(
            f"{origin}: tokenizer.ggml.tokens has {tokens[second]!r} twice, as {second} and {vocab[tokens[second]]}"
        )
    named = _named_tokens(metadata, tokens, {} if kind == "gpt2" else _SENTENCEPIECE_IDS, origin)
    make = _byte_level_bpe if kind == "gpt2" else _sentencepiece
    description, add_bos = make(metadata, tokens, types, named, origin)
    flags = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and "bos_token" in named,
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in named,
    }
    description["added_tokens"] = [
        _added_token(id_, token, type_) for id_, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    description["post_processor"] = _post_processor(named, vocab, **flags)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | named | flags
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    text = json.dumps(description, ensure_ascii=False, separators=(",", ":"))
    ends = [_id(metadata, middle, tokens, origin) for middle in ENDS]
    return Tokenizer(text, config, origin=origin, end_ids=[id_ for id_ in ends if id_ is not None])


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], named: dict[str, str], origin: str
) -> tuple[Description, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TYPES:
        what = "is missing: the file does not say how to cut text" if pre is None else f"is {pre!r}, which is unknown"
        raise DataError(
            f"{origin}: tokenizer.ggml.pre {what}{nearest(str(pre), list(PRE_TYPES))}; known: {', '.join(PRE_TYPES)}"
        )
    pre_type = PRE_TYPES[pre]
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    for number, merge in enumerate(_list(metadata, "merges", str, origin)):
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if left not in known or right not in known or left + right not in known:
            raise DataError(
                f"{origin}: tokenizer.ggml.merges has {merge!r} at {number}, which joins no two tokens to one"
            )
        merges.append((left, right))
    model = _bpe(tokens, merges) | {"ignore_merges": pre_type.ignore_merges}
    return _description(
        model, pre_type.normalizer, pre_type.pre_tokenizer, _byte_level(use_regex=True)
    ), pre_type.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], named: dict[str, str], origin: str
) -> tuple[Description, bool]:
    scores: list[float] = _list(metadata, "scores", (int, float), origin)
    if len(scores) != len(tokens):
        raise DataError(
            f"{origin}: tokenizer.ggml.scores has {len(scores):,} entries and tokenizer.ggml.tokens {len(tokens):,}"
        )
    _refuse_lost_characters(tokens, types, origin)
    model = _bpe(tokens, merges_of(tokens, types, scores))
    model |= {"byte_fallback": BYTE in types, "unk_token": named.get("unk_token"), "fuse_unk": True}
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizer = {"type": "Sequence", "normalizers": [PREFIX, SPACES] if prefixed else [SPACES]}
    decoder = {"type": "Sequence", "decoders": [*_SPACES_BACK, _PREFIX_OFF] if prefixed else _SPACES_BACK}
    return _description(model, normalizer, None, decoder), True


def merges_of(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that join what SentencePiece would, in its order: best score first, on a tie the lower id."""
    pieces = {token for token, type_ in zip(tokens, types, strict=True) if type_ == NORMAL}
    ranked = sorted((id_ for id_, type_ in enumerate(types) if type_ == NORMAL), key=lambda id_: -scores[id_])
    return [
        (token[:cut], token[cut:])
        for token in (tokens[id_] for id_ in ranked)
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]


def _refuse_lost_characters(tokens: list[str], types: list[int], origin: str) -> None:
    """SentencePiece joins a character that is no token; `tokenizers` makes bytes of it first."""
    pieces = {token for token, type_ in zip(tokens, types, strict=True) if type_ == NORMAL}
    for token in filter(pieces.__contains__, tokens):
        for cut in range(1, len(token)):
            lost = [part for part in (token[:cut], token[cut:]) if part not in pieces]
            if lost and all(len(part) == 1 for part in lost):
                raise DataError(
                    f"{origin}: tokenizer.ggml.tokens has {token!r} and not its character {lost[0]!r}; such a vocabulary "
                    "cannot be read"
                )


def _list(metadata: Mapping[str, Any], name: str, kind: type | tuple[type, ...], origin: str) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        what = "is missing" if value is None else f"must be a list of {'texts' if kind is str else 'numbers'}"
        raise DataError(f"{origin}: {key} {what}")
    return value


def _types(metadata: Mapping[str, Any], tokens: list[str], origin: str) -> list[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [NORMAL] * len(tokens)
    types: list[int] = _list(metadata, "token_type", int, origin)
    if len(types) != len(tokens):
        raise DataError(
            f"{origin}: tokenizer.ggml.token_type has {len(types):,} entries and tokenizer.ggml.tokens {len(tokens):,}"
        )
    return types


def _named_tokens(
    metadata: Mapping[str, Any], tokens: list[str], default: dict[str, int], origin: str
) -> dict[str, str]:
    ids = {name: _id(metadata, middle, tokens, origin, default.get(name)) for name, middle in NAMED.items()}
    return {name: tokens[id_] for name, id_ in ids.items() if id_ is not None}


def _id(
    metadata: Mapping[str, Any], middle: str, tokens: list[str], origin: str, default: int | None = None
) -> int | None:
    key = f"tokenizer.ggml.{middle}_token_id"
    id_: int | None = metadata.get(key, default)
    if id_ is not None and (not isinstance(id_, int) or not 0 <= id_ < len(tokens)):
        raise DataError(f"{origin}: {key} is {id_!r}, and there are {len(tokens):,} tokens")
    return id_


def _bpe(tokens: list[str], merges: list[tuple[str, str]]) -> Description:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: id_ for id_, token in enumerate(tokens)},
        "merges": merges,
    }


def _description(
    model: Description, normalizer: Description | None, pre_tokenizer: Description | None, decoder: Description
) -> Description:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _added_token(id_: int, token: str, type_: int) -> Description:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": token, **flags, "special": type_ != USER_DEFINED}


def _post_processor(
    named: dict[str, str], vocab: dict[str, int], *, add_bos_token: bool, add_eos_token: bool
) -> Description | None:
    """What other programs put around text, we by `add_bos_token`."""
    front = [named["bos_token"]] if add_bos_token else []
    back = [named["eos_token"]] if add_eos_token else []
    if not front and not back:
        return None

    def around(sequences: str) -> list[Description]:
        return [
            part
            for number, name in enumerate(sequences)
            for part in (
                *({"SpecialToken": {"id": token, "type_id": number}} for token in front),
                {"Sequence": {"id": name, "type_id": number}},
                *({"SpecialToken": {"id": token, "type_id": number}} for token in back),
            )
        ]

    special = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in {*front, *back}}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("AB"), "special_tokens": special}
