"""`pellucid conformance`."""

import argparse
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.cli.output import Progress, notice, print_json
from pellucid.errors import ConfigError

if TYPE_CHECKING:
    from pellucid.conformance.run import Column, Result

MARKS = {"passed": "ok", "failed": "FAIL", "skipped": "skip"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "conformance",
        help="test any server with the vendors' own clients",
        description="Run the cases of the OpenAI and Anthropic protocols against a server, ours or another, with every client "
        "generation in a folder (`make setup-clients`), and print what each could and could not do. 1 if a case failed.",
    )
    parser.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8000")
    parser.add_argument("--key", metavar="K", help="the server's API key; wrong and missing ones are tested then")
    parser.add_argument("--only", choices=["openai", "anthropic"], help="one vendor's protocol")
    parser.add_argument("--cases", default="", metavar="PATTERN", help='those whose names match, such as "tools|stop"')
    parser.add_argument("--model", metavar="NAME", help="default: the first that answers a chat")
    parser.add_argument(
        "--clients",
        default=".clients",
        metavar="DIR",
        help="folders openai-X.Y.Z and anthropic-X.Y.Z (default .clients)",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds to wait for an answer (default 120)"
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the cases; 1 if one failed."""
    from pellucid.conformance.run import VENDORS, find_columns, find_target, run_column

    try:
        re.compile(args.cases)
    except re.error as error:
        raise ConfigError(f"--cases must be a regular expression, got {args.cases!r}: {error}") from None
    columns = find_columns(Path(args.clients), args.only)
    target = find_target(args.url, args.key, args.model, args.timeout)
    vendors = [args.only] if args.only else list(VENDORS)
    results: list[Result] = []
    with Progress("conformance", None, quiet=args.quiet) as bar:
        for column in columns:

            def tell(result: "Result") -> None:
                results.append(result)
                bar.update(len(results), f"{result.column} {result.case}")

            run_column(column, target, vendors, tell, only=args.cases, timeout_s=args.timeout)
    counts = Counter(result.status for result in results)
    last = "conformance: " + ", ".join(f"{counts[status]} {status}" for status in MARKS)
    if args.json:
        known = {"url": target.url, "model": target.model, "embedder": target.embedder, "window": target.window}
        sums = {status: counts[status] for status in MARKS}
        print_json(known | sums | {"columns": [c.name for c in columns], "results": [asdict(r) for r in results]})
        notice(last)
    else:
        print_results(columns, results)
        print(last)
    return 1 if counts["failed"] else 0


def print_results(columns: "list[Column]", results: "list[Result]") -> None:
    """The table, then the reason of each failure, and of each skip once."""
    from pellucid.report.terminal import print_table

    names = [column.name for column in columns]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for result in results:
        rows.setdefault((result.vendor, result.case), {})[result.column] = MARKS[result.status]
    ordered = sorted(rows.items(), key=lambda item: item[0][0] != "openai")
    print_table(
        ["case", *names],
        [[f"{vendor} {case}", *(marks.get(name, "") for name in names)] for (vendor, case), marks in ordered],
    )
    for status in ("failed", "skipped"):
        grouped: dict[str, list[Result]] = {}
        for result in results:
            if result.status == status:
                grouped.setdefault(result.reason, []).append(result)
        if grouped:
            print(f"\n{status}")
        for reason, group in grouped.items():
            cases = dict.fromkeys(f"{result.vendor} {result.case}" for result in group)
            clients = dict.fromkeys(result.column for result in group)
            print(f"  {'; '.join(cases)} [{', '.join(clients)}]\n    {reason}")
    print()
    sys.stdout.flush()
