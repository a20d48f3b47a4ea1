"""The data report as a page and as JSON: from the command, from a run, and with pairs that contain
markup.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rather.config.load import dump_yaml
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.report.sections import data_page, data_section
from tests.browser import NARROW, OpenPage, accessibility_findings, overflow
from tests.commands.conftest import refusal, succeed, told
from tests.data.conftest import data_config
from tests.tiny import make_config, make_model, write_rows

EVIL = "</script></pre><img src=x onerror=alert(1)><script>alert(2)</script>"
NAME = "<img src=x onerror=alert(3)>.jsonl"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """A YAML whose pairs and file name are markup, some leaked, some repeated."""
    folder = tmp_path_factory.mktemp("page")
    model = make_model(folder / "base")
    for file in folders["chat"].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    rows = [{"prompt": f"{EVIL} {i}", "chosen": f"{EVIL} good {i}" * (1 + i % 3), "rejected": f"bad {i}", "id": EVIL}
            for i in range(30)]  # fmt: skip
    pairs = write_rows(folder / NAME, [*rows, *rows[:3]])
    held_out = {"file_name": {"held": write_rows(folder / "held.jsonl", rows[:2])}}
    config = data_config(folder, model, pairs, sequence_length=1024, validation=held_out)
    (folder / "run.yaml").write_text(dump_yaml(config))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def page(settings: Path) -> Path:
    file = settings.parent / "data.html"
    told = succeed("data", settings, "--html", file, "--show", "2")
    assert f"the page is in {file}" in told.stdout.replace("\n", "")
    return file


class Elements(HTMLParser):
    """Every element, and the text of scripts."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.handlers: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_pairs_that_are_markup_stay_text(page: Path) -> None:
    document = page.read_text()
    found = Elements(document)
    assert "img" not in found.names
    assert not found.handlers
    assert found.names.count("script") == 3  # the frame, two charts
    assert "&lt;img src=x onerror=alert(3)&gt;.jsonl:31" in document
    assert "2 pairs" in document


def test_json_prints_nothing_but_json(settings: Path) -> None:
    report = told("data", settings)
    assert report["train"]["warned"]["duplicate_pair"]["count"] == 3
    assert report["evals"]["held"]["warned"]["prompt_in_training_data"]["count"] == 2
    assert report["look"]["findings"][0]["name"] == "leakage"
    assert "shown" not in report
    shown = told("data", settings, "--show", "1")["shown"]
    chosen = shown[0]["sides"]["chosen"]
    assert len(chosen["shown"]) == chosen["tokens"]
    scored = "".join(text for text, is_scored in chosen["shown"] if is_scored)
    assert scored == f"{EVIL} good 0<|im_end|>"


def test_an_unwritable_path_is_reported(settings: Path) -> None:
    file = settings.parent / "no" / "such.html"
    assert "cannot be written" in refusal(2, "data", settings, "--html", file)


def test_refused_data_has_a_page_too() -> None:
    """data_report.json of a run that ended because of its rows has no look."""
    told = {
        "rows": 2,
        "pairs": 1,
        "files": [{"path": "a.jsonl"}],
        "template": {"name": "none"},
        "dropped": {"bad_json": {"count": 1, "places": {"a.jsonl": [2]}, "examples": []}},
    }
    assert "not valid JSON" in data_section({"train": told, "evals": {}, "warnings": []})


def test_the_page_in_a_browser(page: Path, open_page: OpenPage) -> None:
    for theme, size in (("light", (1280, 900)), ("dark", NARROW)):
        opened = open_page(page, size=size, theme=theme)
        assert opened.locator(".plot rect").count() > 3
        assert opened.locator("pre.tokens mark").count() > 10
        assert opened.get_by_text("of the prompts of eval held are also in train").count() == 1
        assert overflow(opened) == 0
        assert accessibility_findings(opened) == []


def test_a_run_leaves_the_whole_report(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=1)
    assert DPOPipeline(config).run() == 0
    report = json.loads((config.run_dir / "data_report.json").read_text())
    assert report["look"]["sets"]["train"]["pairs"] == 40
    assert len(report["shown"]) == 3
    assert "Answer lengths" in data_page(report, "run")
