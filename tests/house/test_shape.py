"""Files say what they are, functions stay short, and every suppressed warning gives its code."""

from __future__ import annotations

import ast
import re

from tests.house.source import nodes, python_files, tree, where

LONGEST_FUNCTION = 80
EVERYTHING = ("rather", "tests", "examples", "bench")


def test_every_file_has_a_docstring() -> None:
    silent = [
        where(file)
        for file in python_files(*EVERYTHING)
        if file.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree(file))
    ]
    assert not silent, f"no docstring: {silent}"


def test_no_function_is_too_long() -> None:
    long = [
        f"{where(file, node)}: {node.name} has {lines} lines"
        for file in python_files(*EVERYTHING)
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert not long, f"more than {LONGEST_FUNCTION} lines hide two functions:\n" + "\n".join(long)


def test_every_suppression_names_what_it_suppresses() -> None:
    bare = re.compile(r"#\s*(type:\s*ignore(?!\[)|noqa(?!:\s*\w))")
    found = [
        f"{where(file)}:{number}"
        for file in python_files("rather", "examples", "bench")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert not found, f"write type: ignore[code] or noqa: CODE, with the reason: {found}"


def test_future_annotations_everywhere() -> None:
    missing = [
        where(file)
        for file in python_files("rather")
        if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree(file).body)
        and "from __future__ import annotations" not in file.read_text(encoding="utf-8")
    ]
    assert not missing, missing
