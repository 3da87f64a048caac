"""Examples -> a DATA folder of records for post-training: `pellucid prepare --for sft|dpo|grpo`."""

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pellucid.data.documents import Document, RawRecord, ReadLog, document_from
from pellucid.data.encode_records import encode_records
from pellucid.data.examples import Kind
from pellucid.data.index import write_index
from pellucid.data.mixture import Used, mixed
from pellucid.data.packing import best_fit
from pellucid.data.prepare import (
    DEFAULT_VOCAB_SIZE,
    PrepareOptions,
    Progress,
    nothing_there,
    num_workers,
    save_tokenizer,
    source_entry,
    train_tokenizer,
)
from pellucid.data.record_files import Record, RecordWriter
from pellucid.data.shards import dtype_for
from pellucid.data.sources import Files, HasRecords, Source, open_source
from pellucid.data.splits import held_out
from pellucid.data.staging import staged_folder
from pellucid.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

BYTES_A_WORKER = 1_000_000
"""Input below which another worker process is not worth its start: a template takes longer than a tokenizer."""


@dataclass(frozen=True, slots=True)
class RecordSummary:
    """What was written, and what was left out."""

    folder: Path
    kind: Kind
    splits: dict[str, dict[str, int]]
    """By name: records, tokens, supervised (tokens that are learnt), longest (record, tokens)."""
    row_tokens: dict[str, int]
    """Percentiles of the tokens that a record takes in a row, prompt and (longest) answer: "50", "90", "99", "100"."""
    vocab_size: int
    sources: list[dict[str, Any]]
    num_skipped: int
    first_skipped: list[str]
    num_empty: int
    num_ignored: int
    unanswered: int
    """Conversations that end with a turn that nobody answers; it is left out."""
    context: int | None
    num_longer: int | None
    """Records that do not fit ``context``; None without one."""
    filled: float | None
    """Of sft with a ``context``: the share of the training rows' tokens that records fill."""
    notes: list[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "path": str(self.folder),
            "kind": self.kind,
            "records": sum(split["records"] for split in self.splits.values()),
            "splits": self.splits,
            "row_tokens": self.row_tokens,
            "vocab_size": self.vocab_size,
            "sources": self.sources,
            "skipped": self.num_skipped,
            "first_skipped": self.first_skipped,
            "empty": self.num_empty,
            "ignored_files": self.num_ignored,
            "unanswered": self.unanswered,
            "context": self.context,
            "longer_than_context": self.num_longer,
            "rows_filled": None if self.filled is None else round(self.filled, 4),
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
        }


def prepare_records(options: PrepareOptions, progress: Progress | None = None) -> RecordSummary:
    """Make the folder ``options.out`` from the inputs. The same inputs and options give the same bytes.

    Raises:
        ConfigError: options that contradict each other or the input, a used ``out``, a source without examples.
        DataError: missing or bad input (with ``on_error="stop"``), or no example at all.
        StorageError: the disk is full or refuses; nothing is left behind.
        PellucidError: a worker process died.
    """
    assert options.records is not None
    started = time.monotonic()
    report = progress or (lambda *_: None)
    sources = [_source(text, options) for text in options.inputs]
    template = _template(options.chat_template)
    loaded = _load(options.tokenizer) if options.tokenizer is not None else None
    log = ReadLog(skip=options.on_error == "skip")
    used: list[Used] = []
    with staged_folder(options.out) as folder:
        tokenizer = loaded or _train(options, sources, report)
        tokenizer = tokenizer if template is None else _with_template(tokenizer, *template)
        if tokenizer.chat_template is not None:
            _ = tokenizer.stop_ids  # compiles the template: a broken one fails here and not at every example
        sha256 = save_tokenizer(tokenizer, folder)
        total = sum(source.total_bytes for source in sources) if options.weights is None else None
        raws = mixed(sources, options.weights, used, lambda source: _records(source, log))
        workers = num_workers(options, total, bytes_a_worker=BYTES_A_WORKER)
        work = encode_records(tokenizer, folder, options.records, raws, workers)
        written = _Written(options, tokenizer, folder)
        splits = _write(written, work, log, lambda number: report("encoding", log.done_bytes, total, number))
        if not splits:
            raise nothing_there(options, log)
        write_index(
            folder,
            dtype=dtype_for(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=sha256,
            splits=splits,
            sources=[source_entry(entry) for entry in used],
            kind=options.records,
            rollouts=written.rollouts,
        )
    rows = np.array(written.row_tokens["train"] + written.row_tokens["val"])
    return RecordSummary(
        folder=options.out,
        kind=options.records,
        splits={name: _figures(split) for name, split in splits.items()},
        row_tokens={str(q): int(np.percentile(rows, q, method="higher")) for q in (50, 90, 99, 100)},
        vocab_size=tokenizer.vocab_size,
        sources=[source_entry(entry) for entry in used],
        num_skipped=log.num_skipped,
        first_skipped=log.first_skipped,
        num_empty=log.num_empty,
        num_ignored=sum(source.num_ignored for source in sources if isinstance(source, Files)),
        unanswered=written.unanswered,
        context=options.context,
        num_longer=None if options.context is None else int((rows > options.context + 1).sum()),
        filled=_filled(options, written.row_tokens["train"]),
        notes=_notes(options, tokenizer, splits, used),
        seconds=time.monotonic() - started,
    )


def _write(
    written: "_Written",
    work: Generator[tuple[RawRecord, Record | DataError], None, None],
    log: ReadLog,
    progress: Callable[[int], None],
) -> dict[str, dict[str, Any]]:
    """Everything that ``work`` yields into ``written``; returns the index's "splits"."""
    with closing(written), closing(work) as results:
        for number, (raw, record) in enumerate(results):
            if isinstance(record, DataError):
                log.report(record)
            else:
                written.add(raw, record)
            if number % 256 == 0:
                progress(number)
        return written.finish()


class _Written:
    """Puts each record into its split; keeps what the summary says.

    With two records or more and a fraction above 0 both splits get at least one: until both have, the latest record that
    its source leaves free is held back, so that the last can still be moved to the split that would stay empty.
    """

    def __init__(self, options: PrepareOptions, tokenizer: "Tokenizer", folder: Path) -> None:
        self._options = options
        dtype, tables = dtype_for(tokenizer.vocab_size), options.records == "grpo"
        self._writers = {
            name: RecordWriter(folder, name, dtype, options.shard_tokens, tables=tables) for name in ("train", "val")
        }
        self._held: tuple[Record, str] | None = None
        self._forms: set[tuple[bool, bool]] = set()
        self.num_seen = self.unanswered = 0
        self.row_tokens: dict[str, list[int]] = {"train": [], "val": []}

    @property
    def rollouts(self) -> bool:
        """Whether the records hold answers and rewards beside their prompts."""
        return any(stored for stored, _ in self._forms)

    def add(self, raw: RawRecord, record: Record) -> None:
        """Write a record; `ConfigError` where it is of another form than those before it."""
        if record.table is not None:
            self._forms.add((len(record.parts) > 1, "old_logprobs" in record.table))
            if len(self._forms) > 1:
                raise ConfigError(
                    f"{raw.location}: prompts, stored rollouts and rollouts with old_logprobs cannot be in one folder; prepare "
                    "them apart"
                )
        messages = raw.table.get("messages") if self._options.records == "sft" else None
        self.unanswered += messages is not None and messages[-1]["role"] != "assistant"
        number, self.num_seen = self.num_seen, self.num_seen + 1
        if raw.split is not None:
            return self._write(record, raw.split)
        if not self._options.val_fraction:
            return self._write(record, "train")
        name = "val" if held_out(number, 1, self._options.val_fraction, self._options.seed)[0] else "train"
        if all(writer.num_records for writer in self._writers.values()):
            self._release()
            return self._write(record, name)
        self._release()
        self._held = record, name
        return None

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write everything out; the entries of ``index["splits"]``, without a split that has no record."""
        empty = [name for name, writer in self._writers.items() if not writer.num_records]
        if self._held and empty:  # both: a single record, which is trained on
            self._held = self._held[0], empty[0]
        self._release()
        return {name: writer.finish() for name, writer in self._writers.items() if writer.num_records}

    def close(self) -> None:
        """Release the files; needed where ``finish`` was not reached."""
        for writer in self._writers.values():
            writer.close()

    def _release(self) -> None:
        if self._held:
            record, name = self._held
            self._write(record, name)
            self._held = None

    def _write(self, record: Record, name: str) -> None:
        self._writers[name].add(record)
        prompt, *answers = (len(part.ids) for part in record.parts)
        self.row_tokens[name].append(prompt + max(answers, default=0))


# -- inputs -------------------------------------------------------------------------------------------------


def _source(text: str, options: PrepareOptions) -> Source:
    source = open_source(text, seed=options.seed, size=options.size)
    if not isinstance(source, HasRecords):
        raise ConfigError(
            f"{text} is text and has no examples for {options.records}; sample:chats (sft), sample:preferences (dpo) and "
            "sample:arithmetic (sft, grpo) have"
        )
    return source


def _records(source: Source, log: ReadLog) -> Iterator[RawRecord]:
    assert isinstance(source, HasRecords)
    return source.records(log)


def _load(path: Path) -> "Tokenizer":
    from pellucid.tokenizer import Tokenizer

    return Tokenizer.load(path)


def _train(options: PrepareOptions, sources: list[Source], progress: Progress) -> "Tokenizer":
    log = ReadLog(skip=options.on_error == "skip")
    total = sum(source.total_bytes for source in sources) if options.weights is None else None
    raws = mixed(sources, options.weights, [], lambda source: _records(source, log))
    return train_tokenizer(options, _as_texts(raws), log, total, progress)


def _as_texts(raws: Iterable[RawRecord]) -> Iterator[Document]:
    """What people and models say in each example, for the tokenizer's sample."""
    for raw in raws:
        if raw.split == "val":
            continue
        texts = [text for key, value in raw.table.items() for text in _said(value, key)]
        if texts:
            document = document_from("\n".join(texts), raw.location)
            if document is not None:
                yield document
        elif any(isinstance(value, list) for value in raw.table.values()):
            raise ConfigError(f"{raw.location}: token ids need the tokenizer that made them; give --tokenizer PATH")


def _said(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, str) and key in ("prompt", "completion", "answer", "chosen", "rejected", "content"):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _said(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _said(item, key)


def _template(given: str | None) -> tuple[str | None, str] | None:
    """The source of a chat template (None: none is to be used) and where it comes from; None: the tokenizer's own."""
    if given is None:
        return None
    if given == "none":
        return None, "--chat-template none"
    try:
        return Path(given).read_text(encoding="utf-8"), given
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--chat-template {given}: cannot be read ({reason}); give a file, or none") from error


def _with_template(tokenizer: "Tokenizer", source: str | None, origin: str) -> "Tokenizer":
    from pellucid.tokenizer import Tokenizer
    from pellucid.tokenizer.folder import CONFIG_FILE, TOKENIZER_FILE

    files = tokenizer.files()
    config = json.loads(files[CONFIG_FILE])
    config.pop("chat_template", None)
    config |= {} if source is None else {"chat_template": source}
    return Tokenizer(files[TOKENIZER_FILE].decode(), config, origin=origin)


# -- the summary --------------------------------------------------------------------------------------------


def _figures(split: dict[str, Any]) -> dict[str, int]:
    return {"records": split["documents"], **{key: split[key] for key in ("tokens", "supervised", "longest")}}


def _filled(options: PrepareOptions, row_tokens: list[int]) -> float | None:
    if options.context is None or options.records != "sft" or not row_tokens:
        return None
    sizes = np.minimum(np.array(row_tokens, np.int64) - 1, options.context)
    return float(sizes.sum()) / (len(best_fit(sizes, options.context).ends) * options.context)


def _notes(
    options: PrepareOptions, tokenizer: "Tokenizer", splits: dict[str, dict[str, Any]], used: list[Used]
) -> list[str]:
    notes = []
    if options.tokenizer is None:
        asked = options.vocab_size or DEFAULT_VOCAB_SIZE
        size = f"{tokenizer.vocab_size:,} tokens" + (f" and not {asked:,}" if tokenizer.vocab_size < asked else "")
        notes.append(f"a tokenizer of {size} was trained; to go on with a model that is there, give --tokenizer MODEL")
    if tokenizer.chat_template is None:
        notes.append("no chat template: prompts and answers stand as they are, between the beginning and the end token")
    if "val" not in splits and options.val_fraction:
        notes.append("there is only one record, so there is no validation split")
    ended = [entry.source.name for entry in used if entry.exhausted]
    if options.weights is not None:
        notes.append(f"the mixture ended with the last record of {ended[0]}")
    return notes
