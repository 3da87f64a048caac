"""One client of one generation, connected to the server under test."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pellucid.conformance.case import Failed, Target, Vendor, same, shorten, true

PROMPTS = (
    "Say hello.",
    "The cat and the dog",
    "Tell me a story about tea.",
    "one two three",
    "Why is the sky blue?",
    "x",
)
SHORT, LONG = 8, 16
"""Tokens of most answers, and of those that are cut by a stop string or told in pieces."""
UNICODE = "naïve 東京 👩🏽‍🚀 שלום e\u0301 \u200bZ"
"""Accents, wide characters, an emoji of several code points, right to left, a combining mark, zero width."""


class Session:
    """The client, and what all cases of a vendor use.

    ``responses`` holds (status, headers) of every answer that the client received, retried ones included.
    """

    def __init__(self, target: Target, vendor: Vendor, timeout_s: float = 120.0) -> None:
        self.target, self.vendor, self.timeout_s = target, vendor, timeout_s
        self.sdk: Any = import_module(vendor)
        self.responses: list[tuple[int, Any]] = []
        self.client = self.connect()
        self._texts: dict[str, str] = {}

    @property
    def model(self) -> str:
        """The name of the model that answers."""
        return self.target.model

    def connect(self, *, key: str | None = None, retries: int = 0, asynchronous: bool = False) -> Any:
        """Another client: with another key, with retries, or for asyncio."""
        options: dict[str, Any] = {
            "api_key": key or self.target.key or "none",
            "base_url": self.target.url + ("/v1" if self.vendor == "openai" else ""),
            "max_retries": retries,
            "timeout": self.timeout_s,
        }
        name = {"openai": "OpenAI", "anthropic": "Anthropic"}[self.vendor]
        if asynchronous:
            return getattr(self.sdk, f"Async{name}")(**options)
        hooks = {"response": [lambda response: self.responses.append((response.status_code, response.headers))]}
        return getattr(self.sdk, name)(**options, http_client=self.sdk.DefaultHttpxClient(event_hooks=hooks))

    def valid(self, answer: Any) -> Any:
        """The answer, after the client's own type has checked it: the clients themselves check nothing."""
        kind = type(answer)
        try:
            kind.model_validate(answer.model_dump(mode="json", exclude_unset=True))
        except ValueError as error:
            raise Failed(f"no valid {kind.__name__}: {error}") from None
        return answer

    def request(self, **changes: Any) -> dict[str, Any]:
        """The arguments of a short greedy chat, in both vendors' terms; ``changes`` replace some, None removes one."""
        plain = {"model": self.model, "messages": [user(PROMPTS[0])], "max_tokens": SHORT}
        return {name: value for name, value in (plain | self.greedy | changes).items() if value is not None}

    @property
    def greedy(self) -> dict[str, Any]:
        """Arguments that leave nothing to chance. Anthropic's newer clients pass sampling as extra fields only."""
        if self.vendor == "openai":
            return {"temperature": 0, "seed": 1}
        return {"extra_body": {"temperature": 0}}

    def chat(self, **changes: Any) -> Any:
        """A checked answer to `request`."""
        request = self.request(**changes)
        if self.vendor == "openai":
            return self.valid(self.client.chat.completions.create(**request))
        return self.valid(self.client.messages.create(**request))

    def told(self, answer: Any) -> str:
        """The text of an answer's first choice, "" where there is none."""
        if self.vendor == "openai":
            return answer.choices[0].message.content or ""
        return "".join(block.text for block in answer.content if block.type == "text")

    def talkative(self) -> tuple[str, str]:
        """A prompt whose greedy answer has some length, and that answer, without half characters."""
        for prompt in PROMPTS:
            if prompt not in self._texts:
                self._texts[prompt] = self.told(self.chat(messages=[user(prompt)], max_tokens=LONG))
            text = self._texts[prompt]
            if len(text.strip()) >= 6 and middle(text):
                return prompt, text
        raise Failed(f"no answer of six characters to any of {len(PROMPTS)} prompts: {shorten(self._texts)}")

    def refused(self, call: Callable[[], Any], status: int, error: str) -> Any:
        """The exception of a call that has to be refused with this status, as this class of the client's."""
        try:
            answer = call()
        except self.sdk.APIStatusError as refusal:
            same((refusal.status_code, type(refusal).__name__), (status, error), f"refusal ({shorten(str(refusal))})")
            return refusal
        raise Failed(f"not refused, expected {status} {error}; got {shorten(answer)}")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a body that the client's typed methods would not let pass."""
        return self.client.post(path, cast_to=object, body=body)


def user(text: str) -> dict[str, str]:
    """A message of the user's."""
    return {"role": "user", "content": text}


def middle(text: str, length: int = 3) -> str:
    """A bit of whole characters from within a text that does not begin it; "" where there is none."""
    for start in range(1, len(text) - length):
        bit = text[start : start + length]
        if "\N{REPLACEMENT CHARACTER}" not in bit and bit.strip() and text.find(bit) > 0:
            return bit
    return ""


def check_stop(whole: str, stopped: str, stop: str) -> None:
    """A stopped answer is the whole one up to its stop string."""
    true(stop in whole, f"the stop string {stop!r} is in the answer without it")
    same(stopped, whole[: whole.index(stop)], f"the answer with stop {stop!r}")
