"""Tables for people that programs can read too."""

import io

import pytest

from pellucid.report.terminal import format_bytes, format_cell, format_count, format_seconds, print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(file: io.StringIO, *args: object, **keywords: object) -> str:
    print_table(*args, file=file, **keywords)  # type: ignore[arg-type]
    return file.getvalue()


def test_a_pipe_gets_plain_text_that_is_never_cut() -> None:
    long = "x" * 500
    text = printed(io.StringIO(), ["name", "value"], [[long, 1], ["b", 2]], title="Facts")
    assert long in text and "\x1b" not in text and "Facts" in text


def test_colour_is_left_out_when_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(Terminal(), ["name"], [["a"]], title="T")
    assert "\x1b[3" not in text and "\x1b[4" not in text


def test_cells_are_text_and_not_markup() -> None:
    assert "[bold]x[/bold] [/nothing]" in printed(io.StringIO(), ["[i]n[/i]"], [["[bold]x[/bold] [/nothing]"]])


def test_numbers_line_up_at_the_right() -> None:
    lines = printed(io.StringIO(), ["name", "count"], [["a", 5], ["b", 12345]]).splitlines()
    (five,) = [line.rstrip() for line in lines if line.startswith("a")]
    (many,) = [line.rstrip() for line in lines if line.startswith("b")]
    assert len(five) == len(many) and many.endswith("12,345")


def test_a_table_without_rows_still_has_its_head() -> None:
    assert "name" in printed(io.StringIO(), ["name"], [])


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (format_cell(None), ""),
        (format_cell(True), "yes"),
        (format_cell(1234567), "1,234,567"),
        (format_cell(0.123456789), "0.123457"),
        (format_cell("x"), "x"),
        (format_count(0), "0"),
        (format_count(999), "999"),
        (format_count(999_999), "1M"),
        (format_count(12_600_000), "12.6M"),
        (format_count(1.5e9), "1.5G"),
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(1024), "1.0 KiB"),
        (format_bytes(1_572_864), "1.5 MiB"),
        (format_bytes(500 * 2**20), "500 MiB"),
        (format_bytes(3 * 2**40), "3.0 TiB"),
        (format_seconds(3.21), "3.2 s"),
        (format_seconds(59.99), "1 min 00 s"),
        (format_seconds(65), "1 min 05 s"),
        (format_seconds(3599.9), "1 h 00 min"),
        (format_seconds(3725), "1 h 02 min"),
    ],
)
def test_quantities_read_well(got: str, want: str) -> None:
    assert got == want
