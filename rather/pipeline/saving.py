"""Checkpoints of a run: what each holds beside the workers' state, and how the run goes on from one.

The state is taken at a step; writing, publishing, pruning and copying go on beside training where there is memory for a
copy. The next save, the end of the run and everything that reads checkpoints wait for it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather import faults
from rather.checkpoint import checkpoint
from rather.checkpoint.checkpoint import Checkpoint, Draft
from rather.checkpoint.manifest import Written
from rather.cluster.launch import Roles, mappings
from rather.cluster.role import Role
from rather.config.schema import DPOConfig
from rather.errors import CheckpointError, DiskError, HangError, WorkerError
from rather.pipeline.identity import refuse_other_run
from rather.pipeline.progress import Progress
from rather.plan.disk import checkpoint_bytes
from rather.plan.state import stored_shapes
from rather.run_folder.incidents import Incidents
from rather.run_folder.layout import FINISHED, checkpoint_to_resume

log = logging.getLogger(__name__)

GRACE = 60.0  # seconds in which workers may finish a save after a run has failed


@dataclass
class Misses:
    """Saves in a row that one folder had no room for."""

    folder: Path
    count: int = 0
    last: str = ""


class Saving:
    """The leading driver decides and completes; all that hold a part of the state write theirs."""

    def __init__(
        self,
        config: DPOConfig,
        roles: Roles,
        identity: dict[str, Any],
        total_steps: int,
        named: Path | None,
    ) -> None:
        """`named`: the checkpoint that the same command would go on from once more, however old it is."""
        self.config, self.roles, self.identity, self.total_steps = (
            config,
            roles,
            identity,
            total_steps,
        )
        self.named = named
        self.last_saved: int | None = None
        self.has_own = False  # in its own folder there is one to go back to
        self.incidents = Incidents(config.run_dir)
        self.misses = Misses(config.run_dir)
        self.missed_copies = Misses(config.checkpoint_copy_dir)
        self._bytes: int | None = None  # of the last checkpoint
        self._is_written = True  # by all that hold a part of it
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None
        self._over = threading.Event()

    # --- going on from one ---

    def to_resume(self) -> Checkpoint | None:
        """The leading driver looks for it and verifies it."""
        if self.roles.is_main:
            checkpoint.clean(self.config.run_dir)  # a run that saves no more would leave it there
        newest = checkpoint_to_resume(self.config) if self.roles.is_main else None
        if newest:
            refuse_other_run(newest, self.identity, self.config.resume.allow)
        path = self.roles.broadcast(newest.path if newest else None)
        return newest if self.roles.is_main or path is None else checkpoint.reopen(path)

    def newest(self) -> Checkpoint | None:
        """The newest good one of the run folder, to go back to."""
        self.wait()
        newest = checkpoint.newest_good(self.config.run_dir) if self.roles.is_main else None
        path = self.roles.broadcast(newest.path if newest else None)
        return newest if self.roles.is_main or path is None else checkpoint.reopen(path)

    def is_finished(self, newest: Checkpoint) -> bool:
        ended = newest.step >= self.total_steps or newest.state["progress"]["stopped_early"]
        return ended and (self.config.run_dir / FINISHED).exists()

    def restore(self, newest: Checkpoint) -> Progress:
        """Brings the workers to where the checkpoint was saved."""
        roles, before = self.roles, newest.state["schedule"]
        self.last_saved = newest.step
        self.has_own = newest.path.parent.resolve() == self.config.run_dir.resolve()
        if self.has_own and roles.is_main:
            self._give_up_later_ones(newest)
        roles.actor_train.read_state(newest.path, newest.state["trainer"])
        if (
            roles.reference and self.config.sync_ref_model and "reference" in newest.groups
        ):  # else it moves from now on
            roles.reference.mix_weights(newest.path, 1.0)
        for key, value in self._schedule().items():
            if before.get(key) != value:
                log.info("%s was %s up to here and is %s from now on", key, before.get(key), value)
        log.info("continuing %s from step %d of %d", newest.path, newest.step, self.total_steps)
        return Progress.of(newest.state["progress"])

    def _give_up_later_ones(self, newest: Checkpoint) -> None:
        """A run that went back to an earlier step must not find a later one again, should it go back once more."""
        name = newest.path.name.removeprefix(".old-")
        if checkpoint.latest_name(self.config.run_dir) != name:
            checkpoint.write_latest(self.config.run_dir, name)

    # --- saving ---

    def save(self, progress: Progress, metrics_bytes: Callable[[], int]) -> None:
        """Takes the state as it is now. `metrics_bytes` brings the files that it relies on to the disk.

        A disk without room costs this checkpoint, not the run: the next one that is due tries again.
        """
        self.wait()
        draft, state = None, {}
        if self.roles.is_main:
            try:
                draft = checkpoint.begin(self.config.run_dir, progress.step, self._needed())
                with draft.or_nothing():
                    state = self._state(progress, metrics_bytes())
            except DiskError as error:
                draft = None
                self._missed(self.misses, progress.step, error)
        folder = self.roles.broadcast(draft.folder if draft else None)
        if folder is None:
            return
        state["trainer"] = self.roles.actor_train.numbers()
        self._is_written = False
        self.roles.actor_train.write_state(folder)
        if self._moving_reference:
            self._moving_reference.write_reference(folder)
        if draft:
            self._complete(draft, state)

    def wait(self, *, last: bool = False) -> None:
        """For the save that is under way. Ends the run after too many misses; the `last` one must not miss.

        All drivers come here.
        """
        self._finish_writing()
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._bug:
            raise self._bug
        failing = [
            each
            for each in (self.misses, self.missed_copies)
            if each.count >= self._most(last=last)
        ]
        if told := self.roles.broadcast(failing[0].last if failing else None):
            raise DiskError(told)

    def _finish_writing(self) -> None:
        """One who died meanwhile is noticed here; whoever waits for its note would do so until a deadline."""
        if self._is_written:
            return
        self._is_written = True
        self.roles.actor_train.finish_writing()
        if self._moving_reference:
            self._moving_reference.finish_writing()
        self.roles.max_over_drivers(0)

    @property
    def _moving_reference(self) -> Role | None:
        return self.roles.reference if self.config.sync_ref_model else None

    def close(self) -> None:
        """At the end, whatever ended the run. A save is finished, unless those who write it may be gone."""
        if self.roles.drivers > 1 or isinstance(sys.exception(), WorkerError | HangError):
            self._over.set()
        if self._thread:
            self._thread.join(None if self.roles.here else GRACE)
            self._over.set()
            self._thread.join()
            self._thread = None

    def _most(self, *, last: bool) -> int:
        return 1 if last else self.config.checkpoint_config.max_missed_saves

    def _complete(self, draft: Draft, state: dict[str, Any]) -> None:
        if self.config.checkpoint_config.async_save == "off":
            self._completed(draft, state)
            return
        step = faults.step()

        def work() -> None:
            faults.at_step(step)
            try:
                self._completed(draft, state)
            except BaseException as error:  # told to the next one who waits
                self._bug = error

        self._thread = threading.Thread(target=work, name="save", daemon=True)
        self._thread.start()

    def _completed(self, draft: Draft, state: dict[str, Any]) -> None:
        seconds = self.config.timeouts.save

        def collected() -> Written:
            written = checkpoint.collected(
                draft.folder, self._writers(), seconds, self._over.is_set
            )
            self._bytes = sum(size for size, _ in written.values())
            return written

        try:
            path = draft.completed(collected, state)
        except DiskError as error:
            if not self._over.is_set():
                self._missed(self.misses, draft.step, error)
            return
        self.last_saved, self.misses.count = draft.step, 0
        checkpoint.prune(self.config.run_dir, self.config.max_ckpt_to_keep, self.named)
        if self.config.checkpoint_config.output_dir:
            self._copy(path, draft.step)
        faults.point("save.done")

    def _copy(self, path: Path, step: int) -> None:
        """Its failure does not touch the checkpoint itself."""
        folder = self.config.checkpoint_copy_dir
        try:
            checkpoint.copy_to(path, folder)
            self.missed_copies.count = 0
            checkpoint.prune(folder, self.config.max_ckpt_to_keep, self.named)
        except (OSError, DiskError, CheckpointError) as error:
            self._missed(self.missed_copies, step, error)

    def _missed(self, misses: Misses, step: int, error: Exception) -> None:
        misses.count, misses.last = misses.count + 1, str(error)
        most = self._most(last=False)
        self.incidents.add(
            "missed_save",
            step,
            folder=str(misses.folder),
            in_a_row=misses.count,
            reason=misses.last,
        )
        log.warning(
            "MISSED SAVE at step %d, %d in a row of at most %d: %s", step, misses.count, most, error
        )

    def _needed(self) -> int:
        """Bytes of a checkpoint: as many as the last one had, before that by the number of weights."""
        if self._bytes is None:
            actor = self.config.actor_train
            shapes = stored_shapes(actor.model_path, actor.model_args.revision) or {}
            self._bytes = checkpoint_bytes(self.config, shapes)
        return self._bytes

    def _writers(self) -> list[str]:
        policy, reference = mappings(self.config)
        names = [f"actor_train-{rank:05d}" for rank in range(len(policy))]
        if self._moving_reference:
            names += [f"reference-{rank:05d}" for rank in range(len(reference))]
        return names

    def _state(self, progress: Progress, metrics_bytes: int) -> dict[str, Any]:
        """All but the workers' own."""
        return {
            "progress": progress.saved(),
            "metrics_bytes": metrics_bytes,
            "identity": self.identity,
            "schedule": self._schedule(),
        }

    def _schedule(self) -> dict[str, Any]:
        """What may change at a resume, and is told when it does."""
        actor = self.config.actor_train
        free = {"max_grad_norm": self.config.max_grad_norm, "dtype": actor.model_args.dtype}
        return {
            "optimizer steps": self.total_steps,
            **actor.training_args.model_dump(mode="json"),
            **free,
        }
