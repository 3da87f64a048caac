"""Find out about a server, then run each client generation against it, one after another."""

import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pellucid.conformance.case import Failed, Target, Vendor, says_unsupported, shorten
from pellucid.conformance.wire import Answer, Wire
from pellucid.errors import ConfigError, RequestError

VENDORS: tuple[Vendor, ...] = ("openai", "anthropic")
CHATS: dict[Vendor, str] = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
FOLDER = re.compile(r"(openai|anthropic)-(\d+(?:\.\d+)*)")


@dataclass(frozen=True, slots=True)
class Column:
    """A client generation in its folder, or plain HTTP (``name`` "raw", no folder)."""

    name: str
    program: str
    """"openai", "anthropic" or "raw"."""
    folder: Path | None


@dataclass(frozen=True, slots=True)
class Result:
    """How a case went in a column."""

    column: str
    vendor: str
    case: str
    status: str
    """"passed", "failed" or "skipped"."""
    reason: str
    seconds: float


def find_columns(clients: Path, only: Vendor | None) -> list[Column]:
    """The generations in a folder, by age, then plain HTTP.

    Raises:
        ConfigError: there is none of those asked for; says how to get them.
    """
    found = []
    for folder in clients.iterdir() if clients.is_dir() else []:
        match = FOLDER.fullmatch(folder.name)
        if match and only in (None, match[1]) and (folder / match[1]).is_dir():
            age = [int(part) for part in match[2].split(".")]
            found.append((VENDORS.index(match[1]), age, Column(folder.name, match[1], folder)))
    if not found:
        wanted = only or "openai or anthropic"
        raise ConfigError(
            f"{clients} holds no client of {wanted}; run `make setup-clients`, or for one generation "
            f"`pip install --target {clients}/openai-3.57.0 openai==3.57.0`, or give another --clients DIR"
        )
    return [column for *_, column in sorted(found, key=lambda item: item[:2])] + [Column("raw", "raw", None)]


def find_target(url: str, key: str | None, model: str | None, timeout_s: float = 120.0) -> Target:
    """What the cases have to know about a server.

    Raises:
        ConfigError: the URL is none, or the server wants a key.
        RequestError: nobody answers, or no model does.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"URL must look like http://127.0.0.1:8000, got {url!r}")
    blank = Target(url, key, model or "", None, "", None, False)
    wire = Wire(blank, timeout_s)
    try:
        listed = wire.get("/v1/models")
        guarded = wire.get("/v1/models", headers={}).status in (401, 403)
        if listed.status in (401, 403):
            raise ConfigError(f"{url} asks for a key{' and refuses this one' if key else ''}; give it with --key")
        names = listed_models(listed)
        chat, missing = find_chat(wire, [model] if model else list(names))
        embedder, reason = first_embedder(wire, list(names) or [chat])
    except OSError as error:
        raise RequestError(f"{url}: no answer ({error}); is the server running?") from None
    return Target(url, key, chat, embedder, reason, names.get(chat), guarded, missing)


def listed_models(answer: Answer) -> dict[str, int | None]:
    """Name to window of each model that the server lists; nothing if it lists none."""
    try:
        data = answer.json().get("data", []) if answer.status == 200 else []
        return {str(entry["id"]): entry.get("max_model_len") for entry in data}
    except (Failed, AttributeError, KeyError, TypeError):
        return {}


def find_chat(wire: Wire, names: list[str]) -> tuple[str, dict[str, str]]:
    """The first model that answers a chat on either vendor's route, and what was said where there is no such route."""
    said = "it lists no model on /v1/models"
    for name in names:
        body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        answers = {vendor: wire.post(route, body) for vendor, route in CHATS.items()}
        if any(answer.status == 200 for answer in answers.values()):
            gone: dict[Vendor, Answer] = {
                vendor: answer for vendor, answer in answers.items() if answer.status in (404, 405, 501)
            }
            return name, {
                v: f"no {CHATS[v]}: {a.status} {a.body.decode(errors='replace')[:200]}" for v, a in gone.items()
            }
        said = f"{name}: " + "; ".join(f"{answer.status} {shorten(answer.body)}" for answer in answers.values())
    raise RequestError(f"{wire.target.url}: no model answers a chat ({said}); name one with --model")


def first_embedder(wire: Wire, names: list[str]) -> tuple[str | None, str]:
    """The first model that makes vectors; else None and what the server said.

    A server that fails otherwise than by saying that it cannot has its first model tested, so that the cases fail.
    """
    said = ""
    for name in reversed(names):
        answer = wire.post("/v1/embeddings", {"model": name, "input": "hi"})
        if answer.status == 200:
            return name, ""
        said = f"{answer.status} {answer.body.decode(errors='replace')[:300]}"
        if not says_unsupported(answer.status, said):
            return name, ""
    return None, f"no embeddings: {said}"


def run_column(
    column: Column,
    target: Target,
    vendors: Sequence[Vendor],
    tell: Callable[[Result], None],
    *,
    only: str = "",
    timeout_s: float = 120.0,
) -> list[Result]:
    """Run a column's cases in a process of its own; ``tell`` is called with each result.

    ``only`` is a pattern, searched in "vendor name" of each case. A process that dies, or is silent for three times
    ``timeout_s``, fails the cases that are left, with the end of what it said.
    """
    given = {"target": asdict(target), "vendors": list(vendors), "only": only, "timeout_s": timeout_s}
    process = start_child(column)
    heard = Heard(process)
    results: list[Result] = []
    cases: list[tuple[str, str]] | None = None
    silence = ""
    try:
        assert process.stdin
        process.stdin.write(json.dumps(given))
        process.stdin.close()
        while (line := heard.lines.get(timeout=3 * timeout_s)) is not None:
            record: dict[str, Any] = json.loads(line)
            if cases is None:
                cases = [(vendor, case) for vendor, case in record["cases"]]
                check_version(column, record["version"])
            else:
                results.append(Result(column.name, **record))
                tell(results[-1])
    except queue.Empty:
        silence = f"nothing for {3 * timeout_s:.0f} s"
    except BrokenPipeError:
        pass  # it died at once; its own words follow
    finally:
        process.kill()
        process.wait()
    why = silence or heard.last_words()
    if cases is None:
        raise RequestError(f"the process of {column.name} did not start: {why}")
    for vendor, case in cases[len(results) :]:
        reason = f"the client's process ended before it: {why}"
        results.append(Result(column.name, vendor, case, "failed", reason, 0.0))
        tell(results[-1])
    return results


def start_child(column: Column) -> "subprocess.Popen[str]":
    """The column's process, waiting for what it has to do. Settings of the clients in the environment are kept from it."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([str(column.folder.resolve()), package] if column.folder else [package])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "pellucid.conformance.child", column.program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        env=kept | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip


class Heard:
    """What a process writes, read while it runs, so that it never waits for a reader."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout and process.stderr
        self.lines: queue.Queue[str | None] = queue.Queue()
        """Of stdout; None after the last one."""
        self._stdout, self._stderr = process.stdout, process.stderr
        self._errors: deque[str] = deque(maxlen=12)
        threading.Thread(target=self._read_lines, daemon=True).start()
        self._errors_read = threading.Thread(target=self._read_errors, daemon=True)
        self._errors_read.start()

    def last_words(self) -> str:
        """The end of stderr, once the process is gone."""
        self._errors_read.join(timeout=5)
        return "".join(self._errors).strip() or "no word"

    def _read_lines(self) -> None:
        for line in self._stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self) -> None:
        self._errors.extend(self._stderr)


def check_version(column: Column, version: str) -> None:
    """The folder's name is what the table says: another version inside would make the table a lie."""
    if column.folder is not None and column.name != f"{column.program}-{version}":
        raise ConfigError(f"{column.folder} holds {column.program} {version}; give the folder that name")
