"""The other files of a run, each read with forgiveness: a report must come out of a run that broke anywhere."""

import json
import struct
import tomllib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SAMPLES = 100
MAX_TEXT = 20_000
"""Samples shown, and characters of each: a page, not an archive."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated text."""

    kind: str
    prompt: str
    text: str
    verdict: str
    """What a checker said of it, or nothing."""
    good: bool | None
    """Whether it said yes: true or "ok"; None where nothing was said."""


def read_samples(path: Path) -> tuple[list[Sample], int]:
    """The last samples of a samples.jsonl and how many there are in all; lines that are no objects do not count."""
    samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
    total = 0
    if not path.is_file():
        return [], total
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict):
                continue
            total += 1
            samples.append(_sample(record))
    return list(samples), total


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none to read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_text(path: Path) -> str:
    """A text file, or nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_config(path: Path) -> dict[str, Any]:
    """The tables of a config.toml, unchecked, or nothing."""
    try:
        return tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def find_model(run: Path) -> Path | None:
    """The run's ``model/``, else its newest checkpoint with a manifest, else None."""
    complete = [path.parent for path in run.glob("checkpoints/step_*/manifest.json") if ".tmp-" not in path.parent.name]
    folders = [run / "model", *sorted(complete, key=lambda path: path.name, reverse=True)]
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def count_parameters(folder: Path) -> tuple[int, int]:
    """Numbers and bytes of a folder's weights, from the headers of its model*.safetensors; tied weights count once."""
    numbers = size = 0
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length <= path.stat().st_size else {}
        except (OSError, ValueError, RecursionError, struct.error):
            continue
        for name, tensor in header.items():
            if name != "__metadata__":
                start, stop = tensor["data_offsets"]
                size += stop - start
                count = 1
                for extent in tensor["shape"]:
                    count *= extent
                numbers += count
    return numbers, size


def _sample(record: dict[str, Any]) -> Sample:
    verdict = record.get("verdict")
    good = None if verdict is None else verdict in (True, "ok")
    words = {True: "passes", False: "fails"}[verdict] if isinstance(verdict, bool) else _text(verdict)
    kind, prompt, text = (_text(record.get(key)) for key in ("kind", "prompt", "text"))
    return Sample(kind or "text", prompt, text, words, good)


def _text(value: object) -> str:
    """A string as it is, messages as lines of a conversation, None as nothing, anything else as JSON."""
    if value is None or isinstance(value, str):
        text = value or ""
    elif (
        isinstance(value, list)
        and value
        and all(isinstance(message, dict) and "content" in message for message in value)
    ):
        text = "\n".join(f"{message.get('role', '?')}: {message['content']}" for message in value)
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"
