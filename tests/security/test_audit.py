"""`make check` fails on a known vulnerability, and only says so where no list of them can be reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GOOD = {"name": "good", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "1.0", "vulns": [{"id": "CVE-2026-1", "fix_versions": ["1.1"]}]}
UNKNOWN = {"name": "ours", "skip_reason": "not found"}


def audit(folder: Path, out: str, err: str = "") -> subprocess.CompletedProcess[str]:
    """With a pip_audit that says this."""
    (folder / "pip_audit.py").write_text(f"import sys\nprint({out!r})\nsys.exit({err!r})\n")
    command = [sys.executable, str(ROOT / ".ci" / "audit")]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


NO_NETWORK = "Traceback\nrequests.exceptions.ConnectionError: Max retries exceeded"


@pytest.mark.parametrize(
    ("packages", "error", "status", "said"),
    [
        ([GOOD, UNKNOWN], "", 0, "1 of 2 packages checked, 0 vulnerabilities"),
        ([GOOD, BAD], "", 1, "bad 1.0: CVE-2026-1, fixed in 1.1"),
        ([UNKNOWN, UNKNOWN], "", 0, "nothing was checked"),
        (None, NO_NETWORK, 0, "cannot reach the list of vulnerabilities; nothing was checked"),
        (None, "SyntaxError: invalid syntax", 1, ""),
    ],
)
def test_what_is_found_decides(
    tmp_path: Path, packages: list[Any] | None, error: str, status: int, said: str
) -> None:
    """A failing audit is not a good one; without a network one line says so."""
    done = audit(tmp_path, json.dumps({"dependencies": packages}) if packages else "", error)
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert error != NO_NETWORK or len(done.stdout.splitlines()) == 1


def test_the_check_runs_both() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ncheck:")[1].split("\n\n")[0]
    assert "-m bandit -q -r rather -c pyproject.toml" in lines
    assert ".ci/audit" in lines
