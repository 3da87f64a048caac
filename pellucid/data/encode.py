"""Documents -> token ids, in order, in this process or in worker processes."""

import json
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pellucid.data.documents import Document
from pellucid.data.index import DTYPES
from pellucid.data.shards import IntArray
from pellucid.data.workers import Frame, Workers, answer_requests
from pellucid.errors import DataError, RequestError

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096
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
    with Workers(_BOOT, [str(folder), dtype], workers) as pool:
        for count, (header, body) in pool.in_order((len(batch), _pack(batch)) for batch in work):
            lengths = np.frombuffer(body, dtype="<i8", count=count).astype(np.int64)
            yield Encoded(np.frombuffer(body, dtype=DTYPES[dtype], offset=8 * count), lengths, header["refused"])


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


def serve(folder: str, dtype: str) -> None:
    """A worker's whole life: encode batches."""
    from pellucid.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)

    def answer(header: dict[str, Any], body: bytes) -> Frame:
        result = encode(tokenizer, dtype, _unpack(header, body))
        return {"refused": result.refused}, result.lengths.astype("<i8").tobytes() + result.ids.tobytes()

    answer_requests(answer)
