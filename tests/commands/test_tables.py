"""Tables of commands: no word or number is broken, and without a terminal a row is one line."""

from __future__ import annotations

import pytest

from rather.commands.terminal import print_table

HEADINGS = ("setting", "held-out loss", "flip_score", "id", "meaning")
MEANING = "the model disagrees with the label more strongly than it errs on held-out pairs"
ROWS = [
    ("learning_rate=0.0005 beta=0.1", 0.693147, -0.500351, "0f3a5c7e9b1d2f40", MEANING),
    ("learning_rate=0.001 beta=0.1", 12.5, 0.25, "ffffffffffffffff", ""),
]


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(HEADINGS, ROWS)
    return capsys.readouterr().out.splitlines()


@pytest.mark.defect("U24")
def test_without_a_terminal_a_row_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    lines = [line for line in printed(capsys) if line.strip()]
    assert len(lines) == 2 + len(ROWS)  # headings and the rule below them
    for line, row in zip(lines[2:], ROWS, strict=True):
        assert all(str(cell) in line for cell in row)
    assert lines == [line.rstrip() for line in lines]


@pytest.mark.defect("U24")
@pytest.mark.parametrize("width", [80, 100])
def test_a_terminal_wraps_between_words_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich takes this for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    lines = printed(capsys)
    words = {word for line in lines for word in line.split()}
    for cell in (cell for row in (HEADINGS, *ROWS) for cell in row):
        assert set(str(cell).split()) <= words
    assert len([line for line in lines if line.strip()]) > 2 + len(ROWS)  # it wraps
