"""Reading and writing the two tokenizer files of a model folder, ours or anyone's."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.errors import DataError, StorageError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

_OTHER_KINDS = {
    "tokenizer.model": "a SentencePiece model",
    "spiece.model": "a SentencePiece model",
    "sentencepiece.bpe.model": "a SentencePiece model",
    "vocab.json": "a vocabulary with separate merges",
    "vocab.txt": "a bare WordPiece vocabulary",
    "tokenizer.pkl": "a pickle, which is never loaded",
    "tokenizer.pickle": "a pickle, which is never loaded",
    "tokenizer.bin": "a pickle, which is never loaded",
}
_USUAL_BOS = ("<|endoftext|>", "<s>", "<|begin_of_text|>", "<bos>")
_USUAL_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class Files(NamedTuple):
    """What a folder says: tokenizer.json word for word, the parsed tokenizer_config.json, and where they came from."""

    text: str
    config: dict[str, Any]
    origin: str


def read_files(path: Path) -> Files:
    """Reads a folder, or the tokenizer.json in it. DataError names what is missing or broken and the way out."""
    folder, file = (path.parent, path) if path.is_file() else (path, path / TOKENIZER_FILE)
    if not file.is_file():
        raise DataError(_nothing_there(folder))
    text = _read_text(file)
    if not isinstance(_parse(file, text).get("model"), dict):
        raise DataError(
            f"{file} is JSON but no tokenizer (it has no model); give a tokenizer.json written by `tokenizers`"
        )
    config_file, template_file = folder / CONFIG_FILE, folder / TEMPLATE_FILE
    if config_file.is_file():
        config = _parse(config_file, _read_text(config_file))
    else:
        config = _usual_config(json.loads(text))
    if template_file.is_file():
        config["chat_template"] = _read_text(template_file)
    return Files(text, config, str(file))


def file_contents(text: str, config: dict[str, Any]) -> dict[str, bytes]:
    """Both files by name."""
    table = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    return {TOKENIZER_FILE: text.encode(), CONFIG_FILE: table.encode()}


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    """Writes both files; StorageError where the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        (folder / TEMPLATE_FILE).unlink(missing_ok=True)  # it would win over the template in the config
    except OSError as error:
        raise StorageError(f"{folder}: the tokenizer cannot be written ({error.strerror})") from error


def named_token(config: dict[str, Any], key: str, vocab: dict[str, int], origin: str) -> str | None:
    """The token that ``key`` (such as ``bos_token``) names, as a string; None where it names none."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str) or value not in vocab:
        raise DataError(
            f"{origin}: {CONFIG_FILE} names {key} {value!r}, which the vocabulary lacks; add it to the tokenizer's "
            f"added_tokens or set {key} to null"
        )
    return value


def template_source(config: dict[str, Any], origin: str) -> str | None:
    """The chat template: a string, or of several named ones "default" (or the only one)."""
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {
            entry["name"]: entry["template"]
            for entry in value
            if isinstance(entry, dict) and entry.keys() >= {"name", "template"}
        }
    if isinstance(value, dict):
        if "default" not in value and len(value) != 1:
            raise DataError(
                f'{origin}: none of the chat templates {", ".join(map(str, value)) or "(none)"} is named "default"'
            )
        value = value["default"] if "default" in value else next(iter(value.values()))
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"{origin}: chat_template in {CONFIG_FILE} must be text or a list of named templates, got {value!r}"
        )
    return value


def _nothing_there(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such tokenizer folder"
    for name, kind in _OTHER_KINDS.items():
        if (folder / name).is_file():
            return (
                f"{folder} has no {TOKENIZER_FILE}, only {name} ({kind}); convert it where transformers is installed: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
            )
    return (
        f"{folder} has no {TOKENIZER_FILE}; give a folder written by `pellucid prepare`, save_model or save_pretrained"
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text (a pickle or another binary file?); only JSON is loaded") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON ({error}); it is damaged, copy it again") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _usual_config(description: dict[str, Any]) -> dict[str, Any]:
    """For a tokenizer.json alone: its beginning and end token by their usual names, so that documents stay apart."""
    added = [token["content"] for token in description.get("added_tokens", []) if token.get("special")]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, usual in (("bos_token", _USUAL_BOS), ("eos_token", _USUAL_EOS)):
        if token := next((token for token in usual if token in added), None):
            config[key] = token
    return config
