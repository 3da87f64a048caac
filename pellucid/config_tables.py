"""From a written table to a dataclass of settings, and back.

A key that the dataclass does not have is refused with the nearest one named, a value of the wrong type with the key's
path. ``"none"`` stands for None, which TOML lacks.
"""

import tomllib
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar

from pellucid.errors import ConfigError
from pellucid.model_config import ModelConfig
from pellucid.registry import lookup, names, nearest

ConfigT = TypeVar("ConfigT")


def build(cls: type[ConfigT], table: dict[str, Any], path: str = "") -> ConfigT:
    """``table`` as the dataclass ``cls``; ``path`` is the dotted prefix that errors name."""
    assert is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    by_name = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in table.items():
        declared = by_name.get(key)
        if declared is None or declared.name == "options" or declared.metadata.get("tables") == "beside":
            extra[key] = value
        elif declared.metadata.get("tables") == "below":
            values[key] = _named_tables(declared.metadata["kind"], value, path + key + ".")
        else:
            values[key] = _convert(hints[key], value, path + key)
    for f in fields(cls):
        if f.name not in table and is_dataclass(hints[f.name]):  # its options get their defaults too
            values[f.name] = build(hints[f.name], {}, f"{path}{f.name}.")
    options = by_name.get("options")
    if options is not None and options.metadata.get("kind"):
        kind = options.metadata["kind"]
        entry = lookup(kind, values.get("name", by_name["name"].default))
        own = [f.name for f in fields(entry.config)]
        for key in extra:
            if key not in own:
                known = [name for name in by_name if name != "options"] + own
                raise ConfigError(f"unknown key {path}{key}{_suggest(path, key, known, f' of {kind} {entry.name!r}')}")
        values["options"] = build(entry.config, extra, path)
        extra = {}
    for f in fields(cls):
        if f.metadata.get("tables") == "beside":  # [parallel.zero1] beside parallel.mode
            tables = {key: extra.pop(key) for key in list(extra) if key in names(f.metadata["kind"])}
            values[f.name] = _named_tables(f.metadata["kind"], tables, path)
            by_name.pop(f.name)
            kind = f.metadata["kind"]
            # one without options has no key to suggest
            by_name |= {name: f for name in names(kind) if fields(lookup(kind, name).config)}
    if extra:
        key = next(iter(extra))
        known = list(by_name) + (["preset"] if cls is ModelConfig else [])
        raise ConfigError(f"unknown key {path}{key}{_suggest(path, key, known)}")
    for f in fields(cls):
        if f.init and f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{path}{f.name} has no default; give it a value")
    return cls(**values)


def options_of(kind: str, name: str, options: Any) -> Any:
    """The options of a registered entry: those given, checked for their type, or the entry's defaults."""
    config = lookup(kind, name).config
    if options is None:
        return build(config, {})
    if not isinstance(options, config):
        raise ConfigError(f"options of {kind} {name!r} must be {config.__name__}, got {type(options).__name__}")
    return options


def to_table(config: Any) -> dict[str, Any]:
    """A config dataclass as the nested table that `build` reads back equal."""
    table: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name == "options":
            table |= to_table(value) if value is not None else {}
        elif is_dataclass(value):
            table[f.name] = to_table(value)
        elif f.metadata.get("tables"):
            tables = {name: to_table(options) for name, options in value.items()}
            table |= tables if f.metadata["tables"] == "beside" else {f.name: tables}
        elif isinstance(value, tuple):
            table[f.name] = list(value)
        else:
            table[f.name] = value
    return table


def flat_table(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flat_table(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def assign(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Put an override into a nested table; a string is a flag's text, read by the type of its key in `build`."""
    *parents, last = dotted.split(".")
    for i, key in enumerate(parents):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{dotted}: {'.'.join(parents[: i + 1])} is a value, not a table")
    table[last] = _FlagText(value) if isinstance(value, str) else value


class _FlagText(str):
    """The text of a command line flag: only the key's type says whether 2024 is a number or a folder's name."""


def plain(value: Any) -> Any:
    """A flag's text as the TOML value that it spells, if it spells one; anything else as it is."""
    if not isinstance(value, _FlagText):
        return value
    try:
        read = tomllib.loads(f"value = {value}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return str(value)
    return read["value"] if len(read) == 1 else str(value)


def _named_tables(kind: str, value: Any, path: str) -> dict[str, Any]:
    value = plain(value)
    if isinstance(value, dict):
        value = {name: plain(options) for name, options in value.items()}
    if not isinstance(value, dict) or not all(isinstance(options, dict) for options in value.values()):
        raise ConfigError(f"{path.rstrip('.')} must be a table of tables, one for each {kind}, got {value!r}")
    return {name: build(lookup(kind, name).config, options, f"{path}{name}.") for name, options in value.items()}


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, _FlagText):
        text = (
            hint is str
            or (origin is Literal and value in args)
            or (origin in (types.UnionType, typing.Union) and str in args)
        )
        value = str(value) if text else plain(value)
        if isinstance(value, str) and origin in (tuple, list) and args[0] is str:
            value = [part.strip() for part in value.split(",")]  # --lora.targets q_proj,v_proj
    if hint is Any:
        return value
    if is_dataclass(hint):
        if isinstance(value, str) and "name" in {f.name for f in fields(hint)}:
            value = {"name": value}  # optim.schedule = "cosine"
        if not isinstance(value, dict):
            raise ConfigError(f"{path} must be a table, got {value!r}")
        return build(hint, value, path + ".")  # type: ignore[arg-type]
    if origin in (types.UnionType, typing.Union):
        if (value is None or value == "none") and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _convert(inner, value, path)
    if origin is Literal:
        if value not in args:
            known = [str(arg) for arg in args]
            close = nearest(str(value), known)
            raise ConfigError(f"{path} must be one of {', '.join(known)}; got {value!r}{close}")
        return value
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} must be a list, got {value!r}")
        inner_hints = [args[0]] * len(value) if origin is list or args[-1] is Ellipsis else list(args)
        if len(inner_hints) != len(value):
            raise ConfigError(f"{path} must have {len(inner_hints)} values, got {value!r}")
        return origin(_convert(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(zip(inner_hints, value, strict=True)))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{path} must be a table, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint in (int, float) and isinstance(value, bool)):
        names_of = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{path} must be {names_of.get(hint, hint.__name__)}, got {value!r}")
    return value


def _suggest(path: str, key: str, known: list[str], owner: str = "") -> str:
    close = nearest(key, known)
    return close.replace("did you mean ", f"did you mean {path}") or f"; known keys{owner}: {', '.join(known)}"
