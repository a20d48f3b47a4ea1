"""Measure the package: `python -m tests.house.size` prints what the house is made of.

Tokens are those of `tokenize` without comments and layout, so a docstring counts as one token. An
f-string counts as one token, too: Python 3.12 and later split it.
"""

from __future__ import annotations

import ast
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import ROOT, imports, module_name, nodes, python_files

LAYOUT = {
    getattr(tokenize, name)
    for name in ["COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"]
}
MOST_TOKENS = {"core": 228_000, "tools": 55_000, "trl": 6_000}
F_STRING_START = getattr(tokenize, "FSTRING_START", -1)  # since Python 3.12
F_STRING_END = getattr(tokenize, "FSTRING_END", -1)
PUBLIC_TWICE = {"DPOTrainer"}  # rather.DPOTrainer and rather.coati.DPOTrainer


@dataclass(frozen=True)
class Size:
    """What the issue of the refactor counts, over every Python file of the wheel."""

    tokens: Counter[str]  # room -> tokens
    lines: Counter[str]
    top_modules: list[str]
    duplicates: dict[str, list[str]]  # class name -> the modules that define it
    arrows: set[tuple[str, str]]  # (room, the room it imports)
    cycles: list[list[str]]

    @property
    def rooms(self) -> list[str]:
        return sorted({room for room in self.tokens if (ROOT / "rather" / room).is_dir()})


def measure() -> Size:
    """Read every Python file of the package."""
    tokens: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    classes: defaultdict[str, list[str]] = defaultdict(list)
    graph: dict[str, set[str]] = {}
    for file in python_files("rather"):
        module = module_name(file)
        tokens[room_of(module)] += count_tokens(file)
        lines[room_of(module)] += file.read_text(encoding="utf-8").count("\n")
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module)
        found = {name for name, _ in imports(file, for_types=False) if name.startswith("rather")}
        graph[module] = found - {module}
    arrows = {
        (room_of(module), room_of(target)) for module, found in graph.items() for target in found
    }
    packages = {module_name(file) for file in python_files("rather") if file.name == "__init__.py"}
    return Size(
        tokens,
        lines,
        sorted(file.stem for file in (ROOT / "rather").glob("*.py")),
        {name: where for name, where in sorted(classes.items()) if len(where) > 1},
        {(a, b) for a, b in arrows if a != b},
        find_cycles({name: found for name, found in graph.items() if name not in packages}),
    )


def count_tokens(file: Path) -> int:
    tokens = 0
    open_f_strings = 0
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            tokens += token.type not in LAYOUT and not open_f_strings
            open_f_strings += (token.type == F_STRING_START) - (token.type == F_STRING_END)
    return tokens


def room_of(module: str) -> str:
    """Return `data` for `rather.data.pack`, `tools/board` for `rather.tools.board.runs`.

    The package itself is `rather`.
    """
    _, *below = module.split(".")
    if below[:1] == ["tools"]:
        return "/".join(below[:2])
    return below[0] if below else module


def part_of(room: str) -> str:
    """Return what a room belongs to: the core imports neither the tools nor rather.trl."""
    first = room.split("/")[0]
    return first if first in ("tools", "trl") else "core"


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return import cycles between modules, one for each edge that closes one."""
    cycles: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return cycles


def main() -> None:
    size = measure()
    for part, most in MOST_TOKENS.items():
        rooms = [room for room, _ in size.tokens.most_common() if part_of(room) == part]
        for room in rooms:
            print(f"{size.tokens[room]:8,} tokens {size.lines[room]:7,} lines  {room}")
        tokens = sum(size.tokens[room] for room in rooms)
        lines = sum(size.lines[room] for room in rooms)
        print(f"{tokens:8,} tokens {lines:7,} lines  {part} (at most {most:,} tokens)\n")
    print(f"{len(size.top_modules)} modules at the top: {', '.join(size.top_modules)}")
    print(f"{len(size.rooms)} rooms, {len(size.arrows)} arrows between rooms and top modules")
    print(
        f"{len(size.cycles)} import cycles",
        *(" -> ".join(each) for each in size.cycles),
        sep="\n  ",
    )
    print(f"{len(size.duplicates)} class names defined more than once")
    for name, where in size.duplicates.items():
        print(f"  {name}: {', '.join(where)}")


if __name__ == "__main__":
    main()
