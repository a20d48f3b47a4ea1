"""The Chromium of this machine for tests of pages: one for a module, watched for errors and for requests."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "no Chromium on PATH: install one with `apt-get install -y chromium`, or name it in RATHER_CHROMIUM"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
]
WIDE, NARROW = (1280, 900), (390, 844)
PATIENCE = 120_000  # milliseconds; the first page of a browser is slow on a busy machine
SERIOUS = {"serious", "critical"}

OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Skips where there is none. Not for the session: while it lives, an event loop runs in this thread."""
    found = os.environ.get("RATHER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """open_page(file or address, width=..., theme="light" | "dark") -> a page whose charts are drawn.

    At the end of the test: no error on any console, and no request that would have left this machine.
    """
    contexts: list[Any] = []
    errors: list[str] = []
    requests: list[str] = []

    def opened(address: str | Path, *, size: tuple[int, int] = WIDE, theme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=theme
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address.resolve().as_uri() if isinstance(address, Path) else address)
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors, errors
    assert requests
    assert not [url for url in requests if not stays_here(url)]


def stays_here(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in {"file", "data", "blob"} or parts.hostname == "127.0.0.1"


def figures(text: str) -> dict[str, dict[str, Any]]:
    """The charts of a page by their ids, as charts.js gets them."""
    found = re.findall(r'id="([^"]+)"></div><script [^>]*class="figure">(.*?)</script>', text)
    return {anchor: json.loads(figure) for anchor, figure in found}


def wait_until(page: Page, expression: str, seconds: float = 30.0) -> None:
    """Until a JavaScript expression is true. (wait_for_function would need eval, which the pages forbid.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never became true: {expression}"
        page.wait_for_timeout(20)


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    return int(
        page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    )


def drawn_points(page: Page) -> list[int]:
    """Of each drawn line of each chart, how many points its path has."""
    found: list[int] = page.evaluate(
        "[...document.querySelectorAll('.plot path.line')]"
        ".map(path => (path.getAttribute('d').match(/[ML]/g) || []).length)"
    )
    return found


def accessibility_findings(page: Page) -> list[str]:
    """What axe calls serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {[node['target'] for node in each['nodes']][:3]}"
        for each in found
        if each["impact"] in SERIOUS
    ]
