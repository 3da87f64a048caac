"""Documents -> token ids, in order, in this process or in worker processes.

A worker is a Python of its own that imports the tokenizer and nothing heavier; it reads batches from its standard input
and ends when that closes, so that none outlives its parent, however the parent dies. Frames on the pipes are two sizes,
a JSON header and raw bytes; nothing is pickled.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pellucid.data.documents import Document
from pellucid.data.index import DTYPES
from pellucid.data.shards import IntArray
from pellucid.errors import DataError, PellucidError, RequestError

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096
_SIZES = struct.Struct("<QQ")
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
# appended to the path, not put first: beside an installed package lie others that may shadow the standard library
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); from pellucid.data.encode import serve; serve(sys.argv[2], sys.argv[3])"
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One batch: ids of its documents one after another, the tokens of each, and what could not be encoded."""

    ids: npt.NDArray[Any]
    lengths: IntArray
    """[documents of the batch]; 0 where the document was refused."""
    refused: list[str]


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Runs of documents of about `BATCH_BYTES` of text."""
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += document.num_bytes
        if num_bytes >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def encode_batches(
    tokenizer: "Tokenizer", folder: Path, dtype: str, work: Iterable[list[Document]], workers: int
) -> Generator[Encoded, None, None]:
    """Each batch of ``work`` encoded, in order; the result does not depend on ``workers``.

    At most two batches a worker are in flight, so that memory stays flat. Close the generator to end the workers.

    Args:
        folder: holds the saved ``tokenizer``; worker processes load it from there.
        workers: processes; 1 encodes in this one.

    Raises:
        PellucidError: a worker process died.
    """
    if workers == 1:
        yield from (encode(tokenizer, dtype, batch) for batch in work)
        return
    with _Workers(folder, dtype, workers) as pool:
        source = iter(work)
        pending = deque(pool.submit(batch) for batch in itertools.islice(source, 2 * workers))
        while pending:
            encoded = pending.popleft().result()
            pending.extend(pool.submit(batch) for batch in itertools.islice(source, 1))
            yield encoded


def encode(tokenizer: "Tokenizer", dtype: str, documents: list[Document]) -> Encoded:
    """Encode one batch in this process."""
    parts: list[npt.NDArray[Any]] = []
    lengths = np.zeros(len(documents), dtype=np.int64)
    refused: list[str] = []
    for i, document in enumerate(documents):
        try:
            ids = np.asarray(_encode_one(tokenizer, document), dtype=DTYPES[dtype])
        except (DataError, RequestError) as error:
            refused.append(str(error) if document.location in str(error) else f"{document.location}: {error}")
            continue
        parts.append(ids)
        lengths[i] = len(ids)
    return Encoded(np.concatenate(parts) if parts else np.empty(0, DTYPES[dtype]), lengths, refused)


def _encode_one(tokenizer: "Tokenizer", document: Document) -> list[int]:
    content = document.content
    if isinstance(content, str):
        return tokenizer.encode_document(content)
    if isinstance(content, list):
        if tokenizer.chat_template is None:
            raise DataError(
                f"{document.location}: messages need a tokenizer with a chat template, and this one has none"
            )
        return framed(tokenizer, tokenizer.encode_chat(content, add_generation_prompt=False))
    top = int(content.max())
    if top >= tokenizer.vocab_size:
        raise DataError(f"{document.location}: id {top} is outside the vocabulary of {tokenizer.vocab_size:,} tokens")
    return framed(tokenizer, content.tolist())


def framed(tokenizer: "Tokenizer", ids: list[int]) -> list[int]:
    """``ids`` with the tokenizer's prefix_id before and eos behind; neither is doubled where it is there already."""
    bos, eos = tokenizer.prefix_id, tokenizer.eos_id
    front = [bos] if bos is not None and ids[:1] != [bos] else []
    back = [eos] if eos is not None and ids[-1:] != [eos] else []
    return [*front, *ids, *back]


# -- the parent's side --------------------------------------------------------------------------------------


class _Workers:
    """Worker processes, each served by a thread that hands it one batch after another."""

    def __init__(self, folder: Path, dtype: str, count: int) -> None:
        self._dtype = DTYPES[dtype]
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-c", _BOOT, _PACKAGE_ROOT, str(folder), dtype]
        pipe = subprocess.PIPE
        for _ in range(count):
            # a session of its own: Ctrl-C is for the parent, workers end with their pipe
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
            self._processes.append(process)
            self._free.put(process)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="pellucid-encode")

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was still buffered has nobody to read it
                    if pipe:
                        pipe.close()

    def submit(self, batch: list[Document]) -> Future[Encoded]:
        return self._threads.submit(self._encode, batch)

    def _encode(self, batch: list[Document]) -> Encoded:
        process = self._free.get()
        assert process.stdin and process.stdout
        try:
            _send(process.stdin, *_pack(batch))
            header, body = _receive(process.stdout)
        except (OSError, EOFError, ValueError) as error:
            raise PellucidError(_obituary(process)) from error
        finally:
            self._free.put(process)
        split = 8 * len(batch)
        lengths = np.frombuffer(body, dtype="<i8", count=len(batch)).astype(np.int64)
        return Encoded(np.frombuffer(body, dtype=self._dtype, offset=split), lengths, header["refused"])


def _obituary(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        return "an encoding worker closed its pipe; nothing was written"
    how = f"exit status {code}"
    if code < 0:
        how = f"signal {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", perhaps for lack of memory: fewer --workers need less"
    return f"an encoding worker died ({how}); nothing was written"


# -- the pipe -----------------------------------------------------------------------------------------------


def _pack(batch: list[Document]) -> tuple[dict[str, Any], bytes]:
    kinds, places, parts = [], {}, []
    for i, document in enumerate(batch):
        content = document.content
        if isinstance(content, str):
            kinds.append("t")
            parts.append(content.encode())
        else:
            chat = isinstance(content, list)
            kinds.append("c" if chat else "i")
            places[i] = document.location
            parts.append(json.dumps(content).encode() if isinstance(content, list) else content.tobytes())
    return {"kinds": "".join(kinds), "places": places, "sizes": [len(part) for part in parts]}, b"".join(parts)


def _unpack(header: dict[str, Any], body: bytes) -> list[Document]:
    documents = []
    start = 0
    for i, (kind, size) in enumerate(zip(header["kinds"], header["sizes"], strict=True)):
        part = body[start : start + size]
        content = part.decode() if kind == "t" else json.loads(part) if kind == "c" else np.frombuffer(part, np.int64)
        documents.append(Document(content, header["places"].get(str(i), ""), size))
        start += size
    return documents


def _send(pipe: IO[bytes], header: dict[str, Any], body: bytes) -> None:
    head = json.dumps(header).encode()
    pipe.write(_SIZES.pack(len(head), len(body)) + head)
    pipe.write(body)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    head_size, body_size = _SIZES.unpack(_exactly(pipe, _SIZES.size))
    return json.loads(_exactly(pipe, head_size)), _exactly(pipe, body_size)


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) != size:
        raise EOFError
    return data


def serve(folder: str, dtype: str) -> None:
    """A worker's whole life: encode what comes in on standard input until it closes."""
    from pellucid.tokenizer import Tokenizer

    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get into the results
    tokenizer = Tokenizer.load(folder)
    while True:
        try:
            batch = _unpack(*_receive(incoming))
        except EOFError:
            return
        result = encode(tokenizer, dtype, batch)
        try:
            _send(outgoing, {"refused": result.refused}, result.lengths.astype("<i8").tobytes() + result.ids.tobytes())
        except BrokenPipeError:
            os._exit(0)  # the parent is gone
