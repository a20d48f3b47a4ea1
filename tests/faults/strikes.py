"""Kills and stops of random processes at random times, on Ray and under torchrun.

python -m tests.faults.strikes --strikes 40 --seed 18

Unlike the faults of soak.py they come from outside, at any moment: SIGKILL, or SIGSTOP and some time
later SIGCONT. The same command is started until it ends well, and must then give the same bits.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tests.faults.fork_server import fork_server
from tests.faults.world import World

LAYOUTS = ("dp2", "ray")
MOST = 5  # strikes at one run
CODES = {0, 5, -signal.SIGKILL}  # of a process whose run lost one; 7 would be a hang


class Strikes:
    """Draws moments, victims and signals by its seed, and reports a line for every strike."""

    def __init__(self, world: World, seed: int, tell: Callable[[str], None]) -> None:
        self.world, self.draw, self.tell = world, random.Random(seed), tell
        self.struck: Counter[str] = Counter()

    def run(self, layout: str, strikes: int) -> None:
        """Strike so often, at one run after another; compare each with an uninterrupted one."""
        self.world.clean("one")  # so that the fork server is warm
        began = time.monotonic()
        expected = self.world.clean(layout)
        took = time.monotonic() - began
        while self.struck[layout] < strikes:
            run, left = self.world.run(layout), min(MOST, strikes - self.struck[layout])
            codes, aim = [1], self.struck[layout] + left
            while any(codes):
                ended, began = threading.Event(), time.monotonic()
                striker = threading.Thread(target=self._strike, args=(layout, aim, took, ended))
                striker.start()
                try:
                    codes = run.start()
                finally:
                    ended.set()
                    striker.join()
                # A driver may also be stopped while it connects, until Ray's patience has ended.
                expects = {*CODES, 2} if "no Ray cluster answers" in run.told() else CODES
                assert set(codes) <= expects, f"start {run.starts}: exit {codes}\n{run.told()}"
                assert run.starts <= 2 * MOST, f"{run.folder}: does not end\n{run.told()}"
                self.tell(f"{layout}: start {run.starts} ended with {codes}")
                if not any(codes):  # the first run has also started Ray
                    took = min(took, time.monotonic() - began)
            assert run.outcome() == expected, f"{run.folder}: differs from an uninterrupted run"

    def _strike(self, layout: str, aim: int, took: float, ended: threading.Event) -> None:
        """Strike during one start, until `aim` strikes are done in all."""
        while self.struck[layout] < aim and not ended.wait(self.draw.uniform(0, took)):
            victims = sorted(_processes(layout))
            if not victims:
                continue
            victim, kills = self.draw.choice(victims), self.draw.random() < 0.6
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL if kills else signal.SIGSTOP)
                self.struck[layout] += 1
                self.tell(f"{layout}: {'killed' if kills else 'stopped'} {victim}")
                if not kills:
                    ended.wait(self.draw.uniform(0.1, 3))
                    os.kill(victim, signal.SIGCONT)


def _processes(layout: str) -> Iterator[int]:
    """Yield the processes of the run: drivers, and on Ray the workers that have work."""
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
            if name.startswith(b"ray::") and b"IDLE" not in name and _is_below(child, parents):
                yield child


def _is_below(child: int, parents: dict[int, int]) -> bool:
    """Return whether a process descends from this one, which has started Ray."""
    while child in parents:
        child = parents[child]
        if child == os.getpid():
            return True
    return False


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--strikes", type=int, default=40)
    asked.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    given = asked.parse_args()
    world = World(Path(tempfile.mkdtemp(prefix="rather-strikes-")))
    strikes = Strikes(world, given.seed, lambda line: print(f"strikes: {line}", flush=True))
    try:
        for layout in given.layouts:
            strikes.run(layout, given.strikes // len(given.layouts))
    finally:
        world.close()
    print(f"strikes: seed {given.seed}: {dict(strikes.struck)}, the same bits each time")


if __name__ == "__main__":
    main()
