"""Text -> a DATA folder: sources, mixture, tokenizer, encoding, the split by document, shards, all of it or nothing."""

import hashlib
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pellucid.data.documents import Document, ReadLog
from pellucid.data.encode import batches, encode_batches
from pellucid.data.index import storage_error, write_index
from pellucid.data.mixture import Used, mix
from pellucid.data.readers import RECORD_SUFFIXES
from pellucid.data.shards import dtype_for
from pellucid.data.sources import Files, Source, open_source, parse_size, takes_size
from pellucid.data.splits import SplitWriter
from pellucid.data.staging import staged_folder
from pellucid.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

DEFAULT_VOCAB_SIZE = 8192
SAMPLE_BYTES = 64_000_000
SAMPLE_BYTES_A_TOKEN = 2_000
"""A tokenizer is trained on this much text for each token of its vocabulary and `SAMPLE_BYTES` at most, held in memory:
more changes the merges little and takes long."""
BYTES_A_WORKER = 4_000_000
"""Input below which another worker process is not worth its start."""
WORKERS_A_CORE, MOST_WORKERS = 4, 64
"""More processes than the larger of the two allows start for longer than they encode."""

Progress: TypeAlias = Callable[[str, int, int | None, int], None]
"""Called often with what is being done, bytes done, bytes in total (None: unknown) and documents done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """What `pellucid prepare` is asked to do; the flags have the same names."""

    inputs: tuple[str, ...]
    """Files, folders, globs and registered sources."""
    out: Path
    """The folder to make."""
    vocab_size: int | None = None
    """Train a byte-level BPE of this size; without it and without ``tokenizer``: `DEFAULT_VOCAB_SIZE`."""
    tokenizer: Path | None = None
    """Use this tokenizer.json, or the one in this folder."""
    text_key: str = "text"
    """Key of the text in JSONL and parquet; group of an HDF5 file."""
    workers: int | None = None
    """Processes that encode; None: one a core, fewer for little input. At most 4 a core, or 64."""
    val_fraction: float = 0.01
    """Share of the documents held out as split "val"."""
    weights: tuple[float, ...] | None = None
    """Shares of the inputs in the text, one an input; None: all of everything."""
    seed: int = 0
    """Seeds the split, the tokenizer's sample and generated sources."""
    size: str | None = None
    """Of generated sources: 20MB, ..."""
    shard_tokens: int = 100_000_000
    """Tokens a file at most."""
    on_error: Literal["stop", "skip"] = "stop"
    """At bad input: stop, or leave it out and count it."""
    records: Literal["sft", "dpo", "grpo"] | None = None
    """Make records for post-training; None: text."""
    chat_template: str | None = None
    """Of records: a file with the chat template to use instead of the tokenizer's, or "none": leave texts as they are."""
    context: int | None = None
    """Of records: the window they are to be trained in, to say how many are longer and how full rows will be."""

    def __post_init__(self) -> None:
        _require(bool(self.inputs), "give at least one INPUT")
        _require(
            self.vocab_size is None or self.vocab_size >= 1, f"--vocab-size must be at least 1, got {self.vocab_size}"
        )
        _require(self.vocab_size is None or self.tokenizer is None, "--vocab-size and --tokenizer exclude each other")
        _require(self.workers is None or self.workers >= 1, f"--workers must be at least 1, got {self.workers}")
        most = max(MOST_WORKERS, WORKERS_A_CORE * num_cores())
        _require(
            self.workers is None or self.workers <= most,
            f"--workers is {self.workers}, for {num_cores()} cores; each is a process, give {most} at most",
        )
        _require(0 <= self.val_fraction < 1, f"--val-fraction must be in [0, 1), got {self.val_fraction}")
        _require(self.shard_tokens >= 1, f"--shard-tokens must be at least 1, got {self.shard_tokens}")
        _require(self.seed >= 0, f"--seed must not be negative, got {self.seed}")
        _require(self.on_error in ("stop", "skip"), f"--on-error must be stop or skip, got {self.on_error!r}")
        if self.records is None:
            _require(self.chat_template is None, "--chat-template is for records; give --for sft, dpo or grpo too")
            _require(self.context is None, "--context is for records; give --for sft, dpo or grpo too")
        else:
            _require(self.text_key == "text", f"--text-key {self.text_key} is for text; records have keys of their own")
            _require(self.context is None or self.context >= 2, f"--context must be at least 2, got {self.context}")
        if self.weights is not None:
            _require(
                len(self.weights) == len(self.inputs),
                f"--weights must have one number for each of the {len(self.inputs)} inputs, got {len(self.weights)}",
            )
            for weight in self.weights:
                _require(weight > 0 and math.isfinite(weight), f"--weights must be positive, got {weight}")
        if self.size is not None:
            parse_size(self.size)
            _require(
                any(map(takes_size, self.inputs)), "--size is only for sources of any size, such as sample:stories"
            )


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written, and what was left out."""

    folder: Path
    documents: int
    tokens: int
    text_bytes: int
    vocab_size: int
    splits: dict[str, dict[str, int]]
    sources: list[dict[str, Any]]
    num_skipped: int
    first_skipped: list[str]
    num_empty: int
    num_ignored: int
    notes: list[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "path": str(self.folder),
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.text_bytes,
            "bytes_per_token": round(self.text_bytes / self.tokens, 4),
            "vocab_size": self.vocab_size,
            "splits": self.splits,
            "sources": self.sources,
            "skipped": self.num_skipped,
            "first_skipped": self.first_skipped,
            "empty": self.num_empty,
            "ignored_files": self.num_ignored,
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
        }


def prepare(options: PrepareOptions, progress: Progress | None = None) -> Summary:
    """Make the folder ``options.out`` from the inputs. The same inputs and options give the same bytes.

    Raises:
        ConfigError: options that contradict each other or the input, a used ``out``, a library that is not installed.
        DataError: missing or bad input (with ``on_error="stop"``), or no document at all.
        StorageError: the disk is full or refuses; nothing is left behind.
        PellucidError: a worker process died.
    """
    started = time.monotonic()
    report = progress or (lambda *_: None)
    opened = [
        open_source(text, text_key=options.text_key, seed=options.seed, size=options.size) for text in options.inputs
    ]
    _refuse_unused_key(options, opened)
    loaded = _load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
    log = ReadLog(skip=options.on_error == "skip")
    used: list[Used] = []
    with staged_folder(options.out) as folder:
        tokenizer = loaded or _train_tokenizer(options, opened, report)
        sha256 = save_tokenizer(tokenizer, folder)
        splits = _write_shards(options, opened, tokenizer, folder, log, used, report)
        if not splits:
            raise nothing_there(options, log)
        write_index(
            folder,
            dtype=dtype_for(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=sha256,
            splits=splits,
            sources=[source_entry(entry) for entry in used],
        )
    return Summary(
        folder=options.out,
        documents=sum(split["documents"] for split in splits.values()),
        tokens=sum(split["tokens"] for split in splits.values()),
        text_bytes=sum(entry.num_bytes for entry in used),
        vocab_size=tokenizer.vocab_size,
        splits={name: {"tokens": split["tokens"], "documents": split["documents"]} for name, split in splits.items()},
        sources=[source_entry(entry) for entry in used],
        num_skipped=log.num_skipped,
        first_skipped=log.first_skipped,
        num_empty=log.num_empty,
        num_ignored=sum(source.num_ignored for source in opened if isinstance(source, Files)),
        notes=_notes(options, tokenizer, list(splits), used),
        seconds=time.monotonic() - started,
    )


def _write_shards(
    options: PrepareOptions,
    sources: list[Source],
    tokenizer: "Tokenizer",
    folder: Path,
    log: ReadLog,
    used: list[Used],
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """Encode everything into the shards of both splits; fills ``log`` and ``used``, returns the index's "splits"."""
    dtype = dtype_for(tokenizer.vocab_size)
    total = sum(source.total_bytes for source in sources) if options.weights is None else None
    read_up_to: deque[int] = deque()  # of each batch in flight, so that progress is of what is done
    batched = _noting(batches(mix(sources, options.weights, log, used)), log, read_up_to)
    work = encode_batches(tokenizer, folder, dtype, batched, num_workers(options, total))
    writer = SplitWriter(folder, dtype, options.shard_tokens, options.val_fraction, options.seed)
    with closing(writer), closing(work) as results:
        for encoded in results:
            for message in encoded.refused:
                log.report(DataError(message))
            writer.add(encoded.ids, encoded.lengths)
            progress("encoding", read_up_to.popleft(), total, writer.num_seen)
        return writer.finish()


def _noting(work: Iterable[list[Document]], log: ReadLog, read_up_to: deque[int]) -> Iterator[list[Document]]:
    for batch in work:
        read_up_to.append(log.done_bytes)
        yield batch


# -- tokenizer ----------------------------------------------------------------------------------------------


def _load_tokenizer(path: Path) -> "Tokenizer":
    from pellucid.tokenizer import Tokenizer

    return Tokenizer.load(path)


def _train_tokenizer(options: PrepareOptions, sources: list[Source], progress: Progress) -> "Tokenizer":
    log = ReadLog(skip=options.on_error == "skip")
    total = sum(source.total_bytes for source in sources) if options.weights is None else None
    return train_tokenizer(options, mix(sources, options.weights, log, []), log, total, progress)


def train_tokenizer(
    options: PrepareOptions, documents: Iterable[Document], log: ReadLog, total: int | None, progress: Progress
) -> "Tokenizer":
    """A byte-level BPE of ``options.vocab_size``, trained on a sample of ``documents``, whose reading ``log`` counts."""
    from pellucid.tokenizer import train_bpe

    vocab_size = options.vocab_size or DEFAULT_VOCAB_SIZE
    budget = min(SAMPLE_BYTES, SAMPLE_BYTES_A_TOKEN * vocab_size)
    sample = sample_texts(_reported(documents, log, total, progress), budget, options.seed)
    if not sample:
        raise nothing_there(options, log)
    progress("training the tokenizer", 0, None, len(sample))
    return train_bpe(sample, vocab_size)


def _reported(documents: Iterable[Document], log: ReadLog, total: int | None, progress: Progress) -> Iterator[Document]:
    seen = reported = 0
    for seen, document in enumerate(documents, 1):
        yield document
        if log.done_bytes - reported >= 1 << 20:
            reported = log.done_bytes
            progress("sampling text for the tokenizer", reported, total, seen)


def sample_texts(documents: Iterable[Document], budget_bytes: int, seed: int) -> list[str]:
    """Texts of at most about ``budget_bytes``, each document as likely as another, in one pass of flat memory.

    All of them where they fit. Else, each time the sample outgrows the budget, half of it is dropped and from then on
    half as many documents are taken.

    Raises:
        ConfigError: the documents come as token ids, which need the tokenizer that made them.
    """
    rng = random.Random(seed)
    kept: list[tuple[str, int]] = []
    kept_bytes, chance = 0, 1.0
    for document in documents:
        if not isinstance(document.content, (str, list)):
            raise ConfigError(
                f"{document.location}: token ids need the tokenizer that made them; give --tokenizer PATH"
            )
        if chance < 1 and rng.random() >= chance:
            continue
        content = document.content
        kept.append(
            (content if isinstance(content, str) else "\n".join(m["content"] for m in content), document.num_bytes)
        )
        kept_bytes += document.num_bytes
        while kept_bytes > budget_bytes and len(kept) > 1:
            kept = [entry for entry in kept if rng.random() < 0.5]
            kept_bytes, chance = sum(num_bytes for _, num_bytes in kept), chance / 2
    return [text for text, _ in kept]


def save_tokenizer(tokenizer: "Tokenizer", folder: Path) -> str:
    """Write its files into a DATA folder; the sha256 of tokenizer.json."""
    path = folder / "tokenizer.json"
    try:
        tokenizer.save(folder)
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise storage_error(path, error) from error


def _refuse_unused_key(options: PrepareOptions, sources: list[Source]) -> None:
    _require(
        options.text_key == "text" or any(isinstance(source, Files) and source.with_keys for source in sources),
        f"--text-key is {options.text_key!r}, and {', '.join(options.inputs)} has no file with keys "
        f"({', '.join(RECORD_SUFFIXES)}); leave it out",
    )


# -- small decisions ----------------------------------------------------------------------------------------


def num_workers(options: PrepareOptions, total_bytes: int | None, *, bytes_a_worker: int = BYTES_A_WORKER) -> int:
    """Processes that encode: as asked, else one a core, fewer for little input."""
    if options.workers is not None:
        return options.workers
    cores = num_cores()
    return cores if total_bytes is None else max(1, min(cores, total_bytes // bytes_a_worker))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def source_entry(entry: Used) -> dict[str, Any]:
    """What index.json says of a source."""
    source = entry.source
    credit = {"attribution": source.attribution} if source.attribution else {}
    sizes = {"bytes": entry.num_bytes, "documents": entry.num_documents}
    return {"name": source.name, "licence": source.licence, **sizes, **credit}


def nothing_there(options: PrepareOptions, log: ReadLog) -> DataError:
    """What to raise where all input was empty or left out."""
    where = ", ".join(options.inputs)
    first = f"; first: {log.first_skipped[0]}" if log.first_skipped else ""
    return DataError(f"{where}: no document to train on ({log.num_empty:,} empty, {log.num_skipped:,} skipped{first})")


def _notes(options: PrepareOptions, tokenizer: "Tokenizer", splits: list[str], used: list[Used]) -> list[str]:
    notes = []
    asked = options.vocab_size or DEFAULT_VOCAB_SIZE
    if options.tokenizer is None and tokenizer.vocab_size < asked:
        notes.append(
            f"the text gave a vocabulary of {tokenizer.vocab_size:,} and not {asked:,}: it has no more pairs to merge"
        )
    if tokenizer.eos_id is None:
        notes.append("this tokenizer has no end-of-text token: no token stands between documents")
    if options.val_fraction and "val" not in splits:
        notes.append("there is only one document, so there is no validation split")
    ended = [entry.source.name for entry in used if entry.exhausted]
    if options.weights is not None:
        notes.append(f"the mixture ended with the last document of {ended[0]}")
    return notes


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)
