"""`pellucid verify`."""

import argparse
from typing import TYPE_CHECKING

from pellucid.cli.output import notice, print_json
from pellucid.config import RunConfig, load_config
from pellucid.errors import ConfigError

if TYPE_CHECKING:
    from pellucid.verify import ModeResult, ResumeProof
    from pellucid.verify.resume import SamePlace

NPROC = 4


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "verify",
        help="prove on this machine that every parallel mode equals one process",
        description="Shrink the configuration until it runs in seconds, train it for three steps in every parallel mode, in "
        "float64 and in float32, and compare each gradient, weight and byte with one process and with the plan. With --resume, "
        "kill runs of it and compare what goes on with what was never interrupted. docs/verify.md says what that shows, and "
        "what it cannot.",
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("--nproc", type=int, default=NPROC, metavar="N", help=f"ranks (default: {NPROC})")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="kill runs and go on with them instead: the bits of one that was not killed, also on other numbers of ranks",
    )
    parser.add_argument(
        "--all", action="store_true", help="with --resume: from each mode and number of ranks to each, not a selection"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="with --resume: draws the moments of the kills"
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run, takes_settings=True)


def run(args: argparse.Namespace) -> int:
    """Verify and print; 1 where something is not as it should be."""
    config = verified_config(args.config, args.settings)
    if args.resume:
        return verify_resume(config, args)
    if args.all or args.seed:
        raise ConfigError("--all and --seed belong to --resume; every mode is verified anyway")
    return verify_modes(config, args.nproc, as_json=args.json, quiet=args.quiet)


def verified_config(path: str, settings: dict[str, str]) -> RunConfig:
    """The configuration, with the shape of the model that it starts from. Its data is not needed."""
    config = load_config(path, settings)
    if config.train.init:
        from pellucid.checkpoint.model_folder import find_model, read_config

        config = load_config(path, settings, base_model=read_config(find_model(config.train.init)))
    if config.lora is not None:
        raise ConfigError("`pellucid verify` compares the training of whole models; leave the table [lora] out")
    return config


def verify_modes(config: RunConfig, ranks: int, *, as_json: bool, quiet: bool) -> int:
    """The certificate, a line a mode."""
    from pellucid import verify
    from pellucid.verify.shrink import changes, shrink

    changed = changes(config, shrink(config, ranks))
    if not quiet:
        notice("shrunk: " + ", ".join(f"{key} {_word(old)} -> {_word(new)}" for key, old, new in changed))

    def line(result: "ModeResult") -> None:
        if not as_json:
            print(result.line(), flush=True)

    certificate = verify.verify_modes(config, ranks, report=line)
    if as_json:
        settings = {key: new for key, _, new in changed}
        print_json(certificate.to_json() | {"shrunk": settings})
    else:
        print(certificate.last_line())
    return 0 if certificate.passed else 1


def verify_resume(config: RunConfig, args: argparse.Namespace) -> int:
    """The runs that stayed in their place, and the table of those that did not."""
    from pellucid import verify

    def line(same: "SamePlace") -> None:
        if not args.json:
            print(same.lines(), flush=True)

    proof = verify.verify_resume(config, args.nproc, everything=args.all, seed=args.seed, report=line)
    if args.json:
        print_json(proof.to_json())
    else:
        print_crossings(proof)
        print("\n".join([*proof.failures(), proof.last_line()]))
    return 0 if proof.passed else 1


def print_crossings(proof: "ResumeProof") -> None:
    """The table from x to."""
    sizes = ", ".join(str(size) for size in sorted({place.ranks for place in proof.places} - {1}))
    print(f"\nFrom a checkpoint (row) to a mode on {sizes} ranks, a sign each; none is one process.")
    print("+ same samples and moments, weights within the bound   X not so   . not tried (--all tries it)")
    rows = proof.table()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _word(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value or '""'
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
