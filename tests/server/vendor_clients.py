"""The vendors' own clients, where `make setup-clients` has put them; each runs in a process of its own."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("PELLUCID_CLIENTS", ROOT / ".clients"))
SCRIPT = Path(__file__).with_name("vendor_client_script.py")
EVENTS = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Case:
    """A call of the client's, and the answer that it gets."""

    call: str
    chunks: Sequence[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: JSON)

    @classmethod
    def of_json(cls, call: str, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> "Case":
        return cls(call, [json.dumps(body).encode()], status, JSON | (headers or {}))

    @classmethod
    def of_stream(cls, call: str, stream: bytes, size: int = 7) -> "Case":
        """Cut every ``size`` bytes, wherever that is."""
        return cls(call, [stream[i : i + size] for i in range(0, len(stream), size)], headers=EVENTS)


def generations(vendor: str) -> list[Path]:
    """Folders with a client of the vendor's, the newest last."""
    found = FOLDER.glob(f"{vendor}-*")
    return sorted(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])


def newest(vendor: str) -> Path:
    """Skips the test where there is none."""
    found = generations(vendor)
    if not found:
        pytest.skip(f"the client {vendor} is not here: make setup-clients")
    return found[-1]


def ask(folder: Path, cases: Iterable[Case]) -> list[Any]:
    """What the client in a folder makes of each case."""
    vendor = folder.name.partition("-")[0]
    told = [
        {
            "call": case.call,
            "chunks": [base64.b64encode(chunk).decode() for chunk in case.chunks],
            "status": case.status,
            "headers": case.headers,
        }
        for case in cases
    ]
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT), vendor],
        input=json.dumps(told),
        env={"PYTHONPATH": str(folder), "PATH": os.environ.get("PATH", "")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    results: list[Any] = json.loads(done.stdout)
    return results
