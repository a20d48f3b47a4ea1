"""Run a part of the wide tests, and keep what ran in bench/results/wide.json.

    python -m tests.run_wide 2/4     # the second of four parts: make test-wide PART=2/4
    python -m tests.run_wide         # all parts in turn
    python -m tests.run_wide --again # what failed; the result says at which commit it passed
    python -m tests.run_wide --check # is every part green, and of the code that is here?

A part is a set of test files, chosen by the seconds that each took the last time, so that all parts
take about as long. All parts divide by the same seconds, those of the time when the first of them
ran (`planned`), and each stores a digest of the division: parts that divided differently may have
left a file out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tests.sharing import GROUPS, group_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "wide.json"
PARTS = 4
UNKNOWN_SECONDS = 30.0  # of a file that has not run yet
# Results hold as long as these have the content that was tested, whatever happened in between.
TESTED = [f"rather/{room}" for room in ("cluster", "train", "parallel", "checkpoint")]
PYTEST = [sys.executable, "-m", "pytest", "-q", "--wide-only"]


def read_results() -> dict[str, Any]:
    if not RESULTS.exists():
        return {"parts": {}, "planned": {}, "seconds": {}}
    return dict(json.loads(RESULTS.read_text(encoding="utf-8")))


def wide_files() -> set[str]:
    """Return the files that have wide tests."""
    command = [*PYTEST, "--collect-only", "-n0"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise SystemExit(f"The tests could not be collected:\n{listed.stdout[-3000:]}")
    return {line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line}


def division(files: Iterable[str], parts: int) -> dict[str, int]:
    """Return file -> part. Tests of one group run one after another, so each group is divided."""
    planned = read_results()["planned"]

    def seconds_of(file: str) -> float:
        return float(planned.get(file, UNKNOWN_SECONDS))

    loads = dict.fromkeys(range(1, parts + 1), 0.0)
    loads_of_groups = {(group, number): 0.0 for group in GROUPS for number in loads}
    chosen: dict[str, int] = {}
    for file in sorted(files, key=lambda name: (-seconds_of(name), name)):
        group = group_of(file)
        part = min(loads, key=lambda number: (loads_of_groups[group, number], loads[number]))
        loads[part] += seconds_of(file)
        if group != "others":
            loads_of_groups[group, part] += seconds_of(file)
        chosen[file] = part
    return chosen


def digest_of(chosen: dict[str, int]) -> str:
    return hashlib.sha256(json.dumps(sorted(chosen.items())).encode()).hexdigest()[:16]


def plan(parts: int, *, again: bool) -> None:
    """Fix the seconds by which files are divided, unless some of these parts have run already."""
    results = read_results()
    counts = {name.partition("/")[2] for name in results["parts"]}
    if again or counts != {str(parts)}:
        results |= {"parts": {}, "planned": results["seconds"]}
        write_results(results)


def write_results(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def run_part(part: int, chosen: dict[str, int], parts: int, workers: int, more: list[str]) -> bool:
    """Run the tests of a part, those that must be alone first, and store the result."""
    began, counts = time.time(), Counter[str]()
    failed: list[str] = []
    seconds: defaultdict[str, float] = defaultdict(float)
    files = sorted(file for file, number in chosen.items() if number == part)
    with tempfile.TemporaryDirectory() as folder:
        for marks in ("alone", "not alone"):
            arguments = ["-m", marks, *more]
            if marks == "not alone":
                arguments += ["-n", str(workers), "--no-loadscope-reorder"]
            code, cases = run_pytest([*arguments, *files], Path(folder, f"{marks}.xml"))
            if code not in (0, 1, 5):  # passed, failed, nothing selected
                failed.append(f"pytest ended with status {code}")
            for case in cases:
                counts[case.outcome] += 1
                seconds[case.file] += case.seconds
                failed += [case.name] if case.outcome == "failed" else []
    results = read_results()
    results["parts"][f"{part}/{parts}"] = {
        **state_of_the_tree(),
        "minutes": round((time.time() - began) / 60, 1),
        **{name: counts[name] for name in ("passed", "failed", "skipped")},
        "failures": failed,
        "division": digest_of(chosen),
    }
    results["seconds"] |= {name: round(total, 1) for name, total in seconds.items()}
    write_results(results)
    return not failed


class Case(NamedTuple):
    name: str
    file: str
    outcome: str
    seconds: float


def run_pytest(arguments: list[str], report: Path) -> tuple[int, list[Case]]:
    """Return the exit status, and what became of each test."""
    command = [*PYTEST, f"--junitxml={report}", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    cases = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        file = f"{case.get('classname', '').replace('.', '/')}.py"
        outcome = "skipped" if case.find("skipped") is not None else "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        seconds = float(case.get("time", 0))
        cases.append(Case(f"{file}::{case.get('name')}", file, outcome, seconds))
    return code, cases


def run_again(more: list[str]) -> bool:
    """Run the tests that failed, one after another, and store which of them pass now."""
    results = read_results()
    for part in results["parts"].values():
        if not part["failures"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            _, cases = run_pytest([*more, "-n0", *part["failures"]], Path(folder, "report.xml"))
        passed = [case.name for case in cases if case.outcome == "passed"]
        part["failures"] = [name for name in part["failures"] if name not in passed]
        part["failed"] -= len(passed)
        part["passed"] += len(passed)
        part.setdefault("again", []).append({**state_of_the_tree(), "passed": passed})
        write_results(results)
    return not any(part["failures"] for part in results["parts"].values())


def state_of_the_tree() -> dict[str, Any]:
    return {
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--", "rather", "tests")),
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def problems() -> list[str]:
    """Return why the stored results do not hold for this commit; none if they do."""
    parts = read_results()["parts"]
    if not parts:
        return ["no part has run: make test-wide"]
    if git("rev-parse", "--is-shallow-repository") != "false":
        return ["the history of this clone is not complete: git fetch --unshallow"]
    count = int(next(iter(parts)).partition("/")[2])
    found = []
    for name in (f"{number}/{count}" for number in range(1, count + 1)):
        part = parts.get(name)
        if part is None:
            found.append(f"part {name} has not run: make test-wide PART={name}")
        elif part["failures"]:
            found.append(f"part {name} is red: {', '.join(part['failures'])}")
        elif any(run["changed"] or trees_of(run["commit"]) != trees_of("HEAD")
                 for run in (part, *part.get("again", ()))):  # fmt: skip
            found.append(f"part {name} ran with another content of {', '.join(TESTED)}")
    if len({part.get("division") for part in parts.values()}) > 1:
        found.append("a test file was added or removed between the parts: run all of them again")
    return found


def trees_of(commit: str) -> list[str]:
    """Return what decides the content of the tested rooms at a commit; none if it is unknown."""
    return git("ls-tree", commit, "--", *TESTED).splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", help="k/n; default: all parts")
    parser.add_argument("--again", action="store_true", help="only run what failed")
    parser.add_argument("--check", action="store_true", help="only look at what is stored")
    parser.add_argument("--workers", type=int, default=2)
    args, more = parser.parse_known_args()
    if args.check:
        found = problems()
        print("\n".join(found) or "every part of the wide tests is green")
        return int(bool(found))
    if args.again:
        return int(not run_again(more))
    if args.part:
        number, _, count = args.part.partition("/")
        numbers, parts = [int(number)], int(count)
    else:
        numbers, parts = list(range(1, PARTS + 1)), PARTS
    plan(parts, again=not args.part)
    chosen = division(wide_files(), parts)
    green = [run_part(number, chosen, parts, args.workers, more) for number in numbers]
    return int(not all(green))


if __name__ == "__main__":
    sys.exit(main())
