"""Write the table of TRL's arguments into docs/coming_from/trl.md: `python -m tests.trl.make_table`."""

from __future__ import annotations

import re

from rather.trl.configs import OURS, REFUSED, describe_argument
from tests.house.source import ROOT

PAGE = ROOT / "docs" / "coming_from" / "trl.md"
BLOCK = re.compile(r"(<!-- begin trl arguments.*?-->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    rows = [
        "| argument | | Rather's key, or what it does; why not, and what to do |",
        "|---|---|---|",
    ]
    for name in sorted({*OURS, *REFUSED}):
        status, text = describe_argument(name)
        rows.append(f"| `{name}` | {status} | {text} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    return BLOCK.sub(lambda found: f"{found[1]}{table()}{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
