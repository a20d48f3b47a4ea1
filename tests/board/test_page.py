"""The page in a real Chromium: drawing and texts, mouse and keyboard, live updates, both themes
and widths.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import nan
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from rather.config.run_config import DPOConfig
from rather.tools.board.serve import Board
from rather.tools.board.session import Session
from rather.tools.commands import private_page
from tests.board.conftest import ANSWER, FINDING, add_line
from tests.browser import (
    NARROW,
    WIDE,
    OpenPage,
    accessibility_findings,
    drawn_points,
    overflow,
)
from tests.padded import padded_logps

if TYPE_CHECKING:
    from playwright.sync_api import Page

Serve = Callable[[Path], Board]
LINES = ".plot path.line"
SLOW = 60_000  # milliseconds: models are loaded, beside other tests


def opened(
    open_page: OpenPage, board: Board, size: tuple[int, int] = WIDE, theme: str = "light"
) -> Page:
    page = open_page(board.address, size=size, theme=theme)
    page.wait_for_selector(LINES, state="attached")
    return page


def sees(page: Page, selector: str, text: str | re.Pattern[str]) -> None:
    """Waits for the text of an element; not by a script, for the page lets none be evaluated."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_text(text, timeout=SLOW)


def counts(page: Page, selector: str, number: int) -> None:
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_count(number, timeout=SLOW)


def row_of(page: Page, name: str) -> str:
    return page.locator(
        "#rows tr", has=page.get_by_role("button", name=name, exact=True)
    ).inner_text()


def test_a_browser_enters_by_the_private_page(open_page: OpenPage, board: Board) -> None:
    with private_page(board.address) as address:
        page = open_page(address)
    assert page.url == f"http://127.0.0.1:{board.server_port}/"
    page.reload()
    page.wait_for_selector("html[data-ready]", state="attached")


def test_curves_comparison_filter_and_findings(open_page: OpenPage, board: Board) -> None:
    page = opened(open_page, board)
    assert "token" not in page.url
    assert page.inner_text("#status").endswith(": 2 ended")
    page.get_by_role("button", name="first", exact=True).click()
    sees(page, "#chart-0-about", re.compile("training 0.6877 at step 5"))
    points = drawn_points(page)
    assert points[:2] == [5, 3]
    assert len(points) == 8  # four charts, training and held-out
    sees(page, "#opened", re.compile("chosen_falling"))
    assert FINDING["advice"] in page.inner_text("#opened")
    assert page.locator("#opened").bounding_box()["y"] < page.locator("#charts").bounding_box()["y"]
    page.get_by_text("1 incident", exact=True).click()
    assert "grad_norm: 9.5" in page.inner_text("#opened")
    assert ANSWER["policy"] in page.inner_text("#opened")

    page.get_by_label("Compare second").check()
    counts(page, LINES, 16)
    told = page.inner_text("#different")
    assert "beta\tnot set\t0.3" in told
    page.select_option("#metric", "grad_norm")
    sees(page, "#chart-4", "grad_norm")
    counts(page, LINES, 18)
    page.get_by_label("Remove the chart of loss").click()
    sees(page, "#chart-3", "grad_norm")
    counts(page, LINES, 14)
    assert "loss" in page.locator("#metric option").all_inner_texts()
    page.fill("#smoothing", "0.5")
    counts(page, LINES, 28)  # the points themselves stay behind each line
    assert page.inner_text("#smoothed") == "0.5"
    page.fill("#smoothing", "0")
    counts(page, LINES, 14)
    page.locator("figure summary").first.click()
    assert page.locator("figure").first.get_by_role("row").count() == 5

    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("/")
    page.keyboard.type("ended SECOND")
    assert page.locator("#rows tr").count() == 1
    assert page.inner_text("#shown") == "1 of 2 shown"
    page.fill("#filter", "")
    page.get_by_role("button", name="run", exact=True).click()
    page.get_by_role("button", name="run", exact=True).click()
    assert page.get_attribute("th[data-key=name]", "aria-sort") == "descending"
    assert page.locator("#rows tr th").all_inner_texts() == ["second", "first"]


def test_the_keyboard_is_enough(open_page: OpenPage, board: Board) -> None:
    page = opened(open_page, board)
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.locator("#rows button[tabindex='0']").focus()
    first = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.textContent")
    assert {first, second} == {"first", "second"}
    page.keyboard.press("Enter")
    sees(page, "#compared", second)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    counts(page, LINES, 16)
    assert page.locator("#rows [tabindex='0']").count() == 2


def test_pairs_token_by_token(
    open_page: OpenPage, board: Board, trained: dict[str, DPOConfig]
) -> None:
    page = opened(open_page, board)
    page.get_by_role("button", name="second", exact=True).click()
    page.fill("#index", "3")
    page.keyboard.press("Enter")
    page.wait_for_selector("#verdict", timeout=SLOW)
    config = trained["second"]
    (pair,) = Session(config.run_dir).sets["train"].take([3])
    with torch.no_grad():
        base, model = (
            padded_logps(AutoModelForCausalLM.from_pretrained(folder), [pair])[0].tolist()
            for folder in (str(config.pretrain), config.run_dir / "model")
        )
    cells = page.locator("#pair .scroll tbody tr td").all_inner_texts()
    shown = [float(text.replace("−", "-")) for text in cells]
    # Without columns of "before", for the policy began as its reference.
    expected = [[a, b, b - a, 0.3 * (b - a)] for a, b in zip(base, model, strict=True)]
    margins = [a - b for a, b in zip(*expected, strict=True)]
    assert shown == pytest.approx([*expected[0], *expected[1], *margins], abs=6e-4)

    options = page.get_by_role("listbox", name="Tokens of the chosen answer").get_by_role("option")
    assert options.count() == len(pair.chosen)
    tokens = len(pair.chosen) + len(pair.rejected)
    assert page.locator(".token.up, .token.down").count() == tokens
    options.first.focus()
    readout = page.inner_text(".readout")
    assert "by the reference" in readout
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".readout") != readout
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == page.inner_text(
        ".readout"
    )
    page.keyboard.press("ArrowDown")
    other = page.evaluate("document.activeElement.parentElement.getAttribute('aria-label')")
    assert other == "Tokens of the rejected answer"
    page.get_by_label("before training").check()
    assert page.locator(".token.up, .token.down").count() == 0  # the policy began as its reference
    page.get_by_text("Numbers of all tokens").click()
    page.locator("#pair details tbody tr").first.wait_for(timeout=SLOW)  # made when it opens
    assert page.locator("#pair details tbody tr").count() == tokens

    page.locator("h1").click()
    page.keyboard.press("n")
    sees(page, "#pair h3", "Pair 4 of 40")
    page.select_option("#set", "held-out")
    sees(page, "#pair h3", "Pair 0 of 9")
    page.fill("#text", "w1")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Pair 2", exact=True).click()
    sees(page, "#pair h3", "Pair 2 of 9")


def test_a_run_without_weights_says_so(
    open_page: OpenPage, serve: Serve, trained: dict[str, DPOConfig], tmp_path: Path
) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "bare").mkdir(exist_ok=True)
        (tmp_path / "bare" / name).write_bytes((trained["first"].run_dir / name).read_bytes())
    page = opened(open_page, serve(tmp_path))
    page.get_by_role("button", name="Show", exact=True).click()
    sees(page, "#doing", re.compile("no trained weights yet"))


def test_new_lines_appear(
    open_page: OpenPage, serve: Serve, trained: dict[str, DPOConfig], tmp_path: Path
) -> None:
    """Also a torn line, which counts when it is whole, and a run that begins.

    The panel of the run stays as it is until something else than metrics changes.
    """
    copytree(trained["first"].run_dir, tmp_path / "live")
    page = opened(open_page, serve(tmp_path))
    page.get_by_text("Settings", exact=True).click()
    assert drawn_points(page)[0] == 5
    file = tmp_path / "live" / "metrics.jsonl"
    with file.open("a") as out:
        out.write('{"step": 6, "loss": 0.5, "rewards/accuracies": 1.0}\n{"step": 7, "lo')
    sees(page, "#rows .step", "6 of 5")
    sees(page, "#chart-0-about", re.compile("training 0.5 at step 6"))
    assert drawn_points(page)[0] == 6
    with file.open("a") as out:
        out.write('ss": 0.25}\n')
    sees(page, "#rows .step", "7 of 5")
    assert page.locator("#opened details[open]").count() == 1
    (tmp_path / "live" / ".finished").unlink()
    sees(page, "#opened > p:nth-of-type(2)", re.compile("^live: failed; "))
    (tmp_path / "born").mkdir()
    add_line(tmp_path / "born" / "metrics.jsonl", {"step": 1, "loss": 0.7})
    counts(page, "#rows tr", 2)
    assert "failed" in row_of(page, "born")


@pytest.mark.parametrize(
    ("size", "theme"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide", "narrow"]
)
def test_both_themes_and_widths(
    open_page: OpenPage, board: Board, size: tuple[int, int], theme: str
) -> None:
    """Begun in one theme and switched to the other, with two runs compared and a pair shown."""
    page = opened(open_page, board, size, theme)
    page.get_by_role("button", name="first", exact=True).click()
    page.get_by_label("Compare second").check()
    counts(page, LINES, 16)
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_selector("#verdict", timeout=SLOW)
    grounds = []
    for _ in range(2):
        assert overflow(page) <= 0
        assert not accessibility_findings(page)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("#theme")
    assert grounds[0] != grounds[1]


def test_text_of_runs_is_never_markup(open_page: OpenPage, serve: Serve, tmp_path: Path) -> None:
    bad = "<img src=x onerror=document.title='taken'>"
    run = tmp_path / bad.replace("/", "")
    run.mkdir()
    add_line(run / "metrics.jsonl", {"step": 1, "loss": 1.0, bad: 2.0})
    add_line(run / "health.jsonl", {**FINDING, "text": bad, "severity": bad, "name": bad})
    add_line(run / "incidents.jsonl", {"kind": bad, bad: [bad]})
    add_line(run / "answers.jsonl", {**ANSWER, "prompt": bad, "policy": bad})
    page = opened(open_page, serve(tmp_path))
    sees(page, "#opened", re.compile("onerror"))
    assert page.locator("main img").count() == 0
    assert page.title() == "Rather board"
    assert bad in page.inner_text("#opened")


def test_a_damaged_folder_and_a_diverged_model_are_shown(
    open_page: OpenPage,
    serve: Serve,
    trained: dict[str, DPOConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_bytes((trained["first"].run_dir / name).read_bytes())
    for stats in (None, "x", {"repetition": "much"}):
        add_line(
            tmp_path / "run" / "answers.jsonl",
            {**ANSWER, "policy_stats": stats, "reference_stats": stats},
        )
    side = {"texts": ["a", " b", " c"], "scored": [1, 2], "sums": {"reference": -3.0, "before": -3.0, "after": nan},
            "logps": {"reference": [-1.0, -2.0], "before": [-1.0, -2.0], "after": [nan, -1.5]}}  # fmt: skip
    told = {"index": 0, "pairs": 1, "id": None, "sets": {"train": 1}, "prompt_tokens": 1,
            "models": dict.fromkeys(("reference", "before", "after"), "base"),
            "sides": {"chosen": side, "rejected": side},
            "rewards": {"before": [0.0, 0.0], "after": [nan, nan]}}  # fmt: skip
    board = serve(tmp_path)
    monkeypatch.setattr(board.inspector, "ask", lambda _: {"state": "done", **told})
    page = opened(open_page, board)
    sees(page, "#opened", re.compile("repetition NaN"))
    page.get_by_role("button", name="Show", exact=True).click()
    sees(
        page,
        "#verdict",
        re.compile("chosen answer by not finite nats .* margin 0.000 before, not finite after"),
    )
    label = page.locator("#pair [role='option']").first.get_attribute("aria-label") or ""
    assert label.startswith(
        '" b": log-ratio not finite after, 0.000 before; log-prob −1.000 by the reference, not fin'
    )
    assert page.inner_text("#status").startswith("1 run in ")


def test_the_report_opens_and_cannot_ask_the_board(open_page: OpenPage, board: Board) -> None:
    page = opened(open_page, board)
    with page.expect_popup() as popup:
        page.get_by_role("link", name="Report of this run").click()
    popup.value.wait_for_selector("html[data-ready]", state="attached")
    assert popup.value.evaluate("window.origin") == "null"
    assert (
        popup.value.evaluate("fetch('/api/runs').then(() => 'answered', () => 'refused')")
        == "refused"
    )
