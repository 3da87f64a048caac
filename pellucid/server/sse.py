"""Server-sent events, as both vendors' clients read them (WHATWG HTML, section 9.2)."""

import json
from collections.abc import Mapping
from typing import Any

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The last keeps nginx from holding events back."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see that the connection lives. To be sent between events only."""
DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's."""

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump(value: Any) -> bytes:
    """Compact JSON on one line, UTF-8. What cannot be a character becomes ``?``; NaN and infinities are an error of ours."""
    return _JSON.encode(value).encode("utf-8", "replace")


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; ``name`` is its ``event:`` line."""
    line = b"" if name is None else b"event: " + name.encode() + b"\n"
    return line + b"data: " + dump(data) + b"\n\n"
