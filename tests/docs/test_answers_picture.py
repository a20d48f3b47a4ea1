"""The picture of the README shows what the notebook has stored."""

from __future__ import annotations

from docs.answers_picture import PICTURE, drawn


def test_the_picture_belongs_to_the_notebook() -> None:
    assert PICTURE.read_text(encoding="utf-8") == drawn(), "run `python -m docs.answers_picture`"
