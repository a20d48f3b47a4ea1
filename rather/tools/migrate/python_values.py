"""Names and values of a Python file that is read and never run."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather.config.redaction import HIDDEN, looks_secret, redact

MOST = 10**12  # no setting is larger
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
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
        self.value_of: dict[ast.expr, ast.expr] = {}  # of the targets of assignments
        self._visit(tree, tree, in_branch=False)

    # ---- names

    def _visit(self, node: ast.AST, scope: ast.AST, *, in_branch: bool) -> None:
        """Note the scope of every node, and the places that bind names."""
        self.scope_of[node] = scope
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            inner = node
        for name, expression in self._bound_names(node):
            self._add(scope, name, Binding(node, expression, in_branch))
        branches = isinstance(
            node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try | ast.Match
        )
        otherwise = node.orelse if isinstance(node, ast.If) else []
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        for child in ast.iter_child_nodes(node):
            is_certain = is_main and child not in otherwise
            in_part = branches and not is_certain
            self._visit(child, inner, in_branch=in_part or (in_branch and inner is scope))

    def _bound_names(self, node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
        """Yield each name that a node binds, and its value if that is an expression."""
        match node:
            case ast.Import() | ast.ImportFrom():
                module = f"{getattr(node, 'module', None) or ''}."
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.imported[name] = (module + alias.name).lstrip(".")
                    if name == "*":  # it may bind any name
                        self.stars.append(place_of(node))
                    yield name, None
            case ast.Global() | ast.Nonlocal():  # a function may change it at any time
                for name in node.names:
                    self._add(self.tree, name, Binding(node, None, in_branch=True))
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value):
                self._assign(node.target, value)
            case ast.Name(ctx=ast.Store() | ast.Del()):
                yield node.id, self.value_of.get(node)  # no value: for, with, +=, :=, del
            case ast.arg(arg=str(name)):
                yield name, None
            case (
                ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name))
                | ast.ClassDef(name=str(name)) | ast.ExceptHandler(name=str(name))
            ):  # fmt: skip
                yield name, None

    def _add(self, scope: ast.AST, name: str, binding: Binding) -> None:
        self.bindings.setdefault((scope, name), []).append(binding)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Note the value of a target; of `a, b = 1, 2` that of each."""
        self.value_of[target] = value
        if not isinstance(target, ast.Tuple | ast.List) or not isinstance(value, ast.Tuple):
            return
        if len(target.elts) == len(value.elts):
            self.value_of.update(zip(target.elts, value.elts, strict=True))

    def assigned(self, name: ast.Name) -> ast.expr:
        """Return the expression that a name stands for where it is used."""
        scope = self.scope_of[name]
        bound = [binding for binding in self.bindings.get((scope, name.id), ())
                 if binding.end <= place_of(name)]  # fmt: skip
        if (scope, name.id) not in self.bindings:
            bound = self._bound_outside(scope, name)
        if not bound or any(binding.in_branch for binding in bound):
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
        first, dot, attributes = ast.unparse(node).partition(".")
        return self.imported.get(first, "") + dot + attributes

    # ---- values

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression of literals."""
        try:
            return self._value(node)
        except (TypeError, ValueError, ArithmeticError):
            raise NotKnown(node) from None

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=str() | int() | float() | None):
                return node.value
            case ast.Name():
                return self._value_of_name(node)
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(element) for element in node.elts]
            case ast.Dict() | ast.Call(func=ast.Name(id="dict"), args=[]):
                return self._mapping(node)
            case ast.JoinedStr():
                return "".join(str(self.value(piece)) for piece in node.values)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return self.value(node.value)
            case ast.UnaryOp(op=ast.Not()):
                return not self.value(node.operand)
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand)
            case ast.BinOp():
                return self._computed(node)
            case ast.Attribute() if self.origin(node) in DTYPES:
                return node.attr
        raise NotKnown(node)

    def _mapping(self, node: ast.Dict | ast.Call) -> dict[Any, Any]:
        """Return the value of `{...}` or `dict(...)`; what `**other` adds is not known."""
        values: dict[Any, Any] = {}
        if isinstance(node, ast.Dict):
            for key, entry in zip(node.keys, node.values, strict=True):
                if key is None:
                    raise NotKnown(node)
                values[self.value(key)] = self.value(entry)
            return values
        for keyword in node.keywords:
            if keyword.arg is None:
                raise NotKnown(node)
            values[keyword.arg] = self.value(keyword.value)
        return values

    def _value_of_name(self, name: ast.Name) -> Any:
        expression = self.assigned(name)
        is_mutable = isinstance(expression, ast.List | ast.Dict | ast.Set)
        if is_mutable and self._is_changed(name.id):
            raise NotKnown(name)
        return self.value(expression)

    def _computed(self, node: ast.BinOp) -> Any:
        first, second = self.value(node.left), self.value(node.right)
        kind = type(node.op)
        are_texts = isinstance(first, str) and isinstance(second, str) and kind is ast.Add
        are_numbers = all(isinstance(side, int | float) for side in (first, second))
        if kind not in OPERATORS or not (are_texts or are_numbers):
            raise NotKnown(node)
        if are_numbers and max(abs(first), abs(second)) > (64 if kind is ast.Pow else MOST):
            raise NotKnown(node)
        return OPERATORS[kind](first, second)

    def uses(self, name: str) -> Iterator[ast.Attribute | ast.Subscript]:
        """Yield attributes and parts of what a name stands for, such as `name.a` and `name[0]`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute | ast.Subscript) and base_of(node) == name:
                yield node

    def _is_changed(self, name: str) -> bool:
        """Return whether a list or mapping of this name may be changed somewhere."""
        return any(isinstance(use, ast.Attribute) or not isinstance(use.ctx, ast.Load)
                   for use in self.uses(name))  # fmt: skip

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


def last_name(node: ast.expr) -> str:
    """Return `c` for `a.b.c`."""
    return ast.unparse(node).rpartition(".")[2]


def is_stored(node: ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def code_of(node: ast.AST) -> str:
    """Return the code of a node in one short line, without secrets."""
    shown = copy.deepcopy(node)
    for call in ast.walk(shown):
        if not isinstance(call, ast.Call):
            continue
        for keyword in call.keywords:
            if looks_secret(keyword.arg or ""):
                keyword.value = ast.Constant(HIDDEN)
        texts = [argument for argument in call.args if isinstance(argument, ast.Constant)]
        # getenv("HF_TOKEN", "...")
        if any(looks_secret(str(argument.value)) for argument in texts):
            for argument in texts[1:]:
                argument.value = HIDDEN
    text = " ".join(redact(ast.unparse(shown)).split())
    return text if len(text) <= 60 else text[:57] + "..."
