"""`make soak`: random faults over many starts; each run must end like an uninterrupted one.

python -m tests.faults.soak --minutes 60 --seed 7
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import cycle
from pathlib import Path

from tests.faults.inject import PHASES, ROLES
from tests.faults.points import COLD, FOLLOWING, steps_of
from tests.faults.runs import LAYOUTS, Run
from tests.faults.world import World

KINDS = {
    "kill": 6,
    "raise": 2,
    "enospc": 1,
    "slow": 1,
}  # and how often. A NaN may change what is trained, on purpose
MOST = 12  # faults of one run


class Soak:
    """Draws faults by its seed and tells a line for every start."""

    def __init__(self, world: World, seed: int, tell: Callable[[str], None]) -> None:
        self.world, self.draw, self.tell = world, random.Random(seed), tell
        self.began, self.runs, self.struck = time.monotonic(), 0, 0

    def run(self, layout: str, faults: int) -> None:
        """One run with so many faults, most of which will strike; started until it ends."""
        self.runs += 1
        changes = self.draw.choice([{}, FOLLOWING, COLD])
        expected = self.world.clean(layout, changes)
        run = self.world.run(layout, changes)
        drawn = ";".join(self._fault(layout) for _ in range(faults))
        self.tell(f"run {self.runs} ({layout}): {drawn}")
        while any(self._start(run, drawn)):
            assert run.starts <= run.struck(), (
                f"no fault struck, and start {run.starts} ended so:\n{run.told()}"
            )
        self.struck += run.struck()
        assert run.outcome() == expected, f"{run.folder}: is not as the run that nobody broke"

    def _start(self, run: Run, drawn: str) -> list[int]:
        codes = run.start(drawn)
        passed = timedelta(seconds=round(time.monotonic() - self.began))
        self.tell(
            f"{passed} run {self.runs}, start {run.starts}: exit {codes}, {run.struck()} faults have struck"
        )
        return codes

    def _fault(self, layout: str) -> str:
        draw = self.draw
        words = {
            "phase": draw.choice(list(PHASES)),
            "kind": draw.choices(list(KINDS), list(KINDS.values()))[0],
        }
        if steps := steps_of(words["phase"]):
            words["step"] = str(draw.choice(steps))
        if layout == "dp2" and draw.random() < 0.5:
            words["rank"] = draw.choice("01")
        if layout == "ray" and words["phase"] in ("forward", "save.write"):
            words["role"] = draw.choice(ROLES[1:])
        if (
            words["phase"] in ("forward", "backward", "save.write", "save.write.sync")
            and draw.random() < 0.5
        ):
            words["visit"] = str(draw.randint(2, 4))
        if words["kind"] == "slow":
            words["seconds"] = "0.5"
        return ",".join(f"{key}={value}" for key, value in words.items())


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--minutes", type=float, default=60.0)
    asked.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    given = asked.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rather-soak-"))
    print(f"soak: seed {given.seed}, {given.minutes:g} minutes, runs in {folder}", flush=True)
    world = World(folder)
    soak = Soak(world, given.seed, lambda line: print(f"soak: {line}", flush=True))
    try:
        for layout in cycle(given.layouts):
            if time.monotonic() - soak.began > 60 * given.minutes:
                break
            soak.run(layout, soak.draw.randint(1, MOST))
    finally:
        world.close()
    print(
        f"soak: {soak.runs} runs, {soak.struck} faults struck, every run ended as the one that nobody broke"
    )


if __name__ == "__main__":
    main()
