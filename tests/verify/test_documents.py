"""What the documents show of the proofs is what this version prints."""

import re
import shlex
from pathlib import Path

import pytest

from pellucid.cli import main
from pellucid.registry import names
from pellucid.verify.certificate import bound
from pellucid.verify.shrink import shrink

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"\d\.\de-\d\d"
MODES = [mode for mode in names("mode") if mode != "none"]


def shown(document: str, name: str) -> list[str]:
    """The lines of the block between two marks."""
    text = (ROOT / document).read_text(encoding="utf-8")
    ((block,),) = [
        re.findall(rf"<!-- {name}: begin[^>]* -->\n\n?```\n(.*?)```\n\n?<!-- {name}: end -->", text, re.DOTALL)
    ]
    return block.splitlines()


def test_the_certificate_in_the_readme_has_a_line_for_every_mode_and_the_bounds_of_this_version():
    *modes, last = shown("README.md", "certificate")
    assert [line.split()[0] for line in modes] == MODES
    for line in modes:
        assert re.fullmatch(
            rf"\w+  fp64 {NUMBER} <= 8.9e-14  fp32 {NUMBER} <= 4.8e-05  bytes ok  grads nonzero  PASS", line
        )
    assert last == f"verified: {len(MODES)} modes, 4 ranks"
    from pellucid.config import load_config

    model = shrink(load_config(ROOT / "configs/small.toml"), 4).model
    assert (f"{bound(model, 'fp64'):.1e}", f"{bound(model, 'fp32'):.1e}") == ("8.9e-14", "4.8e-05")


@pytest.mark.parametrize(
    "document, name, ranks, signs",
    [("README.md", "resume", 3, "+."), ("docs/checkpoints.md", "resume matrix", 4, "+")],
)
def test_the_table_of_resumed_runs_has_every_mode_and_no_failure(document, name, ranks, signs):
    lines = shown(document, name)
    header = next(i for i, line in enumerate(lines) if line.startswith("from "))
    assert lines[header].split() == ["from", "none", *MODES]
    rows = [line.split() for line in lines[header + 1 :] if " x " in line]
    assert [" ".join(row[:3]) for row in rows] == [
        "none x 1",
        *(f"{m} x {n}" for m in MODES for n in range(2, ranks + 1)),
    ]
    cells = [cell for row in rows for cell in row[3:]]
    assert len(cells) == len(rows) * (1 + len(MODES)) and set("".join(cells)) == set(signs)
    if document == "README.md":
        assert [line.split("  ")[0] for line in lines if "  same bits" in line] == [
            "none x 1",
            *(f"{m} x 2" for m in MODES),
        ]


@pytest.mark.slow
def test_the_commands_in_the_readme_run_as_printed(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    lines = re.findall(
        r"^pellucid (verify .*|drill .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(lines) == 3
    for line in lines:
        assert main(shlex.split(line)) == 0, line
        last = capsys.readouterr().out.splitlines()[-1]
        assert re.fullmatch(r"verified: \d+ modes, 4 ranks|resumed: (\d+) of \1|(\d+) of \2 recovered", last), last
