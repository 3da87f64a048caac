"""From the first byte to the last signal: clients that leave, servers that end, engines that die."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from live_server import TEXTS, chat, events, idle, live, long_chat, slow, until

from pellucid.checkpoint.model_folder import save_model
from pellucid.config import ModelConfig
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.server.run import bind
from pellucid.tokenizer import train_bpe

STEPS = 5
"""Within so many a client that has left holds nothing."""


@pytest.fixture(scope="module")
def server():
    with live(
        window=2048, max_running=4, token_budget=32, keys=("a-key-of-ours",), cors_origins=("https://a.b",)
    ) as found:
        slow(found.model, 0.02)
        yield found


def ask(server, body, path="/v1/chat/completions"):
    data = json.dumps(body).encode()
    sent = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: a-key-of-ours\r\nContent-Length: {len(data)}\r\n\r\n"
    sent.sendall(head.encode() + data)
    return sent


def leaves(server, sent):
    """Close, and see that everything comes back within a few steps."""
    steps = server.engine.stats().steps
    sent.close()
    until(lambda: idle(server.engine) and not server.service.num_open)
    assert server.engine.stats().steps - steps <= STEPS
    assert server.model.places.taken == 0 and not server.model.steps.requests and not server.model.front._queues
    server.engine.pool.check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_client_that_leaves_frees_its_pages_within_a_few_steps(server, stream, path):
    sent = ask(server, long_chat(tokens=1500, stream=stream), path)
    drawn = server.engine.stats().decoded
    until(lambda: server.engine.stats().decoded > drawn + 3)
    if stream:
        assert b"200 OK" in sent.recv(4096)
    leaves(server, sent)


def test_a_client_that_leaves_is_no_error_in_the_log(server, caplog):
    for stream in (False, True):
        sent = ask(server, long_chat(tokens=1500, stream=stream))
        drawn = server.engine.stats().decoded
        until(lambda drawn=drawn: server.engine.stats().decoded > drawn + 3)
        with caplog.at_level("INFO"):
            leaves(server, sent)
            until(lambda: " 499 in " in caplog.text)
        assert {record.levelname for record in caplog.records} == {"INFO"}
        caplog.clear()


def test_a_client_that_leaves_while_its_prompt_is_read_is_read_no_further(server):
    sent = ask(server, long_chat("fox " * 700, tokens=100, stream=True))
    prefilled = server.engine.stats().prefilled
    until(lambda: server.engine.stats().prefilled > prefilled)
    leaves(server, sent)
    assert server.engine.stats().prefilled - prefilled < 500


def test_a_client_that_leaves_the_queue_leaves_nothing_behind(server):
    running = [ask(server, long_chat(tokens=1500, n=2)) for _ in range(2)]
    until(lambda: server.engine.stats().running >= 4)
    waiting = ask(server, long_chat(tokens=1500, stream=True))
    until(lambda: server.engine.stats().waiting == 1)
    waiting.close()
    until(lambda: server.engine.stats().waiting == 0)
    assert server.engine.stats().running == 4 and server.model.places.taken == 4
    running[0].close()
    until(lambda: server.engine.stats().running == 2)
    leaves(server, running[1])


def test_one_of_several_samples_or_prompts_leaves_with_its_client(server):
    drawn = server.engine.stats().decoded
    sent = ask(server, {"model": "tiny", "prompt": ["fox", "hen"], "n": 2, "max_tokens": 900, "ignore_eos": True},
               "/v1/completions")  # fmt: skip
    until(lambda: server.engine.stats().decoded > drawn + 8)
    leaves(server, sent)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(server):
    sent = socket.create_connection(("127.0.0.1", server.port))
    sent.sendall(
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nx-api-key: a-key-of-ours\r\nContent-Length: 99\r\n\r\n{"
    )
    until(lambda: server.service.num_open == 1)
    sent.close()
    until(lambda: server.service.num_open == 0)


def test_a_client_that_does_not_read_is_ended_by_the_clock_and_disturbs_nobody():
    with live(window=2048, request_timeout_s=1.5) as server:
        sent = socket.socket()
        sent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sent.connect(("127.0.0.1", server.port))
        data = json.dumps(long_chat(tokens=1900, stream=True, n=8, logprobs=True, top_logprobs=20)).encode()
        sent.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        until(lambda: server.engine.stats().decoded > 50)
        assert server.post("/v1/chat/completions", chat(max_tokens=5))[0] == 200
        until(lambda: not server.service.num_open and idle(server.engine), 10)
        sent.close()


# -- the end ------------------------------------------------------------------------------------------------


def test_answers_that_have_begun_finish_while_new_ones_are_refused():
    with live(window=2048, drain_seconds=20) as server:
        slow(server.model, 0.01)
        assert server.get("/ready")[0] == 200
        found = []
        ask_one = threading.Thread(
            target=lambda: found.append(server.post("/v1/chat/completions", long_chat(tokens=150, stream=True)))
        )
        ask_one.start()
        until(lambda: server.engine.stats().decoded > 3)
        server.server.end()
        until(lambda: server.service.draining)
        assert server.get("/ready")[0] == 503 and server.get("/health")[0] == 200
        status, headers, body = server.post("/v1/chat/completions", chat())
        assert status == 503 and int(headers["retry-after"]) >= 1 and body["error"]["type"] == "server_error"
        assert server.post("/v1/messages", chat())[0] == 529
        ask_one.join(30)
        status, _, data = found[0]
        assert status == 200 and events(data)[-1] == "[DONE]" and len(events(data)) > 20
        server.thread.join(10)
        assert not server.thread.is_alive() and server.server.code == 0


@pytest.mark.parametrize("hurry", [False, True])
def test_what_does_not_finish_in_time_is_told_so_and_the_server_ends(hurry):
    with live(window=2048, drain_seconds=30 if hurry else 0.3) as server:
        slow(server.model, 0.02)
        found = {}

        def ask_one(path, stream):
            found[path, stream] = server.post(path, long_chat(tokens=1900, stream=stream))

        kinds = [(path, stream) for path in ("/v1/chat/completions", "/v1/messages") for stream in (False, True)]
        threads = [threading.Thread(target=ask_one, args=kind) for kind in kinds]
        [t.start() for t in threads]
        until(lambda: len(server.model.steps.requests) == 4 and server.engine.stats().decoded > 8)
        began = time.monotonic()
        server.server.end()
        if hurry:
            until(lambda: server.service.draining)
            server.server.end()
        [t.join(10) for t in threads]
        server.thread.join(10)
        assert not server.thread.is_alive() and time.monotonic() - began < 2.3
        assert server.server.code == (130 if hurry else 0)
        assert found[kinds[0]][0] == 503 and found[kinds[2]][0] == 529
        last = events(found[kinds[1]][2])[-1]
        assert "shutting down" in last["error"]["message"]
        last = events(found[kinds[3]][2])[-1]
        assert last["type"] == "error" and last["error"]["type"] == "overloaded_error"
        assert idle(server.engine)


def test_a_step_that_outlasts_every_promise_does_not_keep_the_process(monkeypatch):
    left = []
    monkeypatch.setattr("pellucid.server.run.os._exit", lambda code: left.append((code, time.monotonic())))
    with live(window=2048, drain_seconds=0.2) as server:
        sent = server.open("/v1/chat/completions", long_chat(stream=True))
        until(lambda: server.engine.stats().decoded > 2)
        slow(server.model, 3)
        time.sleep(0.1)
        began = time.monotonic()
        server.server.handle_exit(signal.SIGTERM, None)
        data = b""
        while part := sent.recv(65536):
            data += part
        assert b"shutting down" in data and time.monotonic() - began < 1.5  # its client is told in time
        until(lambda: left)
        assert server.thread.is_alive() and left[0][0] == 0 and left[0][1] - began < 0.2 + 2
        sent.close()


# -- an engine that dies ------------------------------------------------------------------------------------


def test_a_dead_engine_is_seen_and_fails_requests_at_once(caplog):
    with live() as server:
        for seed in range(3):  # it gives up after three in a row
            server.engine.runner.forward_hidden = broken
            status, headers, body = server.post("/v1/chat/completions", chat(seed=seed, max_tokens=4))
            assert status == 500 and headers["x-should-retry"] == "false" and "secret" not in json.dumps(body)
        assert "the secret reason" in caplog.text and "Traceback" not in caplog.text
        status, _, body = server.get("/health")
        assert status == 503 and body["problems"] == ["tiny"] and server.get("/ready")[0] == 503
        began = time.monotonic()
        for path in ("/v1/chat/completions", "/v1/messages"):
            for stream in (False, True):
                status, headers, body = server.post(path, chat(max_tokens=4, stream=stream))
                assert status == 500 and headers["x-should-retry"] == "false"
                assert "secret" not in json.dumps(body)
        assert time.monotonic() - began < 2
        assert b'pellucid_engine_up{model="tiny"} 0.0' in server.get("/metrics")[2]
        assert server.post("/v1/embeddings", {"model": "vectors", "input": "fox"})[0] == 200


def broken(*_, **__):
    raise RuntimeError("the secret reason")


def test_an_engine_whose_steps_raise_ends_streams_with_an_error_and_is_given_up():
    with live(window=2048) as server:
        slow(server.model, 0.01)
        sent = server.open("/v1/chat/completions", long_chat(tokens=1500, stream=True))
        until(lambda: server.engine.stats().decoded > 3)
        server.engine.step = broken
        data = b""
        while part := sent.recv(65536):
            data += part
            if b'"error"' in data:
                break
        assert b'"error"' in data and b"secret" not in data
        for _ in range(2):
            assert server.post("/v1/chat/completions", chat())[0] == 500
        assert server.get("/health")[0] == 503
        sent.close()


# -- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "small"
    tokenizer = train_bpe(TEXTS, 300)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    save_model(path, Transformer(config), tokenizer)
    return path


def command(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "pellucid", "serve", *map(str, arguments)],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"PELLUCID_ALLOCATOR": "none", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_command_says_where_it_listens_when_it_is_ready_and_ends_on_a_signal(folder):
    process = command(folder, "--port", "0", "--kv-gb", "0.01", "--drain-seconds", "5")
    try:
        while not (
            found := re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)\n", line := process.stderr.readline())
        ):
            assert line, "it ended"
        port = int(found[1])

        def get(path):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as sent:
                sent.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                data = b""
                while part := sent.recv(65536):
                    data += part
            return data

        assert b"200 OK" in get("/ready") and b'"id":"small"' in get("/v1/models")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and time.monotonic() - began < 7
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(folder):
    process = command(folder, "--port", "0", "--kv-gb", "0.01", "--drain-seconds", "60")
    try:
        while "listening" not in (line := process.stderr.readline()):
            assert line
        port = int(line.rpartition(":")[2])
        body = json.dumps(long_chat(tokens=450, stream=True, n=16) | {"model": "small"}).encode()
        sent = socket.create_connection(("127.0.0.1", port), timeout=20)
        sent.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert b"200 OK" in sent.recv(4096)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130 and time.monotonic() - began < 2.5
    finally:
        process.kill()
        process.stderr.close()


def test_a_port_in_use_is_told_before_anything_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1 port"):
            bind("127.0.0.1", taken.getsockname()[1])
