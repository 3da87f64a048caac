"""What a server serves: models and encoders by name, and what it knows of the requests that it works on."""

import asyncio
import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pellucid.inference.async_engine import AsyncEngine
from pellucid.inference.engine import Engine
from pellucid.inference.threads import end_team
from pellucid.serve_config import ServeConfig
from pellucid.server.admission import Served
from pellucid.server.auth import Keys
from pellucid.server.debug import model_state
from pellucid.server.errors import ApiError, rate_limited, unavailable, unknown_model
from pellucid.server.limits import Places
from pellucid.server.metrics import EngineReport, Metrics
from pellucid.server.steps import StepLog
from pellucid.version import __version__

MAX_BODIES = 256
"""Requests that are being read, checked or refused, besides those that have places: bounds the memory of their bodies."""
LONG_BODY_THREADS = 2
"""That read long bodies, which may take seconds each."""
DEFAULT = "default"
"""A further name of the first model."""


class Vectors(Protocol):
    """What turns ids into vectors; `pellucid.model.encoder.TextEncoder`."""

    width: int

    def embed_ids(self, texts: Sequence[Sequence[int]], *, batch_size: int = 32) -> Tensor:
        """``[len(texts), D]``."""
        ...

    def check(self, ids: Sequence[int], what: str) -> None:
        """RequestError where these ids have no vector."""
        ...

    @property
    def max_tokens(self) -> int:
        """The longest text."""
        ...


class TextVectors(Protocol):
    """An encoder with its tokenizer; `pellucid.checkpoint.encoder_folder.LoadedEncoder`."""

    @property
    def encoder(self) -> Vectors:
        """Ids to vectors."""
        ...

    def encode(self, text: str) -> list[int]:
        """Text to ids; RequestError where it is empty or too long."""
        ...


class Model:
    """A model that writes."""

    def __init__(self, name: str, served: Served, engine: Engine, config: ServeConfig) -> None:
        self.name, self.served, self.front = name, served, AsyncEngine(engine)
        self.steps = StepLog()
        self.steps.attach(engine)
        self.places = Places(config.max_running + config.max_queue, self.steps.busy_tokens_per_s)
        self.created = int(time.time())
        self.fingerprint = fingerprint(engine)

    @property
    def window(self) -> int:
        """The most tokens that prompt and answer may have."""
        return self.served.window

    async def state(self) -> dict[str, Any]:
        """Its part of `/debug/state`."""
        engine = self.front.engine
        stats, blocks = await self.front.between_steps(lambda: (engine.stats(), engine.pool.states()))
        speed, requests = self.steps.tokens_per_s(), list(self.steps.requests.values())
        return model_state(stats, engine.pool.block_size, speed, blocks, requests)


def fingerprint(engine: Engine) -> str:
    """Of all that the bits of an answer hang on besides its request: equal ones answer a seeded request alike.

    The first bytes of each weight stand for all of it.
    """
    told = hashlib.sha256(f"{__version__} {torch.__version__} {engine.exact} {engine.model.config}".encode())
    for name, tensor in sorted(engine.model.state_dict().items()):
        head = tensor.detach().flatten()[:64].contiguous().cpu()
        told.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + bytes(head.view(torch.uint8).tolist()))
    return "fp_" + told.hexdigest()[:16]


class Embedder:
    """A model that turns texts into vectors, one request at a time."""

    def __init__(self, name: str, loaded: TextVectors, config: ServeConfig) -> None:
        self.name, self.loaded, self.created = name, loaded, int(time.time())
        self._batch_size = 32 if config.fast else 1  # alone, a text's vector has the same bits whoever comes with it
        self._turn = asyncio.Lock()
        self.places = Places(1 + config.max_queue, lambda: 0.0)
        """For requests: one runs, others wait."""

    @property
    def window(self) -> int:
        """The longest text in tokens."""
        return self.loaded.encoder.max_tokens

    def ids(self, texts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """RequestError for a text without a vector."""
        found: list[list[int]] = []
        for i, text in enumerate(texts):
            ids = self.loaded.encode(text) if isinstance(text, str) else list(text)
            self.loaded.encoder.check(ids, f"input {i}")
            found.append(ids)
        return found

    async def vectors(self, texts: list[list[int]], dimensions: int | None) -> Tensor:
        """``[len(texts), D]``, of length 1, in float32 on the CPU.

        Raises:
            ApiError: more dimensions than there are.
        """
        encoder = self.loaded.encoder
        if dimensions is not None and dimensions > encoder.width:
            raise ApiError(
                400, f"dimensions is {dimensions} and {self.name} gives {encoder.width}; ask for fewer, or leave it out",
                code="invalid_value", param="dimensions",
            )  # fmt: skip
        async with self._turn:
            vectors = await asyncio.to_thread(self._embed, texts)
        return normalize(vectors.float()[:, :dimensions], dim=-1)

    def _embed(self, texts: list[list[int]]) -> Tensor:
        try:
            return self.loaded.encoder.embed_ids(texts, batch_size=self._batch_size)
        finally:
            end_team()  # of a thread that is kept for the next call


@dataclass(slots=True)
class Service:
    """All that the routes share. `models` and `embedders` are in the order in which they are listed."""

    config: ServeConfig
    keys: Keys
    models: dict[str, Model]
    embedders: dict[str, Embedder] = field(default_factory=dict)
    ready: bool = False
    """It listens."""
    draining: bool = False
    """It ends, and takes nothing new."""
    metrics: Metrics = field(init=False)
    noted: set[str] = field(default_factory=set)
    """Fields of bodies that were ignored, and told in the log."""
    long_bodies: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(LONG_BODY_THREADS, thread_name_prefix="pellucid-body")
    )
    """Where they are read, rendered and tokenised."""
    _open: set[asyncio.Timeout] = field(default_factory=set)
    """The deadline of each request that is being answered."""

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.reports)

    def model(self, name: str) -> Model:
        """ApiError 404 for a name that is not served."""
        if name in self.models:
            return self.models[name]
        if self.models and (name == DEFAULT or (self.config.any_model and name not in self.embedders)):
            return next(iter(self.models.values()))
        raise unknown_model(name, list(self.models))

    def embedder(self, name: str) -> Embedder:
        """ApiError 404 for a name that is not served."""
        if name in self.embedders:
            return self.embedders[name]
        if self.embedders and (name == DEFAULT or (self.config.any_model and name not in self.models)):
            return next(iter(self.embedders.values()))
        raise unknown_model(name, list(self.embedders))

    def reports(self) -> Iterator[EngineReport]:
        """Of each engine; while a step runs its numbers may be those of before."""
        for name, model in self.models.items():
            up = model.front.problem is None
            yield EngineReport(name, model.front.engine.stats(), up, model.places.refused)

    def problems(self) -> dict[str, str]:
        """Models that cannot answer any more, and why."""
        found = {name: model.front.problem for name, model in self.models.items()}
        return {name: problem for name, problem in found.items() if problem is not None}

    # -- requests that are being answered -------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._open)

    @contextmanager
    def answering(self, limit: asyncio.Timeout) -> Iterator[None]:
        """A request is being answered, until its deadline or the end of the server.

        Raises:
            ApiError: 503, the server is ending; 429, more requests are open than could ever have places.
        """
        if self.draining:
            raise unavailable("the server is shutting down; ask again when it is back", self.config.drain_seconds + 2)
        if len(self._open) >= MAX_BODIES + sum(model.places.limit for model in self.models.values()):
            raise rate_limited(f"{len(self._open)} requests are open, which is the limit; try again later", 1)
        self._open.add(limit)
        try:
            yield
        finally:
            self._open.discard(limit)

    def end_all(self) -> None:
        """Let every request that is being answered run out of time now."""
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(now)

    async def close(self) -> None:
        """End engines and all threads."""
        self.long_bodies.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(model.front.close() for model in self.models.values()))
