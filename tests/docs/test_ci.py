"""`.ci/run` looks for a Chromium, installs one where it can, and goes on where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.source import ROOT

TOOLS = ("bash", "dirname", "id", "timeout")


def ci(folder: Path, **programs: str) -> str:
    """What it prints on a machine that has these programs, and a `make` that says what it was asked for."""
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    for name, script in {"make": "echo make $@", "sudo": 'shift; exec "$@"', **programs}.items():
        (folder / name).write_text(f"#!{folder}/bash\n{script}\n")
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "RATHER_CHROMIUM"}
    done = subprocess.run(
        [str(folder / "bash"), str(ROOT / ".ci" / "run")],
        env={**kept, "PATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({"chromium": ""}, "make check test\n"),
        ({"google-chrome": ""}, "make check test\n"),
        (
            {"apt-get": ""},
            "No Chromium found: apt-get installs one for the tests of pages\nmake check test\n",
        ),
        (
            {"apt-get": "exit 100"},
            "No Chromium found: apt-get installs one for the tests of pages\n"
            "That is not possible here: the tests of pages are counted as not run\nmake check test\n",
        ),
    ],
    ids=["there", "another", "installed", "not possible"],
)
def test_a_chromium_is_looked_for(programs: dict[str, str], said: str, tmp_path: Path) -> None:
    assert ci(tmp_path, **programs) == said
