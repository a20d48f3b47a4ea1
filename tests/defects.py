"""List the repaired defects with the tests that prove it, and see these tests fail on an old commit.

`python -m tests.defects` prints a table of defects and tests. `--run` also runs each test in this
tree, where it must pass, and `--before COMMIT` in a checkout of that commit with this tree's
tests, where it must fail. It ends with status 1 if one does not. Surviving mutations are proved by
`python -m tests.mutations` instead.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATIENCE = 600  # seconds for one test


class Collector:
    """Collects the node ids of all tests with the mark `defect`, by the id of the defect."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("defect"):
                for name in mark.args:
                    self.tests[name].append(item.nodeid)


def marked_tests() -> dict[str, list[str]]:
    """Return id of a defect -> node ids of its tests."""
    collector = Collector()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        arguments = ["--collect-only", "--all", "-qq", "-m", "defect", str(ROOT / "tests")]
        status = pytest.main(arguments, plugins=[collector])
    if status != pytest.ExitCode.OK:
        sys.exit(f"{printed.getvalue()}The tests could not be collected (status {status}).")
    return dict(sorted(collector.tests.items(), key=lambda pair: _sort_key(pair[0])))


def _sort_key(name: str) -> tuple[str, int]:
    digits = "".join(character for character in name if character.isdigit())
    return name.rstrip("0123456789"), int(digits or 0)


def outcomes(tree: Path, tests: list[str]) -> dict[str, str]:
    """Return test -> `passed`, `failed` or `skipped` in a tree; one that cannot run has failed."""
    results = {}
    for test in tests:
        command = [sys.executable, "-m", "pytest", "-q", "--all", "-p", "no:cacheprovider", test]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        try:
            run = subprocess.run(
                command,
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            results[test] = "failed"
            continue
        last_line = run.stdout.strip().rpartition("\n")[2]
        if run.returncode:
            results[test] = "failed"
        else:
            results[test] = "passed" if " passed" in last_line else "skipped"
    return results


def old_tree(commit: str, folder: Path) -> Path:
    """Check out a commit below `folder`, with the tests and the pytest settings of this tree."""
    tree = folder / "tree"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    subprocess.run(["git", "-C", str(tree), "checkout", "-q", commit], check=True)
    shutil.rmtree(tree / "tests")
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def main() -> int:
    """Print the table; return 1 if a test does not fail before or does not pass now."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ids", nargs="*", help="only these defects")
    parser.add_argument("--run", action="store_true", help="run the tests in this tree")
    parser.add_argument("--before", metavar="COMMIT", help="run them on this commit as well")
    options = parser.parse_args()
    tests = marked_tests()
    if options.ids:
        tests = {name: tests[name] for name in options.ids}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = old_tree(options.before, Path(folder)) if options.before else None
        for name, nodes in tests.items():
            print(f"{name}:", *(f"  {node}" for node in nodes), sep="\n", flush=True)
            if options.run:
                now = outcomes(ROOT, nodes)
                wrong += "failed" in now.values()
                print(f"  now: {_counts(now)}", flush=True)
            if tree and not name.startswith("mutation"):
                before = outcomes(tree, nodes)
                wrong += "failed" not in before.values()
                print(f"  before: {_counts(before)}", flush=True)
    return 1 if wrong else 0


def _counts(results: dict[str, str]) -> str:
    words = list(results.values())
    return ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))


if __name__ == "__main__":
    sys.exit(main())
