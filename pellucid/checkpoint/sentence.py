"""The files by which sentence-transformers says how hidden states become one vector: read and written.

``modules.json`` lists a Transformer, a Pooling (``1_Pooling/config.json``) and, where vectors are normalised, a Normalize;
``sentence_bert_config.json`` has the longest text.
"""

import json
from pathlib import Path
from typing import Any

from pellucid.errors import CheckpointError, ConfigError
from pellucid.model.encoder import EmbedConfig
from pellucid.registry import nearest

MODULES, LENGTH = "modules.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": None,
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": None,
}
"""What each flag means to us; None: not supported."""
_NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""By the newer key ``pooling_mode``."""
_OTHER_KEYS = {"word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode"}


def read_json(path: Path) -> Any:
    """What a JSON file holds; `CheckpointError` names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object of a file; `CheckpointError` names the file."""
    table = read_json(path)
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(table).__name__}")
    return table


def read_embed(folder: Path, *, width: int) -> EmbedConfig:
    """Pooling, normalisation and the longest text of a folder; where it says nothing, the mean over all tokens.

    Args:
        width: of the hidden states.

    Raises:
        CheckpointError: a file is missing or broken.
        ConfigError: a module, a pooling or an option that we do not have; names file, key and value.
    """
    pooling, normalize = "mean", False
    if (folder / MODULES).is_file():
        steps = _modules(folder / MODULES)
        kinds = [kind for kind, _ in steps]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise ConfigError(
                f"{folder / MODULES}: the modules are {', '.join(kinds) or 'none'}; supported are Transformer, Pooling and "
                "then Normalize or nothing"
            )
        if steps[0][1] not in ("", "."):
            raise ConfigError(
                f"{folder / MODULES}: the Transformer is in {steps[0][1]!r}; only the folder itself works"
            )
        pooling, normalize = _pooling(folder / steps[1][1] / "config.json", width), len(steps) == 3
    if (folder / PROMPTS).is_file() and (prompt := read_table(folder / PROMPTS).get("default_prompt_name")) is not None:
        raise ConfigError(
            f"{folder / PROMPTS}: default_prompt_name is {prompt!r}; prompts are not supported: set it to null and put "
            "the prompt before each text"
        )
    return EmbedConfig(pooling=pooling, normalize=normalize, max_seq_length=_length(folder / LENGTH))


def embed_files(embed: EmbedConfig, *, width: int) -> dict[str, bytes]:
    """The files for `read_embed` and for sentence-transformers, by name."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")][: 2 + embed.normalize]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    pooling = {"word_embedding_dimension": width} | {flag: name == embed.pooling for flag, name in _FLAGS.items()}
    tables: dict[str, Any] = {MODULES: listed, "1_Pooling/config.json": pooling | {"include_prompt": True}}
    if embed.max_seq_length:
        tables[LENGTH] = {"max_seq_length": embed.max_seq_length, "do_lower_case": False}
    return {name: (json.dumps(table, indent=2) + "\n").encode() for name, table in tables.items()}


def _modules(path: Path) -> list[tuple[str, str]]:
    """The class and the folder of each module, in order."""
    listed = read_json(path)
    if not isinstance(listed, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path"), str) for m in listed
    ):
        raise CheckpointError(f'{path} must list modules with "type" and "path"')
    return [(m["type"].rpartition(".")[2], m["path"]) for m in listed]


def _pooling(path: Path, width: int) -> str:
    table = read_table(path)
    for key in table:
        if key not in _FLAGS and key not in _OTHER_KEYS:
            known = [*_FLAGS, *_OTHER_KEYS]
            raise ConfigError(
                f"{path}: unknown key {key}{nearest(key, known)}; remove it if it does not change the vectors"
            )
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if table.get(key, width) != width:
            raise ConfigError(f"{path}: {key} is {table[key]!r}, but config.json's hidden_size is {width}")
    flags = [flag for flag in _FLAGS if table.get(flag)]
    named = table.get("pooling_mode")
    if named is not None:
        pooling = _NAMES.get(named) if isinstance(named, str) else None
        if pooling is None:
            raise ConfigError(f"{path}: pooling_mode {named!r} is unknown; known: {', '.join(_NAMES)}")
        if flags and [_FLAGS[flag] for flag in flags] != [pooling]:
            raise ConfigError(f"{path}: pooling_mode {named!r} contradicts {', '.join(flags)}; remove one of them")
        return pooling
    pooling = _FLAGS[flags[0]] if len(flags) == 1 else None
    if pooling is None:
        known = [flag for flag, name in _FLAGS.items() if name]
        raise ConfigError(f"{path}: pooling by {', '.join(flags) or 'nothing'}; supported is one of {', '.join(known)}")
    return pooling


def _length(path: Path) -> int:
    if not path.is_file():
        return 0
    table = read_table(path)
    if table.get("do_lower_case"):
        raise ConfigError(
            f"{path}: do_lower_case is true; set it to false and let the tokenizer do it (do_lower_case in its config)"
        )
    length = table.get("max_seq_length") or 0
    if not isinstance(length, int):
        raise ConfigError(f"{path}: max_seq_length must be a whole number, got {length!r}")
    return length
