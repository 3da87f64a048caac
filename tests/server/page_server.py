"""A server with a script for the chat page's tests: what it answers depends on the last message, and it keeps what it was asked."""

import asyncio
import json
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pellucid.server.routes import PAGE, PAGE_HEADERS

MARKUP = '<img src=x onerror="window.hacked=1"><b>bold</b> &amp; <script>window.hacked=2</script>'
CODE = "Look:\n```python\nprint('<hi>')\n```\nThat is all."
SCRIPTS = "naïve 東京 👩🏽‍🚀 é\r\nend"
STATE = {
    "running": 2, "waiting": 1, "blocks": 64, "free": 40, "cached": 16, "held": 8, "page_size": 16, "tokens_per_s": 57.25,
    "prefix_hits": 0.42, "preemptions": 3, "evictions": 5, "steps": 90, "map": "h" * 8 + "c" * 16 + "f" * 40,
    "blocks_per_letter": 1,
    "requests": [{"id": "chatcmpl-a", "state": "answering", "prompt": 120, "generated": 17, "reused": 64},
                 {"id": "<b>req</b>", "state": "waiting", "prompt": 9, "generated": 0, "reused": 0}],
}  # fmt: skip


def token(text, logprob, *others):
    top = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in ((text, logprob), *others)]
    return {**top[0], "top_logprobs": sorted(top, key=lambda entry: -entry["logprob"])}


class PageServer:
    """Runs in a thread until `stop`; ``asked`` holds the bodies, ``left`` counts clients that went away in mid-stream."""

    def __init__(self, key=None):
        self.key, self.asked, self.left, self.fail_next = key, [], 0, None
        routes = [
            Route("/", self.page),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/debug/state", self.state),
            Route("/debug/steps", self.steps),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            self.thread.join(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self):
        self.server.should_exit = True
        self.thread.join(10)

    def refused(self, request):
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            error = {"message": "give a key", "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": error}, 401)
        return None

    async def page(self, request):
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def models(self, request):
        names = ("tiny", "other/model")
        return self.refused(request) or JSONResponse({"object": "list", "data": [{"id": name} for name in names]})

    async def state(self, request):
        return self.refused(request) or JSONResponse({"models": {"tiny": STATE}})

    async def steps(self, request):
        since = int(request.query_params["since"])
        steps = [
            {
                "step": n,
                "chunks": [["a", 0, n, 1]] + ([["b", 0, 0, 64]] if n % 9 == 0 else [["c", 0, n, 1]]),
                "seconds": 0.004,
            }
            for n in range(since + 1, 61)
        ]
        return self.refused(request) or JSONResponse({"model": "tiny", "steps": steps})

    async def chat(self, request):
        body = await request.json()
        self.asked.append(body)
        if refusal := self.refused(request):
            return refusal
        if self.fail_next is not None:
            message, self.fail_next = self.fail_next, None
            return JSONResponse(
                {"error": {"message": message, "type": "server_error", "param": None, "code": None}}, 503
            )
        last = body["messages"][-1]
        return StreamingResponse(self.stream(last["role"], last["content"]), media_type="text/event-stream")

    async def stream(self, role, text):
        script = SCRIPT.get(text if role == "user" else "tool_result")
        if text == "endless":
            try:
                yield event({"role": "assistant", "content": ""})
                while True:
                    yield event({"content": "and "})
                    await asyncio.sleep(0.02)
            finally:
                self.left += 1
        if text == "broken":
            yield event({"role": "assistant", "content": "half an ans"})
            yield b'data: {"error": {"message": "the engine failed", "type": "server_error"}}\n\n'
            return
        if text == "cut":
            yield event({"role": "assistant", "content": "half"})
            return
        deltas, reason = script or ([{"content": f"You said: {text}"}], "stop")
        data = event({"role": "assistant", "content": ""}) + b": keep-alive\n\n"
        data += b"".join(event(delta) for delta in deltas) + event({}, reason)
        usage = {
            "prompt_tokens": 20,
            "completion_tokens": 7,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        data += b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        data += b"data: [DONE]\n\n"
        yield data.replace(b"\n", b"\r\n") if text == "carriage returns" else data


def event(delta, reason=None):
    delta, logprobs = dict(delta), delta.get("logprobs")
    delta.pop("logprobs", None)
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    return b"data: " + json.dumps({"choices": [choice], "usage": None}, ensure_ascii=False).encode() + b"\n\n"


def call(index, **fields):
    return {"tool_calls": [{"index": index, **fields}]}


SCRIPT = {
    "markup": ([{"content": MARKUP[:5]}, {"content": MARKUP[5:]}, {"content": MARKUP}], "stop"),
    "code": ([{"content": CODE}], "stop"),
    "carriage returns": ([{"content": SCRIPTS}], "stop"),
    "think": ([{"reasoning_content": "<i>hm</i>, "}, {"reasoning_content": "well"}, {"content": "Yes."}], "stop"),
    "long": ([{"content": "word " * 400}], "length"),
    "tool": (
        [
            call(0, id="call_1", type="function", function={"name": "get_weather", "arguments": ""}),
            call(0, function={"arguments": '{"city": '}),
            call(0, function={"arguments": '"Oslo"}'}),
        ],
        "tool_calls",
    ),
    "tool_result": ([{"content": "It is mild."}], "stop"),
    "tokens": (
        [
            {"content": "The", "logprobs": {"content": [token("The", -0.01, ("A", -4.8))]}},
            {"content": " fox", "logprobs": {"content": [token(" fox", -2.3, (" hen", -0.4), ("\n", -3.0))]}},
            {"content": "é", "logprobs": {"content": [
                {"token": "�", "bytes": [0xC3], "logprob": -0.7, "top_logprobs": []},
                {"token": "�", "bytes": [0xA9], "logprob": -0.0, "top_logprobs": []},
            ]}},
        ],
        "stop",
    ),
}  # fmt: skip
