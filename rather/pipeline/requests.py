"""Requests to stop or save: signals to any process of a run, `rather stop`, `rather save-now`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rather.cluster.launch import Roles
from rather.pipeline.progress import RunState
from rather.run_folder import control


@dataclass
class Requests:
    """What was asked of the run. All processes agree on it when they `poll`."""

    run_dir: Path | None  # None: no other shell can ask
    roles: Roles
    state: RunState
    stop: control.StopRequest = field(default_factory=control.StopRequest)

    def poll(self) -> bool:
        """Read new requests, agree on them with all processes, and return whether to stop."""
        self.read()
        self.stop.agree(self.roles.max_over_drivers(self.stop.asked))
        return self.stop.stops

    def after_step(self, counts: Sequence[int]) -> bool:
        """Return whether to stop; several processes have exchanged their requests in the step.

        `counts` is empty if a user's worker has made the result of the step.
        """
        if self.roles.drivers == 1 or not counts:
            return self.poll()
        self.stop.agree_on(counts)
        return self.stop.stops

    def flags(self) -> list[int]:
        """Read new requests; return one flag for each kind, for the numbers of a step."""
        self.read()
        return self.stop.flags

    def read(self) -> None:
        """Take the requests that other shells have left in the run folder."""
        if self.run_dir is None or not self.roles.is_main:
            return
        request = control.take_requests(self.run_dir, self.state.progress.step)
        if request == control.STOP:
            self.stop.end()
        elif request:
            self.stop.save_now = True
