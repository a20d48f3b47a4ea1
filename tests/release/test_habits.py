"""Workflows, pre-commit and templates name things that exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.house.source import ROOT
from tests.run_wide import PARTS

FILES = sorted(
    [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text(encoding="utf-8")))


def commands(workflow: dict[str, Any]) -> list[str]:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_is_a_mapping(file: Path) -> None:
    assert read(file)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_calls_targets_that_exist(file: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    workflow = read(file)
    assert workflow["permissions"] == {"contents": "read"}
    made = [line for line in commands(workflow) if line.startswith("make ")]
    assert made
    for line in made:
        target = shlex.split(line)[1]
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
        for test in re.findall(r"tests/\S+\.py", line):
            assert (ROOT / test).is_file(), line


def test_every_supported_python_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [re.search(r":: (3\.\d+)$", text) for text in project["classifiers"]]
    supported = [match[1] for match in named if match]
    matrix = read(ROOT / ".github/workflows/check.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == supported
    assert project["requires-python"] == f">={supported[0]}"


def test_the_night_runs_every_part() -> None:
    wide = read(ROOT / ".github" / "workflows" / "wide.yml")
    parts = wide["jobs"]["part"]["strategy"]["matrix"]["part"]
    assert parts == list(range(1, PARTS + 1))
    assert any(f"PART=${{{{ matrix.part }}}}/{PARTS}" in line for line in commands(wide))


def test_hooks_run_tools_and_tests_that_exist() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        words = shlex.split(hook["entry"])
        assert words[:2] == [".venv/bin/python", "-m"], hook["id"]
        for test in [word for word in words if word.startswith("tests/")]:
            assert (ROOT / test).is_file(), test
