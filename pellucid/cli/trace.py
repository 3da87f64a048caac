"""`pellucid trace`."""

import argparse
import sys

from pellucid.cli.output import print_json


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "trace",
        help="show what each rank computed and sent in one step",
        description="Write RUN/trace.html, a page to look at, and RUN/trace.json for ui.perfetto.dev: one step of a run "
        "with its communication, how much of it was hidden behind computation, and its bytes beside those predicted.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run trained on several ranks")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the step to show, 0 is before the first (default: a typical late one)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--text", action="store_true", help="draw it in the terminal and write nothing")
    output.add_argument("--json", action="store_true", help="the summary as one object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the step, write or draw it, sum it up."""
    from pellucid.report.trace import build_trace, print_summary, print_trace, read_trace

    trace = read_trace(args.run_folder, args.step)
    if args.text:
        print_trace(trace, sys.stdout)
        return 0
    page, events = build_trace(trace)
    if args.json:
        print_json(trace.summary | {"html": str(page), "trace": str(events)})
        return 0
    print(f"{page}\n{events}  (opens in ui.perfetto.dev)\n")
    print_summary(trace, sys.stdout)
    return 0
