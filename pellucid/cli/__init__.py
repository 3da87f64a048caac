"""The command line: the only place where names become objects."""

import argparse
import logging
import sys
from importlib import import_module

from pellucid.cli import allocator
from pellucid.cli.settings import split_settings
from pellucid.errors import PellucidError
from pellucid.version import __version__

COMMANDS = (
    "prepare", "train", "evaluate", "generate", "embed", "chat", "inspect", "import_", "export", "config", "doctor", "demo",
    "demo_align", "plan", "trace", "verify", "drill", "conformance", "bench", "serve",
)  # fmt: skip
"""Modules of this package; each has ``add_parser`` and sets ``run`` to a function from the arguments to an exit code."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code.

    0 done, 1 the run failed, 2 bad usage, configuration or input, 130 interrupted.
    """
    given = sys.argv[1:] if argv is None else argv
    rest, settings = split_settings(given)
    parser = build_parser()
    args = parser.parse_args(rest)
    if settings and not getattr(args, "takes_settings", False):
        parser.error(f"{args.command} takes no dotted settings such as --{next(iter(settings))}")
    args.settings = settings
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if argv is None and (purpose := getattr(args, "allocator", None)) is not None:
        allocator.keep_memory(huge_pages=purpose == "inference")
    try:
        code: int = args.run(args)
        return code
    except PellucidError as error:
        print(f"pellucid: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("pellucid: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away; nothing to say
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="pellucid", description="Train and serve language models, and see every byte that moves."
    )
    parser.add_argument("--version", action="version", version=f"pellucid {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"pellucid.cli.{name}").add_parser(commands)
    for command in commands.choices.values():
        command.add_argument("--quiet", action="store_true", help="no progress on stderr")
        command.add_argument(
            "--log-level", default="warning", choices=["debug", "info", "warning", "error"], help="of the log on stderr"
        )
    return parser
