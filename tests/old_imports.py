"""Import names on an old commit that do not exist there: a test fails only where it uses one.

A test file of today imports names that a defect's repair brought. Without this, the whole file
cannot be imported on the commit before, and says nothing about the defects whose tests need none
of these names.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn


class NotThereError(Exception):
    """A test used a name that this commit does not have."""


class MissingName:
    """Stands for a name that this commit does not have; any use of it raises."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotThereError(f"{self.__name__} is not there")

    __call__ = __iter__ = __len__ = __getitem__ = __contains__ = __truediv__ = __radd__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself, such as by inspect
            raise AttributeError(name)
        self._refuse()


def allow_missing_names() -> None:
    """Let files of `tests` import names of `rather` that do not exist."""
    import_as_usual = builtins.__import__

    def import_or_stand_in(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        importer = str((globals or {}).get("__name__", ""))
        if name.startswith("rather") and importer.startswith(("tests.", "conftest")):
            _add_missing(name, fromlist or ())
        return import_as_usual(name, globals, locals, fromlist or (), level)

    builtins.__import__ = import_or_stand_in


def _add_missing(name: str, wanted: Sequence[str]) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError:
        module = ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            _add_missing(parent, ())
            setattr(sys.modules[parent], last, module)
    for each in wanted:
        if hasattr(module, each):
            continue
        try:
            importlib.import_module(f"{name}.{each}")
        except ImportError:
            setattr(module, each, MissingName(f"{name}.{each}"))
