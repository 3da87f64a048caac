"""Our tokenizer as the ``tokenizer.*`` keys of a GGUF file; `gguf` reads them."""

import json
from typing import Any

import tokenizers

from pellucid.errors import DataError
from pellucid.tokenizer.bpe import Tokenizer
from pellucid.tokenizer.gguf import (
    BYTE,
    CONTROL,
    ENDS,
    NAMED,
    NORMAL,
    PRE_TYPES,
    PREFIX,
    SPACES,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Description,
    merges_of,
)


def to_gguf(tokenizer: Tokenizer, *, rows: int) -> dict[str, Any]:
    """The keys of a GGUF file for a tokenizer; `from_gguf` makes one of them that encodes and decodes alike.

    Args:
        rows: of the model's embedding, at least the tokenizer's ``vocab_size``; ids without a token are unused ones.

    Raises:
        DataError: neither of the two kinds can do what this tokenizer does; names the part of tokenizer.json.
    """
    files = tokenizer.files()
    description, config = json.loads(files["tokenizer.json"]), json.loads(files["tokenizer_config.json"])
    model = description["model"]
    _refuse_odd(description)
    ids = model["vocab"] | {token["content"]: token["id"] for token in description["added_tokens"]}
    names = {id_: token for token, id_ in ids.items()}
    tokens = [names.get(id_, f"[PAD{id_}]") for id_ in range(rows)]
    types = [NORMAL if id_ in names else UNUSED for id_ in range(rows)]
    for token in description["added_tokens"]:
        types[token["id"]] = CONTROL if token["content"] in tokenizer.special_tokens else USER_DEFINED
    for token, id_ in tokenizer.special_tokens.items():
        types[id_] = UNKNOWN if token == model.get("unk_token") else CONTROL
    keys: dict[str, Any] = {"tokens": tokens, "token_type": types}
    keys |= _sentencepiece_keys(description, tokens, types) if model.get("byte_fallback") else _bpe_keys(description)
    for name, middle in NAMED.items():
        if (token_name := _token_name(config.get(name))) is not None:
            keys[f"{middle}_token_id"] = ids[token_name]
    keys["add_bos_token"] = tokenizer.prefix_id is not None
    keys["add_eos_token"] = bool(config.get("add_eos_token", False))
    others = [id_ for id_ in tokenizer.stop_ids if id_ != tokenizer.eos_id]
    keys |= {
        f"{middle}_token_id": id_ for middle, id_ in zip(ENDS, others, strict=False)
    }  # a file has no place for more
    template = {} if tokenizer.chat_template is None else {"tokenizer.chat_template": tokenizer.chat_template}
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()} | template


def _refuse_odd(description: Description) -> None:
    model = description["model"]
    if model.get("type") != "BPE":
        raise DataError(f"tokenizer.json: model.type {model.get('type')!r} has no place in a GGUF file; only BPE has")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise DataError(f"tokenizer.json: model.{key} {model[key]!r} has no place in a GGUF file")
    for token in description["added_tokens"]:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token[flag]:
                raise DataError(
                    f"tokenizer.json: the added token {token['content']!r} has {flag}, which has no place in a GGUF file"
                )


def _bpe_keys(description: Description) -> dict[str, Any]:
    found = next((name for name, pre_type in PRE_TYPES.items() if pre_type.fits(description)), None)
    if found is None:
        raise DataError(
            "tokenizer.json: its pre_tokenizer and normalizer are none that a GGUF file has a name for; known: "
            f"{', '.join(PRE_TYPES)}, and SentencePiece's"
        )
    model = description["model"]
    if bool(model.get("ignore_merges")) != PRE_TYPES[found].ignore_merges:
        _refuse_unreachable(description, found)
    return {"model": "gpt2", "pre": found, "merges": [" ".join(pair) for pair in _pairs(model)]}


def _refuse_unreachable(description: Description, found: str) -> None:
    """Only a token that the merges do not lead to shows whether they are ignored."""
    model = description["model"]
    added = {token["content"] for token in description["added_tokens"]}
    pieces = [token for token in model["vocab"] if token not in added]
    bare = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=model["vocab"], merges=_pairs(model)))
    for token, encoding in zip(pieces, bare.encode_batch_fast(pieces, add_special_tokens=False), strict=True):
        if encoding.ids != [model["vocab"][token]]:
            raise DataError(
                f"tokenizer.json: model.ignore_merges {bool(model.get('ignore_merges'))} is not what GGUF's {found!r} does, "
                f"and the token {token!r} is not what the merges make of its text"
            )


def _sentencepiece_keys(description: Description, tokens: list[str], types: list[int]) -> dict[str, Any]:
    normalizer = description.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    prefixed = steps == [PREFIX, SPACES]
    if (not prefixed and steps != [SPACES]) or description.get("pre_tokenizer") is not None:
        raise DataError(
            "tokenizer.json: its normalizer and pre_tokenizer are not those of a SentencePiece tokenizer that a GGUF file can "
            "name: '▁' for each space, with or without one put first, and no pre_tokenizer"
        )
    for byte in range(256):
        token = f"<0x{byte:02X}>"
        if token not in description["model"]["vocab"]:
            raise DataError(f"tokenizer.json: model.byte_fallback is true and the vocabulary lacks {token}")
        types[description["model"]["vocab"][token]] = BYTE
    pairs = _pairs(description["model"])
    order = dict.fromkeys(left + right for left, right in pairs)
    ranks = {token: rank for rank, token in enumerate(order)}
    scores = [-float(ranks.get(token, len(tokens))) for token in tokens]
    ours = merges_of(tokens, types, scores)
    if set(ours) != set(pairs) or list(dict.fromkeys(left + right for left, right in ours)) != list(order):
        odd = next(iter(set(ours) ^ set(pairs)), pairs[:1])
        raise DataError(
            "tokenizer.json: model.merges are not SentencePiece's, where any two neighbours join whose text is a token "
            f"(see {odd!r}); a GGUF file cannot hold them"
        )
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefixed}


def _pairs(model: Description) -> list[tuple[str, str]]:
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]


def _token_name(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value
