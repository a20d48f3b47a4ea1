"""`make fuzz`: damaged inputs for the commands, each in a forked process with limits.

python -m tests.fuzz --minutes 10 --seed 7        planted bugs, then all kinds in turn
python -m tests.fuzz --seed 7 --only rows:12      one input again; its folder is kept
python -m tests.fuzz --planted only               bugs that are planted on purpose must be found

The oracle: memory limit and deadline hold; the exit code is documented; an error is one message
without a traceback; files outside are unchanged; and on success the result is that of the undamaged
input, or the difference is reported. A kind's `judge` checks the last point.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SECONDS = 10  # of CPU for one input; the slowest undamaged one takes one
PATIENCE = 180  # seconds of waiting, on a machine that does much else
MEMORY = 1 << 30  # bytes in use; a process with all imports has a third of it
ADDRESSES = 8 << 30  # bytes of address space beyond those at the start, to protect the machine
JUDGED, COMPLAINT, STDOUT, STDERR = "judged", "complaint", "stdout", "stderr"


@dataclass
class Case:
    """One damaged input: what to run, and what to compare after success."""

    what: str  # the damage
    work: Callable[[], int] | Sequence[str]  # or the arguments of a command
    judge: Callable[[int], str | None] = lambda code: None
    own_message: bool = False  # the command reports on stdout, also if it fails
    inputs: int = 1
    forks: bool = True  # the tokenising child, which costs half a second otherwise


Kind = Callable[[Any, random.Random, Path], Case]


@dataclass
class Finding:
    """An input that broke a rule."""

    kind: str
    number: int
    what: str
    problem: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.kind}:{self.number} ({self.what}): {self.problem}\n  kept in {self.folder}"


@dataclass
class Running:
    kind: str
    number: int
    case: Case
    folder: Path
    deadline: float


@dataclass
class Fuzzer:
    """Runs inputs in parallel children; `world` is what the kinds damage copies of."""

    world: Any
    kinds: dict[str, Kind]
    seed: int
    jobs: int = 2
    started: Counter[str] = field(default_factory=Counter)  # cases by kind
    given: Counter[str] = field(default_factory=Counter)  # inputs of these cases
    inputs: Counter[str] = field(default_factory=Counter)  # of those that have ended
    cpu: Counter[str] = field(default_factory=Counter)  # seconds
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)

    def found(self, problem: str) -> bool:
        return any(re.search(problem, finding.problem) for finding in self.findings)

    def run(self, seconds: float, *, most: int = 10**9, until: str = "(?!)") -> None:
        """Run for some time, up to so many inputs of each kind, or until a problem is found."""
        end = time.monotonic() + seconds
        outside = self.world.outside()
        gc.freeze()  # so that a child's collector touches, and copies, no page of this process
        while self.running or time.monotonic() < end:
            end = 0.0 if self.found(until) else end
            while len(self.running) < self.jobs and time.monotonic() < end:
                # All kinds get as many inputs, whatever one of them costs.
                name = min(self.kinds, key=lambda name: self.given[name])
                if self.started[name] < most:
                    self.start(name, self.started[name])
                else:
                    end = 0.0
            self._collect()
        if not self.findings and self.world.outside() != outside:
            raise AssertionError("files outside were changed, and no input was blamed for it")

    def start(self, name: str, number: int) -> None:
        folder = self.world.folder / "inputs" / f"{name}-{number}".replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        draw = random.Random(f"{self.seed}/{name}/{number}")
        case = self.kinds[name](self.world, draw, folder)
        self.started[name] += 1
        self.given[name] += case.inputs
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            _run_child(case, folder)
        self.running[child] = Running(name, number, case, folder, time.monotonic() + PATIENCE)

    def _collect(self) -> None:
        """Judge the children that have ended, once there is one; end those that are late."""
        handles = {os.pidfd_open(child): child for child in self.running}
        ended = select.select(list(handles), [], [], 1.0)[0]
        for handle, child in handles.items():
            os.close(handle)
            if handle in ended:
                _, status, used = os.wait4(child, 0)
                run = self.running.pop(child)
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # what the command has left behind
                self.cpu[run.kind] += used.ru_utime + used.ru_stime
                self._count(run, os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024)
            elif time.monotonic() > self.running[child].deadline:
                os.killpg(child, signal.SIGKILL)

    def _count(self, run: Running, code: int, memory: int) -> None:
        problem = self._problem(run, code, memory)
        self.inputs[run.kind] += run.case.inputs
        outcome = "finding" if problem else str(code)
        self.outcomes.setdefault(run.kind, Counter())[outcome] += run.case.inputs
        if problem:
            place = (run.kind, run.number, run.case.what, problem, run.folder)
            self.findings.append(Finding(*place))
            print(f"fuzz: {self.findings[-1]}", flush=True)
        else:
            shutil.rmtree(run.folder)

    def _problem(self, run: Running, code: int, memory: int) -> str | None:
        errors = _text(run.folder / STDERR)
        judged = _text(run.folder / JUDGED)
        if code < 0 and judged:
            return f"accepted with exit code {judged}, but the judge died of signal {-code}"
        if code < 0:
            late = -code in (signal.SIGKILL, signal.SIGXCPU)
            return "did not end in time" if late else f"died of signal {-code}"
        if "Traceback" in errors:
            return f"printed a traceback:\n{errors[-2000:]}"
        if code not in self.world.exit_codes:
            return f"ended with the undocumented exit code {code}:\n{errors[-2000:]}"
        if memory > MEMORY:
            return f"needed {memory >> 20} MiB"
        messages = sum(line.startswith(("rather: ", "Usage: ")) for line in errors.splitlines())
        if code and messages != 1 and not run.case.own_message:
            return f"exit code {code} came with {messages} messages:\n{errors[-2000:]}"
        if changed := self.world.changed():
            return f"changed files outside: {', '.join(changed)}"
        return _text(run.folder / COMPLAINT) or None

    def table(self) -> str:
        head = f"{'kind':<16}{'inputs':>7}{'CPU s each':>12}  outcomes (exit code: inputs)"
        lines = [head]
        for name in self.kinds:
            found = sorted(self.outcomes.get(name, {}).items())
            shown = ", ".join(f"{outcome}: {number}" for outcome, number in found)
            cost = self.cpu[name] / max(1, self.inputs[name])
            lines.append(f"{name:<16}{self.inputs[name]:>7}{cost:>12.2f}  {shown}")
        problems = Counter(
            finding.problem.split(":")[0].split("\n")[0] for finding in self.findings
        )
        for broken in ("printed a traceback", "died of signal", "did not end in time"):
            number = sum(count for text, count in problems.items() if text.startswith(broken))
            lines.append(f"inputs that {broken}: {number}")
        return "\n".join(lines)


class Forked:
    """Stands in for subprocess.Popen of rather.child: a fork, which has all imports."""

    def __init__(
        self, words: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **_: Any
    ) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.dup2(2, 1)
            for low, high in itertools.pairwise([2, *sorted(pass_fds), 1024]):
                os.closerange(low + 1, high)
            os.environ.clear()
            os.environ.update(env)
            import_module(words[4]).main(*map(int, words[5:]))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


def _run_child(case: Case, folder: Path) -> None:
    """Run the command and then the judge, which writes what it complains about to a file."""
    code = 1
    try:
        os.setsid()
        for number, name in ((1, STDOUT), (2, STDERR)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ["HOME"] = str(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for what, most in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, used + ADDRESSES)):
            resource.setrlimit(what, (most, resource.getrlimit(what)[1]))
        if case.forks:
            from rather import child

            standing_in = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
            child.subprocess = standing_in  # type: ignore[attr-defined]
        code = case.work() if callable(case.work) else command(case.work)
        sys.stdout.flush()
        sys.stderr.flush()
        (folder / JUDGED).write_text(str(code))
        try:
            complaint = case.judge(code)
        except Exception:
            complaint = f"the judge failed: {traceback.format_exc()}"
        (folder / COMPLAINT).write_text(complaint or "")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def command(arguments: Sequence[str]) -> int:
    """Run `rather` with these arguments in this process; return the exit code."""
    from rather import cli

    sys.argv = ["rather", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _text(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.exists() else ""


def main() -> int:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--minutes", type=float, default=10.0)
    asked.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked.add_argument("--most", type=int, default=10**9, help="inputs of each kind")
    asked.add_argument("--jobs", type=int, default=2)
    asked.add_argument("--kinds", nargs="+")
    asked.add_argument("--only", help="kind:number of one input")
    asked.add_argument(
        "--planted", choices=("first", "only", "no"), default="first", help="planted bugs"
    )
    asked.add_argument("--json", action="store_true", help="print the results as JSON at the end")
    given = asked.parse_args()
    # Before torch is imported: its threads would not survive a fork.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    from tests.fuzz.kinds import KINDS, World
    from tests.fuzz.planted import find_planted

    folder = Path(tempfile.mkdtemp(prefix="rather-fuzz-"))
    print(f"fuzz: seed {given.seed}, inputs in {folder}", flush=True)
    world, kinds = World(folder), {name: KINDS[name] for name in given.kinds or KINDS}
    began = time.monotonic()
    missed = []
    if given.planted != "no" and not given.only:
        missed = find_planted(world, given.seed, 20 * given.minutes)
    fuzzer = Fuzzer(world, kinds, given.seed, given.jobs)
    if given.only:
        name, _, number = given.only.partition(":")
        fuzzer.start(name, int(number))
        print(f"fuzz: {next(iter(fuzzer.running.values())).case}", flush=True)
    left = began + 60 * given.minutes - time.monotonic()
    fuzzer.run(0 if given.only or given.planted == "only" else left, most=given.most)
    total, found = sum(fuzzer.inputs.values()), len(fuzzer.findings)
    if given.planted != "only":
        print(fuzzer.table())
    took = time.monotonic() - began
    print(f"fuzz: seed {given.seed}: {total} inputs in {took:.0f} s, {found} findings")
    if given.json:
        outcomes = {name: dict(found) for name, found in fuzzer.outcomes.items()}
        print(json.dumps({"inputs": dict(fuzzer.inputs), "outcomes": outcomes, "findings": found}))
    if not found:
        shutil.rmtree(folder)
    return int(bool(found or missed))
