"""Take the pictures for README and docs: `make screenshots`.

It trains the demo's model on the demo's pairs with two values of beta, and once with some labels
flipped; then it builds the site, and opens the pages in Chromium. To check the pages by eye,
`python -m docs.screenshots FOLDER` takes each one in both themes, on a desktop and on a phone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING

import torch

from rather.config.load import load
from rather.data.pairs import hex_id
from rather.data.prepare import prepare
from rather.tools.board.serve import Board
from rather.tools.demo import queries, write_base, write_run
from rather.tracking.json_lines import strict_json
from tests.browser import ARGUMENTS, MISSING, NAMES, NARROW, WIDE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).resolve().parent / "images"
LARGEST = 200_000  # bytes of one picture
FLIPPED = "flipped"  # the run with wrong labels, in a folder of its own
EVERY = 16  # of so many pairs one is flipped
RUNS = {"beta-0.1": "beta=0.1", "beta-0.5": "beta=0.5"}
QUESTIONS = ("Where is the cheese?", "How much is the salt?")
SETTINGS = (
    "eval_steps=5",
    "logging_steps=1",
    f"eval_prompts.prompts={list(QUESTIONS)}",
    "eval_prompts.max_new_tokens=40",
)
PAIR = "2"
TALL, PAIR_WINDOW = (1280, 1500), (1280, 860)  # with two charts; as high as a pair
SLOW = 300_000  # milliseconds; the first pair loads the models
USED = {
    "board-light-wide": "board",
    "pair-light-wide": "board-pair",
    "pair-dark-narrow": "board-narrow",
    "report-light-wide": "report-light",
    "suspects-light-wide": "board-suspects",
    "pairs-light-wide": "report-pairs",
}
Size = tuple[int, int]
Picture = tuple[str, Callable[[], "Page"], str]
LINES = ".plot path.line"


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
    digests = prepare(load(folder / "dpo.yaml")).train.column("pair_hash")[::EVERY]
    lines = [strict_json({"id": hex_id(int(each)), "flip": True}) + "\n" for each in digests]
    (folder / "flips.jsonl").write_text("".join(lines))
    settings = [f"exp_name={FLIPPED}", f"output_dir={folder / FLIPPED}", *SETTINGS[:2]]
    settings += [f"actor_train.data_args.corrections={folder / 'flips.jsonl'}"]
    settings += ["actor_train.training_args.num_train_epochs=2"]
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


def open_page(
    browser: Browser, address: str, size: Size, theme: str, ready: str = "html[data-ready]"
) -> Page:
    """Open a page and wait until the element `ready` is there."""
    dark = "dark" if theme == "dark" else "light"
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=dark)
    page.goto(address)
    page.wait_for_selector(ready, state="attached", timeout=SLOW)
    return page


def open_board(browser: Browser, board: Board, size: Size, theme: str) -> Page:
    """Open the board with all runs compared and their curves drawn."""
    page = open_page(browser, board.address, size, theme)
    first, *others = RUNS
    page.get_by_role("button", name=first, exact=True).click()
    for name in others:
        page.get_by_label(f"Compare {name}").check()
    lines = page.locator(LINES)
    lines.nth(8 * len(RUNS) - 1).wait_for(state="attached", timeout=SLOW)
    return page


def open_file(browser: Browser, file: Path, size: Size, theme: str) -> Page:
    """Open a page from the disk: a report, or a page of the documentation."""
    ready = "html[data-ready]" if file.name == "report.html" else "body"
    return open_page(browser, file.as_uri(), size, theme, ready)


def open_pair(browser: Browser, board: Board, size: Size, theme: str) -> Page:
    """Open the board with one pair shown token by token."""
    from playwright.sync_api import TimeoutError

    page = open_board(browser, board, size, theme)
    page.fill("#index", PAIR)
    page.keyboard.press("Enter")
    try:
        page.wait_for_selector("#verdict", timeout=SLOW)
    except TimeoutError as error:
        raise SystemExit(f"no pair after {SLOW / 1000} s: {page.inner_text('#doing')}") from error
    return page


def open_suspects(browser: Browser, board: Board, size: Size, theme: str) -> Page:
    """Open the board with the pairs whose labels look flipped, the worst first."""
    page = open_page(browser, board.address, size, theme)
    page.get_by_role("button", name=FLIPPED, exact=True).click()
    page.fill("#text", "likely_flipped")
    page.keyboard.press("Enter")
    page.wait_for_selector("#hits button", timeout=SLOW)
    return page


def take(page: Page, file: Path, at: str) -> None:
    """Write a picture of the window, scrolled to the element `at`, and close the page."""
    page.locator(at).first.evaluate(
        "found => found.scrollIntoView({block: 'start', behavior: 'instant'})"
    )
    page.screenshot(path=file)
    page.close()
    size = file.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"{file}: {size:,} bytes; at most {LARGEST:,} are allowed.")
    print(f"{file}: {size:,} bytes")


def pictures(
    browser: Browser, board: Board, flipped: Board, report: Path, site: Path
) -> Iterator[Picture]:
    """Yield each picture by name: how to open its page, and the element it begins with."""
    for theme in ("light", "dark"):
        for width, size in (("wide", WIDE), ("narrow", NARROW)):
            name = f"{theme}-{width}"
            tall, short = (TALL, PAIR_WINDOW) if width == "wide" else (NARROW, NARROW)
            yield f"board-{name}", partial(open_board, browser, board, tall, theme), "body"
            top = "#pair h3" if width == "wide" else "#pair fieldset"  # the answers need the room
            yield f"pair-{name}", partial(open_pair, browser, board, short, theme), top
            yield f"report-{name}", partial(open_file, browser, report, size, theme), "body"
            yield (
                f"suspects-{name}",
                partial(open_suspects, browser, flipped, short, theme),
                "#find",
            )
            pairs = report.parents[2] / FLIPPED / FLIPPED / report.name
            yield f"pairs-{name}", partial(open_file, browser, pairs, short, theme), "#pairs"
            for page in ("index", "mistakes", "pairs", "choosing"):
                file = site / f"{page}.html"
                yield f"site-{page}-{name}", partial(open_file, browser, file, size, theme), "body"


def main() -> None:
    """Train, open the pages, and write the pictures."""
    from playwright.sync_api import sync_playwright

    found = os.environ.get("RATHER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise SystemExit(MISSING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    wanted = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with TemporaryDirectory(prefix="rather-screenshots-") as name:
        folder = Path(name).resolve() / "shop"
        folder.mkdir()
        train(folder)
        site, output = folder / "site", folder / "output"
        build = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(site)]
        subprocess.run(build, cwd=IMAGES.parents[1], check=True)
        report = output / next(iter(RUNS)) / "report.html"
        own = folder / FLIPPED
        with serving(output) as board, serving(own) as flipped, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
            for shown, page, at in pictures(browser, board, flipped, report, site):
                if wanted or shown in USED:
                    file = wanted / shown if wanted else IMAGES / USED[shown]
                    take(page(), file.with_suffix(".png"), at)
            browser.close()


if __name__ == "__main__":
    main()
