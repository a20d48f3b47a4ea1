"""Take the pictures of board, report and docs for README and docs: `make screenshots`.

It trains the demo's model on the demo's pairs with two values of beta, builds the site, and opens
the pages in Chromium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING

import torch

from rather.board.serve import Board
from rather.commands.demo import queries, write_base, write_run
from tests.browser import ARGUMENTS, MISSING, NAMES, NARROW, WIDE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).resolve().parent / "images"
LARGEST = 200_000  # bytes of one picture
RUNS = {"beta-0.1": "beta=0.1", "beta-0.5": "beta=0.5"}
QUESTIONS = ("Where is the cheese?", "How much is the salt?")
SETTINGS = (
    "eval_steps=5",
    "logging_steps=1",
    f"eval_prompts.prompts={list(QUESTIONS)}",
    "eval_prompts.max_new_tokens=40",
)
PAIR = "2"
WINDOW, TALL = (1280, 1000), (1280, 1450)  # the tall one shows the first two charts
SLOW = 120_000  # milliseconds; the first pair loads the models
LINES = ".plot .scatterlayer path.js-line"


def train(folder: Path) -> None:
    """Build the demo's model and pairs, and train once for each value of beta."""
    training = [query for query in queries() if not query.held_out]
    held_out = [query for query in queries() if query.held_out]
    torch.set_num_threads(1)  # as the demo does: a second thread hardly helps
    write_run(folder, training, held_out)
    write_base(folder / "base", training)
    for name, beta in RUNS.items():
        settings = [f"exp_name={name}", beta, *SETTINGS]
        command = [sys.executable, "-m", "rather", "train", str(folder / "dpo.yaml"), *settings]
        subprocess.run(command, check=True)


@contextmanager
def serving(folder: Path) -> Iterator[Board]:
    """Serve the board of a folder in a thread."""
    with Board(folder, 0) as board:
        thread = Thread(target=board.serve_forever)
        thread.start()
        try:
            yield board
        finally:
            board.shutdown()
            thread.join()


def open_board(browser: Browser, board: Board, size: tuple[int, int], theme: str) -> Page:
    """Open the board with all runs compared and their curves drawn."""
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if theme == "dark" else "light",
    )
    page.goto(board.address)
    page.wait_for_selector("html[data-ready]", state="attached")
    first, *others = RUNS
    page.get_by_role("button", name=first, exact=True).click()
    for name in others:
        page.get_by_label(f"Compare {name}").check()
    lines = page.locator(LINES)
    lines.nth(8 * len(RUNS) - 1).wait_for(state="attached", timeout=SLOW)
    return page


def open_file(browser: Browser, file: Path, size: tuple[int, int], theme: str) -> Page:
    """Open a page from the disk: a report, or a page of the documentation."""
    dark = "dark" if theme == "dark" else "light"
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=dark)
    page.goto(file.as_uri())
    page.wait_for_load_state("load")
    return page


def take_files(browser: Browser, report: Path, site: Path) -> None:
    """Take the report and the documentation on a desktop in light and on a phone in dark."""
    for theme, size in (("light", WINDOW), ("dark", NARROW)):
        page = open_file(browser, report, size, theme)
        page.wait_for_selector("html[data-ready]", state="attached")
        take(page, f"report-{theme}", at="body")
        take(open_file(browser, site / "mistakes.html", size, theme), f"docs-{theme}", at="body")


def open_pair(page: Page) -> None:
    """Show one pair token by token."""
    page.fill("#index", PAIR)
    page.keyboard.press("Enter")
    page.wait_for_selector("#verdict", timeout=SLOW)


def take(page: Page, name: str, at: str) -> None:
    """Write a picture of the window, scrolled to the element `at`."""
    file = IMAGES / f"{name}.png"
    page.locator(at).first.evaluate(
        "found => found.scrollIntoView({block: 'start', behavior: 'instant'})"
    )
    page.screenshot(path=file)
    size = file.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"{file}: {size:,} bytes; at most {LARGEST:,} are allowed.")
    print(f"{file}: {size:,} bytes")


def main() -> None:
    """Train, open the pages, and write the pictures."""
    from playwright.sync_api import sync_playwright

    found = os.environ.get("RATHER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise SystemExit(MISSING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with TemporaryDirectory(prefix="rather-screenshots-") as name:
        folder = Path(name).resolve() / "shop"
        folder.mkdir()
        train(folder)
        with serving(folder / "output") as board, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
            page = open_board(browser, board, TALL, "light")
            take(page, "board", at="body")
            page = open_board(browser, board, WIDE, "light")
            open_pair(page)
            take(page, "board-pair", at="#pair")
            page = open_board(browser, board, NARROW, "dark")
            open_pair(page)
            take(page, "board-narrow", at="#pair")
            site = folder / "site"
            build = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(site)]
            subprocess.run(build, cwd=IMAGES.parents[1], check=True)
            take_files(browser, folder / "output" / next(iter(RUNS)) / "report.html", site)
            browser.close()


if __name__ == "__main__":
    main()
