"""A headless Chromium, and pages in it that must not fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Dialog, Page, sync_playwright

CHROMIUM = os.environ.get("STRANDLINE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "Chromium is not installed: `apt-get install chromium`, or name one with STRANDLINE_CHROMIUM"

_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 812}


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, until the end of the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Trouble:
    """What must not happen in a page: errors of scripts, refused contents, dialogs of `alert`, calls to other hosts."""

    def __init__(self, page: Page, url: str) -> None:
        self.seen: list[str] = []
        page.on("pageerror", lambda error: self.seen.append(f"error: {error}"))
        page.on("console", self._console)
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self._request(request.url, url))

    def _console(self, message: Any) -> None:
        # A refused or failed call is reported by the browser itself; the page says it in words.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.seen.append(f"console: {message.text}")

    def _dialog(self, dialog: Dialog) -> None:
        self.seen.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, to: str, ours: str) -> None:
        if not to.startswith((ours, "data:", "blob:")):
            self.seen.append(f"request to {to}")


@contextmanager
def opened(
    browser: Browser, url: str, path: str = "", *, size: dict[str, int] = LAPTOP, dark: bool = False
) -> Iterator[Page]:
    """A page of the server at `url`. At the end of the block, anything that must not happen is an error."""
    context = browser.contexts[0] if browser.contexts else browser.new_context(locale="en-GB", timezone_id="UTC")
    page = context.new_page()  # has a session storage of its own
    try:
        page.set_default_timeout(10_000)
        page.set_viewport_size({"width": size["width"], "height": size["height"]})
        page.emulate_media(color_scheme="dark" if dark else "light")
        trouble = Trouble(page, url)
        page.goto(f"{url.rstrip('/')}/{path}")
        yield page
        assert not trouble.seen, trouble.seen
    finally:
        page.close()
