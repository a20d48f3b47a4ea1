"""Kills and stops of random processes at random times, on Ray and under torchrun.

python -m tests.faults.strikes --strikes 40 --seed 18

Unlike the faults of soak.py they come from outside, at any moment: SIGKILL, or SIGSTOP and some time
later SIGCONT. The same command is started until it ends well, and must then give the same bits.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.faults.attack import Attack, command_line
from tests.faults.fork_server import fork_server
from tests.faults.runs import Run

LAYOUTS = ("dp2", "ray")
MOST = 5  # strikes at one run
CODES = {0, 5, -signal.SIGKILL}  # of a process whose run lost one; 7 would be a hang


class Strikes(Attack):
    """Draws moments, victims and signals, and reports every strike."""

    def run(self, layout: str, strikes: int) -> None:
        """Strike so often, at one run after another; compare each with an uninterrupted one."""
        self.world.clean("one")  # so that the fork server is warm
        began = time.monotonic()
        expected = self.world.clean(layout)
        self.took = time.monotonic() - began
        end = self.struck + strikes
        while self.struck < end:
            self.runs += 1
            run, aim = self.world.run(layout), min(self.struck + MOST, end)
            self.until_it_ends(
                run, expected, lambda run=run, aim=aim: self._start(run, aim), lambda: 2 * MOST
            )

    def _start(self, run: Run, aim: int) -> list[int]:
        """Start a run and strike meanwhile, until `aim` strikes are done in all."""
        ended, began = threading.Event(), time.monotonic()
        striker = threading.Thread(target=self._strike, args=(run.layout, aim, ended))
        striker.start()
        try:
            codes = run.start()
        finally:
            ended.set()
            striker.join()
        # A driver may also be stopped while it connects, until Ray's patience has ended.
        expects = {*CODES, 2} if "no Ray cluster answers" in run.output() else CODES
        assert set(codes) <= expects, f"start {run.starts}: exit {codes}\n{run.output()}"
        if not any(codes):  # the first run has also started Ray
            self.took = min(self.took, time.monotonic() - began)
        return codes

    def _strike(self, layout: str, aim: int, ended: threading.Event) -> None:
        while self.struck < aim and not ended.wait(self.draw.uniform(0, self.took)):
            victims = sorted(processes(layout))
            if not victims:
                continue
            victim, kills = self.draw.choice(victims), self.draw.random() < 0.6
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL if kills else signal.SIGSTOP)
                self.struck += 1
                self.report(f"{layout}: {'killed' if kills else 'stopped'} {victim}")
                if not kills:
                    ended.wait(self.draw.uniform(0.1, 3))
                    os.kill(victim, signal.SIGCONT)


def processes(layout: str) -> Iterator[int]:
    """Yield the processes of the run: drivers, and on Ray the workers that have work.

    Not Ray's own agents: the node ends with them, and all runs share it.
    """
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(folder.name)] = int(parent)
    server = fork_server()._process.pid
    yield from (child for child, parent in parents.items() if parent == server)
    for child in parents if layout == "ray" else ():
        with suppress(OSError):
            name = Path(f"/proc/{child}/cmdline").read_bytes()
            has_work = name.startswith(b"ray::") and b"IDLE" not in name and b"Agent" not in name
            if has_work and _is_below(child, parents):
                yield child


def _is_below(child: int, parents: dict[int, int]) -> bool:
    """Return whether a process descends from this one, which has started Ray."""
    while child in parents:
        child = parents[child]
        if child == os.getpid():
            return True
    return False


def main() -> None:
    with command_line("strikes", str(__doc__), LAYOUTS, strikes=40) as (world, given, report):
        strikes = Strikes(world, given.seed, report)
        for layout in given.layouts:
            strikes.run(layout, given.strikes // len(given.layouts))
        report(f"seed {given.seed}: {strikes.struck} strikes, the same bits each time")


if __name__ == "__main__":
    main()
