"""A real server in a thread: a tiny random model, a tiny encoder, uvicorn on a free port, and plain sockets to talk to it."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import torch

from pellucid.config import ModelConfig
from pellucid.inference.engine import Engine
from pellucid.model import EmbedConfig, Encoder, Transformer
from pellucid.serve_config import ServeConfig
from pellucid.server.admission import Served
from pellucid.server.auth import Keys
from pellucid.server.run import Server, bind
from pellucid.server.serving import Embedder, Model, Service
from pellucid.tokenizer import train_bpe

LIMIT = 30
TEXTS = [
    f"the {animal} asked the {other} for tea at {n} and said hello"
    for animal in ("fox", "hen", "owl")
    for other in ("cat", "dog")
    for n in range(9)
]


@cache
def tokenizer():
    return train_bpe(TEXTS, 300)


@cache
def weights(window=512):
    """Two layers; its answers depend on the prompt."""
    config = ModelConfig(
        vocab_size=tokenizer().vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=window, initializer_range=0.3,
    )  # fmt: skip
    return Transformer(config, generator=torch.Generator().manual_seed(2)).eval()


def make_model(name, config, *, window=512, blocks=None):
    model = weights(window)
    token = sum(spec.elements_per_token() for spec in model.kv_specs()) * 4
    kv_gb = config.kv_gb if blocks is None else blocks * config.page_size * token / 1e9 * (1 + 1e-9)
    engine = Engine(
        model, kv_gb=kv_gb, page_size=config.page_size, max_running=config.max_running, exact=not config.fast,
        token_budget=config.token_budget,
    )  # fmt: skip
    loaded = (model, tokenizer(), model.config)
    return Model(name, Served.of(name, loaded, engine), engine, config)


@cache
def encoder():
    config = ModelConfig(
        vocab_size=tokenizer().vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    inner = Encoder(config, EmbedConfig(), generator=torch.Generator().manual_seed(3)).eval()

    def encode(text):
        ids = tokenizer().encode(text)
        inner.check(ids, "the text")
        return ids

    return SimpleNamespace(encoder=inner, encode=encode)


def make_service(*, keys=(), window=512, blocks=None, models=("tiny",), **settings):
    settings = {"port": 0, "page_size": 8, "kv_gb": 0.01, "max_running": 16, **settings}
    config = ServeConfig(**settings)
    found = {name: make_model(name, config, window=window, blocks=blocks) for name in models}
    return Service(config, Keys(keys), found, {"vectors": Embedder("vectors", encoder(), config)})


def slow(model, seconds=0.01):
    """Every step of the engine takes at least so long."""
    engine, step = model.front.engine, model.front.engine.step

    def later():
        time.sleep(seconds)
        return step()

    engine.step = later


class Live:
    """A running server."""

    def __init__(self, service):
        self.service, self._listens = service, threading.Event()
        self.server = Server(service, bind(service.config.host, 0), self._told)
        self.thread = threading.Thread(target=self.server.serve_until_ended, daemon=True)
        self.thread.start()
        assert self._listens.wait(LIMIT)

    def _told(self, address):
        self.url, self.port = address, int(address.rpartition(":")[2])
        self._listens.set()

    @property
    def model(self):
        return next(iter(self.service.models.values()))

    @property
    def engine(self):
        return self.model.front.engine

    def end(self):
        self.server.end()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()

    def request(self, method, path, body=None, *, key=None, **headers):
        """(status, headers in lower case, body: parsed where it is JSON)."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            client.request(method, path, data, headers)
            answer = client.getresponse()
            content = answer.read()
        finally:
            client.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        if found.get("content-type", "").startswith("application/json"):
            content = json.loads(content)
        return answer.status, found, content

    def get(self, path, **headers):
        return self.request("GET", path, **headers)

    def post(self, path, body, **headers):
        return self.request("POST", path, body, **headers)

    def open(self, path, body, *, more=b""):
        """A socket on which a request has been sent."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data) + len(more)}\r\n\r\n"
        sent = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
        sent.sendall(head.encode() + data)
        return sent


@contextmanager
def live(**settings):
    found = Live(make_service(**settings))
    try:
        yield found
    finally:
        if found.thread.is_alive():
            found.server.end()
            found.end()


def until(condition, seconds=LIMIT):
    """Wait for it; what it gave."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)
    return found


def idle(engine):
    """Nothing runs and no block is held."""
    return not engine.has_work and engine.stats().held == 0


def chat(text="the fox asked", **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def long_chat(text="the fox asked", tokens=400, **fields):
    """An answer that does not end by itself."""
    return chat(text, max_tokens=tokens, ignore_eos=True, **fields)


def events(data):
    """The data of server-sent events; "[DONE]" as text."""
    found = []
    for block in data.decode().split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                found.append(line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]))
    return found
