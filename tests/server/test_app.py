"""The application over real sockets: what each route gives, what is refused before a status is sent, and what is held back."""

import base64
import json
import logging
import socket
import struct
import threading
import time

import pytest
import torch
from live_server import chat, events, idle, live, long_chat, slow, until

from pellucid.inference.engine import Engine
from pellucid.inference.request import SamplingParams
from pellucid.server import answering
from pellucid.server.serving import LONG_BODY_THREADS


@pytest.fixture(scope="module")
def server():
    with live() as found:
        yield found


def text_of(body):
    return body["choices"][0]["message"]["content"]


def streamed_text(data):
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events(data)[:-1] if e["choices"])


def test_an_answer_is_what_the_engine_draws_for_the_rendered_prompt(server):
    served = server.model.served
    ids = served.tokenizer.encode_chat([{"role": "user", "content": "the hen asked"}], add_generation_prompt=True)
    params = SamplingParams(temperature=0, max_tokens=12, stop_ids=served.end_ids)
    (expected,) = Engine(server.engine.model, kv_gb=0.01).generate([ids], params)
    status, _, body = server.post("/v1/chat/completions", chat("the hen asked", max_tokens=12, temperature=0))
    assert status == 200 and len(expected.ids) == 12
    assert text_of(body) == served.tokenizer.decode(expected.ids)
    assert body["usage"]["completion_tokens"] == 12 and body["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_and_a_whole_answer_say_the_same(server, route):
    asked = chat("the owl", max_tokens=16, temperature=0)
    whole = server.post(route, asked)[2]
    status, headers, data = server.post(route, asked | {"stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    if route == "/v1/messages":
        told = events(data)
        text = "".join(e["delta"].get("text", "") for e in told if e["type"] == "content_block_delta")
        assert text == whole["content"][0]["text"] and told[-1] == {"type": "message_stop"}
        assert told[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 16
    else:
        assert streamed_text(data) == text_of(whole) != "" and events(data)[-1] == "[DONE]"


def test_several_prompts_and_samples_come_in_prompt_major_order_and_count_once(server):
    asked = {
        "model": "tiny",
        "prompt": ["the fox", "the hen asked"],
        "n": 3,
        "max_tokens": 4,
        "seed": 7,
        "ignore_eos": True,
    }
    body = server.post("/v1/completions", asked)[2]
    assert [c["index"] for c in body["choices"]] == list(range(6))
    for i, prompt in enumerate(asked["prompt"]):
        alone = server.post("/v1/completions", asked | {"prompt": prompt})[2]
        assert [c["text"] for c in alone["choices"]] == [c["text"] for c in body["choices"][3 * i : 3 * i + 3]]
    assert body["usage"]["completion_tokens"] == 24
    assert len({c["text"] for c in body["choices"]}) > 2


def test_echo_scores_the_prompt_as_the_model_does(server):
    asked = {"model": "tiny", "prompt": "the fox asked the hen", "max_tokens": 0, "echo": True, "logprobs": 2}
    status, _, body = server.post("/v1/completions", asked)
    told = body["choices"][0]["logprobs"]
    served = server.model.served
    ids = [served.tokenizer.prefix_id, *served.tokenizer.encode(asked["prompt"])]
    logits = server.engine.model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    expected = [float(logits[i, id_]) for i, id_ in enumerate(ids[1:])]
    assert status == 200 and told["token_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    streamed = events(server.post("/v1/completions", asked | {"stream": True})[2])
    assert streamed[0]["choices"][0]["logprobs"] == told and streamed[0]["choices"][0]["text"] == asked["prompt"]


def test_a_stop_string_ends_its_choice_and_frees_its_place_while_the_others_go_on(server):
    asked = long_chat(tokens=60, n=3, seed=3)
    free = server.post("/v1/chat/completions", asked)[2]["choices"]
    texts = [c["message"]["content"] for c in free]
    stop = next(c for c in texts[1][:20] if c not in texts[0] + texts[2])
    before = server.engine.stats().decoded
    body = server.post("/v1/chat/completions", asked | {"stop": [stop]})[2]
    found = [c["message"]["content"] for c in body["choices"]]
    assert found == [texts[0], texts[1].partition(stop)[0], texts[2]]
    assert [c["finish_reason"] for c in body["choices"]] == ["length", "stop", "length"]
    assert until(lambda: idle(server.engine))
    assert body["usage"]["completion_tokens"] < 165 and server.engine.stats().decoded - before < 170


def test_the_engine_stops_drawing_soon_after_a_stop_string(server):
    text = text_of(server.post("/v1/chat/completions", long_chat(seed=1, tokens=100))[2])
    before = server.engine.stats().decoded
    server.post("/v1/chat/completions", long_chat(seed=1, tokens=100, stop=text[:3]))
    until(lambda: idle(server.engine))
    assert server.engine.stats().decoded - before < 20


def test_cached_tokens_are_told(server):
    asked = chat("the same long beginning of a conversation " * 3, max_tokens=2)
    server.post("/v1/chat/completions", asked)
    usage = server.post("/v1/chat/completions", asked)[2]["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    told = server.post("/v1/messages", asked)[2]["usage"]
    count = server.post("/v1/messages/count_tokens", asked)[2]["input_tokens"]
    assert told["cache_read_input_tokens"] > 0
    assert told["input_tokens"] + told["cache_read_input_tokens"] == count == usage["prompt_tokens"]


def test_a_salt_and_another_key_share_no_prefix():
    asked = chat("the same long beginning of a conversation " * 3, max_tokens=1)

    def cached(body):
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    with live(keys=("key-one-1", "key-two-2")) as server:
        tries = [("key-one-1", {}), ("key-one-1", {}), ("key-two-2", {}), ("key-one-1", {"cache_salt": "x"})]
        found = [cached(server.post("/v1/chat/completions", asked | more, key=key)[2]) for key, more in tries]
    assert found[1] > 0 and [found[0], found[2], found[3]] == [0, 0, 0]


def test_vectors_have_length_one_and_do_not_hang_on_their_neighbours(server):
    def ask(given, **more):
        return server.post("/v1/embeddings", {"model": "vectors", "input": given, **more})[2]

    alone = ask("the fox")["data"][0]["embedding"]
    assert sum(x * x for x in alone) == pytest.approx(1, abs=1e-5)
    together = ask(["the fox", "the hen asked the owl for tea at 3 and said hello"])
    assert together["data"][0]["embedding"] == alone and together["usage"]["prompt_tokens"] > 4
    data = base64.b64decode(ask("the fox", encoding_format="base64")["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(alone, abs=1e-7)
    short = ask("the fox", dimensions=4)["data"][0]["embedding"]
    assert len(short) == 4 and sum(x * x for x in short) == pytest.approx(1, abs=1e-5)
    assert ask("the fox", dimensions=99)["error"]["param"] == "dimensions"
    assert ask("the fox " * 60)["error"]["param"] == "input"


def test_models_are_listed_and_found_whichever_way_their_name_is_written():
    with live(models=("org/tiny", "other")) as server:
        names = [m["id"] for m in server.get("/v1/models")[2]["data"]]
        assert names == ["org/tiny", "other", "vectors"]
        for path in ("org/tiny", "org%2Ftiny", "default"):
            assert server.get(f"/v1/models/{path}")[2]["id"] == "org/tiny"
        for name, told in (("other", "other"), ("default", "org/tiny")):
            assert server.post("/v1/chat/completions", chat(max_tokens=1) | {"model": name})[2]["model"] == told
        status, _, body = server.post("/v1/chat/completions", chat() | {"model": "gpt-9"})
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        assert server.get("/v1/models/gpt-9")[0] == 404
        status, _, body = server.get("/v1/models/gpt-9", anthropic_version="2023-06-01")
        assert body["error"]["type"] == "not_found_error"


def test_any_model_lets_the_first_answer_to_every_name():
    with live(any_model=True) as server:
        assert server.post("/v1/chat/completions", chat(max_tokens=1) | {"model": "gpt-9"})[2]["model"] == "tiny"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "change", "status", "code"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "empty_array"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_value"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "fox " * 700}]},
            400,
            "context_length_exceeded",
        ),
        ("/v1/chat/completions", {"logit_bias": {"99999": 1}}, 400, "invalid_value"),
        ("/v1/chat/completions", {"n": 17}, 400, "integer_above_max_value"),
        ("/v1/chat/completions", {"model": "nobody"}, 404, "model_not_found"),
        ("/v1/messages", {"max_tokens": 0}, 400, None),
        ("/v1/messages", {"messages": [{"role": "user", "content": "fox " * 700}]}, 400, None),
    ],
)
def test_what_is_refused_is_refused_before_a_stream_begins(server, route, change, status, code, stream):
    got, headers, body = server.post(route, chat(max_tokens=4, stream=stream) | change)
    assert got == status and headers["content-type"] == "application/json"
    assert body["error"].get("code") == code
    assert body.get("type") == ("error" if route == "/v1/messages" else None)
    assert until(lambda: idle(server.engine)) and server.model.places.taken == 0


def test_every_answer_has_a_request_id_and_a_sane_one_is_kept(server):
    for method, path in (("GET", "/health"), ("GET", "/nowhere"), ("POST", "/v1/messages"), ("DELETE", "/v1/models")):
        _, headers, body = server.request(method, path)
        assert headers["x-request-id"] == headers["request-id"]
        assert path != "/v1/messages" or body["request_id"] == headers["request-id"]
    assert server.get("/health", x_request_id="mine-1")[1]["request-id"] == "mine-1"
    assert server.get("/health", x_request_id="two words")[1]["request-id"] != "two words"


def test_unknown_paths_and_methods_are_told_in_the_vendors_words_and_never_redirected(server):
    assert server.post("/v1/chat/completions/", {})[0] == 404
    status, headers, body = server.get("/v1/chat/completions")
    assert status == 405 and headers["allow"] == "POST" and body["error"]["type"] == "invalid_request_error"
    assert server.get("/v1/messages")[2]["type"] == "error"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_is_not_read_to_its_end(chunked):
    with live(max_body_mb=0.1) as server, socket.create_connection(("127.0.0.1", server.port), timeout=20) as sent:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        if chunked:
            sent.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
            for _ in range(5):
                sent.sendall(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        else:
            sent.sendall((head + "Content-Length: 100000000000\r\n\r\n").encode())
        answer = b""
        while not answer.endswith(b"}}"):
            answer += (part := sent.recv(65536))
            assert part
        assert b" 413 " in answer and b"connection: close" in answer.lower()


def test_deep_and_broken_bodies_are_the_clients_mistake(server):
    for body in (
        b"",
        b"[]",
        b"{",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"\xff",
        b'{"model":"tiny","messages":NaN}',
        b"1" * 9000,
    ):
        for route in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"):
            assert server.post(route, body)[0] == 400


def test_a_full_queue_is_told_at_once_with_a_time_to_come_back():
    with live(max_running=2, max_queue=1, window=2048) as server:
        slow(server.model, 0.005)
        for _ in range(2):  # how long an answer is, and how fast tokens come
            server.post("/v1/chat/completions", long_chat(tokens=100))
        taken = [server.open("/v1/chat/completions", long_chat(tokens=1500)) for _ in range(3)]
        until(lambda: server.model.places.taken == 3)
        began = time.monotonic()
        status, headers, body = server.post("/v1/chat/completions", long_chat(stream=True))
        assert status == 429 and body["error"]["code"] == "rate_limit_exceeded" and time.monotonic() - began < 2
        # 100 tokens an answer at less than 200 tokens a second for each of two
        assert 1 <= int(headers["retry-after"]) <= 3
        assert server.post("/v1/messages", long_chat())[2]["error"]["type"] == "rate_limit_error"
        for one in taken:
            one.close()
        until(lambda: server.model.places.taken == 0)
        assert server.post("/v1/chat/completions", chat(max_tokens=1))[0] == 200
        assert b'event="refused",model="tiny"} 2.0' in server.get("/metrics")[2]


def test_bodies_on_their_way_are_bounded(monkeypatch):
    monkeypatch.setattr("pellucid.server.serving.MAX_BODIES", 2)
    with live(max_running=1, max_queue=0) as server:
        sent = [server.open("/v1/messages", chat(), more=b"x" * 9) for _ in range(3)]  # nine bytes never come
        until(lambda: server.service.num_open == 3)
        status, headers, body = server.post("/v1/chat/completions", chat(max_tokens=1))
        assert status == 429 and headers["retry-after"] == "1" and "3 requests are open" in body["error"]["message"]
        assert server.get("/health")[0] == 200
        sent.pop().close()
        until(lambda: server.service.num_open == 2)
        assert server.post("/v1/chat/completions", chat(max_tokens=1))[0] == 200
        for one in sent:
            one.close()


def test_long_bodies_do_not_keep_short_ones_waiting(monkeypatch):
    """However many come: reading and tokenising one takes seconds."""
    read, begun, go_on = answering.admit, [], threading.Event()

    def admit(generation, *more, **named):
        if len(generation.messages[0]["content"]) > 20_000:
            begun.append(1)
            assert go_on.wait(30)
        return read(generation, *more, **named)

    monkeypatch.setattr(answering, "admit", admit)
    with live() as server:
        long = [server.open("/v1/chat/completions", chat("fox " * 6_000, max_tokens=1)) for _ in range(40)]
        until(lambda: len(begun) == LONG_BODY_THREADS and server.service.num_open == 40)
        for route in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
            assert server.post(route, chat(max_tokens=1))[0] == 200
        assert len(begun) == LONG_BODY_THREADS
        for one in long[LONG_BODY_THREADS:]:
            one.close()
        until(lambda: server.service.num_open == LONG_BODY_THREADS)
        go_on.set()
        assert all(b" 400 " in one.recv(20) for one in long[:LONG_BODY_THREADS])  # it is longer than the window
        assert len(begun) == LONG_BODY_THREADS  # nobody waited for the others any more


def test_texts_that_wait_for_vectors_are_bounded_too(monkeypatch):
    with live(max_queue=1) as server:
        embedder = server.service.embedders["vectors"]
        release, found = threading.Event(), []
        monkeypatch.setattr(
            embedder.loaded.encoder, "embed_ids", lambda ids, batch_size: release.wait(20) and torch.ones(1, 32)
        )
        asked = {"model": "vectors", "input": "fox"}
        threads = [
            threading.Thread(target=lambda: found.append(server.post("/v1/embeddings", asked)[0])) for _ in range(2)
        ]
        [t.start() for t in threads]
        until(lambda: embedder.places.taken == 2)
        status, headers, _ = server.post("/v1/embeddings", asked)
        assert status == 429 and headers["retry-after"] == "1"
        release.set()
        [t.join(20) for t in threads]
        assert found == [200, 200] and embedder.places.taken == 0


def test_an_answer_that_takes_too_long_is_ended_and_frees_its_pages():
    with live(request_timeout_s=0.3, window=2048) as server:
        slow(server.model, 0.02)
        status, headers, body = server.post("/v1/chat/completions", long_chat(tokens=1500))
        assert status == 504 and headers["x-should-retry"] == "false" and "0.3 seconds" in body["error"]["message"]
        status, _, data = server.post("/v1/chat/completions", long_chat(tokens=1500, stream=True))
        assert status == 200 and events(data)[-1]["error"]["code"] == "timeout" and len(events(data)) > 3
        # of Anthropic's fields none keeps an answer from ending by itself, so this is the likeliest one, which does not
        _, _, data = server.post("/v1/messages", long_chat(tokens=1500, temperature=0, stream=True))
        assert events(data)[-1]["type"] == "error" and b"event: error\n" in data
        assert until(lambda: idle(server.engine))


def test_a_stream_that_waits_is_kept_alive_by_comments():
    with live(keep_alive_s=0.1, max_running=1, window=2048) as server:
        slow(server.model, 0.02)
        first = server.open("/v1/chat/completions", long_chat(tokens=60))
        until(lambda: server.engine.stats().running)
        _, _, data = server.post("/v1/chat/completions", long_chat(tokens=2, stream=True))
        first.close()
    assert data.startswith(b": keep-alive\n\n: keep-alive\n\n") and events(data)[-1] == "[DONE]"
    assert b": keep-alive" not in data.partition(b"data:")[2]


def test_the_first_of_many_prompts_is_answered_before_the_last_is_read():
    with live(max_running=1, window=2048) as server:
        slow(server.model, 0.005)
        asked = {"model": "tiny", "prompt": ["fox", "hen", "owl"], "max_tokens": 20, "ignore_eos": True, "stream": True}
        sent = server.open("/v1/completions", asked)
        data = b""
        while data.count(b"data: ") < 12:
            data += sent.recv(4096)
        assert server.engine.stats().waiting == 2
        while b"[DONE]" not in data:
            data += sent.recv(65536)
        sent.close()
        whole = server.post("/v1/completions", asked | {"stream": False, "seed": 1, "echo": True, "logprobs": 1})[2]
        told = events(server.post("/v1/completions", asked | {"seed": 1, "echo": True, "logprobs": 1})[2])
    for choice in whole["choices"]:
        mine = [e["choices"][0] for e in told[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        scored = [value for c in mine if c["logprobs"] for value in c["logprobs"]["token_logprobs"]]
        assert scored == choice["logprobs"]["token_logprobs"]


def test_a_fault_of_ours_tells_nothing_of_itself(server, caplog, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("/secret/path")

    monkeypatch.setattr("pellucid.server.answering.admit", broken)
    monkeypatch.setattr("pellucid.server.routes.step_lines", broken)
    with caplog.at_level(logging.ERROR):
        for status, headers, body in (server.post("/v1/chat/completions", chat()), server.get("/debug/steps")):
            assert status == 500 and headers["x-should-retry"] == "false"
            assert "secret" not in json.dumps(body) and "Zero" not in json.dumps(body)
            assert headers["x-request-id"] in caplog.text
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
def test_a_grammar_that_cannot_be_followed_is_the_clients_mistake(server, route):
    """The library finds out while the answer is written, each time anew: clients must not try again."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}
    format_ = {"type": "json_schema", "json_schema": {"name": "wide", "schema": wide}, "schema": wide}
    asked = chat(max_tokens=8, response_format=format_, output_config={"format": format_})
    status, headers, body = server.post(route, asked)
    assert status == 400 and "x-should-retry" not in headers and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("the grammar cannot be followed further: ")
    told = events(server.post(route, asked | {"stream": True})[2])
    assert told[-1]["error"]["type"] == "invalid_request_error"
    assert until(lambda: idle(server.engine))


def test_the_log_holds_no_text_of_clients_unless_asked(caplog):
    asked = chat("a very private fox", max_tokens=2, secret_field="private too")
    for log_prompts in (False, True):
        caplog.clear()
        with caplog.at_level(logging.DEBUG), live(log_prompts=log_prompts) as server:
            server.post("/v1/chat/completions", asked)
            server.post("/v1/chat/completions", asked | {"temperature": 99})
        assert ("private fox" in caplog.text) is log_prompts
        assert caplog.text.count("'secret_field' is not known") == 1 and "/v1/chat/completions 200" in caplog.text


def test_what_a_stream_costs_is_told_in_full_by_the_inspector(server):
    with live(window=2048) as server:
        slow(server.model, 0.01)
        sent = server.open("/v1/chat/completions", long_chat(tokens=1500, stream=True))
        state = until(lambda: (s := server.get("/debug/state")[2]["models"]["tiny"])["running"] and s["requests"] and s)
        until(lambda: server.get("/debug/state")[2]["models"]["tiny"]["requests"][0]["state"] == "answering")
        later = server.get("/debug/state")[2]["models"]["tiny"]
        assert set(state) == {
            "running", "waiting", "blocks", "free", "cached", "held", "page_size", "tokens_per_s", "prefix_hits",
            "preemptions", "evictions", "steps", "map", "blocks_per_letter", "requests",
        }  # fmt: skip
        assert later["held"] >= 1 and later["map"].count("h") >= 1 and later["tokens_per_s"] > 0
        assert later["free"] + later["cached"] + later["held"] == later["blocks"]
        (request,) = later["requests"]
        assert request["id"].startswith("chatcmpl-") and request["generated"] > 0 and request["prompt"] > 5
        lines = server.get("/debug/steps?model=tiny")[2]["steps"]
        assert lines[-1]["step"] == len(lines) and lines[-1]["chunks"][0][0] == request["id"]
        since = server.get(f"/debug/steps?since={lines[-1]['step']}")[2]["steps"]
        assert all(line["step"] > lines[-1]["step"] for line in since)
        assert server.get("/debug/steps?since=x")[0] == 400
        sent.close()
        until(lambda: server.get("/debug/state")[2]["models"]["tiny"]["requests"] == [])


def test_many_streams_at_once_each_say_what_they_say_alone(server):
    alone = [text_of(server.post("/v1/chat/completions", long_chat(f"fox {i}", 20, seed=i))[2]) for i in range(12)]
    found = [None] * 12

    def ask(i):
        found[i] = streamed_text(server.post("/v1/chat/completions", long_chat(f"fox {i}", 20, seed=i, stream=True))[2])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == alone and len(set(alone)) == 12
