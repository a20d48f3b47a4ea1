"""List the repaired defects with the tests that prove it, and see these tests fail on an old commit.

`python -m tests.defects` prints a table of defects and tests. `--run` also runs each test in this
tree, where it must pass, and `--before COMMIT` in a checkout of that commit with this tree's
tests, where it must fail. It ends with status 1 if one does not. There a test is `broken`, not
`failed`, if it needs a name that the commit does not have. `--write FILE` keeps the table as JSON.
Surviving mutations are proved by `python -m tests.mutations` instead.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.old_imports import NotThereError, allow_missing_names

ROOT = Path(__file__).parents[1]
# Modules that a name has moved to since: an old commit gets them, so that tests run there.
MOVED = {
    "rather/config/run_config.py": "from rather.config.schema import FOR_A_RUN, DPOConfig\n",
    "rather/pipeline/starts.py": "from rather.report.starts import *\n",
    "rather/run_folder/names.py": "from rather.report.folder import *\n",
    "rather/tools/__init__.py": "",
    "rather/tools/commands.py": "from rather.commands.runs import *\n",
}
ROOMS = {"migrate": "rather.migrate", "board": "rather.board", "report": "rather.report"}
COMMANDS = ("sweep", "tune", "pairs", "demo")
SAME_MODULE = "import sys, {old}\nsys.modules[__name__] = sys.modules['{old}']\n"
PATIENCE = 900  # seconds for the tests of one file
# U5, U9 and U16 were defects of parts of `rather migrate` that are removed.
OF_THE_TESTS = ("mutation", "E7")  # ids of mutations that lived: the package was right before, too
UNPROVED = {"failed", "broken", "no end"}  # outcomes before a repair, and never after it


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


class Recorder:
    """Writes the outcome of each test to a file as it ends."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            needs_new_name = report.failed and NotThereError.__name__ in str(report.longrepr)
            outcome = "broken" if needs_new_name else report.outcome
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps([report.nodeid, outcome]) + "\n")


def outcomes(tree: Path, tests: list[str], *, is_old: bool = False) -> dict[str, str]:
    """Return test -> `passed`, `failed` or `skipped` in a tree.

    It is `broken` if it cannot run there, and `no end` if its file takes longer than PATIENCE.

    The tests of a file run in one process: importing takes longer than most of them.
    """
    by_file = defaultdict(list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)
    results: dict[str, str] = {}
    for nodes in by_file.values():
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
            command = [sys.executable, "-m", "tests.defects", "--record", file.name, *nodes]
            command += ["--old"] if is_old else []
            environment = os.environ | {"PYTHONPATH": str(tree)}
            options = {"cwd": tree, "env": environment, "stdout": subprocess.DEVNULL}
            recorded = dict.fromkeys(nodes, "broken")
            try:
                subprocess.run(command, stderr=subprocess.DEVNULL, timeout=PATIENCE, **options)
            except subprocess.TimeoutExpired:
                recorded = dict.fromkeys(nodes, "no end")
            for line in file:
                node, outcome = json.loads(line)
                if recorded.get(node) != "failed":
                    recorded[node] = outcome
            results |= recorded
    return results


def record(file: Path, tests: list[str], *, is_old: bool) -> int:
    """Run tests in this process, and write their outcomes to a file."""
    if is_old:
        allow_missing_names()
    arguments = ["-q", "--all", "-p", "no:cacheprovider", *tests]
    return int(pytest.main(arguments, plugins=[Recorder(file)]))


def old_tree(commit: str, folder: Path) -> Path:
    """Check out a commit below `folder`, with the tests and the pytest settings of this tree."""
    tree = folder / "tree"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    subprocess.run(["git", "-C", str(tree), "checkout", "-q", commit], check=True)
    shutil.rmtree(tree / "tests")
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    for name, text in (MOVED | moved_tools(tree)).items():
        if not (tree / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text, encoding="utf-8")
    return tree


def moved_tools(tree: Path) -> dict[str, str]:
    """Return modules of `rather.tools` that are those of an old commit under their new names."""
    olds = {name: f"rather.commands.{name}" for name in COMMANDS}
    moved = {}
    for room, old in ROOMS.items():
        folder = tree / old.replace(".", "/")
        moved[f"rather/tools/{room}/__init__.py"] = f"from {old} import *\n"
        for file in folder.rglob("*.py"):
            name = file.relative_to(folder).with_suffix("").as_posix()
            if file.name != "__init__.py":
                olds[f"{room}/{name}"] = f"{old}.{name.replace('/', '.')}"
    moved["rather/tools/migrate/peers/__init__.py"] = "from rather.migrate.peers import *\n"
    moved |= {f"rather/tools/{new}.py": SAME_MODULE.format(old=old) for new, old in olds.items()}
    return moved


def main() -> int:
    """Print the table; return 1 if a test does not fail before or does not pass now."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ids", nargs="*", help="only these defects")
    parser.add_argument("--run", action="store_true", help="run the tests in this tree")
    parser.add_argument("--before", metavar="COMMIT", help="run them on this commit as well")
    parser.add_argument("--write", metavar="FILE", type=Path, help="add the outcomes to this file")
    parser.add_argument("--record", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--old", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        return record(options.record, options.ids, is_old=options.old)
    tests = marked_tests()
    if options.ids:
        tests = {name: tests[name] for name in options.ids}
    nodes = sorted({node for group in tests.values() for node in group})
    now = outcomes(ROOT, nodes) if options.run else {}
    before: dict[str, str] = {}
    if options.before:
        with tempfile.TemporaryDirectory() as folder:
            before = outcomes(old_tree(options.before, Path(folder)), nodes, is_old=True)
    if options.write:
        write_table(options.write, tests, before, now)
    wrong = print_table(tests, before, now)
    print(f"{len(tests)} defects, {len(nodes)} tests; wrong: {wrong}")
    return 1 if wrong else 0


def print_table(
    tests: Mapping[str, list[str]], before: Mapping[str, str], now: Mapping[str, str]
) -> int:
    """Print each defect with its tests; return the number of those that are not proved."""
    wrong = 0
    for name, group in tests.items():
        print(f"{name}:", *(f"  {node}" for node in group), sep="\n")
        if now:
            words = [now[node] for node in group]
            wrong += not UNPROVED.isdisjoint(words)
            print(f"  now: {_counts(words)}")
        if before and not name.startswith(OF_THE_TESTS):
            words = [before[node] for node in group]
            wrong += UNPROVED.isdisjoint(words)
            print(f"  before: {_counts(words)}")
    return wrong


def write_table(
    file: Path,
    tests: Mapping[str, list[str]],
    before: Mapping[str, str],
    now: Mapping[str, str],
) -> None:
    """Add id -> test -> outcome before and now to a file; what else is in it stays."""
    table = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name, group in tests.items():
        rows = table.setdefault(name, {})
        for node in group:
            row = rows.setdefault(node, {"before": None, "now": None})
            row["before"] = before.get(node, row["before"])
            row["now"] = now.get(node, row["now"])
    ordered = dict(sorted(table.items(), key=lambda pair: _sort_key(pair[0])))
    file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def _counts(outcomes: list[str]) -> str:
    return ", ".join(f"{outcomes.count(word)} {word}" for word in sorted(set(outcomes)))


if __name__ == "__main__":
    sys.exit(main())
