"""Embeddings and models out. The list of models satisfies both vendors' clients, which ask at the same path."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from pellucid.server.openai import EmbeddingRequest


def embeddings_body(request: EmbeddingRequest, vectors: Iterable[npt.ArrayLike], num_tokens: int) -> dict[str, Any]:
    """One vector for each input, in order, as numbers or as the base64 of little-endian float32.

    Args:
        num_tokens: of all inputs together.
    """
    data = [
        {"object": "embedding", "index": i, "embedding": _vector(vector, request.encoding)}
        for i, vector in enumerate(vectors)
    ]
    assert len(data) == len(request.inputs), "one vector an input"
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "model": request.model, "data": data, "usage": usage}


def _vector(vector: npt.ArrayLike, encoding: str) -> list[float] | str:
    values = np.asarray(vector, dtype="<f4")
    assert values.ndim == 1 and np.isfinite(values).all()
    return base64.b64encode(values.tobytes()).decode() if encoding == "base64" else values.tolist()


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model as it is listed."""

    id: str
    created: int
    """Seconds since 1970, when it was loaded: the same each time it is asked for."""
    window: int | None = None
    """The most tokens that a sequence may have."""
    owner: str = "pellucid"


def model_body(entry: ModelEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "object": "model",
        "created": entry.created,
        "owned_by": entry.owner,
        "type": "model",
        "display_name": entry.id,
        "created_at": datetime.fromtimestamp(entry.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_model_len": entry.window,
    }


def models_body(entries: Sequence[ModelEntry]) -> dict[str, Any]:
    """All of them on one page."""
    return {
        "object": "list",
        "data": [model_body(entry) for entry in entries],
        "has_more": False,
        "first_id": entries[0].id if entries else None,
        "last_id": entries[-1].id if entries else None,
    }
