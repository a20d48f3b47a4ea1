"""`make release`: what the wheel holds, and what is refused."""

from __future__ import annotations

import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.release.tool import release

CHANGELOG = "# Changes\n\n## Unreleased\n\n### Added\n- A key.\n\n## 0.1.0\n\nThe first.\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    release.copy_files(ROOT, release.tracked_files(ROOT), source)
    return Path(release.run_backend(source, folder, 1_700_000_000, "wheel")["wheel"])


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    tracked = release.tracked_files(ROOT)
    assert release.check_wheel(ROOT, wheel, tracked) == []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    endings = {Path(name).suffix for name in names}
    assert {".yaml", ".jsonl", ".json", ".txt", ".js", ".css"} <= endings
    assert not [name for name in names if "test" in Path(name).parts]


def test_a_file_too_few_or_too_many_is_named(wheel: Path) -> None:
    tracked = release.tracked_files(ROOT)
    new = release.check_wheel(ROOT, wheel, [*tracked, "rather/page.html"])
    assert [line.split(": ")[1] for line in new] == [
        "rather/page.html is missing; see [tool.setuptools.package-data] and MANIFEST.in."
    ]
    gone = [name for name in tracked if name != "rather/cli.py"]
    (line,) = release.check_wheel(ROOT, wheel, gone)
    assert line.endswith("rather/cli.py does not belong in it.")


@pytest.mark.wide
def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    """Also the wheel that is built from the source distribution."""
    wheel, sdist = release.build_and_check(ROOT, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([wheel, sdist])


def test_the_version_is_written_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rather.__version__"}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert "\nversion:" not in citation


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit, as the release tool expects it."""
    (tmp_path / "rather").mkdir()
    (tmp_path / "rather" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a change")


def test_a_release_is_a_commit_with_a_dated_section(checkout: Path) -> None:
    (problem,) = release.problems_of_commit(checkout, "0.1.0")
    assert "CHANGELOG.md has changes under '## Unreleased'" in problem
    release.prepare(checkout, "0.2.0", "2026-11-18")
    assert release.read_version(checkout) == "0.2.0"
    text = (checkout / "CHANGELOG.md").read_text()
    assert "## Unreleased\n\n## 0.2.0 - 2026-11-18\n\n### Added\n- A key.\n" in text
    (problem,) = release.problems_of_commit(checkout, "0.2.0")
    assert problem.startswith("Commit these changes first")
    commit(checkout)
    assert release.problems_of_commit(checkout, "0.2.0") == []
    git(checkout, "tag", "v0.2.0")
    assert release.problems_of_commit(checkout, "0.2.0") == []
    (checkout / "new").write_text("later")
    commit(checkout)
    (problem,) = release.problems_of_commit(checkout, "0.2.0")
    assert "v0.2.0 is on another commit" in problem


@pytest.mark.parametrize(
    ("version", "text"),
    [("0.1.0", "already has a section 0.1.0"), ("new", "VERSION must be like 0.2.0")],
)
def test_a_version_that_cannot_be_is_refused(checkout: Path, version: str, text: str) -> None:
    with pytest.raises(release.Refused, match=text):
        release.prepare(checkout, version, "2026-11-18")
    assert (checkout / "CHANGELOG.md").read_text() == CHANGELOG


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert release.missing_tools() == []
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    no_git, old_setuptools = release.missing_tools()
    assert no_git == "git is missing: install it."
    assert "setuptools 77 or newer is missing (installed: 65.5.0)" in old_setuptools
    assert "Without a network" in old_setuptools
