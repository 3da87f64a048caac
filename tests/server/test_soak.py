"""Many connections that do everything clients do: nothing is lost, nothing piles up, and good requests stay good."""

import json
import os
import random
import socket
import threading
import time

import pytest
from live_server import events, idle, live, long_chat, until

SECONDS = float(os.environ.get("PELLUCID_SOAK_SECONDS", "120"))
"""`make soak` sets ten minutes."""
CONNECTIONS = 16
GROWTH = 24e6
"""Bytes that the process may grow by after its first part: what allocators keep here and there, but no leak."""
JUNK = (b"", b"{", b"[]", b"\xff\xfe", b'{"model": 1}', b'{"model":"tiny","messages":[{"role":"user","content":7}]}')


class Clients:
    """What happened, over all connections."""

    def __init__(self, server):
        self.server, self.problems, self.counts = server, [], {}
        self.end = time.monotonic() + SECONDS
        self.known = {seed: self.text(seed) for seed in range(8)}

    def text(self, seed):
        status, _, body = self.server.post("/v1/chat/completions", long_chat(f"fox {seed}", 30, seed=seed))
        assert status == 200
        return body["choices"][0]["message"]["content"]

    def run(self, number):
        rng = random.Random(number)
        doings = [
            self.whole,
            self.streamed,
            self.stopped,
            self.leaves,
            self.leaves_early,
            self.junk,
            self.several,
            self.counts_,
        ]
        while time.monotonic() < self.end:
            doing = rng.choice(doings)
            try:
                doing(rng)
            except Exception as error:
                self.problems.append(f"{doing.__name__}: {type(error).__name__}: {error}")
            self.counts[doing.__name__] = self.counts.get(doing.__name__, 0) + 1

    def whole(self, rng):
        seed = rng.randrange(8)
        status, _, body = self.server.post("/v1/chat/completions", long_chat(f"fox {seed}", 30, seed=seed))
        assert status == 429 or (status == 200 and body["choices"][0]["message"]["content"] == self.known[seed])

    def streamed(self, rng):
        seed = rng.randrange(8)
        status, _, data = self.server.post("/v1/chat/completions", long_chat(f"fox {seed}", 30, seed=seed, stream=True))
        if status != 429:
            told = events(data)
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in told[:-1])
            assert told[-1] == "[DONE]" and text == self.known[seed]

    def stopped(self, rng):
        seed = rng.randrange(8)
        stop = self.known[seed][rng.randrange(len(self.known[seed]) - 2) :][:2]
        asked = long_chat(f"fox {seed}", 30, seed=seed, stop=[stop], n=rng.choice([1, 1, 3]))
        status, _, body = self.server.post("/v1/chat/completions", asked)
        assert status == 429 or body["choices"][0]["message"]["content"] == self.known[seed].partition(stop)[0]

    def leaves(self, rng):
        path = rng.choice(["/v1/chat/completions", "/v1/messages"])
        asked = long_chat("fox " * rng.randrange(200), 400, stream=rng.random() < 0.5)
        sent = self.server.open(path, asked)
        time.sleep(rng.random() * 0.2)
        sent.close()

    def leaves_early(self, rng):
        sent = socket.create_connection(("127.0.0.1", self.server.port), timeout=20)
        sent.sendall(
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"[: rng.randrange(1, 75)]
        )
        sent.close()

    def junk(self, rng):
        path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings", "/nope"])
        status, _, body = self.server.post(path, rng.choice(JUNK))
        assert status in (400, 404), (status, body)

    def several(self, rng):
        asked = {
            "model": "tiny",
            "prompt": ["fox", "hen " * rng.randrange(1, 50)],
            "n": 2,
            "max_tokens": 9,
            "logprobs": 3,
        }
        status, _, body = self.server.post("/v1/completions", asked | {"echo": rng.random() < 0.5})
        assert status == 429 or len(body["choices"]) == 4

    def counts_(self, rng):
        assert self.server.get(rng.choice(["/metrics", "/debug/state", "/v1/models", "/health"]))[0] == 200
        status, _, body = self.server.post("/v1/embeddings", {"model": "vectors", "input": ["fox", "hen " * 5]})
        assert status == 200 and len(json.dumps(body)) > 100


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")
def test_a_crowd_of_clients_leaves_the_server_as_it_was():
    with live(window=512, blocks=150, max_running=12, max_queue=24, prefix_cache=True) as server:
        clients = Clients(server)
        threads = [threading.Thread(target=clients.run, args=(i,), daemon=True) for i in range(CONNECTIONS)]
        [t.start() for t in threads]
        time.sleep(SECONDS * 0.4)
        early = resident_bytes()
        for thread in threads:
            thread.join(SECONDS + 60)
            assert not thread.is_alive(), "a client hangs"
        grown = resident_bytes() - early
        until(lambda: idle(server.engine) and not server.service.num_open)
        server.engine.pool.check()
        assert clients.problems == [] and sum(clients.counts.values()) > 2 * SECONDS
        assert len(clients.counts) == 8 and server.model.places.taken == 0 and not server.model.steps.requests
        assert server.engine.stats().evictions > 0 and len(server.server.server_state.connections) <= 1
        assert grown < GROWTH, f"grew by {grown / 1e6:.0f} MB"
        assert clients.text(3) == clients.known[3]
        print(clients.counts, f"grew by {grown / 1e6:.1f} MB", server.engine.stats())
