"""The parsed source files of the repository, for the tests in this folder."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".jinja", ".json", ".cfg"}
OURS = ("rather", "tests", "examples", "docs", "bench", ".ci", ".github")


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """All Python files under the named folders of the repository."""
    return tuple(sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")))


def text_files() -> list[Path]:
    """Every file of the repository that a person reads: the root and our own folders, nothing a run made."""
    named = {"Makefile", "Containerfile", "LICENSE", ".gitignore", "CITATION.cff"}
    root = [file for file in ROOT.iterdir() if file.suffix in TEXT or file.name in named]
    below = [file for folder in OURS for file in (ROOT / folder).rglob("*")]
    return sorted(
        file for file in root + below if file.is_file() and "__pycache__" not in file.parts
    )


@cache
def tree(file: Path) -> ast.Module:
    # Python 3.11 counts the depth of all parsers of a process together. A collection of garbage may
    # let another thread parse in the midst of this, which then ends with a SystemError.
    gc.disable()
    try:
        return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    finally:
        gc.enable()


@cache
def nodes(file: Path) -> list[ast.AST]:
    """Every node of a file: a dozen rules look at all of them."""
    return list(ast.walk(tree(file)))


@cache
def function_names(file: Path) -> set[str]:
    return {node.name for node in nodes(file) if isinstance(node, ast.FunctionDef)}


def called(call: ast.Call) -> str:
    """`torch.load` for `torch.load(path)`; empty if what is called is not a plain name."""
    names = []
    function = call.func
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ""
    return ".".join([function.id, *reversed(names)])


def where(file: Path, node: ast.stmt | ast.expr | None = None) -> str:
    """`rather/train/rank_trainer.py:12`: what an error message names."""
    name = file.relative_to(ROOT).as_posix()
    return f"{name}:{node.lineno}" if node else name


@cache
def module_name(file: Path) -> str:
    """`rather/data/pack.py` is `rather.data.pack`, `rather/data/__init__.py` is `rather.data`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(file: Path, *, for_types: bool = True) -> list[tuple[str, ast.stmt]]:
    """Each module a file imports, anywhere in it; `from a import b` gives `a.b` where that is our module."""
    return list(_imports(file, for_types))


def _imports(file: Path, for_types: bool) -> Iterator[tuple[str, ast.stmt]]:
    unseen = set() if for_types else only_for_types(file)
    for node in nodes(file):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(file, node)
            for alias in node.names:
                yield (f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base), node


def only_for_types(file: Path) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING:` and never runs."""
    checks = [node for node in nodes(file) if isinstance(node, ast.If)]
    guarded = [node for node in checks if ast.unparse(node.test).endswith("TYPE_CHECKING")]
    return {inner for node in guarded for statement in node.body for inner in ast.walk(statement)}


def absolute_base(file: Path, node: ast.ImportFrom) -> str:
    """The module named after `from`, relative dots resolved."""
    if not node.level:
        return node.module or ""
    package = file.relative_to(ROOT).parent.parts
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
