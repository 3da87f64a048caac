"""The process of one column: `python -m pellucid.conformance.child openai | anthropic | raw`, started by `run`.

Reads {"target", "vendors", "only", "timeout_s"} from stdin and writes JSON lines: first {"version", "cases"}, then one for each case.
"""

import json
import os
import re
import sys
import time
import traceback
from importlib import import_module
from typing import Any, TextIO

from pellucid.conformance.case import CASES, Case, Skipped, Target, says_unsupported

MODULES = (
    "openai_chat", "openai_stream", "openai_tools", "openai_other", "openai_errors", "openai_wire",
    "anthropic_messages", "anthropic_stream", "anthropic_tools", "anthropic_errors",
)  # fmt: skip


def main(column: str) -> int:
    """Run the cases of a column."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a client prints must not stand between the lines
    given = json.load(sys.stdin)
    target = Target(**given["target"])
    cases = [
        case
        for case in column_cases(column, given["vendors"])
        if re.search(given["only"], f"{case.vendor} {case.name}")
    ]
    if column == "raw":
        from pellucid.conformance.wire import Wire

        subject: Any = Wire(target, given["timeout_s"])
        version = ""
    else:
        from pellucid.conformance.session import Session

        subject = Session(target, column, given["timeout_s"])  # type: ignore[arg-type]
        version = subject.sdk.__version__
    write(lines, {"version": version, "cases": [[case.vendor, case.name] for case in cases]})
    for case in cases:
        write(lines, judge(case, subject, target.missing.get(case.vendor)))
    return 0


def column_cases(column: str, vendors: list[str]) -> list[Case]:
    """The cases of a column, in the order of the table."""
    for name in MODULES:
        import_module(f"pellucid.conformance.{name}")
    if column == "raw":
        return [case for case in CASES if case.raw and case.vendor in vendors]
    return [case for case in CASES if not case.raw and case.vendor == column]


def judge(case: Case, subject: Any, missing: str | None = None) -> dict[str, Any]:
    """Run a case, unless its whole protocol is ``missing``; whatever it raises is its result."""
    start = time.monotonic()
    status, reason = "passed", ""
    try:
        if missing is not None:
            raise Skipped(missing)
        case.run(subject)
    except Skipped as skip:
        status, reason = "skipped", str(skip)
    except Exception as error:
        code = getattr(error, "status_code", None)
        unsupported = case.feature is not None and says_unsupported(code, str(error))
        status, reason = "skipped" if unsupported else "failed", describe(error)
    seconds = round(time.monotonic() - start, 4)
    return {"vendor": case.vendor, "case": case.name, "status": status, "reason": reason, "seconds": seconds}


def describe(error: Exception) -> str:
    """One line: what was raised, and where in the cases."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "conformance" in frame.filename]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    name = "" if type(error).__name__ == "Failed" else f"{type(error).__name__}: "
    text = " ".join(str(error).split())
    return f"{name}{text if len(text) < 500 else text[:500] + ' ...'}{place}"


def write(lines: TextIO, record: dict[str, Any]) -> None:
    lines.write(json.dumps(record) + "\n")
    lines.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
