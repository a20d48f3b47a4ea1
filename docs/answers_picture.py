"""Draw docs/images/answers.svg from the outputs that the notebook has stored: `python -m docs.answers_picture`."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "align_in_ten_minutes.ipynb"
PICTURE = ROOT / "docs" / "images" / "answers.svg"
SHOWN = (
    "Good morning. Where is the bread?",
    "How much is the bread?",
    "Good morning. How much is the bread?",
)
WIDTH, ROW, LEFT = 860, 84, 24
GREY, BLUE, BLACK = "#8a5a44", "#1f5fa8", "#1b1b1b"


def outputs() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(out.get("text", [])) for cell in cells for out in cell.get("outputs", [])]


def answers(text: str) -> dict[str, str]:
    """Return question -> answer of lines such as `Where is it?       On the shelf.`"""
    pairs = re.findall(r"^(.+?\?) {2,}(.+)$", text, flags=re.MULTILINE)
    return dict(pairs)


def drawn() -> str:
    texts = outputs()
    before, after = (found for text in texts if (found := answers(text)))
    shares = dict(re.findall(r"(before|after) +kind answers: +([\d.]+%)", "\n".join(texts)))
    lines = [
        (34, 18, BLACK, "600", "A shopkeeper, before and after 27 steps of DPO"),
        (
            58,
            13,
            BLACK,
            "400",
            f"kind answers to held-out questions: {shares['before']} before, {shares['after']} after",
        ),
    ]
    for number, question in enumerate(SHOWN):
        top = 92 + number * ROW
        lines += [
            (top, 14, BLACK, "600", question),
            (top + 22, 14, GREY, "400", f"before:  {before[question]}"),
            (top + 43, 14, BLUE, "400", f"after:  {after[question]}"),
        ]
    height = 92 + len(SHOWN) * ROW - 20
    body = "\n".join(
        f'<text x="{LEFT}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}">{escape(text)}</text>'
        for y, size, colour, weight, text in lines
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" role="img">\n<title>Answers before and after training</title>\n'
        f'<rect width="100%" height="100%" rx="8" fill="#faf8f5"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
