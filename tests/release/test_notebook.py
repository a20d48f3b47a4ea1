"""The notebook: its outputs are those of its cells, and its cells run."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest

from docs.notebook import NOTEBOOK, code_cells, digest, execute_in_an_empty_folder


def stored() -> dict[str, Any]:
    return dict(json.loads(NOTEBOOK.read_text(encoding="utf-8")))


def printed(notebook: dict[str, Any]) -> list[str]:
    """Return what each cell printed."""
    cells = code_cells(notebook)
    return ["".join(line for out in cell["outputs"] for line in out["text"]) for cell in cells]


def kind_answers(text: str) -> dict[str, float]:
    """Return the shares that the last cell prints."""
    shares = re.findall(r"(before|after) +kind answers: +([\d.]+)%", text)
    return {side: float(share) for side, share in shares}


def test_the_outputs_belong_to_the_cells() -> None:
    notebook = stored()
    assert notebook["nbformat"] == 4
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    assert notebook["metadata"]["rather"]["digest_of_cells"] == digest(notebook), "make notebook"
    code_cells(notebook)[0]["source"].append("\npass")
    assert notebook["metadata"]["rather"]["digest_of_cells"] != digest(notebook)


def test_every_cell_is_python_and_names_of_rather_exist() -> None:
    from importlib import import_module

    for cell in code_cells(stored()):
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rather"):
                module = import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        import_module(f"{node.module}.{alias.name}")


def test_the_stored_answers_become_kind() -> None:
    shares = kind_answers(printed(stored())[-1])
    assert shares["before"] < 70
    assert shares["after"] > 90


@pytest.mark.wide
def test_the_cells_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    notebook = stored()
    execute_in_an_empty_folder(notebook)
    shares = kind_answers(printed(notebook)[-1])
    assert shares["before"] < 70
    assert shares["after"] > 90
    assert [bool(text) for text in printed(notebook)] == [bool(text) for text in printed(stored())]
