"""Checkpoints of a run: what each holds beside the workers' state, and how the run goes on from one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rather import checkpoint
from rather.checkpoint import Checkpoint
from rather.cluster.launch import Roles
from rather.cluster.worker import ActorWorker
from rather.config.schema import DPOConfig
from rather.run.progress import Progress
from rather.run_folder import FINISHED, checkpoint_to_resume

log = logging.getLogger(__name__)


class Saving:
    """The leading driver decides and writes; all that hold a part of the state write theirs."""

    def __init__(self, config: DPOConfig, roles: Roles, identity: dict[str, Any], total_steps: int) -> None:
        self.config, self.roles, self.identity, self.total_steps = config, roles, identity, total_steps

    def to_resume(self) -> Checkpoint | None:
        """The leading driver looks for it and verifies it."""
        newest = checkpoint_to_resume(self.config, self.identity) if self.roles.leads else None
        path = self.roles.told(newest.path if newest else None)
        return newest if self.roles.leads or path is None else checkpoint.reopen(path)

    def is_finished(self, newest: Checkpoint) -> bool:
        ended = newest.step >= self.total_steps or newest.state["progress"]["stopped_early"]
        return ended and (self.config.run_dir / FINISHED).exists()

    def restore(self, newest: Checkpoint) -> Progress:
        """Brings the workers to where the checkpoint was saved."""
        roles, before = self.roles, newest.state["schedule"]
        roles.actor_train.read_state(newest.path, newest.state["trainer"])
        if roles.reference and self.config.sync_ref_model:
            roles.reference.mix_weights(newest.path, 1.0)
        for key, value in self._schedule().items():
            if before.get(key) != value:
                log.info("%s was %s up to here and is %s from now on", key, before.get(key), value)
        log.info("continuing %s from step %d of %d", newest.path, newest.step, self.total_steps)
        return Progress.of(newest.state["progress"])

    def write(self, progress: Progress, metrics_bytes: int) -> Path | None:
        """The new checkpoint; None from a driver that only wrote its part."""
        groups, numbers, ranks = self._state()
        if not self.roles.leads:
            self._write_pieces(None)
            return None
        state = {
            "progress": progress.saved(),
            "trainer": numbers,
            "metrics_bytes": metrics_bytes,
            "identity": self.identity,
            "schedule": self._schedule(),
        }
        return checkpoint.save(self.config.run_dir, progress.step, groups, state, ranks=ranks)

    def copy_and_prune(self, path: Path) -> None:
        config = self.config
        checkpoint.prune(config.run_dir, config.max_ckpt_to_keep)
        if config.checkpoint_config.output_dir:
            checkpoint.copy_to(path, config.checkpoint_copy_dir)
            checkpoint.prune(config.checkpoint_copy_dir, config.max_ckpt_to_keep)

    def _state(self) -> tuple[checkpoint.Groups, dict[str, Any], Callable[[Path], checkpoint.Written] | None]:
        """What a checkpoint holds: from this process itself, or written by all that hold a part."""
        policy, reference = self.roles.actor_train, self.roles.reference
        if not isinstance(policy, ActorWorker):
            return {}, policy.numbers(), self._write_pieces
        groups, numbers = policy.state()
        if isinstance(reference, ActorWorker) and self.config.sync_ref_model:
            groups["reference"] = dict(reference.weights())
        return groups, numbers, None

    def _write_pieces(self, folder: Path | None) -> checkpoint.Written:
        policy, reference = self.roles.actor_train, self.roles.reference
        assert not isinstance(policy, ActorWorker)
        folder = Path(self.roles.told(folder))
        written = policy.write_state(folder)
        if reference and self.config.sync_ref_model:
            assert not isinstance(reference, ActorWorker)
            written |= reference.write_weights(folder, "reference")
        return written

    def _schedule(self) -> dict[str, Any]:
        """What may change at a resume, and is told when it does."""
        actor = self.config.actor_train
        free = {"max_grad_norm": self.config.max_grad_norm, "dtype": actor.model_args.dtype}
        return {"optimizer steps": self.total_steps, **actor.training_args.model_dump(mode="json"), **free}
