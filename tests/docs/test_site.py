"""The site: built as `make check` builds it, with every page, every link, and nothing from the network."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs.hooks import redirects
from tests.browser import MISSING
from tests.conftest import pytest_terminal_summary
from tests.house.source import ROOT

SOURCES = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(https?:)?//[^\"'>\s]+"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = [
        file.relative_to(ROOT / "docs").with_suffix(".html")
        for file in (ROOT / "docs").rglob("*.md")
    ]
    assert not [page for page in pages if not (site / page).is_file()]
    assert (site / "project" / "index.html").is_file()
    assert (site / "search" / "search_index.json").is_file()


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    foreign = {
        match[0]
        for page in site.rglob("*.html")
        for match in SOURCES.finditer(page.read_text(encoding="utf-8"))
    }
    assert not foreign
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert not re.search(r"url\([\"']?(https?:)?//", styles)


def test_links_out_of_the_docs_lead_to_copies(site: Path) -> None:
    page = (site / "clusters.html").read_text(encoding="utf-8")
    assert 'href="project/examples/slurm/train.sbatch"' in page
    assert (site / "project" / "examples" / "slurm" / "train.sbatch").is_file()
    assert 'href="../clusters.html"' in (site / "project" / "index.html").read_text(
        encoding="utf-8"
    )


def test_old_addresses_lead_to_pages_and_headings(site: Path) -> None:
    for old in redirects():
        page = site / old
        link = re.search(r'href="([^"]+)"', page.read_text(encoding="utf-8"))
        assert link, old
        target, _, heading = link[1].partition("#")
        text = (page.parent / target).resolve().read_text(encoding="utf-8")
        assert "http-equiv" not in text, f"{old}: redirects twice"
        assert not heading or f'id="{heading}"' in text, f"{old}: no heading {heading}"


def test_what_was_not_run_is_counted_by_its_reason() -> None:
    """With the command that installs a browser."""
    printed: list[str] = []
    reasons = (MISSING, "needs a GPU", MISSING)
    skipped = [SimpleNamespace(longrepr=("file", 1, f"Skipped: {reason}")) for reason in reasons]
    reporter = SimpleNamespace(
        stats={"skipped": skipped}, section=printed.append,
        write_line=lambda line, **_: printed.append(line.strip()),
    )  # fmt: skip
    config: Any = SimpleNamespace(option=SimpleNamespace(all=True, wide_only=False))
    pytest_terminal_summary(reporter, config)
    assert printed == ["not run", f"2 {MISSING}", "1 needs a GPU"]
    assert "apt-get install" in MISSING
    reporter.stats = {}
    pytest_terminal_summary(reporter, config)
    assert len(printed) == 3
