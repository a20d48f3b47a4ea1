"""Names and values of a Python file that is read and never run."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather.config.redaction import HIDDEN, looks_secret, redact

MOST = 10**12  # no setting is larger
LITERALS = (str, int, float, type(None))
DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")


class NotKnown(Exception):
    """A value that only a run has; the node is the place."""

    def __init__(self, node: ast.AST, why: str = "") -> None:
        super().__init__(why)
        self.node, self.why = node, why


@dataclass(frozen=True)
class Binding:
    """A statement that binds a name: its value, None if that is not an expression of its own."""

    node: ast.AST
    value: ast.expr | None
    in_branch: bool

    @property
    def end(self) -> tuple[int, int]:
        """Return where the name begins to have the value."""
        last = self.value or self.node
        return getattr(last, "end_lineno", 0), getattr(last, "end_col_offset", 0)


class Module:
    """The names of a module by scope, and what they stand for."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.tree, self.path = tree, path
        self.scope_of: dict[ast.AST, ast.AST] = {}
        self.bindings: dict[tuple[ast.AST, str], list[Binding]] = {}
        self.imported: dict[str, str] = {}  # local name -> module and name
        self.stars: list[tuple[int, int]] = []  # where `import *` is
        self.called = {call.func for call in self.calls()}
        self._visit(tree, tree, in_branch=False)

    # ---- names

    def _visit(self, node: ast.AST, scope: ast.AST, *, in_branch: bool) -> None:
        """Note the scope of every node, and the places that bind names."""
        self.scope_of[node] = scope
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            inner = node
        self._bind(node, scope, in_branch)
        branches = isinstance(
            node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try | ast.Match
        )
        otherwise = node.orelse if isinstance(node, ast.If) else []
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for child in ast.iter_child_nodes(node):
            starts_fresh = inner is not scope
            is_certain = is_main and child not in otherwise
            in_part = branches and not is_certain
            self._visit(child, inner, in_branch=in_part or (in_branch and not starts_fresh))

    def _bind(self, node: ast.AST, scope: ast.AST, in_branch: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for name in node.names:
                own = name.asname or name.name.partition(".")[0]
                self.imported[own] = f"{module}.{name.name}" if module else name.name
                self._add(scope, own, node, None, in_branch)
            if any(name.name == "*" for name in node.names):  # it may bind any name
                self.stars.append(place_of(node))
        elif isinstance(node, ast.Global | ast.Nonlocal):
            for changed in node.names:
                self._add(self.tree, changed, node, None, True)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value, scope, in_branch)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._bind_target(node.target, node.value, scope, in_branch)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._add(scope, node.name, node, None, in_branch)
        elif isinstance(node, ast.arg):
            self._add(scope, node.arg, node, None, in_branch)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self._add(scope, node.name, node, None, in_branch)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound = self.bindings.get((scope, node.id), [])
            if not any(binding.node is node for binding in bound):  # for, with, +=, :=, del
                self._add(scope, node.id, node, None, in_branch)

    def _bind_target(
        self, target: ast.expr, value: ast.expr, scope: ast.AST, in_branch: bool
    ) -> None:
        if isinstance(target, ast.Name):
            self._add(scope, target.id, target, value, in_branch)
        elif isinstance(target, ast.Tuple | ast.List):
            values: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                values = list(value.elts)
            for part, own in zip(target.elts, values, strict=True):
                if isinstance(part, ast.Name):
                    self._add(scope, part.id, part, own, in_branch)

    def _add(
        self, scope: ast.AST, name: str, node: ast.AST, value: ast.expr | None, in_branch: bool
    ) -> None:
        self.bindings.setdefault((scope, name), []).append(Binding(node, value, in_branch))

    def assigned(self, name: ast.Name) -> ast.expr:
        """Return the expression that a name stands for where it is used."""
        scope = self.scope_of[name]
        bound = [each for each in self.bindings.get((scope, name.id), ())
                 if each.end <= place_of(name)]  # fmt: skip
        if (scope, name.id) not in self.bindings:
            bound = self._bound_outside(scope, name)
        if not bound or any(each.in_branch for each in bound):
            raise NotKnown(name)
        last = bound[-1]
        if any(star > last.end for star in self.stars):
            raise NotKnown(name)
        if last.value is None:
            raise NotKnown(last.node, f"{name.id} is only known when it runs")
        return last.value

    def _bound_outside(self, scope: ast.AST, name: ast.Name) -> list[Binding]:
        """Return the one binding of a module's name that a function uses."""
        while scope is not self.tree:
            scope = self.scope_of[scope]
            bound = self.bindings.get((scope, name.id), [])
            if bound:
                return bound if scope is self.tree and len(bound) == 1 else []
        return []

    def origin(self, node: ast.expr) -> str:
        """Return the module and name of an imported thing, such as `trl.DPOTrainer`."""
        first, dot, rest = ast.unparse(node).partition(".")
        return self.imported.get(first, "") + dot + rest

    # ---- values

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression of literals."""
        try:
            return self._value(node)
        except (TypeError, ValueError, ArithmeticError):
            raise NotKnown(node) from None

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, LITERALS):
            return node.value
        if isinstance(node, ast.Name):
            value = self.assigned(node)
            if isinstance(value, ast.List | ast.Dict | ast.Set) and self._is_changed(node.id):
                raise NotKnown(node)
            return self.value(value)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            if None in node.keys:
                raise NotKnown(node)
            return {self.value(key): self.value(item)
                    for key, item in zip(node.keys, node.values, strict=True) if key}  # fmt: skip
        if isinstance(node, ast.JoinedStr):
            return "".join(self._text(part) for part in node.values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            inner = self.value(node.operand)
            return not inner if isinstance(node.op, ast.Not) else -inner
        if isinstance(node, ast.BinOp):
            return self._computed(node)
        if isinstance(node, ast.Attribute) and self.origin(node) in DTYPES:
            return node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
            return {key.arg: self.value(key.value) for key in node.keywords if key.arg}
        raise NotKnown(node)

    def _text(self, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue) and part.conversion < 0 and not part.format_spec:
            return str(self.value(part.value))
        return str(self.value(part))

    def _computed(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        is_text = isinstance(left, str) and isinstance(right, str)
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if is_text and isinstance(node.op, ast.Add):
            return left + right
        if not numbers or max(abs(left), abs(right)) > MOST:
            raise NotKnown(node)
        if isinstance(node.op, ast.Add | ast.Sub):
            return left + right if isinstance(node.op, ast.Add) else left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Pow) and abs(right) <= 64 and abs(left) <= 10:
            return left**right
        if isinstance(node.op, ast.Div | ast.FloorDiv) and right:
            return left / right if isinstance(node.op, ast.Div) else left // right
        raise NotKnown(node)

    def _is_changed(self, name: str) -> bool:
        """Return whether a list or mapping of this name is changed somewhere."""
        for node in ast.walk(self.tree):
            is_part = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
            is_method = isinstance(node, ast.Attribute)
            if (is_part or is_method) and base_of(node) == name:
                return True
        return False

    def where(self, node: ast.AST) -> str:
        return f"{self.path.name}:{getattr(node, 'lineno', 1)}"

    def note(self, node: ast.AST, why: str = "") -> str:
        """Return why a value is not known, and its place."""
        return f"{self.where(node)}: {why or f'{code_of(node)} is only known when it runs'}"

    def calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))


def place_of(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def base_of(node: ast.AST) -> str:
    """Return the name that attributes and subscripts begin with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def code_of(node: ast.AST) -> str:
    """Return the code of a node in one short line, without secrets."""
    shown = copy.deepcopy(node)
    for part in ast.walk(shown):
        if not isinstance(part, ast.Call):
            continue
        for keyword in part.keywords:
            if looks_secret(keyword.arg or ""):
                keyword.value = ast.Constant(HIDDEN)
        texts = [each for each in part.args if isinstance(each, ast.Constant)]
        if any(looks_secret(str(each.value)) for each in texts):  # getenv("HF_TOKEN", "...")
            for other in texts[1:]:
                other.value = HIDDEN
    text = " ".join(redact(ast.unparse(shown)).split())
    return text if len(text) <= 60 else text[:57] + "..."
