"""Every package that the source imports is a declared dependency, not only one of a dependency's."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.house.source import ROOT, imports, python_files

# Imported behind a test for their presence, and named in a message of their own.
OPTIONAL = {"flash_attn", "triton", "datasets", "huggingface_hub", "trl", "torchao"}
# Released together with a package that is declared, at a version which that package pins.
PART_OF = {"botocore": "boto3", "pydantic_core": "pydantic"}


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    lines = [*project["dependencies"], *extras]
    return {re.split(r"[<>=\[; ]", line)[0].lower().replace("_", "-") for line in lines}


def test_every_imported_package_is_declared() -> None:
    known, owners = declared(), packages_distributions()
    missing = set()
    for file in python_files("rather"):
        for name, _ in imports(file):
            package = name.partition(".")[0]
            package = PART_OF.get(package, package)
            if package in {"rather", *sys.stdlib_module_names, *OPTIONAL}:
                continue
            names = {owner.lower().replace("_", "-") for owner in owners.get(package, [package])}
            if not names & known:
                missing.add(f"{file.relative_to(ROOT)}: {package}")
    assert not missing, sorted(missing)
