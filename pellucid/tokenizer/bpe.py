"""The tokenizer: byte-level BPE of our own, or any folder with a tokenizer.json."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pellucid.errors import ConfigError, DataError, RequestError
from pellucid.tokenizer.chat import CHATML, ChatTemplate, Message, Segment
from pellucid.tokenizer.fast import FastEncoder
from pellucid.tokenizer.folder import file_contents, named_token, read_files, template_source, write_files
from pellucid.tokenizer.marked import MarkedTokenizer, cuts_at_control_tokens

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2 of a tokenizer that we train; the first one begins, ends and pads."""

MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

LONG_TEXT = 8_192
"""Characters that take milliseconds to encode."""


class Tokenizer:
    """Text to ids and back; conversations to ids and loss masks.

    Control tokens are those that tokenizer.json marks special and those that tokenizer_config.json names. Text never
    becomes one, however it is spelt: only `encode_document`, the chat template's own words and its `bos_token` do.
    Immutable, safe to share between threads, and pickled as its two files and ``end_ids``.

    Args:
        text: a tokenizer.json, word for word.
        config: a parsed tokenizer_config.json.
        origin: where they came from, for messages.
        end_ids: further ids that end a generation, as a model's own files name them.

    Raises:
        DataError: ``text`` is no tokenizer, or ``config`` names tokens that it lacks.
    """

    def __init__(
        self, text: str, config: dict[str, Any], *, origin: str = "tokenizer.json", end_ids: Iterable[int] = ()
    ) -> None:
        self._text, self._config, self._origin, self._end_ids = text, config, origin, tuple(end_ids)
        self._description: dict[str, Any] = json.loads(text)
        self._tokenizer = _build(text, origin)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise DataError(f"{origin}: the vocabulary is empty")
        self.vocab_size: int = max(vocab.values()) + 1
        """The highest id + 1: the rows that an embedding needs."""
        self._named: dict[str, str] = {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token"):
            if (token := named_token(config, key, vocab, origin)) is not None:
                self._named[key] = token
        self._tokenizer.add_special_tokens(list(self._named.values()))  # known ones: it only marks them special
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {
            token.content: id_ for id_, token in sorted(added.items()) if token.special
        }
        self.bos_id, self.eos_id, self.pad_id = (self._id_of(key) for key in ("bos_token", "eos_token", "pad_token"))
        self.prefix_id: int | None = None if config.get("add_bos_token") is False else self.bos_id
        """The beginning token that text gets, None where it has none or tokenizer_config.json says not to put it."""
        self.chat_template: str | None = template_source(config, origin)
        unknown = {self._named.get("unk_token"), self._description["model"].get("unk_token")}
        self._controls = {token: id_ for token, id_ in self.special_tokens.items() if token not in unknown}
        self._control_ids = frozenset(self._controls.values())

    def __reduce__(self) -> Any:
        return _rebuild, (self._text, self._config, self._origin, self._end_ids)

    @classmethod
    def load(cls, folder: str | Path, *, end_ids: Iterable[int] = ()) -> "Tokenizer":
        """From a folder (or a tokenizer.json in one); DataError names what is missing or broken."""
        return cls(**read_files(Path(folder))._asdict(), end_ids=end_ids)

    def save(self, folder: str | Path, *, model_max_length: int | None = None) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer opens alike.

        Args:
            model_max_length: the model's window in tokens, recorded for others; None keeps what was there.
        """
        write_files(Path(folder), self.files(model_max_length=model_max_length))

    def files(self, *, model_max_length: int | None = None) -> dict[str, bytes]:
        """What `save` writes, by file name."""
        limit = {} if model_max_length is None else {"model_max_length": model_max_length}
        template = {} if self.chat_template is None else {"chat_template": self._config.get("chat_template")}
        return file_contents(self._text, self._config | template | limit)

    @cached_property
    def sha256(self) -> str:
        """Of the bytes of tokenizer.json, as `save` writes it."""
        return hashlib.sha256(self._text.encode()).hexdigest()

    # -- text ---------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, no beginning or end token; DataError for a lone surrogate, which is no text."""
        try:
            if self._fast is not None and (ids := self._fast.encode(text)) is not None:
                return ids
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(_surrogate(text, error)) from None
        if len(text) > LONG_TEXT:  # a batch lets other Python threads run meanwhile, one text does not
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return self._plain(text, encoding.ids)

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> list[list[int]]:
        """`encode` of each text. Threads act on our own kind; others run on the threads of `tokenizers`."""
        if self._fast is None:
            for text in texts:
                _refuse_surrogates(text)
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [self._plain(text, encoding.ids) for text, encoding in zip(texts, encodings, strict=True)]
        if num_threads == 1:
            return [self.encode(text) for text in texts]
        size = -(-len(texts) // (4 * num_threads)) or 1  # a task for each text would cost more than a short text
        parts = [texts[i : i + size] for i in range(0, len(texts), size)]
        with ThreadPoolExecutor(num_threads) as pool:
            return [ids for part in pool.map(self.encode_batch, parts) for ids in part]

    def encode_document(self, text: str) -> list[int]:
        """The ids of a whole document between `prefix_id` and the end token, where the tokenizer has them."""
        bos = [] if self.prefix_id is None else [self.prefix_id]
        eos = [] if self.eos_id is None else [self.eos_id]
        return bos + self.encode(text) + eos

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD. RequestError for an id outside the vocabulary."""
        ids = list(ids)
        if ids:
            self.check_ids(min(ids), max(ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))

    def check_ids(self, *ids: int) -> None:
        """RequestError if one of ``ids`` is not in [0, vocab_size)."""
        for id_ in ids:
            if not 0 <= id_ < self.vocab_size:
                raise RequestError(
                    f"token id {id_} is outside the vocabulary of {self.vocab_size:,} (ids 0 to {self.vocab_size - 1:,})"
                )

    def token_of(self, id_: int) -> str | None:
        """How the vocabulary writes a token; None for an id that it skips."""
        self.check_ids(id_)
        token: str | None = self._tokenizer.id_to_token(id_)
        return token

    def id_of(self, token: str) -> int | None:
        """The id of what the vocabulary writes so; None where it holds no such token."""
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    @property
    def decoder_description(self) -> dict[str, Any] | None:
        """The ``decoder`` of tokenizer.json."""
        return self._description.get("decoder")

    # -- conversations ------------------------------------------------------------------------------------------

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a generation: the end token, the one that follows an assistant's words in the template, ``end_ids``."""
        ids = [] if self.eos_id is None else [self.eos_id]
        if self.chat_template is not None and (token := self._template.end_of_turn()) is not None:
            ids.append(self._controls[token])
        return tuple(dict.fromkeys([*ids, *self._end_ids]))

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """What the template makes of a conversation, to look at; ids come from `encode_chat`."""
        return "".join(segment.text for segment in self._template.segments(messages, add_generation_prompt))

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation in the template's form.

        Only the template's own control tokens become ids, whatever messages, tools and options spell, and nothing is put
        before them.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            add_generation_prompt: end where an assistant's answer begins.
            continue_last: end where the text of the last message does, to go on with it; without a generation prompt.
            tools: what the template shows as ``tools``: ``{"type": "function", "function": {"name": ..., ...}}`` each.
            options: further variables of the template, such as ``enable_thinking``; one that it does not read changes nothing.

        Raises:
            RequestError: no template, it refuses these messages, or an option has the name of a variable that is set here.
            DataError: the template itself is broken.
        """
        segments = self._template.segments(
            messages, add_generation_prompt, continue_last=continue_last, tools=tools, options=options
        )
        return self._encode_segments(segments)[0]

    def encode_chat_with_mask(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """A finished conversation and, for each id, whether an assistant would have had to say it.

        Answers are supervised up to and including their end-of-turn token. They are found by the template's generation
        markers, else by rendering the conversation up to each answer.

        Args:
            tools: as in `encode_chat`.

        Raises:
            DataError: no assistant turn, or the template renders the start of a conversation differently from the whole.
        """
        ids, mask = self._encode_segments(self._template.learnt_segments(messages, tools=tools))
        if not any(mask):
            raise DataError("the conversation has nothing to learn: no assistant message with content")
        return ids, mask

    def _encode_segments(self, segments: list[Segment]) -> tuple[list[int], list[bool]]:
        if not cuts_at_control_tokens(self._description):
            return self._marked.encode(segments)
        ids: list[int] = []
        mask: list[bool] = []
        for segment in segments:
            piece = [self._controls[segment.text]] if segment.control else self.encode(segment.text)
            ids += piece
            mask += [segment.learn] * len(piece)
        return ids, mask

    # -- inside -------------------------------------------------------------------------------------------------

    def _id_of(self, key: str) -> int | None:
        return self.special_tokens[self._named[key]] if key in self._named else None

    def _plain(self, text: str, ids: list[int]) -> list[int]:
        """``ids``, made again should a model (Unigram, for one) have found a control token in plain text."""
        return ids if self._control_ids.isdisjoint(ids) else self._marked.encode_plain(text)

    @cached_property
    def _fast(self) -> FastEncoder | None:
        return FastEncoder.build(self._description)

    @cached_property
    def _marked(self) -> MarkedTokenizer:
        return MarkedTokenizer(self._description, self.special_tokens, origin=self._origin)

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError(
                f"{self._origin} comes without a chat template; give plain text (completion mode) or add chat_template "
                "to tokenizer_config.json"
            )
        return ChatTemplate(
            self.chat_template, controls=tuple(self._controls), variables=self._named, origin=self._origin
        )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with GPT-2's split and single digits (llama.cpp's ``smollm``) and a ChatML template.

    Texts are consumed one by one; what is kept grows with the distinct words, not with the text. Merges seen only
    once are not made, so a small corpus gives a smaller vocabulary: compare the result's ``vocab_size``.

    Raises:
        ConfigError: ``vocab_size`` leaves no room for the 256 bytes and the special tokens.
        DataError: a text holds a lone surrogate.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        parts = f"256 bytes and {len(SPECIAL_TOKENS)} special tokens"
        raise ConfigError(f"vocab_size {vocab_size} is too small; it needs at least {MIN_VOCAB_SIZE}: {parts}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_checked(texts), trainer)
    end = SPECIAL_TOKENS[0]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    return Tokenizer(tokenizer.to_str(pretty=True), config)


def _build(text: str, origin: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises bare Exception for a description that it cannot read
        raise DataError(f"{origin} cannot be read by tokenizers {tokenizers.__version__}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _rebuild(text: str, config: dict[str, Any], origin: str, end_ids: tuple[int, ...]) -> Tokenizer:
    return Tokenizer(text, config, origin=origin, end_ids=end_ids)


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        _refuse_surrogates(text)
        yield text


def _refuse_surrogates(text: str) -> None:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(_surrogate(text, error)) from None


def _surrogate(text: str, error: UnicodeEncodeError) -> str:
    return (
        f"text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which no encoding can hold; "
        'read the file as UTF-8 with errors="replace"'
    )
