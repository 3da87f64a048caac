"""Grammars for the output: at each step, which ids may follow.

A `Constraint` is made once and shared; each sample has a `ConstraintState` of its own. The engine and the sampler know
only these two protocols; the grammars themselves (JSON schema, regular expression, Lark) are those of `llguidance`.
"""

import importlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pellucid.errors import ConfigError, RequestError
from pellucid.inference.schema import check_finite

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]
CANNOT_GO_ON = "the grammar cannot be followed further"
"""Begins what `GrammarState.mask` raises: the grammar's own fault, the same each time it is used."""
MAX_SYMBOLS = 50_000
"""Of a grammar as the library keeps it; so many take it half a second. A property of an object is about ten."""


class ConstraintState(Protocol):
    """Where one sample stands in its grammar."""

    @property
    def may_end(self) -> bool:
        """Whether what was accepted so far may stand as the whole output."""

    @property
    def finished(self) -> bool:
        """Whether it may end and nothing may follow. Never raises; False where `mask` would."""

    def mask(self) -> Tensor:
        """The ids that may follow as text, bool [vocab_size]; whether a stop id may, `may_end` says. Not to be changed.

        Raises:
            RequestError: the grammar needs too much work here, or no token of the vocabulary can continue it.
        """

    def accept(self, token: int) -> None:
        """Take a token that `mask` allows; what goes wrong the next `mask` tells. A stop id that ends the sample is not told."""

    def copy(self) -> "ConstraintState":
        """The same place; neither sees what the other accepts from then on."""


@runtime_checkable
class Constraint(Protocol):
    """A grammar over the ids of one tokenizer. Immutable, safe to share between requests."""

    @property
    def vocab_size(self) -> int:
        """The tokenizer's ids; a model may have more, which are never allowed."""

    def start(self) -> ConstraintState:
        """The state before the first token."""


class Vocabulary:
    """The bytes of each id, in the form that grammars are matched against. Making one takes about a second for 150,000 ids.

    Args:
        tokens: by id; None for an id without text, such as a control token.
        encode: text to ids; says how text that a grammar forces is cut into tokens.
        not_first: ids that cannot begin an output, since decoding would change them there.

    Raises:
        ConfigError: `llguidance` is not installed.
    """

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        encode: Callable[[str], Sequence[int]],
        *,
        not_first: Collection[int] = (),
    ) -> None:
        self.size = len(tokens)
        self.textless = torch.tensor([id_ for id_, token in enumerate(tokens) if not token], dtype=torch.int64)
        self.not_first = torch.tensor(sorted(not_first), dtype=torch.int64)
        self.library = _llguidance()
        source = _TokenSource(tokens, encode)
        self.matched = self.library.LLTokenizer(self.library.TokenizerWrapper(source))


class _TokenSource:
    """What llguidance's `TokenizerWrapper` reads.

    The end token is one of our own behind the real ids: so control tokens stay out of every mask, and whether the
    output may end does not hang on which ids the request stops at.
    """

    def __init__(self, tokens: Sequence[bytes | None], encode: Callable[[str], Sequence[int]]) -> None:
        self.tokens = [token or b"" for token in tokens] + [b"<|end of the output|>"]
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # the wrapper tries bytes first
            raise TypeError("text is wanted")
        return list(self._encode(text))


class GrammarConstraint:
    """A grammar that `llguidance` matches.

    JSON has at most one space or line break in one place, so that a model cannot dawdle. Keywords of JSON schema that are
    not enforced are refused. Regular expressions are those of Rust's `regex`, matched against the whole output; ``\\d`` and
    ``\\w`` are Unicode's. A Lark grammar's ``start`` is the whole output.

    Args:
        text: the schema as JSON, the expression or the grammar; None for "json_object", any JSON object.

    Raises:
        RequestError: the text is malformed, or nothing satisfies it; in the library's words.
    """

    def __init__(self, kind: GrammarKind, text: str | None, vocabulary: Vocabulary) -> None:
        self.kind, self.vocab_size = kind, vocabulary.size
        self._vocabulary = vocabulary
        library = vocabulary.library
        grammar = _grammar(library.LLMatcher, kind, text)
        limits = library.LLParserLimits(verbose_errors=False, max_grammar_size=MAX_SYMBOLS)
        self._matcher = library.LLMatcher(vocabulary.matched, grammar, log_level=0, limits=limits)
        try:
            start = self.start()
            if not start.may_end and not start.mask().any():
                raise RequestError("nothing satisfies it")
        except RequestError as error:
            reason = str(error).removeprefix(f"{CANNOT_GO_ON}: ")
            raise RequestError(f"{kind} cannot be used: {reason}") from None

    def start(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy(), self._vocabulary, at_start=True)


class GrammarState:
    """A `ConstraintState` of a `GrammarConstraint`."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, *, at_start: bool) -> None:
        self._matcher, self._vocabulary, self._at_start = matcher, vocabulary, at_start
        self._mask: Tensor | None = None  # of this place, once asked for

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    @property
    def finished(self) -> bool:
        try:
            return self.may_end and not bool(self.mask().any())
        except RequestError:
            return False

    def mask(self) -> Tensor:
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if self._matcher.is_error():
                reason = self._matcher.get_error().replace("<non-verbose/>", "").strip()
                raise RequestError(f"{CANNOT_GO_ON}: {reason}")
            allowed = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").astype(bool)
            mask = torch.from_numpy(allowed)
            mask[self._vocabulary.textless] = False  # a Lark grammar may name ids
            if self._at_start:
                mask[self._vocabulary.not_first] = False
            if not self.may_end and not mask.any():
                raise RequestError(f"{CANNOT_GO_ON}: no token of the vocabulary can continue the output as it wants")
            self._mask = mask
        return self._mask

    def accept(self, token: int) -> None:
        assert self.mask()[token], f"the grammar does not allow the token {token} here"
        self._matcher.consume_token(token)
        self._mask, self._at_start = None, False

    def copy(self) -> "GrammarState":
        other = GrammarState(self._matcher.deep_copy(), self._vocabulary, at_start=self._at_start)
        other._mask = self._mask
        return other


JSON_OPTIONS = {"whitespace_pattern": r"[ \n]", "lenient": False}


def _grammar(matcher: Any, kind: GrammarKind, text: str | None) -> str:
    """The library's form of a grammar; `RequestError` where the text is missing, not wanted or not JSON."""
    if kind == "json_object":
        if text is not None:
            raise RequestError('json_object takes no text; give "json_schema" to say more about the object')
        return str(matcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS))
    if kind not in ("json_schema", "regex", "lark"):
        raise RequestError(f"unknown kind of grammar {kind!r}; known: json_object, json_schema, regex, lark")
    if not isinstance(text, str):
        raise RequestError(f"{kind} must be given as text, got {text!r}")
    if kind == "json_schema":
        return _schema_grammar(matcher, text)
    return str(matcher.grammar_from_regex(text) if kind == "regex" else matcher.grammar_from_lark(text))


def _schema_grammar(matcher: Any, text: str) -> str:
    try:
        schema = json.loads(text)
        check_finite(schema)
        if not isinstance(schema, (dict, bool)):
            raise RequestError(f"json_schema must be a JSON object, got {text[:80]}")
        # true and false are schemas as well, to which the library adds no options
        whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
        return str(matcher.grammar_from_json_schema(json.dumps(whole, allow_nan=False), overrides=JSON_OPTIONS))
    except RecursionError:
        raise RequestError("json_schema is nested too deeply; make it flatter, with $ref") from None
    except ValueError as error:
        raise RequestError(f"json_schema is not JSON: {error}") from None


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ConfigError(
            'a grammar for the output needs llguidance: install it with pip install "pellucid[serve]"'
        ) from error
