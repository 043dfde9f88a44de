"""The browser of the tests: Debian's Chromium, driven by Playwright, which downloads none itself."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def browser_path() -> str | None:
    """The program of the browser; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def chromium() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(),
            # A test runs as root in a container, where the sandbox of the browser cannot start.
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        try:
            yield browser
        finally:
            browser.close()
