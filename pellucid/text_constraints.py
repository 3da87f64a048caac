"""Grammars over the ids of a tokenizer: what stands between its tokens and constraints that know ids only."""

import re
from functools import lru_cache

from pellucid.errors import ConfigError
from pellucid.inference.constraints import GrammarConstraint, GrammarKind, Vocabulary
from pellucid.tokenizer import Tokenizer
from pellucid.tokenizer.fast import byte_symbols

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def make_constraint(kind: GrammarKind, text: str | None, tokenizer: Tokenizer) -> GrammarConstraint:
    """A constraint for `SamplingParams`: every finished output, decoded, satisfies the grammar.

    Args:
        kind: "json_object" (``text`` is None), "json_schema", "regex" or "lark".
        text: the schema as JSON, the expression or the grammar.

    Raises:
        RequestError: the text is malformed, or nothing satisfies it.
        ConfigError: `llguidance` is not installed, or the tokenizer's decoder is one that does not treat tokens singly.
    """
    return GrammarConstraint(kind, text, vocabulary(tokenizer))


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The bytes of a tokenizer's ids, made once for each tokenizer; ConfigError as in `make_constraint`."""
    description = tokenizer.decoder_description or {}
    steps = description.get("decoders", [description])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Vocabulary(_byte_level(tokenizer), tokenizer.encode)
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} or not kinds:
        raise ConfigError(
            f"grammars need a tokenizer with a byte-level or byte-fallback decoder; this one has {' + '.join(map(str, kinds))}"
        )
    tokens = [_word_bytes(word, steps) for word in _words(tokenizer)]
    strips = any(step["type"] == "Strip" or _prepends(step) for step in steps)
    # an output that begins with a space would lose it when decoded
    spaced = [id_ for id_, token in enumerate(tokens) if strips and token is not None and token.startswith(b" ")]
    return Vocabulary(tokens, _longest_match(tokens), not_first=spaced)


def _words(tokenizer: Tokenizer) -> list[str | None]:
    """How the vocabulary writes each id; None for control tokens and ids that it skips."""
    control = set(tokenizer.special_tokens.values())
    return [None if id_ in control else tokenizer.token_of(id_) for id_ in range(tokenizer.vocab_size)]


def _byte_level(tokenizer: Tokenizer) -> list[bytes | None]:
    symbols = byte_symbols()
    tokens: list[bytes | None] = []
    for word in _words(tokenizer):
        if word is None:
            tokens.append(None)
        elif set(word) <= symbols.keys():
            tokens.append(bytes(symbols[character] for character in word))
        else:  # an added token stands for its own text
            tokens.append(word.encode())
    return tokens


def _prepends(step: dict[str, str]) -> bool:
    return step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def _word_bytes(word: str | None, steps: list[dict[str, object]]) -> bytes | None:
    """The bytes of a token that is not the first of a text, under decoding steps that look at one token at a time."""
    if word is None:
        return None
    for step in steps:
        match step:
            case {"type": "ByteFallback"} if found := _BYTE_TOKEN.fullmatch(word):
                return bytes.fromhex(found[1])
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                word = word.replace(old, new)
            case {"type": "Replace"}:
                raise ConfigError(
                    "grammars need a tokenizer whose decoder replaces fixed characters; this one has a pattern"
                )
            case {"type": "Metaspace", "replacement": str(old)}:
                word = word.replace(old, " ")
    return word.encode()


def _longest_match(tokens: list[bytes | None]) -> "_LongestMatch":
    return _LongestMatch({token: id_ for id_, token in reversed(list(enumerate(tokens))) if token})


class _LongestMatch:
    """Text to ids, the longest token first: these tokenizers' own encoding begins a text in its own way."""

    def __init__(self, ids: dict[bytes, int]) -> None:
        self._ids, self._longest = ids, max(map(len, ids), default=0)

    def __call__(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            size = next((n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids), None)
            if size is None:
                break  # the vocabulary cannot write it; the grammar goes on byte by byte
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids
