"""Runs in a process of its own with one vendor's client on its path: what that client makes of given answers.

In: a list of cases as JSON. Out: for each, what the client gave, or {"raised", "status", "code", "param", "type", "message"}.
"""

import base64
import json
import sys
from typing import Any

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def main() -> None:
    vendor, cases = sys.argv[1], json.load(sys.stdin)
    results = []
    for case in cases:
        try:
            results.append(ask(vendor, case))
        except Exception as error:
            inner = getattr(error, "body", None)
            results.append(
                {
                    "raised": type(error).__name__,
                    "status": getattr(error, "status_code", None),
                    "code": getattr(error, "code", None),
                    "param": getattr(error, "param", None),
                    "type": getattr(error, "type", None),
                    "message": str(error),
                    "body": inner if isinstance(inner, dict) else None,
                }
            )
    json.dump(results, sys.stdout)


def ask(vendor: str, case: dict[str, Any]) -> Any:
    client = connect(vendor, case)
    match case["call"]:
        case "chat":
            return client.chat.completions.create(**BODY).to_dict()
        case "chat stream":
            return [chunk.to_dict() for chunk in client.chat.completions.create(**BODY, stream=True)]
        case "chat helper":
            with client.chat.completions.stream(**BODY) as stream:
                for _ in stream:
                    pass
                return stream.get_final_completion().to_dict()
        case "completion":
            return client.completions.create(model="m", prompt="x").to_dict()
        case "completion stream":
            return [chunk.to_dict() for chunk in client.completions.create(model="m", prompt="x", stream=True)]
        case "embeddings":
            return client.embeddings.create(model="m", input="x").to_dict()
        case "message":
            return client.messages.create(**BODY, max_tokens=9).to_dict()
        case "message stream":
            return [event.to_dict() for event in client.messages.create(**BODY, max_tokens=9, stream=True)]
        case "message helper":
            with client.messages.stream(**BODY, max_tokens=9) as stream:
                return stream.get_final_message().to_dict()
        case "count":
            return client.messages.count_tokens(**BODY).to_dict()
        case "models":
            return [model.to_dict() for model in client.models.list()]
    raise ValueError(case["call"])


def connect(vendor: str, case: dict[str, Any]) -> Any:
    """A client whose every request gets the case's answer, in the case's chunks."""
    sdk = __import__(vendor)
    web = sys.modules.get("httpx2") or sys.modules["httpx"]
    chunks = [base64.b64decode(chunk) for chunk in case["chunks"]]

    def answer(request: Any) -> Any:
        return web.Response(case["status"], headers=case["headers"], content=iter(chunks))

    transport = web.Client(transport=web.MockTransport(answer))
    kind = {"openai": "OpenAI", "anthropic": "Anthropic"}[vendor]
    return getattr(sdk, kind)(api_key="k", base_url="http://127.0.0.1:9", max_retries=0, http_client=transport)


if __name__ == "__main__":
    main()
