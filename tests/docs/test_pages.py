"""Check single pages: named tests exist, quoted messages are in the code, generated pages are current."""

from __future__ import annotations

import ast
import re

import pytest

from docs.generate import pages
from tests.house.source import ROOT, function_names, nodes, python_files, where

DOCS = ROOT / "docs"
FIELD = re.compile(r"%[-+.\d]*[sdrfgi]")


def blank(text: str) -> str:
    """Return a message with `...` for its fields and one space for white space."""
    return re.sub(r"\s+", " ", FIELD.sub("...", text)).strip()


def string_of(node: ast.AST) -> str:
    """Return the text of a string or f-string, otherwise an empty string."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
        return "".join(map(str, parts))
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def messages() -> str:
    """Return every string in the code of the package, with `...` for inserted values."""
    strings = (string_of(node) for file in python_files("rather") for node in nodes(file))
    return "\n".join(blank(text) for text in strings if text)


def quoted() -> list[str]:
    """Return the messages that troubleshooting.md quotes: one per line of its `text` blocks."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def all_messages() -> str:
    return messages()


@pytest.mark.parametrize("sentence", quoted())
def test_quoted_messages_are_in_the_code(sentence: str, all_messages: str) -> None:
    assert blank(sentence) in all_messages


def test_a_message_that_is_not_in_the_code_is_found(all_messages: str) -> None:
    assert len(quoted()) > 25
    assert blank("device_mapping: GPU ... has gone for lunch") not in all_messages


@pytest.mark.parametrize("page", ["promises.md", "limits.md"])
def test_every_test_that_is_named_exists(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)(?:::(\w+))?`", text)
    assert named
    for file, name in named:
        path = ROOT / "tests" / file
        assert path.is_file(), f"docs/{page}: tests/{file}"
        assert not name or name in function_names(path), f"docs/{page}: {file}::{name}"


def test_every_promise_has_a_test() -> None:
    page = (DOCS / "promises.md").read_text(encoding="utf-8")
    lines = page.split("## Bad inputs and faults")[0].splitlines()
    rows = [line for line in lines if re.match(r"\| \d+ \|", line)]
    assert len(rows) >= 13
    assert not [row for row in rows if "::test_" not in row]


def test_generated_pages_are_up_to_date() -> None:
    assert pages()
    for page, text in pages().items():
        message = f"{where(page)}: run python -m docs.generate"
        assert page.read_text(encoding="utf-8") == text, message


def test_every_loss_has_its_section() -> None:
    from rather.losses.losses import LOSSES

    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for name, rule in LOSSES.items():
        text = (DOCS / "losses" / f"{rule.task}.md").read_text(encoding="utf-8")
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert all(part in section for part in ("```text\n", "**When.**", "```yaml\n")), name
        assert f"losses/{rule.task}.md" in site


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n ").split("|")]


def test_speeds_of_the_readme_are_those_of_the_measurements() -> None:
    """Its table rounds the one that bench/page.py writes into docs/speed.md."""
    measured = {
        (row[0], row[1]): (float(row[2]), float(row[6]))
        for line in (DOCS / "speed.md").read_text("utf-8").splitlines()
        if len(row := cells(line)) == 7 and row[1] in ("online", "cached")
    }
    rows = [
        cells(line)
        for line in (ROOT / "README.md").read_text("utf-8").splitlines()
        if re.match(r"\| [\d.]+B \|", line)
    ]
    assert len(rows) == 4
    for size, *numbers in rows:
        shown = [float(number) for number in numbers]
        expected = [*measured[size, "online"], *measured[size, "cached"]]
        assert shown == pytest.approx(expected, abs=0.05, rel=0.005), size


def test_the_readme_counts_the_losses_on_pairs() -> None:
    index = (DOCS / "losses" / "index.md").read_text("utf-8")
    on_pairs = index.partition("### Losses on pairs")[2].partition("### Losses on thumbs")[0]
    others = len(re.findall(r"^\| \[`", on_pairs, re.MULTILINE)) - 1
    assert f"DPO and {others} related losses" in (ROOT / "README.md").read_text("utf-8")
