"""Control tokens in tokenizers whose text cannot be encoded piece by piece.

SentencePiece-like tokenizers and WordPiece look beyond a control token: a space is put at the start of the text only, a
token may swallow the white space beside it. There the whole rendering is encoded at once, by a copy of the tokenizer
in which each control token is spelt as a secret drawn in this process, so that no text can contain one.
"""

import json
import secrets
from typing import Any

from tokenizers import Tokenizer

from pellucid.errors import DataError
from pellucid.tokenizer.chat import Segment


def cuts_at_control_tokens(description: dict[str, Any]) -> bool:
    """Whether text on each side of a control token can be encoded on its own, as in plain byte-level BPE."""
    beside = any(token["special"] and (token["lstrip"] or token["rstrip"]) for token in description["added_tokens"])
    return not beside and description.get("normalizer") is None and _splits_bytes(description.get("pre_tokenizer"))


def _splits_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    return (
        bool(byte_level)
        and not any(step["add_prefix_space"] for step in byte_level)
        and {step["type"] for step in steps} <= {"ByteLevel", "Split", "Digits", "Punctuation"}
    )


class MarkedTokenizer:
    """A copy of a tokenizer that knows its special tokens by secret names only."""

    def __init__(self, description: dict[str, Any], special: dict[str, int], *, origin: str) -> None:
        nonce = secrets.token_hex(16)
        self._names = {token: f"\ufdd0{nonce}{id_:x}\ufdd1" for token, id_ in special.items()}
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(_renamed(description, self._names)))
        except (
            Exception
        ) as error:  # `tokenizers` raises bare Exception; merges that use a special token are the known case
            raise DataError(
                f"{origin}: a special token is an ordinary piece of text as well ({error}); rename it"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, segments: list[Segment]) -> tuple[list[int], list[bool]]:
        """Ids of the whole, and whether each overlaps a segment that is to be learnt."""
        text = ""
        spans: list[tuple[int, int]] = []
        for segment in segments:
            start = len(text)
            text += self._names[segment.text] if segment.control else segment.text
            if segment.learn:
                spans.append((start, len(text)))
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        learnt = iter(spans)
        span = next(learnt, None)
        mask = []
        for start, stop in encoding.offsets:
            while span is not None and span[1] <= start:
                span = next(learnt, None)
            mask.append(span is not None and span[0] < stop)
        return encoding.ids, mask


def _renamed(description: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    model = dict(description["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in model["vocab"].items()}
    else:  # Unigram: pairs of token and score
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [
        {**token, "content": names[token["content"]], "special": True, "normalized": False, "single_word": False}
        if token["content"] in names
        else token
        for token in description["added_tokens"]
    ]
    return {**description, "model": model, "added_tokens": added, "post_processor": None}
