"""`.ci/release.py` as a module."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from tests.house.source import ROOT


def load(path: str) -> ModuleType:
    spec = spec_from_file_location(path.replace("/", "_"), ROOT / path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


release = load(".ci/release.py")
