"""Draw mutants of the package at random: `python -m tests.draw_mutations --seed 4 --count 20`.

The population are all places in the files of `rather/` that differ between two commits, read at the
second and sorted by path, line and column: each operator of a comparison (`<` becomes `<=`, `==`
becomes `!=`), each number (plus 1) and boolean, and each condition of a branch, loop, comprehension
or conditional expression (negated). Texts are not mutated.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FLIPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "< to <=", ast.LtE: "<= to <", ast.Gt: "> to >=", ast.GtE: ">= to >",
    ast.Eq: "== to !=", ast.NotEq: "!= to ==", ast.Is: "is to is not", ast.IsNot: "is not to is",
    ast.In: "in to not in", ast.NotIn: "not in to in",
}  # fmt: skip


class Mutant(NamedTuple):
    """A comparison is where its left side ends."""

    path: str
    line: int
    column: int
    change: str


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    for node in ast.walk(ast.parse(source)):
        conditions = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
        conditions += node.ifs if isinstance(node, ast.comprehension) else []
        for test in conditions:
            yield Mutant(path, test.lineno, test.col_offset, f"branch: not ({ast.unparse(test)})")
        if isinstance(node, ast.Compare):
            for left, operator in zip([node.left, *node.comparators], node.ops, strict=False):
                line, column = left.end_lineno or 0, left.end_col_offset or 0
                yield Mutant(path, line, column, f"comparison: {FLIPPED[type(operator)]}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            number = node.value
            after = not number if isinstance(number, bool) else number + 1
            change = f"constant: {number} to {after}"
            yield Mutant(path, node.lineno, node.col_offset, change)


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--old", default="dede740")
    parser.add_argument("--new", default="738f5c08")
    options = parser.parse_args()
    old, new = options.old, options.new
    mutants: list[Mutant] = []
    for name in git(
        "diff", "--name-only", "--diff-filter=d", old, new, "--", "rather/*.py"
    ).split():
        mutants += mutants_of(name, git("show", f"{new}:{name}"))
    print(f"{len(mutants)} places, {options.count} drawn with seed {options.seed}")
    for mutant in random.Random(options.seed).sample(sorted(mutants), options.count):
        print(f"{mutant.path}:{mutant.line}:{mutant.column} {mutant.change}")


if __name__ == "__main__":
    main()
