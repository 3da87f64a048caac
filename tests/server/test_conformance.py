"""Our server passes the suite with every generation of the vendors' clients, and the suite sees what is wrong."""

import http.client
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from live_server import live

from pellucid.cli import main
from pellucid.conformance.case import Case, Failed, Target, says_unsupported
from pellucid.conformance.child import column_cases, judge
from pellucid.conformance.run import VENDORS, Column, find_columns, find_target, run_column
from pellucid.conformance.wire import Answer

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".clients"
GENERATIONS = re.search(r"^CLIENTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
KEY = "a-good-key"


def column(name):
    if name == "raw":
        return Column("raw", "raw", None)
    if not (CLIENTS / name / name.partition("-")[0]).is_dir():
        pytest.skip(f"the client {name} is not in .clients: make setup-clients")
    return Column(name, name.partition("-")[0], CLIENTS / name)


@pytest.fixture(scope="module")
def ours():
    with live(window=2048, keys=(KEY,)) as running:
        yield running


@pytest.fixture(scope="module")
def target(ours):
    return find_target(ours.url, KEY, None)


def run(name, target, only=""):
    return run_column(column(name), target, VENDORS, lambda result: None, only=only, timeout_s=60)


def bad(results):
    return {f"{result.vendor} {result.case}": result.reason for result in results if result.status != "passed"}


def test_three_generations_of_both_vendors_are_tested():
    assert [name.partition("-")[0] for name in GENERATIONS] == ["openai"] * 3 + ["anthropic"] * 3


def test_the_server_is_found_out(ours, target):
    assert target == Target(ours.url, KEY, "tiny", "vectors", "", 2048, True, {})


NEWEST = {GENERATIONS[2], GENERATIONS[5], "raw"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in NEWEST else pytest.mark.slow) for name in (*GENERATIONS, "raw")]
)
def test_our_server_passes(name, target):
    results = run(name, target)
    assert bad(results) == {}
    assert len(results) >= {"openai": 75, "anthropic": 45, "raw": 20}[name.partition("-")[0]]


# -- the suite sees what is wrong: a proxy makes mistakes between our server and the clients --------------------


@contextmanager
def proxy(url, spoil):
    """A server that asks ``url`` and lets ``spoil(path, request, status, headers, body)`` change the last three."""
    host = url.rpartition("/")[2]

    class Between(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            inner = http.client.HTTPConnection(host, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            inner.request(self.command, self.path, given, kept)
            answer = inner.getresponse()
            body = answer.read()
            inner.close()
            try:
                request = json.loads(given)
            except ValueError:
                request = None
            request = request if isinstance(request, dict) else {}
            headers = {name.lower(): value for name, value in answer.getheaders()}
            status, headers, body = spoil(self.path, request, answer.status, headers, body)
            self.send_response_only(status)
            for name, value in headers.items():
                if name not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Between)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def spoiled(target, url):
    return Target(url, target.key, target.model, target.embedder, "", target.window, True)


def spoil_openai(path, request, status, headers, body):
    """A mistake for each of ten cases."""
    asked = [name for name in ("n", "stop", "tools", "logprobs", "dimensions", "stream_options") if request.get(name)]
    events = body.decode().split("\n\n") if request.get("stream") and status == 200 else []
    value = json.loads(body) if headers["content-type"].startswith("application/json") and body else {}
    if request.get("max_tokens") == 2 and "usage" in value:
        value["usage"]["completion_tokens"] += 1
    if asked == ["stop"] and "choices" in value:
        value["choices"][0]["message"]["content"] += request["stop"][0]
    if request.get("n") == 0:
        value["error"]["code"] = None
    if request.get("temperature") == -1:
        status = 422
    if "logprobs" in asked and "choices" in value:
        value["choices"][0]["logprobs"]["content"] = value["choices"][0]["logprobs"]["content"][1:]
    if "dimensions" in asked:
        import base64

        import numpy as np

        item = value["data"][0]
        longer = 2 * np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
        item["embedding"] = base64.b64encode(longer.tobytes()).decode()
    if "stream_options" in asked:
        events = [event for event in events if '"choices":[]' not in event.replace(" ", "")]
    elif "tools" in asked:
        call = re.search(r'"id": ?"(call_\w+)"', body.decode())
        again = '"tool_calls":[{"id":"' + (call[1] if call else "") + '",'
        events = [event if '"name"' in event else event.replace('"tool_calls":[{', again) for event in events]
    elif "n" in asked and events:
        events = [events[1], events[0], *events[2:]]
    elif request.get("max_tokens") == 1 and events:
        events = [events[0], *events]
    if path.endswith("/models") and request == {}:
        for model in value["data"]:
            model.pop("created")
    return status, headers, json.dumps(value).encode() if value else "\n\n".join(events).encode() if events else body


def test_the_suite_sees_mistakes_on_openais_routes(ours, target):
    wrong = {
        "openai chat: max_tokens 2", "openai chat: stop string", "openai chat: logprobs and top_logprobs",
        "openai stream: usage", "openai stream: n=2", "openai stream: max_tokens 1", "openai tools: streamed",
        "openai embeddings: dimensions", "openai models", "openai refused: n 0", "openai refused: temperature -1",
    }  # fmt: skip
    right = {
        "openai chat: max_tokens 3",
        "openai stream",
        "openai refused: temperature 9",
        "openai tools: required",
    }
    with proxy(ours.url, spoil_openai) as url:
        only = "^(" + "|".join(map(re.escape, wrong | right)) + ")$"
        results = run(GENERATIONS[2], spoiled(target, url), only)
    assert set(bad(results)) == wrong
    assert len(results) == len(wrong | right)


def spoil_anthropic(path, request, status, headers, body):
    """A mistake for each of six cases."""
    events = body.decode().split("\n\n") if request.get("stream") and status == 200 else []
    value = json.loads(body) if headers["content-type"].startswith("application/json") and body else {}
    if path.endswith("/count_tokens"):
        value["input_tokens"] = value.get("input_tokens", 0) + 1
    if request.get("stop_sequences") and value and "stop_sequence" in value:
        value["stop_sequence"] = None
    if request.get("max_tokens") == 0:
        value["error"]["type"] = "api_error"
    if request.get("max_tokens") == 1:
        events = [event.partition("\n")[2] if "content_block_delta" in event else event for event in events]
    if request.get("tools"):
        first = next(
            (
                i
                for i, event in enumerate(events)
                if "input_json_delta" in event and "{" in event.partition("partial_json")[2][3:6]
            ),
            None,
        )
        events = [event for i, event in enumerate(events) if i != first]
    if request.get("model") == "no-such-model":
        status = 400
    return status, headers, json.dumps(value).encode() if value else "\n\n".join(events).encode() if events else body


def test_the_suite_sees_mistakes_on_anthropics_routes(ours, target):
    wrong = {
        "anthropic count_tokens", "anthropic messages: stop_sequences", "anthropic stream: max_tokens 1",
        "anthropic tools: streamed", "anthropic refused: max_tokens 0", "anthropic refused: unknown model",
    }  # fmt: skip
    right = {
        "anthropic messages: max_tokens 2",
        "anthropic stream",
        "anthropic tools: any",
        "anthropic refused: messages empty",
    }
    with proxy(ours.url, spoil_anthropic) as url:
        only = "^(" + "|".join(map(re.escape, wrong | right)) + ")$"
        results = run(GENERATIONS[5], spoiled(target, url), only)
    assert set(bad(results)) == wrong
    assert len(results) == len(wrong | right)


def spoil_wire(path, request, status, headers, body):
    """Mistakes that clients forgive or never see."""
    headers.pop("www-authenticate", None)
    headers.pop("x-request-id", None)
    body = body.replace(b"data: [DONE]\n\n", b"").replace(b"event: content_block_start\n", b"")
    if status == 405:
        headers["content-type"], body = "text/plain", b"Method Not Allowed"
    if status == 400 and request.get("temperature") == 9:
        status = 200
    return status, headers, body


def test_the_suite_sees_mistakes_that_clients_forgive(ours, target):
    wrong = {
        "openai key: none", "openai headers: request ids", "openai stream: headers and framing",
        "openai stream: usage null before the last chunk", "openai stream: a refusal is no stream",
        "openai route: unknown, wrong method",
        "anthropic stream: headers and framing",
    }  # fmt: skip
    with proxy(ours.url, spoil_wire) as url:
        results = run("raw", spoiled(target, url), "^(?!openai body: too large)")  # the proxy would wait for its 1 TB
    assert set(bad(results)) == wrong
    assert len(results) >= 18


# -- what is skipped, and what a column's process may do --------------------------------------------------------


class Refusal(Exception):
    def __init__(self, status_code, text):
        super().__init__(text)
        self.status_code = status_code


@pytest.mark.parametrize(
    ("feature", "error", "status"),
    [
        ("tools", Refusal(400, "tools are not supported by this model"), "skipped"),
        ("tools", Refusal(404, "no such route"), "skipped"),
        ("tools", Refusal(400, "tools[0].function is missing"), "failed"),
        ("tools", Refusal(500, "tools are not supported"), "failed"),
        ("tools", Failed("tools are not supported"), "failed"),
        (None, Refusal(404, "no such route"), "failed"),
    ],
)
def test_only_a_server_that_says_so_is_excused(feature, error, status):
    def raises(_):
        raise error

    result = judge(Case("openai", "x", raises, False, feature), None)
    assert (result["status"], str(error) in result["reason"]) == (status, True)


def test_embeddings_are_skipped_with_the_servers_words():
    assert says_unsupported(400, "model 'tiny' is not an embedding model")
    target = Target("http://127.0.0.1:1", None, "tiny", None, "no embeddings: 404 there is no encoder", None, False)
    (case,) = [case for case in column_cases("openai", list(VENDORS)) if case.name == "embeddings"]

    class Subject:
        pass

    Subject.target = target
    assert judge(case, Subject())["reason"] == target.no_embedder
    assert judge(case, Subject())["status"] == "skipped"


def test_a_protocol_that_is_not_there_is_skipped_as_a_whole(ours):
    def spoil(path, request, status, headers, body):
        if path.startswith("/v1/messages"):
            status, headers, body = 404, {"content-type": "text/plain"}, b"no such page"
        return status, headers, body

    with proxy(ours.url, spoil) as url:
        found = find_target(url, KEY, None)
        results = run("raw", found, "stream")
    assert found.missing == {"anthropic": "no /v1/messages: 404 no such page"}
    skipped = {result.vendor for result in results if result.status == "skipped"}
    assert (skipped, {result.vendor for result in results if result.status == "passed"}) == ({"anthropic"}, {"openai"})


FAKE = """
import os, sys
__version__ = "9.9.9"
calls = 0
class APIStatusError(Exception): status_code = 0
class DefaultHttpxClient:
    def __init__(self, **options): pass
class Anything:
    def __getattr__(self, name): return self
    def __call__(self, *args, **options):
        global calls
        calls += 1
        print("a client that talks", flush=True)
        {what}
        raise RuntimeError("nothing works")
class OpenAI(Anything):
    def __init__(self, **options): pass
"""


def fake_client(folder, what="", version="9.9.9"):
    inner = folder / f"openai-{version}" / "openai"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text(FAKE.format(what=what))
    return ["--clients", str(folder), "--key", KEY, "--only", "openai", "--quiet"]


def test_the_command_prints_a_table_and_fails_where_a_case_fails(ours, tmp_path, capsys):
    flags = fake_client(tmp_path)
    assert main(["conformance", ours.url, *flags, "--cases", "chat: n=2|body: an array"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["case", "openai-9.9.9", "raw"], ["openai", "chat:", "n=2", "FAIL"], ["openai", "body:", "an", "array", "ok"],
    ]  # fmt: skip
    assert any("RuntimeError: nothing works" in line for line in lines)
    assert lines[-1] == "conformance: 1 passed, 1 failed, 0 skipped"
    assert main(["conformance", ours.url + "/v1/", *flags, "--cases", "body: an array", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["embedder"], told["passed"], told["failed"]) == ("tiny", "vectors", 1, 0)
    assert [(r["column"], r["case"], r["status"]) for r in told["results"]] == [("raw", "body: an array", "passed")]


def test_a_client_that_dies_fails_what_is_left_of_its_column(target, tmp_path):
    fake_client(tmp_path, "if calls > 2: sys.stderr.write('a bad end'); os._exit(3)")
    (found, _) = find_columns(tmp_path, "openai")
    told = []
    results = run_column(found, target, ["openai"], told.append, only="^openai chat: max_tokens")
    assert told == results and [result.status for result in results] == ["failed"] * 3
    assert "nothing works" in results[0].reason
    assert "ended before it" in results[-1].reason and "a bad end" in results[-1].reason


def test_a_silent_client_is_given_up(target, tmp_path):
    fake_client(tmp_path, "import time; time.sleep(60)")
    (found, _) = find_columns(tmp_path, "openai")
    (result,) = run_column(found, target, ["openai"], lambda result: None, only="chat: n=2", timeout_s=1.0)
    assert (result.status, "nothing for 3 s" in result.reason) == ("failed", True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--clients", "nowhere"], "make setup-clients"),
        (["--key", "wrong-key"], "refuses this one"),
        (["--key", ""], "asks for a key; give it with --key"),
        (["--cases", "("], "--cases must be a regular expression"),
        (["--model", "nobody"], "no model answers a chat (nobody: 404"),
    ],
)
def test_what_the_command_cannot_use_is_named(ours, tmp_path, capsys, flags, message):
    assert main(["conformance", ours.url, *fake_client(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_with_another_version_inside_is_refused(ours, tmp_path, capsys):
    assert main(["conformance", ours.url, *fake_client(tmp_path, version="8.0.0")]) == 2
    assert "holds openai 9.9.9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "message"), [("127.0.0.1:8000", "must look like"), ("http://127.0.0.1:1", "is the server running")]
)
def test_a_server_that_is_not_there_is_named(url, message, tmp_path, capsys):
    assert main(["conformance", url, *fake_client(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_stream_cut_within_an_event_is_seen():
    with pytest.raises(Failed, match="without its blank line"):
        Answer(200, {}, b"data: 1\n\ndata: 2\n").events()
    with pytest.raises(Failed, match="not UTF-8"):
        Answer(200, {}, b"data: \xff\n\n").events()
    found = Answer(200, {}, b": hi\r\n\r\nevent: a\r\ndata: 1\r\ndata:2\r\n\r\ndata\r\n\r\n").events()
    assert found == [("a", "1\n2"), (None, "")]
