"""What a case is, and how it says that something is not as it should be."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Vendor = Literal["openai", "anthropic"]


class Failed(AssertionError):
    """The server's answer is not what the protocol says."""


class Skipped(Exception):
    """The server says that it cannot do this."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test, as found before the cases run."""

    url: str
    """Without ``/v1``."""
    key: str | None
    model: str
    embedder: str | None
    """A model that answers on /v1/embeddings; None where there is none, and then ``no_embedder`` says what the server said."""
    no_embedder: str
    window: int | None
    """Tokens of prompt and answer, where the list of models tells."""
    guarded: bool
    """Requests without a key are refused."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Vendor to what the server said, where it does not have that vendor's route at all."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that a server has to do.

    ``feature`` names what a server may lack: an answer that says so (`says_unsupported`) then skips the case.
    ``raw`` cases speak HTTP themselves, for what no client would send or show.
    """

    vendor: Vendor
    name: str
    run: Callable[[Any], None]
    raw: bool
    feature: str | None


CASES: list[Case] = []
"""In the order of the table; filled as the modules of cases are imported."""


def case(
    vendor: Vendor, name: str, *, raw: bool = False, feature: str | None = None
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Make a function of a `Session` (or, if ``raw``, of a `Wire`) a case."""

    def add(run: Callable[[Any], None]) -> Callable[[Any], None]:
        assert all((known.vendor, known.name) != (vendor, name) for known in CASES), f"two cases {vendor} {name}"
        CASES.append(Case(vendor, name, run, raw, feature))
        return run

    return add


def same(found: object, wanted: object, what: str) -> None:
    """Raise `Failed` unless equal."""
    if found != wanted:
        raise Failed(f"{what}: expected {shorten(wanted)}, got {shorten(found)}")


def true(holds: object, what: str) -> None:
    """Raise `Failed` with ``what`` was expected, unless it holds."""
    if not holds:
        raise Failed(what)


def shorten(value: object, length: int = 160) -> str:
    """The representation of a value, cut in its middle."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"


UNSUPPORTED = re.compile(
    r"not (yet |currently )?(be )?(support|implement|availab|enabled)|unsupported|n't support|disabled|"
    r"cannot embed|no embed|not an embed",
    re.IGNORECASE,
)


def says_unsupported(status: int | None, message: str) -> bool:
    """Whether an answer says that the server cannot do what was asked: a route that is not there, or a 400 in such words."""
    return status in (404, 405, 501) or (status == 400 and UNSUPPORTED.search(message) is not None)
