"""How well a model predicts text: each token once, in the windows that training validates on.

Shapes: B windows, T tokens of context, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F

from pellucid.data.batches import Batch, Windows
from pellucid.data.documents import ReadLog
from pellucid.data.encode import batches, encode
from pellucid.data.index import write_index
from pellucid.data.shards import ShardWriter, Split, TokenData, dtype_for
from pellucid.data.sources import open_source
from pellucid.errors import DataError, PellucidError
from pellucid.model import Transformer
from pellucid.tokenizer import Tokenizer

SHARD_TOKENS = 1 << 26


@dataclass(frozen=True, slots=True)
class Score:
    """The sum over all predicted tokens and what follows from it. Never a mean of means."""

    tokens: int
    """Predicted tokens: all but the first of each document."""
    documents: int
    nll: float
    """Summed negative log-likelihood, nats."""
    loss: float
    """nll / tokens."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """Bits for each UTF-8 byte of the predicted text; end tokens cost bits and have no bytes. None without a tokenizer."""


def evaluate(
    model: Transformer,
    windows: Windows,
    *,
    batch_size: int = 8,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Score every token of the windows' split that has one before it in its document.

    Args:
        windows: made with ``score_once``. A stride below the context gives every token but the first more to look back on.
        batch_size: windows a forward; changes speed and memory only.
        tokenizer: that made the ids, to count bytes.
        progress: called with windows done and windows in all.

    Raises:
        DataError: no document has two tokens, so that nothing can be predicted.
        PellucidError: the model's output is not finite; names the windows.
    """
    assert windows.score_once or windows.stride == windows.context, "overlapping windows would count targets twice"
    nll, tokens, done = 0.0, 0, 0
    for batch in windows.batches(min(batch_size, len(windows))):
        nll += batch_nll(model, batch)
        tokens += int(batch.loss_mask.sum())
        if not math.isfinite(nll):
            raise PellucidError(
                f"the model's loss is not finite in windows {done} to {done + len(batch.tokens) - 1}; "
                "its weights are damaged or its dtype is too narrow: try --dtype float32"
            )
        done = min(done + len(batch.tokens), len(windows))
        if progress is not None:
            progress(done, len(windows))
    if not tokens:
        raise DataError("nothing can be scored: every document has a single token")
    split = windows.split
    num_bytes = predicted_bytes(split, tokenizer) if tokenizer is not None else 0
    bits_per_byte = nll / math.log(2) / num_bytes if num_bytes else None
    return Score(tokens, split.num_documents, nll, nll / tokens, _exp(nll / tokens), bits_per_byte)


@torch.no_grad()
def batch_nll(model: Transformer, batch: Batch) -> float:
    """Summed negative log-likelihood of a batch's supervised targets, nats, added up in float64.

    Padding may stand on any side: a token attends within its document id only, and padding has one of its own.
    """
    batch = batch.to(model.model.embed_tokens.weight.device)
    attend = model.make_attend(batch.document_ids if batch.packed else None)
    training = model.training
    model.eval()
    try:
        hidden = model.forward_hidden(batch.tokens, batch.positions, attend)
        total = torch.zeros((), dtype=torch.float64)
        for row, targets, mask in zip(hidden, batch.targets, batch.loss_mask, strict=True):  # a row of logits at a time
            losses = F.cross_entropy(model.head(row[mask]).float(), targets[mask], reduction="none")
            total += losses.cpu().double().sum()
    finally:
        model.train(training)
    return float(total)


def predicted_bytes(split: Split, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text of all tokens but the first of each document; control tokens have none."""
    _, ends = split.document_spans(0, split.num_tokens)
    total, start = 0, 0
    for end in ends.tolist():
        ids = split.read(start, end).tolist()
        total += len(tokenizer.decode(ids).encode()) - len(tokenizer.decode(ids[:1]).encode())
        start = end
    return total


@contextmanager
def text_split(path: str, tokenizer: Tokenizer, *, text_key: str = "text") -> Iterator[Split]:
    """Text encoded into a temporary folder of shards, one split of it, for as long as the context lasts.

    Args:
        path: whatever `pellucid prepare` takes: a file, a folder, a glob or a built-in source.

    Raises:
        DataError: there is no such text, it cannot be read, or it is empty; names file and place.
    """
    source = open_source(path, text_key=text_key)
    dtype = dtype_for(tokenizer.vocab_size)
    with TemporaryDirectory(prefix="pellucid-eval-") as name:
        folder = Path(name)
        writer = ShardWriter(folder, "text", dtype, SHARD_TOKENS)
        try:
            for batch in batches(source.documents(ReadLog())):
                encoded = encode(tokenizer, dtype, batch)
                if encoded.refused:
                    raise DataError(encoded.refused[0])
                writer.add_many(encoded.ids, encoded.lengths)
            if not writer.num_tokens:
                raise DataError(f"{path} holds no text")
            splits = {"text": writer.finish()}
        finally:
            writer.close()
        write_index(
            folder,
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=tokenizer.sha256,
            splits=splits,
            sources=[],
        )
        yield TokenData.open(folder).split("text")


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
