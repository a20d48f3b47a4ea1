"""Pages stand alone, take nothing from data as markup, and thin long curves without losing what
one looks for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rather.tools.report.page import as_json, chart, downsample, escape, line, page, slug, table
from tests.browser import NARROW, OpenPage, drawn_points, figures, overflow, stays_here, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOSTILE = '</script><script>document.title = "hacked"</script><img src=x onerror=alert(1)>"\'&'


def test_data_is_not_rendered_as_markup() -> None:
    assert "<" not in escape(HOSTILE)
    assert '"' not in escape(HOSTILE)
    assert not re.search("[<>&]", as_json({HOSTILE: [HOSTILE]}))
    assert json.loads(as_json({HOSTILE: [HOSTILE]})) == {HOSTILE: [HOSTILE]}
    drawn = chart(HOSTILE, HOSTILE, [line(HOSTILE, ([1], [2.0]))])
    text = page(HOSTILE, drawn + table(HOSTILE, [HOSTILE], [[HOSTILE]]))
    assert "<img" not in text
    assert text.count("<script>") == 1


def test_nonfinite_numbers_become_null() -> None:
    assert as_json([math.nan, math.inf, 1.5, (1, True)]) == "[null,null,1.5,[1,true]]"


def test_only_the_page_s_own_scripts_may_run() -> None:
    text = page("a", "<p>b</p>", script="/b.js?1&2")
    assert text.count('<script src="/b.js?1&amp;2"></script>') == 1
    policy = re.search('Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    for source in re.findall("<script>(.*?)</script>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "'unsafe-inline'" not in policy[1].partition("script-src")[2].partition(";")[0]


def test_contents_are_listed_only_for_several_parts() -> None:
    parts = "".join(f'<h2 id="{slug(name)}">{name}</h2>' for name in ("One & two", "Three", "Four"))
    assert '<a href="#one-two">One & two</a>' in page("a", parts)
    assert "<nav" not in page("a", '<h2 id="b">B</h2>')


def test_a_table_has_caption_and_headings() -> None:
    text = table("Cost", ["what", "amount"], [["pairs", 12345], ["share", 0.123456], ["none", "-"]])
    assert "<caption><span>Cost</span></caption>" in text
    assert text.count('scope="row"') == 3
    assert '<th scope="col" class="number">amount</th>' in text
    assert '<td class="number">12,345</td>' in text
    assert ">0.1235<" in text
    assert "<tbody></tbody>" in table("Nothing", ["a", "b"], [])


def test_a_chart_has_a_text_alternative_with_its_numbers() -> None:
    few = chart(
        "Few", "Told.", [line("a", ([1, 2], [0.5, math.nan])), line("b", ([1, 2], [3.0, 4.0]))]
    )
    assert "Few: all points" in few
    assert '<th scope="row">2</th><td class="number">-</td><td class="number">4</td>' in few
    many = chart("Many", "Told.", [line("a", (range(100), [float(i) for i in range(100)]))])
    assert re.findall('<td class="number">(.*?)</td>', many) == ["100", "0", "99", "0", "99"]
    assert "Nothing: summary" in chart("Nothing", "Told.", [line("a", ([], []))])


def noisy(count: int) -> list[float]:
    draw = random.Random(0)
    return [math.exp(-i / count) + draw.gauss(0, 0.05) for i in range(count)]


def test_short_lines_stay_as_they_are() -> None:
    assert downsample([1, 2, 3], [0.1, 0.2, 0.3], most=3) == ([1, 2, 3], [0.1, 0.2, 0.3])


@pytest.mark.parametrize("most", [10, 300, 1000])
def test_long_lines_keep_their_ends_order_and_every_spike(most: int) -> None:
    values = noisy(100_000)
    values[4_711], values[77_777] = 9.0, -9.0
    x, y = downsample(range(100_000), values, most)
    assert len(x) <= most
    assert x == sorted(set(x))
    assert {0, 4_711, 77_777, 99_999} <= set(x)
    assert [values[step] for step in x] == y
    width = 6 * 100_000 // most  # no stretch is longer: those that reach into the middle are shown
    for start in range(0, 100_000 - 3 * width, width):
        shown = [values[step] for step in x if start <= step < start + 3 * width]
        middle = values[start + width : start + 2 * width]
        assert min(shown) <= min(middle) <= max(middle) <= max(shown)


def test_gaps_of_a_long_line_are_kept() -> None:
    values = noisy(10_000)
    values[5_000] = values[6_000] = math.nan
    values[7_000:8_000] = [math.inf] * 1000
    x, y = downsample(range(10_000), values, 400)
    assert len(x) <= 400
    assert {5_000, 6_000} <= set(x)
    in_the_gap = [value for step, value in zip(x, y, strict=True) if 7_000 <= step < 8_000]
    assert in_the_gap
    assert set(in_the_gap) == {math.inf}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A page with hostile texts, a long line, a short one with gaps, and bars."""
    lines = [line(HOSTILE, (range(100_000, 200_000), noisy(100_000)))]
    gaps = [line("a", ([1, 2, 3, 4, 5], [0.1, math.nan, 0.3, 0.4, math.inf]), colour=3)]
    bars = [{"name": name, "x": [HOSTILE, "2"], "y": [7, 1]} for name in ("a", "b")]
    charts = [
        chart("Damaged", "", [{"name": "a", "x": [None], "y": [1]}], bars=True),
        chart("Start", "", [line("a", ([0], [1.0]))]),
        chart("Long " + HOSTILE, HOSTILE, lines),
        chart("Short", HOSTILE, gaps, range=[0, 1], percent=True),
        chart("Bars", HOSTILE, bars, x="tokens", bars=True),
    ]
    numbers = table(HOSTILE, ["a", "b"], [["x" * 200, HOSTILE]])
    body = f'<h2 id="curves">Curves</h2><div class="grid">{"".join(charts)}</div>{numbers}'
    (tmp_path / "page.html").write_text(page(HOSTILE, body, data={"a": HOSTILE}), encoding="utf-8")
    return tmp_path / "page.html"


def test_in_a_browser(open_page: OpenPage, file: Path) -> None:
    assert figures(file.read_text(encoding="utf-8"))["short"] == {
        "series": [
            {"name": "a", "x": [1, 2, 3, 4, 5], "y": [0.1, None, 0.3, 0.4, None], "dots": True, "colour": 3}
        ],
        "x": "step", "range": [0, 1], "percent": True,
    }  # fmt: skip
    opened = open_page(file, theme="dark")
    assert opened.title() == HOSTILE
    assert opened.evaluate("JSON.parse(document.getElementById('data').textContent).a") == HOSTILE
    assert opened.inner_text("#damaged") == "This chart cannot be drawn; the table has its numbers."
    assert "-1" not in opened.locator("#start text").all_text_contents()
    _, long, short = drawn_points(opened)
    assert 100 < long <= 500
    assert short == 3  # in two parts, with a gap between them
    assert opened.locator("#short path.line").get_attribute("d").count("M") == 2
    assert opened.locator("#short circle").count() == 3
    assert opened.locator("#short text").all_text_contents()[:2] == ["0%", "20%"]
    heights = [bar.bounding_box()["height"] for bar in opened.locator("#bars rect").all()]
    assert heights[0] == pytest.approx(7 * heights[1], rel=0.05)
    assert opened.locator("#bars .legend").inner_text().split() == ["a", "b"]
    opened.locator("#short circle").nth(2).hover(force=True)
    assert opened.locator("#short .values").inner_text().split() == ["step:", "4", "a:", "40%"]
    box = opened.locator("#short svg").bounding_box()
    opened.mouse.move(box["x"] + box["width"] - 16, box["y"] + 50)
    assert opened.locator("#short .values").is_hidden()  # a gap is there
    box = opened.locator(".plot svg").nth(1).bounding_box()
    opened.mouse.move(box["x"] + box["width"] - 12, box["y"] + 50)
    assert "step: 199,999" in opened.locator(".plot .values").nth(1).inner_text()
    assert overflow(opened) == 0
    opened.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    wait_until(opened, "document.querySelector('.plot svg').getBoundingClientRect().width < 390")
    wait_until(opened, "document.querySelector('.plot svg').getAttribute('width') < 390")
    assert overflow(opened) == 0


def test_the_theme_is_kept_and_colours_the_charts(open_page: OpenPage, file: Path) -> None:
    colour = "getComputedStyle(document.querySelector('path.line')).stroke"
    ground = "getComputedStyle(document.body).backgroundColor"
    opened = open_page(file, theme="light")
    light = (opened.evaluate(colour), opened.evaluate(ground))
    assert opened.inner_text("#theme") == "Dark theme"
    opened.click("#theme")
    dark = (opened.evaluate(colour), opened.evaluate(ground))
    assert opened.inner_text("#theme") == "Light theme"
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    opened.reload()
    opened.wait_for_selector("html[data-ready]", state="attached")
    assert (opened.evaluate(colour), opened.evaluate(ground)) == dark


def test_an_injected_script_does_not_run(browser: Browser, tmp_path: Path) -> None:
    """Were a text ever not escaped, the page's own policy would still stop it."""
    file = tmp_path / "page.html"
    file.write_text(page("a", f"<p>{HOSTILE}</p>"), encoding="utf-8")
    opened = browser.new_page()
    refused: list[str] = []
    opened.on("console", lambda message: refused.append(message.text))
    opened.goto(file.as_uri())
    opened.wait_for_selector("html[data-ready]", state="attached")
    assert opened.title() == "a"
    assert any("Content Security Policy" in text for text in refused)
    opened.close()


def test_what_stays_on_the_machine() -> None:
    assert all(
        map(stays_here, ["file:///a.html", "data:,", "blob:null/1", "http://127.0.0.1:8000/"])
    )
    assert not any(map(stays_here, ["https://cdn.plot.ly/x.js", "http://127.0.0.1.example.org/"]))
