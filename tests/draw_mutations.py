"""Draw mutants of the package at random: `python -m tests.draw_mutations --seed 4 --count 20`.

The population are all places in the files of `rather/` that differ between two commits, read at the
second and sorted by path, line and column: each operator of a comparison (`<` becomes `<=`, `==`
becomes `!=`), each number (plus 1) and boolean, and each condition of a branch, loop, comprehension
or conditional expression (negated). Texts are not mutated. `--apply NUMBER` changes one place in
this tree, if its line is still the same.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FLIPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip


class Mutant(NamedTuple):
    """`before` is replaced by `after` at a place of a file; columns count bytes, as in `ast`."""

    path: str
    line: int
    column: int
    kind: str
    before: str
    after: str


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(node: ast.expr, *, is_end: bool = False) -> int:
        if is_end:
            return starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return starts[node.lineno - 1] + node.col_offset

    text = source.encode()

    def mutant(kind: str, first: int, before: str, after: str) -> Mutant:
        line = text[:first].count(b"\n")
        return Mutant(path, line + 1, first - starts[line], kind, before, after)

    for node in ast.walk(ast.parse(source)):
        conditions = [node.test] if isinstance(node, ast.If | ast.While | ast.IfExp) else []
        conditions += node.ifs if isinstance(node, ast.comprehension) else []
        for test in conditions:
            segment = text[offset(test) : offset(test, is_end=True)].decode()
            yield mutant("branch", offset(test), segment, f"not ({segment})")
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right in pairwise(operands):
                first = offset(left, is_end=True)
                between = text[first : offset(right)].decode()
                operator = " ".join(between.strip("() \n").split())
                where = first + between.index(operator.split()[0])
                yield mutant("comparison", where, operator, FLIPPED[operator])
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = node.value
            after = str(not value) if isinstance(value, bool) else str(value + 1)
            before = text[offset(node) : offset(node, is_end=True)].decode()
            yield mutant("constant", offset(node), before, after)


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def population(old: str, new: str) -> list[Mutant]:
    """Return the mutants of all files that differ, by path, line and column."""
    names = git("diff", "--name-only", "--diff-filter=d", old, new, "--", "rather/*.py")
    return sorted(
        mutant
        for name in names.split()
        for mutant in mutants_of(name, git("show", f"{new}:{name}"))
    )


def apply(mutant: Mutant, new: str) -> None:
    """Change this tree; the line may have moved, but must occur once."""
    line = git("show", f"{new}:{mutant.path}").splitlines()[mutant.line - 1]
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    if mutant.before not in line or text.count(line) != 1:
        sys.exit(f"{mutant.path}:{mutant.line}: change it by hand: {line.strip()}")
    head = line.encode()[: mutant.column].decode()
    changed = head + line[len(head) :].replace(mutant.before, mutant.after, 1)
    (ROOT / mutant.path).write_text(text.replace(line, changed), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--old", default="dede740")
    parser.add_argument("--new", default="738f5c08")
    parser.add_argument("--apply", type=int, metavar="NUMBER")
    options = parser.parse_args()
    mutants = population(options.old, options.new)
    drawn = random.Random(options.seed).sample(mutants, options.count)
    if options.apply:
        apply(drawn[options.apply - 1], options.new)
        return
    print(f"{len(mutants)} places, {options.count} drawn with seed {options.seed}")
    for number, each in enumerate(drawn, 1):
        change = f"{' '.join(each.before.split())} -> {' '.join(each.after.split())}"
        print(f"{number:2} {each.path}:{each.line}:{each.column} {each.kind}: {change}")


if __name__ == "__main__":
    main()
