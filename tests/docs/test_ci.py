"""`.ci/run` looks for a Chromium, installs one if it can, and continues if it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.source import ROOT

TOOLS = ("bash", "dirname", "id", "timeout")


def ci(folder: Path, **programs: str) -> str:
    """Return the output of `.ci/run` on a machine with these programs and a `make` that echoes."""
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
            "No Chromium found: installing one with apt-get for the tests of HTML pages\n"
            "make check test\n",
        ),
        (
            {"apt-get": "exit 100"},
            "No Chromium found: installing one with apt-get for the tests of HTML pages\n"
            "The installation failed: the tests of HTML pages will be skipped\nmake check test\n",
        ),
    ],
    ids=["found", "another", "installed", "installation fails"],
)
def test_chromium_is_found_or_installed(
    programs: dict[str, str], said: str, tmp_path: Path
) -> None:
    assert ci(tmp_path, **programs) == said
