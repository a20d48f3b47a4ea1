"""Shell completion: it answers with commands and options, and installs itself where the shell looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rather.cli import app


def completed(line: str) -> list[str]:
    words = line.split(" ")
    asked = {
        "_RATHER_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    return CliRunner().invoke(app, [], env=asked, prog_name="rather").output.split()


def test_commands_and_options_are_completed() -> None:
    assert "train" in completed("rather tr")
    assert "report" in completed("rather rep")
    assert "explain" in completed("rather config ex")
    assert completed("rather train --dry") == ["--dry-run"]
    assert completed("rather nothing-like-it") == []


@pytest.mark.parametrize(
    ("shell", "startup"),
    [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", ".config/fish/completions/rather.fish")],
)
def test_it_installs_itself(
    shell: str, startup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--install-completion", shell], prog_name="rather")
    assert result.exit_code == 0, result.output
    assert shell in result.output
    assert (tmp_path / startup).is_file()
    scripts = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert any("_RATHER_COMPLETE" in script for script in scripts)
