"""Shared runs, uninterrupted reference runs, and a Ray that starts on first use."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from tests.faults.runs import Outcome, Run
from tests.tiny import make_config

SLOTS = 8


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clean: dict[str, Outcome] = {}
        self._numbers = count(1)
        self._ray: Any = None
        self._ray_folder = Path()
        make_config(folder)  # the model and its pairs

    def run(self, layout: str, changes: dict[str, Any] | None = None, name: str = "") -> Run:
        """A run that was never started."""
        given: dict[str, Any] = {"changes": {}, "environment": {}}
        if layout == "ray":
            given = self._on_ray()
        name = name or f"run-{next(self._numbers)}-{layout}"
        return Run(
            self.folder / name,
            layout,
            {**given["changes"], **(changes or {})},
            given["environment"],
        )

    def clean(self, layout: str, changes: dict[str, Any] | None = None) -> Outcome:
        """What the run gives that nobody breaks."""
        kind = _kind(layout, changes)
        if kind not in self._clean:
            whole = self.run(layout, changes, kind)
            whole.until_it_ends("")
            self._clean[kind] = whole.outcome()
        return self._clean[kind]

    def ended(self, layout: str, changes: dict[str, Any] | None = None) -> Run:
        """A copy of that run, all done, which was started nowhere."""
        self.clean(layout, changes)
        run = self.run(layout, changes)
        shutil.copytree(
            self.folder / _kind(layout, changes),
            run.folder,
            ignore=shutil.ignore_patterns("starts"),
        )
        return run

    def close(self) -> None:
        if self._ray:
            self._ray.shutdown()
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    def _on_ray(self) -> dict[str, Any]:
        """What a driver needs to find the Ray that all runs share."""
        from rather.cluster.resources import connected, private_folder

        if not self._ray:
            self._ray_folder = private_folder()
            self._ray, _ = connected(None, SLOTS, self._ray_folder)
        environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        return {
            "changes": {"ray__address": self._ray.get_runtime_context().gcs_address},
            "environment": environment,
        }


def _kind(layout: str, changes: dict[str, Any] | None) -> str:
    return "-".join(["clean", layout, *sorted(changes or {})])
