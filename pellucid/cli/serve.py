"""`pellucid serve`."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import notice
from pellucid.cli.sampling import add_model_flags, pack_bfloat16
from pellucid.errors import ConfigError

if TYPE_CHECKING:
    from pellucid.checkpoint.model_folder import Loaded
    from pellucid.serve_config import ServeConfig
    from pellucid.server.auth import Keys
    from pellucid.server.serving import Model, Service

NAMED = ("models", "adapters", "embedders")
"""Settings that are tables, name to folder."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command. Flags that are left out keep the value of --config, or the default of `ServeConfig`."""
    parser = commands.add_parser(
        "serve",
        help="answer over HTTP, in the words of OpenAI and Anthropic",
        description="Answer requests at /v1/chat/completions, /v1/completions, /v1/messages and /v1/embeddings; / is a page to "
        "chat on. The first Ctrl-C or SIGTERM lets answers finish, a second one ends at once.",
    )
    add_model_flags(parser)
    parser.add_argument("--config", metavar="FILE.toml", help="settings, by the names in docs/serving.md; flags win")
    _add_network_flags(parser)
    _add_engine_flags(parser)
    parser.set_defaults(run=run, allocator="inference", device=None, dtype=None)


def _add_network_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", metavar="ADDRESS", help="to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, metavar="N", help="0: a free one, which is printed (default 8000)")
    add("--name", help="what clients call MODEL (default: its folder's name)")
    for flag, name, what in (
        ("--model", "models", "a further model"),
        ("--adapter", "adapters", "a LoRA adapter on MODEL"),
        ("--embedder", "embedders", "an encoder for /v1/embeddings"),
    ):
        add(flag, dest=name, action="append", metavar="NAME=PATH", help=f"{what}; may be given again")
    add("--any-model", action="store_const", const=True, help="MODEL answers to any name")
    add("--api-key-file", metavar="FILE", help="one key a line; PELLUCID_API_KEY in the environment is a key too")
    add(
        "--allow-anonymous",
        action="store_const",
        const=True,
        help="no key is needed, wherever --host can be reached from",
    )
    add(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        metavar="ORIGIN",
        help="web pages that may ask; * for all",
    )
    add(
        "--allow-host", dest="allowed_hosts", action="append", metavar="NAME", help="a further Host header to answer to"
    )
    add("--max-queue", type=int, metavar="N", help="sequences of a model that may wait (default 64)")
    add("--max-body-mb", type=float, metavar="MB", help="the longest body of a request (default 8)")
    add(
        "--request-timeout",
        dest="request_timeout_s",
        type=float,
        metavar="S",
        help="longest wait and run (default 600)",
    )
    add("--drain-seconds", type=float, metavar="S", help="for answers to finish after the first signal (default 30)")
    add(
        "--log-prompts",
        action="store_const",
        const=True,
        help="write what clients send into the log (--log-level info)",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kv-gb", type=float, metavar="GB", help="for keys and values of each model (default 1)")
    add("--page-size", type=int, metavar="N", help="tokens a block of the cache (default 64)")
    add("--max-running", type=int, metavar="N", help="sequences of a model that run together (default 64)")
    add("--token-budget", type=int, metavar="N", help="tokens a step (default 512)")
    add("--threads", type=int, metavar="N", help="of torch (default: as torch chooses)")
    add("--speculate", type=int, metavar="K", help="guess K tokens from the text so far (default 0)")
    add(
        "--fast", action="store_const", const=True,
        help="give up that a result has the same bits whatever runs beside it, for speed",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 130 after a second one."""
    from pellucid.serve_config import load_serve_config

    config = load_serve_config(args.config, given_settings(args))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        from pellucid.server.auth import load_keys
        from pellucid.server.run import Server, bind
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed, which serving needs; pip install 'pellucid[serve]'"
        ) from None
    keys = load_keys(config)
    bound = bind(config.host, config.port)
    service = make_service(args.model, config, keys)
    if not keys and not config.is_local:
        notice(f"anybody who reaches {config.host} may use this server: --allow-anonymous")
    return Server(service, bound, lambda address: notice(f"listening on {address}")).serve_until_ended()


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags give."""
    from dataclasses import fields

    from pellucid.serve_config import ServeConfig

    flags = ((f.name, getattr(args, f.name, None)) for f in fields(ServeConfig))
    given = {name: value for name, value in flags if value is not None}
    return given | {name: named_folders(name, given[name]) for name in NAMED if name in given}


def named_folders(name: str, pairs: list[str]) -> dict[str, str]:
    """NAME=PATH, each name once."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, path = pair.partition("=")
        if not equals or not key or not path:
            raise ConfigError(f"{name}: {pair!r} is not NAME=PATH")
        if key in found:
            raise ConfigError(f"{name}: {key!r} is given twice; give each model a name of its own")
        found[key] = path
    return found


def make_service(path: str, config: "ServeConfig", keys: "Keys") -> "Service":
    """Load everything that is to be served. MODEL may be an encoder, which then only embeds.

    Raises:
        CheckpointError, ConfigError: a folder cannot be loaded or has no tokenizer, or two models have one name.
    """
    import torch

    from pellucid.checkpoint.encoder_folder import is_encoder, load_encoder
    from pellucid.checkpoint.model_folder import find_model
    from pellucid.server.serving import DEFAULT, Embedder, Service

    if config.threads:
        torch.set_num_threads(config.threads)
    name = config.name or Path(path).resolve().name
    embeds = is_encoder(find_model(path))
    if embeds and config.adapters:
        raise ConfigError(f"adapters are for a model that writes, and {path} is an encoder")
    decoders = ({} if embeds else {name: path}) | config.models
    encoders = ({name: path} if embeds else {}) | config.embedders
    named = [name, *config.models, *config.adapters, *config.embedders]
    for one in named:
        if named.count(one) > 1 or one == DEFAULT:
            why = "is what MODEL is called besides" if one == DEFAULT else "is the name of two models"
            raise ConfigError(f"{one!r} {why}; give another name")
    models = {key: make_model(key, load(folder, config), config) for key, folder in decoders.items()}
    for key, folder in config.adapters.items():
        models[key] = make_model(key, load_adapter(folder, path, config), config)
    embedders = {
        key: Embedder(key, load_encoder(folder, device=config.device, dtype=config.dtype), config)
        for key, folder in encoders.items()
    }
    return Service(config, keys, models, embedders)


def load(path: str, config: "ServeConfig") -> "Loaded":
    """A model; an adapter in its folder is merged."""
    from pellucid.checkpoint.model_folder import load_model
    from pellucid.model.lora import lora_of

    loaded = load_model(path, device=config.device, dtype=config.dtype, weights=config.weights)
    return merged(loaded) if lora_of(loaded.model) is not None else loaded


def load_adapter(path: str, base: str, config: "ServeConfig") -> "Loaded":
    """A copy of the base with the adapter merged into it."""
    from pellucid.checkpoint.adapter import is_adapter
    from pellucid.checkpoint.model_folder import find_model, load_model
    from pellucid.model.lora import lora_of
    from pellucid.model.quantize import quantize_

    alone = is_adapter(find_model(path))
    loaded = load_model(path, device=config.device, dtype=config.dtype, base=base if alone else None)
    if lora_of(loaded.model) is None:
        raise ConfigError(f"adapters: {path} has no adapter; give a whole model with --model NAME=PATH")
    loaded = merged(loaded)
    if config.weights is not None:
        quantize_(loaded.model, config.weights)
    return loaded


def merged(loaded: "Loaded") -> "Loaded":
    """Plain linear layers where there was an adapter."""
    from pellucid.model.lora import merge, remove_lora

    merge(loaded.model)
    remove_lora(loaded.model)
    return loaded._replace(model=loaded.model.eval().requires_grad_(False))


def make_model(name: str, loaded: "Loaded", config: "ServeConfig") -> "Model":
    """A loaded model with an engine of its own."""
    from pellucid.inference import Engine
    from pellucid.server.admission import Served
    from pellucid.server.serving import Model

    pack_bfloat16(loaded.model, fast=config.fast, page_size=config.page_size)
    engine = Engine(
        loaded.model, kv_gb=config.kv_gb, page_size=config.page_size, max_running=config.max_running,
        exact=not config.fast, token_budget=config.token_budget, prefix_cache=config.prefix_cache,
        speculate=config.speculate,
    )  # fmt: skip
    return Model(name, Served.of(name, loaded, engine), engine, config)
