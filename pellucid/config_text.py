"""Settings as text: TOML read, and TOML written with the docstring of each key above it."""

import ast
import inspect
import json
import math
import re
import tomllib
import typing
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pellucid.config_tables import options_of
from pellucid.errors import ConfigError
from pellucid.model_config import PRESETS, ModelConfig
from pellucid.registry import lookup, names


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a table; ConfigError where it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give a TOML file") from None
    except (tomllib.TOMLDecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def to_toml(config: Any, *, docs: bool = False) -> str:
    """A config as TOML text that `load_config` reads back equal; with ``docs`` each key's docstring above it."""
    lines: list[str] = []
    _write_table(config, (), lines, docs)
    return "\n".join(lines).strip() + "\n"


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, which Python itself does not keep."""
    try:
        tree = ast.parse(inspect.cleandoc(inspect.getsource(cls)))
    except (OSError, SyntaxError):
        return {}
    body = tree.body[0].body  # type: ignore[attr-defined]
    return {
        node.target.id: inspect.cleandoc(doc.value.value)
        for node, doc in pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def _write_table(config: Any, path: tuple[str, ...], lines: list[str], docs: bool) -> None:
    tables: list[tuple[tuple[str, ...], Any]] = []
    commented: list[tuple[str, tuple[str, ...]]] = []
    absences: list[tuple[str, type]] = []
    header = ".".join(part if re.fullmatch(r"[\w-]+", part, re.ASCII) else json.dumps(part) for part in path)
    if path:
        if docs and (config.__doc__ or "").strip():
            lines += ["", *(f"# {line.strip()}" for line in inspect.cleandoc(config.__doc__).splitlines())]
            lines.append(f"[{header}]")
        else:
            lines += ["", f"[{header}]"]
    if docs and isinstance(config, ModelConfig):
        lines += [f"# One of {', '.join(PRESETS)}: fills in the sizes that are not written here.", '# preset = "small"']
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name == "options":
            kind = f.metadata["kind"]
            options = options_of(kind, config.name, value)
            if docs:
                lines.append(f"# {kind}: one of {', '.join(names(kind))}. Options of {config.name!r}:")
            _write_keys(options, [x.name for x in fields(options)], lines, docs)
            if docs:
                _describe_others(kind, config.name, lines)
        elif f.metadata.get("tables"):
            under = () if f.metadata["tables"] == "beside" else (f.name,)
            tables += [((*under, inner), table) for inner, table in value.items()]
            if docs:
                commented += [
                    (f.metadata["kind"], (*path, *under, name))
                    for name in names(f.metadata["kind"])
                    if name not in value
                ]
        elif is_dataclass(value):
            tables.append(((f.name,), value))
        elif (absent := _optional_table(type(config), f.name)) is not None:
            if docs:
                absences.append((f.name, absent))
        else:
            _write_keys(config, [f.name], lines, docs)
    for kind, header_path in commented:
        if fields(lookup(kind, header_path[-1]).config):
            lines += ["", f"# [{'.'.join(header_path)}]"]
            _describe(kind, header_path[-1], lines)
    for name, table in absences:
        note = field_docs(type(config)).get(name, "")
        about = inspect.cleandoc(table.__doc__ or "")
        lines += ["", *(f"# {line}" for line in f"{note}\n{about}".strip().splitlines())]
        lines.append(f"# [{'.'.join((*path, name))}]")
        _describe_keys(table, lines)
    for name_path, value in tables:
        _write_table(value, (*path, *name_path), lines, docs)


def _optional_table(config: type, key: str) -> type | None:
    """The dataclass of a table that need not be there; None for any other key."""
    inner = typing.get_args(typing.get_type_hints(config)[key])
    tables = [arg for arg in inner if is_dataclass(arg) and isinstance(arg, type)]
    return tables[0] if tables and type(None) in inner else None


def _describe_others(kind: str, chosen: str, lines: list[str]) -> None:
    """The options of the entries that are not in use, as comments."""
    for name in names(kind):
        if name != chosen and fields(lookup(kind, name).config):
            lines.append(f"# Options of {name!r} instead:")
            _describe(kind, name, lines)


def _describe(kind: str, name: str, lines: list[str]) -> None:
    _describe_keys(lookup(kind, name).config, lines)


def _describe_keys(config: type, lines: list[str]) -> None:
    notes = field_docs(config)
    for f in fields(config):
        lines += [f"# {line}" for line in notes.get(f.name, "").splitlines()]
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        lines.append(f"# {f.name} = {'... (no default)' if default is MISSING else _toml(default)}")


def _write_keys(config: Any, keys: list[str], lines: list[str], docs: bool) -> None:
    notes = field_docs(type(config)) if docs else {}
    for key in keys:
        if note := notes.get(key):
            lines += [f"# {line}" for line in note.splitlines()]
        lines.append(f"{key} = {_toml(getattr(config, key))}")


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows DEL, TOML does not
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {_toml(v)}' for k, v in value.items())} }}"
    return str(value)
