"""A real browser: Debian's chromium, driven by Playwright."""

import os
import shutil
from contextlib import contextmanager

import pytest

from helpers.limits import HANG_SECONDS

HANG_MILLISECONDS = 1000 * HANG_SECONDS


def find_chromium():
    """Return where chromium is; `None` if it is not installed."""
    given = os.environ.get("CHROMIUM")
    return given or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def launched_browser():
    """Start chromium; skip the test if it or Playwright is not installed."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed"
    )
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("chromium is not installed: apt install chromium")
    with playwright.sync_playwright() as started:
        # Without a sandbox of its own: the page is ours, and root has no other choice.
        browser = started.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox"],
            timeout=HANG_MILLISECONDS,
        )
        yield browser
        browser.close()


@contextmanager
def opened_page(browser, path, *, width=1200, scheme="light"):
    """Open a page from the disk; fail on an error in its console or on a request."""
    complaints = []
    page = browser.new_page(
        viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    # Playwright's own is 30 s, for every action and for every wait.
    page.set_default_timeout(HANG_MILLISECONDS)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
    address = path.resolve().as_uri()
    page.on(
        "request",
        lambda request: request.url == address or complaints.append(request.url),
    )
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]")
    yield page
    page.close()
    assert not complaints, complaints
