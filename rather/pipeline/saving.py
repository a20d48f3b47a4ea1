"""Checkpoints of a run: what each contains in addition to the workers' state, and how to resume.

The state is captured at a step. If there is memory for a copy, writing, publishing, pruning and
copying happen in the background while training continues. The next save, the end of the run and
everything that reads checkpoints wait.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint, Draft
from rather.checkpoint.manifest import Written
from rather.checkpoint.store import Store, Uploads
from rather.cluster.bridge import ReferenceApart
from rather.cluster.launch import Role, Roles
from rather.cluster.preflight import remove_trial_folders
from rather.config.schema import StepKeys
from rather.errors import (
    CheckpointError,
    DiskError,
    HangError,
    WorkerError,
)
from rather.pipeline.checks import refuse_other_run
from rather.pipeline.progress import Progress
from rather.run_folder.layout import (
    RESULTS,
    STORED_FILES,
    Incidents,
    RunFolder,
)
from rather.run_folder.names import FINISHED
from rather.tracking.json_lines import MetricsPosition

log = logging.getLogger(__name__)

TOTAL_STEPS = "optimizer steps"  # in the schedule of a checkpoint
GRACE = 60.0  # seconds in which workers may finish a save after a run has failed


class Saving:
    """Saves and restores checkpoints: the main driver publishes, every rank writes its part."""

    def __init__(
        self,
        folder: RunFolder,
        keys: StepKeys,
        roles: Roles,
        identity: Mapping[str, Any],
        schedule: Mapping[str, Any],
        *,
        moves_reference: bool,
        store: str | None,
        first_bytes: int,
        deadline: float,
    ) -> None:
        """Save to a folder, and to the address of an object store if there is one.

        - `schedule`: settings that may change at a resume; a change is logged.
        - `first_bytes`: the size of the first checkpoint, as far as it is known.
        - `deadline`: the seconds in which all ranks write their parts.
        """
        self.folder, self.keys, self.roles = folder, keys, roles
        self.identity, self.schedule = dict(identity), dict(schedule)
        self.run_dir, self.total_steps = folder.path, self.schedule[TOTAL_STEPS]
        self.store, self.deadline = store, deadline
        self.moving_reference: Role | None = roles.reference if moves_reference else None
        self.last_saved: int | None = None
        self.has_own = False  # the run folder has a checkpoint to roll back to
        # Why consecutive saves found no space, by folder.
        self.misses: dict[Path, list[str]] = {self.run_dir: [], folder.copies: []}
        self._bytes = first_bytes  # later those of the last checkpoint
        self._is_written = True  # by every rank
        self._no_more_notes = math.inf  # from this time on
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._abandoned = threading.Event()
        self._uploads: Uploads | None = None
        self._not_uploaded: list[Path] = []
        if roles.is_main and store:
            add_incident = Incidents(self.run_dir).add
            where = Store(store), self.run_dir, STORED_FILES
            self._uploads = Uploads(*where, keys.max_ckpt_to_keep, add_incident)

    # --- resuming ---

    def to_resume(self) -> Checkpoint | None:
        """Return the verified checkpoint that this run continues. All drivers call this."""
        newest = None
        if self.roles.is_main:
            checkpoint.clean(self.run_dir)  # a run that saves no more would never do it
            remove_trial_folders(self.run_dir)
            if self._uploads and not self.folder.named:
                self._uploads.begin(overwrite=self.folder.overwrite)
            newest = self.folder.checkpoint_to_resume()
        if newest:
            refuse_other_run(newest, self.identity, self.keys.resume.allow)
            if self._uploads and newest.path.parent == self.run_dir:
                self._uploads.add(newest.path, newest.step)
        return self._shared(newest)

    def newest(self) -> Checkpoint | None:
        """Return the newest good checkpoint of the run folder, to roll back to."""
        self.wait()
        return self._shared(checkpoint.newest_good(self.run_dir) if self.roles.is_main else None)

    def _shared(self, newest: Checkpoint | None) -> Checkpoint | None:
        """Return the main driver's checkpoint on every driver."""
        path = self.roles.broadcast(newest and newest.path)
        return newest if self.roles.is_main or path is None else checkpoint.reopen(path)

    def is_finished(self, newest: Checkpoint) -> bool:
        # If the number of steps is unknown, only the end of the pairs leaves the file FINISHED.
        early = newest.state["progress"]["stopped_early"]
        ended = newest.step >= (self.total_steps or 0) or early
        return ended and (self.run_dir / FINISHED).exists()

    def restore(self, newest: Checkpoint) -> Progress:
        """Load a checkpoint into the workers and return the progress stored in it."""
        run_dir = self.run_dir
        self.last_saved = newest.step
        self.has_own = newest.path.parent.resolve() == run_dir.resolve()
        name = newest.path.name.removeprefix(".old-")
        if self.has_own and self.roles.is_main and checkpoint.latest_name(run_dir) != name:
            # A run that went back to an earlier step must not find a later checkpoint again.
            checkpoint.write_latest(run_dir, name)
        self.roles.actor_train.read_state(newest.path, newest.state["trainer"])
        if self.moving_reference and "reference" in newest.groups:  # else it moves from now on
            self.moving_reference.mix_weights(newest.path, 1.0)
        for key, (before, now) in self.schedule_changes(newest).items():
            log.info("%s was %s until now and is %s from here on", key, before, now)
        log.info("resuming %s from step %d of %s", newest.path, newest.step, self.total_steps)
        return Progress.of(newest.state["progress"], newest.state["trainer"]["updates"])

    # --- saving ---

    def save(
        self, state: Mapping[str, Any], step: int, sync_files: Callable[[], MetricsPosition]
    ) -> None:
        """Save a checkpoint of the state as it is now.

        `state` is what the loop knows. `sync_files` writes the files that the checkpoint relies on
        to the disk, and returns the position in metrics.jsonl. If the disk is full the run continues
        without this checkpoint, and the next save that is due tries again.
        """
        self.wait()
        draft, stored = None, {}
        if self.roles.is_main:
            try:
                draft = checkpoint.Draft(self.run_dir, step, self._bytes)
                with draft.removed_on_error():
                    stored = {**state, **sync_files()._asdict()}
                    stored |= {"identity": self.identity, "schedule": self.schedule}
            except DiskError as error:
                draft = None
                self._report_missed(self.run_dir, step, error)
        folder = self.roles.broadcast(draft.folder if draft else None)
        if folder is None:
            return
        stored["trainer"] = self.roles.actor_train.numbers()
        self._is_written, self._no_more_notes = False, math.inf
        self.roles.actor_train.write_state(folder)
        if self.moving_reference:
            self.moving_reference.write_state(folder)
        if self.keys.checkpoint_config.async_save == "off":
            self._finish_writing()
            if draft:
                self._publish(draft, stored)
        elif draft:
            self._thread = threading.Thread(
                target=self._publish_in_background, args=(draft, stored), name="save", daemon=True
            )
            self._thread.start()

    def wait(self, *, last: bool = False) -> None:
        """Wait for the save in progress. Raises after too many misses; the `last` save must not
        miss.

        All drivers call this.
        """
        self._finish_writing()
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failure:
            raise self._failure
        most = 1 if last else self.keys.checkpoint_config.max_missed_saves
        failing = [reasons[-1] for reasons in self.misses.values() if len(reasons) >= most]
        if reason := self.roles.broadcast(failing[0] if failing else None):
            raise DiskError(reason)

    def _finish_writing(self) -> None:
        """Wait until every rank has written its part and its note, or could write neither."""
        if self._is_written:
            return
        # A worker that died meanwhile is noticed here; its note would be awaited to a deadline.
        self._is_written = True
        self.roles.actor_train.finish_writing()
        if self.moving_reference:
            self.moving_reference.finish_writing()
        self.roles.max_over_drivers(0)
        # A shared file system may show a note of another machine later.
        self._no_more_notes = time.monotonic() + (0.0 if self.roles.one_machine else GRACE)

    def close(self) -> None:
        """Finish the save in progress, unless the workers that write it may be gone."""
        if self.roles.drivers > 1 or isinstance(sys.exception(), WorkerError | HangError):
            self._abandoned.set()
        if self._thread:
            self._finish_writing()
            self._thread.join(None if self.roles.one_machine else GRACE)
            self._abandoned.set()
            self._thread.join()
            self._thread = None
        if self._uploads:
            self.upload_results()
            self._not_uploaded = self._uploads.close()

    def upload_problem(self) -> str:
        """Return what is not in the object store after the last attempt; "" if all of it is."""
        if not self._not_uploaded:
            return ""
        names = ", ".join(folder.name for folder in self._not_uploaded)
        return (
            f"{self.store}: the last upload of {names} failed (see MISSED UPLOAD "
            f"above). {self.run_dir} has it; run the same command again to upload it."
        )

    def upload_results(self) -> None:
        """Upload the exported models and adapters, if there is an object store for them."""
        for folder in (self.run_dir / name for name in RESULTS):
            if self._uploads and folder.is_dir():
                self._uploads.add(folder, self.last_saved or 0)

    def _is_over(self) -> bool:
        return self._abandoned.is_set() or time.monotonic() >= self._no_more_notes

    def _publish_in_background(self, *args: Any) -> None:
        try:
            self._publish(*args)
        except BaseException as error:  # raised by the next call that waits
            self._failure = error

    def _publish(self, draft: Draft, state: Mapping[str, Any]) -> None:
        """Wait for the parts of all ranks, publish the checkpoint, prune old ones, copy it."""
        copies, keep = self.folder.copies, self.keys.max_ckpt_to_keep
        spared = self.folder.named  # never pruned: the same command resumes from it

        def collect() -> Written:
            options = self.deadline, self._is_over
            written = checkpoint.collect_parts(draft.folder, self._writers(), *options)
            self._bytes = sum(size for size, _ in written.values())
            return written

        try:
            path = draft.complete(collect, state)
        except DiskError as error:
            if not self._abandoned.is_set():
                self._report_missed(self.run_dir, draft.step, error)
            return
        self.last_saved = draft.step
        self.misses[self.run_dir].clear()
        uploading = None
        if self._uploads:
            self._uploads.add(path, draft.step)
            uploading = self._uploads.current
        checkpoint.prune(self.run_dir, keep, spared, uploading)
        if copies != self.run_dir:
            try:
                checkpoint.copy_to(path, copies)
                self.misses[copies].clear()
                checkpoint.prune(copies, keep, spared)
            except (OSError, DiskError, CheckpointError) as error:
                self._report_missed(copies, draft.step, error)

    def _report_missed(self, folder: Path, step: int, error: Exception) -> None:
        misses, most = self.misses[folder], self.keys.checkpoint_config.max_missed_saves
        misses.append(str(error))
        facts = {"folder": str(folder), "in_a_row": len(misses), "reason": str(error)}
        Incidents(self.run_dir).add("missed_save", step, **facts)
        text = "MISSED SAVE at step %d, %d in a row of at most %d: %s"
        log.warning(text, step, len(misses), most, error)

    def _writers(self) -> list[str]:
        """Return the names under which the ranks leave notes of what they have written."""
        ranks = {"actor_train": self.roles.drivers}
        if isinstance(self.moving_reference, ReferenceApart):
            ranks["reference"] = self.moving_reference.layout.devices
        elif self.moving_reference:
            ranks["reference"] = self.roles.drivers
        return [f"{name}-{rank:05d}" for name, count in ranks.items() for rank in range(count)]

    def schedule_changes(self, newest: Checkpoint) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ from those of a checkpoint: then, and now."""
        before = newest.state["schedule"]
        now = self.schedule
        return {key: (before.get(key), now[key]) for key in now if before.get(key) != now[key]}
