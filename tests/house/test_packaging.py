"""Version ranges, pins, versions and commands agree wherever they are written down."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.house.source import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    exact = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in exact}


def wanted() -> list[Requirement]:
    """Return what the Makefile installs: the base and everything that `dev` includes."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    included = Requirement(extras["dev"][0])
    assert included.name == "rather"
    texts = [text for name in sorted(included.extras) for text in extras[name]]
    return [Requirement(text) for text in project["dependencies"] + texts + extras["dev"][1:]]


def test_the_base_install_needs_no_extra() -> None:
    base = {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
    optional = ("ray", "tensorboard", "wandb", "trackio", "mlflow", "swanlab", "boto3")
    assert not base.intersection(optional)
    for name in ("ray", "tensorboard", "wandb", "trackio", "mlflow", "swanlab", "s3"):
        assert PROJECT["project"]["optional-dependencies"][name], name


def test_every_dependency_is_pinned_inside_its_range() -> None:
    pinned = pins()
    for requirement in wanted():
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{requirement.name} is in pyproject.toml and not in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), (
            f"{requirement} does not admit {pinned[name]}"
        )


def test_versions_agree() -> None:
    from rather import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_requirements_install_the_package_under_the_constraints() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == [
        "-c constraints.txt",
        "-e .",
    ]


def test_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (help .*)$", makefile, re.MULTILINE)
    assert phony
    said = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for target in set(phony[1].split()) - {"help"}:
        assert f"make {target}" in said


def test_make_names_the_fix_when_python_is_missing() -> None:
    """The interpreter is searched before anything is created or downloaded."""
    command = ["make", "-s", "-B", "install", "VENV=.venv-absent", "PYTHON=no-such-python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "No Python 3.11 or newer found as PYTHON=no-such-python: install one" in done.stderr
    assert not (ROOT / ".venv-absent").exists()


@pytest.mark.parametrize("target", ["install", "clean"])
def test_make_leaves_a_foreign_environment_alone(target: str, tmp_path: Path) -> None:
    """`.venv` is replaced only if the Makefile created it; neither a user's own nor a link is."""
    own, link = tmp_path / "own", tmp_path / "link"
    own.mkdir()
    (own / "precious").write_text("kept")
    link.symlink_to(own)
    for folder in (own, link):
        command = ["make", "-s", target, f"VENV={folder}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert f"{folder} exists and was not created by this Makefile" in done.stderr
        assert [path.name for path in own.iterdir()] == ["precious"]


def test_ci_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
