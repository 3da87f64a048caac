"""A headless Chromium of the system for tests of the chat page; whoever has none skips them."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def chromium():
    """Its path; skips the test where it, or playwright, is missing."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    return Path(found)


@contextmanager
def browser():
    """A running browser; playwright makes a folder of its own for each one's profile."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS, headless=True)
        yield running
        running.close()
