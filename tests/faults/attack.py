"""What soak.py and strikes.py share: runs that are broken until they end, and the command line."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from tests.faults.runs import Outcome, Run
from tests.faults.world import World

Report = Callable[[str], None]


class Attack:
    """Draws by its seed how runs are broken, and reports a line for every start."""

    def __init__(self, world: World, seed: int, report: Report) -> None:
        self.world, self.draw, self.report = world, random.Random(seed), report
        self.began, self.runs, self.struck = time.monotonic(), 0, 0

    def until_it_ends(
        self, run: Run, expected: Outcome, start: Callable[[], list[int]], most: Callable[[], int]
    ) -> None:
        """Start a run until it ends well, `most` times at most; compare it with the expected one."""

        def reported() -> list[int]:
            codes = start()
            passed = timedelta(seconds=round(time.monotonic() - self.began))
            self.report(
                f"{passed} run {self.runs} ({run.layout}), start {run.starts}: exit {codes}"
            )
            return codes

        run.repeat(reported, most)
        run.assert_like(expected)


@contextmanager
def command_line(
    name: str, description: str, layouts: Sequence[str], **number: float
) -> Iterator[tuple[World, argparse.Namespace, Report]]:
    """Read the options (a number, the seed, the layouts) and yield a world for their runs."""
    asked = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ((option, default),) = number.items()
    asked.add_argument(f"--{option}", type=type(default), default=default)
    asked.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked.add_argument("--layouts", nargs="+", choices=layouts, default=list(layouts))
    given = asked.parse_args()

    def report(line: str) -> None:
        print(f"{name}: {line}", flush=True)

    folder = Path(tempfile.mkdtemp(prefix=f"rather-{name}-"))
    report(f"seed {given.seed}, {getattr(given, option)} {option}, runs in {folder}")
    world = World(folder)
    try:
        yield world, given, report
    finally:
        world.close()
    shutil.rmtree(folder)  # kept for a look after a failure
