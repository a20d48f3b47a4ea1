"""What the gates of test_gates.py measure: `python -m tests.house.gates` prints it, worst first.

- Complexity of a function: 1, plus one for each branch: if, for, while, except, case, ternary, further
  operand of and/or, and each `for` and `if` of a comprehension. Nested functions count on their own.
- Generic names: the share of names bound in functions that say nothing about what they hold.
- Holders of the whole config: functions with a parameter, and classes with an attribute, that is the
  config of the run or `Any` under the name config. Such a signature does not say what it depends on.
- Words of long texts: words in string literals of more than 20 words, docstrings left out, and in
  packaged YAML, JavaScript, HTML and CSS files. Tokens do not see them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.house.size import measure, part_of
from tests.house.source import ROOT, imports, module_name, nodes, python_files, where

GENERIC = set(
    """
    found own each given known part parts place places several wanted asked left here rest said
    named taken kept made seen one other others some many more most what both whole
    data value item result res tmp obj info out ret
    """.split()  # noqa: SIM905 - a table of names
)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
Function = ast.FunctionDef | ast.AsyncFunctionDef
# They read the config to build everything else.
MAY_HOLD_THE_CONFIG = ("config", "cli", "commands", "tools", "ranks", "__init__")
OF_TRANSFORMERS = ("model", "parallel")  # there `config: Any` is that of a transformers model
LONG_TEXT = 20  # words
PACKAGED = {".yaml", ".yml", ".js", ".html", ".css", ".jinja"}


def functions(file: Path) -> Iterator[Function]:
    return (node for node in nodes(file) if isinstance(node, Function))


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of nested functions."""
    waiting: list[ast.AST] = [*function.body, function.args]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [
            child for child in ast.iter_child_nodes(node) if not isinstance(child, Function)
        ]


def complexity(function: Function) -> int:
    total = 1
    for node in own_nodes(function):
        total += isinstance(node, BRANCHES)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def complexities() -> Counter[str]:
    """Return the complexity of every function, by place and name."""
    return Counter(
        {
            f"{where(file, function)} {function.name}": complexity(function)
            for file in python_files("rather")
            for function in functions(file)
        }
    )


def bound_names() -> tuple[Counter[str], int]:
    """Return generic names bound in functions, and the number of all bound names."""
    generic: Counter[str] = Counter()
    total = 0
    for file in python_files("rather"):
        for function in functions(file):
            for node in own_nodes(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    total += 1
                    generic[node.id] += node.id.strip("_") in GENERIC
    return +generic, total


def generic_share() -> float:
    generic, total = bound_names()
    return sum(generic.values()) / total


def _is_config(room: str, name: str, annotation: ast.expr | None) -> bool:
    text = ast.unparse(annotation) if annotation else ""
    if re.search(r"\b(DPOConfig|RunConfig)\b", text):
        return True
    is_untyped = name in ("config", "pipeline_config") and text == "Any"
    return is_untyped and room not in OF_TRANSFORMERS


def config_holders() -> list[str]:
    """Return functions and classes, outside of the rooms that may, that hold the whole config."""
    holders = []
    for file in python_files("rather"):
        room = module_name(file).split(".")[1:2]
        if not room or room[0] in MAY_HOLD_THE_CONFIG:
            continue
        for node in nodes(file):
            if isinstance(node, Function):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if any(_is_config(room[0], each.arg, each.annotation) for each in arguments):
                    holders.append(f"{where(file, node)} {node.name}")
            elif isinstance(node, ast.ClassDef):
                fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
                if any(
                    _is_config(room[0], ast.unparse(each.target), each.annotation)
                    for each in fields
                ):
                    holders.append(f"{where(file, node)} {node.name}")
    return holders


def circles() -> list[str]:
    """Return modules that import each other, imports for type checking included."""
    packages = {module_name(file) for file in python_files("rather") if file.name == "__init__.py"}
    graph = {
        module_name(file): {
            name
            for name, _ in imports(file)
            if name.startswith("rather") and name not in packages and name != module_name(file)
        }
        for file in python_files("rather")
    }
    reaches = {module: _reachable(graph, module) for module in graph}
    return sorted(module for module, reached in reaches.items() if module in reached)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += graph.get(module, ())
    return reached


def words_of_long_texts() -> int:
    words = 0
    for file in python_files("rather"):
        docstrings = {
            node.body[0].value
            for node in nodes(file)
            if isinstance(node, Function | ast.ClassDef | ast.Module)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in nodes(file):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                count = len(node.value.split())
                words += count if count > LONG_TEXT and node not in docstrings else 0
    for file in (ROOT / "rather").rglob("*"):
        if file.suffix in PACKAGED:
            words += len(file.read_text(encoding="utf-8").split())
    return words


def tokens_of_parts() -> Counter[str]:
    totals: Counter[str] = Counter()
    for room, tokens in measure().tokens.items():
        totals[part_of(room)] += tokens
    return totals


def main() -> None:
    print("tokens:", dict(tokens_of_parts()), " words of long texts:", words_of_long_texts())
    print("in a circle:", *circles(), sep="\n  ")
    found = complexities()
    print(f"complexity above 20: {sum(value > 20 for value in found.values())}")
    print(f"complexity above 15: {sum(value > 15 for value in found.values())}")
    for name, value in found.most_common(40):
        print(f"  {value:3} {name}")
    generic, total = bound_names()
    print(f"generic names: {sum(generic.values()) / total:.2%} of {total}", generic.most_common(20))
    holders = config_holders()
    print(f"holders of the whole config: {len(holders)}", *holders, sep="\n  ")


if __name__ == "__main__":
    main()
