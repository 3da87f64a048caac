"""`pellucid config`."""

import argparse

from pellucid.config import RunConfig, load_config, to_toml


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "config",
        help="print every setting and what it means",
        description="Print every default with its meaning, as a TOML file to start from; or what a file amounts to.",
    )
    parser.add_argument("config", nargs="?", metavar="FILE.toml", help="print this one, completed with the defaults")
    parser.set_defaults(run=run, takes_settings=True)


def run(args: argparse.Namespace) -> int:
    """Print TOML that `pellucid train` takes."""
    plain = args.config is None and not args.settings
    print(to_toml(RunConfig(), docs=True) if plain else to_toml(load_config(args.config, args.settings)), end="")
    return 0
