"""`pellucid drill`."""

import argparse
from typing import TYPE_CHECKING

from pellucid.cli.output import Progress, print_json
from pellucid.cli.verify import verified_config

if TYPE_CHECKING:
    from pellucid.verify.drill import Case

NPROC, MAX_SECONDS = 2, 60.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "drill",
        help="kill ranks at file operations, collectives and optimizer steps, and see each run recover",
        description="Shrink the configuration, run it once, then kill a rank with SIGKILL at one moment after the other: "
        "before and after each operation of a save on the disk, at each collective, around each optimizer step. Each run is "
        "started again, and must end with the bits of the one that nothing interrupted.",
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("--nproc", type=int, default=NPROC, metavar="N", help=f"ranks (default: {NPROC})")
    parser.add_argument(
        "--max-seconds", type=float, default=MAX_SECONDS, metavar="S",
        help=f"begin no case later than this; 0: try every moment (default: {MAX_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument("--sample", type=int, metavar="N", help="cases of each kind at most (default: as time allows)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the order of the cases (default: 0)")
    parser.add_argument("--case", metavar="KIND:RANK:NUMBER", help="only this moment, as a failure names it")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run, takes_settings=True)


def run(args: argparse.Namespace) -> int:
    """Drill and print; 1 where a run did not recover."""
    config = verified_config(args.config, args.settings)
    from pellucid.verify.drill import drill
    from pellucid.verify.moments import Moment

    tried = failed = 0
    with Progress("drill", None, quiet=args.quiet) as progress:

        def show(case: "Case") -> None:
            nonlocal tried, failed
            tried, failed = tried + 1, failed + bool(case.failure)
            progress.update(tried, f"{tried} kills, {failed} not recovered; last: {case.kill.what}")

        result = drill(
            config,
            args.nproc,
            max_seconds=args.max_seconds or None,
            sample=args.sample,
            seed=args.seed,
            only=Moment.parse(args.case) if args.case else None,
            report=show,
        )
    if args.json:
        print_json(result.to_json())
    else:
        print(f"{result.place.mode}, {result.place.ranks} ranks")
        print("\n".join(result.lines()))
    return 0 if result.passed else 1
