"""Run the cells of examples/align_in_ten_minutes.ipynb and store their outputs: `make notebook`.

The notebook is the source: edit its cells, then run this. Cells run in order in one process and an
empty folder, as in a fresh kernel, except that only printed text becomes an output. A digest of the
code is stored with the outputs; a test compares it with the cells.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "align_in_ten_minutes.ipynb"
PROGRESS_BAR = re.compile(r"\d(it/s|s/it|\?it/s)\]$|\[00:00<\?, \?it/s\]$")  # of tqdm
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def digest(notebook: dict[str, Any]) -> str:
    """Return a digest of the code of all cells."""
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook: dict[str, Any]) -> None:
    """Run all cells in the current folder, and replace their outputs; an error ends it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        printed = io.StringIO()
        code = compile("".join(cell["source"]), f"<cell {number}>", "exec")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            exec(code, names)
        cell["execution_count"] = number
        lines = [line.rstrip() + "\n" for line in ESCAPES.sub("", printed.getvalue()).splitlines()]
        lines = [line for line in lines if not PROGRESS_BAR.search(line)]
        output = {"output_type": "stream", "name": "stdout", "text": lines}
        cell["outputs"] = [output] if lines else []


def execute_in_an_empty_folder(notebook: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        execute(notebook)


def main() -> None:
    os.environ.setdefault("COLUMNS", "100")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    began = time.monotonic()
    execute_in_an_empty_folder(notebook)
    notebook["metadata"]["rather"] = {"digest_of_cells": digest(notebook)}
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")
    print(f"{NOTEBOOK}: {time.monotonic() - began:.0f} seconds", file=sys.stderr)


if __name__ == "__main__":
    main()
