"""`make soak`: random faults over many starts; each run must end like an uninterrupted one.

python -m tests.faults.soak --minutes 60 --seed 7
"""

from __future__ import annotations

import time
from itertools import cycle

from tests.faults.attack import Attack, command_line
from tests.faults.inject import PHASES, ROLES
from tests.faults.points import COLD, FOLLOWING, steps_of
from tests.faults.runs import LAYOUTS

# How often each kind is drawn. A NaN may change what is trained, on purpose.
KINDS = {"kill": 6, "raise": 2, "enospc": 1, "slow": 1}
MOST = 12  # faults of one run


class Soak(Attack):
    """Attaches faults to places of a run."""

    def run(self, layout: str, faults: int) -> None:
        """One run with so many faults, most of which will strike; started until it ends."""
        self.runs += 1
        changes = self.draw.choice([{}, FOLLOWING, COLD])
        expected = self.world.clean(layout, changes)
        run = self.world.run(layout, changes)
        drawn = ";".join(self._fault(layout) for _ in range(faults))
        self.report(f"run {self.runs} ({layout}): {drawn}")
        self.until_it_ends(run, expected, lambda: run.start(drawn), run.struck)
        self.struck += run.struck()

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
    with command_line("soak", str(__doc__), list(LAYOUTS), minutes=60.0) as (world, given, report):
        soak = Soak(world, given.seed, report)
        for layout in cycle(given.layouts):
            if time.monotonic() - soak.began > 60 * given.minutes:
                break
            soak.run(layout, soak.draw.randint(1, MOST))
        report(
            f"seed {given.seed}: {soak.runs} runs, {soak.struck} faults struck, every run ended "
            "like an uninterrupted one"
        )


if __name__ == "__main__":
    main()
