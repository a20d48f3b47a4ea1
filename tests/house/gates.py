"""What the gates of test_gates.py measure: `python -m tests.house.gates` prints it, worst first.

- Complexity of a function: 1, plus one for each branch: if, for, while, except, case, ternary, further
  operand of and/or, and each `for` and `if` of a comprehension. Nested functions count on their own.
- Generic names: the share of bound names that say nothing about what they hold.
- Holders of the whole config: functions with a parameter, and classes with an attribute, that is the
  config of the run, one of its base classes, or `Any` under the name config. Such a signature does not
  say what it depends on.
- Circles: modules that import each other, imports for type checking included.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rather.config.run_config import DPOConfig
from tests.house.source import imports, module_name, nodes, python_files, where

GENERIC = set(
    """
    found own each given known part parts place places several wanted asked said named some more other
    others one ones all rest both many most least first last next left here there now whole made taken
    kept ready own_ seen thing things what which who
    """.split()  # noqa: SIM905 - a table of names
)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
Function = ast.FunctionDef | ast.AsyncFunctionDef
# They read the config to build everything else.
MAY_HOLD_THE_CONFIG = ("config", "cli", "commands", "tools", "__init__")
CONFIGS = "|".join(
    each.__name__ for each in DPOConfig.__mro__ if each.__module__.startswith("rather.")
)
OF_TRANSFORMERS = ("model", "parallel")  # there `config: Any` is that of a transformers model


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
    """Return how often generic names are bound in the package, and the number of all bound names."""
    names = Counter(
        node.id
        for file in python_files("rather")
        for node in nodes(file)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    generic = {name: count for name, count in names.items() if name in GENERIC}
    return Counter(generic), names.total()


def generic_share() -> float:
    generic, total = bound_names()
    return sum(generic.values()) / total


def _is_config(room: str, name: str, annotation: ast.expr | None) -> bool:
    text = ast.unparse(annotation) if annotation else ""
    if re.search(rf"\b({CONFIGS})\b", text):
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


def main() -> None:
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
